"""Learning-rate schedules, each a function of the step, and the optimiser they drive."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from lra.config import TrainConfig

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

INITIAL_DIVISOR, FINAL_DIVISOR = 25.0, 1e4  # of the one-cycle schedule, PyTorch's defaults
FAIRSEQ_INITIAL_LR = 1e-7


def one_cycle(step: int, cfg: TrainConfig) -> float:
    """Linear from lr / 25 to lr at step `warmup_steps`, then linear to almost 0 at the last step.

    Source: Smith and Topin 2019 with linear annealing, in the arithmetic of PyTorch's OneCycleLR.
    """
    initial = cfg.lr / INITIAL_DIVISOR
    peak, last = cfg.warmup_steps - 1, cfg.num_steps - 1
    position = step - 1
    if position <= peak:
        return initial + (cfg.lr - initial) * (position / peak if peak > 0 else 1.0)
    share = (position - peak) / (last - peak)
    return cfg.lr + (initial / FINAL_DIVISOR - cfg.lr) * share


def inverse_sqrt(step: int, cfg: TrainConfig) -> float:
    """Linear from 1e-7 to lr over the warm-up, then lr * sqrt(warmup_steps / updates so far).

    Source: fairseq's inverse_sqrt, used by Luna (arXiv 2106.01540).
    """
    updates = step - 1
    if updates < cfg.warmup_steps:
        return FAIRSEQ_INITIAL_LR + (cfg.lr - FAIRSEQ_INITIAL_LR) * updates / cfg.warmup_steps
    return cfg.lr * math.sqrt(max(cfg.warmup_steps, 1) / max(updates, 1))


def rsqrt(step: int, cfg: TrainConfig) -> float:
    """lr * min(1, t / W) / sqrt(max(t, W)): here lr is a factor, the peak is lr / sqrt(W).

    Source: LRA (arXiv 2011.04006), text tasks. The first update has rate 0.
    """
    updates, warmup = step - 1, max(cfg.warmup_steps, 1)
    return cfg.lr * min(1.0, updates / warmup) / math.sqrt(max(updates, warmup))


def cosine(step: int, cfg: TrainConfig) -> float:
    """Linear warm-up, then half a cosine that would take `num_steps` further steps to reach 0.

    Source: LRA, pixel tasks. The first update has rate 0.
    """
    updates, warmup = step - 1, max(cfg.warmup_steps, 1)
    progress = max(0.0, (updates - cfg.warmup_steps) / cfg.num_steps)
    return cfg.lr * min(1.0, updates / warmup) * 0.5 * (1 + math.cos(math.pi * progress))


def constant(step: int, cfg: TrainConfig) -> float:
    """lr, after a linear warm-up."""
    return cfg.lr * min(1.0, step / max(cfg.warmup_steps, 1))


SCHEDULES: dict[str, Callable[[int, TrainConfig], float]] = {
    "constant": constant,
    "one_cycle": one_cycle,
    "inverse_sqrt": inverse_sqrt,
    "rsqrt": rsqrt,
    "cosine": cosine,
}


def learning_rate(step: int, cfg: TrainConfig) -> float:
    """The rate of step `step`, counted from 1."""
    return SCHEDULES[cfg.schedule](step, cfg)


def make_optimizer(model: nn.Module, cfg: TrainConfig) -> Optimizer:
    """AdamW over all parameters; decay is decoupled and scaled by the rate."""
    import torch

    return torch.optim.AdamW(
        model.parameters(),
        lr=cfg.lr,
        betas=cfg.betas,
        eps=cfg.eps,
        weight_decay=cfg.weight_decay,
        fused=True,
    )
