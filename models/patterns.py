"""Softmax attention over sparse patterns, in blocks of queries: local, longformer, bigbird, sparse.

A pattern is a list of pieces. Each piece gives the queries of a block some keys; the softmax runs
over the keys of all pieces together, so a key that two pieces offer counts twice unless one of them
hides it. Only scores of the pieces' keys are ever formed.

Shapes: B batch, L length, H heads, K head dim; G blocks, R rows of a block, N = B * H * G blocks of
all heads and examples; J keys that a piece gives to a block, M keys that all blocks share.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from models.dropout import draw_kept, has_fast_path, keep_probability

CHUNK_SIZE = 2**20  # scores formed at a time on a CPU: enough for threads, few enough for caches


class Piece(Protocol):
    """Keys for the queries of each block; tensors in blocks are [B, H, G, R, K].

    `allowed` are bool masks that broadcast to the scores [B, H, G, R, J]; a key is read where all
    of them are True.
    """

    @property
    def allowed(self) -> Sequence[Tensor]: ...

    def width(self, num_blocks: int, rows: int) -> int:
        """J for G blocks of R rows."""

    def scores(self, q_BHGRK: Tensor, k_BHGRK: Tensor, out: Tensor | None = None) -> Tensor:
        """Products of queries and keys, [B, H, G, R, J]; written to `out` if there is one."""

    def combine(self, w_BHGRJ: Tensor, v_BHGRK: Tensor) -> Tensor:
        """For each query, the sum of its values times weights, [B, H, G, R, K]."""

    def spread(self, w_BHGRJ: Tensor, x_BHGRK: Tensor) -> Tensor:
        """The transpose of `combine`: for each key, the sum of its queries' x times weights."""


@dataclass(frozen=True)
class Window:
    """The blocks from `before` blocks back to `after` blocks ahead; J = (before + 1 + after) R.

    At the ends of a sequence the blocks are those of its neighbours in memory, or zeros, which
    `allowed` has to hide: that spares copies of the keys.
    """

    allowed: Sequence[Tensor]
    before: int = 0
    after: int = 0

    def width(self, num_blocks: int, rows: int) -> int:
        return (self.before + 1 + self.after) * rows

    def scores(self, q_BHGRK: Tensor, k_BHGRK: Tensor, out: Tensor | None = None) -> Tensor:
        return product(q_BHGRK, self._windows(k_BHGRK), out)

    def combine(self, w_BHGRJ: Tensor, v_BHGRK: Tensor) -> Tensor:
        y_NRK = torch.bmm(w_BHGRJ.flatten(0, 2), self._windows(v_BHGRK).mT)
        return y_NRK.unflatten(0, v_BHGRK.shape[:3])

    def spread(self, w_BHGRJ: Tensor, x_BHGRK: Tensor) -> Tensor:
        x_NRK, w_NRJ = x_BHGRK.flatten(0, 2), w_BHGRJ.flatten(0, 2)
        num_blocks, rows, width = x_NRK.shape
        size = self.before + 1 + self.after
        sum_PRK = x_NRK.new_zeros(num_blocks + size - 1, rows, width)
        for i, w_NRR in enumerate(w_NRJ.split(rows, dim=-1)):
            sum_PRK[i : i + num_blocks].baddbmm_(w_NRR.mT, x_NRK)
        return sum_PRK[self.before : self.before + num_blocks].view_as(x_BHGRK)

    def _windows(self, x_BHGRK: Tensor) -> Tensor:
        """[N, K, J], without a copy: windows overlap."""
        rows = x_BHGRK.shape[3]
        x_PK = F.pad(x_BHGRK.flatten(0, 3), (0, 0, self.before * rows, self.after * rows))
        return x_PK.unfold(0, (self.before + 1 + self.after) * rows, rows)


@dataclass(frozen=True)
class Chosen:
    """The same positions for all blocks, counted in the blocks as they lie; J = M."""

    allowed: Sequence[Tensor]
    index_M: Tensor

    def width(self, num_blocks: int, rows: int) -> int:
        return len(self.index_M)

    def scores(self, q_BHGRK: Tensor, k_BHGRK: Tensor, out: Tensor | None = None) -> Tensor:
        k_BHMK = self._select(k_BHGRK)
        out_BHLM = None if out is None else out.flatten(2, 3)
        score_BHLM = product(q_BHGRK.flatten(2, 3), k_BHMK.flatten(0, 1).mT, out_BHLM)
        return score_BHLM.unflatten(2, q_BHGRK.shape[2:4])

    def combine(self, w_BHGRJ: Tensor, v_BHGRK: Tensor) -> Tensor:
        return (w_BHGRJ.flatten(2, 3) @ self._select(v_BHGRK)).view_as(v_BHGRK)

    def spread(self, w_BHGRJ: Tensor, x_BHGRK: Tensor) -> Tensor:
        y_BHMK = w_BHGRJ.flatten(2, 3).mT @ x_BHGRK.flatten(2, 3)
        sum_BHGRK = torch.zeros_like(x_BHGRK)
        sum_BHGRK.flatten(2, 3).index_add_(2, self.index_M, y_BHMK)
        return sum_BHGRK

    def _select(self, x_BHGRK: Tensor) -> Tensor:
        return x_BHGRK.flatten(2, 3).index_select(2, self.index_M)


@dataclass(frozen=True)
class Drawn:
    """Other blocks by a table [H, G, r] of their numbers, of each head its own; J = r R."""

    allowed: Sequence[Tensor]
    table_HGr: Tensor

    def width(self, num_blocks: int, rows: int) -> int:
        return self.table_HGr.shape[2] * rows

    def scores(self, q_BHGRK: Tensor, k_BHGRK: Tensor, out: Tensor | None = None) -> Tensor:
        return product(q_BHGRK, self._select(k_BHGRK).mT, out)

    def combine(self, w_BHGRJ: Tensor, v_BHGRK: Tensor) -> Tensor:
        return torch.bmm(w_BHGRJ.flatten(0, 2), self._select(v_BHGRK)).view_as(v_BHGRK)

    def spread(self, w_BHGRJ: Tensor, x_BHGRK: Tensor) -> Tensor:
        y_NJK = torch.bmm(w_BHGRJ.flatten(0, 2).mT, x_BHGRK.flatten(0, 2))
        sum_BHGRK = torch.zeros_like(x_BHGRK)
        index = self._index(x_BHGRK)
        sum_BHGRK.flatten(0, 2).flatten(1).index_add_(
            0, index, y_NJK.reshape(len(index), x_BHGRK.shape[3:].numel())
        )
        return sum_BHGRK

    def _index(self, x_BHGRK: Tensor) -> Tensor:
        """Numbers among all N blocks, [N * r]."""
        batch_size, num_heads, num_blocks = x_BHGRK.shape[:3]
        first_BH = torch.arange(batch_size * num_heads, device=x_BHGRK.device) * num_blocks
        first_BH11 = first_BH.view(batch_size, num_heads, 1, 1)
        return (first_BH11 + self.table_HGr).flatten()

    def _select(self, x_BHGRK: Tensor) -> Tensor:
        chosen = x_BHGRK.flatten(0, 2).flatten(1).index_select(0, self._index(x_BHGRK))
        return chosen.view(x_BHGRK.shape[:3].numel(), -1, x_BHGRK.shape[4])


@dataclass(frozen=True)
class Column:
    """The same row of every block: row r of a block reads row r of all blocks; J = G."""

    allowed: Sequence[Tensor]

    def width(self, num_blocks: int, rows: int) -> int:
        return num_blocks

    def scores(self, q_BHGRK: Tensor, k_BHGRK: Tensor, out: Tensor | None = None) -> Tensor:
        score = (q_BHGRK.transpose(2, 3) @ k_BHGRK.transpose(2, 3).mT).transpose(2, 3)
        return score if out is None else out.copy_(score)

    def combine(self, w_BHGRJ: Tensor, v_BHGRK: Tensor) -> Tensor:
        return (w_BHGRJ.transpose(2, 3) @ v_BHGRK.transpose(2, 3)).transpose(2, 3)

    def spread(self, w_BHGRJ: Tensor, x_BHGRK: Tensor) -> Tensor:
        return (w_BHGRJ.transpose(2, 3).mT @ x_BHGRK.transpose(2, 3)).transpose(2, 3)


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
        weight_BHGRJ = F.dropout(plan.weights(q, k).to(v.dtype), dropout)
        return plan.from_blocks(plan.combine(weight_BHGRJ, v))
    dtype = torch.promote_types(q_BHLK.dtype, torch.float32)
    with torch.autocast("cpu", enabled=False):
        q, k, v = (x.to(dtype) for x in (q_BHLK, k_BHLK, v_BHLK))
        plan = _Plan.make(pieces, block_rows, front, dropout, q)
        return _Attention.apply(q, k, v, plan).to(q_BHLK.dtype)


def key_mask(mask_BL: Tensor, rows: int, *, before: int = 0, after: int = 0) -> Tensor:
    """Of a `Window`, which keys are True in the mask, [B, 1, G, 1, J]; none beyond the ends."""
    mask_BP = F.pad(mask_BL, (before * rows, -mask_BL.shape[1] % rows + after * rows))
    return mask_BP.unfold(1, (before + 1 + after) * rows, rows)[:, None, :, None]


def distance_mask(
    rows: int, device: torch.device, *, back: int, ahead: int, before: int = 0, after: int = 0
) -> Tensor:
    """Of a `Window`, the keys at most `back` positions before a row, `ahead` behind it; [R, J]."""
    row_R1 = torch.arange(rows, device=device)[:, None]
    key_J = torch.arange(-before * rows, (1 + after) * rows, device=device)
    return (key_J >= row_R1 - back) & (key_J <= row_R1 + ahead)


@dataclass(frozen=True)
class _Plan:
    pieces: Sequence[Piece]
    biases: list[list[Tensor]]  # of each piece, what is added to its scores
    widths: list[int]
    rows: int
    front: int
    length: int
    p: float

    @classmethod
    def make(
        cls, pieces: Sequence[Piece], rows: int, front: int, p: float, q_BHLK: Tensor
    ) -> _Plan:
        length = q_BHLK.shape[2]
        num_blocks = -(-(front + length) // rows)
        dtype = torch.promote_types(q_BHLK.dtype, torch.float32)
        # Added, not filled in: a row where all is hidden has equal scores, and is no NaN.
        hide = torch.finfo(dtype).min / 2

        def bias(allowed: Tensor) -> Tensor:
            allowed = allowed.view((1,) * (5 - allowed.dim()) + allowed.shape)
            return (~allowed).to(dtype) * hide

        biases = [[bias(allowed) for allowed in piece.allowed] for piece in pieces]
        widths = [piece.width(num_blocks, rows) for piece in pieces]
        return cls(pieces, biases, widths, rows, front, length, p)

    def to_blocks(self, x_BHLK: Tensor) -> Tensor:
        """[B, H, G, R, K], contiguous."""
        end = -(self.front + self.length) % self.rows
        x_BHLK = F.pad(x_BHLK, (0, 0, self.front, end)) if self.front or end else x_BHLK
        return x_BHLK.contiguous().unflatten(2, (-1, self.rows))

    def from_blocks(self, x_BHGRK: Tensor) -> Tensor:
        """[B, H, L, K]."""
        return x_BHGRK.flatten(2, 3)[:, :, self.front : self.front + self.length]

    def weights(self, q_BHGRK: Tensor, k_BHGRK: Tensor) -> Tensor:
        """Softmax weights, in float32 or wider; those of the pieces side by side."""
        q_BHGRK = q_BHGRK * q_BHGRK.shape[-1] ** -0.5
        scores = [
            sum(biases, piece.scores(q_BHGRK, k_BHGRK))
            for piece, biases in zip(self.pieces, self.biases, strict=True)
        ]
        return torch.cat(scores, dim=-1).softmax(dim=-1)

    def combine(self, w_BHGRJ: Tensor, v_BHGRK: Tensor) -> Tensor:
        parts = w_BHGRJ.split(self.widths, dim=-1)
        return sum_of(p.combine(w, v_BHGRK) for p, w in zip(self.pieces, parts, strict=True))

    def spread(self, w_BHGRJ: Tensor, x_BHGRK: Tensor) -> Tensor:
        parts = w_BHGRJ.split(self.widths, dim=-1)
        return sum_of(p.spread(w, x_BHGRK) for p, w in zip(self.pieces, parts, strict=True))

    def make_buffers(self, q_BHLK: Tensor, count: int) -> tuple[list[slice], list[Tensor]]:
        """Examples whose scores are formed together, and memory for as many weights."""
        batch_size, num_heads = q_BHLK.shape[:2]
        num_blocks, width = -(-(self.front + self.length) // self.rows), sum(self.widths)
        size = max(1, CHUNK_SIZE // (num_heads * num_blocks * self.rows * width))
        chunks = [slice(i, min(i + size, batch_size)) for i in range(0, batch_size, size)]
        shape = (min(size, batch_size), num_heads, num_blocks, self.rows, width)
        return chunks, [q_BHLK.new_empty(shape) for _ in range(count)]

    def scores_into(self, score_BHGRJ: Tensor, q_BHGRK: Tensor, k_BHGRK: Tensor) -> None:
        parts = score_BHGRJ.split(self.widths, dim=-1)
        for piece, part in zip(self.pieces, parts, strict=True):
            piece.scores(q_BHGRK, k_BHGRK, out=part)

    def weights_into(
        self, weight: Tensor, score: Tensor, q_BHGRK: Tensor, k_BHGRK: Tensor, examples: slice
    ) -> None:
        """As `weights`; of the examples of a chunk."""
        self.scores_into(score, q_BHGRK * q_BHGRK.shape[-1] ** -0.5, k_BHGRK)
        for part, biases in zip(score.split(self.widths, dim=-1), self.biases, strict=True):
            for bias in biases:
                part.add_(bias[examples] if len(bias) > 1 else bias)
        torch.softmax(score, dim=-1, out=weight)

    def kept_into(self, kept: Tensor, seed: int) -> None:
        """1 for a weight that dropout keeps, else 0; the same again by the same seed."""
        kept.copy_(draw_kept(kept.shape, self.p, torch.Generator().manual_seed(seed)))


class _Attention(torch.autograd.Function):
    """Scores are formed chunk by chunk, and again for the gradient with the same dropout."""

    @staticmethod
    def forward(ctx: Any, q_BHLK: Tensor, k_BHLK: Tensor, v_BHLK: Tensor, plan: _Plan) -> Tensor:
        chunks, buffers = plan.make_buffers(q_BHLK, 2)
        seeds = torch.randint(2**32, (len(chunks),)).tolist() if plan.p > 0 else [0] * len(chunks)
        y_BHLK = empty_heads_inside(q_BHLK)
        for chunk, seed in zip(chunks, seeds, strict=True):
            q, k, v = (plan.to_blocks(x[chunk]) for x in (q_BHLK, k_BHLK, v_BHLK))
            score, weight = (buffer[: len(q)] for buffer in buffers)
            plan.weights_into(weight, score, q, k, chunk)
            if plan.p > 0:
                plan.kept_into(score, seed)
                weight.mul_(score)
            y_BHLK[chunk] = plan.from_blocks(plan.combine(weight, v))
        if plan.p > 0:
            y_BHLK.mul_(1 / keep_probability(plan.p))
        ctx.save_for_backward(q_BHLK, k_BHLK, v_BHLK, y_BHLK)
        ctx.plan, ctx.seeds = plan, seeds
        return y_BHLK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BHLK: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # type: ignore[override]
        q_BHLK, k_BHLK, v_BHLK, y_BHLK = ctx.saved_tensors
        plan, scale = ctx.plan, q_BHLK.shape[3] ** -0.5
        dq_BHLK, dk_BHLK, dv_BHLK = (empty_heads_inside(x) for x in (q_BHLK, k_BHLK, v_BHLK))
        chunks, buffers = plan.make_buffers(q_BHLK, 3 if plan.p > 0 else 2)
        for chunk, seed in zip(chunks, ctx.seeds, strict=True):
            q, k, v, y, dy = (
                plan.to_blocks(x[chunk]) for x in (q_BHLK, k_BHLK, v_BHLK, y_BHLK, dy_BHLK)
            )
            score, weight, *rest = (buffer[: len(q)] for buffer in buffers)
            plan.weights_into(weight, score, q, k, chunk)
            # The softmax takes from each weight's gradient the mean of them under the weights.
            mean_BHGR1 = (dy * y).sum(dim=-1, keepdim=True)
            dropped, dweight = weight, score
            if plan.p > 0:
                (dropped,) = rest
                plan.kept_into(dropped, seed)
                dy = dy * (1 / keep_probability(plan.p))
            plan.scores_into(dweight, dy, v)
            if plan.p > 0:
                dweight.mul_(dropped)
                dropped.mul_(weight)
            dv_BHLK[chunk] = plan.from_blocks(plan.spread(dropped, dy))
            dscore = dweight.sub_(mean_BHGR1).mul_(weight)
            dq_BHLK[chunk] = plan.from_blocks(plan.combine(dscore, k)).mul_(scale)
            dk_BHLK[chunk] = plan.from_blocks(plan.spread(dscore, q)).mul_(scale)
        return dq_BHLK, dk_BHLK, dv_BHLK, None


def product(q_BHGRK: Tensor, k_NKJ: Tensor, out: Tensor | None) -> Tensor:
    """Of each block of queries with its own keys; batch dimensions as the queries'."""
    last = q_BHGRK.dim() - 3
    if out is None:
        return torch.bmm(q_BHGRK.flatten(0, last), k_NKJ).unflatten(0, q_BHGRK.shape[: last + 1])
    torch.bmm(q_BHGRK.flatten(0, last), k_NKJ, out=out.flatten(0, last))
    return out


def sum_of(parts: Iterable[Tensor]) -> Tensor:
    """Their sum."""
    return functools.reduce(torch.add, parts)


def empty_heads_inside(x_BHLK: Tensor) -> Tensor:
    """Of the same shape, but in memory [B, L, H, K], as linear maps want it."""
    return torch.empty_like(
        x_BHLK.transpose(1, 2), memory_format=torch.contiguous_format
    ).transpose(1, 2)
