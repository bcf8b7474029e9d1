"""Long convolutions equal direct sums, and sums of powers too, with their gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import models.convolution
from models.convolution import (
    convolve_at_once,
    convolve_in_blocks,
    fast_length,
    long_convolution,
    powers,
    sum_of_powers,
)
from tests.models.test_models import count_saved_bytes


def direct_sum(x_BLD: Tensor, kernel_DK: Tensor, ahead_DK: Tensor | None) -> Tensor:
    """The same sums term by term."""
    y_BLD = torch.zeros_like(x_BLD)
    length = x_BLD.shape[1]
    for t in range(length):
        for s in range(min(t + 1, kernel_DK.shape[1])):
            y_BLD[:, t] += kernel_DK[:, s] * x_BLD[:, t - s]
        for s in range(length - t if ahead_DK is not None else 0):
            if s < ahead_DK.shape[1]:
                y_BLD[:, t] += ahead_DK[:, s] * x_BLD[:, t + s]
    return y_BLD


@pytest.mark.parametrize("num_ahead", [None, 1, 4, 40])
@pytest.mark.parametrize("num_taps", [1, 2, 7, 40])
@pytest.mark.parametrize("length", [1, 2, 7, 12, 31])
def test_convolution_is_the_direct_sum(length: int, num_taps: int, num_ahead: int | None) -> None:
    torch.manual_seed(0)
    x_BLD = torch.randn(3, length, 5, dtype=torch.float64)
    kernel_DK = torch.randn(5, num_taps, dtype=torch.float64)
    ahead_DK = None if num_ahead is None else torch.randn(5, num_ahead, dtype=torch.float64)
    y_BLD = long_convolution(x_BLD, kernel_DK, ahead_DK)
    expected_BLD = direct_sum(x_BLD, kernel_DK, ahead_DK)
    torch.testing.assert_close(y_BLD, expected_BLD, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("ahead", [False, True])
def test_convolution_has_the_right_gradients(ahead: bool) -> None:
    torch.manual_seed(0)
    x_BLD = torch.randn(2, 6, 3, dtype=torch.float64, requires_grad=True)
    kernels = [
        torch.randn(3, num_taps, dtype=torch.float64, requires_grad=True)
        for num_taps in ((4, 9) if ahead else (9,))
    ]
    assert torch.autograd.gradcheck(long_convolution, (x_BLD, *kernels))


def operands(batch_size: int, length: int, width: int) -> list[Tensor]:
    """Input, a kernel, and one that looks ahead; they record gradients."""
    torch.manual_seed(0)
    shapes = ((batch_size, length, width), (width, length), (width, length))
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def with_gradients(convolve: Any, *tensors: Tensor) -> list[Tensor]:
    y = convolve(*tensors)
    return [y, *torch.autograd.grad(y.double().square().sum(), tensors)]


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize(("batch_size", "length", "width"), [(7, 9, 5), (2, 40, 20), (1, 64, 19)])
def test_blocks_of_rows_and_of_features_change_nothing(
    batch_size: int, length: int, width: int, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = operands(batch_size, length, width)
    expected = with_gradients(convolve_at_once, *tensors)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        # Two rows at a time, and then one row and four features.
        for block_size, columns in ((4 * length * width, 1), (1, 4)):
            monkeypatch.setattr(models.convolution, "BLOCK_SIZE", block_size)
            monkeypatch.setattr(models.convolution, "MIN_COLUMNS", columns)
            found = with_gradients(convolve_in_blocks, *tensors)
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-11)
    finally:
        torch.set_num_threads(before)


def test_a_gradient_that_nobody_needs_is_none() -> None:
    x_BLD, kernel_DK, ahead_DK = operands(2, 9, 3)
    all_three = with_gradients(long_convolution, x_BLD, kernel_DK, ahead_DK)
    y_BLD = long_convolution(x_BLD.detach(), kernel_DK, ahead_DK.detach())
    (gradient,) = torch.autograd.grad(y_BLD.square().sum(), kernel_DK)
    torch.testing.assert_close(gradient, all_three[2])
    y_BLD = long_convolution(x_BLD, kernel_DK.detach())
    assert torch.autograd.grad(y_BLD.sum(), x_BLD)[0].any()
    (gradient,) = torch.autograd.grad(long_convolution(x_BLD[:0], kernel_DK).sum(), kernel_DK)
    assert not gradient.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    tensors = operands(2, 300, 3)
    rounded = [x.detach().to(dtype).requires_grad_() for x in tensors]
    exact = with_gradients(
        long_convolution, *(x.detach().double().requires_grad_() for x in rounded)
    )
    with torch.autocast("cpu", torch.bfloat16):
        ours = with_gradients(long_convolution, *rounded)
    assert all(x.dtype == dtype for x in ours)
    unit = torch.finfo(dtype).eps
    for mine, right in zip(ours, exact, strict=True):
        assert (mine.double() - right).abs().max() < 8 * unit * right.abs().max()


def test_only_the_input_and_the_kernel_are_kept() -> None:
    x_BLD, kernel_DK, _ = operands(8, 512, 4)
    with count_saved_bytes() as saved:
        long_convolution(x_BLD, kernel_DK)
    assert saved[0] < 8 * (x_BLD.numel() + 3 * kernel_DK.numel())


@pytest.mark.parametrize("ahead", [False, True])
def test_works_wherever_models_are_run(ahead: bool) -> None:
    x_BLD, *kernels = operands(2, 12, 3)
    kernels = kernels[: 1 + ahead]
    expected = with_gradients(long_convolution, x_BLD, *kernels)
    again = with_gradients(
        lambda *args: checkpoint(long_convolution, *args, use_reentrant=False), x_BLD, *kernels
    )
    torch.testing.assert_close(again, expected, rtol=0, atol=0)
    strided_BLD = x_BLD.detach().mT.contiguous().mT.requires_grad_()
    torch.testing.assert_close(with_gradients(long_convolution, strided_BLD, *kernels), expected)
    with torch.inference_mode():
        assert torch.equal(long_convolution(x_BLD, *kernels), expected[0])
    twice = with_gradients(
        lambda x, *k: long_convolution(long_convolution(x, *k), *k), x_BLD, *kernels
    )
    assert torch.equal(twice[0], long_convolution(expected[0], *kernels))


def test_every_transform_is_seen_by_who_counts_operations() -> None:
    aten = torch.ops.aten
    ones = {op: lambda *_, **__: 1 for op in (aten._fft_r2c, aten._fft_c2r)}
    x_BLD, kernel_DK, _ = (x.detach() for x in operands(6, 2**15, 16))
    with FlopCounterMode(display=False, custom_mapping=ones) as counter:
        long_convolution(x_BLD, kernel_DK)
    assert counter.get_total_flops() == 1 + 2 * len(x_BLD)  # a block of each row


def test_compiled_code_calls_it_as_it_is() -> None:
    """The compiler's own gradient is wrong, which shows with its default backend alone."""
    x_BLD, kernel_DK, _ = operands(2, 20, 4)
    expected = with_gradients(lambda x, k: 2 * long_convolution(x.relu(), k), x_BLD, kernel_DK)
    compiled = torch.compile(lambda x, k: 2 * long_convolution(x.relu(), k), backend="eager")
    torch.testing.assert_close(with_gradients(compiled, x_BLD, kernel_DK), expected, rtol=0, atol=0)
    whole = torch.compile(lambda x, k: long_convolution(x, k), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="disable"):
        whole(x_BLD, kernel_DK)


@pytest.mark.parametrize("complex_base", [False, True])
@pytest.mark.parametrize("complex_weight", [False, True])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 16, 17, 64, 65, 100])
def test_sum_of_powers_is_the_direct_sum(
    length: int, complex_weight: bool, complex_base: bool
) -> None:
    torch.manual_seed(0)
    dtypes = [torch.complex128 if c else torch.float64 for c in (complex_weight, complex_base)]
    weight_CN, base_CN = (torch.randn(4, 3, dtype=dtype) for dtype in dtypes)
    base_CN = base_CN / base_CN.abs().clamp(min=1.0)
    power_CNL = base_CN[..., None] ** torch.arange(length)
    expected_CL = (weight_CN[..., None] * power_CNL).sum(dim=1).real
    kernel_CL = sum_of_powers(weight_CN, base_CN, length)
    torch.testing.assert_close(kernel_CL, expected_CL, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(powers(base_CN, length), power_CNL, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_sum_of_powers_has_the_right_gradients(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight_CN, base_CN = (0.8 * torch.randn(2, 2, 3, dtype=dtype)).requires_grad_().unbind()
    assert torch.autograd.gradcheck(lambda w, b: sum_of_powers(w, b, 11), (weight_CN, base_CN))


def test_long_kernels_are_as_exact_as_their_numbers() -> None:
    """Oscillations of a slowly decaying kernel, in float32 after 16,384 steps."""
    torch.manual_seed(0)
    weight_CN = torch.randn(4, 8, dtype=torch.complex64)
    rate_CN = torch.complex(-1e-4 * torch.rand(4, 8), torch.rand(4, 8))
    exact_CL = sum_of_powers(
        weight_CN.to(torch.complex128), rate_CN.exp().to(torch.complex128), 16384
    )
    ours_CL = sum_of_powers(weight_CN, rate_CN.exp(), 16384)
    assert (ours_CL - exact_CL).abs().max() < 1e-4 * exact_CL.abs().max()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(sum_of_powers(weight_CN, rate_CN.exp(), 16384), ours_CL)


def test_a_sum_of_powers_never_forms_all_of_them() -> None:
    weight_CN, base_CN = torch.rand(2, 4, 64, dtype=torch.float64, requires_grad=True).unbind()
    with count_saved_bytes() as saved:
        sum_of_powers(weight_CN, base_CN, 4096)
    assert saved[0] < 8 * 4 * 64 * 4096 / 8


def test_fast_lengths_are_the_next_with_small_factors() -> None:
    for minimum in (1, 2, 3, 7, 11, 95, 97, 2049, 4095, 4096, 4097, 31_999):
        size = fast_length(minimum)
        assert size >= minimum and size % 2 == 0 and size <= max(2, 1.2 * minimum + 1)
        for factor in (2, 3, 5):
            while size % factor == 0:
                size //= factor
        assert size == 1
