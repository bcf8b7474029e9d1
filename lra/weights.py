"""Weights of an earlier run: evaluate them alone, or give them to a new run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from lra.build import make_model, make_task
from lra.config import RunConfig, TrainConfig, fill
from lra.progress import Progress, percent
from lra.statistics import wilson
from lra.task import prepare


def evaluate_checkpoint(config: RunConfig, overrides: list[str]) -> None:
    """Evaluate the selected weights of a run, on the data, paths and hardware of `config`.

    Raises:
        ValueError: no such run or weights, an override that the checkpoint decides, or data with
            another vocabulary.
    """
    from lra.evaluate import evaluate
    from lra.hardware import Hardware

    assert config.checkpoint is not None
    source = Path(config.checkpoint)
    if not source.exists():
        raise ValueError(f"checkpoint={source}: no such run folder or checkpoint file")
    run_dir = source if source.is_dir() else source.parent.parent
    for override in overrides:
        name = override.lstrip("+").partition("=")[0]
        if not name.startswith(("checkpoint", "paths.", "hardware", "task.source", "task.path")):
            raise ValueError(
                f"{override}: with checkpoint={config.checkpoint} the run's own config decides; "
                "only paths, hardware, task.source and task.path can be given"
            )
    stored = stored_config(run_dir, f"checkpoint={source}")
    place = {k: v for k, v in config.task.items() if k in ("source", "path")
             and any(o.lstrip("+").startswith(f"task.{k}=") for o in overrides)}  # fmt: skip
    config = dataclasses.replace(
        config, seed=stored["seed"], model=stored["model"], shape=stored["shape"],
        task=stored["task"] | place, train=fill(TrainConfig, stored["train"], "train"),
    )  # fmt: skip
    task = make_task(config)
    hardware = Hardware(config.hardware)
    model = make_model(config, task)
    path = selected_path(source, vocabulary=task.vocabulary_hash())
    model.load_state_dict(selected_weights(path, model))
    model.to(hardware.device)
    data = prepare(task, config.paths.cache)
    progress = Progress()
    progress.say(f"{run_dir.name}: {task.describe_source()}\nweights of {_step_text(path)}")
    for name in ("val", "test"):
        size = config.hardware.micro_batch_size or config.train.batch_size
        split = getattr(data, name)
        with progress.counting(name, len(split)) as show:
            metrics = evaluate(model, split, hardware, batch_size=size, check=show)
        low, high = (100 * end for end in wilson(metrics.accuracy, metrics.num_examples))
        progress.say(
            f"{name:<5} accuracy {percent(100 * metrics.accuracy)} % (95 % interval {low:.1f} to "
            f"{high:.1f})  loss {metrics.loss:.4f}  {metrics.num_examples:,} examples"
        )


def _step_text(path: Path) -> str:
    from lra.checkpoint import step_of

    try:
        step = f"step {step_of(path):,}"
    except ValueError:  # copied to another name
        return f"{path}, whose name tells no step"
    best = path.name.startswith("best-")
    return f"{step}, {'the best on validation' if best else 'the last one saved'} ({path})"


def stored_config(run_dir: Path, given: str) -> dict[str, Any]:
    """The config that a run has left in its folder; `given` is what asks for it, for the message.

    Raises:
        ValueError: it is not there, or not readable.
    """
    import yaml

    try:
        stored: dict[str, Any] = yaml.safe_load(
            (run_dir / "config.yaml").read_text(encoding="utf-8")
        )
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"{given}: no run with a readable config.yaml ({error})") from None
    return stored


def selected_path(source: Path, vocabulary: str | None = None) -> Path:
    """A checkpoint file itself, or a run folder's best (else last) one.

    Raises:
        ValueError: nothing there, unreadable, or of another vocabulary.
    """
    from lra import checkpoint

    path = source
    if source.is_dir():
        state, warnings = checkpoint.load_latest(source / "checkpoints")
        if state is None:
            why = f" that can be read ({warnings[0]})" if warnings else ""
            raise ValueError(f"{source}: no checkpoint in its folder 'checkpoints'{why}")
        if vocabulary and state["identity"].get("vocabulary") not in (None, vocabulary):
            raise ValueError(
                f"{source}: was trained with another vocabulary than this task has now"
            )
        path = checkpoint.checkpoints(source / "checkpoints")[0]
        best = source / "checkpoints" / f"best-{state['state']['best_step']:08d}.pt"
        path = best if best.exists() else path
    return path


def selected_weights(source: Path, model: Any, vocabulary: str | None = None) -> dict[str, Any]:
    """Weights of a checkpoint file, or of a run folder's best (else last) checkpoint.

    Raises:
        ValueError: nothing there, unreadable, of another architecture or another vocabulary.
    """
    from lra import checkpoint

    path = selected_path(source, vocabulary)
    weights: dict[str, Any] = checkpoint.read(path)["model"]
    own = model.state_dict()
    wrong = [k for k in own.keys() | weights.keys()
             if k not in own or k not in weights or own[k].shape != weights[k].shape]  # fmt: skip
    if wrong:
        raise ValueError(
            f"{path}: weights of another architecture ({len(wrong)} of {len(own)} tensors differ, "
            f"e.g. {sorted(wrong)[0]})"
        )
    return weights
