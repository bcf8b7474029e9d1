"""Typed configuration: plain values in, checked objects out, every complaint naming the key.

`fill` calls a class with values from a config, after checking names and types against the class's
own signature. The signature is the schema; there is no second list of keys to keep in step.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import importlib
import inspect
import json
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

T = TypeVar("T")
# Parts of a config that say where and how a run goes on, not what its numbers are.
NO_IDENTITY = ("seed", "paths", "hardware", "logger", "checkpoint", "sweep")
# Keys of `train` that change when something is written or saved, not the numbers.
NO_NUMBERS = ("log_every", "checkpoint_every", "time_limit")
MISSING = "???"  # how a config says that a value has yet to be given
# What other programs call the same; both kinds of names, of keys and of choices.
SYNONYMS = {
    "cuda": "gpu", "gpus": "num_devices", "epochs": "num_steps", "hidden_size": "d_model",
    "batchsize": "batch_size", "dataset": "task", "imdb": "text", "aan": "retrieval",
    "cifar": "image", "cifar10": "image", "fp32": "float32", "float16": "fp16", "bfloat16": "bf16",
}  # fmt: skip
_NOTHING = (5, 0.0)  # no likeness
_NOT_LATER = object()
_KEYWORD, _LEFT_OUT = inspect.Parameter.KEYWORD_ONLY, object()  # of keys that a mapping may lack
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


@dataclass(frozen=True)
class GroupConfig:
    """Rate and decay of some parameters, where they have their own."""

    lr: float | None = None  # peak of the rate; None: as train.lr
    weight_decay: float | None = None  # None: as train.weight_decay

    def __post_init__(self) -> None:
        if self.lr is not None and not 0 < self.lr < math.inf:
            raise ValueError(f"train.groups: lr={self.lr}: expected a number above 0")
        if self.weight_decay is not None and not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"train.groups: weight_decay={self.weight_decay}: expected at least 0")


@dataclass(frozen=True)
class GroupsConfig:
    """Groups of parameters; a model names its own, see `GROUPS` in models/s4d.py."""

    state: GroupConfig = GroupConfig()  # state matrix of a state-space model (A, Lambda)
    input: GroupConfig = GroupConfig()  # its map from the input to the state (B)
    output: GroupConfig = GroupConfig()  # its map from the state to the output (C)
    step: GroupConfig = GroupConfig()  # its step sizes (Delta)
    norm: GroupConfig = GroupConfig()  # norms and biases of the layers, of any model


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
    log_every: int = 10  # steps between lines of metrics.jsonl
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
            raise ValueError(
                f"pretrain.mask_rate={_show(self.mask_rate)} with pretrain={self.objective}: "
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
        if self.pretrain.objective != "none":
            self.pretrain.as_train(self.train)  # checks its values
            if self.init_from:
                raise ValueError(
                    f"init_from={self.init_from} with pretrain={self.pretrain.objective}: both say "
                    "where the first weights come from; give one of them"
                )


class UnknownKey(ValueError):
    """A key that a class does not take: with its section, and as `key=value`."""

    def __init__(self, message: str, key: str = "", given: str = "") -> None:
        super().__init__(message)
        self.key, self.given = key, given


def nearest(name: str, known: Iterable[str]) -> str:
    """`did you mean ...?` and the list of what is known."""
    known = list(known)
    close = min(known, key=lambda k: _unlikeness(name, k), default="")
    hint = f"did you mean '{close}'? " if close and _unlikeness(name, close) < _NOTHING else ""
    return f"{hint}known: {', '.join(known) or 'none'}"


def nearest_key(key: str, known: Iterable[str], least: int = 4) -> str | None:
    """The known key, of whatever section, that is most like `section.name`; None if none is.

    Words that agree count before letters that do, and a key of the same section before another.
    `least` of 4 also takes keys that share letters only, 2 asks for the same words.
    """
    section, _, name = key.rpartition(".")

    def unlikeness(other: str) -> tuple[float, ...]:
        place, _, last = other.rpartition(".")
        degree, rest = _unlikeness(name, last)
        is_elsewhere = place != section
        # Anywhere in some hundred keys, a few letters in common mean nothing.
        if is_elsewhere and degree == 4 and rest > 0.25:
            return (*_NOTHING, 0)
        return degree, is_elsewhere, rest

    close = min(known, key=unlikeness, default=None)
    return close if close is not None and unlikeness(close)[0] <= least else None


def _unlikeness(name: str, known: str) -> tuple[float, float]:
    """How far a known name is from what was typed: a degree from 0 to 5, and order within it."""
    if name.casefold() == known.casefold():
        return 0, 0
    ours, theirs = _words(name), _words(known)
    if ours == theirs or SYNONYMS.get(name.removeprefix("num_")) == known:
        return 1, 0
    if ours and ours < theirs:
        return 2, len(theirs - ours)
    if len(known) > 1 and known == "".join(word[0] for word in re.split("[_-]+", name) if word):
        return 2, 0
    if theirs and theirs < ours:
        return 3, len(ours - theirs)
    distance = 1 - difflib.SequenceMatcher(None, name.casefold(), known.casefold()).ratio()
    return (4, distance) if distance <= 0.45 else _NOTHING


def _words(name: str) -> frozenset[str]:
    """The words of a name in lower case, without `num` and the plural's s: layers, num_layers."""
    words = re.split(r"[^a-z0-9]+", name.casefold())
    return frozenset(w[:-1] if len(w) > 3 and w.endswith("s") else w for w in words if w) - {"num"}


def fill(target: Callable[..., T], values: Mapping[str, Any], key: str = "", **context: Any) -> T:
    """Call `target` with `values` checked against its signature, plus `context` as it stands.

    Raises:
        ValueError: see `check`; or the target itself refuses a value.
    """
    return target(**context, **check(target, values, key, context))


def check(
    target: Callable[..., Any],
    values: Mapping[str, Any],
    key: str = "",
    context: Iterable[str] = (),
) -> dict[str, Any]:
    """`values` as arguments of `target`, converted to its annotations, with its defaults filled in.

    Args:
        target: a dataclass, a TypedDict or any class with annotated parameters.
        values: plain values, e.g. a part of the composed config.
        key: where `values` stand in the config, for messages; empty at the top.
        context: parameters that the caller supplies, which a config may not set.

    Raises:
        ValueError: an unknown or missing key, or a value of another type; names the key, the value,
            what is allowed and the nearest known name.
    """
    parameters, hints = _signature(target)
    allowed = [name for name in parameters if name not in set(context)]
    prefix = f"{key}." if key else ""
    arguments = {}
    for name, value in values.items():
        if name not in allowed:
            given = f"{prefix}{name}={_show(value)}"
            message = f"{given}: unknown key; {nearest(name, allowed)}"
            raise UnknownKey(message, f"{prefix}{name}", given)
        if value != MISSING:
            arguments[name] = convert(value, hints.get(name, Any), f"{prefix}{name}")
    for name in allowed:
        default = parameters[name].default
        if name in arguments:
            continue
        if default is inspect.Parameter.empty:
            raise ValueError(
                f"{prefix}{name} is missing; set it in a config or on the command line"
            )
        # A dataclass shows `field(default_factory=...)` as a marker; it fills that in itself.
        if default is not _LEFT_OUT and type(default).__name__ != "_HAS_DEFAULT_FACTORY_CLASS":
            arguments[name] = default
    return arguments


@functools.cache
def _signature(
    target: Callable[..., Any],
) -> tuple[Mapping[str, inspect.Parameter], dict[str, Any]]:
    function: Any = target
    if typing.is_typeddict(target):
        hints = typing.get_type_hints(target)
        required = dict.fromkeys(function.__required_keys__, inspect.Parameter.empty)
        return {
            name: inspect.Parameter(name, _KEYWORD, default=required.get(name, _LEFT_OUT))
            for name in hints
        }, hints
    if isinstance(target, type) and not dataclasses.is_dataclass(target):
        function = getattr(target, "__init__", target)
    return inspect.signature(target).parameters, typing.get_type_hints(function)


def convert(value: Any, hint: Any, key: str) -> Any:
    """Check one value against a type annotation; numbers are never guessed from strings.

    Raises:
        ValueError: names the key, the value and what is allowed.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        with_keys = [a for a in args if dataclasses.is_dataclass(a) or typing.get_origin(a) is dict]
        if isinstance(value, Mapping) and len(with_keys) == 1:
            return convert(value, with_keys[0], key)  # names what is wrong inside
        for arg in args:
            try:
                return convert(value, arg, key)
            except ValueError:
                continue
    elif origin is Literal:
        if value in args and type(value) in {type(a) for a in args}:
            return value
        raise ValueError(
            f"{key}={_show(value)}: not a choice; {nearest(str(value), map(str, args))}"
        )
    elif typing.is_typeddict(hint) and isinstance(value, Mapping):
        return check(hint, value, key)
    elif isinstance(hint, type) and dataclasses.is_dataclass(hint):
        if isinstance(value, Mapping):
            return fill(hint, value, key)
        first = dataclasses.fields(hint)[0].name
        raise ValueError(f"{key}={_show(value)}: has keys of its own, such as {key}.{first}")
    elif origin in (list, tuple) and isinstance(value, list | tuple):
        inner = args if origin is tuple and args[-1] is not ... else [args[0]] * len(value)
        if len(inner) == len(value):
            return origin(
                convert(v, h, f"{key}[{i}]")
                for i, (v, h) in enumerate(zip(value, inner, strict=True))
            )
    elif origin is dict and isinstance(value, Mapping):
        return {name: convert(v, args[1], f"{key}.{name}") for name, v in value.items()}
    elif hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    elif hint is Path and isinstance(value, str):
        return Path(value)
    elif isinstance(hint, type) and type(value) is hint:
        return value
    raise ValueError(f"{key}={_show(value)}: expected {describe_type(hint)}")


def load_target(path: Any, key: str) -> type:
    """Import the class that a config's `_target_` names, e.g. `models.luna.LunaEncoder`.

    Raises:
        ValueError: there is no such module or class.
    """
    module, _, name = str(path).rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{key}._target_={path}: cannot be imported ({error})") from None


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


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _show(value: Any) -> str:
    return "null" if value is None else repr(value) if isinstance(value, str) else str(value)


def describe_type(hint: Any) -> str:
    """What a type annotation allows, in words."""
    if hint is type(None):
        return "null"
    args = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return " | ".join(map(str, args))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(describe_type(a) for a in args)
    if typing.get_origin(hint) is tuple and args[-1] is not ...:
        return f"a list of {len(args)} numbers"
    if typing.get_origin(hint) in (list, tuple):
        return f"a list of {describe_type(args[0])}"
    if typing.get_origin(hint) is dict or typing.is_typeddict(hint):
        return "keys with values"
    names = {
        int: "an integer",
        float: "a number",
        bool: "true or false",
        str: "text",
        Path: "a path",
    }
    return names.get(hint, getattr(hint, "__name__", str(hint)))
