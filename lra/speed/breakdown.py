"""Where the time of a training step goes, and the roofline: how near it comes to the machine.

Parts of the forward pass are timed by hooks on the modules (clocks on a CPU, events on CUDA); data,
gradient, optimiser and logging are the calls that `lra.training.trainer.train` makes. The roofline:
counted operations of one step over the rate of a large matrix product, and counted bytes over the
rate of a large copy, both measured in the same process. Operations are those of matrix products,
attention and convolutions, a multiplication and an addition each, recomputation included. Bytes are
what each operation of PyTorch reads and writes, views left out; caches can make a step faster than
that.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lra.build import make_model, make_task
from lra.config import RunConfig
from lra.speed.benchmarks import BASELINE, ratio_text
from lra.speed.flops import counting_flops
from lra.speed.measure import Trainer, short_row
from lra.tasks.batches import SplitWriter, TokenArrays
from lra.tasks.task import Task
from lra.training.checkpoint import seed_everything
from lra.training.hardware import Hardware
from lra.training.trainer import State, Step, append_metrics, load_batches, read_back
from models.classifier import Classifier

WARM_STEPS = 1
REPEATS = 4  # of a rate; the best counts
Mark = Any  # a reading of the clock: seconds, or an event on the device's stream


def breakdown(config: RunConfig, hardware: Hardware, *, time_s: float) -> dict[str, Any]:
    """Seconds of each part of a training step, mean over steps, and the roofline's counts.

    The task's `max_length` is the length and `train.batch_size` the batch. Keys: `parts` (part to
    seconds; they add up to the step), `flops`, `bytes`, `flops_per_s`, `bytes_per_s`.
    """
    task = make_task(config)
    seed_everything(config.seed)
    model = make_model(config, task).to(hardware.device)
    trainer = Trainer(model, config, hardware)
    with tempfile.TemporaryDirectory() as folder:
        split = random_split(task, Path(folder) / "train", 2 * config.train.batch_size, config.seed)
        parts = time_parts(trainer, config, split, Path(folder) / "metrics.jsonl", time_s)
    batch = split.batch(np.arange(config.train.batch_size)).to(hardware.device)
    flops, num_bytes = count(lambda: trainer(batch))
    return {
        "parts": parts,
        "flops": flops,
        "bytes": num_bytes,
        "flops_per_s": product_rate(hardware),
        "bytes_per_s": copy_rate(hardware),
    }


def random_split(task: Task, folder: Path, num_examples: int, seed: int) -> TokenArrays:
    """Random examples of full length as a cache holds them."""
    rng = np.random.default_rng(seed)
    length, num_sequences = task.max_length, task.num_sequences
    writer = SplitWriter(folder, num_sequences, task.num_values, task.num_classes, length)
    for _ in range(num_examples):
        values = rng.integers(0, task.num_values, (num_sequences, length))
        writer.add(tuple(values.astype(writer.dtype)), int(rng.integers(task.num_classes)))
    writer.close()
    return TokenArrays(folder, num_sequences, length)


def time_parts(
    trainer: Trainer, config: RunConfig, split: TokenArrays, metrics: Path, time_s: float
) -> dict[str, float]:
    """Train for about `time_s` and return each part's seconds a step."""
    hardware, cfg = trainer.hardware, config.train
    clock = Clock(hardware)
    spans: dict[str, list[tuple[Mark, Mark]]] = defaultdict(list)
    network = trainer.forward

    def forward(*inputs: Tensor) -> Tensor:
        start = clock.mark()
        logits_BC = network(*inputs)
        spans["forward"].append((start, clock.mark()))
        return logits_BC

    trainer.forward = forward
    hooks = [
        hook
        for part, modules in modules_by_part(trainer.model).items()
        for module in modules
        for hook in timed(module, spans[part], clock)
    ]
    endless = dataclasses.replace(cfg, num_steps=sys.maxsize)
    batches = load_batches(split, endless, hardware, seed=config.seed, first_step=1, pad_to=None)
    recent: list[Step] = []
    state, started, steps = State(), 0.0, 0
    trainer.gradient(short_row(split.batch(np.arange(1)).to(hardware.device)))
    trainer.update()
    while True:
        if steps == WARM_STEPS:
            for found in spans.values():
                found.clear()
            started = time.perf_counter()
        marks = [clock.mark()]
        batch, size, *_ = next(batches)
        marks.append(clock.mark())
        loss, hits = trainer.gradient(batch)
        marks.append(clock.mark())
        trainer.update()
        marks.append(clock.mark())
        steps += 1
        done = steps > WARM_STEPS and time.perf_counter() - started > time_s
        recent.append(Step(steps, size, trainer.optimizer.param_groups[0]["lr"], loss, hits))
        if steps % cfg.log_every == 0 or done:
            append_metrics(metrics, read_back(recent, state))
            recent.clear()
        marks.append(clock.mark())
        names = ("data", "gradient", "optimiser", "logging")
        for name, start, end in zip(names, marks, marks[1:], strict=False):
            spans[name].append((start, end))
        if done:
            break
    for hook in hooks:
        hook.remove()
    trainer.forward = network
    hardware.synchronize()
    seconds = {
        part: sum(clock.between(*span) for span in found) / (steps - WARM_STEPS)
        for part, found in spans.items()
    }
    return in_order(seconds)


def in_order(seconds: dict[str, float]) -> dict[str, float]:
    """Parts in the order of a step; what no hook saw of the forward pass is `other`."""
    whole = {k: seconds.pop(k) for k in ("data", "forward", "gradient", "optimiser", "logging")}
    forward = {f"forward: {part}": value for part, value in seconds.items()}
    return {
        "data": whole["data"],
        **forward,
        "forward: other": whole["forward"] - sum(seconds.values()),
        "loss and backward": whole["gradient"] - whole["forward"],
        "optimiser": whole["optimiser"],
        "logging": whole["logging"],
    }


def modules_by_part(model: Classifier) -> dict[str, list[nn.Module]]:
    """Modules to time, none inside another; residual sums, dropout of blocks and means are left."""
    encoder = model.encoder
    parts: dict[str, list[nn.Module]] = {"embedding": [encoder.embedding]}
    for i, block in enumerate(encoder.blocks):
        for name, part in block.named_children():
            if name == "mixer":
                parts[f"mixer of layer {i + 1}"] = [part]
            elif name == "ffn" or "norm" in name:
                title = "feed-forward" if name == "ffn" else "norms"
                parts.setdefault(title, []).append(part)
    parts.setdefault("norms", []).append(encoder.norm)
    pool = [model.attention_pool] if model.attention_pool is not None else []
    return {**parts, "head": [*pool, model.head]}


def timed(module: nn.Module, spans: list[tuple[Mark, Mark]], clock: Clock) -> list[Any]:
    """Hooks that note when the module starts and ends; a module may run several times."""
    starts: list[Mark] = []
    return [
        module.register_forward_pre_hook(lambda *_: starts.append(clock.mark())),
        module.register_forward_hook(lambda *_: spans.append((starts.pop(), clock.mark()))),
    ]


class Clock:
    """The host's clock, or on CUDA the device's own, so that nothing has to wait."""

    def __init__(self, hardware: Hardware) -> None:
        self.on_cuda = hardware.device.type == "cuda"

    def mark(self) -> Mark:
        """Now."""
        if not self.on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: Mark, end: Mark) -> float:
        """Seconds; on CUDA only after synchronisation."""
        return start.elapsed_time(end) / 1000 if self.on_cuda else end - start


def count(run: Callable[[], object]) -> tuple[int, int]:
    """Floating-point operations and bytes of `run`."""
    with ByteCounter() as bytes_counter, counting_flops() as counter:
        run()
    return counter.get_total_flops(), bytes_counter.total


# Operations in place that do not read what was there.
WRITE_ONLY = tuple(f"aten::{name}_" for name in ("copy", "zero", "fill", "random", "exponential"))


class ByteCounter(TorchDispatchMode):
    """Adds up the bytes of the tensors that operations read and write; tables as read whole."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        returns = func._schema.returns
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        if not is_view and "empty" not in func.__name__:
            # Targets are only written, and are the result.
            written = {
                a.name
                for a in func._schema.arguments
                if a.kwarg_only and a.alias_info is not None and a.alias_info.is_write
            }
            read = {k: v for k, v in (kwargs or {}).items() if k not in written}
            first = 1 if func._schema.name in WRITE_ONLY else 0
            self.total += sum(map(_bytes, tree_leaves((args[first:], read, out))))
        return out


def _bytes(value: Any) -> int:
    if not isinstance(value, Tensor):
        return 0
    # An expanded tensor repeats what lies in memory once.
    return min(value.numel() * value.element_size(), value.untyped_storage().nbytes())


def product_rate(hardware: Hardware) -> float:
    """Operations a second of a large square matrix product in the run's precision."""
    size = 8192 if hardware.device.type == "cuda" else 2048
    a, b = torch.randn(2, size, size, device=hardware.device)
    with hardware.autocast():
        dtype = (a[:1, :1] @ b[:1, :1]).dtype
    a, b = a.to(dtype), b.to(dtype)
    return 2 * size**3 / best_time(lambda: a @ b, hardware)


def copy_rate(hardware: Hardware) -> float:
    """Bytes a second, read and written, of a copy that no cache holds."""
    source = torch.ones(2**28 if hardware.device.type == "cuda" else 2**26, device=hardware.device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / best_time(lambda: target.copy_(source), hardware)


def best_time(run: Callable[[], object], hardware: Hardware) -> float:
    """Seconds of the fastest of a few calls; the first is left out."""
    times = []
    for _ in range(REPEATS + 1):
        hardware.synchronize()
        started = time.perf_counter()
        run()
        hardware.synchronize()
        times.append(time.perf_counter() - started)
    return min(times[1:])


@dataclasses.dataclass(frozen=True)
class Roofline:
    """One step against the machine."""

    step_s: float
    flops: int
    num_bytes: int
    flops_per_s: float
    bytes_per_s: float

    @classmethod
    def of(cls, found: Sequence[Mapping[str, Any]]) -> Roofline:
        """From what `breakdown` returned in each round; times and rates are medians."""
        return cls(
            step_s=statistics.median(sum(r["parts"].values()) for r in found),
            flops=found[0]["flops"],
            num_bytes=found[0]["bytes"],
            flops_per_s=statistics.median(r["flops_per_s"] for r in found),
            bytes_per_s=statistics.median(r["bytes_per_s"] for r in found),
        )

    @property
    def arithmetic_share(self) -> float:
        """Time the operations would take at the product's rate, as a share of the step."""
        return self.flops / self.flops_per_s / self.step_s

    @property
    def memory_share(self) -> float:
        """Time the bytes would take at the copy's rate, as a share of the step."""
        return self.num_bytes / self.bytes_per_s / self.step_s

    def __str__(self) -> str:
        return (
            f"{self.flops / 1e9:,.1f} GFLOP at {self.flops_per_s / 1e9:,.0f} GFLOP/s are "
            f"{100 * self.arithmetic_share:.0f} % of the step, {self.num_bytes / 1e9:,.2f} GB at "
            f"{self.bytes_per_s / 1e9:,.1f} GB/s {100 * self.memory_share:.0f} %: share of the "
            f"roofline reached {100 * max(self.arithmetic_share, self.memory_share):.0f} %"
        )


ORDER = (
    "data", "forward: embedding", "forward: mixer", "forward: feed", "forward: norms",
    "forward: head", "forward: other", "loss", "optimiser", "logging",
)  # fmt: skip


def _place(part: str) -> tuple[int, str]:
    return next(i for i, start in enumerate(ORDER) if part.startswith(start)), part


def breakdown_rows(rounds: dict[str, list[dict[str, Any]]]) -> list[list[str]]:
    """Shares of the step in percent, median over the rounds, and range; models as columns.

    Each row starts with its part.
    """
    names = {part for found in rounds.values() for part in found[0]["parts"]}
    lines = []
    for part in sorted(names, key=_place):
        line = [part]
        for found in rounds.values():
            shares = [100 * r["parts"][part] / sum(r["parts"].values())
                      for r in found if part in r["parts"]]  # fmt: skip
            text = f"{statistics.median(shares):.1f}" if shares else ""
            if len(shares) > 1:
                text += f" ({min(shares):.1f} to {max(shares):.1f})"
            line.append(text)
        lines.append(line)
    steps = {m: [1000 * sum(r["parts"].values()) for r in found] for m, found in rounds.items()}
    lines.append(["step, ms", *(f"{statistics.median(s):.1f}" for s in steps.values())])
    if BASELINE in steps:
        ratios = {m: [b / s for b, s in zip(steps[BASELINE], own, strict=True)]
                  for m, own in steps.items()}  # fmt: skip
        lines.append(["times softmax's speed", *(ratio_text(r) for r in ratios.values())])
    return lines
