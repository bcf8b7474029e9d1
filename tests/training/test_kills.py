"""SIGKILL at random moments: what is started again often enough ends as if undisturbed."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from lra.results import records
from lra.training import checkpoint
from tests.test_cli import ROOT, timeless

pytestmark = pytest.mark.slow
SEED = random.SystemRandom().randrange(2**32)  # printed by pytest if a test fails


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """A process group of its own, so that a kill leaves no process behind."""
    return subprocess.Popen(
        [sys.executable, str(ROOT / "run.py"), *arguments], cwd=folder, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip


def kill(process: subprocess.Popen[str]) -> bool:
    """SIGKILL the whole group; False if the process had ended before."""
    alive = process.poll() is None
    if alive:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    return alive


def finish(folder: Path, *arguments: str) -> str:
    process = start(folder, *arguments)
    out, _ = process.communicate(timeout=1200)
    assert process.returncode == 0, out
    return out


def final_weights(folder: Path) -> dict[str, torch.Tensor]:
    (run,) = folder.glob("outputs/listops-*")
    weights: dict[str, torch.Tensor] = checkpoint.read(
        checkpoint.checkpoints(run / "checkpoints")[0]
    )["model"]
    return weights


def records_of(folder: Path) -> dict[Path, records.Record]:
    base = folder / "outputs/results"
    return {p.relative_to(base): records.load(p) for p in base.glob("runs/*/*/*.json")}


def test_twenty_kills_half_of_them_in_a_checkpoint_write(tmp_path: Path) -> None:
    print("random seed", SEED)
    rng = random.Random(SEED)
    arguments = [
        "experiment=smoke", "task=listops", "model=luna", "task.max_length=200", "shape.d_ff=1024",
        "task.min_tree_length=20", "task.max_tree_length=190", "train.num_steps=200",
        "train.eval_every=20", "train.checkpoint_every=1", "hardware.num_threads=1",
        "hardware.num_workers=1",
    ]  # fmt: skip
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    finish(whole, *arguments)
    kills = in_write = in_time = 0
    while kills < 20:
        process = start(cut, *arguments)
        newest = max((checkpoint.step_of(p) for p in cut.glob("outputs/*/checkpoints/step-*.pt")),
                     default=0)  # fmt: skip
        writing = kills % 2 == 0
        delay = rng.uniform(0, 6)
        started = time.monotonic()
        # A kill in a write waits for a few new checkpoints first, so that the runs get on.
        enough = newest + rng.randrange(1, 8)
        while process.poll() is None:
            if not writing and time.monotonic() - started > delay:
                break
            if writing and any(
                int(m[1]) > enough
                for p in cut.glob("outputs/*/checkpoints/.step-*.tmp")
                if (m := re.match(r"\.step-(\d+)", p.name))
            ):
                break
            time.sleep(0.0005)
        assert kill(process), f"the run ended after {kills} kills; more steps are needed"
        left = list(cut.glob("outputs/*/checkpoints/.*.tmp"))
        kills, in_write, in_time = kills + 1, in_write + bool(left), in_time + (not writing)
    assert in_write >= 5 and in_time == 10
    finish(cut, *arguments)
    print(f"{kills} kills, {in_write} left a half-written checkpoint")
    expected, got = final_weights(whole), final_weights(cut)
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[name], got[name]) for name in expected)
    assert not list(cut.glob("outputs/**/.*.tmp"))
    (path, record), (again, same) = *records_of(whole).items(), *records_of(cut).items()
    assert path == again and timeless(record) == timeless(same)


def test_a_sweep_of_twelve_killed_five_times(tmp_path: Path) -> None:
    print("random seed", SEED)
    rng = random.Random(SEED)
    arguments = [
        "-m", "experiment=smoke", "task=listops", "model=softmax,luna,nystromformer,fastformer",
        "seed=0,1,2", "task.max_length=200", "task.min_tree_length=20",
        "task.max_tree_length=190", "train.checkpoint_every=5", "hardware.num_threads=1",
    ]  # fmt: skip
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    started = time.monotonic()
    finish(whole, *arguments)
    duration = time.monotonic() - started
    finished: dict[Path, int] = {}
    # Restarts only delay the jobs, so the sweep cannot have ended before the last of these.
    moments = sorted(rng.uniform(0.03, 0.9) for _ in range(5))

    def written() -> dict[Path, int]:
        return {p: p.stat().st_mtime_ns for p in cut.glob("outputs/results/runs/*/*/*.json")}

    for before, moment in zip([0.0, *moments], moments, strict=False):
        process = start(cut, *arguments)
        time.sleep((moment - before) * duration)
        assert kill(process), f"the sweep ended before {moment:.2f} of its time"
        now = written()
        assert finished.items() <= now.items(), "a finished job was run again"
        finished = now
        print(f"killed at {moment:.2f}: {len(now)} of 12 jobs had ended")
    out = finish(cut, *arguments)
    assert finished.items() <= written().items() and out.count("nothing to do") == len(finished)
    expected, got = records_of(whole), records_of(cut)
    assert len(expected) == 12 and expected.keys() == got.keys()
    for path, record in expected.items():
        assert timeless(record) == timeless(got[path]), path
