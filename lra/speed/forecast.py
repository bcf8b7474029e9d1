"""What a run will take: a few of its steps, timed before it starts, and the rest by arithmetic.

The rows have random ids and no padding, and are as long as the run's batches will be. What a step
costs beside the model's own work (data, logging) is left out; so are starting and preparing data.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean

import torch

from lra.build import make_model, make_task
from lra.config import RunConfig
from lra.console import first_line
from lra.speed.measure import (
    Evaluator,
    Trainer,
    ended_after,
    part,
    peak_memory,
    prefer_as_victim,
    random_batch,
    reset_peak_memory,
    short_row,
)
from lra.tasks.batches import Batch, epoch_order, eval_batches, padded_length
from lra.tasks.cache import prepare
from lra.tasks.task import Task
from lra.training.checkpoint import seed_everything
from lra.training.hardware import Hardware

NUM_TIMED = 3  # steps, each of another length
STEP_S = 0.2  # a timed step has rows for so long, if the batch has as many; see `forecast`
LIMIT_S = 60.0  # for all of it
# On a CPU, of a run beside its steps (data, batches made ahead, records); and how many times what a
# step needs the heap grows to where lengths vary, since the C library keeps what is freed: after
# 1,000 steps of ListOps 1.9 and 1.7 GiB (S4D, linear), where a step needs 0.7 and 0.8.
OWN_BYTES, IN_PIECES = 2**28, 2


@dataclass(frozen=True)
class Forecast:
    """Of a run from its first step to its test; of self-pretraining apart, which runs may share."""

    seconds: float
    memory_bytes: int  # at the peak: of the process, or on a CUDA device of its tensors
    pretrain_seconds: float = 0.0


@dataclass(frozen=True)
class Batches:
    """Padded lengths of a run's batches, shortest first, and examples of an evaluation."""

    train: list[int]
    val: list[int]
    num_val: int
    num_test: int


def batches_of(task: Task, config: RunConfig) -> Batches:
    """Those of the first epoch, and of an evaluation on the validation split.

    Raises:
        ValueError, OSError: the data are not there, or damaged.
    """
    train, longest = config.train, task.max_length
    if task.picture_size:  # all of one length, so data need not be prepared for this
        sizes = getattr(task, "sizes", task.official_sizes)
        num_val, num_test = (sizes.get(split, 0) for split in ("val", "test"))
        return Batches(
            [longest],
            [longest],
            min(num_val, task.limit_val or num_val),
            min(num_test, task.limit_test or num_test),
        )
    data = prepare(task, config.paths.cache)
    lengths, val_lengths = data.train.lengths, data.val.lengths
    order = epoch_order(
        lengths, train.batch_size, seed=0, epoch=0, bucketing=train.length_bucketing
    )
    val_order = eval_batches(val_lengths, config.hardware.micro_batch_size or train.batch_size)

    def padded(length: int) -> int:
        return longest if train.pad_to_max else padded_length(length, longest)

    return Batches(
        sorted(padded(int(lengths[rows].max())) for rows in order),
        sorted(padded(int(val_lengths[rows].max())) for rows in val_order),
        len(data.val), len(data.test),
    )  # fmt: skip


def typical(lengths: Sequence[int]) -> list[int]:
    """NUM_TIMED of some sorted lengths, each in the middle of as many of them."""
    return [lengths[(2 * i + 1) * len(lengths) // (2 * NUM_TIMED)] for i in range(NUM_TIMED)]


def extended(found: Sequence[tuple[int, float]], num_rows: int) -> float:
    """What `num_rows` rows take, on the line through what the fewest and the most rows took.

    What a batch takes once, such as the update of a large table, is so counted once.
    """
    (few, least), (many, most) = found[0], found[-1]
    of_a_row = max(0.0, most - least) / (many - few) if many > few else most / many
    return most + of_a_row * (num_rows - many)


def run_seconds(
    config: RunConfig, batches: Batches, *, step_s: float, example_s: float
) -> tuple[float, float]:
    """Seconds of a run's steps and evaluations, and those of its self-pretraining.

    The latter is taken to cost as much an example as training.

    Args:
        step_s: of a training step.
        example_s: of an example in an evaluation.
    """
    train, pretrain = config.train, config.pretrain
    num_evaluations, first = -(-train.num_steps // train.eval_every), 0.0
    seconds = train.num_steps * step_s
    seconds += (num_evaluations * batches.num_val + batches.num_test) * example_s
    if pretrain.objective != "none":
        num_evaluations = -(-pretrain.num_steps // pretrain.eval_every)
        first = pretrain.num_examples / train.batch_size * step_s
        first += num_evaluations * batches.num_val * example_s
    return seconds, first


def forecast(config: RunConfig, job_number: int) -> Forecast:
    """Measure in this process, which has to be fresh.

    Raises:
        ValueError: the hardware or the data are not there, or the run is of a kind that a few steps
            say nothing about.
        RuntimeError, MemoryError: what a step raises, for want of memory, say.
    """
    if config.hardware.compile or config.hardware.num_devices > 1:
        raise ValueError("compiled, or on several devices")
    hardware = Hardware(config.hardware, job_number)
    task = make_task(config)
    batches = batches_of(task, config)
    seed_everything(config.seed)
    model = make_model(config, task).to(hardware.device)
    whole = config.train.batch_size
    at_once = min(config.hardware.micro_batch_size or whole, whole)
    batch = random_batch(task, at_once, config.seed).to(hardware.device)

    def timed(step: Callable[[Batch], None], rows: Batch) -> float:
        hardware.synchronize()
        started = time.perf_counter()
        step(rows)
        hardware.synchronize()
        return time.perf_counter() - started

    def of_whole(step: Callable[[Batch], None], lengths: list[int]) -> float:
        """Seconds of a batch of `whole` rows: what a row costs so often, the rest once."""
        sizes = few, num_rows
        return mean(
            extended([(n, timed(step, part(batch, n, length))) for n in sizes], whole)
            for length in typical(lengths)
        )

    trainer, evaluator = Trainer(model, config, hardware), Evaluator(model, config, hardware)
    model.train()
    trainer(short_row(batch))  # loads what is loaded late
    before = reset_peak_memory(hardware)
    few = num_rows = min(torch.get_num_threads(), at_once)  # some models give each thread a row
    peaks: list[tuple[int, float]] = []
    while True:
        step_s = timed(trainer, part(batch, num_rows, batches.train[-1]))
        peaks.append((num_rows, peak_memory(hardware, before)))
        if num_rows == at_once or step_s >= (20 * STEP_S if num_rows == few else STEP_S):
            break
        num_rows = min((4 if step_s < STEP_S else 2) * num_rows, at_once)
    memory_bytes = before + int(extended(peaks, at_once))
    if hardware.device.type == "cpu":
        varies = batches.train[0] < batches.train[-1]
        memory_bytes += OWN_BYTES + (memory_bytes - before) * (IN_PIECES - 1) * varies
    step_s = of_whole(trainer, batches.train)
    model.eval()
    evaluator(part(batch, num_rows, batches.val[-1]))
    example_s = of_whole(evaluator, batches.val) / whole
    seconds, first = run_seconds(config, batches, step_s=step_s, example_s=example_s)
    return Forecast(seconds, memory_bytes, first)


def print_forecasts(configs: Mapping[str, RunConfig], at_a_time: int) -> None:
    """Print a JSON line with the forecasts of each config, or why there is none, under its name.

    Each is made in forks of this process: their memory is their own and they may fail alone. As
    many as jobs at a time work side by side, and slow each other as these will. This process must
    not have computed anything: threads and devices do not outlive a fork.
    """
    for name, config in configs.items():
        for number in range(at_a_time):
            if os.fork():
                continue
            try:
                prefer_as_victim()
                with ended_after(LIMIT_S):
                    found = asdict(forecast(config, number))
            except Exception as error:
                found = {"error": first_line(error)}
            # In one piece, as lines of several processes on one pipe have to be.
            os.write(1, (json.dumps({f"{name} {number}": found}) + "\n").encode())
            os._exit(0)
        for _ in range(at_a_time):
            os.wait()
