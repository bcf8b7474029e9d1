"""No mixing: every token goes through the same maps alone, and only pooling joins them.

A model of reach 0, to say what a score needs: with `shape.positions=none` a bag of transformed
tokens. Pooling that reads one position alone gives no more than that token.
Shapes: B batch, L length, D d_model.
"""

from __future__ import annotations

from torch import Tensor, nn

from models.shape import Shape


class NoMixing(nn.Module):
    """The value and output maps of attention in which each position reads itself alone.

    Args:
        shape: heads, widths and `attention_bias` are read here.
    """

    reach = 0

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.num_heads * shape.attention_head_dim
        self.value = nn.Linear(shape.d_model, width, bias=shape.attention_bias)
        self.out = nn.Linear(width, shape.d_model, bias=shape.attention_bias)

    def forward(self, x_BLD: Tensor, _mask_BL: Tensor) -> Tensor:
        """Transform each position; [B, L, D]."""
        return self.out(self.value(x_BLD))
