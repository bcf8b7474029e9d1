"""Training: one function, read top to bottom.

Data order depends on (seed, epoch) alone and the rate on the step, so a state is the weights, the
optimiser, the random states and a step number; a killed run resumes to the same result, bit for bit
on a CPU.
"""

from __future__ import annotations

import contextlib
import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from lra import checkpoint
from lra.config import TrainConfig
from lra.data import Batch, TokenArrays, train_batches
from lra.evaluate import Metrics, evaluate
from lra.hardware import Hardware
from lra.optim import learning_rate, make_optimizer
from lra.progress import Progress
from lra.task import Dataset, write_atomically

UNTIMED_STEPS = 5  # the first steps after a start warm caches and compilers
CHECKPOINT_INTERVAL_S = 60.0


class Refused(ValueError):
    """The run's folder belongs to another run."""


class Diverged(Exception):
    """The loss is no longer a finite number."""


class Interrupted(Exception):
    """A signal asked the run to stop; its state is saved."""


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
    timed_steps: int = 0
    timed_examples: int = 0
    timed_tokens: int = 0


@dataclass(frozen=True)
class Result:
    """Outcome of `train`; metrics belong to the selected step."""

    state: State
    step: int
    val: Metrics
    test: Metrics
    micro_batch_size: int


def train(
    model: nn.Module,
    data: Dataset,
    cfg: TrainConfig,
    hardware: Hardware,
    *,
    seed: int,
    run_dir: Path,
    identity: dict[str, Any],
    progress: Progress,
) -> Result:
    """Train `model` from wherever `run_dir` left off, select a checkpoint, test it once.

    `identity` (config hash, data fingerprint) must equal that of a checkpoint found in `run_dir`.

    Raises:
        Refused: the folder holds checkpoints of another setting.
        Diverged: the loss became infinite or NaN.
        Interrupted: SIGINT, SIGTERM or SIGUSR1 came; the state is saved and can be resumed.
    """
    folder = run_dir / "checkpoints"
    model.to(hardware.device)
    optimizer = make_optimizer(model, cfg)
    scaler = torch.amp.GradScaler(hardware.device.type, enabled=hardware.config.precision == "fp16")
    state = resume(folder, model, optimizer, scaler, identity, progress)
    cut_metrics(run_dir / "metrics.jsonl", state.step)
    forward: Any = torch.compile(model, dynamic=True) if hardware.config.compile else model
    pad_to = data.meta["max_length"] if cfg.pad_to_max else None
    micro_batch_size = min(hardware.config.micro_batch_size or cfg.batch_size, cfg.batch_size)
    batches = load_batches(
        data.train, cfg, hardware, seed=seed, first_step=state.step + 1, pad_to=pad_to
    )

    def save() -> None:
        checkpoint.save(folder, state.step, {
            "model": model.state_dict(), "optimizer": optimizer.state_dict(),
            "scaler": scaler.state_dict(), "random": checkpoint.random_states(),
            "state": vars(state), "identity": identity,
        })  # fmt: skip

    def evaluate_on(split: TokenArrays) -> Metrics:
        return evaluate(
            forward, split, hardware, batch_size=micro_batch_size, pad_to=pad_to, check=stop.check
        )

    recent: list[
        tuple[int, torch.Tensor, torch.Tensor, float]
    ] = []  # not yet read back from the device
    saved_at, timed_from = time.monotonic(), state.step + UNTIMED_STEPS
    window_start, window_steps = time.monotonic(), 0

    with stop_on_signals() as stop, progress.bar(cfg.num_steps, state.step) as bar:
        model.train()
        while True:
            due = state.step % cfg.eval_every == 0 or state.step == cfg.num_steps
            if due and state.evaluated_step < state.step:
                try:
                    val = evaluate_on(data.val)
                except Interrupted:
                    save()
                    raise
                state.evaluated_step = state.step
                state.curve.append({
                    "step": state.step, "train_loss": state.loss_sum / max(1, state.loss_count),
                    "val_accuracy": val.accuracy, "val_loss": val.loss,
                    "lr": learning_rate(state.step, cfg),
                })  # fmt: skip
                state.loss_sum, state.loss_count = 0.0, 0
                if val.accuracy > state.best_accuracy:
                    state.best_step, state.best_accuracy, state.best_loss = (
                        state.step,
                        val.accuracy,
                        val.loss,
                    )
                    if cfg.selection == "best_val":
                        checkpoint.write(
                            folder / f"best-{state.step:08d}.pt", {"model": model.state_dict()}
                        )
                append_metrics(run_dir / "metrics.jsonl", [{"split": "val"} | state.curve[-1]])
                progress.evaluation(state.curve[-1], best=state.best_step == state.step)
                if (
                    cfg.checkpoint_every is None
                    and time.monotonic() - saved_at > CHECKPOINT_INTERVAL_S
                ):
                    save()
                    saved_at = time.monotonic()
            if state.step == cfg.num_steps:
                break

            if window_steps == 0:
                hardware.synchronize()
                window_start = time.monotonic()
            batch, num_tokens = next(batches)
            state.step += 1
            lr = learning_rate(state.step, cfg)
            for group in optimizer.param_groups:
                group["lr"] = lr
            random_states = checkpoint.random_states()
            while True:
                try:
                    loss, hits = accumulate(forward, batch, micro_batch_size, hardware, scaler)
                    break
                except (RuntimeError, MemoryError) as error:
                    if not is_out_of_memory(error) or micro_batch_size == 1:
                        raise
                micro_batch_size = -(-micro_batch_size // 2)
                progress.say(
                    f"step {state.step}: out of memory; micro-batch is now {micro_batch_size}"
                )
                optimizer.zero_grad(set_to_none=True)
                checkpoint.restore_random_states(random_states)
            if cfg.clip_norm is not None:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), cfg.clip_norm)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            recent.append((len(batch), loss, hits, lr))
            state.max_lr = max(state.max_lr, lr)
            if state.step > timed_from:
                window_steps += 1
                state.timed_examples += len(batch)
                state.timed_tokens += num_tokens

            # Reading the loss makes the host wait for the device, so it is done every few steps.
            saving = cfg.checkpoint_every and state.step % cfg.checkpoint_every == 0
            evaluating = state.step % cfg.eval_every == 0 or state.step == cfg.num_steps
            if state.step % cfg.log_every == 0 or evaluating or saving or stop.requested:
                rows = read_back(recent, state)
                recent.clear()
                if window_steps:
                    state.train_time_s += time.monotonic() - window_start
                    state.timed_steps += window_steps
                    window_steps = 0
                append_metrics(run_dir / "metrics.jsonl", rows)
                bad = next((r for r in rows if not math.isfinite(r["loss"])), None)
                if bad:
                    state.step = int(bad["step"])
                    raise Diverged(
                        f"step {bad['step']}: the loss is {bad['loss']}; lower train.lr, lengthen "
                        "train.warmup_steps or set train.clip_norm"
                    )
                bar.update(rows, state)
            if stop.requested:
                save()
                raise Interrupted(f"stopped by {stop.requested} at step {state.step}")
            if saving:
                save()

        save()  # a run that is killed from here on only has the last evaluation to repeat
        if cfg.selection == "best_val":
            model.load_state_dict(
                checkpoint.read(folder / f"best-{state.best_step:08d}.pt")["model"]
            )
            selected = state.best_step
        else:
            selected = state.step
        val, test = evaluate_on(data.val), evaluate_on(data.test)
    return Result(state, selected, val, test, micro_batch_size)


def accumulate(
    forward: Callable[..., torch.Tensor],
    batch: Batch,
    micro_batch_size: int,
    hardware: Hardware,
    scaler: torch.amp.GradScaler,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add the batch's gradient to the parameters; return its loss and hits, on the device."""
    loss = torch.zeros((), device=hardware.device)
    hits = torch.zeros((), device=hardware.device, dtype=torch.int64)
    for micro in batch.split(micro_batch_size):
        with hardware.autocast():
            logits_BC = forward(micro.tokens_BSL, micro.lengths_BS)
        # Sum over rows, then divide by the whole batch: any split gives the same gradient.
        micro_loss = F.cross_entropy(logits_BC.float(), micro.labels_B, reduction="sum") / len(
            batch
        )
        scaler.scale(micro_loss).backward()
        loss += micro_loss.detach()
        hits += (logits_BC.detach().argmax(dim=1) == micro.labels_B).sum()
    return loss, hits


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on any device."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(
        error
    )


def resume(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    identity: dict[str, Any],
    progress: Progress,
) -> State:
    """Load the newest readable checkpoint of this very run, or start anew.

    Raises:
        Refused: the checkpoint belongs to other settings or other data.
    """
    saved, warnings = checkpoint.load_latest(folder)
    for warning in warnings:
        progress.say(f"warning: {warning}")
    if saved is None:
        return State()
    for name, value in identity.items():
        if saved["identity"].get(name) != value:
            raise Refused(
                f"{folder}: holds a run with another {name} ({saved['identity'].get(name)}, "
                f"now {value}); choose another paths.outputs or delete that folder"
            )
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    scaler.load_state_dict(saved["scaler"])
    checkpoint.restore_random_states(saved["random"])
    progress.say(f"resuming at step {saved['state']['step']}")
    return State(**saved["state"])


def load_batches(
    split: TokenArrays,
    cfg: TrainConfig,
    hardware: Hardware,
    *,
    seed: int,
    first_step: int,
    pad_to: int | None,
) -> Iterator[tuple[Batch, int]]:
    """Batches on the device and their numbers of real tokens, whatever the number of workers."""
    indices = train_batches(
        split.lengths, cfg.batch_size, seed=seed, bucketing=cfg.length_bucketing,
        first_step=first_step, last_step=cfg.num_steps,
    )  # fmt: skip
    workers = hardware.config.num_workers
    batches: Iterable[Batch] = DataLoader(
        _Batches(split, pad_to),
        sampler=indices,
        batch_size=None,
        num_workers=workers,
        prefetch_factor=4 if workers else None,
        pin_memory=hardware.device.type == "cuda",
        generator=torch.Generator(),  # leaves the run's own random state alone
    )
    for batch in batches:
        yield batch.to(hardware.device), int(batch.lengths_BS.sum())


class _Batches(torch.utils.data.Dataset):
    def __init__(self, split: TokenArrays, pad_to: int | None) -> None:
        self.split, self.pad_to = split, pad_to

    def __getitem__(self, indices: np.ndarray) -> Batch:
        return self.split.batch(indices, self.pad_to)


def read_back(
    recent: list[tuple[int, torch.Tensor, torch.Tensor, float]], state: State
) -> list[dict[str, Any]]:
    """The last steps as rows for metrics.jsonl; waits for the device once."""
    losses = torch.stack([loss for _, loss, _, _ in recent]).tolist()
    hits = torch.stack([hit for _, _, hit, _ in recent]).tolist()
    first = state.step - len(recent) + 1
    state.loss_sum += sum(losses)
    state.loss_count += len(losses)
    return [
        {
            "split": "train",
            "step": first + i,
            "loss": losses[i],
            "accuracy": hits[i] / size,
            "lr": lr,
        }
        for i, (size, _, _, lr) in enumerate(recent)
    ]


def append_metrics(path: Path, rows: list[dict[str, Any]]) -> None:
    """Add lines to metrics.jsonl."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def cut_metrics(path: Path, step: int) -> None:
    """Drop lines beyond `step`, which a resumed run writes again, and a half-written last line."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
    write_atomically(path, "".join(kept))


class _Stop:
    """Remembers the first signal; `check` turns it into an exception where that is safe."""

    requested: str | None = None

    def check(self) -> None:
        if self.requested:
            raise Interrupted(f"stopped by {self.requested}")


@contextlib.contextmanager
def stop_on_signals() -> Iterator[_Stop]:
    """Catch SIGINT, SIGTERM and SIGUSR1 (Slurm's early warning) once; a second acts as usual."""
    stop = _Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = {s: signal.getsignal(s) for s in signals}

    def remember(number: int, _frame: object) -> None:
        stop.requested = signal.Signals(number).name
        signal.signal(number, before[signal.Signals(number)])

    for s in signals:
        signal.signal(s, remember)
    try:
        yield stop
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
