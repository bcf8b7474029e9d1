"""The command line as a user meets it: run.py in a process of its own."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hydra.errors import MissingConfigException

from lra.cli import compose_config, explain, typed
from lra.console import percent
from lra.results import records
from lra.training import checkpoint
from tests import programs

ROOT = Path(__file__).resolve().parent.parent
# The synthetic stand-in, cut so short that a run takes a second or two.
TINY = [
    "experiment=smoke", "task=listops", "task.num_train=64", "task.num_val=32", "task.num_test=32",
    "task.min_tree_length=10", "task.max_tree_length=60", "task.max_length=64", "shape.d_model=16",
    "shape.d_ff=16", "shape.head_hidden=[8]", "train.num_steps=8", "train.warmup_steps=2",
    "train.eval_every=4", "train.batch_size=4", "train.log_every=1",
    "train.checkpoint_every=1", "hardware.num_threads=1", "sweep.plan=false",
]  # fmt: skip


def start(folder: Path, *arguments: str) -> programs.Program:
    return programs.start("run.py", *arguments, cwd=folder)


def call(folder: Path, *arguments: str, fork: bool = False) -> tuple[int, str, str]:
    done = programs.call("run.py", *arguments, cwd=folder, fork=fork)
    return done.returncode, done.stdout, done.stderr


def call_python(folder: Path, *words: str) -> tuple[int, str, str]:
    """With an interpreter of its own, imports and all."""
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=300
    )
    return done.returncode, done.stdout, done.stderr


def read_record(folder: Path, model: str = "luna") -> records.Record:
    (path,) = (folder / "outputs/results/runs/listops" / model).glob("*.json")
    return records.load(path)


def timeless(record: records.Record) -> dict[str, object]:
    values = json.loads(record.to_json())
    for key in ("speed", "started_at", "finished_at", "overrides", "hardware"):
        values.pop(key)
    del values["config"]["hardware"]
    return values


@pytest.mark.parametrize(
    "argument, expected",
    [
        ("train.step=5", ["train.step=5", "unknown key", "did you mean"]),
        ("+train.step=5", ["train.step=5", "unknown key", "did you mean", "num_steps"]),
        ("+hydra.job.nmae=x", ["+hydra.job.nmae=x: unknown key", "did you mean 'name'"]),
        ("hydra.swep.dir=x", ["hydra.swep.dir=x: unknown key", "did you mean 'sweep'"]),
        ("train.num_stesp=5", ["did you mean 'train.num_steps'"]),
        ("modle=luna", ["modle=luna", "did you mean 'model'"]),
        (
            "task=lisops",
            ["did you mean 'listops'? known: image, listops, pathfinder, pathx, retrieval, text"],
        ),
        ("model=lunna", ["model=lunna", "did you mean 'luna'", "softmax"]),
        ("pretrain=null", ["pretrain=null: not a choice; ", "known: masked, next, none"]),
        ("model.projection_lenght=4", ["did you mean 'model.projection_length'"]),
        ("+model.projection_lenght=4", ["did you mean 'model.projection_length'"]),
        ("+task.colour=red", ["task.colour='red'", "unknown key"]),
        ("seed=abc", ["seed='abc'", "an integer"]),
        ("seed=01", ["seed='01'", "an integer"]),
        ("seed=-1", ["seed=-1", "expected 0"]),
        ("train.num_steps=0", ["train.num_steps=0", "at least 1"]),
        ("train.groups.step.lr=0", ["train.groups.step.lr=0.0", "above 0"]),
        ("train.lr=fast", ["train.lr='fast'", "a number"]),
        ("shape.dropout=1.5", ["shape.dropout=1.5", "< 1"]),
        ("shape.input_std=1e-60", ["shape.input_std=1e-60", "from 1.2e-38"]),
        ("shape.num_heads=5", ["shape.num_heads=5", "does not divide shape.d_model=64"]),
        ("model.tie_kv=maybe", ["model.tie_kv='maybe'", "true or false"]),
        ("model.activation=relu", ["model.activation='relu'", "softplus"]),
        ("task.max_length=-3", ["task.max_length=-3", "at least 1"]),
        ("hardware.device=tpu", ["hardware.device='tpu'", "cuda"]),
        ("hardware.precision=fp16", ["hardware.precision=fp16", "CPU"]),
        ("seed=1,2", ["--multirun", "python run.py -m seed=1,2"]),
        ("task.path=/x[1]/y", ["cannot be read as it stands", "\"task.path='/x[1]/y'\""]),
        ("train.warmup_steps=9000", ["train.warmup_steps=9000", "5000"]),
        (
            "model._target_=models.luna.Lunna",
            ["model._target_=models.luna.Lunna", "cannot be imported"],
        ),
    ],
)
def test_bad_arguments_get_one_clear_message_before_any_work(
    tmp_path: Path, argument: str, expected: list[str]
) -> None:
    code, out, err = call(tmp_path, argument)
    assert code == 2 and "Traceback" not in err
    assert [line for line in err.splitlines() if line.startswith("error: ")] == [
        err.splitlines()[0]
    ]
    for text in expected:
        assert text in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words, expected",
    [
        ("lr=0.001", "lr=0.001: unknown key; did you mean 'train.lr'?"),
        ("train.learning_rate=1", "did you mean 'train.lr'? known: num_steps"),
        ("learning-rate=1", "did you mean 'train.lr'?"),
        ("batch_size=32", "did you mean 'train.batch_size'?"),
        ("batch=32", "did you mean 'train.batch_size'?"),
        ("model.num_layers=4", "did you mean 'shape.num_layers'?"),
        ("+model.num_layers=4", "did you mean 'shape.num_layers'?"),
        ("shape.layers=4", "did you mean 'shape.num_layers'? known: norm_kind"),
        ("layers=4", "did you mean 'shape.num_layers'?"),
        (
            "shape={num_layer:4}",
            "shape={num_layer:4}: unknown key; did you mean 'shape.num_layers'",
        ),
        ("model={slots:4}", "model={slots:4}: unknown key; known: projection_length"),
        ("train.betas={a:1}", "train.betas={a:1}: expected a list: train.betas=[..]"),
        ("shape=[1,2]", "shape=[1,2]: expected keys with values"),
        ("+lr=0.001", "did you mean 'train.lr'?"),
        ("trian.lr=1", "did you mean 'train.lr'?"),
        ("task.seed=1", "did you mean 'seed'?"),
        ("seeds=0,1", "did you mean 'seed'?"),
        ("num_epochs=3", "did you mean 'train.num_steps'?"),
        ("hardware.gpus=2", "did you mean 'hardware.num_devices'?"),
        ("hardware=cuda", "did you mean 'gpu'?"),
        ("task=list-ops", "did you mean 'listops'?"),
        ("task=cifar", "did you mean 'image'?"),
        ("hardware.precision=fp32", "did you mean 'float32'?"),
        ("recipe=LRA", "did you mean 'lra'?"),
        ("model=transformers", "did you mean 'transformer'?"),
        ("optimizer=adam", "optimizer=adam: unknown key; known: checkpoint"),
        ("train=5", "train=5: has keys of its own, such as train.num_steps"),
        ("-m model=softmax,model=luna", "before its values; did you mean 'model=softmax,luna'?"),
        ("paths.outputs=", "paths.outputs='': expected a path"),
        ("luna", "luna: expected key=value; did you mean 'model=luna'?"),
        ("nothing", "nothing: expected key=value"),
        ("task = listops", "task: no value; expected task=VALUE, without blanks around the ="),
        ("train.lr:0.1", "did you mean 'train.lr=0.1'?"),
        ("train.lr: 0.1", "did you mean 'train.lr=VALUE'?"),
        ("model==luna", "did you mean 'model=luna'?"),
        ("model=luna,", "did you mean 'model=luna'?"),
        ("model=luna:tie_kv=true", "did you mean 'model=luna model.tie_kv=true'?"),
        ("model=luna,softmax", "expected one value; several make a sweep, with -m"),
        ("--model luna", "--model: a setting has no dashes; did you mean 'model=luna'?"),
        ("--lr=0.1", "did you mean 'train.lr=0.1'?"),
        ("--batch-size 32", "did you mean 'train.batch_size=32'?"),
        ("-task=listops", "did you mean 'task=listops'?"),
        ("-m seed=0,1,2 shape.num_heads=5", "all 3 jobs: shape.num_heads=5 does not divide"),
        ("-m seed=0,1,2 model=luna,softmx", "model=softmx: not a choice; did you mean 'softmax'?"),
        ("-m pretrain=masked,null seed=0", "pretrain=null: not a choice; "),
        ("-m lr=1 seed=0,1,2", "lr=1: unknown key; did you mean 'train.lr'?"),
        ("-m seed=range(3,3)", "seed=range(3,3): no value in it, so the sweep has no jobs"),
        ("-m seed=interval(0,1)", "seed=interval(0,1): only a sweeper that optimises can choose"),
        ("-m seed=1,2 +hydra.sweeper.params.seed=3", "params.seed=3: only in a config file"),
        ("-m hydra/sweeper=optnua seed=0,1", "hydra/sweeper=optnua: not a choice; "),
        (
            "experiment=smoke task._target_=tests.toy.Toy",
            "rows (experiment=smoke sets it: CONTRIBUTING.md says what a task needs for that)",
        ),
        ("experiment=smoke shape.d_model=63", "set shape.head_dim (experiment=smoke sets it)"),
    ],
)
def test_a_slip_is_answered_once_with_what_was_meant(
    words: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    code, _, err = in_process(words.split(), monkeypatch, capsys)
    assert code == 2 and err.count("\n") == 1 and err.startswith("error: ")
    assert expected in err
    assert not list(tmp_path.iterdir())


def test_a_setting_that_is_written_well_enough_is_taken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["task=text ", "train.lr= 0.5", "--cfg", "job"]
    code, out, _ = in_process(words, monkeypatch, capsys)
    assert code == 0 and "lr: 0.5" in out and "lra.tasks.text.Text" in out


@pytest.mark.parametrize("words", ["--cfg job X", "X --cfg job", "model=none --cfg job X"])
def test_settings_may_stand_on_both_sides_of_an_option(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = in_process(words.replace("X", "train.lr=0.5").split(), monkeypatch, capsys)
    assert code == 0 and "lr: 0.5" in out, err


@pytest.mark.parametrize(
    "choice, extra",
    [
        ("sweeper/optuna", "tune"),
        ("launcher/joblib", "parallel"),
        ("launcher/submitit_slurm", "slurm"),
    ],
)
def test_what_an_extra_brings_is_told(choice: str, extra: str) -> None:
    error = MissingConfigException("", missing_cfg_file=f"hydra/{choice}", options=["basic"])
    assert explain(error, []).endswith(f"pip install -e '.[{extra}]' brings it")


@pytest.mark.parametrize("name", ["lra", "models"])
def test_code_of_another_place_is_refused(name: str, tmp_path: Path) -> None:
    """In a job that would find an older copy; here run.py is told that it lies elsewhere."""
    check_copies = runpy.run_path(str(ROOT / "run.py"))["check_copies"]
    check_copies()
    for package in ("lra", "models"):
        (tmp_path / package).symlink_to(ROOT / package)
    module = importlib.import_module(name)
    with patch.object(module, "__path__", [str(tmp_path / name)]):
        check_copies()  # another way to the same folder
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    with patch.object(module, "__path__", [str(tmp_path / name)]):
        expected = f"{name} is imported from {tmp_path / name}, but this is the run.py of {ROOT}:"
        with pytest.raises(ValueError, match=f"^{re.escape(expected)}"):
            check_copies()


def in_process(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str, str]:
    """What run.py would leave and print, for words that end before any work."""
    from hydra.core.global_hydra import GlobalHydra

    from lra import multirun, script, sweep

    for remembered in (script.exit_codes, sweep.launches, sweep.sweep_sizes, multirun.told):
        remembered.clear()
    monkeypatch.setattr(sys, "argv", [str(ROOT / "run.py"), *words])
    with patch.dict(os.environ), pytest.raises(SystemExit) as left:
        runpy.run_path(str(ROOT / "run.py"), run_name="__main__")
    GlobalHydra.instance().clear()
    captured = capsys.readouterr()
    return int(left.value.code or 0), captured.out, captured.err


def test_a_python_without_the_packages_is_told_where_they_are(tmp_path: Path) -> None:
    """Programs and scripts alike, in one line; -S leaves out what is installed."""
    for name in ("run.py", *(f"scripts/{path.name}" for path in (ROOT / "scripts").glob("*.py"))):
        done = subprocess.run(
            [sys.executable, "-S", str(ROOT / name), "--help"], cwd=tmp_path,
            env={"PATH": os.environ["PATH"]}, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 2 and done.stderr.count("\n") == 1, (name, done.stderr)
        for text in (sys.executable, "has no hydra and no numpy and no torch", str(ROOT)):
            assert text in done.stderr, name


@pytest.mark.skipif(shutil.which("srun") is not None, reason="this machine has Slurm")
def test_slurm_without_its_commands_is_one_message(tmp_path: Path) -> None:
    code, _, err = call(tmp_path, "-m", "hardware=slurm", *TINY)
    assert code == 2 and "Traceback" not in err
    assert err.splitlines()[-1].startswith("error: hardware=slurm: ") and "srun" in err


def test_hardware_gpu_without_one_is_refused(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    code, _, err = call(tmp_path, "hardware=gpu")
    assert code == 2 and "hardware.device=cuda" in err and "hardware=cpu" in err


def test_a_run_leaves_a_record_and_a_second_start_does_nothing(tmp_path: Path) -> None:
    code, out, err = call(tmp_path, *TINY)
    assert code == 0, err
    record = read_record(tmp_path)
    assert record.result is not None and record.result.test.num_examples == 32
    assert record.protocol.data == "synthetic" and record.protocol.budget == "reduced"
    assert [point["step"] for point in record.curve] == [4, 8]
    assert record.result.step in (4, 8) and record.hardware["device"] == "cpu"
    assert record.peak_memory_bytes is None and not record.apples_to_apples
    correct = records.unpack_correct(record.result.test.correct or "", 32)
    assert correct.mean() == record.result.test.accuracy
    path = records.record_path(Path("outputs/results"), "listops", "luna", record.run_id)
    assert f"record   {path}" in out
    # What the number is not: a figure of the benchmark.
    assert "Luna-16" not in out and "synthetic data, no result of the benchmark" in out
    before = {
        p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file() and p.suffix != ".lock"
    }
    code, out, _ = call(tmp_path, *TINY)
    assert code == 0 and "nothing to do" in out
    after = {
        p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file() and p.suffix != ".lock"
    }
    assert before == after


def test_weights_whose_loss_is_no_number_end_an_evaluation_as_they_end_a_run(
    tmp_path: Path,
) -> None:
    assert call(tmp_path, *TINY, "model=none")[0] == 0
    (path,) = tmp_path.glob("outputs/*/checkpoints/best-*.pt")
    code, out, err = call(tmp_path, f"checkpoint={path}")
    assert code == 0 and "not a finite number" not in out, err
    state = checkpoint.read(path)
    for weight in state["model"].values():
        weight.mul_(math.inf)
    checkpoint.write(path, state)
    code, out, err = call(tmp_path, f"checkpoint={path}")
    assert code == 3 and out.count("the loss is not a finite number") == 2, err


def test_the_commands_of_the_quick_start_end_in_a_record_and_a_table(tmp_path: Path) -> None:
    """What `make run` calls, on fewer and shorter examples."""
    target = (ROOT / "Makefile").read_text().partition("\nrun: ")[2].partition("\n\n")[0]
    train, tables = [
        shlex.split(line)[1:] for line in target.splitlines() if line.startswith("\t$(BIN)/python ")
    ]
    assert train[0] == "run.py" and "experiment=quickstart" in train
    small = [w for w in TINY if w.split("=")[0] not in ("experiment", "task")]
    code, out, err = call_python(tmp_path, str(ROOT / train[0]), *train[1:], *small)
    assert code == 0, err
    (path,) = (tmp_path / "results/runs/listops/luna").glob("*.json")
    result = records.load(path).result
    assert result is not None and result.test.num_examples == 32 and result.step in (4, 8)
    accuracy = 100 * result.test.accuracy
    assert 0 <= accuracy <= 100 and f"{percent(accuracy)} %" in out
    code, out, err = call_python(
        tmp_path, str(ROOT / tables[0]), *tables[1:], "--results", "results", "--no-figures"
    )
    assert code == 0, err
    table = (tmp_path / "results/leaderboard.md").read_text()
    assert f"test {percent(accuracy)} at step {result.step}" in table


def test_without_a_terminal_there_are_plain_lines_and_no_bar(tmp_path: Path) -> None:
    _, out, err = call(tmp_path, *TINY)
    assert "it/s" not in err and "step/s" not in err and "\r" not in out + err
    assert "val accuracy" in out and "step      8/8" in out


def test_a_model_that_memory_has_no_room_for_is_one_message(tmp_path: Path) -> None:
    code, _, err = call(tmp_path, *TINY, f"shape.d_ff={10**15}")
    assert code == 4 and err.startswith("error: out of memory: ") and err.count("\n") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_under_the_output_does_not_end_the_run(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        program = programs.start("run.py", *TINY, cwd=tmp_path, stdout=full.fileno())
    _, err = program.communicate(timeout=300)
    assert program.returncode == 0 and "rror" not in err
    assert read_record(tmp_path).result is not None
    assert " record " in next(tmp_path.glob("outputs/*/run.log")).read_text()


@pytest.mark.parametrize("what", ["config", "searchpath"])
def test_hydras_information_may_go_unread(tmp_path: Path, what: str) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    program = programs.start("run.py", "--info", what, cwd=tmp_path, stdout=write_end)
    os.close(write_end)
    _, err = program.communicate(timeout=60)
    assert program.returncode in (0, 141) and err == ""


def test_same_seed_twice_and_a_kill_between_give_the_same_record_and_weights(
    tmp_path: Path,
) -> None:
    for name in ("one", "two", "killed", "workers"):
        (tmp_path / name).mkdir()
    assert call(tmp_path / "one", *TINY)[0] == 0
    assert call_python(tmp_path / "two", str(ROOT / "run.py"), *TINY)[0] == 0
    assert call(tmp_path / "workers", *TINY, "hardware.num_workers=2")[0] == 0
    process = start(tmp_path / "killed", *TINY)
    metrics = tmp_path / "killed" / "outputs"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not any(
        len(p.read_text().splitlines()) >= 4 for p in metrics.glob("*/metrics.jsonl")
    ):
        time.sleep(0.002)
    process.kill()
    process.communicate()
    assert not list((tmp_path / "killed").glob("outputs/results/**/*.json"))
    code, out, err = call(tmp_path / "killed", *TINY)
    assert code == 0, err
    assert "resuming at step" in out
    reference = read_record(tmp_path / "one")
    for name in ("two", "killed", "workers"):
        assert timeless(read_record(tmp_path / name)) == timeless(reference), name

    def weights(name: str) -> dict:
        (folder,) = (tmp_path / name / "outputs").glob("*/checkpoints")
        return checkpoint.read(checkpoint.checkpoints(folder)[0])["model"]

    for name in ("two", "killed", "workers"):
        assert all(
            bool((a == b).all())
            for a, b in zip(weights(name).values(), weights("one").values(), strict=True)
        )


def test_sigterm_saves_and_leaves_with_a_code_of_its_own(tmp_path: Path) -> None:
    long = [*TINY, "train.num_steps=4000"]
    process = start(tmp_path, *long)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not list(tmp_path.glob("outputs/*/metrics.jsonl")):
        time.sleep(0.01)
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    record = read_record(tmp_path)
    assert record.status == "interrupted" and record.result is None and "SIGTERM" in record.message
    assert list(tmp_path.glob("outputs/*/checkpoints/step-*.pt"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_while_data_are_prepared_leaves_with_the_same_code(
    tmp_path: Path, number: signal.Signals
) -> None:
    words = [*TINY, f"paths.cache={tmp_path}/cache", "task.num_train=1000000"]
    code = (  # in this one process: an exception while it forks is ignored
        "import lra.tasks.cache, runpy; lra.tasks.cache.available_cores = lambda: 1; "
        f"runpy.run_path({str(ROOT / 'run.py')!r}, run_name='__main__')"
    )
    process = programs.start("-c", code, *words, cwd=tmp_path)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not list(tmp_path.glob("cache/.listops-*.building/*")):
        time.sleep(0.01)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75 and err.endswith(f"\nstopped by {number.name}\n"), err
    assert not list(tmp_path.glob("cache/.listops-*"))


def test_two_processes_do_not_share_a_run(tmp_path: Path) -> None:
    long = [*TINY, "train.num_steps=100000"]
    first = start(tmp_path, *long)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not list(tmp_path.glob("outputs/*/metrics.jsonl")):
        time.sleep(0.01)
    try:
        done = programs.call("run.py", *long, cwd=tmp_path, timeout=60)
    finally:
        first.kill()
        first.communicate()
    assert done.returncode == 2
    assert "another process is working on this very run" in done.stderr


@pytest.mark.parametrize("moves", ["false", "true"])
def test_relative_paths_are_taken_from_where_the_command_was_started(
    tmp_path: Path, moves: str
) -> None:
    """A single run and a sweep find the same files, also if Hydra is told to change folders."""
    rows = ["[MAX {0} 9 ]\t9", "[MED 4 {0} 4 ]\t4", "[MIN 0 {0} ]\t0"]
    (tmp_path / "d/listops").mkdir(parents=True)
    for times, split in enumerate(("val", "test", "train"), start=1):
        (tmp_path / f"d/listops/basic_{split}.tsv").write_text(
            "\n".join(["Source\tTarget", *rows * times]).format(times) + "\n"
        )
    own = [w for w in TINY if not w.startswith("task.")] + ["task.max_length=64"]
    words = [*own, "paths.data=./d", "paths.cache=mine/cache", "task.source=files",
             f"hydra.job.chdir={moves}", "hydra.run.dir=elsewhere"]  # fmt: skip
    code, _, err = call(tmp_path, *words, "seed=0")
    assert code == 0, err
    code, out, err = call(tmp_path, "-m", *words, "seed=1,2")
    assert code == 0 and "2 jobs: " in out, err
    assert len(list(tmp_path.rglob("meta.json"))) == 1  # one cache, so the same data
    assert list(tmp_path.glob("mine/cache/listops-*/meta.json"))
    found = [p.parent.name.split("-")[2] for p in tmp_path.rglob("status.json")]
    assert sorted(found) == ["seed0", "seed1", "seed2"]
    assert len(list(tmp_path.glob("outputs/listops-luna-seed*"))) == 3
    assert len(list(tmp_path.glob("outputs/results/runs/listops/luna/*.json"))) == 3


def combinations() -> Iterator[Any]:
    """Every model with every recipe, tasks in turn; with the other tasks too it takes minutes."""
    models, tasks, recipes = (
        sorted(p.stem for p in (ROOT / "configs" / group).glob("*.yaml"))
        for group in ("model", "task", "recipe")
    )
    for (m, model), (t, task), (r, recipe) in product(*map(enumerate, (models, tasks, recipes))):
        is_next = (m + r) % len(tasks) == t
        yield pytest.param(model, task, recipe, marks=() if is_next else pytest.mark.slow)


@pytest.mark.parametrize("model, task, recipe", list(combinations()))
def test_every_combination_composes_and_builds(model: str, task: str, recipe: str) -> None:
    import torch

    from lra.build import make_model, make_task, num_params

    choice = [f"model={model}", f"task={task}", f"recipe={recipe}"]
    # What an experiment changes is the same for all models.
    for experiment in ([], ["experiment=smoke"]) if model == "luna" else ([],):
        config = typed(compose_config(choice + experiment))
        made = make_task(config)
        # Pixels are numbers where the recipe's source feeds them as such.
        is_real = recipe in ("s4", "s5", "mega") and made.picture_size is not None
        assert (config.shape["input"] == "real") == is_real
        try:
            with torch.device("meta"):  # no memory is taken
                built = make_model(config, made)
        except RuntimeError:  # a constructor that computes with its tensors
            built = make_model(config, made)
        assert num_params(built) > 1000


def test_every_key_of_the_shape_stands_in_every_recipe() -> None:
    import dataclasses

    from lra.build import FROM_TASK
    from models.shape import Shape

    wanted = {f.name for f in dataclasses.fields(Shape)} - {*FROM_TASK}
    for path in (ROOT / "configs/recipe").glob("*.yaml"):
        assert set(typed(compose_config([f"recipe={path.stem}"])).shape) == wanted, path


def test_a_bare_command_takes_no_liberties() -> None:
    """Defaults on which others rely: where things lie, what is sent, what chooses a number."""
    config = typed(compose_config([]))
    places = [str(getattr(config.paths, p)) for p in ("data", "cache", "outputs", "results")]
    assert places == ["data", "data/cache", "outputs", "results"]
    moved = typed(compose_config(["paths.data=/d"])).paths
    assert str(moved.cache) == "/d/cache" and str(moved.results) == "results"
    assert (config.seed, config.recipe, config.logger.name) == (0, "nystromformer", "none")
    assert config.train.selection == "best_val" and not config.train.allow_unreached_peak
    assert config.checkpoint is None and config.init_from is None and not config.sweep.fail_fast
    assert config.hardware.device == "cpu" and config.hardware.precision == "float32"


def test_a_place_of_weights_counts_however_it_is_spelt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/x")
    for key in ("init_from", "checkpoint"):
        for spelt in ("outputs/a", "outputs/a/", "./outputs//a", "outputs/b/../a"):
            assert getattr(typed(compose_config([f"{key}={spelt}"])), key) == "outputs/a"
        assert getattr(typed(compose_config([f"{key}='~/a'"])), key) == "/home/x/a"
        with pytest.raises(ValueError, match=f"^{key}='': expected a run's folder, or null"):
            typed(compose_config([f"{key}=''"]))


def test_transformer_is_another_name_of_softmax() -> None:
    assert (
        typed(compose_config(["model=transformer"])).model
        == typed(compose_config(["model=softmax"])).model
    )


def test_the_vocabulary_does_not_depend_on_hash_seeds() -> None:
    row = "[SM 3 [MAX 8 ] 1 ] [MIN [MED 0 9"
    code = f"from lra.tasks.listops_files import encode; print(encode('{row}').tolist())"
    outs = {
        subprocess.run(
            [sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": str(n)}, cwd=ROOT,
            capture_output=True, text=True, check=True,
        ).stdout
        for n in (1, 2, 3)
    }  # fmt: skip
    assert len(outs) == 1


@pytest.mark.parametrize(
    "signals", [[signal.SIGTERM, signal.SIGTERM], [signal.SIGHUP], [signal.SIGINT, signal.SIGTERM]]
)
def test_signals_in_quick_succession_save_the_state_and_leave_a_record(
    tmp_path: Path, signals: list[signal.Signals]
) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    process = start(tmp_path, *TINY, "train.num_steps=4000", "train.eval_every=4000")
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not list(tmp_path.glob("outputs/*/metrics.jsonl")):
        time.sleep(0.01)
    time.sleep(0.2)
    for number in signals:
        process.send_signal(number)
        time.sleep(0.02)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    record = read_record(tmp_path)
    assert record.status == "interrupted" and signals[0].name in record.message
    (status,) = tmp_path.glob("outputs/*/status.json")
    assert json.loads(status.read_text())["status"] == "interrupted"


def test_a_terminal_that_is_closed_stops_the_run_with_its_state(tmp_path: Path) -> None:
    import pty

    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    pid, terminal = pty.fork()
    if pid == 0:  # in a session of its own, whose terminal the other end is
        os.chdir(tmp_path)
        command = [sys.executable, str(ROOT / "run.py"), *TINY, "train.num_steps=4000"]
        os.execv(sys.executable, [*command, "train.eval_every=4000"])
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not list(tmp_path.glob("outputs/*/metrics.jsonl")):
        with contextlib.suppress(BlockingIOError):
            os.set_blocking(terminal, False)
            os.read(terminal, 65536)
        time.sleep(0.01)
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 75
    record = read_record(tmp_path)
    assert record.status == "interrupted" and "SIGHUP" in record.message
    assert "SIGHUP" in next(tmp_path.glob("outputs/*/run.log")).read_text()


def test_a_closed_terminal_does_not_stop_what_ignores_it(tmp_path: Path) -> None:
    process = subprocess.Popen(
        ["nohup", sys.executable, str(ROOT / "run.py"), *TINY, "train.num_steps=100",
         "train.eval_every=100", "train.checkpoint_every=60"],
        cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not list(tmp_path.glob("outputs/*/metrics.jsonl")):
        time.sleep(0.01)
    process.send_signal(signal.SIGHUP)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err


@pytest.mark.parametrize("target", ["subprocess.Popen", "os.system", "models.shape.Shape"])
def test_only_classes_of_the_right_kind_are_called(tmp_path: Path, target: str) -> None:
    for key, base in (("task", "Task"), ("model", "Module")):
        code, _, err = call(tmp_path, *TINY, f"{key}._target_={target}")
        assert code == 2 and f"{key}._target_={target}: expected a class derived from {base}" in err


def test_a_yaml_tag_that_calls_something_is_refused(tmp_path: Path) -> None:
    (tmp_path / "conf/model").mkdir(parents=True)
    text = "_target_: !!python/object/apply:os.system ['touch called']\n"
    (tmp_path / "conf/model/evil.yaml").write_text(text)
    code, _, err = call(tmp_path, "--config-dir", "conf", "model=evil")
    assert code == 2 and "evil.yaml" in err and "Traceback" not in err
    assert not (tmp_path / "called").exists()
