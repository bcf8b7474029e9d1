"""Fastformer attention one row and one head at a time, from the formulas; for float64."""

from __future__ import annotations

import torch
from torch import Tensor

from models.fastformer import FastformerAttention


def fastformer_attention(mixer: FastformerAttention, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
    """What `mixer(x_BLD, mask_BL)` should be at real tokens; zeros at padding."""
    rows = []
    for x_LD, mask_L in zip(x_BLD, mask_BL, strict=True):
        y_LD = torch.zeros_like(x_LD)
        if mask_L.any():
            y_LD = y_LD.index_put((mask_L.nonzero()[:, 0],), one_row(mixer, x_LD[mask_L]))
        rows.append(y_LD)
    return torch.stack(rows)


def one_row(mixer: FastformerAttention, x_ND: Tensor) -> Tensor:
    """A sequence without padding."""
    q_NE, k_NE = mixer.query(x_ND), mixer.key(x_ND)
    v_NE = q_NE if mixer.value is None else mixer.value(x_ND)
    global_query_E = attention_sum(mixer, q_NE, mixer.query_score.weight)
    p_NE = torch.stack([interaction(mixer, global_query_E, k_E) for k_E in k_NE])
    if mixer.interaction == "concat":
        p_NE = mixer.merge(p_NE)
    global_key_E = attention_sum(mixer, p_NE, mixer.key_score.weight)
    u_NE = torch.stack([interaction(mixer, global_key_E, v_E) for v_E in v_NE])
    return mixer.out(mixer.transform(u_NE) + q_NE)


def attention_sum(mixer: FastformerAttention, x_NE: Tensor, scores_HE: Tensor) -> Tensor:
    """Heads joined: each the sum of its own columns by its own weights."""
    head_dim = x_NE.shape[1] // mixer.num_heads
    heads = []
    for h in range(mixer.num_heads):
        weight_N = (x_NE @ scores_HE[h] / head_dim**0.5).exp()
        weight_N = weight_N / weight_N.sum()
        heads.append(weight_N @ x_NE[:, h * head_dim : (h + 1) * head_dim])
    return torch.cat(heads)


def interaction(mixer: FastformerAttention, global_E: Tensor, x_E: Tensor) -> Tensor:
    """Of one global vector and one token."""
    if mixer.interaction == "concat":
        return torch.cat([global_E, x_E])
    return global_E * x_E if mixer.interaction == "product" else global_E + x_E
