"""Convolution with kernels as long as the sequence, such kernels as sums of powers; short ones too.

Shapes: B batch, L length, D features, K taps of a kernel, C kernels, N powers in each; a power t is
split as t = S r + s with R rows r and S columns s. Of a convolution: R some rows of a batch, N all
their positions, T positions of a circle, F frequencies.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from models.dropout import side_by_side

MIN_COLUMNS = 16  # features of a block, so that positions are read in pieces of a cache line
SHORT_BLOCK = 64  # outputs of a short convolution that are one product
BLOCK_SIZE = 2**19  # numbers transformed at a time: many for a call, few enough for caches


def powers(base: Tensor, count: int, *, dim: int = -1) -> Tensor:
    """base^0 .. base^(count - 1) on a new axis `dim`, by repeated doubling; real or complex."""
    power = torch.ones_like(base).unsqueeze(dim)
    factor = base.unsqueeze(dim)  # base^(number of powers so far)
    while power.shape[dim] < count:
        power = torch.cat([power, power * factor], dim=dim)
        factor = factor * factor
    return power.narrow(dim, 0, count)


def sum_of_powers(weight_CN: Tensor, base_CN: Tensor, length: int) -> Tensor:
    """Kernels k_t = Re sum_n weight_n base_n^t for t = 0 .. length - 1; [C, length].

    Both may be real or complex, and have more axes in front, which broadcast. With t = S r + s the
    sum over n is one matrix product of powers [R, N] and [N, S], each about sqrt(length) long, so
    the N * length powers are never formed.
    """
    if torch.compiler.is_compiling():  # for each root of a length there would be a graph
        return torch.compiler.disable(sum_of_powers)(weight_CN, base_CN, length)
    num_columns = 1 << (math.isqrt(max(length - 1, 0)).bit_length())
    num_rows = -(-length // num_columns)
    column_CSN = powers(base_CN, num_columns, dim=-2)
    step_CN = column_CSN[..., -1, :] * base_CN
    if base_CN.is_complex():
        # Re(a b) is the real scalar product of conj(a) and b, of whose parts each counts as one.
        row_CRN = weight_CN.conj()[..., None, :] * powers(step_CN.conj(), num_rows, dim=-2)
        row_CRN, column_CSN = (torch.view_as_real(x).flatten(-2) for x in (row_CRN, column_CSN))
    else:
        weight_CN = weight_CN.real if weight_CN.is_complex() else weight_CN
        row_CRN = weight_CN[..., None, :] * powers(step_CN, num_rows, dim=-2)
    with torch.autocast(row_CRN.device.type, enabled=False):
        kernel_CL = (row_CRN @ column_CSN.mT).flatten(-2)
    return kernel_CL if kernel_CL.shape[-1] == length else kernel_CL[..., :length]


def fast_length(minimum: int) -> int:
    """The smallest 2^i 3^j 5^k, i > 0, that is not below `minimum`: quick to transform."""
    best = 1 << max(minimum - 1, 1).bit_length()
    for odd in (3, 5, 9, 15, 25, 27, 45, 75):
        doublings = max(-(-minimum // odd) - 1, 1).bit_length()
        best = min(best, odd << doublings)
    return best


def long_convolution(x_BLD: Tensor, kernel_DK: Tensor, ahead_DK: Tensor | None = None) -> Tensor:
    """Convolve each feature with its kernel, y_t = sum_s kernel_s x_(t - s); [B, L, D].

    With `ahead_DK`, whose length may differ, also sum_s ahead_s x_(t + s), in the same product. x
    counts as zero outside 0 .. L - 1; padding inside is the caller's to zero. Computed in float32
    or wider, given back in x's dtype. O(L log L) work, memory linear in L.
    """
    if torch.compiler.is_compiling():
        # Left out of the graph: of a padded transform PyTorch 2.13 compiles a wrong gradient.
        return torch.compiler.disable(long_convolution)(x_BLD, kernel_DK, ahead_DK)
    length = x_BLD.shape[1]
    dtype = torch.promote_types(x_BLD.dtype, torch.float32)
    with torch.autocast(x_BLD.device.type, enabled=False):
        kernel_DK = kernel_DK[:, :length].to(dtype)
        # A tap ahead by 0 is a tap at the position itself, too.
        ahead_DK = torch.zeros_like(kernel_DK[:, :1]) if ahead_DK is None else ahead_DK
        ahead_DK = ahead_DK[:, :length].to(dtype)
        convolve = convolve_in_blocks if x_BLD.device.type == "cpu" else convolve_at_once
        return convolve(x_BLD.to(dtype), kernel_DK, ahead_DK).to(x_BLD.dtype)


def circle_length(x_BLD: Tensor, kernel_DK: Tensor, ahead_DK: Tensor) -> int:
    """T, the length of a circle on which nothing comes around to a wrong position."""
    return fast_length(x_BLD.shape[1] + max(kernel_DK.shape[1], ahead_DK.shape[1]) - 1)


def kernel_spectrum(kernel_DK: Tensor, ahead_DK: Tensor, size: int) -> Tensor:
    """Of both kernels on a circle: lags 0, 1, ... and, at its end, ... -2, -1; [D, 1, F]."""
    (now_D1, back_DK), (now2_D1, ahead_DK) = (
        kernel.split([1, kernel.shape[1] - 1], dim=1) for kernel in (kernel_DK, ahead_DK)
    )
    num_zeros = size - 1 - back_DK.shape[1] - ahead_DK.shape[1]
    zeros_DZ = kernel_DK.new_zeros(len(kernel_DK), num_zeros)
    circle_DT = torch.cat([now_D1 + now2_D1, back_DK, zeros_DZ, ahead_DK.flip(1)], dim=1)
    return torch.fft.rfft(circle_DT)[:, None]


def spectrum(x_RLD: Tensor, size: int) -> Tensor:
    """Fourier transform over positions of rows that zeros fill up to `size`; [D, R, F]."""
    x_DRL = x_RLD.flatten(0, 1).mT.contiguous().unflatten(1, x_RLD.shape[:2])
    return torch.fft.rfft(x_DRL, n=size)


def inverse(x_DRF: Tensor, size: int, length: int) -> Tensor:
    """The first `length` positions of rows with this spectrum, one behind the other; [R L, D]."""
    return torch.fft.irfft(x_DRF, n=size)[..., :length].flatten(1).mT


def convolve_at_once(x_BLD: Tensor, kernel_DK: Tensor, ahead_DK: Tensor) -> Tensor:
    """The convolution as one product of spectra; [B, L, D]."""
    size = circle_length(x_BLD, kernel_DK, ahead_DK)
    kernel_D1F = kernel_spectrum(kernel_DK, ahead_DK, size)
    return inverse(spectrum(x_BLD, size) * kernel_D1F, size, x_BLD.shape[1]).view_as(x_BLD)


def convolve_in_blocks(x_BLD: Tensor, kernel_DK: Tensor, ahead_DK: Tensor) -> Tensor:
    """The same on a CPU: a block that fits the cache at a time, rows side by side; [B, L, D]."""
    y_BLD: Tensor = _Convolution.apply(x_BLD, kernel_DK, ahead_DK)
    return y_BLD


class _Convolution(torch.autograd.Function):
    """Only the input and the kernels are kept: spectra are formed again for the gradient.

    That takes less time than memory of twice the size of the input.
    """

    @staticmethod
    def forward(ctx: Any, x_BLD: Tensor, kernel_DK: Tensor, ahead_DK: Tensor) -> Tensor:
        ctx.save_for_backward(x_BLD, kernel_DK, ahead_DK)
        size = circle_length(x_BLD, kernel_DK, ahead_DK)
        y_BLD = torch.empty_like(x_BLD, memory_format=torch.contiguous_format)

        def convolve(rows: slice, _worker: int) -> None:
            y_DRF = spectrum(x_BLD[rows, :, columns], size).mul_(kernel_D1F)
            store(inverse(y_DRF, size, x_BLD.shape[1]), y_BLD[rows, :, columns])

        for columns in column_blocks(x_BLD, size):
            kernel_D1F = kernel_spectrum(kernel_DK[columns], ahead_DK[columns], size)
            each_row_block(convolve, x_BLD, size)
        return y_BLD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BLD: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # type: ignore[override]
        x_BLD, kernel_DK, ahead_DK = ctx.saved_tensors
        size = circle_length(x_BLD, kernel_DK, ahead_DK)
        needs_x, *needs_kernels = ctx.needs_input_grad
        dx_BLD = (
            torch.empty_like(dy_BLD, memory_format=torch.contiguous_format) if needs_x else None
        )
        dkernel_DK, dahead_DK = torch.zeros_like(kernel_DK), torch.zeros_like(ahead_DK)

        def differentiate(rows: slice, worker: int) -> None:
            dy_DRF = spectrum(dy_BLD[rows, :, columns], size)
            if any(needs_kernels):
                x_DRF = spectrum(x_BLD[rows, :, columns], size)
                for x_DF, dy_DF in zip(x_DRF.conj().unbind(1), dy_DRF.unbind(1), strict=True):
                    if worker in sums:
                        sums[worker].addcmul_(x_DF, dy_DF)
                    else:
                        sums[worker] = x_DF * dy_DF
            if dx_BLD is not None:
                dx_DRF = dy_DRF.mul_(conjugate_D1F)
                store(inverse(dx_DRF, size, dy_BLD.shape[1]), dx_BLD[rows, :, columns])

        for columns in column_blocks(dy_BLD, size):
            kernel_D1F = kernel_spectrum(kernel_DK[columns], ahead_DK[columns], size)
            # A correlation in time is a product with the conjugate.
            conjugate_D1F = kernel_D1F.conj_physical_()
            sums: dict[int, Tensor] = {}  # of each worker, added up in the order of their numbers
            each_row_block(differentiate, dy_BLD, size)
            if not sums:  # nobody needs them, or there are no rows
                continue
            sum_DF = functools.reduce(torch.add, (sums[worker] for worker in sorted(sums)))
            dcircle_DT = torch.fft.irfft(sum_DF, n=size)
            dkernel_DK[columns] = dcircle_DT[:, : kernel_DK.shape[1]]
            dahead_DK[columns, 0] = dcircle_DT[:, 0]
            dahead_DK[columns, 1:] = dcircle_DT[:, size - ahead_DK.shape[1] + 1 :].flip(1)
        return (
            dx_BLD,
            dkernel_DK if needs_kernels[0] else None,
            dahead_DK if needs_kernels[1] else None,
        )


def store(part_ND: Tensor, rows_RLD: Tensor) -> None:
    """Write rows that lie one behind the other to where they belong."""
    if rows_RLD.is_contiguous():
        rows_RLD.view_as(part_ND).copy_(part_ND)  # the faster transpose
    else:
        rows_RLD.copy_(part_ND.view_as(rows_RLD))


def column_blocks(x_BLD: Tensor, size: int) -> Iterator[slice]:
    """Features that are worked on at a time: all, or of long rows a few."""
    width = x_BLD.shape[2]
    num_columns = min(width, max(MIN_COLUMNS, BLOCK_SIZE // size))
    for start in range(0, width, num_columns):
        yield slice(start, start + num_columns)


def each_row_block(work: Callable[[slice, int], None], x_BLD: Tensor, size: int) -> None:
    """Call `work(rows, worker)` for blocks of rows of which about `BLOCK_SIZE` numbers are formed.

    The blocks of one worker follow one another.
    """
    batch_size, _, width = x_BLD.shape
    num_rows = max(1, BLOCK_SIZE // (width * size))
    starts = range(0, batch_size, num_rows)
    num_workers = min(torch.get_num_threads(), len(starts))

    def call(worker: int) -> None:
        for start in starts[worker::num_workers]:
            work(slice(start, start + num_rows), worker)

    side_by_side(call, num_workers)


def short_convolution(v_BHLK: Tensor, filter_HW: Tensor) -> Tensor:
    """Cross-correlate over positions, one filter of odd width W per head, zeros beyond both ends.

    As products of windows with a banded matrix: several times faster than PyTorch's depth-wise
    convolution on a CPU, forward and backward.
    """
    length, block = v_BHLK.shape[2], SHORT_BLOCK
    unread = max(0, filter_HW.shape[1] // 2 - (length - 1))  # taps at each end beyond all positions
    filter_HW = filter_HW[:, unread : filter_HW.shape[1] - unread]
    num_heads, width = filter_HW.shape
    span = block + width - 1  # inputs that one block of outputs sees
    padded = F.pad(v_BHLK, (0, 0, width // 2, width // 2 + -length % block))
    windows = padded.unfold(2, span, block)  # [B, H, blocks, K, span]
    # Row r of the band is the filter after r zeros. Rows are one shorter than filter + zeros, so
    # writing those over and over shifts each row by one.
    band = F.pad(filter_HW, (0, block)).repeat(1, block)[:, : block * span]
    band = band.view(num_heads, block, span)
    y = torch.einsum("bhnks,hrs->bhnrk", windows, band)
    return y.flatten(2, 3)[:, :, :length]
