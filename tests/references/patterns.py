"""Local, Longformer, BigBird and Sparse Transformer attention one query at a time; for float64.

Each function says by its own rule which keys a position reads, as a list in which a key may stand
more than once.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from models.bigbird import BigBirdAttention
from models.layers import StackedLinear
from models.local import LocalAttention
from models.longformer import LongformerAttention
from models.sparse import SparseAttention

Keys = Callable[[int, int, int], list[int]]  # (head, position, length) to positions


def read(qkv: StackedLinear, x_LD: Tensor, mask_L: Tensor, heads: int, keys: Keys) -> Tensor:
    """Before the output map, [L, H * K]; padding is not read, and its rows are zeros."""
    q_LE, k_LE, v_LE = qkv(x_LD).chunk(3, dim=-1)
    width = q_LE.shape[1] // heads
    rows = []
    for i in range(len(x_LD)):
        row = []
        for h in range(heads):
            part = slice(h * width, (h + 1) * width)
            read_N = [j for j in keys(h, i, len(x_LD)) if 0 <= j < len(x_LD) and mask_L[j]]
            if not mask_L[i] or not read_N:
                row.append(torch.zeros(width, dtype=x_LD.dtype))
                continue
            weight_N = (k_LE[read_N, part] @ q_LE[i, part] / math.sqrt(width)).softmax(dim=0)
            row.append(weight_N @ v_LE[read_N, part])
        rows.append(torch.cat(row))
    return torch.stack(rows)


def local_attention(mixer: LocalAttention, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
    """Patterns window and blocks."""

    def keys(h: int, i: int, length: int) -> list[int]:
        if mixer.pattern == "blocks":
            near = [j for j in range(length) if j // mixer.block_size == i // mixer.block_size]
        else:
            back = (mixer.window - 1) // 2
            near = list(range(i - back, i - back + mixer.window))
        return [j for j in near if j <= i or not mixer.causal]

    heads = mixer.num_heads
    rows = [read(mixer.qkv, x, mask, heads, keys) for x, mask in zip(x_BLD, mask_BL, strict=True)]
    return mixer.out(torch.stack(rows))


def longformer_attention(mixer: LongformerAttention, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
    """The first `num_global` positions are global."""

    def is_read(i: int, j: int) -> bool:
        return j <= i or not mixer.causal

    def local_keys(h: int, i: int, length: int) -> list[int]:
        start = i - (mixer.window - 1) // 2
        keys = {*range(start, start + mixer.window), *range(mixer.num_global)}
        return [j for j in sorted(keys) if is_read(i, j)]

    def global_keys(h: int, i: int, length: int) -> list[int]:
        return [j for j in range(length) if is_read(i, j)]

    rows = []
    for x_LD, mask_L in zip(x_BLD, mask_BL, strict=True):
        y_LE = read(mixer.qkv, x_LD, mask_L, mixer.num_heads, local_keys)
        if mixer.global_qkv is not None:
            z_LE = read(mixer.global_qkv, x_LD, mask_L, mixer.num_heads, global_keys)
            y_LE = torch.cat([z_LE[: mixer.num_global], y_LE[mixer.num_global :]])
        rows.append(y_LE)
    return mixer.out(torch.stack(rows))


def bigbird_attention(mixer: BigBirdAttention, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
    """Without filled keys."""
    size, last = mixer.block_size, mixer.num_blocks - 1

    def keys(h: int, i: int, length: int) -> list[int]:
        block = i // size
        if mixer.is_full or block in (0, last):
            return list(range(length))
        blocks = sorted({0, block - 1, block, block + 1, last})
        blocks += mixer.random_HGr[h, block - 1].tolist()
        return [j for b in blocks for j in range(b * size, (b + 1) * size)]

    heads = mixer.num_heads
    rows = [read(mixer.qkv, x, mask, heads, keys) for x, mask in zip(x_BLD, mask_BL, strict=True)]
    return mixer.out(torch.stack(rows))


def sparse_attention(mixer: SparseAttention, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
    """Both patterns, with and without an opened first position."""
    size, first = mixer.block_size, int(mixer.opens_first)

    def is_read(i: int, j: int) -> bool:
        if mixer.opens_first and 0 in (i, j):
            return True
        i, j = i - first, j - first
        if j > i:
            return False
        if mixer.pattern == "strided":
            return i - j < size or (i - j) % size == 0
        is_summary = j % size == 0 or j % size >= size - mixer.num_summary
        return i // size == j // size or is_summary

    def keys(h: int, i: int, length: int) -> list[int]:
        return [j for j in range(length) if is_read(i, j)]

    heads = mixer.num_heads
    rows = [read(mixer.qkv, x, mask, heads, keys) for x, mask in zip(x_BLD, mask_BL, strict=True)]
    return mixer.out(torch.stack(rows))
