"""Attention in rings of chunks: a token reads the windows of its chunks in all rounds at once.

Source: Reformer, Kitaev et al. 2020, https://arxiv.org/abs/2001.04451, section 2, with the numbers
of Hugging Face's LSH attention. One softmax runs over what a token reads in all rounds, so a key
that it meets twice counts twice.

Shapes: as in models/rings.py, where the rings come from; S = 2 for query (and key) and value; P
windows worked on together.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from models.dropout import has_fast_path, row_ends, side_by_side
from models.rings import Rings

EPSILON = 1e-6  # added to the mean square of a key before its root is taken
LOG2_E = math.log2(math.e)  # logits are in base 2: a CPU forms such powers in half the time
PADDING, ITSELF = -1e9 * LOG2_E, -1e5 * LOG2_E  # of keys not read, and of a token's own key
PIECE_SIZE = 2**18  # logits that a thread of a CPU forms at a time

Take = Callable[..., Tensor]  # memory of any content, by name and shape
Edges = list[tuple[int, Tensor, Tensor]] | None


@dataclass(frozen=True)
class RingAttention:
    """How tokens are read in the rings that `arrange` makes of queries [B, H, L, K] and a mask.

    padded: rings depend on the padded length. mask_later: a token reads none that come later.
    is_arena: keys are queries times sqrt(K), not queries scaled to length one, and a token reads
    itself.
    """

    arrange: Callable[[Tensor, Tensor], Rings]
    padded: bool
    mask_later: bool
    is_arena: bool

    def __call__(self, qv_BLSHK: Tensor, mask_BL: Tensor) -> Tensor:
        """In float32 or wider inside, zero at padding; [B, L, H, K]."""
        if torch.compiler.is_compiling():  # Dynamo of PyTorch 2.13 fails in the function below
            return torch.compiler.disable(self.__call__)(qv_BLSHK, mask_BL)
        dtype = qv_BLSHK.dtype
        with torch.autocast(qv_BLSHK.device.type, enabled=False):
            qv_BLSHK = qv_BLSHK.to(torch.promote_types(dtype, torch.float32))
            y_BLHK: Tensor = _Attention.apply(qv_BLSHK, mask_BL, self)
        return y_BLHK.to(dtype)

    def read(
        self, q_BHLK: Tensor, v_BHLK: Tensor, rings: Rings, take: Take
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Results [T, K], and of each token the largest logit and its softmax's divisor, [T, 1]."""
        q_XIK, k_XKW, v_XKW = lay_out(q_BHLK, self.keys(q_BHLK)[0], v_BHLK, rings, take)
        y_XIK = take("y", *q_XIK.shape)
        largest_XI1, sum_XI1 = q_XIK.new_empty(2, *q_XIK.shape[:2], 1)
        edges = self.edges(rings)
        for first, (q, k, v, y, largest_PI1, sum_PI1) in pieces(
            q_XIK, k_XKW, v_XKW, y_XIK, largest_XI1, sum_XI1
        ):
            weight_PIW = self.logits(q, k, first, rings, edges, take)
            torch.amax(weight_PIW, dim=2, keepdim=True, out=largest_PI1)
            weight_PIW.sub_(largest_PI1).exp2_()
            torch.sum(weight_PIW, dim=2, keepdim=True, out=sum_PI1)
            torch.bmm(weight_PIW, v.mT, out=y)
        largest_TR, sum_TR = (x.flatten()[rings.query_TR] for x in (largest_XI1, sum_XI1))
        largest_T1 = largest_TR.amax(dim=1, keepdim=True)
        share_TR = (largest_TR - largest_T1).exp2_()
        sum_T1 = (sum_TR * share_TR).sum(dim=1, keepdim=True)
        share_TR = share_TR / sum_T1 * rings.mask_T1
        return add_up(y_XIK, rings.query_TR, share_TR), largest_T1, sum_T1

    def differentiate(
        self,
        dy_BHLK: Tensor,
        q_BHLK: Tensor,
        v_BHLK: Tensor,
        y_BHLK: Tensor,
        largest_T1: Tensor,
        sum_T1: Tensor,
        rings: Rings,
        take: Take,
    ) -> tuple[Tensor, Tensor]:
        """Gradients of the results for queries, which are keys too, and values; [B, H, L, K]."""
        k_BHLK, factor_BHL1 = self.keys(q_BHLK)
        q_XIK, k_XKW, v_XKW = lay_out(q_BHLK, k_BHLK, v_BHLK, rings, take)
        # The softmax takes from each weight's gradient the mean of them under the weights.
        dy_BHLK = dy_BHLK / sum_T1.view(*q_BHLK.shape[:3], 1)
        mean_BHL1 = (dy_BHLK * y_BHLK).sum(dim=3, keepdim=True)
        rows_BHLK = torch.cat([dy_BHLK, mean_BHL1, largest_T1.view_as(mean_BHL1)], dim=3)
        token_XI = rings.window.own_slots(rings.token_F)
        rows_XIK = rows_BHLK.flatten(0, 2)[token_XI]
        dy_XIK, mean_XI1, largest_XI1 = rows_XIK.split([q_BHLK.shape[3], 1, 1], dim=2)
        # A slot without a token has no weights.
        is_real_XI = rings.window.own_slots(rings.is_real_F)
        largest_XI1 = largest_XI1.masked_fill(~is_real_XI[..., None], torch.inf)

        dq_XIK = take("dq", *q_XIK.shape)
        dk_XWK, dv_XWK = (take(name, *k_XKW.mT.shape) for name in ("dk", "dv"))
        edges = self.edges(rings)
        for first, (q, k, v, dy, mean_PI1, largest_PI1, dq, dk, dv) in pieces(
            q_XIK, k_XKW, v_XKW, dy_XIK, mean_XI1, largest_XI1, dq_XIK, dk_XWK, dv_XWK
        ):
            weight_PIW = self.logits(q, k, first, rings, edges, take).sub_(largest_PI1).exp2_()
            torch.bmm(weight_PIW.mT, dy, out=dv)
            dlogit_PIW = take("dlogits", *weight_PIW.shape)
            torch.bmm(dy, v, out=dlogit_PIW)
            dlogit_PIW.sub_(mean_PI1).mul_(weight_PIW)
            torch.bmm(dlogit_PIW, k.mT, out=dq)
            torch.bmm(dlogit_PIW.mT, q, out=dk)

        dq_BHLK = add_up(dq_XIK, rings.query_TR).view_as(q_BHLK)
        dk_BHLK, dv_BHLK = (add_up(x, rings.key_TP).view(q_BHLK.shape) for x in (dk_XWK, dv_XWK))
        dk_BHLK.mul_(1 / LOG2_E)
        if not self.is_arena:  # the scaling to length one takes out what is along the key
            dk_BHLK -= (k_BHLK * dk_BHLK).sum(dim=3, keepdim=True) * k_BHLK
        mask_BHL1 = rings.mask_T1.view(factor_BHL1.shape)
        return (dq_BHLK + factor_BHL1 * dk_BHLK) * mask_BHL1, dv_BHLK * mask_BHL1

    def keys(self, q_BHLK: Tensor) -> tuple[Tensor, Tensor]:
        """Keys, and what queries were multiplied with [B, H, L, 1]."""
        width = q_BHLK.shape[3]
        if self.is_arena:
            factor_BHL1 = torch.full_like(q_BHLK[..., :1], width**0.5)
        else:
            mean_BHL1 = q_BHLK.square().mean(dim=3, keepdim=True)
            factor_BHL1 = (mean_BHL1 + EPSILON).rsqrt() * width**-0.5
        return q_BHLK * factor_BHL1, factor_BHL1

    def logits(
        self, q_PIK: Tensor, k_PKW: Tensor, first: int, rings: Rings, edges: Edges, take: Take
    ) -> Tensor:
        """Of the windows from `first` on, with numbers for keys that are not read; [P, I, W]."""
        logit_PIW = take("logits", *q_PIK.shape[:2], k_PKW.shape[2])
        torch.bmm(q_PIK, k_PKW, out=logit_PIW)
        if self.is_arena:
            return logit_PIW
        window = rings.window
        logit_PIW.diagonal(window.before * window.chunk_length, dim1=1, dim2=2).fill_(ITSELF)
        if edges is None:
            padding, itself = self.unread(rings, slice(first, first + len(q_PIK)))
            return logit_PIW.masked_fill_(padding, PADDING).masked_fill_(itself, ITSELF)
        for x, padding, itself in edges:
            if first <= x < first + len(q_PIK):
                logit_PIW[x - first].masked_fill_(padding, PADDING).masked_fill_(itself, ITSELF)
        return logit_PIW

    def edges(self, rings: Rings) -> Edges:
        """Windows with more that is not read than the diagonal, and what; None: all of them.

        Only where rounds end a token meets itself elsewhere, or slots without one.
        """
        if self.is_arena or self.mask_later or not has_fast_path(rings.token_F):
            return None
        (edge_E,) = (~rings.is_plain_X).nonzero(as_tuple=True)
        return list(zip(edge_E.tolist(), *self.unread(rings, edge_E), strict=True))

    def unread(self, rings: Rings, windows: slice | Tensor) -> tuple[Tensor, Tensor]:
        """Which keys are padding or too late, and which the token itself; [X, I or 1, W]."""
        query_XI1 = rings.window.own_slots(rings.token_F)[windows, :, None]
        key_F = rings.token_F.masked_fill(~rings.is_real_F, -1)
        key_X1W = rings.window.slots(key_F)[windows, None]
        hidden = key_X1W < 0
        if self.mask_later:
            hidden = hidden | (key_X1W > query_XI1)
        return hidden, key_X1W == query_XI1


def lay_out(
    q_BHLK: Tensor, k_BHLK: Tensor, v_BHLK: Tensor, rings: Rings, take: Take
) -> tuple[Tensor, Tensor, Tensor]:
    """Base-2 queries of each window's own chunk [X, I, K], its keys and its values [X, K, W]."""
    rows_BHLK = take("tokens", *q_BHLK.shape[:3], 3 * q_BHLK.shape[3])
    torch.cat([q_BHLK * LOG2_E, k_BHLK, v_BHLK], dim=3, out=rows_BHLK)
    rows_FK = take("slots", len(rings.token_F), rows_BHLK.shape[3])
    torch.index_select(rows_BHLK.flatten(0, 2), 0, rings.token_F, out=rows_FK)
    q_FK, k_FK, v_FK = rows_FK.chunk(3, dim=1)
    window = rings.window
    return window.own_slots(q_FK), window.slots(k_FK), window.slots(v_FK)


def pieces(*tensors: Tensor) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """Windows worked on together: the number of the first, and what the tensors say of them.

    The first two are queries and keys.
    """
    num_windows, rows, _ = tensors[0].shape
    size = num_windows
    if has_fast_path(tensors[0]):
        num_pieces = max(1, round(num_windows * rows * tensors[1].shape[2] / PIECE_SIZE))
        size = -(-num_windows // num_pieces)
    parts = zip(*(x.split(size) for x in tensors), strict=True)
    return zip(range(0, num_windows, size), parts, strict=True)


def add_up(x_XIK: Tensor, place_TP: Tensor, share_TP: Tensor | None = None) -> Tensor:
    """Of each token the sum of its vectors, or of shares of them; [T, K]."""
    rows = x_XIK.flatten(0, 1)
    return F.embedding_bag(place_TP, rows, mode="sum", per_sample_weights=share_TP)


class Memory(threading.local):
    """Tensors that each thread writes into for one example after the other.

    It takes longer to get new memory from the system than to form the products in it.
    """

    def __init__(self, like: Tensor) -> None:
        self.like = like
        self.flat: dict[str, Tensor] = {}

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor of that name, of any content."""
        size = math.prod(shape)
        if name not in self.flat or len(self.flat[name]) < size:
            self.flat[name] = self.like.new_empty(size)
        return self.flat[name][:size].view(shape)


class _Attention(torch.autograd.Function):
    """Logits are formed again for the gradient.

    On a CPU one example at a time, up to its last token, so that what it needs stays in caches.
    """

    @staticmethod
    def forward(ctx: Any, qv_BLSHK: Tensor, mask_BL: Tensor, attention: RingAttention) -> Tensor:
        batch_size, length, _, num_heads, width = qv_BLSHK.shape
        y_BLHK = qv_BLSHK.new_empty(batch_size, length, num_heads, width)
        parts = [(slice(None), slice(None))]
        if has_fast_path(qv_BLSHK):
            ends = [length] * batch_size
            if not attention.padded:
                ends = [max(1, end) for end in row_ends(mask_BL, batch_size, length)]
            parts = [(slice(b, b + 1), slice(end)) for b, end in enumerate(ends)]
        rings: list[Any] = [None] * len(parts)
        statistics: list[Any] = [None] * len(parts)

        def work(i: int, take: Take) -> None:
            q_BHLK, v_BHLK = qv_BLSHK[parts[i]].permute(2, 0, 3, 1, 4)
            rings[i] = attention.arrange(q_BHLK, mask_BL[parts[i]])
            y_TK, *statistics[i] = attention.read(q_BHLK, v_BHLK, rings[i], take)
            y_BLHK[parts[i]] = y_TK.view(q_BHLK.shape).transpose(1, 2)
            y_BLHK[parts[i][0], q_BHLK.shape[2] :] = 0

        run(work, len(parts), qv_BLSHK)
        ctx.save_for_backward(qv_BLSHK, y_BLHK, *itertools.chain(*statistics))
        ctx.attention, ctx.parts, ctx.rings = attention, parts, rings
        return y_BLHK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BLHK: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        qv_BLSHK, y_BLHK, *statistics = ctx.saved_tensors
        dqv_BLSHK = torch.empty_like(qv_BLSHK, memory_format=torch.contiguous_format)

        def work(i: int, take: Take) -> None:
            q_BHLK, v_BHLK = qv_BLSHK[ctx.parts[i]].permute(2, 0, 3, 1, 4)
            part_dy, part_y = (x[ctx.parts[i]].transpose(1, 2) for x in (dy_BLHK, y_BLHK))
            dq_BHLK, dv_BHLK = ctx.attention.differentiate(
                part_dy, q_BHLK, v_BHLK, part_y, *statistics[2 * i : 2 * i + 2], ctx.rings[i], take
            )
            part_BLSHK = dqv_BLSHK[ctx.parts[i]]
            part_BLSHK[:, :, 0] = dq_BHLK.transpose(1, 2)
            part_BLSHK[:, :, 1] = dv_BHLK.transpose(1, 2)
            dqv_BLSHK[ctx.parts[i][0], q_BHLK.shape[2] :] = 0

        run(work, len(ctx.parts), qv_BLSHK)
        return dqv_BLSHK, None, None


def run(work: Callable[[int, Take], None], num_parts: int, like: Tensor) -> None:
    """Side by side on a CPU, with memory for each thread."""
    if not has_fast_path(like):
        work(0, lambda _, *shape: like.new_empty(shape))
        return
    memory = Memory(like)
    side_by_side(lambda i: work(i, memory.take), num_parts)
