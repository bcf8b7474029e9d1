"""A new model and a new task by their own files alone: those that CONTRIBUTING.md shows in full."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lra.results import records
from tests import programs
from tests.test_cli import TINY

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
# A file is its path in a line of its own, followed by its content as a block.
FILES = dict(re.findall(r"^`([\w/]+\.(?:py|yaml))`:\n\n```\w+\n(.*?)^```$", TEXT, re.M | re.S))
COMMANDS = [words.strip() for words in re.findall(r"(?:^|`)python ([^`#\n]+)", TEXT, re.M)]
MODEL = ["models/gated.py", "configs/model/gated.yaml"]
TASK = ["lra/tasks/digitsum.py", "configs/task/digitsum.yaml"]
SIZES = [word for word in TINY if not word.startswith("task")]
TINY_TASK = ["task.num_train=64", "task.num_val=32", "task.num_test=32", "task.max_length=24"]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project with the four new files, and no other change."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("configs", "lra", "models", "results", "scripts", "tests"):
        shutil.copytree(
            ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "runs")
        )
    for name in ("run.py", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    assert sorted(FILES) == sorted([*MODEL, *TASK])
    for name, content in FILES.items():
        assert not (folder / name).exists()
        (folder / name).write_text(content, encoding="utf-8")
    return folder


def call(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # The copy's own modules, wherever the installed package lies.
    if arguments[:2] == ("-m", "pytest"):
        code = "import pytest, sys; sys.exit(pytest.main(sys.argv[1:]))"
        arguments = ("-c", code, *arguments[2:])
    if arguments[0] != "-m":
        path = {"PYTHONPATH": str(folder)}
        return programs.call(*arguments, cwd=folder, env=path, root=folder)
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=600,
    )


def shown(start: str) -> list[str]:
    """The one command of the page that begins so, without the python in front."""
    (command,) = [c for c in COMMANDS if c.startswith(start)]
    return shlex.split(command)


def record(folder: Path, task: str) -> records.Record:
    (path,) = (folder / "outputs/results/runs" / task / "gated").glob("*.json")
    return records.load(path)


def test_the_new_files_keep_the_style(checkout: Path) -> None:
    for words in (["format", "--check"], ["check"]):
        done = call(
            checkout, "-m", "ruff", *words, *(name for name in FILES if name.endswith(".py"))
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_new_model_trains_to_a_record(checkout: Path) -> None:
    done = call(checkout, *shown("run.py model=gated task=listops"), *TINY)
    assert done.returncode == 0, done.stderr
    found = record(checkout, "listops")
    assert found.model == "gated" and found.result is not None
    assert found.config["model"] == {"_target_": "models.gated.GatedMixer", "expansion": 1}
    assert found.num_params < found.baseline_params


def test_a_new_model_enters_the_contract_suite_by_its_yaml(checkout: Path) -> None:
    plain = ["-o", "addopts=", "-p", "no:cacheprovider"]
    done = call(checkout, *shown("-m pytest tests/models/test_models.py"), "-v", *plain)
    assert done.returncode == 0, done.stdout
    passed = set(re.findall(r"::(test_\w+)\[[^]]*gated[^]]*\] PASSED", done.stdout))
    suite = call(
        checkout, "-m", "pytest", "tests/models/test_models.py", "--collect-only", "-q", *plain
    )
    of_luna = set(re.findall(r"::(test_\w+)\[[^]]*luna[^]]*\]", suite.stdout))
    assert of_luna - passed == {
        "test_equals_its_naive_version_with_gradients",
        "test_number_of_parameters",
    }


def test_a_new_model_is_inspected_and_its_options_are_checked(checkout: Path) -> None:
    done = call(checkout, *shown("scripts/inspect_model.py"), "--lengths=256")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^layer 2 mixer +12,480 +16,640$", done.stdout, re.M)
    assert "within the 10 % rule" in done.stdout and "linear in L" in done.stdout
    done = call(checkout, "run.py", "model=gated", "model.expansion=0")
    assert done.returncode == 2 and "model.expansion=0: expected at least 1" in done.stderr


@pytest.mark.parametrize("recipe", ["lra", "luna"])
def test_a_new_model_and_task_work_under_every_recipe(checkout: Path, recipe: str) -> None:
    """No settings file names the task, so its own `train` block counts."""
    words = ["model=gated", "task=digitsum", f"recipe={recipe}", *TINY_TASK]
    words += [word for word in SIZES if word.startswith(("shape.", "hardware."))]
    words += ["train.num_steps=4", "train.warmup_steps=2", f"paths.results={recipe}"]
    done = call(checkout, "run.py", *words)
    assert done.returncode == 0, done.stderr
    (path,) = (checkout / recipe / "runs/digitsum/gated").glob("*.json")
    found = records.load(path)
    assert found.recipe == recipe and found.protocol.data == "generated"
    assert found.result is not None
    train = found.config["train"]
    assert (train["batch_size"], train["lr"], train["eval_every"]) == (32, 1e-3, 100)


def test_a_new_task_is_prepared_and_trains_to_a_record(checkout: Path) -> None:
    done = call(checkout, *shown("scripts/prepare_data.py task=digitsum"))
    assert done.returncode == 0, done.stderr
    assert "10,000 examples" in done.stdout
    assert len(re.findall(r"train \d label [01]: \d+", done.stdout)) == 3
    done = call(checkout, *shown("run.py model=gated task=digitsum"), *SIZES, *TINY_TASK)
    assert done.returncode == 0, done.stderr
    found = record(checkout, "digitsum")
    assert found.protocol.data == "synthetic" and found.data["num_examples"]["test"] == 32
    listed = call(checkout, *shown("scripts/records.py list"))
    assert listed.returncode == 0 and found.run_id in listed.stdout


@pytest.mark.slow
def test_new_files_enter_the_tests_of_all_combinations(checkout: Path) -> None:
    done = call(checkout, *shown("-m pytest tests/test_cli.py"), "-p", "no:cacheprovider")
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_a_record_is_submitted_by_the_commands_shown(checkout: Path) -> None:
    tiny = [word for word in TINY if word != "task=listops"]
    done = call(checkout, *shown("run.py -m"), *tiny, "paths.results=results")
    assert done.returncode == 0, done.stderr
    done = call(checkout, *shown("scripts/records.py validate"))
    assert done.returncode == 0 and "3 files, 0 complaints" in done.stdout
    done = call(checkout, *shown("scripts/make_tables.py"))
    assert done.returncode == 0 and "3 records" in done.stdout, done.stderr
    for name in ("leaderboard.md", "report.html"):
        assert "gated" in (checkout / "results" / name).read_text(encoding="utf-8")
