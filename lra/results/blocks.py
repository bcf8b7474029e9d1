"""The blocks of a record, each made from the plain numbers of a run."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lra.results.records import Point, RunResult, SplitResult, pack_correct
from lra.values import convert


def data_block(
    source: str,
    fingerprint: str,
    num_examples: Mapping[str, int],
    reports: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """Which data it was, and what of them was cut or left out.

    Args:
        num_examples: by split.
        reports: what the cache's meta.json says of each split.
    """
    return {
        "source": source,
        "fingerprint": fingerprint,
        "num_examples": dict(num_examples),
        "truncated": {split: reports[split]["truncated"] for split in num_examples},
        "skipped": {split: len(reports[split]["skipped"]) for split in num_examples},
    }


def result_block(
    step: int,
    *,
    val_accuracy: float,
    val_loss: float,
    num_val: int,
    test_accuracy: float,
    test_loss: float,
    test_correct_N: np.ndarray,
) -> RunResult:
    """Numbers of the selected step; accuracies are fractions."""
    test_bits = pack_correct(test_correct_N)
    return RunResult(
        step=step,
        val=SplitResult(val_accuracy, val_loss, num_val),
        test=SplitResult(test_accuracy, test_loss, len(test_correct_N), test_bits),
    )


def speed_block(
    *,
    wall_time_s: float | None,
    train_time_s: float = 0.0,
    eval_time_s: float | None = None,
    steps: int = 0,
    examples: int = 0,
    tokens: int = 0,
    max_lr: float | None = None,
) -> dict[str, float | None]:
    """Rates over the timed steps; null where no step was timed.

    Args:
        wall_time_s: of the whole run, data and evaluations included; starts that were killed are
            not known, and left out. None: nobody knows.
        train_time_s, steps, examples, tokens: of the timed steps alone.
        eval_time_s: of all evaluations on the validation split.
    """
    seconds = train_time_s if steps else None

    def rate(count: int) -> float | None:
        return count / seconds if seconds else None

    return {
        "steps_per_s": rate(steps),
        "examples_per_s": rate(examples),
        "tokens_per_s": rate(tokens),
        "train_time_s": seconds,
        "eval_time_s": eval_time_s,
        "wall_time_s": wall_time_s,
        "max_lr": max_lr,
    }


def curve_block(points: list[dict[str, Any]]) -> list[Point]:
    """Evaluations on the validation split, in their order."""
    made: list[Point] = convert(points, list[Point], "curve")
    return made


def curve_so_far(metrics: Path) -> list[Point]:
    """The same of a run that came to no result, from its metrics.jsonl."""
    rows = []
    if metrics.exists():
        for line in metrics.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                row = json.loads(line)
                if row.pop("split") == "val":
                    rows.append(row)
    return curve_block(rows)
