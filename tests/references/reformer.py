"""LSH attention one query at a time, from lists of tokens; for float64 and short inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from models.reformer import ReformerAttention


def reformer_attention(mixer: ReformerAttention, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
    """What `mixer(x_BLD, mask_BL)` should be at real tokens; zeros at padding."""
    num_heads, length = mixer.num_heads, x_BLD.shape[1]
    weight_q, weight_v = mixer.query_value.weight.chunk(2)
    head_dim = len(weight_q) // num_heads
    rows = []
    for x_LD, mask_L in zip(x_BLD, mask_BL, strict=True):
        real = [i for i in range(length) if mask_L[i]]
        heads = []
        for h in range(num_heads):
            columns = slice(h * head_dim, (h + 1) * head_dim)
            q_LK, v_LK = x_LD @ weight_q[columns].T, x_LD @ weight_v[columns].T
            y_LK = torch.zeros_like(v_LK)
            if real:
                ring = ring_of_chunks(mixer, h, q_LK, real, length)
                for i in real:
                    y_LK = y_LK + one_hot(i, length) * read(mixer, ring, i, q_LK, v_LK)
            heads.append(y_LK)
        y_LD = torch.cat(heads, dim=1) @ mixer.out.weight.T
        if mixer.out.bias is not None:
            y_LD = y_LD + mixer.out.bias
        rows.append(y_LD * mask_L[:, None])
    return torch.stack(rows)


def ring_of_chunks(
    mixer: ReformerAttention, h: int, q_LK: Tensor, real: list[int], length: int
) -> list[list[int]]:
    """The real tokens in each chunk of all rounds, those of the first round first."""
    if len(real) <= mixer.chunk_length and not mixer.padded_chunks:
        return [real]
    size = mixer.chunk_length
    rotations = mixer.rotations_HKM[h].unflatten(1, (mixer.num_hashes, -1))
    ring = []
    for r in range(mixer.num_hashes):
        keys = [(bucket(mixer, q_LK[i] @ rotations[:, r]), i) for i in real]
        tokens = [i for _, i in sorted(keys)]
        num_slots = length if mixer.padded_chunks else len(real)
        ring += [tokens[start : start + size] for start in range(0, num_slots, size)]
    return ring


def bucket(mixer: ReformerAttention, projected: Tensor) -> tuple[int, ...]:
    """The number of the bucket, its last digit first: buckets sort by their last factor."""
    digits: list[int] = []
    for factor in mixer.bucket_factors:
        part, projected = projected[: factor // 2], projected[factor // 2 :]
        digits.append(int(torch.cat([part, -part]).argmax()))
    return tuple(reversed(digits))


def read(
    mixer: ReformerAttention, ring: list[list[int]], i: int, q_LK: Tensor, v_LK: Tensor
) -> Tensor:
    """What token i reads: one softmax over the keys of all windows that it looks out of."""
    offsets = range(-mixer.num_chunks_before, mixer.num_chunks_after + 1)
    keys = [
        j
        for g, chunk in enumerate(ring)
        if i in chunk
        for offset in offsets
        for j in ring[(g + offset) % len(ring)]
        if j != i and not (mixer.mask_later and j > i)
    ]
    if not keys:
        return v_LK[i]
    k_NK = q_LK[keys]
    k_NK = k_NK / (k_NK.square().sum(dim=1, keepdim=True) + 1e-6 * k_NK.shape[1]).sqrt()
    weight_N = (k_NK @ q_LK[i]).exp()
    return weight_N @ v_LK[keys] / weight_N.sum()


def one_hot(i: int, length: int) -> Tensor:
    """A column with a one at i."""
    return torch.eye(length, dtype=torch.float64)[:, i : i + 1]
