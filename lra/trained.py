"""A trained model: evaluated alone, or in Python, where a class comes out of what a person has.

Shapes: N examples, C classes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lra.build import make_model, make_task
from lra.config import RunConfig
from lra.console import percent
from lra.results.records import Status
from lra.results.statistics import wilson
from lra.runs import STATUS
from lra.tasks.batches import TokenArrays, eval_batches
from lra.tasks.cache import prepare
from lra.training.checkpoint import step_of
from lra.training.evaluate import evaluate
from lra.training.hardware import Hardware
from lra.training.progress import Progress
from lra.training.weights import selected_path, selected_weights, stored_config
from lra.values import SET_IT, fill, nearest

# Beginnings of the keys that an evaluation has from its own command, not from the run.
DECIDED_ANEW = ("checkpoint", "paths.", "hardware", "sweep.", "task.source", "task.path")


class TrainedModel:
    """Model and task of a run. Inputs take the way of the run's own evaluation: as the task encodes
    them, cut to its length, ids shifted past the padding, masked by length.

    An input is what the task's `encode` takes; a pair of them, as a tuple, where the task compares
    two; a list is several inputs.

    Attributes:
        model: the classifier, in evaluation mode.
        task: what its inputs and classes are.
        config: what the run was started with.
        step: the training step that its weights are from.

    Raises:
        ValueError: no such run or device, no weights in it, or they do not fit its config.
    """

    def __init__(self, run: Path, device: str = "cpu") -> None:
        check_run(run)
        self.device = _usable(device)
        self.config = run_config(run, str(run))
        with naming_config(run):
            self.task = make_task(self.config)
            self.model = make_model(self.config, self.task)
        path = selected_path(run, self.task.vocabulary_hash())
        self.model.load_state_dict(selected_weights(path, self.model))
        self.model.to(self.device).eval()
        self.step = step_of(path)
        _warn_if_unfinished(run, self.step, self.config.train.num_steps)

    def predict(self, given: Any) -> Any:
        """The class of an input, or a list with one for each input of a list.

        A class is its name where the task has names, else its number: of ListOps, the value.

        Raises:
            ValueError: an input is none of this task, or too long under `task.strict`.
        """
        names = self.task.class_names
        classes = [names[c] if names else c for c in self.logits(_listed(given)).argmax(1).tolist()]
        return classes if isinstance(given, list) else classes[0]

    @torch.no_grad()
    def logits(self, given: Any) -> Tensor:
        """The model's outputs before the softmax: [C] of an input, [N, C] of a list.

        Raises:
            ValueError: as for `predict`.
        """
        examples = [self._encode(i, example) for i, example in enumerate(_listed(given))]
        task = self.task
        too_long = [i for i, example in enumerate(examples)
                    if max(map(len, example)) > task.max_length]  # fmt: skip
        if too_long:
            message = (
                f"{len(too_long)} of {len(examples)} inputs are longer than "
                f"task.max_length={task.max_length} (the first: input {too_long[0]})"
            )
            if task.strict:
                raise ValueError(f"{message}; the run's task.strict=true has none cut")
            warnings.warn(f"{message}; cut, as in training", stacklevel=2)
        arrays = TokenArrays.of(examples, task.num_sequences, task.max_length)
        logits_NC = torch.empty(len(examples), task.num_classes)
        # Batched as the run's evaluation does it: the same list gives the same bits.
        train = self.config.train
        for rows in eval_batches(arrays.lengths, train.batch_size):
            pad_to = task.max_length if train.pad_to_max else None
            batch = arrays.batch(rows, pad_to).to(self.device)
            logits_BC = self.model(batch.tokens_BSL, batch.lengths_BS)
            logits_NC[torch.from_numpy(rows)] = logits_BC.float().cpu()
        return logits_NC if isinstance(given, list) else logits_NC[0]

    def _encode(self, number: int, example: Any) -> list[Any]:
        count = self.task.num_sequences
        try:
            if count == 1:
                return [self.task.encode(example)]
            if not isinstance(example, tuple) or len(example) != count:
                raise ValueError(f"{type(example).__name__}, expected a tuple of {count}")
            return [self.task.encode(part) for part in example]
        except ValueError as error:
            raise ValueError(f"task '{self.task.name}', input {number}: {error}") from None


def run_config(run_dir: Path, given: str) -> RunConfig:
    """What a run was started with, but for hardware; `given` is what asks for it.

    Raises:
        ValueError: it is not there, or lacks a key, or has one that this version does not know.
    """
    stored = stored_config(run_dir, given) | {"hardware": {}}
    with naming_config(run_dir):
        return fill(RunConfig, stored)


@contextlib.contextmanager
def naming_config(run_dir: Path) -> Iterator[None]:
    """Let an error say that it is about the config in a run's folder.

    Raises:
        ValueError: instead of the one about a config that is being made.
    """
    try:
        yield
    except ValueError as error:
        message = str(error).replace(SET_IT, "; edited, or written by another version?")
        raise ValueError(f"{run_dir / 'config.yaml'}: {message}") from None


def check_run(run: Path) -> None:
    """Refuse what is no folder.

    Raises:
        ValueError: names the run that is most like it.
    """
    if not run.is_dir():
        places = {*run.parent.glob(f"*/{STATUS}"), *Path("outputs").glob(f"*/{STATUS}")}
        runs = [str(path.parent) for path in places]
        same = [name for name in runs if Path(name).name == run.name]
        raise ValueError(f"{run}: no such run; {nearest(str(run), same or sorted(runs))}")


def _listed(given: Any) -> list[Any]:
    return given if isinstance(given, list) else [given]


def _usable(device: str) -> torch.device:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # no such name, or PyTorch is without it
        reason = str(error).partition("\n")[0]
        raise ValueError(f"device={device!r}: cannot be used here ({reason})") from None
    return torch.device(device)


def _warn_if_unfinished(run: Path, step: int, num_steps: int) -> None:
    try:
        status = json.loads((run / STATUS).read_text(encoding="utf-8"))["status"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    if status not in ("completed", "at_chance"):
        warnings.warn(
            f"{run} is not finished ({status}): weights of step {step} of {num_steps}",
            stacklevel=4,
        )


def evaluate_checkpoint(config: RunConfig, overrides: list[str]) -> Status:
    """Evaluate the selected weights of a run, on the data, paths and hardware of `config`.

    Returns:
        "completed", or "diverged" where a loss is not a finite number.

    Raises:
        ValueError: no such run or weights, an override that the checkpoint decides, or data with
            another vocabulary.
    """
    assert config.checkpoint is not None
    source = Path(config.checkpoint)
    if not source.exists():
        raise ValueError(f"checkpoint={source}: no such run folder or checkpoint file")
    run_dir = source if source.is_dir() else source.parent.parent
    for override in overrides:
        name = override.lstrip("+").partition("=")[0]
        if not name.startswith(DECIDED_ANEW):
            raise ValueError(
                f"{override}: with checkpoint={config.checkpoint} the run's own config decides; "
                "only paths, hardware, sweep, task.source and task.path can be given"
            )
    place = {k: v for k, v in config.task.items() if k in ("source", "path")
             and any(o.lstrip("+").startswith(f"task.{k}=") for o in overrides)}  # fmt: skip
    hardware = Hardware(config.hardware)
    stored = run_config(run_dir, f"checkpoint={source}")
    config = dataclasses.replace(
        config, seed=stored.seed, model=stored.model, shape=stored.shape,
        task=stored.task | place, train=stored.train,
    )  # fmt: skip
    with contextlib.nullcontext() if place else naming_config(run_dir):
        task = make_task(config)
        model = make_model(config, task)
    path = selected_path(source, vocabulary=task.vocabulary_hash())
    model.load_state_dict(selected_weights(path, model))
    model.to(hardware.device)
    data = prepare(task, config.paths.cache)
    progress = Progress()
    progress.say(f"{run_dir.name}: {task.describe_source()}\nweights of {_step_text(path)}")
    pad_to = data.meta["max_length"] if config.train.pad_to_max else None
    status: Status = "completed"
    for name in ("val", "test"):
        size = config.hardware.micro_batch_size or config.train.batch_size
        split = getattr(data, name)
        with progress.counting(name, len(split)) as show:
            metrics = evaluate(model, split, hardware, batch_size=size, pad_to=pad_to, check=show)
        low, high = (100 * end for end in wilson(metrics.accuracy, metrics.num_examples))
        progress.say(
            f"{name:<5} accuracy {percent(100 * metrics.accuracy)} % (95 % interval {low:.1f} to "
            f"{high:.1f})  loss {metrics.loss:.4f}  {metrics.num_examples:,} examples"
        )
        if not math.isfinite(metrics.loss):
            progress.say(f"{name:<5} the loss is not a finite number: the outputs overflow")
            status = "diverged"
    return status


def _step_text(path: Path) -> str:
    try:
        step = f"step {step_of(path):,}"
    except ValueError:  # copied to another name
        return f"{path}, whose name tells no step"
    best = path.name.startswith("best-")
    return f"{step}, {'the best on validation' if best else 'the last one saved'} ({path})"
