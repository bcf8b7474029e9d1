"""Models of bounded reach, one example and position at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from models.conv import ConvMixer
from models.none import NoMixing


def no_mixing(mixer: NoMixing, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
    """What `mixer(x_BLD, mask_BL)` must give in its real rows; rows at padding are zeros."""
    out_BLD = torch.zeros_like(x_BLD)
    for b, mask_L in enumerate(mask_BL):
        for t in mask_L.nonzero().flatten().tolist():
            out_BLD[b, t] = mixer.out(mixer.value(x_BLD[b, t]))
    return out_BLD


def short_convolutions(mixer: ConvMixer, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
    """The same of a convolution."""
    out_BLD = torch.zeros_like(x_BLD)
    middle = mixer.kernel_EK.shape[1] // 2
    for b, mask_L in enumerate(mask_BL):
        real = set(mask_L.nonzero().flatten().tolist())
        for t in sorted(real):
            sum_E = torch.zeros_like(mixer.kernel_EK[:, 0])
            for k in range(mixer.kernel_EK.shape[1]):
                s = t + k - middle
                if s in real and (s <= t or not mixer.causal):
                    sum_E = sum_E + mixer.kernel_EK[:, k] * mixer.value(x_BLD[b, s])
            out_BLD[b, t] = mixer.out(sum_E)
    return out_BLD
