"""Performer: its options against the naive version, random features, causal forms, refusals."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from models.kernels import CHUNK_LENGTH
from models.performer import PerformerAttention, orthogonal_rows
from models.shape import Shape
from models.softmax import SoftmaxAttention
from tests.models.test_models import largest_difference
from tests.references.performer import performer_attention

SHAPE = Shape(
    vocab_size=9, max_length=200, d_model=12, num_heads=3, dropout=0.0, attention_dropout=0.0
)
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "few": {"num_features": 3},
    "epsilon": {"epsilon": 0.1},
    "independent": {"orthogonal": False},
    "same_norms": {"ortho_scaling": 1},
    "trigonometric": {"features": "trigonometric"},
    "relu": {"kernel": "relu", "num_features": 20},
    "relu_columns": {"kernel": "relu", "num_features": None, "epsilon": 0.1},
    "scale_twice": {"scale_twice": True, "epsilon": 1e-4},
    "padded_keys": {"padded_keys": True, "epsilon": 1e-2},
}
CAUSAL = [name for name in OPTIONS if name not in ("trigonometric", "padded_keys")]
FORMS = [(name, False) for name in OPTIONS] + [(name, True) for name in CAUSAL]


def build(shape: Shape = SHAPE, **knobs: Any) -> PerformerAttention:
    torch.manual_seed(0)
    return PerformerAttention(shape, **{"num_features": 16} | knobs).double()


def rows(*lengths: int, scale: float = 2.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x_BLD = scale * torch.randn(len(lengths), max(lengths), 12, generator=generator).double()
    return x_BLD.requires_grad_(), torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


@pytest.mark.parametrize("name, causal", FORMS)
def test_equals_the_naive_version_with_gradients(name: str, causal: bool) -> None:
    mixer = build(**OPTIONS[name], causal=causal)
    x_BLD, mask_BL = rows(66, 9, 1)
    results = []
    for y_BLD in (mixer(x_BLD, mask_BL), performer_attention(mixer, x_BLD, mask_BL)):
        y_ND = y_BLD[mask_BL]
        weight_ND = torch.randn(y_ND.shape, generator=torch.Generator().manual_seed(2)).double()
        leaves = [x_BLD, *mixer.parameters()]
        results.append([y_ND, *torch.autograd.grad((y_ND * weight_ND).sum(), leaves)])
    for ours, naive in zip(*results, strict=True):
        assert largest_difference(ours, naive) < 1e-9


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "default"])
def test_every_option_changes_the_output(name: str) -> None:
    x_BLD, mask_BL = rows(20, 9)
    plain, changed = build(), build(**OPTIONS[name])
    changed.qkv, changed.out = plain.qkv, plain.out
    if name in ("epsilon", "trigonometric", "scale_twice", "padded_keys"):
        assert torch.equal(changed.projection_MK, plain.projection_MK)
    real = changed(x_BLD, mask_BL)[mask_BL], plain(x_BLD, mask_BL)[mask_BL]
    assert largest_difference(*real) > 1e-3


# What the contracts of all models ask of the default is asked of the other options here.


@pytest.mark.parametrize("name, causal", [form for form in FORMS if form[0] != "padded_keys"])
def test_neither_neighbours_nor_padding_change_a_row(name: str, causal: bool) -> None:
    mixer = build(**OPTIONS[name], causal=causal)
    x_BLD, mask_BL = rows(40, 9, 1)
    x_BLD = torch.where(mask_BL[..., None], x_BLD, 1e3)
    together_BLD = mixer(x_BLD, mask_BL)
    for b, n in enumerate((40, 9, 1)):
        alone_BLD = mixer(x_BLD[b : b + 1, :n], mask_BL[b : b + 1, :n])
        assert largest_difference(alone_BLD, together_BLD[b : b + 1, :n]) < 1e-10


def test_padded_keys_count_as_tokens_of_zeros() -> None:
    mixer = build(**OPTIONS["padded_keys"])
    plain = build(epsilon=1e-2)
    x_BLD, mask_BL = rows(40, 9)
    with torch.no_grad():
        mixer.qkv.bias.zero_()
        plain.qkv.bias.zero_()
    zeros_BLD = x_BLD * mask_BL[..., None]
    expected_BLD = plain(zeros_BLD, torch.ones_like(mask_BL))
    assert largest_difference(mixer(x_BLD, mask_BL)[1, :9], expected_BLD[1, :9]) < 1e-12
    assert largest_difference(plain(x_BLD, mask_BL)[1, :9], expected_BLD[1, :9]) > 1e-3


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0, 1000.0])
@pytest.mark.parametrize("name, causal", FORMS)
def test_any_size_of_inputs_gives_finite_numbers(name: str, causal: bool, scale: float) -> None:
    mixer = build(**OPTIONS[name], causal=causal).float()
    x_BLD, mask_BL = rows(70, 9, 1, scale=scale)
    mask_BL[2] = False
    x_BLD = x_BLD.float().detach().requires_grad_()
    y_BLD = mixer(x_BLD, mask_BL)
    assert y_BLD.isfinite().all()
    (gradient_BLD,) = torch.autograd.grad(y_BLD.sum(), [x_BLD])
    assert gradient_BLD.isfinite().all()
    assert torch.equal(y_BLD[2], mixer.out.bias.expand(70, 12)) or mixer.padded_keys


@pytest.mark.parametrize("scale", [1.0, 30.0, 1000.0])
@pytest.mark.parametrize("num_features", [1, 2, 64])
@pytest.mark.parametrize("head_dim", [4, 128, 256])
def test_causal_attention_is_as_exact_in_float32(
    head_dim: int, num_features: int, scale: float
) -> None:
    """Its keys are not scaled by the largest exponent, as those of other rows are."""
    shape = replace(SHAPE, head_dim=head_dim)
    x_BLD, mask_BL = rows(70, 70, scale=scale)
    results = []
    for dtype in (torch.float32, torch.float64):
        mixer = build(shape, num_features=num_features, causal=True).to(dtype)
        results.append(mixer(x_BLD.to(dtype), mask_BL).double())
    error = largest_difference(*results)
    bidirectional = []
    for dtype in (torch.float32, torch.float64):
        mixer = build(shape, num_features=num_features).to(dtype)
        bidirectional.append(mixer(x_BLD.to(dtype), mask_BL).double())
    assert error < 1e-5 + 10 * largest_difference(*bidirectional)


@pytest.mark.parametrize(
    "head_dim, num_features", [(160, 256), (161, 16), (224, 256), (256, 256), (512, 64), (2048, 64)]
)
def test_causal_heads_of_any_width_tell_their_keys_apart(head_dim: int, num_features: int) -> None:
    """Features of wide heads leave float32's range: keys became 0, a row the mean of its values."""
    torch.manual_seed(0)
    shape = replace(SHAPE, head_dim=head_dim, num_heads=1)
    mixer = PerformerAttention(shape, num_features=num_features, orthogonal=False, causal=True)
    x_BLD, mask_BL = rows(40, scale=1.7)  # keys and values of about unit variance
    naive_BLD = performer_attention(copy.deepcopy(mixer).double(), x_BLD, mask_BL).detach()
    x_BLD = x_BLD.detach().float().requires_grad_()
    y_BLD = mixer(x_BLD, mask_BL)
    assert y_BLD.dtype == torch.float32 and largest_difference(y_BLD, naive_BLD) < 1e-5
    (gradient_BLD,) = torch.autograd.grad(y_BLD.square().sum(), [x_BLD])
    assert gradient_BLD.isfinite().all() and gradient_BLD.any(dim=2).all()
    state, steps = mixer.start(1), []
    for x_B1D in x_BLD.split(1, dim=1):
        y_B1D, state = mixer.step(x_B1D, state)
        steps.append(y_B1D)
    assert largest_difference(torch.cat(steps, dim=1), naive_BLD) < 1e-5


def test_heads_too_wide_for_causal_features_of_keys_are_refused() -> None:
    wide = replace(SHAPE, head_dim=2049)
    with pytest.raises(ValueError, match=r"^shape.head_dim=2049: expected at most 2048 with "):
        build(wide, causal=True)
    by_model = replace(SHAPE, d_model=2049, num_heads=1)
    with pytest.raises(ValueError, match=r"^shape.d_model / shape.num_heads=2049: expected at mo"):
        build(by_model, causal=True)
    build(wide, orthogonal=False)
    build(wide, causal=True, kernel="relu", num_features=None)


# Random features.


def test_more_features_come_nearer_to_softmax_attention() -> None:
    torch.manual_seed(0)
    exact = SoftmaxAttention(SHAPE).double()
    x_BLD, mask_BL = rows(12, 5, scale=1.0)
    errors: dict[str, list[float]] = {}
    for name, knobs in {
        "orthogonal": {},
        "independent": {"orthogonal": False},
        "trigonometric": {"features": "trigonometric"},
        "scale_twice": {"scale_twice": True},
    }.items():
        for num_features in (16, 16_384):
            mixer = build(num_features=num_features, epsilon=None, **knobs)
            mixer.qkv, mixer.out = exact.qkv, exact.out
            gap_ND = (mixer(x_BLD, mask_BL) - exact(x_BLD, mask_BL))[mask_BL]
            errors.setdefault(name, []).append(float(gap_ND.detach().abs().max()))
    for name in ("orthogonal", "independent", "trigonometric"):
        few, many = errors[name]
        assert many < 0.02 and many < few / 4, name
    assert errors["scale_twice"][1] > 0.03  # softmax of another temperature


def test_scaling_twice_is_softmax_with_the_width_of_a_head_in_place_of_its_root() -> None:
    exact = SoftmaxAttention(SHAPE).double()
    mixer = build(num_features=16_384, scale_twice=True)
    mixer.qkv.load_state_dict(exact.qkv.state_dict())
    with torch.no_grad():
        exact.qkv.weight[:12] /= math.sqrt(4)
        exact.qkv.bias[:12] /= math.sqrt(4)
    mixer.out = exact.out
    x_BLD, mask_BL = rows(40, scale=1.0)
    assert largest_difference(mixer(x_BLD, mask_BL), exact(x_BLD, mask_BL)) < 0.01


def test_orthogonal_rows_have_blocks_and_norms() -> None:
    torch.manual_seed(0)
    rows_MK = orthogonal_rows(40, 16, scaling=1).double()
    torch.testing.assert_close(
        rows_MK.norm(dim=1), torch.full((40,), 4.0).double(), rtol=1e-6, atol=0
    )
    for block in rows_MK.split(16):
        torch.testing.assert_close(
            block @ block.T, 16 * torch.eye(len(block)).double(), rtol=1e-5, atol=1e-5
        )
    assert (rows_MK[:16] @ rows_MK[16:32].T).abs().max() > 1
    rows_MK = orthogonal_rows(4000, 16, scaling=0)
    square_M = rows_MK.square().sum(dim=1)
    assert square_M.mean() == pytest.approx(16, rel=0.05)
    assert square_M.std() == pytest.approx(math.sqrt(2 * 16), rel=0.1)  # chi-square
    blocks_NKK = rows_MK.view(-1, 16, 16)
    assert blocks_NKK.mean(dim=0).abs().max() < 0.3  # every direction as often as its opposite
    assert (blocks_NKK.std(dim=0) - 1).abs().max() < 0.2


def test_features_come_from_the_seed_and_stay_in_the_state() -> None:
    def draw(seed: int) -> PerformerAttention:
        torch.manual_seed(seed)
        return PerformerAttention(SHAPE)

    first, again, other = draw(0), draw(0), draw(1)
    assert first.projection_MK.shape == (64, 4)
    assert torch.equal(first.projection_MK, again.projection_MK)
    assert not torch.equal(first.projection_MK, other.projection_MK)
    other.load_state_dict(first.state_dict())
    assert torch.equal(first.projection_MK, other.projection_MK)
    assert "projection_MK" not in dict(first.named_parameters())
    assert build(kernel="relu", num_features=None).projection_MK is None


# Causal attention.


@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_row_is_the_last_of_the_row_cut_there(name: str) -> None:
    causal, plain = build(**OPTIONS[name], causal=True), build(**OPTIONS[name])
    x_BLD, mask_BL = rows(70, 70)
    y_BLD = causal(x_BLD, mask_BL)
    for n in (1, 2, 30, 64, 65, 70):
        last_BD = plain(x_BLD[:, :n], mask_BL[:, :n])[:, -1]
        assert largest_difference(y_BLD[:, n - 1], last_BD) < 1e-10


@pytest.mark.parametrize(
    "length, name",
    [(n, "default") for n in (1, CHUNK_LENGTH - 1, CHUNK_LENGTH, 2 * CHUNK_LENGTH + 5)]
    + [(CHUNK_LENGTH + 1, name) for name in CAUSAL],
)
def test_parallel_and_step_by_step_forms_agree(length: int, name: str) -> None:
    mixer = build(**OPTIONS[name], causal=True)
    x_BLD, mask_BL = rows(length, length)
    state, steps = mixer.start(2), []
    for x_B1D in x_BLD.split(1, dim=1):
        y_B1D, state = mixer.step(x_B1D, state)
        steps.append(y_B1D)
    assert largest_difference(torch.cat(steps, dim=1), mixer(x_BLD, mask_BL)) < 1e-10
    started = mixer.start(2)
    assert state.sum_BHMJ.shape == started.sum_BHMJ.shape
    assert state.largest_BH11.shape == started.largest_BH11.shape


def test_later_keys_however_long_leave_earlier_rows_as_they_are() -> None:
    mixer = build(causal=True).float()
    x_BLD, mask_BL = rows(70)
    x_BLD = x_BLD.float().detach()
    before_BLD = mixer(x_BLD, mask_BL)
    x_BLD[:, 50] *= 1e4
    assert torch.equal(mixer(x_BLD, mask_BL)[:, :50], before_BLD[:, :50])


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"kernel": "exp"}, "kernel=exp: expected softmax or relu"),
        ({"features": "cosine"}, "features=cosine: expected positive or trigonometric"),
        ({"num_features": 0}, "num_features=0: expected at least 1"),
        ({"num_features": None}, "num_features=null: only with model.kernel=relu"),
        ({"ortho_scaling": 2}, "ortho_scaling=2: expected 0 or 1"),
        ({"ortho_scaling": 1, "orthogonal": False}, "ortho_scaling=1: acts only"),
        (
            {"ortho_scaling": 1, "kernel": "relu", "num_features": None},
            "ortho_scaling=1: acts only",
        ),
        (
            {"orthogonal": False, "kernel": "relu", "num_features": None},
            "orthogonal=false: acts only",
        ),
        ({"epsilon": 0.0}, "epsilon=0.0: expected more than 0"),
        ({"epsilon": 1e-60}, "epsilon=1e-60: expected more than 0, from 1.2e-38"),
        ({"epsilon": float("nan")}, "epsilon=nan: expected more than 0"),
        ({"epsilon": float("inf")}, "epsilon=inf: expected more than 0"),
        ({"epsilon": 0.1, "features": "trigonometric"}, "epsilon=0.1: acts only.*epsilon=null"),
        ({"kernel": "relu", "features": "trigonometric"}, "kernel=relu: .*trigonometric"),
        ({"kernel": "relu", "scale_twice": True}, "kernel=relu: .*set .*scale_twice=false"),
        (
            {"features": "trigonometric", "causal": True},
            "features=trigonometric with model.causal=true",
        ),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, dict) else "",
)
def test_options_out_of_range_are_refused(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^model.{message}"):
        build(**knobs)
