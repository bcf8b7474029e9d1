"""Longformer attention: a sliding window, and a few global tokens that meet all others, O(L).

Source: Beltagy et al. 2020, https://arxiv.org/abs/2004.05150, section 3.1.
Shapes: B batch, L length, D d_model, H heads, K head dim; M global positions; R rows of a block.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor, nn

from models.dropout import Dropout
from models.layers import StackedLinear, check_causal
from models.patterns import attend_pieces
from models.pieces import Chosen, Window, near_keys
from models.positions import Rotary
from models.shape import Shape


class LongformerAttention(nn.Module):
    """Softmax attention of each position to its window and to the global positions.

    A global position reads all others, with a second set of query, key and value maps.

    Args:
        shape: heads, widths, `attention_bias` and `attention_dropout` are read here.
        window: positions in the window: (window - 1) // 2 before, the position itself and
            window // 2 behind.
        num_global: the first so many positions are global, the class token among them where there
            is one; 0: none, and no second set of maps. The arena's code runs with 0.
        causal: of all keys only those that come no later than the position itself.

    Raises:
        ValueError: an option is out of range, or causal attention is asked for with a pooling that
            reads the first position.
    """

    def __init__(
        self, shape: Shape, *, window: int = 64, num_global: int = 1, causal: bool = False
    ) -> None:
        super().__init__()
        if window < 2:
            raise ValueError(f"model.window={window}: expected at least 2")
        if num_global < 0:
            raise ValueError(f"model.num_global={num_global}: expected at least 0")
        check_causal(shape, causal)
        self.num_heads = shape.num_heads
        self.head_dim = shape.attention_head_dim
        self.window = window
        self.num_global = num_global
        self.causal = causal
        self.dropout = Dropout(shape.attention_dropout)
        width, bias = shape.num_heads * shape.attention_head_dim, shape.attention_bias
        self.qkv = StackedLinear(shape.d_model, width, parts=3, bias=bias)
        self.global_qkv = (
            StackedLinear(shape.d_model, width, parts=3, bias=bias) if num_global > 0 else None
        )
        self.out = nn.Linear(width, shape.d_model, bias=bias)
        self.rotary = Rotary(shape)

    def forward(self, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
        """Mix tokens; padding is read by nobody. [B, L, D]."""
        index_M = torch.arange(min(self.num_global, x_BLD.shape[1]), device=x_BLD.device)
        return self.attend(x_BLD, mask_BL, index_M, mask_BL[:, index_M])

    def attend(
        self, x_BLD: Tensor, mask_BL: Tensor, index_M: Tensor, is_global_BM: Tensor
    ) -> Tensor:
        """As `forward`, where position index_M[m] of example b is global if is_global_BM[b, m]."""
        q_BHLK, k_BHLK, v_BHLK = self.rotary.heads(self.qkv(x_BLD), self.num_heads)
        back, ahead = (self.window - 1) // 2, 0 if self.causal else self.window // 2
        is_local_BL = mask_BL.index_copy(1, index_M, mask_BL[:, index_M] & ~is_global_BM)
        near, rows = near_keys(is_local_BL, back=back, ahead=ahead)
        pieces: list[Window | Chosen] = [near]
        if len(index_M) > 0:
            allowed = [(mask_BL[:, index_M] & is_global_BM)[:, None, None, None]]
            if self.causal:
                position_L = torch.arange(-(-x_BLD.shape[1] // rows) * rows, device=x_BLD.device)
                allowed.append((index_M <= position_L[:, None]).unflatten(0, (-1, rows)))
            pieces.append(Chosen(allowed, index_M))
        rate = self.dropout.p if self.training else 0.0
        y_BHLK = attend_pieces(q_BHLK, k_BHLK, v_BHLK, pieces, block_rows=rows, dropout=rate)
        y_BLE = rearrange(y_BHLK, "b h l k -> b l (h k)")
        if len(index_M) > 0:
            y_BME = torch.where(
                is_global_BM[..., None],
                self.global_rows(x_BLD, mask_BL, index_M),
                y_BLE[:, index_M],
            )
            y_BLE = y_BLE.index_copy(1, index_M, y_BME.to(y_BLE.dtype))
        return self.out(y_BLE)

    def global_rows(self, x_BLD: Tensor, mask_BL: Tensor, index_M: Tensor) -> Tensor:
        """What these positions read of all, by the second set of maps; [B, M, H * K].

        The maps of keys and values are applied to the few queries and sums, not to all tokens; but
        that of keys is, where positions turn its results.
        """
        assert self.global_qkv is not None
        parts, dtype = self.global_qkv.parts, x_BLD.dtype
        query_ED, key_ED, value_ED = self.global_qkv.weight.chunk(parts)
        bias = self.global_qkv.bias
        query_E, key_E, value_E = (None,) * 3 if bias is None else bias.chunk(parts)
        q_BME = nn.functional.linear(x_BLD[:, index_M], query_ED, query_E) * self.head_dim**-0.5
        q_BHMK = rearrange(q_BME, "b m (h k) -> b h m k", h=self.num_heads)
        if self.rotary.is_on:
            k_BLE = nn.functional.linear(x_BLD, key_ED, key_E)
            (k_BHLK,) = self.rotary(rearrange(k_BLE, "b l (h k) -> b h l k", h=self.num_heads))
            score_BHML = self.rotary.at(q_BHMK, index_M) @ k_BHLK.mT
        else:
            # The bias of the keys adds the same to all scores of a query: the softmax cancels it.
            q_BHMD = q_BHMK @ key_ED.to(q_BHMK.dtype).unflatten(0, (self.num_heads, -1))
            score_BHML = torch.einsum("bhmd,bld->bhml", q_BHMD, x_BLD)
        score_BHML = score_BHML.to(torch.promote_types(score_BHML.dtype, torch.float32))
        readable_B1ML = mask_BL[:, None, None]
        if self.causal:
            position_L = torch.arange(x_BLD.shape[1], device=x_BLD.device)
            readable_B1ML = readable_B1ML & (position_L <= index_M[:, None])
        # No NaN where nothing is readable: those rows are padding.
        score_BHML = score_BHML.masked_fill(~readable_B1ML, torch.finfo(score_BHML.dtype).min)
        weight_BHML = self.dropout(score_BHML.softmax(dim=-1)).to(dtype)
        sum_BHMD = torch.einsum("bhml,bld->bhmd", weight_BHML, x_BLD)
        y_BHMK = sum_BHMD @ value_ED.to(sum_BHMD.dtype).unflatten(0, (self.num_heads, -1)).mT
        if value_E is not None:  # dropout scales it by what is left of the weights
            value_H1K = value_E.unflatten(0, (self.num_heads, 1, -1))
            y_BHMK = y_BHMK + weight_BHML.sum(dim=-1, keepdim=True) * value_H1K
        return rearrange(y_BHMK, "b h m k -> b m (h k)")
