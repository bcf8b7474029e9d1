"""Reformer: each token attends to tokens that hash alike, O(L) in sequence length but for a sort.

Source: Kitaev et al. 2020, https://arxiv.org/abs/2001.04451, sections 2 and 3; where the paper is
silent the formulas are those of Hugging Face's LSH attention, which Nystromformer's experiments
use too (two hashes, chunks of 64). One vector serves as query and as key, the key scaled to
length one; a token reads itself only if there is nothing else to read.
Shapes: B batch, L length, D d_model, H heads, K head dim, T = 2 for query (and key) and value, R
rounds of hashing; G pairs of example and head worked on together, N chunks of all rounds, S = N *
I slots in them, I slots of a chunk, W slots that a chunk reads, E slots of all chunks with those
before the first and behind the last, X = G * N.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from models.dropout import has_fast_path, side_by_side
from models.layers import StackedLinear
from models.positions import Rotary
from models.shape import Shape

Variant = Literal["hashed", "arena"]

EPSILON = 1e-6  # added to the mean square of a key before its root is taken
PADDING, ITSELF = -1e9, -1e5  # logits of keys that are not read, and of a token's own key


class ReformerAttention(nn.Module):
    """The mixer: tokens are sorted by hash and read their neighbours in that order.

    In each of R rounds a token's bucket is the largest of [x P; -x P], P random. A row's real
    tokens are sorted by bucket, then by position, and cut into chunks. The chunks of all rounds
    form one ring, in which a chunk reads itself and its neighbours; what a token reads in all
    rounds enters one softmax, a key that it meets twice counting twice. A row of n tokens has
    ceil(n / chunk_length) chunks in a round however long its padding, so a row of one chunk gets
    plain attention. Results at padding are zero before the output map.

    Hashing, logits and softmax run in float32 or wider. The projections P are drawn once, from the
    run's seed, and kept with the weights; Hugging Face draws new ones in every call. The maps of
    queries and values have no bias, as in the sources, whatever `shape.attention_bias` says of the
    output's; weights are not dropped.

    variant="arena" is what the arena's code computes, on which the Reformer row of its Table 1
    depends: the input is filled with zeros to the next multiple of the number of buckets (a whole
    one where it is a multiple) and each round is cut into as many chunks as there are buckets;
    logits are q.k * sqrt(K) with keys as they are, a token reads itself, padding and filling are
    read as data, all heads and layers share one P, the results of the heads, [H, L, K], are read
    off as if they were [L, H * K], and there is no output map. So rows depend on their padding.

    Args:
        num_hashes: R.
        num_buckets: even, or a list of even factors that are hashed apart; None: twice as many as
            chunks of `shape.max_length`, rounded down to a power of two and factored where that
            is above twice the chunk length, as Hugging Face.
        chunk_length: I.
        num_chunks_before: neighbours before its own that a chunk reads.
        num_chunks_after: neighbours behind its own.
        padded_chunks: chunks of the padded length, as Hugging Face: then what the first chunk of a
            round reads depends on padding.
        mask_later: a token reads none that come later, as Hugging Face's decoder.
        variant: "hashed", or "arena" for what the arena's code computes; there the chunk length
            follows the padded length, whatever chunk_length says.
        causal: refused.

    Raises:
        ValueError: an option is out of range, causal attention is asked for, or mask_later together
            with a pooling that reads the first position.
    """

    rotations_HKM: Tensor

    def __init__(
        self,
        shape: Shape,
        *,
        num_hashes: int = 2,
        num_buckets: int | list[int] | None = None,
        chunk_length: int = 64,
        num_chunks_before: int = 1,
        num_chunks_after: int = 0,
        padded_chunks: bool = False,
        mask_later: bool = False,
        variant: Variant = "hashed",
        causal: bool = False,
    ) -> None:
        super().__init__()
        if causal:
            raise ValueError(
                "model.causal=true: Reformer cannot be causal, since later tokens move the borders "
                "of chunks and so decide which earlier ones are read; model.mask_later=true hides "
                "the later tokens themselves"
            )
        if mask_later and shape.pooling in ("cls", "first"):
            raise ValueError(
                f"model.mask_later=true with shape.pooling={shape.pooling}: the first position "
                "would see only itself; use shape.pooling=last, mean, max or attention"
            )
        if variant not in get_args(Variant):
            raise ValueError(
                f"model.variant={variant!r}: expected one of {', '.join(get_args(Variant))}"
            )
        width = shape.num_heads * shape.attention_head_dim
        if variant == "arena" and (mask_later or padded_chunks or width != shape.d_model):
            raise ValueError(
                f"model.variant='arena': needs num_heads * head_dim = shape.d_model, here "
                f"{shape.num_heads} * {shape.attention_head_dim} and {shape.d_model}, and neither "
                "model.mask_later nor model.padded_chunks"
            )
        for name, value, least in (
            ("num_hashes", num_hashes, 1),
            ("chunk_length", chunk_length, 1),
            ("num_chunks_before", num_chunks_before, 0),
            ("num_chunks_after", num_chunks_after, 0),
        ):
            if value < least:
                raise ValueError(f"model.{name}={value}: expected at least {least}")
        if num_buckets is None:
            factors = default_buckets(shape.max_length + (shape.pooling == "cls"), chunk_length)
        else:
            factors = [num_buckets] if isinstance(num_buckets, int) else list(num_buckets)
        if not factors or any(factor < 2 or factor % 2 for factor in factors):
            raise ValueError(
                f"model.num_buckets={num_buckets}: expected an even number, a list of them, or "
                "null for a number that follows the length"
            )
        self.num_heads = shape.num_heads
        self.num_hashes = num_hashes
        self.bucket_factors = factors
        self.chunk_length = chunk_length
        self.num_chunks_before = num_chunks_before
        self.num_chunks_after = num_chunks_after
        self.padded_chunks = padded_chunks
        self.mask_later = mask_later
        self.is_arena = variant == "arena"
        self.rotary = Rotary(shape)
        self.query_value = StackedLinear(
            shape.d_model, width, parts=2, bias=self.is_arena and shape.attention_bias
        )
        # M = R * the factors' halves, round by round.
        size = (shape.num_heads, shape.attention_head_dim, num_hashes * sum(factors) // 2)
        if self.is_arena:
            self.out: nn.Module = nn.Identity()
            one_KM = torch.randn(size[1:], generator=torch.Generator().manual_seed(0))
            self.register_buffer("rotations_HKM", one_KM.repeat(size[0], 1, 1))
        else:
            self.out = nn.Linear(width, shape.d_model, bias=shape.attention_bias)
            self.register_buffer("rotations_HKM", torch.randn(size))

    def forward(self, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
        """Mix tokens; mask_BL is True at real tokens. [B, L, D]."""
        length = x_BLD.shape[1]
        if self.is_arena:
            num_buckets = math.prod(self.bucket_factors)
            x_BLD = F.pad(x_BLD, (0, 0, 0, num_buckets - length % num_buckets))
            mask_BL = torch.ones_like(x_BLD[..., 0], dtype=torch.bool)
        qv_BLTHK = rearrange(
            self.query_value(x_BLD), "b l (t h k) -> b l t h k", t=2, h=self.num_heads
        )
        y_BLHK = self.attend(self.rotary.stacked(qv_BLTHK, 1), mask_BL)
        if self.is_arena:
            return y_BLHK.transpose(1, 2).reshape(x_BLD.shape)[:, :length]
        return self.out(y_BLHK.flatten(2))

    def attend(self, qv_BLTHK: Tensor, mask_BL: Tensor) -> Tensor:
        """Attention of projected tokens, before `out`; [B, L, H, K]."""
        dtype = qv_BLTHK.dtype
        with torch.autocast(qv_BLTHK.device.type, enabled=False):
            qv_BLTHK = qv_BLTHK.to(torch.promote_types(dtype, torch.float32))
            with torch.no_grad():
                rings = self.arrange(qv_BLTHK[:, :, 0], mask_BL)
            y_BLHK = _RingAttention.apply(qv_BLTHK, rings)
        return y_BLHK.to(dtype)

    def arrange(self, q_BLHK: Tensor, mask_BL: Tensor) -> Rings:
        """The ring of chunks of each example and head."""
        batch_size, length = mask_BL.shape
        num_before, num_after = self.num_chunks_before, self.num_chunks_after
        chunk_length = self.chunk_length
        if self.is_arena:
            chunk_length = length // math.prod(self.bucket_factors)
        if length <= chunk_length:  # one chunk of all tokens: nothing to sort, nothing around
            bucket_BHRL = mask_BL.new_zeros(batch_size, self.num_heads, 1, length, dtype=torch.long)
            num_before = num_after = 0
        else:
            bucket_BHRL = self.hash(q_BLHK)
        return make_rings(
            bucket_BHRL,
            mask_BL,
            chunk_length=min(chunk_length, length),
            num_before=num_before,
            num_after=num_after,
            padded=self.padded_chunks,
            mask_later=self.mask_later,
            is_arena=self.is_arena,
        )

    def hash(self, q_BLHK: Tensor) -> Tensor:
        """Bucket of each token in each round; [B, H, R, L]."""
        rotations_HKM = self.rotations_HKM.to(q_BLHK.dtype)
        projected_BHLM = q_BLHK.transpose(1, 2) @ rotations_HKM
        projected_BHLRF = projected_BHLM.unflatten(3, (self.num_hashes, -1))
        bucket_BHLR, stride = torch.zeros((), dtype=torch.long, device=q_BLHK.device), 1
        halves = [factor // 2 for factor in self.bucket_factors]
        for part in projected_BHLRF.split(halves, dim=4):
            index = part.abs().max(dim=4, keepdim=True).indices
            bucket = (index + part.shape[4] * (part.gather(4, index) < 0)).squeeze(4)
            bucket_BHLR = bucket_BHLR + stride * bucket
            stride *= 2 * part.shape[4]
        return bucket_BHLR.movedim(3, 2)


def default_buckets(length: int, chunk_length: int) -> list[int]:
    """Factors of the number of buckets for a length, as Hugging Face chooses them."""
    num_chunks = length // chunk_length
    power = (2 * max(1, num_chunks)).bit_length() - 1
    if 2**power <= 2 * max(int(num_chunks**0.5), chunk_length):
        return [2**power]
    return [2 ** (power // 2), 2 ** (power - power // 2)]


@dataclass(frozen=True)
class Rings:
    """For each example and head the slots of all rounds, in which lie sorted tokens.

    A ring of N chunks is stored with the chunks that stand before its first and behind its last,
    which are its last and its first ones again. Rows with fewer chunks than the longest go round
    more than once; their own ring is what counts.
    """

    chunk_length: int
    num_before: int
    num_after: int
    is_padded: bool
    mask_later: bool
    is_arena: bool
    num_chunks: int  # N of the longest row
    chunks_B: Tensor  # N of each row
    token_BHE: Tensor  # token in a slot; any where there is none
    is_real_BE: Tensor  # whether there is one
    slot_BHRL: Tensor  # slot of a token in each round, counted from a ring's beginning
    mask_BL: Tensor

    def pick(self, b: int, h: int, num_chunks: int) -> Part:
        """The ring of one example and head, `num_chunks` long."""
        num_slots = (self.num_before + num_chunks + self.num_after) * self.chunk_length
        return Part(
            rings=self,
            is_one=True,
            num_chunks=num_chunks,
            chunks_G=self.chunks_B[b : b + 1],
            token_GE=self.token_BHE[b, h : h + 1, :num_slots],
            is_real_GE=self.is_real_BE[b : b + 1, :num_slots],
            slot_GRL=self.slot_BHRL[b, h : h + 1],
            mask_GL=self.mask_BL[b : b + 1],
        )

    def whole(self) -> Part:
        """All of them."""
        num_heads = self.token_BHE.shape[1]
        return Part(
            rings=self,
            is_one=False,
            num_chunks=self.num_chunks,
            chunks_G=self.chunks_B.repeat_interleave(num_heads, dim=0),
            token_GE=self.token_BHE.flatten(0, 1),
            is_real_GE=self.is_real_BE.repeat_interleave(num_heads, dim=0),
            slot_GRL=self.slot_BHRL.flatten(0, 1),
            mask_GL=self.mask_BL.repeat_interleave(num_heads, dim=0),
        )


def make_rings(
    bucket_BHRL: Tensor,
    mask_BL: Tensor,
    *,
    chunk_length: int,
    num_before: int,
    num_after: int,
    padded: bool,
    mask_later: bool = False,
    is_arena: bool = False,
) -> Rings:
    """Sort each round's tokens by bucket, then position, padding to the end; lay out the rings."""
    num_rounds, length = bucket_BHRL.shape[2:]
    device = mask_BL.device
    position_L = torch.arange(length, device=device)
    last = torch.iinfo(torch.long).max // length - 1
    bucket_BHRL = bucket_BHRL.masked_fill(~mask_BL[:, None, None], last)
    order_BHRL = (bucket_BHRL * length + position_L).sort(dim=3).values % length

    most = -(-length // chunk_length)
    num_real_B1 = mask_BL.sum(dim=1, keepdim=True)
    own_B1 = (num_real_B1 + chunk_length - 1) // chunk_length
    own_B1 = torch.full_like(own_B1, most) if padded else own_B1.clamp(min=1)
    slots_B1 = own_B1 * chunk_length  # of a round
    num_chunks = num_rounds * most
    slot_E = torch.arange((num_before + num_chunks + num_after) * chunk_length, device=device)
    slot_BE = (slot_E - num_before * chunk_length) % (num_rounds * slots_B1)
    rank_BE = slot_BE % slots_B1
    index_BE = slot_BE // slots_B1 * length + rank_BE.clamp(max=length - 1)
    token_BHE = order_BHRL.flatten(2).gather(
        2, index_BE[:, None].expand(-1, order_BHRL.shape[1], -1)
    )
    rank_BHRL = torch.empty_like(order_BHRL).scatter_(
        3, order_BHRL, position_L.expand_as(order_BHRL)
    )
    first_BR = torch.arange(num_rounds, device=device) * slots_B1
    slot_BHRL = (rank_BHRL + first_BR[:, None, :, None]).masked_fill(~mask_BL[:, None, None], 0)
    return Rings(
        chunk_length=chunk_length,
        num_before=num_before,
        num_after=num_after,
        is_padded=padded,
        mask_later=mask_later,
        is_arena=is_arena,
        num_chunks=num_chunks,
        chunks_B=num_rounds * own_B1[:, 0],
        token_BHE=token_BHE,
        is_real_BE=rank_BE < num_real_B1,
        slot_BHRL=slot_BHRL,
        mask_BL=mask_BL,
    )


@dataclass(frozen=True)
class Part:
    """Some of the rings, worked on together, and attention in them."""

    rings: Rings
    is_one: bool  # one ring, of its own length
    num_chunks: int
    chunks_G: Tensor
    token_GE: Tensor
    is_real_GE: Tensor
    slot_GRL: Tensor
    mask_GL: Tensor

    @property
    def chunk_length(self) -> int:
        return self.rings.chunk_length

    @property
    def own(self) -> slice:
        """The slots of all chunks, without those before the first and behind the last."""
        start = self.rings.num_before * self.chunk_length
        return slice(start, start + self.num_chunks * self.chunk_length)

    def windows(self, x_GEK: Tensor) -> Tensor:
        """What each chunk reads; [X, K, W]."""
        width = self.chunk_length * (self.rings.num_before + 1 + self.rings.num_after)
        return x_GEK.unfold(1, width, self.chunk_length).flatten(0, 1)

    def cut(self, x_GSK: Tensor) -> Tensor:
        """Slots to chunks; [X, I, K]."""
        return x_GSK.unflatten(1, (self.num_chunks, -1)).flatten(0, 1)

    def keys(self, q_GLK: Tensor) -> tuple[Tensor, Tensor]:
        """Queries scaled to length one, and what they were multiplied with [G, L, 1]."""
        width = q_GLK.shape[2]
        if self.rings.is_arena:
            factor_GL1 = torch.full_like(q_GLK[..., :1], width**0.5)
        else:
            mean_GL1 = q_GLK.square().mean(dim=2, keepdim=True)
            factor_GL1 = (mean_GL1 + EPSILON).rsqrt() * width**-0.5
        return q_GLK * factor_GL1, factor_GL1

    def logits(self, q_XIK: Tensor, k_XKW: Tensor) -> Tensor:
        """Products of queries and keys, where these may not be read set to numbers; [X, I, W]."""
        logit_XIW = torch.bmm(q_XIK, k_XKW)
        if self.rings.is_arena:
            return logit_XIW
        first = self.rings.num_before * self.chunk_length
        logit_XIW.diagonal(first, dim1=1, dim2=2).fill_(ITSELF)
        token_GE = self.token_GE.to(torch.int32)
        key_GE = token_GE.masked_fill(~self.is_real_GE, -1)
        key_GRCW = self.of_rounds(self.windows(key_GE[..., None])[:, 0])
        query_GRCI = self.of_rounds(self.cut(token_GE[:, self.own, None])[..., 0])
        logit_GRCIW = self.of_rounds(logit_XIW)
        for chunks in self.edges():
            key, query = key_GRCW[:, :, chunks, None], query_GRCI[:, :, chunks, :, None]
            part_GRCIW = logit_GRCIW[:, :, chunks]
            part_GRCIW.masked_fill_(key < 0, PADDING)
            if self.rings.mask_later:
                part_GRCIW.masked_fill_(key > query, PADDING)
            part_GRCIW.masked_fill_(key == query, ITSELF)
        return logit_XIW

    def of_rounds(self, x_X: Tensor) -> Tensor:
        """[X, ...] to [G, R, chunks of a round, ...]; longer than they are, of shorter rings."""
        return x_X.unflatten(0, (len(self.token_GE), self.slot_GRL.shape[1], -1))

    def edges(self) -> list[slice]:
        """Chunks of each round that read more than whole chunks of their own round.

        All others read themselves on the diagonal only, and no slot without a token.
        """
        before, after = self.rings.num_before, self.rings.num_after
        num_chunks = self.num_chunks // self.slot_GRL.shape[1]
        if (
            not self.is_one
            or self.rings.mask_later
            or self.rings.is_padded
            or before + after >= num_chunks
        ):
            return [slice(None)]
        return [slice(0, before), slice(num_chunks - 1 - after, None)]

    def forward(self, q_GLK: Tensor, v_GLK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Results of the tokens [G, L, K]; for each slot its largest logit and a scale, [X, I, 1].

        The scale makes exp(logit - largest) the weights of the softmax over all rounds.
        """
        num_rounds, length = self.slot_GRL.shape[1:]
        width = q_GLK.shape[2]
        rows_GEK = select(torch.cat([q_GLK, self.keys(q_GLK)[0], v_GLK], dim=2), self.token_GE)
        q_GEK, k_GEK, v_GEK = rows_GEK.split(width, dim=2)
        weight_XIW = self.logits(self.cut(q_GEK[:, self.own]), self.windows(k_GEK))
        largest_XI1 = weight_XIW.amax(dim=2, keepdim=True)
        weight_XIW.sub_(largest_XI1).exp_()
        sum_XI1 = weight_XIW.sum(dim=2, keepdim=True)
        y_XIK = torch.bmm(weight_XIW, self.windows(v_GEK).mT).div_(sum_XI1)
        # The rounds are joined with a softmax that knows their difference even near -1e5.
        z_GRL1 = self.by_round(largest_XI1 + sum_XI1.log())
        share_GRL1 = z_GRL1.softmax(dim=1)
        y_GLK = self.by_round(y_XIK).mul_(share_GRL1).sum(dim=1).mul_(self.mask_GL[..., None])
        round_S = torch.arange(self.num_chunks * self.chunk_length, device=q_GLK.device)
        round_GS = round_S // (self.chunks_G[:, None] // num_rounds * self.chunk_length)
        index_GS = round_GS.clamp(max=num_rounds - 1) * length + self.token_GE[:, self.own]
        # Slots of no token, and those behind a shorter ring, give nothing back.
        is_own_GS = (round_GS < num_rounds) & self.is_real_GE[:, self.own]
        share_GS1 = select(share_GRL1.flatten(1, 2), index_GS) * is_own_GS[..., None]
        return y_GLK, largest_XI1, self.cut(share_GS1) / sum_XI1

    def by_round(self, x_XIK: Tensor) -> Tensor:
        """Of each token its slots' vectors; [G, R, L, K]."""
        x_GSK = x_XIK.unflatten(0, (len(self.token_GE), -1)).flatten(1, 2)
        return select(x_GSK, self.slot_GRL.flatten(1)).unflatten(1, self.slot_GRL.shape[1:])

    def backward(
        self,
        dy_GLK: Tensor,
        q_GLK: Tensor,
        v_GLK: Tensor,
        y_GLK: Tensor,
        largest_XI1: Tensor,
        scale_XI1: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Gradients of `forward`'s first result for queries (as keys too) and values."""
        k_GLK, factor_GL1 = self.keys(q_GLK)
        width = q_GLK.shape[2]
        rows_GEK = select(torch.cat([q_GLK, k_GLK, v_GLK], dim=2), self.token_GE)
        q_GEK, k_GEK, v_GEK = rows_GEK.split(width, dim=2)
        q_XIK, k_XKW, v_XKW = self.cut(q_GEK[:, self.own]), self.windows(k_GEK), self.windows(v_GEK)
        # The softmax takes from each weight's gradient the mean of them under the weights.
        mean_GL1 = (dy_GLK * y_GLK).sum(dim=2, keepdim=True)
        rows_GSK = select(torch.cat([dy_GLK, mean_GL1], dim=2), self.token_GE[:, self.own])
        dy_XIK, mean_XI1 = (self.cut(rows_GSK) * scale_XI1).split([width, 1], dim=2)

        weight_XIW = self.logits(q_XIK, k_XKW).sub_(largest_XI1).exp_()
        dv_XWK = torch.bmm(weight_XIW.mT, dy_XIK)
        dlogit_XIW = torch.bmm(dy_XIK, v_XKW).sub_(mean_XI1).mul_(weight_XIW)
        dq_XIK = torch.bmm(dlogit_XIW, k_XKW.mT)
        dk_XWK = torch.bmm(dlogit_XIW.mT, q_XIK)

        dq_GLK, dk_GLK, dv_GLK = (
            self.by_round(part_XIK).sum(dim=1).mul_(self.mask_GL[..., None])
            for part_XIK in (dq_XIK, self.fold(dk_XWK), self.fold(dv_XWK))
        )
        if not self.rings.is_arena:  # through k = q / length: what is along k is lost
            dk_GLK = dk_GLK - (k_GLK * dk_GLK).sum(dim=2, keepdim=True) * k_GLK
        return dq_GLK + factor_GL1 * dk_GLK, dv_GLK

    def fold(self, x_XWK: Tensor) -> Tensor:
        """Sum over all windows what they say of a slot; the counterpart of `windows`. [X, I, K]."""
        num_before, num_after = self.rings.num_before, self.rings.num_after
        part_XIK = x_XWK.split(self.chunk_length, dim=1)
        sum_XIK = part_XIK[num_before]
        group_G1 = torch.arange(len(self.token_GE), device=x_XWK.device)[:, None]
        chunk_N = torch.arange(self.num_chunks, device=x_XWK.device)
        for i in (*range(num_before), *range(num_before + 1, num_before + 1 + num_after)):
            reader_GN = (chunk_N + num_before - i) % self.chunks_G[:, None]
            reader_X = (group_G1 * self.num_chunks + reader_GN).flatten()
            sum_XIK = part_XIK[i].index_select(0, reader_X).add_(sum_XIK)
        return sum_XIK


def select(x_GLK: Tensor, index_GE: Tensor) -> Tensor:
    """x[g, index[g, e]]; [G, E, K]."""
    num_groups, length, _ = x_GLK.shape
    if num_groups == 1:
        return x_GLK[0].index_select(0, index_GE[0])[None]
    first_G1 = torch.arange(num_groups, device=x_GLK.device)[:, None] * length
    rows = x_GLK.flatten(0, 1).index_select(0, (first_G1 + index_GE).flatten())
    return rows.unflatten(0, index_GE.shape)


class _RingAttention(torch.autograd.Function):
    """Attention in all rings; logits are formed again for the gradient.

    On a CPU one example and head at a time, so that its weights stay in the cache and no time goes
    into padding.
    """

    @staticmethod
    def forward(ctx: Any, qv_BLTHK: Tensor, rings: Rings) -> Tensor:
        batch_size, length, _, num_heads, _ = qv_BLTHK.shape
        ctx.rings = rings
        if not has_fast_path(qv_BLTHK):
            q_GLK, v_GLK = rearrange(qv_BLTHK, "b l t h k -> t (b h) l k")
            y_GLK, *extra = rings.whole().forward(q_GLK, v_GLK)
            y_BLHK = rearrange(y_GLK, "(b h) l k -> b l h k", h=num_heads)
            ctx.save_for_backward(qv_BLTHK, y_BLHK, *extra)
            return y_BLHK
        y_BLHK = torch.empty_like(qv_BLTHK[:, :, 0], memory_format=torch.contiguous_format)
        num_chunks = rings.chunks_B.tolist()
        extras: list[list[Tensor]] = [[] for _ in range(batch_size)]

        def work(b: int) -> None:
            for h in range(num_heads):
                q_GLK, v_GLK = rearrange(qv_BLTHK[b, :, :, h], "l t k -> t 1 l k").contiguous()
                y_GLK, *extra = rings.pick(b, h, num_chunks[b]).forward(q_GLK, v_GLK)
                y_BLHK[b, :, h] = y_GLK[0]
                extras[b] += extra

        side_by_side(work, batch_size)
        ctx.num_chunks = num_chunks
        ctx.save_for_backward(qv_BLTHK, y_BLHK, *(t for extra in extras for t in extra))
        return y_BLHK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BLHK: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        qv_BLTHK, y_BLHK, *extra = ctx.saved_tensors
        num_heads = qv_BLTHK.shape[3]
        if not has_fast_path(qv_BLTHK):
            q_GLK, v_GLK = rearrange(qv_BLTHK, "b l t h k -> t (b h) l k")
            dy_GLK, y_GLK = (rearrange(x, "b l h k -> (b h) l k") for x in (dy_BLHK, y_BLHK))
            grads = ctx.rings.whole().backward(dy_GLK, q_GLK, v_GLK, y_GLK, *extra)
            dqv = torch.stack(grads)
            return rearrange(dqv, "t (b h) l k -> b l t h k", h=num_heads), None
        dqv_BLTHK = torch.empty_like(qv_BLTHK, memory_format=torch.contiguous_format)

        def work(b: int) -> None:
            for h in range(num_heads):
                part = ctx.rings.pick(b, h, ctx.num_chunks[b])
                q_GLK, v_GLK = rearrange(qv_BLTHK[b, :, :, h], "l t k -> t 1 l k").contiguous()
                dy_GLK, y_GLK = dy_BLHK[None, b, :, h], y_BLHK[None, b, :, h]
                i = 2 * (b * num_heads + h)
                grads = part.backward(dy_GLK, q_GLK, v_GLK, y_GLK, *extra[i : i + 2])
                dqv_BLTHK[b, :, 0, h], dqv_BLTHK[b, :, 1, h] = (grad[0] for grad in grads)

        side_by_side(work, len(qv_BLTHK))
        return dqv_BLTHK, None
