"""What the blocks of a sparse pattern read: its pieces, as products of blocks of heads.

Shapes: B batch, L length, H heads, K head dim; G blocks of a head, g of a part, R rows of a block,
N = B * H * G blocks of all heads and examples, n those of a part; J keys that a piece gives to a
block, M keys that all blocks share, r blocks that are drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Part:
    """Queries that are worked on together: all blocks of these heads, or some of a single head."""

    examples: slice
    heads: slice
    blocks: slice
    is_open: bool = False  # those that read everything, instead

    def of(self, x_BHGRJ: Tensor) -> Tensor:
        """What belongs to them; a dimension of size 1 belongs to all."""
        slices = (self.examples, self.heads, self.blocks)
        return x_BHGRJ[
            tuple(
                s if n > 1 else slice(None) for s, n in zip(slices, x_BHGRJ.shape[:3], strict=True)
            )
        ]


@dataclass(frozen=True)
class Blocks:
    """Rows of all heads in blocks, and in memory `margin` more rows before the first and behind."""

    padded_PK: Tensor
    sizes: Sequence[int]  # B, H, G, R, K
    margin: int = 0

    @property
    def inside(self) -> Tensor:
        """[B, H, G, R, K]."""
        return self.padded_PK[self.margin : len(self.padded_PK) - self.margin].view(self.sizes)

    def run(self, first: int, count: int) -> Tensor:
        """Blocks in the order in which they lie; the first may be one of the margin."""
        rows, width = self.sizes[3:]
        start = self.margin + first * rows
        return self.padded_PK[start : start + count * rows].view(count, rows, width)

    def windows(self, first: int, count: int, num_blocks: int) -> Tensor:
        """Without a copy: they overlap, so many blocks from each of a run on; [n, K, J]."""
        rows = self.sizes[3]
        start = self.margin + first * rows
        x_PK = self.padded_PK[start : start + (count - 1 + num_blocks) * rows]
        return x_PK.unfold(0, num_blocks * rows, rows)


class Piece(Protocol):
    """Keys for the queries of each block.

    Of keys there are all blocks, of queries [B, H, g, R, K] those of a part. `margin` is the number
    of blocks that it needs in memory around the keys.
    `allowed` are bool masks that broadcast to the scores [B, H, G, R, J]; a key is read where all
    of them are True.
    """

    @property
    def allowed(self) -> Sequence[Tensor]: ...

    @property
    def margin(self) -> int: ...

    def width(self, part: Part, rows: int) -> int:
        """J for blocks of R rows; the first so many of the keys in `allowed`."""

    def scores(self, q_BHgRK: Tensor, k: Blocks, part: Part, out: Tensor | None = None) -> Tensor:
        """Products of queries and keys, [B, H, g, R, J]; in `out` if there is one, contiguous."""

    def combine(self, w_BHgRJ: Tensor, v: Blocks, part: Part) -> Tensor:
        """For each query, the sum of its values times weights, [B, H, g, R, K]."""

    def spread(self, w_BHgRJ: Tensor, x_BHgRK: Tensor, total: Blocks, part: Part) -> None:
        """The transpose of `combine`: add to each key its queries' x times weights."""


@dataclass(frozen=True)
class Window:
    """The blocks from `before` blocks back to `after` blocks ahead; J = (before + 1 + after) R.

    At the ends of a sequence the blocks are those of its neighbours in memory, or zeros, which
    `allowed` has to hide: that spares copies of the keys.
    """

    allowed: Sequence[Tensor]
    before: int = 0
    after: int = 0

    @property
    def margin(self) -> int:
        return max(self.before, self.after)

    @property
    def num_blocks(self) -> int:
        """Of keys, for a block of queries."""
        return self.before + 1 + self.after

    def width(self, part: Part, rows: int) -> int:
        return self.num_blocks * rows

    def scores(self, q_BHgRK: Tensor, k: Blocks, part: Part, out: Tensor | None = None) -> Tensor:
        return product(q_BHgRK, self._windows(k, q_BHgRK, part), out)

    def combine(self, w_BHgRJ: Tensor, v: Blocks, part: Part) -> Tensor:
        y_nRK = torch.bmm(w_BHgRJ.flatten(0, 2), self._windows(v, w_BHgRJ, part).mT)
        return y_nRK.unflatten(0, w_BHgRJ.shape[:3])

    def spread(self, w_BHgRJ: Tensor, x_BHgRK: Tensor, total: Blocks, part: Part) -> None:
        w_nRJ, x_nRK = w_BHgRJ.flatten(0, 2), x_BHgRK.flatten(0, 2)
        first = part.blocks.start - self.before
        for i, w_nRR in enumerate(w_nRJ.chunk(self.num_blocks, dim=-1), start=first):
            total.run(i, len(x_nRK)).baddbmm_(w_nRR.mT, x_nRK)

    def _windows(self, x: Blocks, of_BHgRJ: Tensor, part: Part) -> Tensor:
        """[n, K, J]."""
        count = math.prod(of_BHgRJ.shape[:3])
        return x.windows(part.blocks.start - self.before, count, self.num_blocks)


@dataclass(frozen=True)
class Chosen:
    """The same positions for all blocks, counted in the blocks as they lie; J = M.

    Of block g only the first `ends[g]` of them are needed; None: all.
    """

    allowed: Sequence[Tensor]
    index_M: Tensor
    ends: Sequence[int] | None = None

    @property
    def margin(self) -> int:
        return 0

    def width(self, part: Part, rows: int) -> int:
        return len(self._index(part))

    def scores(self, q_BHgRK: Tensor, k: Blocks, part: Part, out: Tensor | None = None) -> Tensor:
        k_NKM = self._select(k.inside, part).flatten(0, 1).mT
        out_BHlM = None if out is None else out.flatten(2, 3)
        return product(q_BHgRK.flatten(2, 3), k_NKM, out_BHlM).unflatten(2, q_BHgRK.shape[2:4])

    def combine(self, w_BHgRJ: Tensor, v: Blocks, part: Part) -> Tensor:
        y_BHlK = w_BHgRJ.flatten(2, 3) @ self._select(v.inside, part)
        return y_BHlK.unflatten(2, w_BHgRJ.shape[2:4])

    def spread(self, w_BHgRJ: Tensor, x_BHgRK: Tensor, total: Blocks, part: Part) -> None:
        y_BHMK = w_BHgRJ.flatten(2, 3).mT @ x_BHgRK.flatten(2, 3)
        total.inside.flatten(2, 3).index_add_(2, self._index(part), y_BHMK)

    def _index(self, part: Part) -> Tensor:
        return self.index_M if self.ends is None else self.index_M[: max(self.ends[part.blocks])]

    def _select(self, x_BHGRK: Tensor, part: Part) -> Tensor:
        return x_BHGRK.flatten(2, 3).index_select(2, self._index(part))


@dataclass(frozen=True)
class Drawn:
    """Other blocks by a table [H, G, r] of their numbers, of each head its own; J = r R."""

    allowed: Sequence[Tensor]
    table_HGr: Tensor

    @property
    def margin(self) -> int:
        return 0

    def width(self, part: Part, rows: int) -> int:
        return self.table_HGr.shape[2] * rows

    def scores(self, q_BHgRK: Tensor, k: Blocks, part: Part, out: Tensor | None = None) -> Tensor:
        return product(q_BHgRK, self._select(k.inside, part).mT, out)

    def combine(self, w_BHgRJ: Tensor, v: Blocks, part: Part) -> Tensor:
        y_nRK = torch.bmm(w_BHgRJ.flatten(0, 2), self._select(v.inside, part))
        return y_nRK.unflatten(0, w_BHgRJ.shape[:3])

    def spread(self, w_BHgRJ: Tensor, x_BHgRK: Tensor, total: Blocks, part: Part) -> None:
        y_nJK = torch.bmm(w_BHgRJ.flatten(0, 2).mT, x_BHgRK.flatten(0, 2))
        index_nr = self._index(total.inside, part)
        y_nrRK = y_nJK.unflatten(1, (-1, x_BHgRK.shape[3]))
        total.inside.flatten(0, 2).index_add_(0, index_nr.flatten(), y_nrRK.flatten(0, 1))

    def _index(self, x_BHGRK: Tensor, part: Part) -> Tensor:
        """Numbers among all blocks, [n, r]."""
        batch_size, num_heads, num_blocks = x_BHGRK.shape[:3]
        first_BH = torch.arange(batch_size * num_heads, device=x_BHGRK.device) * num_blocks
        first_BH11 = first_BH.view(batch_size, num_heads, 1, 1)
        return (first_BH11 + self.table_HGr[part.heads, part.blocks]).flatten(0, 2)

    def _select(self, x_BHGRK: Tensor, part: Part) -> Tensor:
        """[n, J, K]."""
        index_nr = self._index(x_BHGRK, part)
        x_nrRK = (
            x_BHGRK.flatten(0, 2).index_select(0, index_nr.flatten()).unflatten(0, index_nr.shape)
        )
        return x_nrRK.flatten(1, 2)


@dataclass(frozen=True)
class Column:
    """The same row of every block up to the last of a part, which `allowed` hides from others.

    Row r of a block reads row r of these; J = G or less.
    """

    allowed: Sequence[Tensor]

    @property
    def margin(self) -> int:
        return 0

    def width(self, part: Part, rows: int) -> int:
        return part.blocks.stop

    def scores(self, q_BHgRK: Tensor, k: Blocks, part: Part, out: Tensor | None = None) -> Tensor:
        k_BHRKJ = k.inside[:, :, : part.blocks.stop].permute(0, 1, 3, 4, 2)
        score_BHgRJ = (q_BHgRK.transpose(2, 3) @ k_BHRKJ).transpose(2, 3)
        return score_BHgRJ if out is None else out.copy_(score_BHgRJ)

    def combine(self, w_BHgRJ: Tensor, v: Blocks, part: Part) -> Tensor:
        v_BHRJK = v.inside[:, :, : part.blocks.stop].transpose(2, 3)
        return (w_BHgRJ.transpose(2, 3) @ v_BHRJK).transpose(2, 3)

    def spread(self, w_BHgRJ: Tensor, x_BHgRK: Tensor, total: Blocks, part: Part) -> None:
        y_BHRJK = w_BHgRJ.permute(0, 1, 3, 4, 2) @ x_BHgRK.transpose(2, 3)
        total.inside[:, :, : part.blocks.stop] += y_BHRJK.transpose(2, 3)


@dataclass(frozen=True)
class Everything:
    """All positions, for queries of which a head has a single block; J = G R."""

    allowed: Sequence[Tensor]

    @property
    def margin(self) -> int:
        return 0

    def width(self, part: Part, rows: int) -> int:
        return self.allowed[0].shape[-1]

    def scores(self, q_BHgRK: Tensor, k: Blocks, part: Part, out: Tensor | None = None) -> Tensor:
        return product(q_BHgRK, self._all(k).mT, out)

    def combine(self, w_BHgRJ: Tensor, v: Blocks, part: Part) -> Tensor:
        y_nRK = torch.bmm(w_BHgRJ.flatten(0, 2), self._all(v))
        return y_nRK.unflatten(0, w_BHgRJ.shape[:3])

    def spread(self, w_BHgRJ: Tensor, x_BHgRK: Tensor, total: Blocks, part: Part) -> None:
        self._all(total).baddbmm_(w_BHgRJ.flatten(0, 2).mT, x_BHgRK.flatten(0, 2))

    def _all(self, x: Blocks) -> Tensor:
        """[B H, J, K]."""
        return x.inside.flatten(2, 3).flatten(0, 1)


def product(q_BHgRK: Tensor, k_NKJ: Tensor, out: Tensor | None) -> Tensor:
    """Of each block of queries with its own keys; batch dimensions as the queries'."""
    last = q_BHgRK.dim() - 3
    if out is None:
        return torch.bmm(q_BHgRK.flatten(0, last), k_NKJ).unflatten(0, q_BHgRK.shape[: last + 1])
    torch.bmm(q_BHgRK.flatten(0, last), k_NKJ, out=out.flatten(0, last))
    return out


def near_keys(mask_BL: Tensor, *, back: int, ahead: int) -> tuple[Window, int]:
    """The keys at most `back` positions before a query, `ahead` behind it; and the rows of a block.

    However far that is, no more blocks are read than there are.
    """
    length = mask_BL.shape[1]
    rows = max(1, min(128, length, max(back, ahead)))
    others = (length - 1) // rows
    before, after = min(-(-back // rows), others), min(-(-ahead // rows), others)
    allowed = [
        distance_mask(rows, mask_BL.device, back=back, ahead=ahead, before=before, after=after),
        key_mask(mask_BL, rows, before=before, after=after),
    ]
    return Window(allowed, before, after), rows


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
