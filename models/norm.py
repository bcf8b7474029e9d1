"""Norms that a recipe chooses from, all called with the mask, which batch statistics heed.

Shapes: B batch, L length, D d_model. `mask` is bool, True = real token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from models.shape import Shape


class LayerNorm(nn.LayerNorm):
    """Over the features of each token; Ba et al. 2016, https://arxiv.org/abs/1607.06450."""

    def forward(self, x_BLD: Tensor, _mask_BL: Tensor | None = None) -> Tensor:
        """[B, L, D]."""
        return super().forward(x_BLD)


class NoNorm(nn.Module):
    """In the place of a norm where there is none."""

    def forward(self, x_BLD: Tensor, _mask_BL: Tensor | None = None) -> Tensor:
        """The input."""
        return x_BLD


class RMSNorm(nn.Module):
    """x * weight / sqrt(mean(x^2) + eps); Zhang and Sennrich 2019, arXiv 1910.07467."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x_BLD: Tensor, _mask_BL: Tensor | None = None) -> Tensor:
        """[B, L, D]."""
        return F.rms_norm(x_BLD, x_BLD.shape[-1:], self.weight, self.eps)


class ScaleNorm(nn.Module):
    """One gain for all features: scalar * x / sqrt(mean(x^2) + eps).

    Source: Nguyen and Salazar 2019, arXiv 1910.05895, as Mega's code has it: the mean over D stands
    where the paper has the sum, so a gain of 1 gives rows of length sqrt(D).
    """

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.scalar = nn.Parameter(torch.ones(1))

    def forward(self, x_BLD: Tensor, _mask_BL: Tensor | None = None) -> Tensor:
        """[B, L, D]."""
        return F.rms_norm(x_BLD, x_BLD.shape[-1:], None, self.eps) * self.scalar


class BatchNorm(nn.Module):
    """Each feature over all real tokens of a batch in training, by running statistics otherwise.

    Padding has no part in the statistics; the code of S4, S5, LRU and Mega counts it in. Processes
    of torch.distributed share the statistics of the whole batch. Micro-batches have statistics of
    their own, so with this norm, alone, their size changes results.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, width: int, eps: float, momentum: float) -> None:
        super().__init__()
        self.eps, self.momentum = eps, momentum
        self.is_frozen = False  # keep the running statistics as they are
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))

    def forward(self, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
        """[B, L, D]. A batch without a real token is normalised by the running statistics."""
        dtype = torch.promote_types(x_BLD.dtype, torch.float32)
        mean_D, var_D = self.running_mean.to(dtype), self.running_var.to(dtype)
        if self.training:
            mean_D, var_D = self._statistics(x_BLD.to(dtype), mask_BL, mean_D, var_D)
        gain_D = self.weight.to(dtype) * (var_D + self.eps).rsqrt()
        return torch.addcmul(self.bias.to(dtype) - mean_D * gain_D, x_BLD.to(dtype), gain_D).to(
            x_BLD.dtype
        )

    def _statistics(
        self, x_BLD: Tensor, mask_BL: Tensor, mean_D: Tensor, var_D: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Mean and biased variance over the real tokens; the running ones move towards them."""
        with torch.autocast(x_BLD.device.type, enabled=False):
            mask_N = mask_BL.reshape(-1).to(x_BLD.dtype)
            count = _summed(mask_N.sum())
            x_ND = x_BLD.flatten(0, 1)
            # Real rows only: what stands at padding may be anything, but it is finite.
            batch_mean_D = _summed(mask_N @ x_ND) / count.clamp(min=1)
            centred_ND = (x_ND - batch_mean_D) * mask_N[:, None]
            batch_var_D = _summed(centred_ND.square().sum(dim=0)) / count.clamp(min=1)
        some = count > 0
        if not self.is_frozen:
            with torch.no_grad():
                unbiased_D = batch_var_D * (count / (count - 1).clamp(min=1))
                share = self.momentum * some
                self.running_mean += share * (batch_mean_D - self.running_mean)
                self.running_var += share * (unbiased_D - self.running_var)
        return torch.where(some, batch_mean_D, mean_D), torch.where(some, batch_var_D, var_D)


def _summed(x: Tensor) -> Tensor:
    """The sum over all processes, through which gradients flow back to each of them."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return x
    if torch.compiler.is_compiling():  # no graph has this exchange
        return torch.compiler.disable(_summed)(x)
    from torch.distributed.nn.functional import all_reduce

    return all_reduce(x)


@contextmanager
def frozen_statistics(module: nn.Module) -> Iterator[None]:
    """Inside, a forward pass that only repeats an earlier one leaves running statistics alone."""
    norms = [part for part in module.modules() if isinstance(part, BatchNorm)]
    for norm in norms:
        norm.is_frozen = True
    try:
        yield
    finally:
        for norm in norms:
            norm.is_frozen = False


def set_eps(module: nn.Module, eps: float) -> None:
    """What every norm inside adds to the variance, whatever its kind."""
    for part in module.modules():
        if isinstance(part, (nn.LayerNorm, BatchNorm, RMSNorm, ScaleNorm)):
            part.eps = eps


def make_norm(shape: Shape, eps: float = 1e-5) -> nn.Module:
    """The norm that `shape.norm_kind` names; called as `norm(x_BLD, mask_BL)`."""
    if shape.norm_kind == "batch":
        return BatchNorm(shape.d_model, eps, shape.norm_momentum)
    if shape.norm_kind == "scale":
        return ScaleNorm(eps)
    if shape.norm_kind == "rms":
        return RMSNorm(shape.d_model, eps)
    return LayerNorm(shape.d_model, eps)
