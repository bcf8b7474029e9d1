"""Reformer: each token attends to tokens that hash alike, O(L) in sequence length but for a sort.

Source: Kitaev et al. 2020, https://arxiv.org/abs/2001.04451, sections 2 and 3; where the paper is
silent the formulas are those of Hugging Face's LSH attention, which Nystromformer's experiments
use too (two hashes, chunks of 64). One vector serves as query and as key, the key scaled to
length one; a token reads itself only if there is nothing else to read. The sorting is in
models/rings.py, the reading in models/ring_attention.py.

Shapes: B batch, L length, D d_model, H heads, K head dim, T = 2 for query (and key) and value, R
rounds of hashing, I slots of a chunk, M columns of all projections.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from models.layers import StackedLinear
from models.positions import Rotary
from models.ring_attention import RingAttention
from models.rings import Rings, Window, hash_tokens, make_rings
from models.shape import Shape

Variant = Literal["hashed", "arena"]


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
        ValueError: an option is out of range or does not act, causal attention is asked for, or
            mask_later together with a pooling that reads the first position.
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
        if variant == "arena" and num_buckets is not None and chunk_length != 64:
            raise ValueError(
                f"model.chunk_length={chunk_length}: acts only with model.variant=hashed or "
                "model.num_buckets=null; expected 64"
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
        attention = RingAttention(
            self.arrange,
            padded=self.padded_chunks,
            mask_later=self.mask_later,
            is_arena=self.is_arena,
        )
        return attention(qv_BLTHK, mask_BL)

    def arrange(self, q_BHLK: Tensor, mask_BL: Tensor) -> Rings:
        """The ring of chunks of each example and head."""
        batch_size, num_heads, length, _ = q_BHLK.shape
        chunk_length = self.chunk_length
        if self.is_arena:
            chunk_length = length // math.prod(self.bucket_factors)
        if length <= chunk_length:  # one chunk of all tokens: nothing to sort, nothing around
            bucket_BHRL = mask_BL.new_zeros(batch_size, num_heads, 1, length, dtype=torch.long)
            return make_rings(bucket_BHRL, mask_BL, Window(length, 0, 0))
        bucket_BHRL = hash_tokens(
            q_BHLK,
            self.rotations_HKM,
            num_hashes=self.num_hashes,
            factors=self.bucket_factors,
        )
        window = Window(chunk_length, self.num_chunks_before, self.num_chunks_after)
        return make_rings(bucket_BHRL, mask_BL, window, padded=self.padded_chunks)


def default_buckets(length: int, chunk_length: int) -> list[int]:
    """Factors of the number of buckets for a length, as Hugging Face chooses them."""
    num_chunks = length // chunk_length
    power = (2 * max(1, num_chunks)).bit_length() - 1
    if 2**power <= 2 * max(int(num_chunks**0.5), chunk_length):
        return [2**power]
    return [2 ** (power // 2), 2 ** (power - power // 2)]
