"""Made-up records for the tests of tables, page and record tools."""

from __future__ import annotations

from typing import Any

import numpy as np

from lra.config import config_hash
from lra.records import Protocol, Record, RunResult, SplitResult, pack_correct

NUM_TEST = {"listops": 2000, "text": 25000, "retrieval": 17437, "image": 10000,
            "pathfinder": 20000, "pathx": 20000}  # fmt: skip
ACCURACY = {"listops": 0.37, "text": 0.65, "retrieval": 0.79, "image": 0.42,
            "pathfinder": 0.72, "pathx": 0.501}  # fmt: skip
STEPS = {"listops": 5000, "text": 20000, "retrieval": 30000, "image": 35000,
         "pathfinder": 62400, "pathx": 62400}  # fmt: skip
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
    **fields: Any,
) -> Record:
    """One record; `overrides` are dotted keys that go into config and command line alike."""
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
    for key, value in (overrides or {}).items():
        *groups, name = key.split(".")
        inner = config
        for group in groups:
            inner = inner[group]
        inner[name] = value
        given.append(f"{key}={value}")
    digest = config_hash(config)
    if accuracy is None:
        accuracy = ACCURACY[task]
    n = NUM_TEST[task]
    if correct is None:
        # The first so many are right: exact accuracy, and any two runs overlap.
        correct = np.arange(n) < round(accuracy * n)
    test = SplitResult(accuracy, 1.5, n, pack_correct(correct))
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
    return Record(**values | fields)
