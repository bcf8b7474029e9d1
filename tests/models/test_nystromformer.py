"""Nystrom attention: naive version, options, lengths and padding, low precision, sizes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.classifier import Classifier
from models.convolution import short_convolution
from models.encoder import make_encoder
from models.nystromformer import NystromAttention, inverse_times, segments
from models.shape import Shape
from models.softmax import SoftmaxAttention
from tests.references.nystromformer import nystrom_attention

SMALL = Shape(vocab_size=9, max_length=64, d_model=12, num_heads=2)


def mixer(shape: Shape = SMALL, *, seed: int = 0, **knobs: Any) -> NystromAttention:
    """Large projections, so that attention is far from uniform and every option shows."""
    torch.manual_seed(seed)
    model = NystromAttention(shape, **{"num_landmarks": 4, "conv_kernel_size": 5} | knobs).double()
    with torch.no_grad():
        model.qkv.weight.mul_(4)
    return model


def batch(*lengths: int, length: int | None = None, d_model: int = 12) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    length = max(lengths) if length is None else length
    x_BLD = torch.randn(len(lengths), length, d_model, dtype=torch.float64)
    return x_BLD, torch.arange(length) < torch.tensor(lengths)[:, None]


def all_gradients(model: torch.nn.Module, y: Tensor, x: Tensor, weight: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad((y * weight).sum(), [x, *model.parameters()]))


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "landmarks": {"num_landmarks": 7},
    "one_landmark": {"num_landmarks": 1},
    "no_step": {"pinv_iterations": 0},
    "one_step": {"pinv_iterations": 1},
    "three_steps": {"pinv_iterations": 3},
    "global": {"pinv_init": "global"},
    "no_convolution": {"conv_kernel_size": None},
    "wide_convolution": {"conv_kernel_size": 35},
    "padded": {"padded_landmarks": True},
    "padded_global": {"padded_landmarks": True, "pinv_init": "global"},
    "padded_as_is": {"padded_landmarks": True, "zero_padding": False},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_equals_the_naive_version_with_gradients(name: str) -> None:
    model = mixer(**OPTIONS[name])
    x_BLD, mask_BL = batch(21, 13, 8, 7, 5, 4, 3, 1)
    mask_BL[1, [0, 6, 7, 8, 9]] = False  # holes
    x_BLD.requires_grad_()
    weight_BLD = torch.randn_like(x_BLD) * mask_BL[..., None]
    ours_BLD = model(x_BLD, mask_BL)
    naive_BLD = nystrom_attention(model, x_BLD, mask_BL)
    torch.testing.assert_close(ours_BLD[mask_BL], naive_BLD[mask_BL], rtol=1e-9, atol=1e-10)
    for ours, naive in zip(
        all_gradients(model, ours_BLD, x_BLD, weight_BLD),
        all_gradients(model, naive_BLD, x_BLD, weight_BLD),
        strict=True,
    ):
        torch.testing.assert_close(ours, naive, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("shape", [{"head_dim": 7}, {"attention_bias": False}, {"num_heads": 3}])
def test_equals_the_naive_version_in_other_shapes(shape: dict[str, Any]) -> None:
    model = mixer(Shape(**{"vocab_size": 9, "max_length": 64, "d_model": 12} | shape))
    x_BLD, mask_BL = batch(12, 9, 2)
    naive_BLD = nystrom_attention(model, x_BLD, mask_BL)
    torch.testing.assert_close(model(x_BLD, mask_BL)[mask_BL], naive_BLD[mask_BL])


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "default"])
def test_every_option_changes_the_output(name: str) -> None:
    base: dict[str, Any] = (
        {"padded_landmarks": True} if name in ("padded_global", "padded_as_is") else {}
    )
    one, other = mixer(**base), mixer(**OPTIONS[name])
    same = {key: value for key, value in one.state_dict().items() if key != "conv_HW"}
    other.load_state_dict(same, strict=False)
    x_BLD, mask_BL = batch(21, 13)
    assert (one(x_BLD, mask_BL) - other(x_BLD, mask_BL))[mask_BL].abs().max() > 1e-3


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"num_landmarks": 0}, "num_landmarks=0: expected at least 1"),
        ({"pinv_iterations": -1}, "pinv_iterations=-1: expected at least 0"),
        ({"pinv_init": "exact"}, "pinv_init='exact': expected one of per_matrix, global"),
        ({"conv_kernel_size": 4}, "conv_kernel_size=4: expected an odd width"),
        ({"conv_kernel_size": -1}, "conv_kernel_size=-1: expected an odd width"),
        ({"zero_padding": False}, "only with model.padded_landmarks=true"),
        ({"causal": True}, "causal=true: .* mean over later tokens"),
    ],
)
def test_refuses(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NystromAttention(SMALL, **knobs)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 100, 1000])
def test_takes_any_length(length: int, padded: bool) -> None:
    model = mixer(num_landmarks=64, conv_kernel_size=35, padded_landmarks=padded).float()
    y_BLD = model(torch.randn(2, length, 12), torch.ones(2, length, dtype=torch.bool))
    assert y_BLD.shape == (2, length, 12)
    assert y_BLD.isfinite().all()


@pytest.mark.parametrize("name", ["default", "global", "padded", "padded_global", "padded_as_is"])
def test_short_rows_and_rows_of_padding_stay_finite(name: str) -> None:
    model = mixer(**OPTIONS[name] | {"num_landmarks": 8}).float().train()
    x_BLD, mask_BL = batch(10, 1, 0, 128)
    x_BLD = x_BLD.float().requires_grad_()
    y_BLD = model(x_BLD, mask_BL)
    assert y_BLD.isfinite().all()
    for gradient in all_gradients(model, y_BLD, x_BLD, torch.ones(())):
        assert gradient.isfinite().all()


def test_row_of_padding_mixes_to_zero() -> None:
    model = mixer()
    x_BLD, mask_BL = batch(0, 0, length=9)
    expected_BLD = model.out.bias.expand_as(x_BLD)
    torch.testing.assert_close(model(x_BLD, mask_BL), expected_BLD)
    torch.testing.assert_close(model(x_BLD[:, :3], mask_BL[:, :3]), expected_BLD[:, :3])


def test_row_with_no_more_tokens_than_landmarks_gets_exact_attention() -> None:
    model = mixer(num_landmarks=16, conv_kernel_size=None).float()
    exact = SoftmaxAttention(SMALL).float().eval()
    exact.load_state_dict(model.state_dict())
    x_BLD, mask_BL = batch(16, 64, 15, 3, 1)
    x_BLD = x_BLD.float()
    ours_BLD, exact_BLD = model(x_BLD, mask_BL), exact(x_BLD, mask_BL)
    for row in (0, 2, 3, 4):
        gap_LD = (ours_BLD - exact_BLD)[row][mask_BL[row]]
        assert gap_LD.abs().max() < 1e-5
    assert (ours_BLD - exact_BLD)[1].abs().max() > 1e-3
    model.num_landmarks = 64
    torch.testing.assert_close(model(x_BLD, mask_BL)[mask_BL], exact_BLD[mask_BL])


def test_neither_padding_nor_neighbours_change_a_row() -> None:
    model = mixer()
    lengths = [30, 21, 9, 5, 4, 2, 1]
    x_BLD, mask_BL = batch(*lengths)
    together_BLD = model(x_BLD, mask_BL)
    filled_BLD = x_BLD.masked_fill(~mask_BL[..., None], 1e3)
    torch.testing.assert_close(model(filled_BLD, mask_BL)[mask_BL], together_BLD[mask_BL])
    for row, length in enumerate(lengths):
        for padding in (0, 1, 7, 64):
            alone_1LD = F.pad(x_BLD[row : row + 1, :length], (0, 0, 0, padding), value=5.0)
            mask_1L = (torch.arange(length + padding) < length)[None]
            alone_LD = model(alone_1LD, mask_1L)[0, :length]
            torch.testing.assert_close(alone_LD, together_BLD[row, :length])


def test_the_authors_options_let_padding_and_neighbours_in() -> None:
    x_BLD, mask_BL = batch(20, 20)
    x_BLD[1] *= 4
    alone, together = (mixer(pinv_init="global")(x_BLD[:n], mask_BL[:n])[0] for n in (1, 2))
    assert (alone - together).abs().max() > 1e-3
    x_BLD, mask_BL = batch(20, length=28)
    short, long = (mixer(padded_landmarks=True)(x_BLD[:, :n], mask_BL[:, :n]) for n in (20, 28))
    assert (short - long[:, :20]).abs().max() > 1e-3


def test_global_scale_leaves_out_rows_with_exact_attention() -> None:
    model = mixer(pinv_init="global")
    x_BLD, mask_BL = batch(20, 4)
    x_BLD[1] *= 50
    torch.testing.assert_close(model(x_BLD, mask_BL)[0], model(x_BLD[:1], mask_BL[:1])[0])


def test_both_kinds_of_landmarks_agree_without_padding() -> None:
    x_BLD, mask_BL = batch(24, 24)
    torch.testing.assert_close(
        mixer()(x_BLD, mask_BL), mixer(padded_landmarks=True)(x_BLD, mask_BL)
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["default", "padded_global", "padded_as_is"])
def test_low_precision_with_padding_is_finite_and_close(name: str, dtype: torch.dtype) -> None:
    model = mixer(**OPTIONS[name] | {"num_landmarks": 8}).float().eval()
    with torch.no_grad():
        model.qkv.weight.div_(4)
    x_BLD, mask_BL = batch(40, 17, 3, 0)
    x_BLD = x_BLD.float()
    expected = model(x_BLD, mask_BL)[mask_BL]
    with torch.autocast("cpu", dtype=dtype):
        cast = model(x_BLD, mask_BL)
    gradients = torch.autograd.grad(cast.float().sum(), list(model.parameters()))
    assert all(gradient.isfinite().all() for gradient in gradients)
    whole = model.to(dtype)(x_BLD.to(dtype), mask_BL)
    for y_BLD in (cast, whole):
        assert y_BLD.dtype == dtype
        assert y_BLD.isfinite().all()
        assert (y_BLD[mask_BL].float() - expected).abs().max() < 0.05


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_attention_of_half_precision_input_runs_in_float32(dtype: torch.dtype) -> None:
    model = mixer().to(dtype)
    qkv_BLTHK = torch.randn(2, 30, 3, 2, 6).to(dtype)
    mask_BL = batch(30, 17)[1]
    expected_BHLK = model.float().attend(qkv_BLTHK.float(), mask_BL)
    torch.testing.assert_close(model.attend(qkv_BLTHK, mask_BL), expected_BHLK.to(dtype))
    with torch.autocast("cpu", dtype=dtype):
        torch.testing.assert_close(model.attend(qkv_BLTHK, mask_BL), expected_BHLK.to(dtype))
    half_BHLK = model.to(dtype).attend(qkv_BLTHK, mask_BL)
    torch.testing.assert_close(half_BHLK, expected_BHLK.to(dtype))


@pytest.mark.parametrize("num_tokens", [1, 5, 6, 7, 11, 12, 50])
def test_segments_cut_real_tokens_evenly(num_tokens: int) -> None:
    mask_BL = torch.zeros(1, 60, dtype=torch.bool)
    mask_BL[0, torch.randperm(60, generator=torch.Generator().manual_seed(2))[:num_tokens]] = True
    segment_BL, count_BM = segments(mask_BL, num_landmarks=6, padded=False)
    sizes = torch.bincount(segment_BL[mask_BL], minlength=6)
    used = min(6, num_tokens)
    assert (segment_BL[mask_BL].diff() >= 0).all()
    assert sizes[:used].tolist() == count_BM[0, :used].tolist()
    assert sizes[:used].max() - sizes[:used].min() <= 1
    assert sizes[used:].sum() == 0
    assert segment_BL.min() >= 0 and segment_BL.max() < 6 and count_BM.min() >= 1


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 200])
@pytest.mark.parametrize("width", [1, 3, 35, 201])
def test_convolution_equals_pytorchs(length: int, width: int) -> None:
    torch.manual_seed(3)
    v_BHLK = torch.randn(2, 3, length, 4, dtype=torch.float64)
    filter_HW = torch.randn(3, width, dtype=torch.float64)
    expected = F.conv2d(v_BHLK, filter_HW[:, None, :, None], padding=(width // 2, 0), groups=3)
    torch.testing.assert_close(short_convolution(v_BHLK, filter_HW), expected)


def test_inverse_converges_to_the_inverse() -> None:
    torch.manual_seed(4)
    a_BHMM = (torch.randn(2, 3, 6, 6, dtype=torch.float64) * 3).softmax(dim=-1)
    eye_BHMM = torch.eye(6, dtype=torch.float64).expand_as(a_BHMM)
    for init in ("per_matrix", "global"):
        inverse_BHMM = inverse_times(a_BHMM, eye_BHMM, num_iterations=60, init=init)
        torch.testing.assert_close(inverse_BHMM, a_BHMM.inverse(), rtol=1e-6, atol=1e-6)
    w_BHMK = torch.randn(2, 3, 6, 5, dtype=torch.float64)
    for steps in range(4):
        z_BHMM = inverse_times(a_BHMM, eye_BHMM, num_iterations=steps, init="per_matrix")
        zw_BHMK = inverse_times(a_BHMM, w_BHMK, num_iterations=steps, init="per_matrix")
        torch.testing.assert_close(zw_BHMK, z_BHMM @ w_BHMK)


def test_memory_for_the_backward_pass_is_linear_in_length() -> None:
    model = mixer(num_landmarks=8).float()

    def saved(length: int) -> int:
        total = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal total
            total += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(torch.randn(1, length, 12), torch.ones(1, length, dtype=torch.bool))
        return total

    assert saved(4096) < 2.1 * saved(2048)


@pytest.mark.parametrize(
    ("vocab_size", "max_length", "num_classes", "num_sequences", "expected"),
    [
        (32, 2048, 10, 1, 209_942),
        (512, 4096, 2, 1, 370_702),
        (512, 4096, 2, 2, 395_278),
        (512, 1024, 10, 1, 175_126),
        (512, 1024, 2, 1, 174_094),
    ],
)
def test_parameter_counts_are_the_authors(
    vocab_size: int, max_length: int, num_classes: int, num_sequences: int, expected: int
) -> None:
    shape = Shape(vocab_size=vocab_size, max_length=max_length)
    model = Classifier(make_encoder(NystromAttention, shape), shape, num_classes, num_sequences)
    assert sum(parameter.numel() for parameter in model.parameters()) == expected


def test_initial_filters_have_pytorchs_range() -> None:
    model = NystromAttention(Shape(vocab_size=9, max_length=9, num_heads=64), conv_kernel_size=35)
    assert model.conv_HW is not None
    assert 0.9 / math.sqrt(35) < model.conv_HW.abs().max() <= 1 / math.sqrt(35)
