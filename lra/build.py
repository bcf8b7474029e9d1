"""From plain config to objects: the task, the model, and the typed form of both.

Training does without it; whatever sets up a run or a measurement stands on it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lra.config import LATER, RunConfig
from lra.values import check, fill, load_target

if TYPE_CHECKING:
    from lra.tasks.task import Task
    from models.classifier import Classifier
    from models.predictor import Predictor

FROM_TASK = ("vocab_size", "max_length", "picture_width")  # what a shape has from the task


def make_task(config: RunConfig) -> Task:
    """The task that `task._target_` names.

    Raises:
        ValueError: an unknown key, a wrong type or a value out of range.
    """
    target, knobs = _target(config.task, "task")
    if missing := getattr(target, "__abstractmethods__", None):
        raise ValueError(
            f"task._target_={config.task['_target_']}: the class lacks {', '.join(sorted(missing))}"
        )
    return fill(target, knobs, "task", data_dir=config.paths.data)


def make_model(config: RunConfig, task: Task, model: Mapping[str, Any] | None = None) -> Classifier:
    """The classifier around `model` (default: the config's), with fresh weights.

    Raises:
        ValueError: an unknown key, a wrong type or a value out of range.
    """
    from models.classifier import Classifier
    from models.encoder import make_encoder
    from models.shape import Shape

    target, knobs = _target(config.model if model is None else model, "model")
    shape = fill(
        Shape,
        config.shape,
        "shape",
        vocab_size=task.vocab_size,
        max_length=task.max_length,
        picture_width=task.picture_size[1] if task.picture_size else None,
    )
    if shape.input == "real" and task.picture_size is None:
        raise ValueError(
            f"shape.input=real: values of task {task.name} are symbols, not pixels; expected ids"
        )
    if shape.positions == "rotary_2d" and task.picture_size is None:
        raise ValueError(
            f"shape.positions=rotary_2d: inputs of task {task.name} are no pictures; expected "
            "learned, sinusoidal, none or rotary"
        )
    if shape.rotary_theta != LATER["shape.rotary_theta"] and not shape.is_rotary:
        raise ValueError(
            f"shape.rotary_theta={shape.rotary_theta}: acts only with shape.positions=rotary or "
            f"rotary_2d, here {shape.positions}"
        )
    if task.picture_size is None and (shape.input_mean, shape.input_std) != (0.0, 1.0):
        raise ValueError(
            f"shape.input_mean={shape.input_mean}, shape.input_std={shape.input_std}: act only "
            f"where shape.input=real may be, not with task {task.name}; expected 0 and 1"
        )
    encoder = make_encoder(target, shape, **check(target, knobs, "model", ["shape"]))
    return Classifier(encoder, shape, task.num_classes, task.num_sequences)


def make_predictor(config: RunConfig, classifier: Classifier) -> Predictor:
    """What self-pretraining trains: the encoder of `classifier` under a head of its own.

    Raises:
        ValueError: the objective does not go with the model.
    """
    from models.predictor import Predictor, reads_ahead

    objective, encoder = config.pretrain.objective, classifier.encoder
    predictor = Predictor(encoder, classifier.shape, reads_mask=objective == "masked")
    if objective == "next" and reads_ahead(encoder):
        raise ValueError(
            f"pretrain=next with model={model_name(config.model)}: the model sees later tokens, so "
            "the next one is no question; set model.causal=true where the model has that (of a "
            "state-space model also model.bidirectional=false), or use pretrain=masked"
        )
    return predictor


def model_name(model: Mapping[str, Any]) -> str:
    """A model is called after its file: `models.luna.LunaEncoder` is `luna`."""
    return str(model.get("_target_", "")).split(".")[-2:][0]


def resolved(config: RunConfig) -> dict[str, Any]:
    """The whole config as plain values, defaults filled in, types settled; hashed as identity."""
    from models.shape import Shape

    task_target, task = _target(config.task, "task")
    model_target, model = _target(config.model, "model")
    plain = dataclasses.asdict(config) | {
        "task": {"_target_": config.task["_target_"]}
        | check(task_target, task, "task", ["data_dir"]),
        "model": {"_target_": config.model["_target_"]}
        | check(model_target, model, "model", ["shape"]),
        "shape": check(Shape, config.shape, "shape", FROM_TASK),
    }
    if config.pretrain.objective == "none":
        del plain["pretrain"]  # as records and hashes had it before there was any
    return _plain(plain)


def num_params(model: Any) -> int:
    """Trainable parameters, shared ones counted once."""
    return sum(p.numel() for p in model.parameters())


def _target(section: Mapping[str, Any], key: str) -> tuple[type, dict[str, Any]]:
    base: type
    if key == "task":
        from lra.tasks.task import Task as base
    else:
        from torch.nn import Module as base
    knobs = dict(section)
    path = knobs.pop("_target_", None)
    target = load_target(path, key)
    # A config may come from elsewhere, and must not call whatever it names.
    if not (isinstance(target, type) and issubclass(target, base)):
        raise ValueError(f"{key}._target_={path}: expected a class derived from {base.__name__}")
    return target, knobs


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value.as_posix() if isinstance(value, Path) else value
