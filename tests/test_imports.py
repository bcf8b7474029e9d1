"""Imports run one way, and the command line stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted([*(ROOT / "lra").rglob("*.py"), *(ROOT / "models").rglob("*.py")])
SHARED_MODEL_CODE = {"classifier", "encoder", "shape", "layers"}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_layers_import_downwards_only(path: Path) -> None:
    names = imports(path)
    packages = {name.split(".")[0] for name in names}
    if "models" in path.relative_to(ROOT).parts:
        assert not packages & {"lra", "hydra", "omegaconf"}
        return
    concrete = {
        n for n in names if n.startswith("models.") and n.split(".")[1] not in SHARED_MODEL_CODE
    }
    assert not concrete
    if path.name != "cli.py":  # the one place that knows Hydra
        assert not packages & {"hydra", "omegaconf"}


@pytest.mark.parametrize("arguments", [["--help"], ["model=luna", "task=listops", "--cfg", "job"]])
def test_help_and_config_import_nothing_heavy(arguments: list[str]) -> None:
    code = (
        f"import sys, runpy; sys.argv = ['run.py', *{arguments!r}]\n"
        "try: runpy.run_path('run.py', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'datasets', 'wandb', 'pandas', 'matplotlib', 'PIL'} & set(sys.modules)\n"
        "print('HEAVY', sorted(heavy))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert out.stdout.rstrip().endswith("HEAVY []"), out.stdout
    assert len(out.stdout) > 500


BARE = """
import importlib, pathlib, pkgutil, sys
for name in ("tensorflow", "jax", "flax", "torchtext", "torchvision", "scipy", "datasets",
             "pyarrow", "pandas", "wandb", "tensorboard", "matplotlib"):
    sys.modules[name] = None
import lra, lra.tasks, models
for package in (models, lra, lra.tasks):
    for info in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{info.name}")
from lra.build import make_task
from lra.cli import compose_config, typed
from lra.task import prepare
from lra.tasks.text import Text
folder = pathlib.Path(sys.argv[1])
for name in ("listops", "text", "retrieval", "image", "pathfinder", "pathx"):
    sizes = ["task.num_train=8", "task.num_val=4", "task.num_test=4"]
    config = typed(compose_config([f"task={name}", "experiment=smoke", *sizes]))
    data = prepare(make_task(config), folder / "cache", num_workers=1)
    assert [len(data.train), len(data.val), len(data.test)] == [8, 4, 4]
for name, text in {"train/pos/0_9": "good", "train/neg/0_1": "bad", "train/unsup/0_0": "neither",
                   "train/pos/1_9": "fine", "train/neg/1_1": "poor", "test/pos/0_9": "well",
                   "test/neg/0_1": "ill"}.items():
    path = folder / "aclImdb" / f"{name}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
found = {bytes(e.sequences[0]): e.label for split in ("train", "val", "test")
         for e in Text(data_dir=folder).examples(split)}
assert found == {b"good": 1, b"bad": 0, b"fine": 1, b"poor": 0, b"well": 1, b"ill": 0}, found
print("prepared")
"""


def test_modules_and_data_of_all_tasks_need_neither_foreign_frameworks_nor_extras(
    tmp_path: Path,
) -> None:
    """TensorFlow, JAX and torchtext are not there; nor is what pip installs as an extra."""
    done = subprocess.run(
        [sys.executable, "-c", BARE, str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout == "prepared\n", done.stderr


def test_the_tested_versions_lie_within_what_is_asked_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert not {"tensorflow", "jax", "flax", "torchtext"} & {name.lower() for name in pinned}
    extras = [word for words in project["optional-dependencies"].values() for word in words]
    for requirement in map(Requirement, [*project["dependencies"], *extras]):
        version = {k.lower(): v for k, v in pinned.items()}[requirement.name.lower()]
        assert requirement.specifier.contains(version), requirement
