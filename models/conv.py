"""Short convolution in place of attention: a model that sees so far and no further.

The measure of locality of Miralles-Gonzalez et al. 2025, https://arxiv.org/abs/2501.14850: with a
kernel of width K, L layers reach L * floor(K / 2) positions.
Shapes: B batch, L length, D d_model, E width of the values, K kernel size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from models.convolution import short_convolution
from models.layers import check_causal
from models.shape import Shape


class ConvMixer(nn.Module):
    """A depth-wise convolution between a value and an output map.

    Args:
        shape: heads, widths and `attention_bias` are read here.
        kernel_size: K, odd: (K - 1) / 2 positions before, the position itself, as many behind.
        causal: only those before, and the position itself.

    Raises:
        ValueError: the kernel size is not odd, or causal meets a pooling that reads position 0.
    """

    def __init__(self, shape: Shape, *, kernel_size: int = 15, causal: bool = False) -> None:
        super().__init__()
        if kernel_size < 1 or kernel_size % 2 == 0:
            raise ValueError(f"model.kernel_size={kernel_size}: expected an odd width")
        check_causal(shape, causal)
        self.causal = causal
        width = shape.num_heads * shape.attention_head_dim
        self.value = nn.Linear(shape.d_model, width, bias=shape.attention_bias)
        self.out = nn.Linear(width, shape.d_model, bias=shape.attention_bias)
        # PyTorch's default for a convolution with this many inputs to one output.
        bound = 1 / math.sqrt(kernel_size)
        self.kernel_EK = nn.Parameter(torch.empty(width, kernel_size).uniform_(-bound, bound))

    @property
    def reach(self) -> int:
        """Largest distance between a position and one that it reads."""
        return self.kernel_EK.shape[1] // 2

    def forward(self, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
        """Mix tokens; padding is read by nobody. [B, L, D]."""
        v_BLE = self.value(x_BLD).masked_fill(~mask_BL[..., None], 0.0)
        kernel_EK = self.kernel_EK.to(v_BLE.dtype)
        if self.causal:
            taps_K = torch.arange(kernel_EK.shape[1], device=kernel_EK.device)
            kernel_EK = kernel_EK * (taps_K <= self.reach)
        y_BEL1 = short_convolution(v_BLE.mT[..., None], kernel_EK)
        return self.out(y_BEL1.squeeze(3).mT)
