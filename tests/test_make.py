"""What `make run` installs, and what only comes with the targets that need it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.skipif(shutil.which("make") is None, reason="no make here")
def test_a_run_installs_its_own_part_and_tests_the_rest(tmp_path: Path) -> None:
    def installs(*words: str) -> list[str]:
        done = subprocess.run(
            ["make", "-n", f"VENV={tmp_path}", f"PYTHON={sys.executable}", *words],
            cwd=ROOT, check=True, capture_output=True, text=True,
        )  # fmt: skip
        lines = [line for line in done.stdout.splitlines() if "-m pip install" in line]
        assert all("--constraint constraints.txt" in line for line in lines)
        return [line.split()[-1] for line in lines]

    core = "'.[tables]'"
    everything = "'.[dev,tables,floors,hub,wandb,tensorboard,parallel,slurm,tune,bench]'"
    for target in ("run", "tables", "tables-check", "sweep", "bench"):
        assert installs(target) == [core]
    for target in ("test", "test-slow", "lint", "setup", "data"):
        assert installs(target) == [core, everything]
    (tmp_path / ".core").touch()
    assert installs("run") == [] and installs("test") == [everything]
    (tmp_path / ".everything").touch()
    assert installs("run") == installs("test") == installs("lint", "test", "run") == []
    for changed in ("pyproject.toml", "constraints.txt"):
        assert installs("-W", changed, "run") == [core]
        assert installs("-W", changed, "test") == [core, everything]
