"""Softmax attention, the Transformer's own mixer: exact, quadratic in length.

Source: Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, section 3.2.
Shapes: B batch, L length, D d_model, H heads, K head dim.
"""

from __future__ import annotations

from einops import rearrange
from torch import Tensor, nn

from models.layers import StackedLinear, attend, check_causal
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
        self.num_heads = shape.num_heads
        self.dropout = shape.attention_dropout
        self.causal = causal
        width = shape.num_heads * shape.attention_head_dim
        self.qkv = StackedLinear(shape.d_model, width, parts=3, bias=shape.attention_bias)
        self.out = nn.Linear(width, shape.d_model, bias=shape.attention_bias)
        self.rotary = Rotary(shape)

    def forward(self, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
        """Mix tokens; padding is read by nobody. [B, L, D]."""
        q_BHLK, k_BHLK, v_BHLK = (
            rearrange(part, "b l (h k) -> b h l k", h=self.num_heads)
            for part in self.qkv(x_BLD).chunk(3, dim=-1)
        )
        q_BHLK, k_BHLK = self.rotary(q_BHLK, k_BHLK)
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
