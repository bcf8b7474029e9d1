"""Floating-point operations of what runs, also those that PyTorch's own counter does not know."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import (
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

aten = torch.ops.aten


COUNTED = (
    "of matrix products, attention and convolutions, a multiplication and an addition each, and of "
    "Fourier transforms"
)


def counting_flops() -> FlopCounterMode:
    """A context that counts the operations of what is run inside: those that COUNTED says."""
    return FlopCounterMode(display=False, custom_mapping=MORE_FLOPS)


def _product(_out: Any, a: Any, b: Any, *_: Any, **__: Any) -> int:
    """Of [..., I, J] and [..., J, K]."""
    return 2 * math.prod(a) * b[-1]


def _cpu_attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(query, key, value)


def _cpu_attention_backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return sdpa_backward_flop_count(grad, query, key, value)


def _transform(shape: Any, dims: Any, *_: Any, out_shape: Any, **__: Any) -> int:
    """By the usual count, 5 n log2 n for n complex numbers."""
    # The longer of both sides has as many numbers as the transform is long.
    longest = out_shape if math.prod(out_shape) >= math.prod(shape) else shape
    return round(5 * math.prod(longest) * sum(math.log2(max(2, longest[d])) for d in dims))


def _transform_of_reals(*args: Any, **kwargs: Any) -> int:
    return _transform(*args, **kwargs) // 2


# Shapes stand for tensors.
MORE_FLOPS: dict[Any, Callable[..., int]] = {
    aten.addmm_: _product,
    aten.baddbmm_: _product,
    aten._scaled_dot_product_flash_attention_for_cpu: _cpu_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _cpu_attention_backward,
    aten._fft_c2c: _transform,
    aten._fft_r2c: _transform_of_reals,
    aten._fft_c2r: _transform_of_reals,
}
