"""Sweeps through the real command line: failures, restarts, launchers."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lra import records
from lra.sweep import Outcome, has_failed, note, outcomes, summary
from tests.test_cli import ROOT, TINY, start

# Fails, diverges or runs out of memory, by seed; keyed on the process's own seeding.
TROUBLE = """
import os, signal, torch
from models.softmax import SoftmaxAttention

class Trouble(SoftmaxAttention):
    def forward(self, x_BLD, mask_BL):
        y_BLD = super().forward(x_BLD, mask_BL)
        if self.training:
            seed = torch.initial_seed()
            if seed == 1:
                raise RuntimeError("injected")
            if seed == 2:
                return y_BLD * float("nan")
            if seed == 3:
                raise torch.OutOfMemoryError("injected")
        return y_BLD
"""


def sweep(folder: Path, *arguments: str, timeout: float = 300) -> tuple[int, str, str]:
    (folder / "trouble.py").write_text(TROUBLE)
    process = subprocess.run(
        [sys.executable, str(ROOT / "run.py"), "-m", *TINY, *arguments],
        cwd=folder, capture_output=True, text=True, timeout=timeout,
        env=os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"},
    )  # fmt: skip
    return process.returncode, process.stdout, process.stderr


def found(folder: Path, model: str) -> dict[int, records.Record]:
    paths = (folder / "outputs/results/runs/listops" / model).glob("*.json")
    return {r.seed: r for r in map(records.load, paths)}


BAD = ["model=softmax", "model._target_=trouble.Trouble"]


def test_failures_are_recorded_at_once_and_the_others_go_on(tmp_path: Path) -> None:
    code, out, _ = sweep(tmp_path, *BAD, "seed=0,1,2,3,4")
    assert code == 4  # the worst of the jobs' own codes
    by_seed = found(tmp_path, "trouble")
    good = ("completed", "at_chance")
    assert by_seed[0].status in good and by_seed[4].status in good
    assert [by_seed[s].status for s in (1, 2, 3)] == ["failed", "diverged", "out_of_memory"]
    folder = tmp_path / "outputs" / by_seed[1].run_id
    assert "RuntimeError: injected" in (folder / "traceback.txt").read_text()
    tail = out.strip().splitlines()[-6:]
    assert [line.split()[0] for line in tail[:-1]] == ["0", "1", "2", "3", "4"]
    assert tail[-1].startswith("5 jobs: ") and "1 failed" in tail[-1] and "1 diverged" in tail[-1]


def test_fail_fast_starts_no_further_job(tmp_path: Path) -> None:
    code, out, _ = sweep(tmp_path, *BAD, "seed=1,0,4", "sweep.fail_fast=true")
    assert code == 1 and "2 skipped" in out
    assert set(found(tmp_path, "trouble")) == {1}


def test_a_refused_job_does_not_stop_the_sweep(tmp_path: Path) -> None:
    code, out, err = sweep(tmp_path, "shape.num_heads=5,2", "shape.d_model=16")
    assert code == 2 and "shape.num_heads=5 does not divide" in err
    assert "1 refused" in out and len(found(tmp_path, "luna")) == 1


def test_a_killed_sweep_goes_on_where_it_was(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "cut").mkdir()
    assert sweep(tmp_path / "whole", "seed=0,1,2")[0] == 0
    arguments = ["-m", *TINY, "seed=0,1,2"]
    process = start(tmp_path / "cut", *arguments)
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and not list(
        (tmp_path / "cut").glob("outputs/*seed1*/metrics.jsonl")
    ):
        time.sleep(0.005)
    process.kill()
    process.communicate()
    (first,) = (tmp_path / "cut").glob("outputs/results/runs/listops/luna/*seed0*.json")
    written = first.stat().st_mtime_ns
    code, out, _ = sweep(tmp_path / "cut", "seed=0,1,2")
    assert code == 0 and "seed0" in out and "nothing to do" in out
    assert first.stat().st_mtime_ns == written
    whole, cut = found(tmp_path / "whole", "luna"), found(tmp_path / "cut", "luna")
    assert set(cut) == {0, 1, 2}
    for seed, record in whole.items():
        assert record.result == cut[seed].result and record.curve == cut[seed].curve


def test_long_and_odd_overrides_give_short_safe_folder_names(tmp_path: Path) -> None:
    odd = tmp_path / "a path with blanks, ä and $"
    odd.mkdir()
    many = [f"train.log_every={n}" for n in range(1, 26)]
    code, _, err = sweep(odd, *many, "paths.cache='x y/ü'")
    assert code == 0, err
    (folder,) = odd.glob("outputs/listops-*")
    assert len(folder.name) < 100 and folder.name.replace("-", "").isalnum()


@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_parallel_launchers(tmp_path: Path, launcher: str) -> None:
    pytest.importorskip(f"hydra_plugins.hydra_{launcher.split('_')[0]}_launcher")
    extra = (
        ["hydra.launcher.n_jobs=2"] if launcher == "joblib" else ["hydra.launcher.timeout_min=5"]
    )
    code, out, err = sweep(tmp_path, *BAD, f"hydra/launcher={launcher}", *extra, "seed=0,1,4")
    assert code == 1, err
    by_seed = found(tmp_path, "trouble")
    assert {s: r.status == "failed" for s, r in by_seed.items()} == {0: False, 1: True, 4: False}
    assert "3 jobs: " in out and "1 failed" in out
    if launcher == "joblib":
        assert by_seed[0].hardware["num_threads"] == 1  # TINY asks for it


def test_outcomes_in_a_folder(tmp_path: Path) -> None:
    note(tmp_path, Outcome(10, "completed", 0, "run-b", 0.5))
    note(tmp_path, Outcome(2, "completed", 0, "run-a", 0.25))
    assert [o.number for o in outcomes(tmp_path)] == [2, 10] and not has_failed(tmp_path)
    note(tmp_path, Outcome(3, "failed", 1, message="why"))
    assert has_failed(tmp_path)
    text = summary(outcomes(tmp_path), 4)
    assert "50.00" in text and "why" in text and "1 without an outcome" in text
