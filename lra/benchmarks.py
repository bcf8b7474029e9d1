"""Benchmark records: speed and memory by sequence length, one JSON file per device and setting.

`results/benchmarks/<name>.json` holds what `Benchmark` declares. All cells of one file were
measured on one device in one precision with one batch size, so they may be compared.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lra.config import fill

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class BenchmarkCell:
    """One model at one length. A step handles `batch_size` sequences of `length` tokens."""

    model: str
    length: int
    mode: Literal["train", "inference"]
    steps_per_s: float | None  # None unless status is ok
    tokens_per_s: float | None
    peak_memory_bytes: int | None  # None where it is not counted (CPU)
    status: Literal["ok", "out_of_memory", "too_slow"]
    spread: float | None = None  # (slowest - fastest) / median of the repeats

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"length={self.length}: expected at least 1")
        for name in ("steps_per_s", "tokens_per_s"):
            value = getattr(self, name)
            if (value is None) == (self.status == "ok") or (value is not None and not value > 0):
                raise ValueError(
                    f"{name}={value}: expected a number above 0 if status is ok, or null"
                )


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
        threads = f", {self.threads} threads" if self.device == "cpu" and self.threads else ""
        return f"{self.hardware}, {self.precision}, batch {self.batch_size}{threads}"

    def series(self, model: str, mode: str) -> list[BenchmarkCell]:
        """One model's cells by length."""
        cells = [c for c in self.cells if (c.model, c.mode) == (model, mode)]
        return sorted(cells, key=lambda c: c.length)


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
