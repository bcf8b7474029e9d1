"""Linformer: keys and values are projected along the length to a few rows, linear in length.

Source: Wang et al. 2020, https://arxiv.org/abs/2006.04768, equation 7 and "parameter sharing" in
section 4; initial values from google-research/long-range-arena and mlpen/Nystromformer. One
deviation from the paper: padding is zeroed before it is projected, so it is not there for anybody.

Shapes: B batch, L length, D d_model, H heads, K head dim, R rank, M rows of the table (the longest
length), G tables for heads (1 or H), S tables for keys and values (1 or 2).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from models.encoder import Encoder
from models.layers import StackedLinear, attend
from models.positions import Rotary
from models.shape import Shape


class LinformerAttention(nn.Module):
    """The mixer: softmax(Q (E K)^T / sqrt(K)) (F V), where E and F are learned [R, L] tables.

    An input shorter than `shape.max_length` meets the first L columns of a table.

    Args:
        shape: heads, widths, the longest length, `attention_bias`, `attention_dropout` and `init`
            are read here. The table starts Xavier uniform for init=lra, else N(0, 0.02^2).
        rank: R.
        share_kv: one table projects keys and values.
        share_heads: one table serves all heads.
        causal: refused.

    Raises:
        ValueError: rank is below 1, or causal attention is asked for.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        rank: int = 8,
        share_kv: bool = True,
        share_heads: bool = True,
        causal: bool = False,
    ) -> None:
        super().__init__()
        if causal:
            raise ValueError(
                "model.causal=true: Linformer cannot be causal, since every projected key is a sum "
                "over all tokens; use model=softmax or model=luna"
            )
        if rank < 1:
            raise ValueError(f"model.rank={rank}: expected at least 1")
        self.num_heads = shape.num_heads
        self.dropout = shape.attention_dropout
        width = shape.num_heads * shape.attention_head_dim
        self.query = nn.Linear(shape.d_model, width, bias=shape.attention_bias)
        self.kv = StackedLinear(shape.d_model, width, parts=2, bias=shape.attention_bias)
        self.out = nn.Linear(width, shape.d_model, bias=shape.attention_bias)
        self.rotary = Rotary(shape)
        num_rows = shape.max_length + (shape.pooling == "cls")
        tables = (1 if share_kv else 2, 1 if share_heads else shape.num_heads)
        self.table_SGRM = nn.Parameter(torch.empty(*tables, rank, num_rows))
        if shape.init == "lra":
            limit = math.sqrt(6 / (rank + num_rows))
            nn.init.uniform_(self.table_SGRM, -limit, limit)
        else:
            nn.init.normal_(self.table_SGRM, std=0.02)

    def forward(self, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
        """Mix tokens; mask_BL is True at real tokens. Results at padding mean nothing."""
        q_BHLK = rearrange(self.query(x_BLD), "b l (h k) -> b h l k", h=self.num_heads)
        k_BHRK, v_BHRK = (part.to(q_BHLK.dtype) for part in self.projected(x_BLD, mask_BL))
        if self.rotary.is_on:
            (q_BHLK,), k_BHRK = self.rotary(q_BHLK), self.turned_keys(x_BLD, mask_BL)
        y_BHLK = attend(
            q_BHLK,
            k_BHRK,
            v_BHRK,
            None,
            query_mask_BL=mask_BL,
            dropout=self.dropout if self.training else 0.0,
        )
        return self.out(rearrange(y_BHLK, "b h l k -> b l (h k)"))

    def projected(self, x_BLD: Tensor, mask_BL: Tensor) -> list[Tensor]:
        """Keys and values after their table, each [B, H, R, K].

        Both projections are linear, so the one along the length comes first: the maps to keys and
        values are applied to R rows in place of L.
        """
        table_SGRM = self.table_SGRM[..., : x_BLD.shape[1]]
        mask_BL = mask_BL.to(x_BLD.dtype)
        rows_BD = table_SGRM.flatten(0, 2) @ (x_BLD * mask_BL[..., None])
        rows_BSGRD = rows_BD.unflatten(1, table_SGRM.shape[:3])
        weight_SHDK = rearrange(self.kv.weight, "(s h k) d -> s h d k", s=2, h=self.num_heads)
        projected = [rows_BSGRD[:, min(s, len(table_SGRM) - 1)] @ weight_SHDK[s] for s in range(2)]
        if self.kv.bias is None:
            return projected
        # The bias was part of each real token's key: it counts as often as the table says.
        bias_SHK = rearrange(self.kv.bias, "(s h k) -> s h k", s=2, h=self.num_heads)
        count_BSGR = (mask_BL @ table_SGRM.flatten(0, 2).mT).unflatten(1, table_SGRM.shape[:3])
        return [
            part + count_BSGR[:, min(s, len(table_SGRM) - 1), ..., None] * bias_SHK[s, :, None]
            for s, part in enumerate(projected)
        ]

    def turned_keys(self, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
        """Keys after their table, [B, H, R, K], where positions turn them before it.

        So there have to be keys of all tokens.
        """
        width = len(self.kv.weight) // 2
        bias = None if self.kv.bias is None else self.kv.bias[:width]
        k_BLE = F.linear(x_BLD, self.kv.weight[:width], bias)
        (k_BHLK,) = self.rotary(rearrange(k_BLE, "b l (h k) -> b h l k", h=self.num_heads))
        k_BHLK = k_BHLK.masked_fill(~mask_BL[:, None, :, None], 0.0)
        return self.table_SGRM[0, ..., : x_BLD.shape[1]] @ k_BHLK


class LinformerEncoder(Encoder):
    """Encoder with Linformer attention.

    Args:
        share_layers: one table for all layers, as the paper recommends; False gives each its own.

    Raises:
        ValueError: an option of `LinformerAttention` is out of range.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        rank: int = 8,
        share_kv: bool = True,
        share_heads: bool = True,
        share_layers: bool = True,
        causal: bool = False,
    ) -> None:
        mixers: list[LinformerAttention] = []

        def next_mixer() -> nn.Module:
            mixers.append(
                LinformerAttention(
                    shape, rank=rank, share_kv=share_kv, share_heads=share_heads, causal=causal
                )
            )
            if share_layers:
                mixers[-1].table_SGRM = mixers[0].table_SGRM
            return mixers[-1]

        super().__init__(shape, next_mixer)
