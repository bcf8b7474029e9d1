"""Imports run one way, and the command line stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted([*(ROOT / "lra").rglob("*.py"), *(ROOT / "models").rglob("*.py")])
SHARED_MODEL_CODE = {"classifier", "encoder", "shape", "layers", "predictor"}
GROUND_FLOOR = {"lra.config", "lra.console", "lra.files", "lra.script", "lra.values"}
# From the bottom up, each room with those that it may know besides itself. Anything of lra/ that is
# in no other room ties them: it may know all, and only itself, run.py and scripts/ know it.
MAY_KNOW = {
    "models": set(),
    "ground floor": set(),
    "tasks": {"ground floor"},
    "build": {"ground floor", "tasks", "models"},
    "training": {"ground floor", "tasks"},
    "benchmark records": {"ground floor"},
    "speed": {"ground floor", "tasks", "build", "training", "benchmark records", "models"},
    "results": {"ground floor", "tasks", "benchmark records"},
    "root": {
        "ground floor",
        "tasks",
        "build",
        "training",
        "speed",
        "benchmark records",
        "results",
        "models",
    },
}


def module_name(path: Path) -> str:
    """`lra.tasks.text`; a package is called after its folder."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


MODULES = {module_name(path) for path in SOURCES}
PACKAGES = {module_name(path) for path in SOURCES if path.name == "__init__.py"}


def room(module: str) -> str:
    """Which key of MAY_KNOW a module belongs to."""
    if module in GROUND_FLOOR:
        return "ground floor"
    if module == "lra.speed.benchmarks":
        return "benchmark records"
    first, *rest = module.split(".")
    wing = first if first == "models" else rest[0] if rest else "root"
    return wing if wing in MAY_KNOW else "root"


def imports(source: str) -> set[str]:
    """All names that a text imports, inside functions and for type checking alone included."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # A relative import would escape the checks below.
            assert node.module and not node.level, ast.unparse(node)
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def own_modules(source: str) -> set[str]:
    """The project's modules that a text imports; of a package its members, not the package."""
    return imports(source) & (MODULES - PACKAGES)


def complaints(module: str, source: str) -> list[str]:
    """Imports that the order of the rooms forbids."""
    own, names = room(module), imports(source)
    packages = {name.split(".")[0] for name in names}
    wrong = [f"{module} is of {own} and imports {other} of {room(other)}"
             for other in sorted(own_modules(source))
             if room(other) not in MAY_KNOW[own] | {own}]  # fmt: skip
    wrong += [f"{module} imports {p}" for p in sorted(packages & {"run", "scripts", "tests"})]
    if own != "models":
        models = sorted(n for n in names & MODULES if n.startswith("models."))
        wrong += [f"{module} imports the concrete model {name}" for name in models
                  if name.removeprefix("models.") not in SHARED_MODEL_CODE]  # fmt: skip
    if module not in ("lra.cli", "lra.multirun"):  # the places that know Hydra
        wrong += [f"{module} imports {p}" for p in sorted(packages & {"hydra", "omegaconf"})]
    return wrong


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_rooms_know_only_those_below_them(path: Path) -> None:
    assert complaints(module_name(path), path.read_text()) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("lra.files", "from lra.tasks.task import Task"),
        ("lra.tasks.text", "import lra.training.progress"),
        ("lra.tasks.text", "from lra import build"),
        ("lra.training.optim", "def f():\n    from lra.results import records"),
        ("lra.training.optim", "if TYPE_CHECKING:\n    from lra.speed.measure import Trainer"),
        ("lra.results.tables", "from lra.speed.measure import measure"),
        ("lra.results.tables", "from lra.training.trainer import State"),
        ("lra.speed.measure", "from lra.results.markdown import Table"),
        ("lra.speed.measure", "from lra.job import run_job"),
        ("lra.build", "from models.luna import LunaEncoder"),
        ("lra.job", "from hydra import compose"),
        ("lra.estimate", "from omegaconf import OmegaConf"),
        ("lra.cli", "from scripts import records"),
        ("models.luna", "from lra.values import fill"),
    ],
)
def test_an_import_that_runs_back_up_is_noticed(module: str, source: str) -> None:
    assert len(complaints(module, source)) == 1


def test_no_modules_import_each_other() -> None:
    """Run with -s, this also prints how many modules and imports there are."""
    graph = {module_name(path): own_modules(path.read_text()) for path in SOURCES}
    assert list(TopologicalSorter(graph).static_order())  # raises CycleError, which names them
    lines = {module_name(path): len(path.read_text().splitlines()) for path in SOURCES}
    for name in MAY_KNOW:
        inside = [module for module in graph if room(module) == name]
        known = [room(other) for module in inside for other in graph[module]]
        across = len(known) - known.count(name)
        print(f"{name}: {len(inside)} modules, {sum(lines[m] for m in inside):,} lines, "
              f"{len(known)} imports, {across} of them across rooms")  # fmt: skip


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


def test_a_run_does_without_the_compiler(tmp_path: Path) -> None:
    """Its import would take longer than all else between the start and the first step."""
    words = [
        "model=s5", "task=listops", "experiment=smoke", "task.max_length=32", "task.num_train=8",
        "task.num_val=4", "task.num_test=4", "train.num_steps=1", "train.warmup_steps=0",
        "train.batch_size=2", f"paths.data={tmp_path}", f"paths.outputs={tmp_path}",
    ]  # fmt: skip
    code = (
        f"import sys, runpy; sys.argv = ['run.py', *{words!r}]\n"
        "try: runpy.run_path('run.py', run_name='__main__')\n"
        "except SystemExit as end: print('CODE', end.code, 'torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.endswith("CODE 0 False\n"), done.stdout + done.stderr


BARE = """
import importlib, pathlib, pkgutil, sys
for name in ("tensorflow", "jax", "flax", "torchtext", "torchvision", "scipy", "sklearn",
             "datasets", "pyarrow", "pandas", "wandb", "tensorboard", "matplotlib"):
    sys.modules[name] = None
import lra, models
for package in (models, lra):
    for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(info.name)
from lra.build import make_task
from lra.cli import compose_config, typed
from lra.tasks.cache import prepare
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
