"""Benchmark records: speed and memory by sequence length, one JSON file per device and setting.

`results/benchmarks/<name>.json` holds what `Benchmark` declares. All cells of one file were
measured on one device in one precision with one batch size, so they may be compared. A file comes
from one call of scripts/benchmark.py: several rounds, each of which measures every cell once, so
that a ratio compares what ran in the same minutes.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from lra.files import write_atomically
from lra.values import fill

SCHEMA_VERSION = 1
BASELINE = "softmax"  # the model that ratios refer to

Mode = Literal["train", "inference"]
Status = Literal["ok", "out_of_memory", "too_slow"]


class Key(NamedTuple):
    """Which cell."""

    model: str
    length: int
    mode: Mode


@dataclass(frozen=True)
class Measurement:
    """One cell in one round; figures are None unless status is ok."""

    status: Status
    steps_per_s: float | None = None
    peak_memory_bytes: int | None = None


@dataclass(frozen=True)
class BenchmarkCell:
    """One model at one length. A step handles `batch_size` sequences of `length` tokens."""

    model: str
    length: int
    mode: Mode
    steps_per_s: float | None  # median of the rounds; None unless status is ok
    tokens_per_s: float | None
    peak_memory_bytes: int | None  # None where it was not counted; see lra/speed/measure.py
    status: Status
    spread: float | None = None  # of steps_per_s: (largest - smallest) / median of the rounds
    repeats: int | None = None  # rounds
    ratio_to_softmax: float | None = None  # median over the rounds of steps_per_s over softmax's
    ratio_spread: float | None = None  # of these ratios

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"length={self.length}: expected at least 1")
        if self.ratio_to_softmax is not None and not self.ratio_to_softmax > 0:
            raise ValueError(f"ratio_to_softmax={self.ratio_to_softmax}: expected above 0")
        for name in ("steps_per_s", "tokens_per_s"):
            value = getattr(self, name)
            if (value is None) == (self.status == "ok") or (value is not None and not value > 0):
                raise ValueError(
                    f"{name}={value}: expected a number above 0 if status is ok, or null"
                )


@dataclass(frozen=True)
class Limits:
    """What a CPU does with so many threads; lra/speed/limits.py says what each figure is."""

    threads: int
    large_product_gflops: float
    small_products_gflops: float
    medium_products_gflops: float
    copy_gb_per_s: float
    softmax_ns: float
    draw_ns: float


@dataclass(frozen=True)
class Benchmark:
    """One file."""

    schema_version: int
    device: Literal["cpu", "cuda"]
    hardware: str  # what the device calls itself
    precision: str
    threads: int | None
    batch_size: int
    cells: list[BenchmarkCell]
    environment: dict[str, Any]
    name: str = ""  # the file's
    task: str = ""  # whose vocabulary and classes; the tokens are random
    recipe: str = ""  # whose sizes and optimiser
    repeats: int | None = None
    max_step_s: float | None = None  # a step that takes longer is too slow
    overrides: list[str] = field(default_factory=list)  # words of the command, without paths
    load_average: float | None = None  # over a minute, at the start
    started_at: str = ""
    finished_at: str = ""
    limits: list[Limits] = field(default_factory=list)  # none of a CUDA device
    l2_bytes: int | None = None  # size of a core's second cache

    def __post_init__(self) -> None:
        if self.schema_version != SCHEMA_VERSION:
            raise ValueError(f"schema_version={self.schema_version}: expected {SCHEMA_VERSION}")
        keys = [(c.model, c.length, c.mode) for c in self.cells]
        twice = {k for k in keys if keys.count(k) > 1}
        if twice:
            raise ValueError(f"cells: measured twice: {sorted(twice)}")

    @property
    def title(self) -> str:
        """What makes the numbers what they are."""
        several = "s" if self.threads != 1 else ""
        count = f", {self.threads} thread{several}"
        threads = count if self.device == "cpu" and self.threads else ""
        settings = "".join(f", {k} {v}" for k in ("recipe", "task") if (v := getattr(self, k)))
        return f"{self.hardware}, {self.precision}, batch {self.batch_size}{threads}{settings}"

    def series(self, model: str, mode: str) -> list[BenchmarkCell]:
        """One model's cells by length."""
        cells = [c for c in self.cells if (c.model, c.mode) == (model, mode)]
        return sorted(cells, key=lambda c: c.length)

    def to_json(self) -> str:
        """The file's text; the name is the file's own."""
        values = dataclasses.asdict(self)
        del values["name"]
        return json.dumps(values, indent=1) + "\n"


def summarise(
    rounds: Sequence[Mapping[Key, Measurement]], num_sequences: int, batch_size: int
) -> list[BenchmarkCell]:
    """Medians and spreads over the rounds; ratios are taken inside each round.

    A cell that failed in any round has that status. An example has `num_sequences` of the length.
    """
    cells = []
    for key in dict.fromkeys(key for measured in rounds for key in measured):
        found = [measured[key] for measured in rounds if key in measured]
        failed = next((m.status for m in found if m.status != "ok"), None)
        if failed:
            cells.append(BenchmarkCell(*key, None, None, None, failed))
            continue
        speeds = [m.steps_per_s for m in found if m.steps_per_s is not None]
        memory = [m.peak_memory_bytes for m in found if m.peak_memory_bytes is not None]
        speed = statistics.median(speeds)
        ratios = ratios_to(BASELINE, key, rounds) if key.model != BASELINE else [1.0]
        cells.append(
            BenchmarkCell(
                *key,
                steps_per_s=speed,
                tokens_per_s=speed * batch_size * key.length * num_sequences,
                peak_memory_bytes=max(memory, default=None),
                status="ok",
                spread=spread(speeds),
                repeats=len(speeds),
                ratio_to_softmax=statistics.median(ratios) if ratios else None,
                ratio_spread=spread(ratios),
            )
        )
    return cells


def ratios_to(model: str, key: Key, rounds: Sequence[Mapping[Key, Measurement]]) -> list[float]:
    """Speed over that of `model` in the same cell, in each round that measured both."""
    ratios = []
    for measured in rounds:
        ours, theirs = measured.get(key), measured.get(key._replace(model=model))
        if ours and theirs and ours.steps_per_s and theirs.steps_per_s:
            ratios.append(ours.steps_per_s / theirs.steps_per_s)
    return ratios


def spread(values: Sequence[float]) -> float | None:
    """(largest - smallest) / median; None for fewer than two values."""
    if len(values) < 2:
        return None
    return (max(values) - min(values)) / statistics.median(values)


def ratio_text(ratios: Sequence[float]) -> str:
    """Median and, of several rounds, spread."""
    width = spread(ratios)
    return f"{statistics.median(ratios):.2f}" + (
        "" if width is None else f" (spread {100 * width:.0f} %)"
    )


def save(benchmark: Benchmark, results_dir: Path) -> Path:
    """Write `results/benchmarks/<name>.json` as a whole."""
    path = results_dir / "benchmarks" / f"{benchmark.name}.json"
    write_atomically(path, benchmark.to_json())
    return path


def load_benchmarks(results_dir: Path) -> tuple[list[Benchmark], list[str]]:
    """All readable benchmark records, by name, and a warning for each file that is not one."""
    benchmarks, warnings = [], []
    for path in sorted((results_dir / "benchmarks").glob("*.json")):
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(values, dict):
                raise ValueError("expected a JSON object")
            benchmarks.append(fill(Benchmark, values | {"name": path.stem}))
        except (ValueError, RecursionError) as error:
            warnings.append(f"skipped {path}: {error}")
    return benchmarks, warnings


def slope(lengths: list[int], values: list[float]) -> float | None:
    """Growth exponent: least squares in log-log over the longer half, at least three lengths."""
    if len(lengths) < 3:
        return None
    start = min(len(lengths) // 2, len(lengths) - 3)
    return float(np.polyfit(np.log(lengths[start:]), np.log(values[start:]), 1)[0])
