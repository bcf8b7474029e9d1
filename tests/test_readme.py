"""Every command of README and CONTRIBUTING is run in a fresh clone: committed records, no data.

Runs are made small by words that a user could add. What cannot be had here (a network, CUDA
devices, Slurm, an environment of its own) is run as far as it goes and has to end in its documented
message, or is listed with the reason under NOT_RUN. CONTRIBUTING's own model and task are run by
test_extension.py, the targets of the Makefile are expanded by test_docs.py.
"""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from lra.tasks.pathfinder import Pathfinder, PathX
from tests.tasks.test_image import INNER, write_batches
from tests.tasks.test_pathfinder import write_release
from tests.test_docs import NEWCOMERS, ROOT, commands

SIZES = (
    "shape.d_model=16 shape.d_ff=16 shape.num_layers=1 train.num_steps=4 train.warmup_steps=2 "
    "train.eval_every=2 train.batch_size=4 hardware.num_threads=1"
)
LISTOPS = (
    f"{SIZES} task.num_train=64 task.num_val=16 task.num_test=16 task.min_tree_length=5 "
    "task.max_tree_length=40 task.max_length=64"
)
CELL = "lengths=64 mode=train repeats=1 time_s=0.05 batch_size=2 hardware.num_threads=1"
RECORD = "listops-luna-seed0-77385b73"  # committed
NO_CUDA = "hardware.device=cuda: .*hardware=cpu"


@dataclass(frozen=True)
class Rule:
    """How commands that begin so are run, and what they have to say."""

    pattern: str
    output: str
    added: str = ""
    code: int = 0
    is_fast: bool = False
    needs: str = ""  # a package; or no_cuda, no_slurm: the message is of a machine without
    environment: tuple[tuple[str, str], ...] = ()
    of_run: str = ""  # further words of the run that it is about


# The first that fits.
RULES = [
    Rule(r"run.py --help", "scripts/keys.py", is_fast=True),
    Rule(r"run.py .*--cfg job", "^train:", is_fast=True),
    Rule(r"run.py .*hardware=(gpu|multi_gpu)", NO_CUDA, code=2, needs="no_cuda"),
    Rule(r"torchrun .*hardware=gpu", NO_CUDA, code=1, needs="no_cuda"),
    Rule(r"run.py -m hardware=slurm", "^error: hardware=slurm: .*srun.*where Slurm's commands are",
         code=2, needs="no_slurm"),
    Rule(r"run.py checkpoint=", r"^test +accuracy [0-9.]+ %.* 16 examples"),
    Rule(r"run.py -m sweep.parallel=auto", r"^\d+ jobs: [^,]*( completed| at_chance)+", LISTOPS,
         needs="hydra_plugins.hydra_joblib_launcher"),
    Rule(r"run.py -m hydra/sweeper=optuna", r"^best_value: [0-9.]+$",
         f"{LISTOPS} hydra.sweeper.n_trials=2", needs="hydra_plugins.hydra_optuna_sweeper"),
    Rule(r"run.py -m ", r"^\d+ jobs: ((, )?\d+ (completed|at_chance))+$", LISTOPS),
    Rule(r"run.py .*logger=wandb", r"^record +results/.*\.json$", LISTOPS, needs="wandb"),
    Rule(r"run.py .*experiment=smoke", r"^record +outputs/results/.*\.json$", LISTOPS),
    Rule(r"run.py ", r"^record +results/runs/listops/luna/.*\.json$", LISTOPS),
    Rule(r"scripts/keys.py", r"^train.lr=0.0001\n +peak", is_fast=True),
    Rule(r"scripts/inspect_model.py", "^apples to apples|^not apples"),
    Rule(r"scripts/compare.py", "^The difference (stands|cannot)", is_fast=True),
    Rule(r"scripts/records.py list", r"^\d\d+ records in .*results/runs$", is_fast=True),
    Rule(r"scripts/records.py command", "^python run.py model=luna task=listops", is_fast=True),
    Rule(r"scripts/records.py (show|diff)", "accuracy", is_fast=True),
    Rule(r"scripts/records.py validate", r"^\d\d+ files, 0 complaints$", is_fast=True),
    Rule(r"scripts/records.py merge", r"^0 records added, \d+ were here already$", is_fast=True),
    Rule(r"scripts/make_tables.py", r"\d+ records"),
    Rule(r"scripts/use_model.py outputs/RUN_ID", r"^\d( \(it is \d\))?  <-  \[M"),
    Rule(r"scripts/probe.py outputs/RUN_ID", r"^written to .*probes/.*\.json$"),
    Rule(r"scripts/generate.py outputs/RUN_ID", r"^\[MAX 4( \S+)+$(.*\n)*2 tokens read and 62 ",
         of_run="model.causal=true pretrain=next"),
    Rule(r"scripts/prepare_data.py task=listops", r"^listops: .*\[generated\](.*\n)*train 1 label",
         "task.num_train=64 task.num_val=16 task.num_test=16"),
    Rule(r"scripts/prepare_data.py task=text", r"^text: small/aclImdb \[files\](.*\n)*train 1 ",
         "paths.data=small"),
    Rule(r"scripts/prepare_data.py task=all", r"^image: .*\[files\](.*\n)*^text: .*\[files\]",
         "paths.data=small --workers 1"),
    Rule(r"scripts/benchmark.py .*hardware=gpu", NO_CUDA, code=2, needs="no_cuda"),
    Rule(r"scripts/benchmark.py --peer", r"nystrom_attention(.*\n)*record +results/benchmarks/",
         f"{CELL} models=softmax", needs="nystrom_attention"),
    Rule(r"scripts/benchmark.py .*--breakdown", "^training step, 64 tokens", CELL),
    Rule(r"scripts/benchmark.py", "^record +results/benchmarks/", CELL),
    Rule(r"scripts/get_data.sh", "download failed .*run this again to go on", code=1,
         environment=(("LRA_TEXT_URL", "http://127.0.0.1:9"),
                      ("LRA_IMAGE_URL", "http://127.0.0.1:9"),
                      ("LRA_RELEASE_URL", "http://127.0.0.1:9"))),
    Rule(r"make help", "^run +"),
]  # fmt: skip
NOT_RUN = {
    r"pip install": "installs from a package index; test_docs.py checks that the extras are there",
    r"make ": "builds an environment first; what it calls is run here, by test_cli.py (make run) "
    "and by test_benchmark.py, and test_docs.py expands each target",
}


def programs() -> list[str]:
    """The commands, without those of CONTRIBUTING's own files and without the interpreter."""
    found = dict.fromkeys(re.sub(r"^(\S*python|bash) ", "", c) for c in commands())
    return [c for c in found if not any(name in c for name in NEWCOMERS)]


def rule_for(command: str) -> Rule | None:
    return next((rule for rule in RULES if re.match(rule.pattern, command)), None)


def test_every_command_is_run_or_listed_with_a_reason() -> None:
    unknown = [
        c for c in programs() if not rule_for(c) and not any(re.match(p, c) for p in NOT_RUN)
    ]
    assert not unknown, "say in RULES how these are run small, and what they have to print"


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone of HEAD with the changes of the working tree."""
    folder = tmp_path_factory.mktemp("clone") / "lra"
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("no git checkout here")
    subprocess.run(["git", "clone", "-q", str(ROOT), str(folder)], check=True)
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        (folder / name).unlink(missing_ok=True)
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    assert not (folder / "data").exists() and not (folder / "outputs").exists()
    assert list(folder.glob("results/runs/*/*/*.json"))
    return folder


def words_of(command: str, rule: Rule, outputs: Path) -> list[str]:
    """What is typed: names for placeholders, and the words that make it small."""
    if "outputs/RUN_ID" in command:
        (run,) = outputs.glob("listops-luna-*")
        command = command.replace("RUN_ID", run.name)
    command = command.replace("RUN_ID", RECORD).replace("merge DIR", "merge results")
    return [*shlex.split(command), *rule.added.split()]


def check(rule: Rule, code: int, text: str) -> None:
    assert code == rule.code, text
    assert re.search(rule.output, text, re.MULTILINE), text
    assert "Traceback" not in text or rule.pattern.startswith("torchrun"), text


@pytest.mark.parametrize("command", [c for c in programs() if (r := rule_for(c)) and r.is_fast])
def test_commands_that_read_only(
    command: str, fresh: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process: the clone's programs, the modules of the same content that are here."""
    from hydra.core.global_hydra import GlobalHydra

    from lra.script import exit_codes

    rule = rule_for(command)
    assert rule is not None
    program, *words = words_of(command, rule, fresh / "outputs")
    exit_codes.clear()
    monkeypatch.chdir(fresh)
    monkeypatch.setattr(sys, "argv", [program, *words])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = state_of(fresh)
    with patch.dict(os.environ), pytest.raises(SystemExit) as left:
        runpy.run_path(str(fresh / program), run_name="__main__")
    GlobalHydra.instance().clear()
    captured = capsys.readouterr()
    check(rule, int(left.value.code or 0), captured.out + captured.err)
    assert state_of(fresh) == before


def state_of(folder: Path) -> str:
    """Files that a clone does not have, or has otherwise, ignored ones too."""
    words = ["git", "status", "--porcelain", "--ignored"]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def small_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few examples of each task, in the files that people have."""
    folder = tmp_path_factory.mktemp("data") / "small"
    for split in ("train", "test"):
        for label, words in (("pos", "good"), ("neg", "bad")):
            place = folder / "aclImdb" / split / label
            place.mkdir(parents=True)
            for i in range(10):
                (place / f"{i}_{9 if label == 'pos' else 1}.txt").write_text(f"{words} {i} {split}")
    release = folder / "lra_release"
    (release / "listops-1000").mkdir(parents=True)
    (release / "tsv_data").mkdir()
    for first, (split, aan) in enumerate((("train", "train"), ("val", "eval"), ("test", "test"))):
        digits = [*range(first, 10), *range(first)]
        rows = "".join(f"( ( [MAX {i} ) 0 ) ] )\t{i}\r\n" for i in digits)
        (release / f"listops-1000/basic_{split}.tsv").write_text(f"Source\tTarget\r\n{rows}")
        pairs = "".join(f"{i % 2}.0\tA{i}\tB{i}\tone {i} {split}\ttwo {i}\n" for i in range(10))
        (release / f"tsv_data/new_aan_pairs.{aan}.tsv").write_text(pairs)
    write_batches(folder / INNER)
    for task in (Pathfinder, PathX):
        side = task.__dataclass_fields__["resolution"].default
        write_release(release / f"pathfinder{side}/curv_contour_length_14", [10, 10], side=side)
    return folder


def run(folder: Path, words: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    interpreter = {"torchrun": [sys.executable, "-m", "torch.distributed.run"],
                   "make": ["make"]}.get(words[0])  # fmt: skip
    if words[0].endswith(".sh"):
        interpreter = ["bash", words[0]]
    return subprocess.run(
        [*interpreter, *words[1:]] if interpreter else [sys.executable, *words],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600,
        env=os.environ | {"PYTHONPATH": str(folder)} | environment,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("command", [c for c in programs() if (r := rule_for(c)) and not r.is_fast])
def test_commands_in_a_clone_of_their_own(
    command: str, fresh: Path, small_data: Path, tmp_path: Path
) -> None:
    rule = rule_for(command)
    assert rule is not None
    if rule.needs == "no_cuda" and torch.cuda.is_available():
        pytest.skip("needs CUDA devices and the real data, or a machine without any")
    if rule.needs == "no_slurm" and shutil.which("srun"):
        pytest.skip("this machine has Slurm, and would submit jobs")
    if rule.needs and not rule.needs.startswith("no_"):
        with_package = rule.needs.split(".")[0]
        if importlib.util.find_spec(with_package) is None:
            pytest.skip(f"needs {rule.needs}")
    folder = tmp_path / "lra"
    shutil.copytree(fresh, folder, symlinks=True)
    if "small" in rule.added:
        shutil.copytree(small_data, folder / "small")
    if "outputs/RUN_ID" in command:  # the run that such a command goes on from
        words = f"model=luna task=listops {LISTOPS} {rule.of_run}".split()
        done = run(folder, ["run.py", *words])
        assert done.returncode == 0, done.stdout
    done = run(folder, words_of(command, rule, folder / "outputs"), **dict(rule.environment))
    check(rule, done.returncode, done.stdout)
