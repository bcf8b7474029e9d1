"""Softmax attention over sparse patterns, in blocks of queries: local, longformer, bigbird, sparse.

A pattern is a list of pieces (models/pieces.py). Each piece gives the queries of a block some keys;
the softmax runs over the keys of all pieces together, so a key that two pieces offer counts twice
unless one of them hides it. Only scores of the pieces' keys are ever formed.

On a CPU a thread works on an example at a time, or on a head of it: a block's products are too
small to be divided among threads.

Shapes: B batch, L length, H heads, K head dim; G blocks, g of a part, R rows of a block; J keys
that the pieces give to a block.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from models.dropout import draw_kept, has_fast_path, keep_probability, side_by_side
from models.pieces import Part, Piece

CHUNK_SIZE = 2**19  # scores a thread forms at a time: enough for many operations, few for caches


def attend_pieces(
    q_BHLK: Tensor,
    k_BHLK: Tensor,
    v_BHLK: Tensor,
    pieces: Sequence[Piece],
    *,
    block_rows: int,
    front: int = 0,
    dropout: float = 0.0,
) -> Tensor:
    """softmax(q k^T / sqrt(K)) v over the keys of all pieces; [B, H, L, K].

    Positions lie in blocks of `block_rows`, behind `front` rows of zeros; zeros fill the last. A
    query without any allowed key reads all keys of its pieces evenly, so every result is finite.
    """
    if not has_fast_path(q_BHLK):
        plan = _Plan.make(pieces, block_rows, front, dropout, q_BHLK)
        q, k, v = (plan.to_blocks(x) for x in (q_BHLK, k_BHLK, v_BHLK))
        part = plan.all(*q.shape[:2])
        weight_BHGRJ = F.dropout(plan.weights(q, k, part).to(v.dtype), dropout)
        return plan.from_blocks(plan.combine(weight_BHGRJ, v, part))
    dtype = torch.promote_types(q_BHLK.dtype, torch.float32)
    with torch.autocast("cpu", enabled=False):
        q, k, v = (x.to(dtype) for x in (q_BHLK, k_BHLK, v_BHLK))
        plan = _Plan.make(pieces, block_rows, front, dropout, q)
        return _Attention.apply(q, k, v, plan).to(q_BHLK.dtype)


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
    pieces: Sequence[Piece]
    biases: list[list[Tensor]]  # of each piece, what is added to its scores
    rows: int
    front: int
    length: int
    num_blocks: int
    p: float

    @classmethod
    def make(
        cls, pieces: Sequence[Piece], rows: int, front: int, p: float, q_BHLK: Tensor
    ) -> _Plan:
        length = q_BHLK.shape[2]
        dtype = torch.promote_types(q_BHLK.dtype, torch.float32)
        # Added, not filled in: a row where all is hidden has equal scores, and is no NaN.
        hide = torch.finfo(dtype).min / 2

        def bias(allowed: Tensor) -> Tensor:
            allowed = allowed.view((1,) * (5 - allowed.dim()) + allowed.shape)
            return (~allowed).to(dtype) * hide

        biases = [[bias(allowed) for allowed in piece.allowed] for piece in pieces]
        return cls(pieces, biases, rows, front, length, -(-(front + length) // rows), p)

    def to_blocks(self, x_BHLK: Tensor) -> Tensor:
        """[B, H, G, R, K], contiguous."""
        end = -(self.front + self.length) % self.rows
        x_BHLK = F.pad(x_BHLK, (0, 0, self.front, end)) if self.front or end else x_BHLK
        return x_BHLK.contiguous().unflatten(2, (-1, self.rows))

    def from_blocks(self, x_BHGRK: Tensor) -> Tensor:
        """[B, H, L, K]."""
        return x_BHGRK.flatten(2, 3)[:, :, self.front : self.front + self.length]

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
        """Runs of a unit's blocks whose scores are formed together."""
        num_parts = -(-self.head_size // CHUNK_SIZE)
        size = -(-self.num_blocks // num_parts)
        starts = range(0, self.num_blocks, size)
        return [replace(unit, blocks=slice(g, min(g + size, self.num_blocks))) for g in starts]

    @property
    def head_size(self) -> int:
        """Scores of one head."""
        return self.num_blocks * self.rows * sum(self.widths(self.all(1, 1)))

    def widths(self, part: Part) -> list[int]:
        return [piece.width(part, self.rows) for piece in self.pieces]

    def weights(self, q_BHGRK: Tensor, k_BHGRK: Tensor, part: Part) -> Tensor:
        """Softmax weights, in float32 or wider; those of the pieces side by side."""
        q_BHGRK = q_BHGRK * q_BHGRK.shape[-1] ** -0.5
        scores = [
            sum(biases, piece.scores(q_BHGRK, k_BHGRK, part))
            for piece, biases in zip(self.pieces, self.biases, strict=True)
        ]
        return torch.cat(scores, dim=-1).softmax(dim=-1)

    def weights_in(self, scratch: _Scratch, q_BHgRK: Tensor, k_BHGRK: Tensor, part: Part) -> Tensor:
        """As `weights`, in memory that the next part uses again."""
        q_BHgRK = q_BHgRK * q_BHgRK.shape[-1] ** -0.5
        widths = self.widths(part)
        shape, dtype = q_BHgRK.shape[:4], q_BHgRK.dtype
        weight = scratch.take("weight", (*shape, sum(widths)), dtype)
        for piece, biases, columns in zip(
            self.pieces, self.biases, weight.split(widths, dim=-1), strict=True
        ):
            # PyTorch forms products in a slice many times slower.
            score = scratch.take("score", columns.shape, dtype)
            score = piece.scores(q_BHgRK, k_BHGRK, part, score)
            for bias in biases:
                score = torch.add(score, part.of(bias)[..., : columns.shape[-1]], out=columns)
        return torch.softmax(weight, dim=-1, out=weight)

    def gradient_in(
        self, scratch: _Scratch, dropped: Tensor, dy_BHgRK: Tensor, v_BHGRK: Tensor, part: Part
    ) -> Tensor:
        """Of the weights, times `dropped`."""
        dweight = scratch.take("gradient", dropped.shape, dropped.dtype)
        widths = self.widths(part)
        for piece, weight, columns in zip(
            self.pieces, dropped.split(widths, dim=-1), dweight.split(widths, dim=-1), strict=True
        ):
            score = scratch.take("score", columns.shape, dropped.dtype)
            torch.mul(piece.scores(dy_BHgRK, v_BHGRK, part, score), weight, out=columns)
        return dweight

    def combine(self, w_BHgRJ: Tensor, v_BHGRK: Tensor, part: Part) -> Tensor:
        columns = w_BHgRJ.split(self.widths(part), dim=-1)
        return sum_of(
            p.combine(w, v_BHGRK, part) for p, w in zip(self.pieces, columns, strict=True)
        )

    def spread(self, w_BHgRJ: Tensor, x_BHgRK: Tensor, sum_BHGRK: Tensor, part: Part) -> None:
        columns = w_BHgRJ.split(self.widths(part), dim=-1)
        for piece, weight in zip(self.pieces, columns, strict=True):
            piece.spread(weight, x_BHgRK, sum_BHGRK, part)


class _Attention(torch.autograd.Function):
    """Scores are formed part by part, and again for the gradient with the same dropout."""

    @staticmethod
    def forward(ctx: Any, q_BHLK: Tensor, k_BHLK: Tensor, v_BHLK: Tensor, plan: _Plan) -> Tensor:
        units, scratch = plan.units(*q_BHLK.shape[:2]), _Scratch()
        seeds = torch.randint(2**32, (len(units),)).tolist() if plan.p > 0 else [0] * len(units)
        y_BHLK = empty_heads_inside(q_BHLK)

        def attend(i: int) -> None:
            here = units[i].examples, units[i].heads
            q, k, v = (plan.to_blocks(x[here]) for x in (q_BHLK, k_BHLK, v_BHLK))
            y = torch.empty_like(q)
            generator = torch.Generator().manual_seed(seeds[i])
            for part in plan.parts(units[i]):
                weight = plan.weights_in(scratch, q[:, :, part.blocks], k, part)
                if plan.p > 0:
                    weight *= draw_kept(weight.shape, plan.p, generator)
                y[:, :, part.blocks] = plan.combine(weight, v, part)
            y_BHLK[here] = plan.from_blocks(y)

        side_by_side(attend, len(units))
        if plan.p > 0:
            y_BHLK.mul_(1 / keep_probability(plan.p))
        ctx.save_for_backward(q_BHLK, k_BHLK, v_BHLK, y_BHLK)
        ctx.plan, ctx.units, ctx.seeds = plan, units, seeds
        return y_BHLK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BHLK: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # type: ignore[override]
        q_BHLK, k_BHLK, v_BHLK, y_BHLK = ctx.saved_tensors
        plan, units, seeds, scratch = ctx.plan, ctx.units, ctx.seeds, _Scratch()
        scale = q_BHLK.shape[3] ** -0.5
        keep_scale = 1 / keep_probability(plan.p) if plan.p > 0 else 1
        dq_BHLK, dk_BHLK, dv_BHLK = (empty_heads_inside(x) for x in (q_BHLK, k_BHLK, v_BHLK))

        def differentiate(i: int) -> None:
            here = units[i].examples, units[i].heads
            q, k, v, y, dy = (
                plan.to_blocks(x[here]) for x in (q_BHLK, k_BHLK, v_BHLK, y_BHLK, dy_BHLK)
            )
            # The softmax takes from each weight's gradient the mean of them under the weights.
            mean = (dy * y).sum(dim=-1, keepdim=True)
            dy = dy * keep_scale
            dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
            generator = torch.Generator().manual_seed(seeds[i])
            for part in plan.parts(units[i]):
                q_part, dy_part, mean_part = (x[:, :, part.blocks] for x in (q, dy, mean))
                weight = dropped = plan.weights_in(scratch, q_part, k, part)
                if plan.p > 0:
                    kept = draw_kept(weight.shape, plan.p, generator)
                    dropped = scratch.take("dropped", weight.shape, weight.dtype)
                    torch.mul(weight, kept, out=dropped)
                plan.spread(dropped, dy_part, dv, part)
                dscore = plan.gradient_in(scratch, dropped, dy_part, v, part)
                dscore.addcmul_(weight, mean_part, value=-1)
                dq[:, :, part.blocks] = plan.combine(dscore, k, part)
                plan.spread(dscore, q_part, dk, part)
            dq_BHLK[here] = plan.from_blocks(dq.mul_(scale))
            dk_BHLK[here] = plan.from_blocks(dk.mul_(scale))
            dv_BHLK[here] = plan.from_blocks(dv)

        side_by_side(differentiate, len(units))
        return dq_BHLK, dk_BHLK, dv_BHLK, None


def sum_of(parts: Iterable[Tensor]) -> Tensor:
    """Their sum."""
    return functools.reduce(torch.add, parts)


def empty_heads_inside(x_BHLK: Tensor) -> Tensor:
    """Of the same shape, but in memory [B, L, H, K], as linear maps want it."""
    return torch.empty_like(
        x_BHLK.transpose(1, 2), memory_format=torch.contiguous_format
    ).transpose(1, 2)
