"""Synthesizer attention one example, head and query at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from models.synthesizer import DenseRow, SynthesizerAttention


def synthesizer_attention(mixer: SynthesizerAttention, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
    """What `mixer(x_BLD, mask_BL)` must give in its real rows; rows at padding are zeros."""
    out_BLD = torch.zeros_like(x_BLD)
    for b, mask_L in enumerate(mask_BL):
        keys = mask_L.nonzero()[:, 0].tolist()
        rows = {i: torch.cat([head(mixer, x_BLD[b], keys, i, h) for h in range(mixer.num_heads)])
                for i in keys}  # fmt: skip
        for i, row in rows.items():
            out_BLD[b, i] = mixer.out(row)
    return out_BLD


def head(mixer: SynthesizerAttention, x_LD: Tensor, keys: list[int], i: int, h: int) -> Tensor:
    """The weighted mean of values that head `h` of query `i` reads."""
    width = mixer.value.out_features // mixer.num_heads
    part = slice(h * width, (h + 1) * width)
    if mixer.causal:
        keys = [j for j in keys if j <= i]
    weights = torch.stack([logit(mixer, x_LD, i, j, h, part).exp() for j in keys])
    values = mixer.value(x_LD)[keys][:, part]
    return (weights[:, None] * values).sum(dim=0) / weights.sum()


def logit(mixer: SynthesizerAttention, x_LD: Tensor, i: int, j: int, h: int, part: slice) -> Tensor:
    """Of query `i` and key `j`."""
    total = torch.zeros((), dtype=x_LD.dtype)
    if mixer.random_HMM is not None:
        total = total + mixer.random_HMM[h, i, j]
    if mixer.random_HMR is not None:
        for r in range(mixer.random_HMR.shape[2]):
            total = total + mixer.random_HMR[h, i, r] * mixer.random_HRM[h, r, j]
    if mixer.dense is not None:
        total = total + dense(mixer.dense, x_LD[i], part)[j]
    if mixer.factor_a is not None:
        row_b = dense(mixer.factor_b, x_LD[i], part)
        a, b = divmod(j, len(row_b))
        total = total + dense(mixer.factor_a, x_LD[i], part)[a] * row_b[b]
    if mixer.query is not None:
        q_K, k_K = mixer.query(x_LD[i])[part], mixer.key(x_LD[j])[part]
        total = total + q_K @ k_K / math.sqrt(len(q_K))
    return total


def dense(layer: DenseRow, x_D: Tensor, part: slice) -> Tensor:
    hidden_W = layer.hidden(x_D)
    return layer.row((hidden_W * (hidden_W > 0))[part])
