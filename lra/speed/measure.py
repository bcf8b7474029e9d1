"""Speed and memory of one model at one length: what a process of scripts/benchmark.py runs.

The batch has random ids and no padding. A training step is the harness's own
(`lra.training.trainer`): the same gradient, clipping, optimiser and rate, dropout on; an inference
step is a batch of `lra.training.evaluate`. The batch lies ready on the device; breakdown.py has
what data and logging add.

Memory is the most that was in use at once. On CUDA that is what tensors took, parameters included.
On a CPU it is the largest resident size of the process less the one before the first whole step,
when libraries, model and batch are loaded and one short row has been through a step, so it does
not count parameters and the optimiser's state. The process has to be fresh.
"""

from __future__ import annotations

import contextlib
import math
import resource
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from lra.build import make_model, make_task
from lra.config import RunConfig
from lra.speed.benchmarks import Measurement
from lra.tasks.batches import Batch
from lra.tasks.task import Task
from lra.training.checkpoint import seed_everything
from lra.training.evaluate import loss_and_hits
from lra.training.gradient import accumulate, is_out_of_memory, num_micro_batches
from lra.training.hardware import Hardware
from lra.training.optim import make_optimizer, set_rates
from models.classifier import Classifier

SHORT = 64  # tokens of the row that loads what is loaded late
MAX_STEPS = 1000


def random_batch(task: Task, batch_size: int, seed: int) -> Batch:
    """Rows of `task.max_length` random ids, none of them padding, and random labels."""
    generator = torch.Generator().manual_seed(seed)
    size = (batch_size, task.num_sequences)
    return Batch(
        torch.randint(1, task.vocab_size, (*size, task.max_length), generator=generator),
        torch.full(size, task.max_length),
        torch.randint(task.num_classes, size[:1], generator=generator),
    )


def short_row(batch: Batch) -> Batch:
    """The start of the first row."""
    return part(batch, 1, SHORT)


def part(batch: Batch, num_rows: int, length: int) -> Batch:
    """The start of the first rows."""
    return Batch(
        batch.tokens_BSL[:num_rows, :, :length],
        batch.lengths_BS[:num_rows].clamp(max=length),
        batch.labels_B[:num_rows],
    )


class Trainer:
    """The parts of a training step as `train` has them, to be called one by one."""

    def __init__(self, model: Classifier, config: RunConfig, hardware: Hardware) -> None:
        self.model, self.cfg, self.hardware = model.train(), config.train, hardware
        model.encoder.checkpoint_layers = config.hardware.activation_checkpointing
        self.optimizer = make_optimizer(model, self.cfg)
        enabled = config.hardware.precision == "fp16"
        self.scaler = torch.amp.GradScaler(hardware.device.type, enabled=enabled)
        self.forward: Any = model
        if config.hardware.compile:
            self.forward = torch.compile(model, dynamic=True)
        self.step = 0

    def gradient(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss and hits of a batch, its gradient added."""
        return accumulate(
            self.forward, batch, len(batch), self.hardware, self.scaler,
            num_parts=num_parts(batch, self.hardware),
        )  # fmt: skip

    def update(self) -> None:
        """Apply and drop the gradient."""
        self.step += 1
        set_rates(self.optimizer, min(self.step, self.cfg.num_steps), self.cfg)
        if self.cfg.clip_norm is not None:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def __call__(self, batch: Batch) -> None:
        """One step."""
        self.gradient(batch)
        self.update()


class Evaluator:
    """What `lra.training.evaluate.evaluate` does with a batch."""

    def __init__(self, model: Classifier, config: RunConfig, hardware: Hardware) -> None:
        self.forward: Any = model.eval()
        self.hardware = hardware
        if config.hardware.compile:
            self.forward = torch.compile(model, dynamic=True)

    @torch.inference_mode()
    def __call__(self, batch: Batch) -> None:
        """Loss and hits of a batch; micro-batches as in training."""
        for micro in batch.split(num_parts(batch, self.hardware)):
            with self.hardware.autocast():
                logits_BC = self.forward(*micro.inputs)
            loss_and_hits(logits_BC, micro.labels_B)


def num_parts(batch: Batch, hardware: Hardware) -> int:
    """Micro-batches of a batch, as in training."""
    return num_micro_batches(len(batch), hardware.config.micro_batch_size or len(batch))


def measure(
    config: RunConfig,
    hardware: Hardware,
    *,
    mode: str,
    time_s: float,
    max_step_s: float,
    max_memory_gb: float | None,
) -> Measurement:
    """Measure one cell.

    The task's `max_length` is the length and `train.batch_size` the batch. Steps are timed for
    about `time_s`, after one that is not. A step of more than `max_step_s` ends the process by
    SIGALRM. On a CPU no more than `max_memory_gb` beyond what is loaded can be allocated.
    """
    prefer_as_victim()
    try:
        return _measure(config, hardware, mode, time_s, max_step_s, max_memory_gb)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return Measurement("out_of_memory")


def _measure(
    config: RunConfig,
    hardware: Hardware,
    mode: str,
    time_s: float,
    max_step_s: float,
    max_memory_gb: float | None,
) -> Measurement:
    task = make_task(config)
    seed_everything(config.seed)
    model = make_model(config, task).to(hardware.device)
    batch = random_batch(task, config.train.batch_size, config.seed).to(hardware.device)
    step = (Trainer if mode == "train" else Evaluator)(model, config, hardware)
    # Compiling is no part of a step, nor what a GPU does once for each size, so there the whole
    # batch goes through first.
    is_slow_at_first = config.hardware.compile or hardware.device.type == "cuda"
    step(batch if is_slow_at_first else short_row(batch))
    hardware.synchronize()
    if max_memory_gb is not None and hardware.device.type == "cpu":
        limit_memory(max_memory_gb)
    before = reset_peak_memory(hardware)

    started = time.perf_counter()
    with ended_after(max_step_s):
        step(batch)
        hardware.synchronize()
    first_s = time.perf_counter() - started
    count = min(MAX_STEPS, max(1, math.ceil(time_s / first_s)))
    started = time.perf_counter()
    for _ in range(count):
        step(batch)
    hardware.synchronize()
    steps_per_s = count / (time.perf_counter() - started)
    return Measurement("ok", steps_per_s, peak_memory(hardware, before))


def step_times(
    configs: Mapping[str, RunConfig], hardware: Hardware, *, num_rounds: int
) -> dict[str, list[float]]:
    """Seconds of a training step, one of each model in every round, all in this process.

    Times of the same round stand side by side, so that other work on the machine hits all alike.
    """
    runs = {}
    for name, config in configs.items():
        task = make_task(config)
        seed_everything(config.seed)
        trainer = Trainer(make_model(config, task).to(hardware.device), config, hardware)
        batch = random_batch(task, config.train.batch_size, config.seed).to(hardware.device)
        trainer(batch)
        runs[name] = (trainer, batch)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(num_rounds):
        for name, (trainer, batch) in runs.items():
            hardware.synchronize()
            started = time.perf_counter()
            trainer(batch)
            hardware.synchronize()
            times[name].append(time.perf_counter() - started)
    return times


@contextlib.contextmanager
def ended_after(seconds: float) -> Iterator[None]:
    """Let SIGALRM end the process if the block takes longer, even inside one long operation."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-6))  # 0 would turn the timer off
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def reset_peak_memory(hardware: Hardware) -> int:
    """Start to watch for the peak; bytes in use that are not part of it."""
    if hardware.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return 0
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the largest resident size starts anew
    return _status("VmRSS") or _max_rss()


def peak_memory(hardware: Hardware, before: int) -> int:
    """Bytes at the peak since `reset_peak_memory` returned `before`."""
    if hardware.device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    # getrusage's figure is not reset, and starts at the size of the process that started this one.
    return max(0, (_status("VmHWM") or _max_rss()) - before)


def limit_memory(gigabytes: float) -> None:
    """Let allocations fail that go more than so many GiB beyond what is allocated now."""
    limit = _status("VmData") + int(gigabytes * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def prefer_as_victim() -> None:
    """If memory runs out, have the kernel end this process rather than another."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _status(name: str) -> int:
    """Bytes of an entry of /proc/self/status; 0 where there is none."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return 1024 * int(line.split()[1])
    return 0


def _max_rss() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
