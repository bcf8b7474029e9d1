"""Synthesizer: naive version in every mode, one softmax for all examples, options, sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from models import synthesizer
from models.shape import Shape
from models.synthesizer import BLOCK_SIZE, SynthesizerAttention, spread
from tests.references.synthesizer import synthesizer_attention

SMALL = Shape(vocab_size=9, max_length=14, d_model=12, num_heads=2)
MODES = (
    "dense",
    "factorized_dense",
    "random",
    "factorized_random",
    "dense+random",
    "random+factorized_random",
    "factorized_dense+factorized_random",
    "factorized_random+factorized_dense+dense+random",
)


def mixer(mode: str, shape: Shape = SMALL, **knobs: Any) -> SynthesizerAttention:
    """Large parameters, so that attention is far from uniform and every part shows."""
    torch.manual_seed(0)
    model = SynthesizerAttention(shape, mode=mode, **knobs).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.5 * torch.randn_like(parameter)
    return model


def batch(*lengths: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x_BLD = torch.randn(len(lengths), max(lengths), 12, dtype=torch.float64)
    mask_BL = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return x_BLD.masked_fill(~mask_BL[..., None], 1e3), mask_BL


def check_against_naive(model: SynthesizerAttention) -> None:
    x_BLD, mask_BL = batch(11, 7, 1)
    x_BLD.requires_grad_()
    weight_BLD = torch.randn_like(x_BLD) * mask_BL[..., None]
    ours_BLD, naive_BLD = model(x_BLD, mask_BL), synthesizer_attention(model, x_BLD, mask_BL)
    torch.testing.assert_close(ours_BLD[mask_BL], naive_BLD[mask_BL], rtol=1e-10, atol=1e-11)
    leaves = [x_BLD, *model.parameters()]
    for ours, naive in zip(
        torch.autograd.grad((ours_BLD * weight_BLD).sum(), leaves),
        torch.autograd.grad((naive_BLD * weight_BLD).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(ours, naive, rtol=1e-9, atol=1e-9)
        assert ours.any()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dot_product", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_equals_the_naive_version_with_gradients(
    mode: str, dot_product: bool, causal: bool
) -> None:
    check_against_naive(mixer(mode, dot_product=dot_product, causal=causal))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mode", [MODES[-1], "random"])
def test_queries_may_be_worked_on_a_few_at_a_time(
    mode: str, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mixer(mode, replace(SMALL, attention_dropout=0.3), dot_product=True, causal=causal)
    x_BLD, mask_BL = batch(11, 7, 1)
    x_BLD.requires_grad_()
    results = []
    for block_size in (2**20, 3 * 2 * 11 * 4 + 5, 1):  # all 11, 4, 1
        monkeypatch.setitem(BLOCK_SIZE, "cpu", block_size)
        y_BLD = model(x_BLD, mask_BL)
        results.append([y_BLD, *torch.autograd.grad(y_BLD.sum(), [x_BLD, *model.parameters()])])
    for others in zip(*results, strict=True):
        for other in others[1:]:
            torch.testing.assert_close(other, others[0])
    # With dropout, the second pass drops what the first one did: a number times two, say, changes
    # the result by what its gradient says, as the result is linear in the values.
    model.train()
    torch.manual_seed(3)
    y_BLD = model(x_BLD, mask_BL)
    (gradient,) = torch.autograd.grad(y_BLD.sum(), model.value.weight)
    with torch.no_grad():
        model.value.weight.mul_(2)
        torch.manual_seed(3)
        change = model(x_BLD, mask_BL).sum() - y_BLD.sum()
    torch.testing.assert_close(change, (gradient * model.value.weight).sum() / 2)


@pytest.mark.parametrize("block_size", [2**20, 1], ids=["at_once", "by_rows"])
def test_compiled_code_gives_the_same_at_every_length(
    block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(synthesizer, "BLOCK_SIZE", {"cpu": block_size})
    torch.compiler.reset()
    model = mixer("dense+random", dot_product=True)
    compiled = torch.compile(model, backend="eager", dynamic=True)
    for lengths in ((11, 7), (14, 3)):
        x_BLD, mask_BL = batch(*lengths)
        results = []
        for run in (compiled, model):
            y_BLD = run(x_BLD, mask_BL)
            results.append([y_BLD, *torch.autograd.grad(y_BLD.sum(), list(model.parameters()))])
        torch.testing.assert_close(*results)


def test_equals_the_naive_version_in_other_shapes() -> None:
    shape = replace(SMALL, head_dim=5, num_heads=3, attention_bias=False, pooling="cls")
    check_against_naive(mixer(MODES[-1], shape, rank=3, dot_product=True))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("largest", [50.0, 70.0, 3000.0])
def test_logits_far_apart_leave_no_row_to_padding(
    largest: float, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond float32's range one softmax for all would leave short rows nothing."""
    model = mixer("random", causal=causal)
    with torch.no_grad():
        model.random_HMM[..., 8] = largest  # behind the end of the second row
    x_BLD, mask_BL = batch(11, 7)
    expected = synthesizer_attention(model, x_BLD, mask_BL)[1, :7]
    torch.testing.assert_close(model(x_BLD, mask_BL)[1, :7], expected, rtol=1e-10, atol=1e-11)
    y_BLD = model.float()(x_BLD.float(), mask_BL)
    torch.testing.assert_close(y_BLD[1, :7].double(), expected, rtol=1e-4, atol=1e-5)
    # Other devices, which are asked for no value, give the same, beside a row of padding too.
    monkeypatch.setattr(synthesizer, "has_fast_path", lambda _: False)
    x_BLD = torch.cat([x_BLD.float(), x_BLD[:1].float()])
    other_BLD = model(x_BLD, torch.cat([mask_BL, ~mask_BL[:1]]))
    torch.testing.assert_close(other_BLD[:2][mask_BL], y_BLD[mask_BL], rtol=1e-4, atol=1e-5)
    assert other_BLD.isfinite().all()


def test_spread_is_that_of_the_widest_row() -> None:
    assert spread(torch.tensor([[[1.0, 2.0], [5.0, 1.5]]])) == 3.5


@pytest.mark.parametrize("mode", ["factorized_random", "dense"])
def test_dropout_acts_in_training_only(mode: str) -> None:
    shape = replace(SMALL, attention_dropout=0.5)
    model = mixer(mode, shape)
    rows = batch(9)
    assert torch.equal(model(*rows), model(*rows))
    model.train()
    with torch.no_grad():
        ys = torch.stack([model(*rows) for _ in range(400)])
        assert not torch.equal(ys[0], ys[1])
        # Weights keep their expectation.
        error = (ys.mean(dim=0) - model.eval()(*rows)).abs() / (ys.std(dim=0) / 400**0.5)
    assert float(error.max()) < 5


def test_tables_start_as_in_the_arena() -> None:
    shape = Shape(vocab_size=9, max_length=200, pooling="cls", num_heads=4)
    model = SynthesizerAttention(shape, mode="random+factorized_random+factorized_dense", rank=7)
    assert model.random_HMM.shape == (4, 201, 201) and model.random_HMR.shape == (4, 201, 7)
    for table, extent in (
        (model.random_HMM, 402),
        (model.random_HMR, 208),
        (model.random_HRM, 208),
    ):
        assert float(table.detach().abs().max()) == pytest.approx(
            (6 / (4 * extent)) ** 0.5, rel=0.01
        )
    assert (model.factor_a.row.out_features, model.factor_b.row.out_features) == (14, 15)


def test_factors_suffice_for_every_length() -> None:
    for length in range(1, 40):
        shape = Shape(vocab_size=9, max_length=length, d_model=4, num_heads=1)
        model = SynthesizerAttention(shape, mode="factorized_dense")
        a, b = model.factor_a.row.out_features, model.factor_b.row.out_features
        assert a * b >= length > (a - 1) * b
        mask_BL = torch.ones(1, length, dtype=torch.bool)
        assert model(torch.randn(1, length, 4), mask_BL).shape == (1, length, 4)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"mode": "rand"}, "model.mode='rand': expected .* dense, factorized_dense, random"),
        ({"mode": ""}, "model.mode='': expected one or several of"),
        ({"mode": "dense+dense"}, r"model.mode='dense\+dense': expected"),
        ({"rank": 0}, "model.rank=0: expected at least 1"),
        ({"rank": 4, "mode": "random+dense"}, "model.rank=4: acts only .*mode=factorized_random"),
    ],
)
def test_refuses(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SynthesizerAttention(SMALL, **knobs)
