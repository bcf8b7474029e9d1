"""Training: one function, read top to bottom.

Data order depends on (seed, epoch) alone and the rate on the step, so a state is the weights, the
optimiser, the random states and a step number; a killed run resumes to the same result, bit for bit
on a CPU.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import nn

from lra.config import TrainConfig
from lra.files import append, write_atomically
from lra.tasks.batches import Batch, TokenArrays, built_ahead, train_batches
from lra.tasks.cache import Dataset
from lra.tasks.hidden import HiddenTokens, Questions
from lra.training import checkpoint, distributed
from lra.training.evaluate import Metrics, evaluate, is_at_chance
from lra.training.gradient import accumulate_as_fits
from lra.training.hardware import Hardware
from lra.training.optim import learning_rate, make_optimizer, set_rates
from lra.training.progress import Progress
from lra.training.stopping import STUCK_S, Interrupted, stop_on_signals

UNTIMED_STEPS = 5  # the first steps after a start warm caches and compilers
CHECKPOINT_INTERVAL_S = 60.0
REMEDY = "lower train.lr, lengthen train.warmup_steps or set train.clip_norm"


class Refused(ValueError):
    """The run's folder belongs to another run."""


class Diverged(Exception):
    """The loss is no longer a finite number."""


@dataclass
class State:
    """What a run knows of itself besides weights, optimiser and random states; saved with them."""

    step: int = 0
    evaluated_step: int = 0
    loss_sum: float = 0.0  # training loss since the last evaluation
    loss_count: int = 0
    best_step: int = 0
    best_accuracy: float = -1.0
    best_loss: float = math.inf
    curve: list[dict[str, float]] = field(default_factory=list)
    max_lr: float = 0.0
    train_time_s: float = 0.0  # of the timed steps; evaluation and saving left out
    eval_time_s: float = 0.0  # of evaluations on the validation split
    timed_steps: int = 0
    timed_examples: int = 0
    timed_tokens: int = 0
    stretches: list[dict[str, Any]] = field(default_factory=list)  # as in `Hardware.begin`

    @property
    def tokens_per_s(self) -> float | None:
        """None as long as no step was timed."""
        return self.timed_tokens / self.train_time_s if self.train_time_s else None

    def add_evaluation(self, val: Metrics, lr: float, selection: str) -> dict[str, float]:
        """Account for the evaluation at this step, and return it as a point of the curve."""
        row = {
            "step": self.step,
            "train_loss": self.loss_sum / max(1, self.loss_count),
            "val_accuracy": val.accuracy,
            "val_loss": val.loss,
            "lr": lr,
        }
        self.curve.append(row)
        self.evaluated_step, self.loss_sum, self.loss_count = self.step, 0.0, 0
        by_loss = selection == "best_val_loss"
        is_best = val.loss < self.best_loss if by_loss else val.accuracy > self.best_accuracy
        if is_best:
            self.best_step, self.best_loss = self.step, val.loss
        self.best_accuracy = max(self.best_accuracy, val.accuracy)
        return row


class StepClock:
    """Times steps from one moment at which the device is idle to the next, into the state."""

    def __init__(self, state: State, hardware: Hardware) -> None:
        self._state, self._hardware = state, hardware
        self._timed_from = state.step + UNTIMED_STEPS
        self._steps, self._started = 0, 0.0  # of the window that is open

    @property
    def is_warming_up(self) -> bool:
        """Whether the state's step is one of the first, which are not timed."""
        return self._state.step <= self._timed_from

    def start(self) -> None:
        """Open a window, unless steps are being timed."""
        if self._steps == 0:
            self._hardware.synchronize()
            self._started = time.monotonic()

    def count(self, size: int, num_tokens: int) -> None:
        """A step of `size` examples has been given to the device."""
        if not self.is_warming_up:
            self._steps += 1
            self._state.timed_examples += size
            self._state.timed_tokens += num_tokens

    def stop(self) -> None:
        """Close the window; the device must have done the steps."""
        if self._steps:
            self._state.train_time_s += time.monotonic() - self._started
            self._state.timed_steps += self._steps
            self._steps = 0


@dataclass(frozen=True)
class Result:
    """Outcome of `train`; metrics belong to the selected step."""

    state: State
    step: int
    val_accuracy: float
    val_loss: float
    test: Metrics | None  # None of data without that split
    micro_batch_size: int


class Step(NamedTuple):
    """One training step; loss and hits are this process's part, on the device."""

    step: int
    num_answers: int
    lr: float
    loss: torch.Tensor
    hits: torch.Tensor


def train(
    model: nn.Module,
    data: Dataset | Questions,
    cfg: TrainConfig,
    hardware: Hardware,
    *,
    seed: int,
    run_dir: Path,
    identity: dict[str, Any],
    progress: Progress,
    log: Callable[[list[dict[str, Any]]], None] = lambda rows: None,
    software: Mapping[str, Any] = MappingProxyType({}),
    started: float | None = None,
) -> Result:
    """Train `model` from wherever `run_dir` left off, select a checkpoint, test it once.

    Under torch.distributed every process calls this; each takes its share of every batch, and the
    main one writes. `identity` (config hash, data fingerprint) must equal that of a checkpoint
    found in `run_dir`. `log` gets the rows of metrics.jsonl as they come. Where steps are computed
    otherwise than those before a stop, which includes `software`, that is said, and kept in
    `hardware.stretches`. The time limit counts from `started`, by default from now.

    Raises:
        Refused: the folder holds checkpoints of another setting.
        Diverged: the loss became infinite or NaN, in training or on a split.
        Interrupted: a signal or the time limit; the state is saved and can be resumed.
    """
    started = time.monotonic() if started is None else started
    folder, rows_file = run_dir / "checkpoints", run_dir / "metrics.jsonl"
    hardware.forget_peak_memory()
    model.to(hardware.device)
    optimizer = make_optimizer(model, cfg)
    scaler = torch.amp.GradScaler(hardware.device.type, enabled=hardware.config.precision == "fp16")
    needs_best = cfg.selection != "last"
    state = resume(folder, model, optimizer, scaler, identity, progress, needs_best=needs_best)
    forward: Any = hardware.parallel(model)
    if hardware.config.compile:
        forward = torch.compile(forward, dynamic=True)
    is_main, is_alone = distributed.is_main(), distributed.world_size() == 1
    if is_main:
        checkpoint.drop_beyond(folder, state.step)
        cut_metrics(rows_file, state.step, state.evaluated_step)
    pad_to = data.meta["max_length"] if cfg.pad_to_max else None
    micro_batch_size = min(hardware.config.micro_batch_size or cfg.batch_size, cfg.batch_size)
    hardware.stretches = state.stretches
    if changed := hardware.begin(state.step + 1, micro_batch_size, software):
        progress.say(
            f"warning: from step {state.step + 1:,} on the run is computed otherwise ({changed}); "
            "its record says so, by steps (hardware.stretches)"
        )
    batches = load_batches(
        data.train, cfg, hardware, seed=seed, first_step=state.step + 1, pad_to=pad_to,
        check=lambda: stop.check(0 if is_alone else STUCK_S),
    )  # fmt: skip

    def save() -> None:
        random_states = distributed.gather(checkpoint.random_states())
        if is_main:
            checkpoint.save(folder, state.step, {
                "model": model.state_dict(), "optimizer": optimizer.state_dict(),
                "scaler": scaler.state_dict(), "random": random_states,
                "state": vars(state), "identity": identity,
            })  # fmt: skip

    def write(rows: list[dict[str, Any]]) -> None:
        if is_main:
            append_metrics(rows_file, rows)
            log(rows)

    def evaluate_on(split: TokenArrays | HiddenTokens) -> Metrics:
        name, begun = "test" if split is data.test else "validation", time.monotonic()
        network = forward if is_alone else model
        with progress.counting(name, len(split)) as show:

            def between(num_examples: int) -> None:
                show(num_examples)
                if is_alone:  # several processes must stay together
                    stop.check()

            metrics = evaluate(
                network, split, hardware, batch_size=micro_batch_size, pad_to=pad_to, check=between
            )
        if split is data.val:
            state.eval_time_s += time.monotonic() - begun
        # The last step may break the weights, and no training loss after it would show that.
        if not math.isfinite(metrics.loss):
            raise Diverged(f"step {state.step}: the {name} loss is {metrics.loss}; {REMEDY}")
        return metrics

    def settle() -> list[dict[str, Any]]:
        """Read the losses back, account for the time of their steps and write their rows."""
        rows = read_back(recent, state)
        recent.clear()
        clock.stop()
        write(rows)
        return rows

    def save_and_stop(why: object, cause: str | None) -> NoReturn:
        save()
        raise Interrupted(f"{why} at step {state.step}", cause) from None

    statistics = [x for name, x in model.named_buffers() if ".running_" in f".{name}"]
    recent: list[Step] = []  # steps whose losses are still on the device
    clock, saved_at, warned = StepClock(state, hardware), time.monotonic(), data.test is None
    with stop_on_signals() as stop, progress.bar(cfg.num_steps, state.step) as bar:
        model.train()
        while True:
            if evaluates_at(state.step, cfg) and state.evaluated_step < state.step:
                try:
                    val = evaluate_on(data.val)
                except Interrupted as error:
                    save_and_stop(error, error.cause)
                row = state.add_evaluation(val, learning_rate(state.step, cfg), cfg.selection)
                is_best = state.best_step == state.step
                if is_best and needs_best and is_main:
                    checkpoint.write(
                        checkpoint.best_path(folder, state.step), {"model": model.state_dict()}
                    )
                write([{"split": "val"} | row])
                progress.evaluation(row, best=is_best)
                if not warned and has_learned_nothing(state, cfg, data):
                    progress.say(
                        f"warning: validation is still at chance after {state.step:,} of "
                        f"{cfg.num_steps:,} steps"
                    )
                    warned = True
                late = is_main and time.monotonic() - saved_at > CHECKPOINT_INTERVAL_S
                if cfg.checkpoint_every is None and distributed.from_main(late):
                    save()
                    saved_at = time.monotonic()
            if state.step == cfg.num_steps:
                break

            clock.start()
            try:
                batch, num_answers, num_examples, num_tokens = next(batches)
            except Interrupted as error:
                if not is_alone:  # the others are at the next step already, so nobody can save
                    raise
                if recent:
                    settle()
                save_and_stop(error, error.cause)
            state.step += 1
            lr = set_rates(optimizer, state.step, cfg)
            loss, hits, fitting = accumulate_as_fits(
                forward, batch, num_answers, hardware, scaler, optimizer,
                num_examples=num_examples, micro_batch_size=micro_batch_size, statistics=statistics,
                say=lambda text: progress.say(f"step {state.step}: {text}"),
            )  # fmt: skip
            if fitting != micro_batch_size:
                micro_batch_size = fitting
                hardware.begin(state.step, micro_batch_size, software)
            if cfg.clip_norm is not None:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), cfg.clip_norm)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            recent.append(Step(state.step, num_answers, lr, loss, hits))
            state.max_lr = max(state.max_lr, lr)
            clock.count(num_examples, num_tokens)

            # Reading the loss makes the host wait for the device, so it is done every few steps;
            # several processes agree at these steps on whether to stop.
            saving = cfg.checkpoint_every and state.step % cfg.checkpoint_every == 0
            if cfg.time_limit is not None and time.monotonic() - started > cfg.time_limit:
                stop.request(f"train.time_limit={cfg.time_limit:g} s")
            evaluating = evaluates_at(state.step, cfg)
            reading = state.step % cfg.log_every == 0 or evaluating or saving
            if not reading and not (is_alone and stop.requested):
                if clock.is_warming_up:  # waited for in any case
                    bar.update(as_rows(recent[-1:]), state.step, state.tokens_per_s)
                else:
                    bar.advance(state.step)
                continue
            rows = settle()
            bad = next((r for r in rows if not math.isfinite(r["loss"])), None)
            if bad:
                raise Diverged(f"step {bad['step']}: the loss is {bad['loss']}; {REMEDY}")
            bar.update(rows, state.step, state.tokens_per_s)
            if distributed.any_of(bool(stop.requested), hardware.device):
                save_and_stop(f"stopped by {stop.requested or 'another process'}", stop.requested)
            if saving:
                save()

        save()  # a run that is killed from here on only has the test to repeat
        if data.test is None and distributed.any_of(bool(stop.requested), hardware.device):
            why = f"stopped by {stop.requested or 'another process'} at step {state.step}"
            raise Interrupted(why, stop.requested)
        selected = state.best_step if needs_best else state.step
        if needs_best:
            path = checkpoint.best_path(folder, selected)
            best = distributed.from_main(checkpoint.read(path) if is_main else None)
            model.load_state_dict(best["model"])
        test = evaluate_on(data.test) if data.test is not None else None
    row = next(r for r in state.curve if r["step"] == selected)
    return Result(state, selected, row["val_accuracy"], row["val_loss"], test, micro_batch_size)


def evaluates_at(step: int, cfg: TrainConfig) -> bool:
    """Whether the validation split is evaluated after this step."""
    return step % cfg.eval_every == 0 or step == cfg.num_steps


def has_learned_nothing(state: State, cfg: TrainConfig, data: Dataset | Questions) -> bool:
    """Whether validation is still at chance after a quarter of the steps."""
    labels = data.meta["splits"]["val"]["label_histogram"]
    return 4 * state.step >= cfg.num_steps and is_at_chance(state.best_accuracy, labels)


def resume(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    identity: dict[str, Any],
    progress: Progress,
    *,
    needs_best: bool,
) -> State:
    """Load the newest readable checkpoint of this very run, or start anew.

    Of several processes the main one looks, for a shared disk may show others an older folder.

    Raises:
        Refused: the checkpoint belongs to other settings or data, or the disk does not give it.
    """
    found: Any = None
    if distributed.is_main():
        try:
            found = checkpoint.load_latest(folder, needs_best=needs_best)
        except OSError as error:
            found = Refused(f"{error.filename}: {error.strerror}")
    found = distributed.from_main(found)
    if isinstance(found, Refused):
        raise found from None
    saved, warnings = found
    for warning in warnings:
        progress.say(f"warning: {warning}")
    if saved is None:
        if warnings:
            progress.say("warning: no usable checkpoint is left; the run starts anew at step 0")
        # Weights are equal in all processes, dropout must not be.
        if distributed.rank():
            torch.manual_seed(torch.initial_seed() + distributed.rank())
        return State()
    for name, value in identity.items():
        if saved["identity"].get(name) != value:
            raise Refused(
                f"{folder}: holds a run with another {name} ({saved['identity'].get(name)}, "
                f"now {value}); choose another paths.outputs or delete that folder"
            )
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    if saved["scaler"]:  # empty unless the steps before were in fp16
        scaler.load_state_dict(saved["scaler"])
    if len(saved["random"]) == distributed.world_size():
        checkpoint.restore_random_states(saved["random"][distributed.rank()])
    else:
        progress.say(
            f"warning: saved by {len(saved['random'])} processes, now {distributed.world_size()}: "
            "dropout goes on from other random numbers"
        )
        # Others in each process, and by step. The generator knows 32 bits of a seed.
        own = 1_000_003 * (1 + saved["state"]["step"]) + distributed.rank()
        torch.manual_seed((torch.initial_seed() + own) % 2**32)
    progress.say(f"resuming at step {saved['state']['step']}")
    return State(**saved["state"])


def load_batches(
    split: TokenArrays | HiddenTokens,
    cfg: TrainConfig,
    hardware: Hardware,
    *,
    seed: int,
    first_step: int,
    pad_to: int | None,
    check: Callable[[], None] = lambda: None,
) -> Iterator[tuple[Batch, int, int, int]]:
    """This process's part of each batch, on the device, and counts of the whole batch: the answers
    that it asks for, examples, real tokens.

    The same whatever the number of threads that build them. `check` is called while a batch is
    waited for, and may raise.
    """
    rank, world = distributed.rank(), distributed.world_size()

    def order() -> Iterator[tuple[int, np.ndarray]]:
        return train_batches(
            split.lengths, cfg.batch_size, seed=seed, bucketing=cfg.length_bucketing,
            first_step=first_step, last_step=cfg.num_steps,
        )  # fmt: skip

    def build(planned: tuple[int, np.ndarray]) -> tuple[Batch, int]:
        epoch, whole = planned
        batch = split.batch(whole[rank::world], pad_to, epoch)
        alone = world == 1
        num_answers = batch.num_answers if alone else split.num_answers(whole, epoch)
        return hardware.pin(batch), max(1, num_answers)

    built = built_ahead(build, order(), hardware.config.num_workers, split.folder, check)
    for (_, whole), (batch, num_answers) in zip(order(), built, strict=True):
        num_tokens = int(split.lengths_NS[whole].sum())
        yield batch.to(hardware.device), num_answers, len(whole), num_tokens


def read_back(recent: list[Step], state: State) -> list[dict[str, Any]]:
    """The last steps as rows for metrics.jsonl, their losses added to those since an evaluation."""
    rows = as_rows(recent)
    state.loss_sum += sum(row["loss"] for row in rows)
    state.loss_count += len(rows)
    return rows


def as_rows(recent: list[Step]) -> list[dict[str, Any]]:
    """Steps as rows for metrics.jsonl; waits once for the device and other processes."""
    losses = distributed.all_sum(torch.stack([s.loss for s in recent])).tolist()
    hits = distributed.all_sum(torch.stack([s.hits for s in recent])).tolist()
    return [
        {
            "split": "train",
            "step": s.step,
            "loss": loss,
            "accuracy": hit / s.num_answers,
            "lr": s.lr,
        }
        for s, loss, hit in zip(recent, losses, hits, strict=True)
    ]


def append_metrics(path: Path, rows: list[dict[str, Any]]) -> None:
    """Add lines to metrics.jsonl."""
    append(path, "".join(json.dumps(row) + "\n" for row in rows))


def cut_metrics(path: Path, step: int, evaluated_step: int) -> None:
    """Drop what a resumed run writes again, and a half-written last line.

    Those are losses beyond `step`, and evaluations beyond `evaluated_step`: a state may be saved
    between the two.
    """
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            row = json.loads(line)
            if row["step"] <= (step if row["split"] == "train" else evaluated_step):
                kept.append(line + "\n")
    write_atomically(path, "".join(kept))
