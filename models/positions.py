"""Rotary positions: queries and keys are turned by angles that grow with their position.

Source: Su et al. 2021, https://arxiv.org/abs/2104.09864, section 3.2, in each head: columns 2 r and
2 r + 1 are a point of a plane, and position n turns it by n theta^(-r / R). So the product of a
query and a key depends on the distance between their positions alone.
Shapes: B batch, L length, H heads, K head dim, R = K / 2 planes of a head, M chosen positions, T
stacked linear maps.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from models.shape import Shape


class Rotary(nn.Module):
    """Turns queries and keys by their positions if `shape.positions` asks for it.

    A mixer makes one and passes its queries and keys through it; a model whose layers have none is
    refused these positions by its encoder. Position counts rows of a sequence, from 0, where the
    class token stands if there is one. With rotary_2d half of the planes turn by the row of the
    pixel and half by its column, with R / 2 rates each; the class token stands one row and one
    column before the first pixel. Angles are float32, or float64 of such tensors.

    Raises:
        ValueError: rotary_2d without the width of a picture.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.is_on = shape.is_rotary
        self.theta = shape.rotary_theta
        self.num_class_tokens = int(shape.pooling == "cls")
        self.longest = shape.max_length + self.num_class_tokens
        self.picture_width = shape.picture_width if shape.positions == "rotary_2d" else None
        if shape.positions == "rotary_2d" and self.picture_width is None:
            raise ValueError(
                "shape.positions=rotary_2d: needs shape.picture_width, which tasks of pixels have"
            )

    def forward(self, *tensors: Tensor, first: int = 0, axis: int = -2) -> tuple[Tensor, ...]:
        """Tensors [..., L, ..., K], turned or as they are; L stands at `axis`, from the end.

        Their rows have the positions `first`, `first` + 1 and so on.
        """
        if not self.is_on:
            return tensors
        end = first + tensors[0].shape[axis]
        table_LR2 = self.table(end, tensors[0])[first:end]
        ones = (1,) * (-axis - 2)
        table = table_LR2.view(-1, *ones, *table_LR2.shape[1:])
        return tuple(turn(x, table) for x in tensors)

    def heads(
        self, qkv_BLE: Tensor, num_heads: int, first: int = 0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys, turned from position `first` on, and values; [B, H, L, K] each.

        Args:
            qkv_BLE: the three side by side, E = 3 H K.
        """
        split = split_heads if torch.compiler.is_compiling() else _Heads.apply
        q_BHLK, k_BHLK, v_BHLK = split(qkv_BLE, num_heads)
        q_BHLK, k_BHLK = self(q_BHLK, k_BHLK, first=first)
        return q_BHLK, k_BHLK, v_BHLK

    def stacked(self, x_BLTHK: Tensor, num_turned: int) -> Tensor:
        """The same, of the first `num_turned` of T parts that lie in one tensor."""
        if not self.is_on:
            return x_BLTHK
        (turned,) = self(x_BLTHK[:, :, :num_turned], axis=-4)
        return torch.cat([turned, x_BLTHK[:, :, num_turned:]], dim=2)

    def at(self, x_BHMK: Tensor, index_M: Tensor) -> Tensor:
        """The same, of rows at the positions `index_M`."""
        return turn(x_BHMK, self.table(self.longest, x_BHMK)[index_M]) if self.is_on else x_BHMK

    def table(self, length: int, like: Tensor) -> Tensor:
        """Cosine and sine for at least `length` positions; [L, R, 2]."""
        # Of few different lengths, so that a table is made once.
        num_rows = self.longest if length <= self.longest else 1 << (length - 1).bit_length()
        make = make_table.__wrapped__ if torch.compiler.is_compiling() else make_table
        return make(
            num_rows,
            like.shape[-1],
            self.theta,
            self.picture_width,
            self.num_class_tokens,
            torch.promote_types(like.dtype, torch.float32),
            like.device,
        )


def split_heads(qkv_BLE: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views of three stacked maps; [B, H, L, K] each."""
    q, k, v = rearrange(qkv_BLE, "b l (t h k) -> t b h l k", t=3, h=num_heads).unbind()
    return q, k, v


class _Heads(torch.autograd.Function):
    """As `split_heads`; gradients that lie in memory as the three do are joined without a copy."""

    @staticmethod
    def forward(ctx: Any, qkv_BLE: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
        return split_heads(qkv_BLE, num_heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads_BHLK: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        batch_size, num_heads, length, width = grads_BHLK[0].shape
        whole = grads_BHLK[0]._base
        if (
            whole is not None
            and whole.is_contiguous()
            and whole.shape == (batch_size, length, 3, num_heads, width)
            and all(
                grad._base is whole
                and grad.data_ptr() == part.data_ptr()
                and grad.stride() == part.transpose(1, 2).stride()
                for grad, part in zip(grads_BHLK, whole.unbind(dim=2), strict=True)
            )
        ):
            return whole.flatten(2), None
        return rearrange(list(grads_BHLK), "t b h l k -> b l (t h k)"), None


@functools.lru_cache(maxsize=16)
def make_table(
    num_rows: int,
    width: int,
    theta: float,
    picture_width: int | None,
    num_class_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Cosine and sine of all angles, from float64; [L, K / 2, 2]. Shared: not to be changed."""
    wide: Any = {"dtype": torch.float64, "device": device}
    axes = [torch.arange(num_rows, **wide)]
    if picture_width is not None:
        pixel_L = axes[0] - num_class_tokens
        axes = [(pixel_L / picture_width).floor(), pixel_L.fmod(picture_width)]
    num_rates = width // (2 * len(axes))
    rate_R = theta ** (-torch.arange(num_rates, **wide) / num_rates)
    angle_LR = torch.cat([position_L[:, None] * rate_R for position_L in axes], dim=1)
    return torch.stack([angle_LR.cos(), angle_LR.sin()], dim=2).to(dtype)


def turn(x: Tensor, table: Tensor) -> Tensor:
    """Each pair of columns of x turned by the table's angle; same shape and dtype as x."""
    if not torch.compiler.is_compiling():
        return _Turn.apply(x, table)
    # A compiler knows no complex numbers, and makes one pass of this.
    (a, b), (cos, sin) = x.to(table.dtype).unflatten(-1, (-1, 2)).unbind(-1), table.unbind(-1)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2).to(x.dtype)


class _Turn(torch.autograd.Function):
    """A product of complex numbers, which is one pass; its gradient is turned back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor) -> Tensor:
        ctx.factor = torch.view_as_complex(table)  # a table made in inference mode can't be saved
        return times(x, ctx.factor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return times(grad, ctx.factor.conj()), None


def times(x: Tensor, factor: Tensor) -> Tensor:
    """Pairs of columns of x as complex numbers, times a factor."""
    wide = x.to(factor.real.dtype)
    if wide.stride(-1) != 1 or any(s % 2 for s in (*wide.stride()[:-1], wide.storage_offset())):
        wide = wide.clone(memory_format=torch.contiguous_format)  # no pairs as they lie
    product = torch.view_as_complex(wide.unflatten(-1, (-1, 2))) * factor
    return torch.view_as_real(product).flatten(-2).to(x.dtype)
