"""The predictor of self-pretraining: what it reads, what its loss is of, which models it takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lra.tasks.batches import TokenArrays
from lra.tasks.hidden import NOTHING, HiddenBatch, HiddenTokens, Objective
from lra.training.evaluate import loss_and_hits
from models.layers import Embedding, RealInput
from models.predictor import Predictor, reads_ahead
from tests.models.test_models import MODELS, SMALL, build, options_of

SHORT = replace(SMALL, max_length=24, num_layers=1)


def make(
    name: str = "softmax", shape: Any = SHORT, *, reads_mask: bool = True, **knobs: Any
) -> Predictor:
    """In float64, with all parameters moved from their initial values."""
    encoder = build(name, shape, **knobs).encoder
    return Predictor(encoder, shape, reads_mask=reads_mask).double()


def hide(rows: list[list[np.ndarray]], objective: Objective = "masked") -> HiddenTokens:
    examples = TokenArrays.of(rows, len(rows[0]), SHORT.max_length)
    examples.folder = Path("memory")
    mask_id = SHORT.vocab_size
    return HiddenTokens(examples, objective, mask_id=mask_id, mask_rate=0.4, seed=0, part=0)


def questions(*lengths: tuple[int, ...], objective: Objective = "masked") -> HiddenBatch:
    rng = np.random.default_rng(0)
    rows = [[rng.integers(0, 11, n).astype(np.uint8) for n in row] for row in lengths]
    return hide(rows, objective).batch(np.arange(len(lengths)), pad_to=SHORT.max_length)


def losses(predictor: Predictor, batch: HiddenBatch) -> Tensor:
    return loss_and_hits(predictor(*batch.inputs), batch.labels_B)[0]


# --- which rows, which loss ---


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_logits_are_of_the_rows_that_are_asked_for(pooling: Any) -> None:
    predictor = make(shape=replace(SHORT, pooling=pooling)).eval()
    batch = questions((24, 9), (5, 0), (1, 17))
    logits_BSMV = predictor(*batch.inputs)
    assert logits_BSMV.shape == (*batch.labels_B.shape, SHORT.vocab_size - 1)
    total = 0.0
    for n, s in np.ndindex(3, 2):
        tokens_1L, length = batch.tokens_BSL[n, s : s + 1], int(batch.lengths_BS[n, s])
        mask_1L = torch.arange(SHORT.max_length)[None] < length
        x_LD = predictor.encoder(tokens_1L, mask_1L)[0, int(pooling == "cls") :]
        for m, label in enumerate(batch.labels_B[n, s].tolist()):
            if label != NOTHING:
                row_V = predictor.head(x_LD[batch.places_BSM[n, s, m]])
                torch.testing.assert_close(row_V, logits_BSMV[n, s, m])
                total -= float(row_V.log_softmax(dim=0)[label].detach())
    assert losses(predictor, batch).sum().item() == pytest.approx(total, rel=1e-6)


def test_nothing_but_the_answers_has_a_gradient() -> None:
    predictor, batch = make(), questions((24, 9), (5, 0), (1, 17))
    logits_BSMV = predictor(*batch.inputs)
    logits_BSMV.retain_grad()
    losses_B, hits_B = loss_and_hits(logits_BSMV, batch.labels_B)
    losses_B.sum().backward()
    assert logits_BSMV.grad is not None
    assert torch.equal(logits_BSMV.grad.any(dim=-1), batch.labels_B != NOTHING)
    right = logits_BSMV.argmax(dim=-1) == batch.labels_B
    assert torch.equal(hits_B, right.sum(dim=(1, 2)))


def test_what_was_hidden_changes_nothing_that_is_read() -> None:
    """A model that could see the answer would learn to copy it."""
    predictor = make().eval()
    row_L = np.random.default_rng(1).integers(0, 11, 24).astype(np.uint8)
    places = hide([[row_L]]).hidden(0, 0, 0)
    other_L = row_L.copy()
    other_L[places] = (row_L[places] + 1) % 11
    first, second = (hide([[x]]).batch(np.arange(1)) for x in (row_L, other_L))
    assert len(places) > 5 and (first.labels_B != second.labels_B).all()
    assert torch.equal(predictor(*first.inputs), predictor(*second.inputs))


@pytest.mark.parametrize("objective", ["masked", "next"])
def test_any_split_of_a_batch_gives_the_same_gradient(objective: Objective) -> None:
    batch = questions((24, 9), (5, 0), (1, 17), (0, 0), (24, 24), objective=objective)
    predictor = make(reads_mask=objective == "masked")

    def gradients(size: int) -> list[Tensor]:
        predictor.zero_grad()
        for part in batch.split(size):
            (losses(predictor, part).sum() / batch.num_answers).backward()
        return [p.grad.clone() for p in predictor.parameters() if p.grad is not None]

    whole = gradients(5)
    for size in (1, 2, 3):
        for a, b in zip(whole, gradients(size), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


# --- the mask symbol ---


def test_a_hidden_symbol_is_a_vector_of_its_own() -> None:
    torch.manual_seed(0)
    embedding = Embedding(replace(SHORT, pooling="cls", embedding_scale=True)).eval()
    for parameter in embedding.parameters():
        torch.nn.init.normal_(parameter)
    tokens_BL = torch.randint(1, 12, (3, 24))
    mask_BL = torch.ones(3, 25, dtype=torch.bool)
    plain = embedding(tokens_BL, mask_BL)
    before = {name: value.clone() for name, value in embedding.state_dict().items()}
    embedding.add_mask_symbol()
    assert torch.equal(embedding(tokens_BL, mask_BL), plain)  # as long as nothing is hidden
    assert embedding.mask_symbol is not None and 0.5 < embedding.mask_symbol.std().item() < 1.5
    after = embedding.state_dict()
    assert after.keys() - before.keys() == {"mask_symbol"}
    assert all(torch.equal(after[name], value) for name, value in before.items())
    is_hidden_BL = torch.rand(3, 24) < 0.5
    hidden = embedding(tokens_BL.masked_fill(is_hidden_BL, 12), mask_BL)
    table_VD = torch.cat([embedding.tokens.weight, embedding.mask_symbol[None]])
    rows = embedding.class_token.expand(3, 1, -1), table_VD[tokens_BL.masked_fill(is_hidden_BL, 12)]
    expected = torch.cat(rows, dim=1) * 16**0.5 + embedding.positions
    torch.testing.assert_close(hidden, embedding.norm(expected))


def test_a_hidden_pixel_is_the_number_0_and_a_bit() -> None:
    """As the paper's code has it: two inputs, the normalised value and whether it is hidden."""
    shape = replace(SHORT, input="real", input_mean=0.4, input_std=0.3, positions="none")
    torch.manual_seed(0)
    embedding = Embedding(shape).double().eval()
    for parameter in embedding.parameters():
        torch.nn.init.normal_(parameter)
    embedding.add_mask_symbol()
    tokens_BL = torch.randint(1, 12, (3, 24))
    is_hidden_BL = torch.rand(3, 24) < 0.5
    real = embedding.tokens
    assert isinstance(real, RealInput) and embedding.mask_symbol is not None
    value_BL = ((tokens_BL - 1).double() / 10 - 0.4) / 0.3
    value_BL = value_BL.masked_fill(is_hidden_BL, 0)
    naive = torch.nn.Linear(2, 16).double()
    with torch.no_grad():
        naive.weight.copy_(torch.stack([real.weight, embedding.mask_symbol], dim=1))
        naive.bias.copy_(real.bias)
    expected = embedding.norm(naive(torch.stack([value_BL, is_hidden_BL.double()], dim=-1)))
    found = embedding(tokens_BL.masked_fill(is_hidden_BL, 12), torch.ones_like(is_hidden_BL))
    torch.testing.assert_close(found, expected)
    # The gradients as well: of the bit's weight from hidden pixels alone, of the value's from the
    # others.
    weight_BLD = torch.randn(3, 24, 16, dtype=torch.float64)
    (found * weight_BLD).sum().backward()
    (expected * weight_BLD).sum().backward()
    own = torch.stack([real.weight.grad, embedding.mask_symbol.grad], dim=1)  # type: ignore[list-item]
    torch.testing.assert_close(own, naive.weight.grad)
    torch.testing.assert_close(real.bias.grad, naive.bias.grad)


# --- every model ---


TELLING = sorted({*MODELS} - {"none"})  # at a hidden token none hears nothing of the others


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("name", TELLING)
def test_hidden_tokens_train_every_parameter_of_every_model(name: str, pooling: Any) -> None:
    predictor = make(name, replace(SHORT, num_layers=2, pooling=pooling))
    losses(predictor, questions((24, 9), (5, 0), (1, 17))).sum().backward()
    for key, parameter in predictor.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), key
        assert parameter.grad.any(), key


def knobs_of(name: str) -> dict[str, dict[str, Any]]:
    """Settings of a model in which it cannot see ahead, and in which it can; by a word for each."""
    found: dict[str, dict[str, Any]] = {"causal": {"causal": True}, "both": {"causal": False}}
    if name == "sparse":  # whose patterns are of the past, but for a position that stands first
        found["both"]["pooling"] = "cls"
    if "bidirectional" in options_of(name):
        found["causal"]["bidirectional"] = False
        found["both"]["bidirectional"] = True
    return found


CAUSAL = ["conv", "linear", "local", "longformer", "lru", "luna", "mega", "performer", "s4d", "s5",
          "softmax", "sparse", "synthesizer"]  # fmt: skip


@pytest.mark.parametrize("name", TELLING)
def test_which_models_can_tell_the_next_token(name: str) -> None:
    shape = replace(SHORT, pooling="mean", max_length=48)
    if name in CAUSAL:
        causal = build(name, shape, **knobs_of(name)["causal"]).float().encoder
        assert not reads_ahead(causal)
        predictor = Predictor(causal, shape, reads_mask=False).double()
        batch = questions((24, 9), (5, 0), (1, 17), objective="next")
        losses(predictor, batch).sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in predictor.parameters())
        # And what it says of one place is the same whatever comes after it.
        before = predictor.eval()(*batch.inputs)
        changed = batch.tokens_BSL.clone()
        changed[0, 0, 12:] = changed[0, 0, 12:] % 11 + 1
        after = predictor(changed, *batch.inputs[1:])
        torch.testing.assert_close(after[0, 0, :12], before[0, 0, :12], rtol=1e-9, atol=1e-9)
        assert (after[0, 0, 12] != before[0, 0, 12]).any()
    else:
        with pytest.raises(ValueError, match="causal"):
            build(name, shape, **knobs_of(name)["causal"])
    both = knobs_of(name)["both"]
    shape = replace(shape, num_layers=2, pooling=both.pop("pooling", "mean"))
    assert reads_ahead(build(name, shape, **both).float().encoder)


def test_a_faint_influence_of_later_tokens_is_noticed() -> None:
    """At the arena's lengths a fresh model's token hears less than a thousandth of each other."""
    encoder = build("softmax", replace(SHORT, pooling="mean"), shake=0.0).encoder
    with torch.no_grad():
        for block in encoder.blocks:
            block.mixer.out.weight *= 1e-4
    assert reads_ahead(encoder.float())


@pytest.mark.parametrize(
    ("name", "knobs"),
    [
        ("local", {"pattern": "blocks", "window": 64, "block_size": 8}),
        ("local", {"pattern": "blocks", "window": 64, "block_size": 3}),
        ("mega", {"bidirectional": False, "chunk_size": 24}),
        ("mega", {"bidirectional": False, "chunk_size": 8}),
    ],
)
@pytest.mark.parametrize("max_length", [24, 48])
def test_a_model_that_sees_to_the_end_of_a_block_sees_ahead(
    name: str, knobs: dict[str, Any], max_length: int
) -> None:
    shape = replace(SHORT, pooling="mean", max_length=max_length)
    assert reads_ahead(build(name, shape, **knobs).encoder)


@pytest.mark.parametrize("block_size", [2, 3, 550, 1200])
def test_a_model_that_steps_over_what_lies_near_sees_ahead(block_size: int) -> None:
    """Of blocks of 2 the nearest position that is read lies 551 off, beyond the usual probe."""
    shape = replace(SHORT, pooling="mean", max_length=1100)
    encoder = build("local", shape, pattern="strided", window=64, block_size=block_size).encoder
    assert encoder.stride == 1100 // block_size + 1 and reads_ahead(encoder)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_a_model_that_sees_one_token_ahead_sees_ahead(pooling: Any) -> None:
    """A class token in front moves every token's row by one."""
    encoder = build("local", replace(SHORT, pooling=pooling), window=2).encoder
    assert encoder.reach == [1] and reads_ahead(encoder)


def test_looking_for_it_leaves_the_model_as_it_was() -> None:
    for training in (True, False):
        model = build("performer", replace(SHORT, pooling="mean")).train(training)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        state = torch.get_rng_state()
        reads_ahead(model.encoder)
        assert model.encoder.training == training and torch.equal(state, torch.get_rng_state())
        after = model.state_dict()
        assert all(torch.equal(after[name], value) for name, value in before.items())
    for length in (1, 2, 3):
        shape = replace(SHORT, pooling="mean", max_length=length)
        assert not reads_ahead(build("softmax", shape, causal=True).encoder)
        assert reads_ahead(build("softmax", shape).encoder) == (length > 1)


def test_an_encoder_without_a_row_for_each_token_is_refused() -> None:
    shape = replace(SHORT, pooling="mean")
    encoder = build("luna", shape, pool_memory=True).encoder
    for reads_mask in (True, False):
        with pytest.raises(ValueError, match=r"model\.pool_memory=true\?.*use pretrain=none"):
            Predictor(encoder, shape, reads_mask=reads_mask)
    assert encoder.embedding.mask_symbol is None
