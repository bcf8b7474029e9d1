"""Imports run one way, and the command line stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_nothing_needs_dead_or_foreign_frameworks() -> None:
    code = (
        "import sys\n"
        "for name in ('tensorflow', 'jax', 'torchtext', 'torchvision', 'scipy'):\n"
        "    sys.modules[name] = None\n"
        "import pkgutil, importlib, lra, models, lra.tasks\n"
        "for package in (models, lra, lra.tasks):\n"
        "    for info in pkgutil.iter_modules(package.__path__):\n"
        "        importlib.import_module(f'{package.__name__}.{info.name}')\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
