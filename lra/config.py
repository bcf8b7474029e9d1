"""Typed configuration: what a run may be told, in which ranges, and what of it is its identity."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

# Parts of a config that say where and how a run goes on, not what its numbers are.
NO_IDENTITY = ("seed", "paths", "hardware", "logger", "checkpoint", "sweep")
# Keys of `train` that change when something is written or saved, not the numbers.
NO_NUMBERS = ("log_every", "checkpoint_every", "time_limit")
Schedule = Literal[
    "constant", "one_cycle", "inverse_sqrt", "rsqrt", "cosine", "cosine_to_zero", "cosine_early",
    "linear",
]  # fmt: skip
# Keys that came when runs were on record already: they enter a hash, and so the identity of a run,
# only with another value than the one by which everything is as it was.
LATER: dict[str, Any] = {
    "shape.norm_kind": "layer", "shape.norm_momentum": 0.1,
    "shape.input": "ids", "shape.input_mean": 0.0, "shape.input_std": 1.0,
    "shape.embedding_dropout": None, "shape.head_activation": "relu", "shape.head_dropout": 0.0,
    "shape.rotary_theta": 10000.0, "train.warmup_power": 1.0,
}  # fmt: skip
_NOT_LATER = object()


@dataclass(frozen=True)
class GroupConfig:
    """Rate and decay of some parameters, where they have their own."""

    lr: float | None = None  # peak of the rate; None: as train.lr
    weight_decay: float | None = None  # None: as train.weight_decay


@dataclass(frozen=True)
class GroupsConfig:
    """Groups of parameters; a model names its own, see `GROUPS` in models/s4d.py."""

    state: GroupConfig = GroupConfig()  # state matrix of a state-space model (A, Lambda)
    input: GroupConfig = GroupConfig()  # its map from the input to the state (B)
    output: GroupConfig = GroupConfig()  # its map from the state to the output (C)
    step: GroupConfig = GroupConfig()  # its step sizes (Delta)
    norm: GroupConfig = GroupConfig()  # norms and biases of the layers, of any model

    def __post_init__(self) -> None:
        for name, group in vars(self).items():
            key, lr, decay = f"train.groups.{name}", group.lr, group.weight_decay
            if lr is not None and not 0 < lr < math.inf:
                raise ValueError(f"{key}.lr={lr}: expected a number above 0")
            if decay is not None and not 0 <= decay < math.inf:
                raise ValueError(f"{key}.weight_decay={decay}: expected at least 0")


@dataclass(frozen=True)
class TrainConfig:
    """Budget, optimiser and protocol of a run. Counted in steps; an epoch is only ever derived."""

    num_steps: int  # updates of the weights
    batch_size: int  # examples of an update, over all devices
    lr: float  # peak of the rate; of schedule=rsqrt a factor, see lra/training/optim.py
    warmup_steps: int  # over which the rate rises
    eval_every: int  # steps between evaluations on the validation split
    schedule: Schedule = "one_cycle"  # of the rate over steps; formulas in lra/training/optim.py
    betas: tuple[float, float] = (0.9, 0.999)  # of AdamW: decay of both moments
    eps: float = 1e-8  # of AdamW, added to the denominator
    weight_decay: float = 0.0  # decoupled, on all parameters but those of train.groups
    groups: GroupsConfig = GroupsConfig()  # parameters with a rate or a decay of their own
    clip_norm: float | None = None  # largest norm of the whole gradient; None: no clipping
    selection: Literal["best_val", "best_val_loss", "last"] = "best_val"  # which weights are tested
    length_bucketing: bool = True  # rows of similar length share a batch
    pad_to_max: bool = False  # pad every batch to task.max_length, as older code does
    warmup_power: float = 1.0  # schedule=linear: the rate rises as that power of the step
    allow_unreached_peak: bool = False  # accept a warm-up that outlasts the training
    log_every: int = 10  # steps between writes to metrics.jsonl, of a line for each
    checkpoint_every: int | None = None  # steps; None: at every evaluation, at most once a minute
    time_limit: float | None = None  # seconds since its start; then the run stops, resumable

    def __post_init__(self) -> None:
        for name in ("num_steps", "batch_size", "eval_every", "log_every", "checkpoint_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"train.{name}={value}: expected at least 1")
        for name in ("lr", "eps", "clip_norm", "warmup_power", "time_limit"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"train.{name}={value}: expected a number above 0")
        if self.eps < 2.0**-126:
            raise ValueError(f"train.eps={self.eps}: float32 holds 0; expected at least 1.2e-38")
        for beta in self.betas:
            if not 0 <= beta < 1:
                raise ValueError(f"train.betas={list(self.betas)}: expected 0 <= beta < 1")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"train.weight_decay={self.weight_decay}: expected at least 0")
        if self.warmup_steps < 0:
            raise ValueError(f"train.warmup_steps={self.warmup_steps}: expected at least 0")
        if (
            self.schedule != "constant"
            and self.warmup_steps >= self.num_steps
            and not self.allow_unreached_peak
        ):
            raise ValueError(
                f"train.warmup_steps={self.warmup_steps} is not below "
                f"train.num_steps={self.num_steps}: the rate would only rise, to "
                f"{100 * self.num_steps / self.warmup_steps:.1f} % of its peak at the end; lower "
                "warmup_steps, or set train.allow_unreached_peak=true if that is meant"
            )


LATER["train.groups"] = dataclasses.asdict(GroupsConfig())


@dataclass(frozen=True)
class PretrainConfig:
    """Self-pretraining: the encoder first learns to tell tokens of the task's training inputs.

    What is not here is as in `train`: betas, eps, groups, clip_norm and how batches are made.
    """

    objective: Literal["none", "masked", "next"] = "none"  # tokens hidden at random, or those ahead
    num_steps: int = 0  # updates of the weights
    batch_size: int = 0  # examples of an update, over all devices
    lr: float = 0.0  # peak of the rate
    warmup_steps: int = 0  # over which the rate rises
    schedule: Schedule = "constant"  # of the rate over steps; formulas in lra/training/optim.py
    weight_decay: float = 0.0  # decoupled, on all parameters but those of train.groups
    mask_rate: float | None = None  # objective=masked: probability that a token is hidden
    eval_every: int = 0  # steps between evaluations on the validation split; the best loss counts

    def __post_init__(self) -> None:
        if self.objective == "none":
            return
        if (self.objective == "masked") != (self.mask_rate is not None):
            rate = "null" if self.mask_rate is None else self.mask_rate
            raise ValueError(
                f"pretrain.mask_rate={rate} with pretrain={self.objective}: "
                "expected a rate with masked, null with next"
            )
        if self.mask_rate is not None and not 0 < self.mask_rate < 1:
            raise ValueError(f"pretrain.mask_rate={self.mask_rate}: expected 0 < rate < 1")

    @property
    def num_examples(self) -> int:
        """Training examples of this phase, repeats counted; 0 without it."""
        return 0 if self.objective == "none" else self.num_steps * self.batch_size

    def as_train(self, train: TrainConfig) -> TrainConfig:
        """How the first phase trains, given the second.

        Raises:
            ValueError: a value is out of range.
        """
        own: dict[str, Any] = {
            name: getattr(self, name)
            for name in ("num_steps", "batch_size", "lr", "warmup_steps", "schedule",
                         "weight_decay", "eval_every")
        } | {"selection": "best_val_loss"}  # fmt: skip
        if self.warmup_steps >= self.num_steps > 0 and not train.allow_unreached_peak:
            # Also of schedule=constant, whose warm-up is here that of the second phase if not said.
            raise ValueError(
                f"pretrain.warmup_steps={self.warmup_steps} is not below pretrain.num_steps="
                f"{self.num_steps}: the rate would not reach its peak; lower "
                "pretrain.warmup_steps, or set train.allow_unreached_peak=true if that is meant"
            )
        try:
            return dataclasses.replace(train, **own)
        except ValueError as error:
            keys = re.compile(rf"\btrain\.(?=({'|'.join(own)})\b)")
            raise ValueError(keys.sub("pretrain.", str(error))) from None


@dataclass(frozen=True)
class SlurmConfig:
    """Keys of a Slurm job; configs/hardware/slurm.yaml hands them to the launcher."""

    partition: str | None  # None: the cluster's default
    account: str | None  # whom the time is charged to; None: your default
    qos: str | None  # quality of service; None: the cluster's default
    constraint: str | None  # features that the nodes must have, e.g. a100
    setup: tuple[str, ...]  # shell lines of the job before it starts
    timeout_min: int  # minutes of a job; a run may take several turns
    nodes: int  # machines of a run
    cpus_per_task: int  # cores for each device
    mem_gb: int | None  # memory of each node; None: the cluster's default

    def __post_init__(self) -> None:
        for name in ("timeout_min", "nodes", "cpus_per_task", "mem_gb"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"hardware.slurm.{name}={value}: expected at least 1")


@dataclass(frozen=True)
class HardwareConfig:
    """Where and how a run computes; changes speed and memory, never rate, batch or data order."""

    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda if there is one
    precision: Literal["float32", "tf32", "bf16", "fp16"] = "float32"  # of a step
    num_threads: int | None = None  # None: as PyTorch chooses
    num_workers: int = 0  # threads that build batches ahead; 0 builds each when it is needed
    micro_batch_size: int | None = None  # rows per forward pass; None: the whole batch
    compile: bool = False  # torch.compile: worth trying on a GPU, does not pay on a CPU
    activation_checkpointing: bool = False  # recompute layers in the backward pass; saves memory
    num_devices: int = 1  # processes on each machine, each with a device of its own
    slurm: SlurmConfig | None = None

    def __post_init__(self) -> None:
        for name, least in (
            ("num_threads", 1), ("num_workers", 0), ("micro_batch_size", 1), ("num_devices", 1),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"hardware.{name}={value}: expected at least {least}")


@dataclass(frozen=True)
class Paths:
    """Folders; relative ones are taken from where the command was started."""

    data: Path  # files as people have them
    cache: Path  # tokens made from them, or by our generators, once
    outputs: Path  # one folder for each run: checkpoints, metrics.jsonl, log
    results: Path  # records and the tables made from them


@dataclass(frozen=True)
class LoggerConfig:
    """Where curves go besides the run's own metrics.jsonl."""

    name: Literal["none", "wandb", "tensorboard"] = "none"  # the group's choice sets it
    project: str = "lra"  # of wandb
    entity: str | None = None  # of wandb, user or team; None: its default
    mode: Literal["online", "offline"] = "online"  # of wandb; offline without a network
    group: str | None = None  # of wandb; None: the config's hash, which seeds share
    timeout_s: float = 30.0  # how long the start, and the end, of a run may wait for the service

    def __post_init__(self) -> None:
        if not 0 < self.timeout_s < math.inf:
            raise ValueError(f"logger.timeout_s={self.timeout_s}: expected a number above 0")


@dataclass(frozen=True)
class SweepConfig:
    """How the jobs of a multirun go together."""

    fail_fast: bool = False  # start no further job once one has failed
    parallel: int | str | None = None  # jobs at a time, auto, or as the launcher has it
    plan: bool = True  # say beforehand what the jobs will take, by timing a few steps of each kind

    def __post_init__(self) -> None:
        count = self.parallel
        if not (count in (None, "auto") or (isinstance(count, int) and count >= 1)):
            raise ValueError(
                f"sweep.parallel={count}: expected how many jobs at a time, auto, or null"
            )


@dataclass(frozen=True)
class RunConfig:
    """One run, typed. `task`, `model` and `shape` stay plain until their classes are imported."""

    seed: int  # of weights, dropout and the order of batches; not of data or splits
    task: dict[str, Any]
    model: dict[str, Any]
    shape: dict[str, Any]
    train: TrainConfig
    hardware: HardwareConfig
    logger: LoggerConfig
    paths: Paths
    recipe: str
    checkpoint: str | None = None  # a run folder or checkpoint file: evaluate it, train nothing
    init_from: str | None = None  # a run folder or checkpoint file: start from its weights
    pretrain: PretrainConfig = PretrainConfig()
    sweep: SweepConfig = SweepConfig()

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed={self.seed}: expected 0 to 2**32 - 1")
        for name in ("checkpoint", "init_from"):
            if (place := getattr(self, name)) is None:
                continue
            if not place.strip():
                raise ValueError(f"{name}={place!r}: expected a run's folder, or null for none")
            # One place, one identity, however it is spelt.
            object.__setattr__(self, name, os.path.normpath(os.path.expanduser(place)))
        if self.pretrain.objective != "none":
            self.pretrain.as_train(self.train)  # checks its values
            if self.init_from:
                raise ValueError(
                    f"init_from={self.init_from} with pretrain={self.pretrain.objective}: both say "
                    "where the first weights come from; give one of them"
                )


def config_hash(config: Mapping[str, Any]) -> str:
    """Identity of a setting: hash of the resolved config less seed, paths, hardware and logger."""
    kept = {k: v for k, v in config.items() if k not in NO_IDENTITY}
    for section in kept.keys() & {"shape", "train"}:
        kept[section] = {
            key: value
            for key, value in kept[section].items()
            if key not in NO_NUMBERS and LATER.get(f"{section}.{key}", _NOT_LATER) != value
        }
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()
