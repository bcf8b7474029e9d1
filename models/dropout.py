"""Dropout that costs little on a CPU, and softmax attention with dropout in linear memory there.

On a CPU PyTorch's dropout takes longer to draw its numbers than a small model to use them, and its
fused attention knows no dropout. Here an element takes 16 bits of a random word from PyTorch's
default generator: rates are exact to 1/65536, and what is dropped depends on the generator's state
alone, not on the number of threads. On other devices and in compiled code PyTorch's own functions
serve.

Shapes: B batch, L length of the queries, N length of the keys, H heads, K head dim; R rows, a block
of one example's queries, and J the keys they read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

BLOCK_SIZE = 2**19  # attention weights formed at a time: enough for threads, few enough for caches


def has_fast_path(x: Tensor) -> bool:
    """Whether `x` gets this file's dropout rather than PyTorch's."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def keep_probability(p: float) -> float:
    """1 - p to 16 bits, and at least 1/65536."""
    return max(1, round((1 - p) * 65536)) / 65536


def draw_kept(shape: tuple[int, ...], p: float, generator: torch.Generator | None = None) -> Tensor:
    """Independent for each element: 0 with probability `p`, when it is dropped, else 1; int16."""
    size = math.prod(shape)
    words = torch.empty(-(-size // 4), dtype=torch.int64)
    words.random_(-(2**63), None, generator=generator)
    largest_kept = round(keep_probability(p) * 65536) - 1 - 32768
    # In place the comparison stays in int16, many times faster than one that gives bool.
    return words.view(torch.int16)[:size].le_(largest_kept).view(shape)


class Dropout(nn.Module):
    """In training, zero elements with probability `p` and scale the others by 1 / (1 - p).

    Raises:
        ValueError: p is not in [0, 1).
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"dropout p={p}: expected 0 <= p < 1")
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """Same shape and dtype; `x` itself, and nothing drawn, in evaluation or with p=0."""
        if not self.training or self.p == 0.0:
            return x
        return _Dropout.apply(x, self.p) if has_fast_path(x) else F.dropout(x, self.p)

    def extra_repr(self) -> str:
        """What `print` shows."""
        return f"p={self.p}"


class TiedDropout(Dropout):
    """Dropout with one mask for all positions of a sequence, as S4, S5 and LRU have it."""

    def forward(self, x_BLD: Tensor) -> Tensor:
        """[B, L, D]."""
        if not self.training or self.p == 0.0:
            return x_BLD
        return x_BLD * super().forward(torch.ones_like(x_BLD[:, :1]))


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        kept = draw_kept(x.shape, p).to(torch.int8)
        ctx.save_for_backward(kept)
        ctx.scale = 1 / keep_probability(p)
        # kept * x would make the same copy first; here its memory also takes the result.
        return kept.to(x.dtype).mul_(x).mul_(ctx.scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (kept,) = ctx.saved_tensors
        return kept.to(grad.dtype).mul_(grad).mul_(ctx.scale), None


def attend_with_dropout(
    q_BHLK: Tensor,
    k_BHNK: Tensor,
    v_BHNK: Tensor,
    mask_BN: Tensor | None,
    query_mask_BL: Tensor | None,
    *,
    p: float,
    causal: bool = False,
) -> Tensor:
    """Softmax attention on a CPU with weights dropped at rate `p`; [B, H, L, K].

    Blocks of weights are formed in float32 or wider, and again for the gradient with the same
    dropout, so memory is linear in L and N. Examples are worked on side by side, each with random
    numbers of its own. Each row of `mask_BN`, the keys that may be read, needs
    a True. Queries behind the last True of `query_mask_BL` are left out: their results are zeros.
    """
    batch_size, _, length, _ = q_BHLK.shape
    key_ends = row_ends(mask_BN, batch_size, k_BHNK.shape[2])
    hidden_BN = None
    if mask_BN is not None and mask_BN.sum(dim=1).tolist() != key_ends:
        hidden_BN = ~mask_BN
    plan = _Plan(row_ends(query_mask_BL, batch_size, length), key_ends, hidden_BN, p, causal)
    dtype = torch.promote_types(q_BHLK.dtype, torch.float32)
    with torch.autocast("cpu", enabled=False):
        y_BHLK = _Attention.apply(q_BHLK.to(dtype), k_BHNK.to(dtype), v_BHNK.to(dtype), plan)
    return y_BHLK.to(q_BHLK.dtype)


def row_ends(mask_BL: Tensor | None, batch_size: int, length: int) -> list[int]:
    """Position behind the last True of each row, 0 if there is none; the length without a mask."""
    if mask_BL is None:
        return [length] * batch_size
    return (mask_BL * torch.arange(1, length + 1)).amax(dim=1).tolist()


@dataclass(frozen=True)
class _Plan:
    """What is computed of each example: its first queries with its first keys."""

    query_ends: list[int]
    key_ends: list[int]
    hidden_BN: Tensor | None  # keys that are not read, if some stand before the end of their row
    p: float
    causal: bool

    def blocks(
        self, b: int, q_HLK: Tensor, k_HNK: Tensor, generator: torch.Generator
    ) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
        """Of example `b`: rows, columns, softmax weights [H, R, J] and what dropout keeps of them.

        A second walk gives the same if its generator starts in the same state.
        """
        num_heads, _, width = q_HLK.shape
        num_queries, num_keys = self.query_ends[b], self.key_ends[b]
        block_rows = max(1, BLOCK_SIZE // (num_heads * num_keys))
        for start in range(0, num_queries, block_rows):
            rows = slice(start, min(start + block_rows, num_queries))
            columns = slice(0, min(rows.stop, num_keys) if self.causal else num_keys)
            score_HRJ = torch.bmm(q_HLK[:, rows] * width**-0.5, k_HNK[:, columns].mT)
            if self.hidden_BN is not None:
                score_HRJ.masked_fill_(self.hidden_BN[b, columns], -torch.inf)
            if self.causal:
                later_RJ = torch.ones(score_HRJ.shape[1:], dtype=torch.bool).triu(start + 1)
                score_HRJ.masked_fill_(later_RJ, -torch.inf)
            weight_HRJ = score_HRJ.softmax(dim=-1)
            kept_HRJ = draw_kept(weight_HRJ.shape, self.p, generator)
            yield rows, columns, weight_HRJ, kept_HRJ.to(weight_HRJ.dtype)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BHLK: Tensor, k_BHNK: Tensor, v_BHNK: Tensor, plan: _Plan) -> Tensor:
        seeds = torch.randint(2**32, (len(q_BHLK),)).tolist()
        y_BHLK = zeros_heads_inside(q_BHLK)

        def attend(b: int) -> None:
            generator = torch.Generator().manual_seed(seeds[b])
            for rows, columns, weight_HRJ, kept_HRJ in plan.blocks(
                b, q_BHLK[b], k_BHNK[b], generator
            ):
                y_BHLK[b, :, rows] = torch.bmm(weight_HRJ.mul_(kept_HRJ), v_BHNK[b, :, columns])

        side_by_side(attend, len(q_BHLK))
        y_BHLK.mul_(1 / keep_probability(plan.p))
        ctx.save_for_backward(q_BHLK, k_BHNK, v_BHNK, y_BHLK)
        ctx.plan, ctx.seeds = plan, seeds
        return y_BHLK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BHLK: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # type: ignore[override]
        q_BHLK, k_BHNK, v_BHNK, y_BHLK = ctx.saved_tensors
        scale, keep_scale = q_BHLK.shape[3] ** -0.5, 1 / keep_probability(ctx.plan.p)
        dq_BHLK, dk_BHNK, dv_BHNK = (zeros_heads_inside(x) for x in (q_BHLK, k_BHNK, v_BHNK))

        def differentiate(b: int) -> None:
            q_HLK, k_HNK, v_HNK = q_BHLK[b], k_BHNK[b], v_BHNK[b]
            # The softmax takes from each weight's gradient the mean of them under the weights.
            mean_HL1 = (dy_BHLK[b] * y_BHLK[b]).sum(dim=2, keepdim=True)
            dk_HNK, dv_HNK = torch.zeros(2, *k_HNK.shape, dtype=k_HNK.dtype)
            generator = torch.Generator().manual_seed(ctx.seeds[b])
            for rows, columns, weight_HRJ, kept_HRJ in ctx.plan.blocks(b, q_HLK, k_HNK, generator):
                dy_HRK = dy_BHLK[b, :, rows] * keep_scale
                dropped_HRJ = kept_HRJ.mul_(weight_HRJ)
                dv_HNK[:, columns].baddbmm_(dropped_HRJ.mT, dy_HRK)
                dscore_HRJ = torch.bmm(dy_HRK, v_HNK[:, columns].mT).mul_(dropped_HRJ)
                dscore_HRJ.addcmul_(weight_HRJ, mean_HL1[:, rows], value=-1)
                dk_HNK[:, columns].baddbmm_(dscore_HRJ.mT, q_HLK[:, rows] * scale)
                dq_BHLK[b, :, rows] = torch.bmm(dscore_HRJ, k_HNK[:, columns]) * scale
            dk_BHNK[b], dv_BHNK[b] = dk_HNK, dv_HNK

        side_by_side(differentiate, len(q_BHLK))
        return dq_BHLK, dk_BHNK, dv_BHNK, None


def side_by_side(function: Callable[[int], None], count: int) -> None:
    """Call `function` with 0 .. count - 1 in as many threads as PyTorch uses.

    Each has its share of PyTorch's threads, one as a rule: a block of weights is too small to be
    divided among threads that have to be woken for each operation. Nothing is differentiated.
    """
    # A mode that watches operations, to count them say, sees those of its own thread only.
    num_threads = 1 if is_in_torch_dispatch_mode() else torch.get_num_threads()
    num_workers = max(1, min(num_threads, count))
    inference = torch.is_inference_mode_enabled()

    def call(i: int) -> None:
        # Modes hold for the thread that set them.
        with (
            torch.inference_mode(inference),
            torch.no_grad(),
            torch.autocast("cpu", enabled=False),
        ):
            function(i)

    if num_workers == 1:
        for i in range(count):
            call(i)
        return
    torch.set_num_threads(num_threads // num_workers)  # what a new thread starts with
    try:
        with ThreadPoolExecutor(num_workers) as pool:
            list(pool.map(call, range(count)))
    finally:
        torch.set_num_threads(num_threads)


def zeros_heads_inside(x_BHLK: Tensor) -> Tensor:
    """Zeros of the same shape that lie in memory as [B, L, H, K], as linear maps want them."""
    batch_size, num_heads, length, width = x_BHLK.shape
    return x_BHLK.new_zeros(batch_size, length, num_heads, width).transpose(1, 2)
