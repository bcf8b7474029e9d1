"""Softmax attention one example, head and query at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from models.softmax import SoftmaxAttention


def softmax_attention(mixer: SoftmaxAttention, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
    """What `mixer(x_BLD, mask_BL)` must give in its real rows; rows at padding are zeros."""
    out_BLD = torch.zeros_like(x_BLD)
    for b, mask_L in enumerate(mask_BL):
        x_ND = x_BLD[b, mask_L]
        q_NW, k_NW, v_NW = mixer.qkv(x_ND).chunk(3, dim=-1)
        width = q_NW.shape[1] // mixer.num_heads
        rows = []
        for t in range(len(x_ND)):
            last = t + 1 if mixer.causal else len(x_ND)
            heads = []
            for h in range(mixer.num_heads):
                part = slice(h * width, (h + 1) * width)
                score_N = k_NW[:last, part] @ q_NW[t, part] / math.sqrt(width)
                weight_N = score_N.exp() / score_N.exp().sum()
                heads.append(weight_N @ v_NW[:last, part])
            rows.append(mixer.out(torch.cat(heads)))
        if rows:
            out_BLD[b, mask_L] = torch.stack(rows)
    return out_BLD
