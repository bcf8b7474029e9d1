"""LRU: naive version in one direction and two, options, initial values, sizes, step by step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from models.classifier import Classifier
from models.dropout import TiedDropout
from models.encoder import Block, MixerBlock
from models.lru import LRU, LRUEncoder, ring
from models.norm import BatchNorm, NoNorm
from models.recurrence import GatedRecurrence
from models.shape import Shape
from tests.references.lru import lru

SMALL = Shape(
    vocab_size=9, max_length=64, d_model=8, d_ff=12, num_heads=1, num_layers=2, dropout=0.0
)


def encoder(shape: Shape = SMALL, *, shake: float = 0.1, **knobs: Any) -> LRUEncoder:
    torch.manual_seed(0)
    model = LRUEncoder(shape, **{"state_size": 6} | knobs).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += shake * torch.randn_like(parameter)
    return model


def mixer(**knobs: Any) -> GatedRecurrence:
    return encoder(**knobs).blocks[0].mixer


def batch(*lengths: int, length: int | None = None) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    length = max(lengths) if length is None else length
    x_BLD = torch.randn(
        len(lengths), length, SMALL.d_model, dtype=torch.float64, generator=generator
    )
    return x_BLD, torch.arange(length) < torch.tensor(lengths)[:, None]


@pytest.mark.parametrize("bidirectional", [False, True])
def test_equals_the_naive_version_with_gradients(bidirectional: bool) -> None:
    model = mixer(bidirectional=bidirectional)
    x_BLD, mask_BL = batch(40, 33, 5, 1, 0)
    x_BLD.requires_grad_()
    weight_BLD = torch.randn_like(x_BLD) * mask_BL[..., None]
    ours_BLD, naive_BLD = model(x_BLD, mask_BL), lru(model, x_BLD, mask_BL)
    torch.testing.assert_close(ours_BLD[mask_BL], naive_BLD[mask_BL], rtol=1e-11, atol=1e-11)
    leaves = [x_BLD, *model.parameters()]
    for ours, naive in zip(
        torch.autograd.grad((ours_BLD * weight_BLD).sum(), leaves),
        torch.autograd.grad((naive_BLD * weight_BLD).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(ours, naive, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("block", ["shared", "own"])
def test_neither_padding_nor_neighbours_change_a_row(block: Any, bidirectional: bool) -> None:
    model = encoder(block=block, bidirectional=bidirectional)
    lengths = (40, 33, 7, 1, 0)
    tokens_BL = torch.randint(1, 9, (5, 50))
    mask_BL = torch.arange(50) < torch.tensor(lengths)[:, None]
    together_BLD = model(tokens_BL, mask_BL)
    assert together_BLD.isfinite().all()
    for b, n in enumerate(lengths[:-1]):
        alone_BLD = model(tokens_BL[b : b + 1, :n], mask_BL[b : b + 1, :n])
        torch.testing.assert_close(alone_BLD[0], together_BLD[b, :n], rtol=1e-11, atol=1e-11)
    with torch.no_grad():
        model.embedding.tokens.weight[0] = 1e3
    after_BLD = model(tokens_BL * mask_BL, mask_BL)
    torch.testing.assert_close(after_BLD[mask_BL], together_BLD[mask_BL], rtol=1e-11, atol=1e-11)


def test_one_direction_sees_the_past_alone_and_two_see_all() -> None:
    x_BLD, mask_BL = batch(40)
    other_BLD = x_BLD.clone()
    other_BLD[0, 25] += 1
    for knobs, seen in (({}, 0), ({"causal": True}, 0), ({"bidirectional": True}, 25)):
        model = mixer(**knobs)
        changed_L = (model(other_BLD, mask_BL) != model(x_BLD, mask_BL))[0].any(dim=1)
        assert int(changed_L[:25].sum()) == seen and changed_L[25:].all()


def test_the_way_back_is_the_way_of_a_turned_sequence() -> None:
    system = mixer(bidirectional=True).system
    x_BLD, mask_BL = batch(40)
    with torch.no_grad():
        before_BLD = system(x_BLD, mask_BL)
        system.C.data, system.backward_C.data = system.backward_C.data, system.C.data
        turned_BLD = system(x_BLD.flip(1), mask_BL).flip(1)
    torch.testing.assert_close(turned_BLD, before_BLD, rtol=1e-12, atol=1e-12)


def test_steps_equal_the_parallel_form() -> None:
    model = mixer(causal=True)
    x_BLD, mask_BL = batch(40, 40)
    state_2NB, rows = model.start(2), []
    for t in range(40):
        y_B1D, state_2NB = model.step(x_BLD[:, t : t + 1], state_2NB)
        rows.append(y_B1D)
        assert state_2NB.shape == (2, 6, 2)
    torch.testing.assert_close(
        torch.cat(rows, dim=1), model(x_BLD, mask_BL), rtol=1e-10, atol=1e-10
    )
    with pytest.raises(ValueError, match="model.bidirectional=true: positions cannot be"):
        mixer(bidirectional=True).start(2)


def test_steps_in_low_precision_keep_a_float32_state() -> None:
    model = mixer().bfloat16()
    x_BLD, mask_BL = batch(40)
    state_2NB, rows = model.start(1), []
    for t in range(40):
        y_B1D, state_2NB = model.step(x_BLD[:, t : t + 1].bfloat16(), state_2NB)
        rows.append(y_B1D)
    assert state_2NB.dtype == torch.float32 and y_B1D.dtype == torch.bfloat16
    y_BLD = model(x_BLD.bfloat16(), mask_BL)
    torch.testing.assert_close(torch.cat(rows, dim=1), y_BLD, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_own_layers_are_the_mixer_with_one_norm(norm: Any) -> None:
    shape = replace(SMALL, norm=norm, norm_kind="batch")
    model = encoder(shape, block="own", norm_eps=1e-3)
    assert isinstance(model.norm, NoNorm)
    tokens_BL = torch.randint(1, 9, (3, 20))
    mask_BL = torch.arange(20) < torch.tensor([[20], [11], [4]])
    x_BLD = model.embedding(tokens_BL, mask_BL)
    for block in model.blocks:
        assert isinstance(block, MixerBlock) and isinstance(block.norm, BatchNorm)
        if norm == "pre":
            x_BLD = x_BLD + block.mixer(block.norm(x_BLD, mask_BL), mask_BL)
        else:
            x_BLD = block.norm(x_BLD + block.mixer(x_BLD, mask_BL), mask_BL)
    assert torch.equal(model(tokens_BL, mask_BL), x_BLD)
    shared = encoder(shape)
    assert isinstance(shared.blocks[0], Block) and isinstance(shared.norm, NoNorm) == (
        norm == "post"
    )


@pytest.mark.parametrize("kind", ["layer", "batch", "scale", "rms"])
def test_norm_eps_reaches_every_norm(kind: Any) -> None:
    for block in ("shared", "own"):
        shape = replace(SMALL, norm_kind=kind, embedding_norm=True)
        model = LRUEncoder(shape, block=block, norm_eps=1e-3)
        found = [part.eps for part in model.modules() if hasattr(part, "eps")]
        assert set(found) == {1e-3} and len(found) == (1 + 2 if block == "own" else 1 + 4 + 1)


def test_dropout_of_the_mixer_and_of_an_own_layer_may_be_tied() -> None:
    shape = replace(SMALL, dropout=0.5)
    for tied in (True, False):
        block = encoder(shape, block="own", tie_dropout=tied).blocks[0].train()
        assert [type(part) is TiedDropout for part in (block.dropout, block.mixer.dropout)] == [
            tied
        ] * 2
        assert block.dropout.p == block.mixer.dropout.p == 0.5
        x_BLD, mask_BL = batch(40)
        block.mixer.dropout.p = 0.0
        dropped_LD = ((block(x_BLD, mask_BL) - x_BLD) == 0)[0]
        assert dropped_LD.any()
        assert torch.equal(dropped_LD, dropped_LD[:1].expand_as(dropped_LD)) == tied


@torch.no_grad()
def test_initial_decays_fill_the_ring_evenly() -> None:
    torch.manual_seed(0)
    system = LRU(
        replace(SMALL, d_model=64),
        state_size=4000,
        r_min=0.5,
        r_max=0.9,
        max_phase=2.0,
        bidirectional=True,
    )
    decay_N, input_ND = system.decay_and_input()
    square_N, phase_N = decay_N.abs().square(), decay_N.angle()
    for value_N, low, high in ((square_N, 0.25, 0.81), (phase_N, 0.0, 2.0)):
        share_N = ((value_N - low) / (high - low)).sort().values
        # The largest gap between the sample's distribution and the uniform one.
        assert (share_N - torch.linspace(0, 1, 4000)).abs().max() < 0.03
    assert abs(torch.corrcoef(torch.stack([square_N, phase_N]))[0, 1]) < 0.05
    torch.testing.assert_close(
        system.gamma_log.exp().double() ** 2, 1 - square_N, rtol=1e-4, atol=0
    )
    assert float(system.B.std()) == pytest.approx((1 / 128) ** 0.5, rel=0.02)
    for C in (system.C, system.backward_C):
        assert float(C.std()) == pytest.approx(4000**-0.5, rel=0.02)
    assert 0.8 < float(system.D.std()) < 1.2
    # States have about the variance of the inputs that reach them before the scaling by gamma.
    assert input_ND.abs().square().sum(dim=1).mean().item() == pytest.approx(
        float((1 - square_N).mean()), rel=0.05
    )


def test_the_widest_ring_has_finite_logarithms() -> None:
    values = ring(
        torch.tensor([1e-6, 1 - 1e-6]), torch.tensor([1e-6, 1.0]), r_min=0, r_max=1, max_phase=6.28
    )
    assert all(value.isfinite().all() for value in values)


def test_sizes_are_those_of_the_reference() -> None:
    """Counted on the reference's own code; its linear encoder of one-hot rows has a bias."""
    shape = Shape(
        vocab_size=20, max_length=2048, d_model=256, num_layers=4, norm_kind="batch",
        positions="none", head_hidden=(),
    )  # fmt: skip
    cases = [
        (shape, 128, 10, 1_063_178 - 256),
        (replace(shape, vocab_size=135), 128, 2, 1_090_562 - 256),
        (replace(shape, vocab_size=257, input="real"), 128, 10, 1_058_314),
        (replace(shape, d_model=128, num_layers=6), 256, 10, 995_466 - 128),
    ]
    for chosen, state_size, num_classes, expected in cases:
        model = LRUEncoder(chosen, state_size=state_size, block="own")
        classifier = Classifier(model, chosen, num_classes)
        assert sum(parameter.numel() for parameter in classifier.parameters()) == expected


def test_groups_name_parameters_with_rates_of_their_own() -> None:
    system = mixer(bidirectional=True).system
    assert system.GROUPS == {
        "nu_log": "state", "theta_log": "state", "gamma_log": "state",
        "B": "input", "C": "output", "backward_C": "output",
    }  # fmt: skip
    assert {name for name, _ in system.named_parameters()} == {*system.GROUPS, "D"}


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"state_size": 0}, "model.state_size=0: expected at least 1"),
        ({"r_min": -0.1}, "model.r_min=-0.1, model.r_max=1.0: expected 0 <= r_min < r_max <= 1"),
        ({"r_min": 0.9, "r_max": 0.9}, "model.r_min=0.9, model.r_max=0.9"),
        ({"r_max": 1.01}, "model.r_max=1.01"),
        ({"r_min": float("nan")}, "model.r_min=nan"),
        ({"max_phase": 0.0}, "model.max_phase=0.0: expected more than 0"),
        ({"max_phase": float("inf")}, "model.max_phase=inf"),
        ({"block": "mine"}, "model.block='mine': expected shared or own"),
        ({"max_phase": 1e300}, "model.max_phase=1e\\+300: .* to 3.4e38"),
        ({"norm_eps": 0.0}, "model.norm_eps=0.0: expected more than 0"),
        ({"norm_eps": 1e-50}, "model.norm_eps=1e-50: expected more than 0, from 1.2e-38"),
        ({"norm_eps": float("nan")}, "model.norm_eps=nan: expected more than 0"),
        ({"norm_eps": float("inf")}, "model.norm_eps=inf: expected more than 0"),
        (
            {"causal": True, "bidirectional": True},
            "model.causal=true with model.bidirectional=true: .*bidirectional=false",
        ),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, dict) else "",
)
def test_values_out_of_range_are_refused(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LRUEncoder(SMALL, **knobs)


@pytest.mark.parametrize("pooling", ["cls", "first"])
def test_one_direction_cannot_be_read_at_its_first_position(pooling: Any) -> None:
    shape = replace(SMALL, pooling=pooling)
    with pytest.raises(ValueError, match=f"bidirectional=false with shape.pooling={pooling}"):
        LRUEncoder(shape)
    with pytest.raises(ValueError, match=f"causal=true with shape.pooling={pooling}"):
        LRUEncoder(shape, causal=True)
    LRUEncoder(shape, bidirectional=True)


@pytest.mark.parametrize(
    "knobs",
    [
        {"state_size": 7}, {"r_min": 0.5}, {"r_max": 0.5}, {"max_phase": 1.0},
        {"bidirectional": True}, {"block": "own"}, {"norm_eps": 0.1},
    ],
    ids=lambda knobs: "_".join(knobs),
)  # fmt: skip
def test_every_option_changes_the_output(knobs: dict[str, Any]) -> None:
    tokens_BL, mask_BL = torch.arange(8)[None] + 1, torch.ones(1, 8, dtype=torch.bool)
    difference = encoder(**knobs)(tokens_BL, mask_BL) - encoder()(tokens_BL, mask_BL)
    assert difference.abs().max() > 1e-3


def test_recomputed_and_without_gradient_it_is_the_same() -> None:
    model = mixer(bidirectional=True)
    x_BLD, mask_BL = batch(40, 9)
    x_BLD.requires_grad_()
    expected_BLD = model(x_BLD, mask_BL)
    (expected,) = torch.autograd.grad(expected_BLD.square().sum(), x_BLD)
    again_BLD = checkpoint(model, x_BLD, mask_BL, use_reentrant=False)
    (again,) = torch.autograd.grad(again_BLD.square().sum(), x_BLD)
    assert torch.equal(again_BLD, expected_BLD) and torch.equal(again, expected)
    with torch.inference_mode():
        assert torch.equal(model(x_BLD, mask_BL), expected_BLD)
    assert isinstance(model.out, nn.Linear)
    doubled = {name: 2 * value for name, value in model.named_parameters()}
    other_BLD = torch.func.functional_call(model, doubled, (x_BLD, mask_BL))
    assert not torch.equal(other_BLD, expected_BLD)
