"""Performer attention one example, head and query at a time, each weight by its formula."""

from __future__ import annotations

import torch
from torch import Tensor

from models.performer import PerformerAttention


def performer_attention(mixer: PerformerAttention, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
    """What `mixer(x_BLD, mask_BL)` must give in its real rows; rows at padding are zeros."""
    out_BLD = torch.zeros_like(x_BLD)
    for b, mask_L in enumerate(mask_BL):
        q_NW, k_NW, v_NW = mixer.qkv(x_BLD[b, mask_L]).chunk(3, dim=-1)
        num_padded = int((~mask_L).sum()) if mixer.padded_keys else 0
        rows = []
        for t in range(len(q_NW)):
            last = t + 1 if mixer.causal else len(q_NW)
            heads = []
            for h in range(mixer.num_heads):
                part = slice(h * mixer.head_dim, (h + 1) * mixer.head_dim)
                zeros_PK = q_NW.new_zeros(num_padded, mixer.head_dim)
                k_NK = torch.cat([k_NW[:last, part], zeros_PK])
                v_NK = torch.cat([v_NW[:last, part], zeros_PK])
                weight_N = weights(mixer, q_NW[t, part], k_NK)
                heads.append(weight_N @ v_NK / weight_N.sum())
            rows.append(mixer.out(torch.cat(heads)))
        if rows:
            out_BLD[b, mask_L] = torch.stack(rows)
    return out_BLD


def weights(mixer: PerformerAttention, q_K: Tensor, k_NK: Tensor) -> Tensor:
    """Of one query and each key it sees, before division by their sum."""
    rows_MK = mixer.projection_MK
    if mixer.kernel == "relu":
        if rows_MK is not None:
            q_K, k_NK = q_K @ rows_MK.T, k_NK @ rows_MK.T
        return (k_NK.relu() + mixer.epsilon) @ (q_K.relu() + mixer.epsilon)
    q_K, k_NK = q_K * mixer.scale, k_NK * mixer.scale
    q_M, k_NM = q_K @ rows_MK.T, k_NK @ rows_MK.T
    q_norm, k_norm_N = q_K @ q_K / 2, k_NK.square().sum(dim=1) / 2
    if mixer.features == "trigonometric":
        return k_norm_N.exp() * (k_NM - q_M).cos().sum(dim=1)
    query_M = (q_M - q_norm - q_M.max().detach()).exp() + mixer.epsilon
    key_NM = (k_NM - k_norm_N[:, None] - k_NM.max().detach()).exp() + mixer.epsilon
    return key_NM @ query_M
