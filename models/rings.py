"""Rings of chunks: tokens sorted by hash, so that those that hash alike stand together.

Source: Reformer, Kitaev et al. 2020, https://arxiv.org/abs/2001.04451, section 2. In each of R
rounds tokens are sorted by bucket and cut into chunks; the chunks of all rounds form one ring, in
which a chunk reads itself and its neighbours. models/ring_attention.py is what reads.

Shapes: B batch, L length, H heads, K head dim, R rounds, M columns of all projections; G = B * H
rings, T = G * L tokens in them; I slots of a chunk, C chunks of a window, which is what a chunk
reads, W = C * I slots of it; E slots of a ring as it is stored, F = G * E of all rings, X windows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def hash_tokens(
    q_BHLK: Tensor, projections_HKM: Tensor, *, num_hashes: int, factors: list[int]
) -> Tensor:
    """Bucket of each token in each round, the largest of [x P; -x P]; [B, H, R, L].

    The number of buckets is the product of `factors`, which are hashed apart: M is the sum of
    their halves for each round.
    """
    projected_BHLM = q_BHLK @ projections_HKM.to(q_BHLK.dtype)
    projected_BHLRM = projected_BHLM.unflatten(3, (num_hashes, -1))
    bucket_BHLR, stride = torch.zeros((), dtype=torch.long, device=q_BHLK.device), 1
    for part in projected_BHLRM.split([factor // 2 for factor in factors], dim=4):
        index = part.abs().max(dim=4, keepdim=True).indices
        bucket = (index + part.shape[4] * (part.gather(4, index) < 0)).squeeze(4)
        bucket_BHLR = bucket_BHLR + stride * bucket
        stride *= 2 * part.shape[4]
    return bucket_BHLR.movedim(3, 2)


@dataclass(frozen=True)
class Window:
    """What a chunk of I slots reads: itself, `before` chunks before it and `after` behind it."""

    chunk_length: int
    before: int
    after: int

    @property
    def num_chunks(self) -> int:
        return self.before + 1 + self.after

    def slots(self, x_F: Tensor) -> Tensor:
        """Of all slots [F, ...] those of each window, without a copy; [X, ..., W]."""
        return x_F.unfold(0, self.num_chunks * self.chunk_length, self.chunk_length)

    def own_slots(self, x_F: Tensor) -> Tensor:
        """Of all slots [F, ...] those of each window's own chunk; [X, I, ...]."""
        chunks = x_F.unflatten(0, (-1, self.chunk_length))
        return chunks[self.before : len(chunks) - self.after]


@dataclass(frozen=True)
class Rings:
    """All rings one behind the other in one row of slots, in which tokens lie.

    A ring is stored with the chunks that stand before its first and behind its last, which are its
    last and its first ones again; so each window is a stretch of slots. Windows across two rings
    are formed too and used by nobody, and so is what lies behind a ring shorter than the longest.
    """

    window: Window
    token_F: Tensor  # token in a slot; any where there is none
    is_real_F: Tensor  # whether there is one
    is_plain_X: Tensor  # windows full of tokens, all of one round
    query_TR: Tensor  # of each token, its place among the own slots of all windows, [X * I]
    key_TP: Tensor  # and its places among the slots of all windows, [X * W]
    mask_T1: Tensor  # False at padding, whose places mean nothing

    @property
    def num_windows(self) -> int:
        """X."""
        return len(self.is_plain_X)


def make_rings(
    bucket_BHRL: Tensor, mask_BL: Tensor, window: Window, *, padded: bool = False
) -> Rings:
    """Sort each round's real tokens by bucket, then position, and cut them into chunks.

    A row of n tokens has ceil(n / I) chunks in a round, or with `padded` ceil(L / I).
    """
    num_rounds, length = bucket_BHRL.shape[2:]
    size, before, num_chunks = window.chunk_length, window.before, window.num_chunks
    device = mask_BL.device
    mask_GL = mask_BL.repeat_interleave(bucket_BHRL.shape[1], dim=0)
    position_L = torch.arange(length, device=device)
    last = torch.iinfo(torch.long).max // length - 1
    bucket_GRL = bucket_BHRL.flatten(0, 1).masked_fill(~mask_GL[:, None], last)
    order_GRL = (bucket_GRL * length + position_L).sort(dim=2).values % length

    longest = -(-length // size)  # N
    num_real_G1 = mask_GL.sum(dim=1, keepdim=True)
    chunks_G1 = ((num_real_G1 + size - 1) // size).clamp(min=1)  # of a round
    if padded:
        chunks_G1 = torch.full_like(chunks_G1, longest)
    num_stored = num_rounds * longest + num_chunks - 1  # chunks of a ring
    chunk_GE = (torch.arange(num_stored, device=device) - before) % (num_rounds * chunks_G1)
    round_GE, chunk_GE = chunk_GE // chunks_G1, chunk_GE % chunks_G1
    row_I = torch.arange(size, device=device)
    rank_GEI = chunk_GE[..., None] * size + row_I
    index_GEI = round_GE[..., None] * length + rank_GEI.clamp(max=length - 1)
    ring_G1 = torch.arange(len(mask_GL), device=device)[:, None]
    token_GF = order_GRL.flatten(1).gather(1, index_GEI.flatten(1)) + ring_G1 * length
    # Chunks of a window that are full and of one round follow each other.
    chunk_XC = chunk_GE.flatten().unfold(0, num_chunks, 1)
    is_full_XC = ((chunk_GE + 1) * size <= num_real_G1).flatten().unfold(0, num_chunks, 1)
    is_plain_X = is_full_XC.all(dim=1) & (chunk_XC[:, -1] - chunk_XC[:, 0] == num_chunks - 1)

    def place_tokens(chunk_GRN: Tensor) -> Tensor:
        """Of each token its slot, when the chunks that it is sorted to have these numbers."""
        slot_GRL = (chunk_GRN[..., None] * size + row_I).flatten(2)[..., :length]
        return torch.empty_like(order_GRL).scatter_(2, order_GRL, slot_GRL).movedim(1, 2)

    chunk_GRN = torch.arange(num_rounds, device=device)[:, None] * chunks_G1[..., None]
    chunk_GRN = chunk_GRN + torch.arange(longest, device=device)
    first_G11, num_chunks_G11 = (ring_G1 * num_stored)[..., None], num_rounds * chunks_G1[..., None]
    keys = []
    for i in range(num_chunks):
        reader_GRN = first_G11 + (chunk_GRN + before - i) % num_chunks_G11
        keys.append(place_tokens(reader_GRN * num_chunks + i))
    return Rings(
        window=window,
        token_F=token_GF.flatten(),
        is_real_F=(rank_GEI < num_real_G1[..., None]).flatten(),
        is_plain_X=is_plain_X,
        query_TR=place_tokens(first_G11 + chunk_GRN).flatten(0, 1).contiguous(),
        key_TP=torch.cat(keys, dim=2).flatten(0, 1),
        mask_T1=mask_GL.flatten()[:, None],
    )
