"""Linformer attention one example, head and query at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from models.linformer import LinformerAttention


def linformer_attention(mixer: LinformerAttention, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
    """What `mixer(x_BLD, mask_BL)` must give in its real rows; rows at padding are zeros."""
    out_BLD = torch.zeros_like(x_BLD)
    num_heads = mixer.num_heads
    num_kv, num_tables, rank, _ = mixer.table_SGRM.shape
    for b, mask_L in enumerate(mask_BL):
        x_ND = x_BLD[b, mask_L]
        where = mask_L.nonzero()[:, 0].tolist()
        q_NW = mixer.query(x_ND)
        k_NW, v_NW = mixer.kv(x_ND).chunk(2, dim=-1)
        width = q_NW.shape[1] // num_heads
        heads = []
        for h in range(num_heads):
            part = slice(h * width, (h + 1) * width)
            table_SRM = mixer.table_SGRM[:, h if num_tables > 1 else 0]
            small = []
            for x_NW, table_RM in ((k_NW, table_SRM[0]), (v_NW, table_SRM[num_kv - 1])):
                rows = []
                for r in range(rank):
                    total = torch.zeros(width, dtype=x_BLD.dtype)
                    for i, position in enumerate(where):
                        total = total + table_RM[r, position] * x_NW[i, part]
                    rows.append(total)
                small.append(torch.stack(rows))
            weight_NR = (q_NW[:, part] @ small[0].T / math.sqrt(width)).exp()
            weight_NR = weight_NR / weight_NR.sum(dim=1, keepdim=True)
            heads.append(weight_NR @ small[1])
        out_BLD[b, mask_L] = mixer.out(torch.cat(heads, dim=1))
    return out_BLD
