"""Self-pretraining: the first phase of a run, and how its encoder comes into the second.

The encoder learns to tell tokens of the task's own training inputs, in a folder of its own beside
the runs', outputs/pretraining-...: it is done once, and every run that asks for the same takes the
weights over. They are copied into the run's folder, which needs the other no more.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from lra import files
from lra.build import make_predictor
from lra.config import LATER, NO_NUMBERS, config_hash
from lra.files import write_atomically
from lra.plan import Plan
from lra.results.blocks import curve_block, speed_block
from lra.results.records import Pretraining
from lra.tasks.cache import Dataset
from lra.tasks.hidden import HiddenTokens, Questions
from lra.training import checkpoint, distributed
from lra.training.checkpoint import seed_everything
from lra.training.hardware import Hardware
from lra.training.progress import Progress
from lra.training.stopping import Interrupted, stop_on_signals
from lra.training.trainer import REMEDY, Diverged, Refused, train
from lra.values import fill
from models.classifier import Classifier

WEIGHTS = "pretrained.pt"  # in a run's folder
OWN_REMEDY = "lower pretrain.lr, lengthen pretrain.warmup_steps or set train.clip_norm"
# Of the shape, what the encoder has nothing to do with.
OF_THE_HEAD = ("head_hidden", "head_bias", "head_activation", "head_dropout", "pair_features")


def pretrained(
    plan: Plan,
    data: Dataset,
    hardware: Hardware,
    progress: Progress,
    first_weights: Callable[[], Classifier],
    *,
    software: Mapping[str, Any],
    started: float,
) -> Classifier:
    """The classifier as its training begins: a head of the seed's own on a pretrained encoder.

    Args:
        first_weights: seeds everything and makes the classifier without pretraining.
        software: as for `train`.
        started: when the process began with the run, for the time limit.

    Raises:
        Refused: what the first phase has left cannot be read, or is of other data.
        Interrupted, Diverged, ...: as `train`; the same command goes on where the phase was.
    """
    path, identity = plan.run_dir / WEIGHTS, identity_of(plan, data)
    if not distributed.from_main(path.exists()):
        folder = plan.config.paths.outputs / folder_name(plan, identity)
        progress.say(f"phase 1  {describe(plan)}, in {folder}")
        with _one_process(plan, folder, progress, started):
            result = folder / "result.json"
            if distributed.from_main(result.exists()):
                progress.say("phase 1  was done by a run that asked for the same")
            else:
                block = _train(plan, first_weights(), data, hardware, progress, folder, identity,
                               software=software, started=started)  # fmt: skip
                if distributed.is_main():
                    write_atomically(result, json.dumps(block, indent=1) + "\n")
            if distributed.is_main():
                checkpoint.write(path, _left_in(folder, result))
        distributed.from_main(True)  # nobody reads before it is there
        progress.say("phase 2  the classes, from these weights")
    weights = _weights(path, config_hash({"identity": identity}))
    model = first_weights()
    model.encoder.load_state_dict({
        name.removeprefix("encoder."): value
        for name, value in weights.items()
        if name.startswith("encoder.") and name != "encoder.embedding.mask_symbol"
    })  # fmt: skip
    return model


def _left_in(folder: Path, result: Path) -> dict[str, Any]:
    """The best weights of a first phase that is done, and the record's block on it."""
    try:
        block = json.loads(result.read_text(encoding="utf-8"))
        best = checkpoint.best_path(folder / "checkpoints", block["step"])
        return {"model": checkpoint.read(best)["model"], "pretraining": json.dumps(block)}
    except (ValueError, KeyError, TypeError) as error:
        raise Refused(
            f"{result}: the first phase was done, but its result cannot be read ({error}); delete "
            "this file, and the same command makes it again from what is left in the folder"
        ) from None


def _weights(path: Path, identity: str) -> dict[str, Any]:
    """The weights in a run's folder, if they are what the run asks for."""
    again = "delete it, and the same command takes the weights of the first phase again"
    try:
        stored = checkpoint.read(path)
        block = json.loads(stored["pretraining"])
    except (ValueError, KeyError) as error:
        raise Refused(f"{path}: damaged ({error}); {again}") from None
    if block["identity"] != identity:
        raise Refused(f"{path}: weights of a first phase on other data; {again}")
    weights: dict[str, Any] = stored["model"]
    return weights


def block_of(run_dir: Path) -> Pretraining | None:
    """The record's block on the first phase of the run in a folder; None without one."""
    path = run_dir / WEIGHTS
    if not path.exists():
        return None
    return fill(Pretraining, json.loads(checkpoint.read(path)["pretraining"]), "pretraining")


def describe(plan: Plan) -> str:
    """The first phase in words."""
    own = plan.config.pretrain
    what = "each token from those before it"
    if own.mask_rate is not None:
        what = f"{100 * own.mask_rate:g} % of the tokens from the others"
    return f"pretrain={own.objective}: {what}, {own.num_steps:,} steps x {own.batch_size} examples"


@contextlib.contextmanager
def _one_process(plan: Plan, folder: Path, progress: Progress, started: float) -> Iterator[None]:
    """Keep other runs off the folder of the first phase, and wait while one is at it.

    Raises:
        Interrupted: a signal or the time limit, while it waits.
    """
    if not distributed.is_main():
        while distributed.from_main(None) == "wait":  # in turns, for no exchange may take hours
            pass
        yield
        return
    limit, told = plan.config.train.time_limit, False

    def wait() -> None:
        nonlocal told
        if not told:
            progress.say(f"phase 1  waiting for another run that is at it in {folder}")
            told = True
        if limit is not None and time.monotonic() - started > limit:
            stop.request(f"train.time_limit={limit:g} s")
        stop.check()
        distributed.from_main("wait")

    with contextlib.ExitStack() as held:
        with stop_on_signals() as stop:
            held.enter_context(files.locked(folder / "run.lock", "paths.outputs", waiting=wait))
            stop.check()
        distributed.from_main("go on")
        yield


def identity_of(plan: Plan, data: Dataset) -> dict[str, Any]:
    """Everything that the weights depend on."""
    config, plain = plan.config, plan.plain
    shape = {k: v for k, v in plain["shape"].items() if k not in OF_THE_HEAD}
    if shape["pooling"] != "cls":  # which is a token of the encoder's input
        del shape["pooling"]
    settings = {
        "model": plain["model"],
        "shape": {k: v for k, v in shape.items() if LATER.get(f"shape.{k}", ...) != v},
        "train": _plain_train(plan),
        "mask_rate": config.pretrain.mask_rate,
        "objective": config.pretrain.objective,
    }
    return {"config_hash": config_hash(settings), "seed": config.seed,
            "data": data.fingerprint, "vocabulary": plan.task.vocabulary_hash(),
            "num_train": len(data.train), "num_val": len(data.val)}  # fmt: skip


def folder_name(plan: Plan, identity: Mapping[str, Any]) -> str:
    """Of the first phase, below `paths.outputs`."""
    digest = config_hash({"identity": {**identity}})[:8]
    return f"pretraining-{plan.task.name}-{plan.model}-seed{plan.config.seed}-{digest}"


def _plain_train(plan: Plan) -> dict[str, Any]:
    train = plan.config.pretrain.as_train(plan.config.train)
    return {k: v for k, v in dataclasses.asdict(train).items() if k not in NO_NUMBERS}


def _train(
    plan: Plan,
    classifier: Classifier,
    data: Dataset,
    hardware: Hardware,
    progress: Progress,
    folder: Path,
    identity: dict[str, Any],
    *,
    software: Mapping[str, Any],
    started: float,
) -> dict[str, Any]:
    """Train the first phase to its end; the record's block on it."""
    config = plan.config
    cfg, own = config.pretrain.as_train(config.train), config.pretrain
    assert own.objective != "none"
    if distributed.is_main():
        write_atomically(folder / "config.yaml", yaml.safe_dump(plan.plain, sort_keys=False))
    train_split, val_split = (
        HiddenTokens(
            examples, own.objective, mask_id=plan.task.vocab_size,
            mask_rate=own.mask_rate or 0.0, seed=config.seed, part=part,
        )
        for part, examples in enumerate((data.train, data.val))
    )  # fmt: skip
    questions = Questions(train_split, val_split, data.meta)
    seed_everything(config.seed)  # no draw may depend on the size of the classifier's own head
    predictor = make_predictor(config, classifier)
    try:
        result = train(
            predictor, questions, cfg, hardware, seed=config.seed, run_dir=folder,
            identity=identity, progress=progress, software=software, started=started,
        )  # fmt: skip
    except Diverged as error:
        raise Diverged(f"phase 1, {str(error).replace(REMEDY, OWN_REMEDY)}") from None
    except Interrupted as error:
        raise Interrupted(f"phase 1, {error}", error.cause) from None
    state = result.state
    dirty = {"git_dirty": True} if any(s.get("git_dirty") for s in state.stretches) else {}
    return {
        "objective": own.objective,
        "mask_rate": own.mask_rate,
        "num_steps": cfg.num_steps,
        "batch_size": cfg.batch_size,
        "lr": cfg.lr,
        "seed": config.seed,
        "identity": config_hash({"identity": identity}),
        "selection": "best validation loss of the same objective, on that split's inputs",
        "step": result.step,
        "val": {"loss": result.val_loss, "accuracy": result.val_accuracy},
        "curve": curve_block(state.curve),
        "speed": speed_block(
            wall_time_s=None,  # several runs may have had a part in the phase
            train_time_s=state.train_time_s,
            eval_time_s=state.eval_time_s, steps=state.timed_steps,
            examples=state.timed_examples, tokens=state.timed_tokens, max_lr=state.max_lr,
        ),
        "peak_memory_bytes": hardware.peak_memory_bytes(),
        "hardware": hardware.describe(result.micro_batch_size) | dirty,
    }  # fmt: skip
