"""Softmax attention, the Transformer's own mixer: exact, quadratic in length.

Source: Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, section 3.2.
Shapes: B batch, L length, D d_model, H heads, K head dim.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor, nn

from models.layers import PastTokens, StackedLinear, attend, check_causal, check_stepwise
from models.positions import Rotary
from models.shape import Shape


class SoftmaxAttention(nn.Module):
    """Multi-head attention of every position to every real position.

    Args:
        shape: heads, widths, `attention_bias` and `attention_dropout` are read here; heads times
            `head_dim` need not be `d_model`.
        causal: position t sees positions 0 .. t only. Padding must stand behind the tokens.

    Raises:
        ValueError: causal together with a pooling that reads the first position.
    """

    def __init__(self, shape: Shape, *, causal: bool = False) -> None:
        super().__init__()
        check_causal(shape, causal)
        self.num_heads, self.head_dim = shape.num_heads, shape.attention_head_dim
        self.dropout = shape.attention_dropout
        self.causal = causal
        width = shape.num_heads * shape.attention_head_dim
        self.qkv = StackedLinear(shape.d_model, width, parts=3, bias=shape.attention_bias)
        self.out = nn.Linear(width, shape.d_model, bias=shape.attention_bias)
        self.rotary = Rotary(shape)

    def attention_weights(self, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
        """How much each position reads of each, without dropout; [B, H, L, L], memory to match.

        A position that can read none has zeros.
        """
        q_BHLK, k_BHLK, _ = self.rotary.heads(self.qkv(x_BLD), self.num_heads)
        score_BHLL = q_BHLK @ k_BHLK.mT * q_BHLK.shape[-1] ** -0.5
        hidden = ~mask_BL[:, None, None]
        if self.causal:
            hidden = hidden | torch.ones_like(score_BHLL[0, 0], dtype=torch.bool).triu(1)
        score_BHLL = score_BHLL.masked_fill(hidden, torch.finfo(score_BHLL.dtype).min)
        # Where all is hidden, the softmax is uniform: the second fill makes it zeros.
        return score_BHLL.softmax(dim=-1).masked_fill(hidden, 0.0)

    def forward(self, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
        """Mix tokens; padding is read by nobody. [B, L, D]."""
        q_BHLK, k_BHLK, v_BHLK = self.rotary.heads(self.qkv(x_BLD), self.num_heads)
        y_BHLK = attend(
            q_BHLK,
            k_BHLK,
            v_BHLK,
            # With padding behind the tokens a causal row meets none, and the kernels take one rule.
            None if self.causal else mask_BL,
            query_mask_BL=mask_BL,
            dropout=self.dropout if self.training else 0.0,
            causal=self.causal,
        )
        return self.out(rearrange(y_BHLK, "b h l k -> b l (h k)"))

    def start(self, batch_size: int) -> PastTokens:
        """State before the first position; it grows with every step.

        Raises:
            ValueError: the model is not causal.
        """
        check_stepwise(self.causal)
        size = (batch_size, self.num_heads, self.head_dim)
        return PastTokens.none(self.qkv.weight, size)

    def step(self, x_B1D: Tensor, past: PastTokens) -> tuple[Tensor, PastTokens]:
        """The next position alone; [B, 1, D] and the state after it."""
        q_BH1K, k_BH1K, v_BH1K = self.rotary.heads(
            self.qkv(x_B1D), self.num_heads, first=past.num_steps
        )
        past = past.and_next(k_BH1K, v_BH1K)
        dropout = self.dropout if self.training else 0.0
        y_BH1K = attend(q_BH1K, past.k_BHNK, past.v_BHNK, None, dropout=dropout)
        return self.out(rearrange(y_BH1K, "b h l k -> b l (h k)")), past
