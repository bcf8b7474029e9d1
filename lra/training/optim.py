"""Learning-rate schedules, each a function of the step, and the optimiser they drive."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lra.config import GroupConfig, TrainConfig

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


def cosine_to_zero(step: int, cfg: TrainConfig) -> float:
    """Linear from 0 to lr over the warm-up, then half a cosine that is 0 after the last step.

    Source: the schedule of Hugging Face's transformers, which S4's LRA configs use.
    """
    updates = step - 1
    if updates < cfg.warmup_steps:
        return cfg.lr * updates / cfg.warmup_steps
    progress = (updates - cfg.warmup_steps) / max(1, cfg.num_steps - cfg.warmup_steps)
    return cfg.lr * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def cosine_early(step: int, cfg: TrainConfig) -> float:
    """Linear warm-up, then a cosine that began at step 0 and is 0 `warmup_steps` before the end.

    Source: S5's training code, where the last epochs, as many as the warm-up has, have rate 0.
    """
    if step <= cfg.warmup_steps:
        return cfg.lr * step / cfg.warmup_steps
    progress = (step - 1) / max(1, cfg.num_steps - cfg.warmup_steps)
    return cfg.lr * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def linear(step: int, cfg: TrainConfig) -> float:
    """From 1e-7 to lr over the warm-up, as `warmup_power` of the step, then linear to 0.

    Source: fairseq's linear decay in Mega's code (arXiv 2209.10655).
    """
    updates = step - 1
    if updates < cfg.warmup_steps:
        share = (updates / cfg.warmup_steps) ** cfg.warmup_power
        return FAIRSEQ_INITIAL_LR + (cfg.lr - FAIRSEQ_INITIAL_LR) * share
    return cfg.lr * (cfg.num_steps - updates) / max(1, cfg.num_steps - cfg.warmup_steps)


def constant(step: int, cfg: TrainConfig) -> float:
    """lr, after a linear warm-up."""
    return cfg.lr * min(1.0, step / max(cfg.warmup_steps, 1))


SCHEDULES: dict[str, Callable[[int, TrainConfig], float]] = {
    "constant": constant,
    "one_cycle": one_cycle,
    "inverse_sqrt": inverse_sqrt,
    "rsqrt": rsqrt,
    "cosine": cosine,
    "cosine_to_zero": cosine_to_zero,
    "cosine_early": cosine_early,
    "linear": linear,
}


def learning_rate(step: int, cfg: TrainConfig) -> float:
    """The rate of step `step`, counted from 1."""
    return SCHEDULES[cfg.schedule](step, cfg)


def parameter_groups(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Every parameter once, by the group that its module's `GROUPS` names; "general" if none does.

    Group "norm" has the norms and biases of the layers; a class lists its other slow parameters.
    """
    groups: dict[str, list[nn.Parameter]] = {"general": []}
    seen: set[nn.Parameter] = set()
    for path, module in model.named_modules():
        own = getattr(module, "GROUPS", {})
        in_layer = "blocks" in path.split(".") or path == "encoder.norm"
        for name, parameter in module.named_parameters(recurse=False):
            is_norm = in_layer and (name == "bias" or "Norm" in type(module).__name__)
            group = own.get(name, "norm" if is_norm else "general")
            if parameter not in seen:
                groups.setdefault(group, []).append(parameter)
            seen.add(parameter)
    return groups


def make_optimizer(model: nn.Module, cfg: TrainConfig) -> Optimizer:
    """AdamW; decay is decoupled and scaled by the rate.

    A group of which `cfg.groups` says something is one of the optimiser's, by its `name`; all other
    parameters are the group "general".
    """
    from lra.training.adam import AdamW  # brings torch

    own = own_groups(cfg)
    parts: dict[str, list[nn.Parameter]] = {"general": []}
    for name, parameters in parameter_groups(model).items():
        parts.setdefault(name if name in own else "general", []).extend(parameters)
    # In the order of the model, as checkpoints from before there were groups have them.
    place = {parameter: i for i, parameter in enumerate(model.parameters())}
    groups = [
        {
            "params": sorted(parameters, key=place.__getitem__),
            "name": name,
            "lr": group_config(name, cfg).lr,
            "weight_decay": group_config(name, cfg).weight_decay,
        }
        for name, parameters in parts.items()
        if parameters
    ]
    return AdamW(groups, lr=cfg.lr, betas=cfg.betas, eps=cfg.eps, fused=True)


def own_groups(cfg: TrainConfig) -> dict[str, GroupConfig]:
    """The groups of which the run says something."""
    groups = {f.name: getattr(cfg.groups, f.name) for f in dataclasses.fields(cfg.groups)}
    return {name: group for name, group in groups.items() if group != GroupConfig()}


def group_config(name: str, cfg: TrainConfig) -> TrainConfig:
    """`cfg` as it holds for a group: with the group's own peak rate and decay."""
    group = own_groups(cfg).get(name, GroupConfig())
    return dataclasses.replace(
        cfg,
        lr=cfg.lr if group.lr is None else group.lr,
        weight_decay=cfg.weight_decay if group.weight_decay is None else group.weight_decay,
    )


def set_rates(optimizer: Optimizer, step: int, cfg: TrainConfig) -> float:
    """Give every group of the optimiser its rate of this step; returns the general one."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step, group_config(group.get("name", "general"), cfg))
    return learning_rate(step, cfg)


def describe_groups(model: nn.Module, cfg: TrainConfig) -> list[dict[str, Any]]:
    """Name, parameters, peak rate and decay of each group, for the record; [] if all are one."""
    groups = make_optimizer(model, cfg).param_groups
    if len(groups) == 1:
        return []
    return [
        {
            "name": group["name"],
            "num_params": sum(parameter.numel() for parameter in group["params"]),
            "peak_lr": group["lr"],
            "weight_decay": group["weight_decay"],
        }
        for group in groups
    ]
