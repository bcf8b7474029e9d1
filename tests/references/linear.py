"""Linear attention one example, head and query at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from models.linear import LinearAttention


def linear_attention(mixer: LinearAttention, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
    """What `mixer(x_BLD, mask_BL)` must give in its real rows; rows at padding are zeros."""
    out_BLD = torch.zeros_like(x_BLD)
    for b, mask_L in enumerate(mask_BL):
        q_NW, k_NW, v_NW = mixer.qkv(x_BLD[b, mask_L]).chunk(3, dim=-1)
        rows = []
        for t in range(len(q_NW)):
            last = t + 1 if mixer.causal else len(q_NW)
            heads = []
            for h in range(mixer.num_heads):
                part = slice(h * mixer.head_dim, (h + 1) * mixer.head_dim)
                weight_N = features(k_NW[:last, part]) @ features(q_NW[t, part])
                total = weight_N.sum() + 1e-6 if mixer.normalize else mixer.max_length**0.5
                heads.append(weight_N @ v_NW[:last, part] / total)
            rows.append(mixer.out(torch.cat(heads)))
        if rows:
            out_BLD[b, mask_L] = torch.stack(rows)
    return out_BLD


def features(x: Tensor) -> Tensor:
    """elu(x) + 1."""
    return torch.where(x > 0, x + 1, x.exp())
