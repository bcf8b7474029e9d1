"""Sinkhorn attention one example, head and block at a time, with sums in place of logarithms."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from models.sinkhorn import SinkhornAttention


def sinkhorn_attention(mixer: SinkhornAttention, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
    """What `mixer(x_BLD, mask_BL)` must give in its real rows; rows at padding are zeros.

    Real tokens come first in each row.
    """
    naive = arena if mixer.variant == "arena" else sort
    out_BLD = torch.zeros_like(x_BLD)
    for b in range(len(x_BLD)):
        q_LW, k_LW, v_LW = mixer.qkv(x_BLD[b]).chunk(3, dim=-1)
        width = q_LW.shape[1] // mixer.num_heads
        heads = []
        for h in range(mixer.num_heads):
            part = slice(h * width, (h + 1) * width)
            heads.append(naive(mixer, q_LW[:, part], k_LW[:, part], v_LW[:, part], mask_BL[b]))
        real = mask_BL[b]
        out_BLD[b, real] = mixer.out(torch.cat(heads, dim=1))[real]
    return out_BLD


def sort(
    mixer: SinkhornAttention, q_LK: Tensor, k_LK: Tensor, v_LK: Tensor, mask_L: Tensor
) -> Tensor:
    """Blocks attend to themselves and to what is sorted to them, as if no padding were there."""
    size, num_tokens = mixer.block_size, int(mask_L.sum())
    out_LK = torch.zeros_like(q_LK)
    blocks = [range(i, min(i + size, num_tokens)) for i in range(0, num_tokens, size)]
    if not blocks:
        return out_LK
    means_q = torch.stack([q_LK[list(block)].mean(dim=0) for block in blocks])
    means_k = torch.stack([k_LK[list(block)].mean(dim=0) for block in blocks])
    score_NN = (means_q @ means_k.T / math.sqrt(q_LK.shape[1])).clamp(min=0) + 1e-6
    order_NN = score_NN ** (1 / mixer.temperature)
    for _ in range(mixer.num_iterations):
        order_NN = order_NN / order_NN.sum(dim=1, keepdim=True)
        order_NN = order_NN / order_NN.sum(dim=0, keepdim=True)
    for u, block in enumerate(blocks):
        keys, values, counts = [], [], []
        for t in range(min(size, num_tokens)):
            # Blocks that are long enough to have a token in this slot.
            having = [v for v, other in enumerate(blocks) if t < len(other)]
            share = sum(order_NN[u, v] for v in having) / order_NN[u].sum()
            keys.append(sum(order_NN[u, v] * k_LK[blocks[v][t]] for v in having) / share)
            values.append(sum(order_NN[u, v] * v_LK[blocks[v][t]] for v in having) / share)
            counts.append(share)
        for i in block:
            keys.append(k_LK[i])
            values.append(v_LK[i])
            counts.append(torch.ones((), dtype=q_LK.dtype))
        for i in block:
            logits = torch.stack([q_LK[i] @ key / math.sqrt(len(key)) for key in keys])
            weights = torch.stack(counts) * (logits - logits.max().detach()).exp()
            out_LK[i] = weights @ torch.stack(values) / weights.sum()
    return out_LK


def arena(
    mixer: SinkhornAttention, q_LK: Tensor, k_LK: Tensor, v_LK: Tensor, mask_L: Tensor
) -> Tensor:
    """Block k holds positions k, N + k, 2 N + k, ...; its mask is that of k S, k S + 1, ..."""
    size, length = mixer.block_size, len(q_LK)
    num_blocks = -(-length // size)
    zeros = q_LK.new_zeros(num_blocks * size - length, q_LK.shape[1])
    q_LK, k_LK, v_LK = (torch.cat([x_LK, zeros]) for x_LK in (q_LK, k_LK, v_LK))
    mask = [*mask_L.tolist(), *[False] * len(zeros)]
    real = [[mask[k * size + t] for t in range(size)] for k in range(num_blocks)]
    summed_k = [k_LK[t * num_blocks : (t + 1) * num_blocks].sum(dim=0) for t in range(size)]
    summed_v = [v_LK[t * num_blocks : (t + 1) * num_blocks].sum(dim=0) for t in range(size)]
    out_LK = torch.zeros_like(q_LK)

    def mean(q_K: Tensor, keys: list[Tensor], values: list[Tensor], allowed: list[bool]) -> Tensor:
        logits = torch.stack([q_K @ key / math.sqrt(len(key)) for key in keys])
        weights = logits.exp() * torch.tensor(allowed, dtype=logits.dtype)
        if not any(allowed):
            weights = torch.ones_like(logits)
        return weights @ torch.stack(values) / weights.sum()

    for k in range(num_blocks):
        for t in range(size):
            i = t * num_blocks + k
            places = [u * num_blocks + k for u in range(size)]
            allowed = [real[k][t] and real[k][u] for u in range(size)]
            out_LK[i] = mean(q_LK[i], [k_LK[j] for j in places], [v_LK[j] for j in places], allowed)
            allowed = [any(row[t] and row[u] for row in real) for u in range(size)]
            out_LK[i] = out_LK[i] + mean(q_LK[i], summed_k, summed_v, allowed)
    return out_LK[:length]
