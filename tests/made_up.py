"""Made-up records for the tests of tables, page and record tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np

from lra.config import config_hash
from lra.results.probes import Influence, Probes, Shuffle, Window
from lra.results.records import (
    Pretraining,
    Protocol,
    Record,
    RunResult,
    SplitResult,
    Told,
    pack_correct,
)

NUM_TEST = {"listops": 2000, "text": 25000, "retrieval": 17437, "image": 10000,
            "pathfinder": 20000, "pathx": 20000, "digitsum": 1000}  # fmt: skip
ACCURACY = {"listops": 0.37, "text": 0.65, "retrieval": 0.79, "image": 0.42,
            "pathfinder": 0.72, "pathx": 0.501, "digitsum": 0.9}  # fmt: skip
STEPS = {"listops": 5000, "text": 20000, "retrieval": 30000, "image": 35000,
         "pathfinder": 62400, "pathx": 62400, "digitsum": 2000}  # fmt: skip
TARGETS = {"softmax": "models.softmax.SoftmaxAttention", "luna": "models.luna.LunaEncoder"}


def make_record(
    task: str = "listops",
    model: str = "luna",
    seed: int = 0,
    accuracy: float | None = None,
    *,
    recipe: str = "nystromformer",
    status: str = "completed",
    data: str = "files",
    budget: str = "full",
    overrides: dict[str, Any] | None = None,
    correct: np.ndarray | None = None,
    pretrain: Literal["masked", "next"] | None = None,
    **fields: Any,
) -> Record:
    """One record; `overrides` are dotted keys that go into config and command line alike.

    With `pretrain` the phase before has as many steps, unless `overrides` say otherwise.
    """
    config: dict[str, Any] = {
        "seed": seed,
        "recipe": recipe,
        "task": {"_target_": f"lra.tasks.{task}.Task", "max_length": 2000, "source": "auto"},
        "model": {"_target_": TARGETS.get(model, f"models.{model}.Model"), "tie_kv": False},
        "shape": {"d_model": 64, "num_heads": 2, "num_layers": 2},
        "train": {"num_steps": STEPS[task], "batch_size": 32, "lr": 1e-4, "selection": "best_val"},
        "hardware": {"device": "cpu"},
        "paths": {"data": "data"},
    }
    if model == "luna":
        config["model"]["projection_length"] = 16
    given = [f"model={model}", f"task={task}", f"seed={seed}"]
    if pretrain:
        config["pretrain"] = {"objective": pretrain, "num_steps": STEPS[task], "batch_size": 32,
                              "mask_rate": 0.1 if pretrain == "masked" else None,
                              "lr": 1e-3}  # fmt: skip
        given.append(f"pretrain={pretrain}")
    for key, value in (overrides or {}).items():
        *groups, name = key.split(".")
        inner = config
        for group in groups:
            inner = inner.setdefault(group, {})
        inner[name] = value
        given.append(f"{key}={value}")
    digest = config_hash(config)
    if accuracy is None:
        accuracy = ACCURACY[task]
    n = NUM_TEST[task]
    if correct is None and abs(accuracy * n - round(accuracy * n)) < 1e-6:
        # The first so many are right, so any two runs overlap. A printed figure that no number of
        # examples gives stands alone.
        correct = np.arange(n) < round(accuracy * n)
    bits = None if correct is None else pack_correct(correct)
    test = SplitResult(accuracy if correct is None else float(correct.mean()), 1.5, n, bits)
    result = RunResult(STEPS[task] // 2, SplitResult(min(accuracy + 0.01, 1), 1.4, n), test)
    finished = status in ("completed", "at_chance")
    values: dict[str, Any] = {
        "schema_version": 1,
        "run_id": f"{task}-{model}-seed{seed}-{digest[:8]}",
        "status": status,
        "task": task,
        "model": model,
        "recipe": recipe,
        "seed": seed,
        "config": config,
        "config_hash": digest,
        "overrides": given,
        "protocol": Protocol(data, budget, "val", "best_val", 2000),  # type: ignore[arg-type]
        "data": {"source": f"data/{task}", "fingerprint": f"{task}0123456789"},
        "num_params": 200_000,
        "baseline_params": 190_000,
        "apples_to_apples": True,
        "why_not": [],
        "result": result if finished else None,
        "curve": [
            {"step": s, "train_loss": 2 - i / 10, "val_accuracy": accuracy * (0.6 + 0.04 * i),
             "val_loss": 2 - i / 12, "lr": 1e-4}
            for i, s in enumerate(range(0, STEPS[task] + 1, STEPS[task] // 10))
        ],
        "speed": {"steps_per_s": 10.0, "examples_per_s": 320.0, "tokens_per_s": 320_000.0,
                  "train_time_s": 500.0, "wall_time_s": 600.0},
        "peak_memory_bytes": None,
        "hardware": {"device": "cpu", "name": "Some CPU", "precision": "float32", "num_devices": 1,
                     "num_threads": 4, "micro_batch_size": 32},
        "environment": {"python": "3.12.1", "torch": "2.13.0", "packages": {"numpy": "2.4.0"},
                        "git_commit": "0" * 40, "git_dirty": False},
        "started_at": "2026-01-01T00:00:00+00:00",
        "finished_at": "2026-01-01T01:00:00+00:00",
    }  # fmt: skip
    if pretrain:
        values |= {"apples_to_apples": False,
                   "why_not": [f"pretrain={pretrain}: the arena allows none"]}  # fmt: skip
        values["pretraining"] = Pretraining(
            **config["pretrain"], seed=seed, identity="0" * 64, selection="best validation loss",
            step=STEPS[task], val=Told(1.25, 0.61), speed={}, peak_memory_bytes=None, hardware={},
            curve=[{"step": s, "val_loss": 2 - s / STEPS[task]} for s in (0, STEPS[task])],
        )  # fmt: skip
    return Record(**values | fields)


def sixty_records() -> dict[str, Record]:
    """Sixty records with every case a table must get right, by path under runs/."""
    later = "2026-02-01T00:00:00Z"
    records = [
        make_record(task, model, seed, ACCURACY[task] + (seed - 1) / 100)
        for model in ("softmax", "luna")
        for task in ("listops", "text", "retrieval", "image", "pathfinder")
        for seed in range(3)
    ]
    records += [make_record("pathx", "softmax", seed, status="at_chance") for seed in range(3)]
    records += [make_record("pathx", "luna", 0, status="at_chance"),
                make_record("pathx", "luna", 1, 0.701)]  # fmt: skip
    wide = {"model.projection_length": 128}
    records += [make_record("listops", "luna", seed, 0.38, overrides=wide) for seed in range(2)]
    records += [make_record("text", "luna", 0, 0.66, overrides=wide)]
    records += [make_record(task, "nystromformer", seed, ACCURACY[task] + seed / 50)
                for task in ("listops", "text", "image") for seed in range(2)]  # fmt: skip
    large = {"num_params": 220_000, "apples_to_apples": False,
             "why_not": ["220,000 parameters, +15.8 % over softmax"]}  # fmt: skip
    records += [make_record("listops", "fastformer", seed, **large) for seed in range(3)]
    dirty = make_record().environment | {"git_dirty": True}
    records += [make_record("image", "fastformer", 0, data="generated", environment=dirty)]
    older = make_record("listops", "luna", 0, 0.20, finished_at="2025-12-31T23:00:00-01:00")
    newer = make_record("text", "softmax", 1, 0.68, finished_at=later)
    short = {"train.num_steps": 500}
    stopped = {"curve": make_record().curve[:5]}
    records += [
        make_record("text", "luna", 7, status="diverged", message="step 77: nan", **stopped),
        make_record("image", "luna", 7, status="diverged", curve=[]),
        make_record("pathx", "softmax", 7, status="out_of_memory", curve=[]),
        make_record("listops", "luna", 7, status="interrupted", **stopped),
        make_record("listops", "softmax", 7, status="failed", message="OSError: disk full"),
        make_record("text", "luna", 8, 0.99, data="partial"),
        make_record("text", "luna", 9, 0.98, data="synthetic"),
        make_record("listops", "luna", 6, 0.97, budget="reduced", overrides=short),
        make_record("listops", "softmax", 0, 0.36, recipe="lra"),
        make_record("text", "softmax", 0, 0.651, recipe="luna",
                    protocol=Protocol("files", "full", "test", "best_val", 4000)),
    ]  # fmt: skip
    files = {f"{r.task}/{r.model}/{r.run_id}-{r.recipe}.json": r for r in records}
    files |= {f"{r.task}/{r.model}/again-{r.run_id}.json": r for r in (older, newer)}
    assert len(files) == 60
    return files


def write_sixty(results: Path) -> None:
    """The sixty records and a half-written one."""
    for name, record in sixty_records().items():
        path = results / "runs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(record.to_json(), encoding="utf-8")
    half = make_record("image", "luna", 33).to_json()[:400]
    (results / "runs" / "image" / "luna" / "half-written.json").write_text(half, encoding="utf-8")


def benchmark_values(device: str = "cuda", **fields: Any) -> dict[str, Any]:
    """A benchmark record: softmax quadratic and out of memory at 8192, Luna linear."""
    cells = []
    for mode in ("train", "inference"):
        for model, power in (("softmax", 2), ("luna", 1)):
            for length in (1024, 2048, 4096, 8192):
                ok = not (model == "softmax" and length == 8192)
                steps_per_s = 10 * (1024 / length) ** power if ok else None
                counted = ok and device == "cuda"
                cells.append({
                    "model": model, "length": length, "mode": mode, "steps_per_s": steps_per_s,
                    "tokens_per_s": 8 * length * steps_per_s if steps_per_s else None,
                    "peak_memory_bytes": 1024 * length**power if counted else None,
                    "status": "ok" if ok else "out_of_memory", "spread": 0.02,
                })  # fmt: skip
    values = {"schema_version": 1, "device": device, "hardware": "Some Device", "threads": 4,
              "precision": "float32", "batch_size": 8, "cells": cells,
              "environment": {"torch": "2.13.0"}}  # fmt: skip
    return values | fields


def make_probes(record: Record, *, reach: int | None = None) -> Probes:
    """Probes of a run that needs its first 64 tokens; past `reach` its outputs do not change."""
    accuracy = record.result.test.accuracy if record.result else 0.5
    shown = {size: accuracy * min(1, (2 + size / 16) / 6) for size in (16, 32, 64, 128, 256)}
    windows = [
        Window(size, place, share * much, 0.01)  # type: ignore[arg-type]
        for size, share in shown.items()
        for place, much in (("first", 1), ("last", 0.5), ("best", 1), ("mean", 0.8))
    ]
    shuffles = [Shuffle(block, "blocks", accuracy * 0.6, 0.02) for block in (1, 2, 4)]
    shuffles += [Shuffle(block, "within", accuracy * 0.7, 0.02) for block in (2, 4)]
    influence = []
    for distance in (0, 1, 2, 4, 8, 16, 32):
        change = 0.0 if reach is not None and distance > reach else 0.5 / (1 + distance)
        values = (change, change / 9, 0.01, 0.001, change / 2)
        influence.append(Influence(distance, *(values if distance < 32 else [None] * 5)))
    return Probes(
        run_id=record.run_id, task=record.task, model=record.model,
        fingerprint=record.data["fingerprint"], step=100, seed=0, reach=reach, num_examples=200,
        accuracy=accuracy, error=0.03, seconds=1.5, floors=[], windows=windows, shuffles=shuffles,
        influence=influence, attention=[],
    )  # fmt: skip


def markdown_rows(text: str) -> list[list[str]]:
    """Cells of every table line, bold and escapes undone."""
    lines = [line[2:-2].split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip().replace("**", "").replace("\\", "") for cell in line] for line in lines]
