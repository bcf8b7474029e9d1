"""Softmax attention over sparse patterns, in blocks of queries: local, longformer, bigbird, sparse.

A pattern is a list of pieces (models/pieces.py). Each piece gives the queries of a block some keys;
the softmax runs over the keys of all pieces together, so a key that two pieces offer counts twice
unless one of them hides it. Only scores of the pieces' keys are ever formed.

On a CPU a thread works on an example at a time, or on a head of it: a block's products are too
small to be divided among threads.

Shapes: B batch, L length, H heads, K head dim; G blocks, g of a part, R rows of a block; J keys
that a piece gives to a block; M positions that read everything.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from models.dropout import draw_kept, has_fast_path, keep_probability, side_by_side
from models.pieces import Blocks, Everything, Part, Piece

CHUNK_SIZE = 2**20  # scores a thread forms at a time: enough for many operations, few for caches
KEPT_WIDTH = 256  # keys of a query up to which weights are kept for the gradient

Take = Callable[[str, Sequence[int], torch.dtype], Tensor]


def attend_pieces(
    q_BHLK: Tensor,
    k_BHLK: Tensor,
    v_BHLK: Tensor,
    pieces: Sequence[Piece],
    *,
    block_rows: int,
    front: int = 0,
    dropout: float = 0.0,
    open_M: Tensor | None = None,
    mask_BL: Tensor | None = None,
) -> Tensor:
    """softmax(q k^T / sqrt(K)) v over the keys of all pieces; [B, H, L, K].

    Positions lie in blocks of `block_rows`, behind `front` rows of zeros; zeros fill the last. The
    positions `open_M` read all that are True in `mask_BL` instead. A query without any allowed key
    reads all keys of its pieces evenly, so every result is finite.
    """
    dtype = torch.promote_types(q_BHLK.dtype, torch.float32)
    length, filled = q_BHLK.shape[2], -(front + q_BHLK.shape[2]) % block_rows
    every: list[Piece] = []
    if open_M is not None:
        assert mask_BL is not None
        every = [Everything([F.pad(mask_BL, (front, filled))[:, None, None, None]])]
    plan = _Plan(
        pieces=[biased(piece, dtype) for piece in pieces],
        every=[biased(piece, dtype) for piece in every],
        open_M=open_M, rows=block_rows, front=front, length=length,
        num_blocks=(front + length + filled) // block_rows, p=dropout,
    )  # fmt: skip
    if has_fast_path(q_BHLK):
        with torch.autocast("cpu", enabled=False):
            q, k, v = (x.to(dtype) for x in (q_BHLK, k_BHLK, v_BHLK))
            return _Attention.apply(q, k, v, plan).to(q_BHLK.dtype)
    return plan.attend(q_BHLK, k_BHLK, v_BHLK)


def biased(piece: Piece, dtype: torch.dtype) -> tuple[Piece, list[Tensor]]:
    """A piece and what is added to its scores, for each mask of what is allowed.

    Added, not filled in: a row where all is hidden has equal scores, and is no NaN.
    """
    masks = [mask.view((1,) * (5 - mask.dim()) + mask.shape) for mask in piece.allowed]
    return piece, [(~mask).to(dtype) * (torch.finfo(dtype).min / 2) for mask in masks]


class _Scratch(threading.local):
    """Memory that a thread uses again and again: the system takes its time to hand out new."""

    def __init__(self) -> None:
        self.flat: dict[str, Tensor] = {}

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Contiguous; what is in it is from the last use."""
        size = math.prod(shape)
        if name not in self.flat or len(self.flat[name]) < size:
            self.flat[name] = torch.empty(size, dtype=dtype)
        return self.flat[name][:size].view(shape)


@dataclass(frozen=True)
class _Plan:
    pieces: Sequence[tuple[Piece, list[Tensor]]]  # each with what is added to its scores
    every: Sequence[tuple[Piece, list[Tensor]]]  # of the queries that read everything
    open_M: Tensor | None
    rows: int
    front: int
    length: int
    num_blocks: int
    p: float

    @property
    def margin(self) -> int:
        """Rows of zeros that the pieces need around the keys."""
        return self.rows * max(piece.margin for piece, _ in self.pieces)

    def attend(self, q_BHLK: Tensor, k_BHLK: Tensor, v_BHLK: Tensor) -> Tensor:
        """The results, [B, H, L, K], by PyTorch's own functions."""
        end = self.num_blocks * self.rows - self.front - self.length

        def to_blocks(x_BHLK: Tensor) -> Blocks:
            x_BHLK = F.pad(x_BHLK, (0, 0, self.front, end)).contiguous()
            sizes = x_BHLK.unflatten(2, (-1, self.rows)).shape
            x_PK = F.pad(x_BHLK.flatten(0, 2), (0, 0, self.margin, self.margin))
            return Blocks(x_PK, sizes, self.margin)

        q, k, v = (to_blocks(x) for x in (q_BHLK * q_BHLK.shape[-1] ** -0.5, k_BHLK, v_BHLK))
        results = []
        whole = self.all(*q_BHLK.shape[:2])
        for part in [whole] if self.open_M is None else [whole, replace(whole, is_open=True)]:
            q_BHgRK, readers = self.queries(q.inside, part), self.readers(part)
            scores = [sum(biases, piece.scores(q_BHgRK, k, part)) for piece, biases in readers]
            weight = F.dropout(torch.cat(scores, dim=-1).softmax(dim=-1).to(v_BHLK.dtype), self.p)
            columns = weight.split([score.shape[-1] for score in scores], dim=-1)
            y_BHgRK = sum_of(
                piece.combine(w, v, part) for (piece, _), w in zip(readers, columns, strict=True)
            )
            results.append(y_BHgRK.flatten(2, 3))
        y_BHLK = results[0][:, :, self.front : self.front + self.length]
        return y_BHLK if self.open_M is None else y_BHLK.index_copy(2, self.open_M, results[1])

    def all(self, batch_size: int, num_heads: int) -> Part:
        """All queries."""
        return Part(slice(0, batch_size), slice(0, num_heads), slice(0, self.num_blocks))

    def units(self, batch_size: int, num_heads: int) -> list[Part]:
        """All queries of some examples, or of a head of one: what a thread works on at a time."""
        whole = self.all(batch_size, num_heads)
        size = CHUNK_SIZE // (num_heads * self.head_size)
        if size > 0:
            starts = range(0, batch_size, size)
            return [replace(whole, examples=slice(b, min(b + size, batch_size))) for b in starts]
        return [
            replace(whole, examples=slice(b, b + 1), heads=slice(h, h + 1))
            for b in range(batch_size)
            for h in range(num_heads)
        ]

    def parts(self, unit: Part) -> list[Part]:
        """Runs of a unit's blocks whose scores are formed together, and what reads everything."""
        num_parts = -(-self.head_size // CHUNK_SIZE)
        size = -(-self.num_blocks // num_parts)
        starts = range(0, self.num_blocks, size)
        parts = [replace(unit, blocks=slice(g, min(g + size, self.num_blocks))) for g in starts]
        return parts if self.open_M is None else [*parts, replace(unit, is_open=True)]

    @property
    def keys_per_query(self) -> int:
        """At most."""
        part = self.all(1, 1)
        return sum(piece.width(part, self.rows) for piece, _ in self.pieces)

    @property
    def head_size(self) -> int:
        """Scores of one head."""
        return self.num_blocks * self.rows * self.keys_per_query

    def readers(self, part: Part) -> list[tuple[Piece, list[Tensor]]]:
        """The pieces that have keys for these queries, and what is added to their scores."""
        pieces = self.every if part.is_open else self.pieces
        return [
            (piece, [part.of(bias)[..., : piece.width(part, self.rows)] for bias in biases])
            for piece, biases in pieces
            if piece.width(part, self.rows) > 0
        ]

    def queries(self, x_BHGRK: Tensor, part: Part) -> Tensor:
        """The rows of a part's queries, [B, H, g, R, K]."""
        if not part.is_open:
            return x_BHGRK[:, :, part.blocks]
        assert self.open_M is not None
        return x_BHGRK.flatten(2, 3).index_select(2, self.open_M + self.front)[:, :, None]

    def put(self, y_BHLK: Tensor, part: Part, y_BHgRK: Tensor, factor: Tensor | float) -> None:
        """Set the rows of a part's queries, times a factor; `y_BHLK` may lie in any order."""
        if part.is_open:
            assert self.open_M is not None
            y_BHLK.index_copy_(2, self.open_M, (y_BHgRK * factor).flatten(2, 3))
            return
        start = part.blocks.start * self.rows - self.front
        first, last = max(start, 0), min(part.blocks.stop * self.rows - self.front, self.length)
        inside = slice(first - start, last - start)
        if isinstance(factor, Tensor):
            factor = factor.flatten(2, 3)[:, :, inside]
        y_BHPK = y_BHgRK.flatten(2, 3)[:, :, inside]
        torch.mul(y_BHPK, factor, out=y_BHLK[:, :, first:last])

    def clear_open(self, x: Blocks) -> None:
        """Zeros for the rows of the queries that read everything."""
        if self.open_M is not None:
            x.inside.flatten(2, 3).index_fill_(2, self.open_M + self.front, 0)

    def block_sizes(self, x_BHLK: Tensor) -> tuple[int, ...]:
        """[B, H, G, R, K] of the blocks of x."""
        batch_size, num_heads, _, width = x_BHLK.shape
        return (batch_size, num_heads, self.num_blocks, self.rows, width)

    def empty_blocks(self, take: Take, name: str, x_BHLK: Tensor) -> Blocks:
        """For rows like x, in memory that `take` gives."""
        sizes = self.block_sizes(x_BHLK)
        num_rows = math.prod(sizes[:4]) + 2 * self.margin
        return Blocks(take(name, (num_rows, sizes[4]), x_BHLK.dtype), sizes, self.margin)

    def to_blocks(self, take: Take, name: str, x_BHLK: Tensor, scale: float = 1) -> Blocks:
        """Times a factor, in memory that `take` gives."""
        blocks, end = self.empty_blocks(take, name, x_BHLK), self.front + self.length
        if self.margin > 0:
            blocks.padded_PK[: self.margin] = 0
            blocks.padded_PK[-self.margin :] = 0
        rows_BHPK = blocks.inside.flatten(2, 3)
        if end - self.front < rows_BHPK.shape[2]:
            rows_BHPK[:, :, : self.front] = 0
            rows_BHPK[:, :, end:] = 0
        torch.mul(x_BHLK, scale, out=rows_BHPK[:, :, self.front : end])
        return blocks

    def from_blocks(self, blocks: Blocks, scale: float, out_BHLK: Tensor) -> None:
        """Times a factor, into memory in any order."""
        x_BHPK = blocks.inside.flatten(2, 3)
        torch.mul(x_BHPK[:, :, self.front : self.front + self.length], scale, out=out_BHLK)

    def weights(
        self, take: Take, q_BHgRK: Tensor, k: Blocks, part: Part, generator: torch.Generator
    ) -> list[Tensor]:
        """Those of each piece, not yet divided by their sum, [B, H, g, R, J]; behind them the sum.

        What dropout drops is negative, and counts in the sum. `take` gives memory.
        """
        scores = []
        for i, (piece, biases) in enumerate(self.readers(part)):
            shape = (*q_BHgRK.shape[:4], piece.width(part, self.rows))
            score = piece.scores(q_BHgRK, k, part, take(f"weight{i}", shape, q_BHgRK.dtype))
            for bias in biases:
                score += bias
            scores.append(score)
        largest = functools.reduce(torch.maximum, (s.amax(dim=-1, keepdim=True) for s in scores))
        for score in scores:
            score.sub_(largest).exp2_()
        sum_BHgR1 = sum_of(weight.sum(dim=-1, keepdim=True) for weight in scores)
        if self.p > 0:
            for weight in scores:
                weight *= draw_kept(weight.shape, self.p, generator).mul_(2).sub_(1)
        return [*scores, sum_BHgR1]

    def dropped(self, scratch: _Scratch, weight: Tensor) -> Tensor:
        """What dropout leaves of them."""
        if self.p == 0:
            return weight
        return torch.clamp_min(weight, 0, out=scratch.take("dropped", weight.shape, weight.dtype))


class _Attention(torch.autograd.Function):
    """Weights are kept for the gradient if they are few, else formed again, dropout and all."""

    @staticmethod
    def forward(ctx: Any, q_BHLK: Tensor, k_BHLK: Tensor, v_BHLK: Tensor, plan: _Plan) -> Tensor:
        units, scratch = plan.units(*q_BHLK.shape[:2]), _Scratch()
        seeds = torch.randint(2**32, (len(units),)).tolist() if plan.p > 0 else [0] * len(units)
        y_BHLK = empty_heads_inside(q_BHLK)
        has_grad = any(ctx.needs_input_grad)
        keeps = has_grad and plan.keys_per_query <= KEPT_WIDTH
        kept: list[list[Tensor]] = [[] for _ in units]
        keep_scale = 1 / keep_probability(plan.p) if plan.p > 0 else 1.0

        def attend(i: int) -> None:
            here = units[i].examples, units[i].heads
            take = new if has_grad else scratch.take
            q = plan.to_blocks(take, "q", q_BHLK[here], q_BHLK.shape[3] ** -0.5 / math.log(2))
            k = plan.to_blocks(take, "k", k_BHLK[here])
            v = plan.to_blocks(take, "v", v_BHLK[here])
            if has_grad:
                kept[i] += [x.padded_PK for x in (q, k, v)]
            generator = torch.Generator().manual_seed(seeds[i])
            for part in plan.parts(units[i]):
                take = new if keeps else scratch.take
                q_BHgRK = plan.queries(q.inside, part)
                *weights, sum_BHgR1 = plan.weights(take, q_BHgRK, k, part, generator)
                if keeps:
                    kept[i] += [*weights, sum_BHgR1]
                y_BHgRK = sum_of(
                    piece.combine(plan.dropped(scratch, weight), v, part)
                    for (piece, _), weight in zip(plan.readers(part), weights, strict=True)
                )
                plan.put(y_BHLK[here], part, y_BHgRK, keep_scale / sum_BHgR1)

        side_by_side(attend, len(units))
        # The rows in blocks, not the caller's: as many, and no second copy.
        ctx.save_for_backward(y_BHLK, *itertools.chain(*kept))
        ctx.plan, ctx.units, ctx.seeds, ctx.keeps = plan, units, seeds, keeps
        return y_BHLK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BHLK: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # type: ignore[override]
        y_BHLK, *kept = ctx.saved_tensors
        plan, units, seeds, scratch = ctx.plan, ctx.units, ctx.seeds, _Scratch()
        num_kept = len(kept) // len(units)
        keep_scale = 1 / keep_probability(plan.p) if plan.p > 0 else 1.0
        dq_BHLK, dk_BHLK, dv_BHLK = beside_each_other(y_BHLK)

        def differentiate(i: int) -> None:
            here = units[i].examples, units[i].heads
            mine = iter(kept[i * num_kept : (i + 1) * num_kept])
            sizes = plan.block_sizes(y_BHLK[here])
            q, k, v = (Blocks(x_PK, sizes, plan.margin) for x_PK in itertools.islice(mine, 3))
            dy = plan.to_blocks(scratch.take, "dy", dy_BHLK[here])
            # The softmax takes from each weight's gradient the mean of them under the weights.
            mean_BHL1 = (dy_BHLK[here] * y_BHLK[here]).sum(dim=-1, keepdim=True)
            mean = plan.to_blocks(scratch.take, "mean", mean_BHL1)
            dk, dv = (plan.empty_blocks(scratch.take, x, dy_BHLK[here]) for x in ("dk", "dv"))
            dk.padded_PK.zero_()
            dv.padded_PK.zero_()
            parts = plan.parts(units[i])
            queries = [[plan.queries(x.inside, part) for x in (q, dy, mean)] for part in parts]
            plan.clear_open(dy)
            plan.clear_open(mean)
            generator = torch.Generator().manual_seed(seeds[i])
            for part, (q_BHgRK, dy_BHgRK, mean_BHgR1) in zip(parts, queries, strict=True):
                *weights, sum_BHgR1 = (
                    itertools.islice(mine, len(plan.readers(part)) + 1)
                    if ctx.keeps
                    else plan.weights(scratch.take, q_BHgRK, k, part, generator)
                )
                dy_BHgRK *= keep_scale / sum_BHgR1
                mean_BHgR1 /= sum_BHgR1
                sums = []
                for (piece, _), weight in zip(plan.readers(part), weights, strict=True):
                    dropped = plan.dropped(scratch, weight)
                    piece.spread(dropped, dy_BHgRK, dv, part)
                    dscore = scratch.take("dscore", weight.shape, weight.dtype)
                    dscore = piece.scores(dy_BHgRK, v, part, dscore).mul_(dropped)
                    if plan.p > 0:
                        weight = torch.abs(weight, out=dropped)
                    dscore.addcmul_(weight, mean_BHgR1, value=-1)
                    piece.spread(dscore, q_BHgRK, dk, part)
                    sums.append(piece.combine(dscore, k, part))
                plan.put(dq_BHLK[here], part, sum_of(sums), y_BHLK.shape[3] ** -0.5)
            plan.from_blocks(dk, math.log(2), dk_BHLK[here])
            plan.from_blocks(dv, 1, dv_BHLK[here])

        side_by_side(differentiate, len(units))
        return dq_BHLK, dk_BHLK, dv_BHLK, None


def new(_: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Memory of its own."""
    return torch.empty(shape, dtype=dtype)


def sum_of(parts: Iterable[Tensor]) -> Tensor:
    """Their sum."""
    return functools.reduce(torch.add, parts)


def empty_heads_inside(x_BHLK: Tensor) -> Tensor:
    """Of the same shape, but in memory [B, L, H, K], as linear maps want it."""
    return torch.empty_like(
        x_BHLK.transpose(1, 2), memory_format=torch.contiguous_format
    ).transpose(1, 2)


def beside_each_other(x_BHLK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Three of the same shape, in memory [B, L, 3, H, K], as one linear map made them."""
    batch_size, num_heads, length, width = x_BHLK.shape
    all_BLTHK = x_BHLK.new_empty(batch_size, length, 3, num_heads, width)
    first, second, third = all_BLTHK.permute(2, 0, 3, 1, 4).unbind()
    return first, second, third
