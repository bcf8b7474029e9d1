"""Sweeps through the real command line: failures, restarts, launchers."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import OmegaConf

from lra import multirun
from lra.build import resolved
from lra.cli import CONFIGS, compose_config, typed
from lra.config import config_hash
from lra.files import NotWritten
from lra.multirun import check_jobs, check_search, sweep_jobs
from lra.results import records
from lra.results.leaderboard import make_rows
from lra.sweep import (
    Outcome,
    has_failed,
    note,
    note_jobs,
    objective,
    outcomes,
    position,
    summary,
)
from lra.tasks.workers import available_cores, available_memory
from tests import programs
from tests.test_cli import ROOT, TINY, in_process, start

# Ends in every way there is, by seed; keyed on the process's own seeding.
TROUBLE = """
import os, pathlib, signal, time, torch
from models.softmax import SoftmaxAttention

class Trouble(SoftmaxAttention):
    def __init__(self, shape, *, causal=False):
        super().__init__(shape, causal=causal)
        assert torch.initial_seed() != 5  # before there is a record, and without a message

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
            if seed in (9, 10) and not pathlib.Path("stopped").exists():
                if seed == 9:  # once the other is at its first step
                    while not pathlib.Path("waits").exists():
                        time.sleep(0.01)
                    os.kill(os.getppid(), signal.SIGINT)
                pathlib.Path("waits").touch()
                while not list(pathlib.Path("outputs").rglob("launch-*/stopped")):
                    time.sleep(0.01)
                time.sleep(0.5)  # the signal is on its way
                pathlib.Path("stopped").touch()
            number = {6: signal.SIGTERM, 7: signal.SIGUSR2, 8: signal.SIGKILL}.get(seed)
            if number and not pathlib.Path(f"sent{seed}").exists():
                pathlib.Path(f"sent{seed}").touch()
                os.kill(os.getpid(), number)
        return y_BLD
"""


def sweep(folder: Path, *arguments: str, timeout: float = 300) -> tuple[int, str, str]:
    (folder / "trouble.py").write_text(TROUBLE)
    path = {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    done = programs.call("run.py", "-m", *TINY, *arguments, cwd=folder, env=path, timeout=timeout)
    return done.returncode, done.stdout, done.stderr


def found(folder: Path, model: str) -> dict[int, records.Record]:
    paths = (folder / "outputs/results/runs/listops" / model).glob("*.json")
    return {r.seed: r for r in map(records.load, paths)}


GOOD = ("completed", "at_chance")
BAD = ["model=softmax", "model._target_=trouble.Trouble"]


def test_failures_are_recorded_at_once_and_the_others_go_on(tmp_path: Path) -> None:
    code, out, _ = sweep(tmp_path, *BAD, "seed=0,1,2,3,4")
    assert code == 4  # the worst of the jobs' own codes
    by_seed = found(tmp_path, "trouble")
    assert set(by_seed) == {0, 1, 2, 3, 4}
    assert by_seed[0].status in GOOD and by_seed[4].status in GOOD
    assert [by_seed[s].status for s in (1, 2, 3)] == ["failed", "diverged", "out_of_memory"]
    last: dict[int, str] = {}  # line of the trace, where the code failed
    for seed, record in by_seed.items():
        folder = tmp_path / "outputs" / record.run_id
        assert json.loads((folder / "status.json").read_text())["status"] == record.status
        if (folder / "traceback.txt").exists():
            last[seed] = (folder / "traceback.txt").read_text().splitlines()[-1]
        assert (record.result is None) == (seed in (1, 2, 3))
    assert last.keys() == {1, 3} and last[1] == "RuntimeError: injected"
    assert "OutOfMemoryError: injected" in last[3]
    assert (
        "micro-batch is now 1" in (tmp_path / "outputs" / by_seed[3].run_id / "run.log").read_text()
    )
    assert "step 1: the loss is nan" in by_seed[2].message
    *lines, count = out.strip().splitlines()[-6:]
    for seed, line in enumerate(lines):
        record = by_seed[seed]
        assert line.split()[:2] == [str(seed + 1), record.status]
        assert record.run_id in line and line.endswith(record.message)
    assert count.startswith("5 jobs: ")
    for part in ("1 failed", "1 diverged", "1 out_of_memory"):
        assert part in count


def test_an_error_before_the_run_and_without_a_message_is_one_of_the_outcomes(
    tmp_path: Path,
) -> None:
    code, out, err = sweep(tmp_path, *BAD, "seed=5,0")
    assert code == 1 and "AssertionError" in err
    assert set(found(tmp_path, "trouble")) == {0}
    first, _, count = out.strip().splitlines()[-3:]
    assert first.split() == ["1", "failed", "AssertionError"] and "1 failed" in count


def test_a_signal_to_the_whole_sweep_ends_it_with_a_summary_and_it_goes_on_later(
    tmp_path: Path,
) -> None:
    code, out, _ = sweep(tmp_path, *BAD, "seed=0,6,4")
    by_seed = found(tmp_path, "trouble")
    assert code == 75 and set(by_seed) == {0, 6}
    assert by_seed[6].status == "interrupted" and "SIGTERM at step 1" in by_seed[6].message
    folder = tmp_path / "outputs" / by_seed[6].run_id
    assert json.loads((folder / "status.json").read_text())["status"] == "interrupted"
    assert not (folder / "traceback.txt").exists()
    *_, last, count = out.strip().splitlines()
    assert last.split()[:2] == ["2", "interrupted"] and by_seed[6].run_id in last
    assert count.startswith("3 jobs: ") and "1 interrupted, 1 without an outcome" in count
    code, out, _ = sweep(tmp_path, *BAD, "seed=0,6,4")
    assert code == 0 and "resuming at step 1" in out and out.count("nothing to do") == 1
    assert {s: r.status in GOOD for s, r in found(tmp_path, "trouble").items()} == {
        0: True, 6: True, 4: True,
    }  # fmt: skip


def test_a_time_limit_ends_one_job_and_not_the_sweep(tmp_path: Path) -> None:
    code, out, _ = sweep(tmp_path, *BAD, "seed=0,4", "train.time_limit=1e-9")
    assert code == 75 and out.strip().splitlines()[-1] == "2 jobs: 2 interrupted"


def test_fail_fast_starts_no_further_job(tmp_path: Path) -> None:
    code, out, _ = sweep(tmp_path, *BAD, "seed=1,0,4", "sweep.fail_fast=true")
    assert code == 1 and "2 skipped" in out
    assert set(found(tmp_path, "trouble")) == {1}


def test_a_refused_job_does_not_stop_the_sweep(tmp_path: Path) -> None:
    code, out, err = sweep(tmp_path, "shape.num_heads=2,5", "shape.d_model=16")
    assert code == 2 and "shape.num_heads=5 does not divide" in err
    # All jobs are checked first: the mistake in the last is told before the first has run.
    warning, *_ = err.splitlines()
    assert warning.startswith("warning: job 2 (") and "shape.num_heads=5" in warning
    assert warning.count("shape.d_model=") == 2  # once among its words, and once in the message
    assert "1 refused" in out and len(found(tmp_path, "luna")) == 1


def test_one_refusal_of_several_jobs_is_told_once(tmp_path: Path) -> None:
    code, out, err = sweep(tmp_path, "shape.num_heads=5,2", "seed=0,1,2", "shape.d_model=16")
    message = "shape.num_heads=5 does not divide shape.d_model=16"
    assert code == 2 and err.count(message) == 1
    assert err.startswith(f"warning: 3 of 6 jobs (1, 2, 3) will be refused: {message}")
    assert out.count(message) == 1
    assert re.search("^2 +refused +as job 1$", out, re.MULTILINE)
    assert "6 jobs: 3 refused" in out and len(found(tmp_path, "luna")) == 3


def test_data_that_are_missing_are_told_by_plan_and_summary_and_not_by_each_job(
    tmp_path: Path,
) -> None:
    done = programs.call("run.py", "-m", "task=text", "model=none", "seed=0,1", cwd=tmp_path)
    out, message = done.stdout, "task 'text': found no IMDb reviews"
    assert done.returncode == 2 and message not in done.stderr and out.count(message) == 2
    assert f"not estimated: {message}" in out and "2 jobs: 2 refused" in out


def test_a_sweep_has_a_folder_of_its_own(tmp_path: Path) -> None:
    """Also beside another that starts in the same second."""
    words = ["-m", *TINY, "shape.num_heads=2,5"]  # the second is refused
    programs_ = [programs.start("run.py", *words, cwd=tmp_path) for _ in range(2)]
    for program in programs_:
        program.communicate(timeout=60)
        assert program.returncode == 2
    folders = {p.name for p in (tmp_path / "outputs/.sweeps").iterdir()}
    assert {name.split("-", 2)[2] for name in folders} == {str(p.pid) for p in programs_}


def test_each_start_of_a_sweep_counts_its_own_jobs(tmp_path: Path) -> None:
    """Also in the folder of an earlier one, of which more jobs were there, and one failed."""
    here = "hydra.sweep.dir=here"
    code, out, _ = sweep(tmp_path, *BAD, "seed=1,0,4", here)
    assert code == 1 and "3 jobs: " in out
    code, out, _ = sweep(tmp_path, *BAD, "seed=0,4", here, "sweep.fail_fast=true")
    assert code == 0 and out.count("nothing to do") == 2
    assert out.splitlines()[-1].startswith("2 jobs: ") and "skipped" not in out


def jobs(words: list[str], **params: str) -> list[list[str]]:
    """The jobs of a sweep by Hydra's own sweeper; `params` as a file has them."""
    target = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
    sweeper = {"_target_": target, "params": params or None}
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return sweep_jobs(OmegaConf.create({"sweeper": sweeper, "overrides": {"task": words}}))


def test_the_jobs_are_known_beforehand_whatever_the_syntax() -> None:
    assert jobs(["model=glob([soft*,trans*])"]) == [["model=softmax"], ["model=transformer"]]
    assert jobs(["model=glob(soft*,exclude=[t*,n*])", "seed=range(0,2)"]) == [
        ["model=softmax", "seed=0"], ["model=softmax", "seed=1"],
    ]  # fmt: skip
    assert jobs(["seed=choice(3,1)", "recipe=sort(luna,lra,reverse=true)"]) == [
        [f"seed={seed}", f"recipe={recipe}"] for seed in (3, 1) for recipe in ("luna", "lra")
    ]
    assert jobs(["train.lr=0.5"], seed="4,5") == [
        ["seed=4", "train.lr=0.5"], ["seed=5", "train.lr=0.5"],
    ]  # fmt: skip
    assert jobs(["seed=7"], seed="4,5") == [["seed=7"]]  # the command line wins
    # What is drawn here the sweeper draws once more, from the same state.
    shuffled = [jobs(["seed=shuffle(range(0,20))"]) for _ in range(2)]
    assert shuffled[0] == shuffled[1] != sorted(shuffled[0])


def test_another_name_of_a_model_is_not_trained_twice(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    launcher = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    code, out, err = sweep(tmp_path, "model=glob([soft*,trans*])", *launcher)
    (record,) = found(tmp_path, "softmax").values()
    assert code == 0 and err.startswith(
        "note: job 2 (model=transformer) is skipped: the same run as job 1 (model=softmax), "
        f"{record.run_id}\n"
    )
    *_, second, count = out.splitlines()
    assert second.split(maxsplit=2) == ["2", "skipped", f"{record.run_id}: the same run as job 1"]
    assert count == f"2 jobs: 1 {record.status}, 1 skipped"


def test_jobs_that_are_one_run_are_known_beforehand(capsys: pytest.CaptureFixture[str]) -> None:
    precisions = [[*TINY, f"hardware.precision={p}", "seed=3"] for p in ("float32", "bf16")]
    ((number, (earlier, name)),) = check_jobs(precisions, [])[1].items()
    assert (number, earlier) == (1, 0) and name.startswith("listops-luna-seed3-")
    assert "so both need paths.outputs of their own" in capsys.readouterr().err
    elsewhere = [[*words, f"paths.outputs=out{i}"] for i, words in enumerate(precisions)]
    assert check_jobs(elsewhere, [])[1] == {} and not capsys.readouterr().err
    three = [[*TINY, f"train.log_every={n}"] for n in (1, 2, 3)]
    assert check_jobs(three, [])[1].keys() == {1, 2}
    assert "note: 2 jobs (2, 3) are skipped: the same run as job 1 (" in capsys.readouterr().err
    assert check_jobs([[*TINY, f"checkpoint=outputs/{name}"] for name in "ab"], []) == ({}, {})


def test_a_sweeper_that_optimises_gets_validation_accuracy(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="comes with the extra tune")
    search = ["hydra/sweeper=optuna", "hydra.sweeper.direction=maximize",
              "hydra.sweeper.n_trials=4", "hydra.sweeper.n_jobs=1",
              "hydra.sweeper.sampler.seed=0"]  # fmt: skip
    space = ["train.lr=interval(1e-3,1e-1)", "seed=choice(0,2)"]  # with seed 2 it diverges
    code, out, err = sweep(tmp_path, *BAD, *search, *space)
    assert code == 3, err
    paths = (tmp_path / "outputs/results/runs/listops/trouble").glob("*.json")
    made = [records.load(path) for path in paths]
    good = [r for r in made if r.result]
    assert len(made) == 4 and 2 <= len(good) <= 3
    best = max(good, key=lambda r: r.result.val.accuracy)  # type: ignore[union-attr]
    assert best.result and best.result.val.accuracy not in {r.result.test.accuracy for r in good}  # type: ignore[union-attr]
    (path,) = (tmp_path / "outputs/.sweeps").glob("*/optimization_results.yaml")
    answer = OmegaConf.load(path)
    assert answer.best_value == best.result.val.accuracy
    assert dict(answer.best_params) == {"train.lr": best.config["train"]["lr"], "seed": 0}
    # What is best is said, and which jobs could be checked beforehand.
    assert out.endswith(f"\n{path.relative_to(tmp_path)}\n{path.read_text()}")
    assert "4 jobs: " in out and err.startswith("note: which jobs there will be is the sweeper's")


def test_what_a_job_is_worth_to_a_sweeper() -> None:
    assert objective(Outcome(0, "completed", 0, accuracy=0.9, val_accuracy=0.5)) == 0.5
    for status in ("diverged", "failed", "out_of_memory", "refused"):
        assert objective(Outcome(0, status, 1)) == 0
    for status in ("busy", "interrupted", "skipped"):
        assert objective(Outcome(0, status, 1)) is None


def test_a_search_is_checked_at_the_ends_of_its_ranges(capsys: pytest.CaptureFixture[str]) -> None:
    def check(*words: str, **sweeper: str) -> str:
        sweeper = {"_target_": "some.Sweeper"} | sweeper
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            check_search(OmegaConf.create({"sweeper": sweeper, "overrides": {"task": words}}))
        return capsys.readouterr().err

    space = ["shape.num_heads=choice(2,4,5)", "train.lr=tag(log,interval(1e-4,1e-2))"]
    note, warning = check("shape.d_model=16", *space, direction="maximize").splitlines()
    assert note.startswith("note: ") and warning.startswith(
        "warning: a job with shape.num_heads=5 train.lr=0.01 will be refused: shape.num_heads"
    )
    assert "train.lr=-1.0: expected a number above 0" in check("train.lr=interval(-1.0,1.0)")
    assert "note: no job was checked beforehand (" in check("train.lr=loguniform(1")
    with pytest.raises(SystemExit):
        check(*space, direction="Direction.minimize")
    assert "hydra.sweeper.direction=minimize" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        check("train.rl=interval(1e-4,1e-2)")
    assert "error: train.rl=interval(1e-4,1e-2): unknown key; " in capsys.readouterr().err


@pytest.mark.slow
def test_a_job_that_would_import_another_copy_is_refused(tmp_path: Path) -> None:
    """The jobs of this launcher look into the folder where the command was given first."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    for name in ("lra", "models"):
        shutil.copytree(ROOT / name, tmp_path / name)
    launcher = ["hydra/launcher=submitit_local", "hydra.launcher.timeout_min=5"]
    code, _, err = sweep(tmp_path, *launcher, "seed=0,1")
    assert code == 2 and not list(tmp_path.glob("outputs/listops-*"))
    assert (
        f"error: lra is imported from {tmp_path / 'lra'}, but this is the run.py of {ROOT}" in err
    )


def test_a_key_of_one_model_only_is_named_as_that(tmp_path: Path) -> None:
    code, _, err = sweep(tmp_path, "model=softmax,luna", "model.projection_length=16")
    assert code == 2 and "Traceback" not in err
    assert err.splitlines()[-1] == (
        "error: model.projection_length=16: not a key of every choice in this sweep"
    )


def test_a_sweep_that_cannot_write_names_the_key(tmp_path: Path) -> None:
    (tmp_path / "outputs").write_text("a file, not a folder")
    code, _, err = sweep(tmp_path, "seed=0,1")
    assert code == 2 and "not writable" in err and "choose another paths.outputs" in err


def test_a_sweep_that_cannot_write_where_it_was_told_to_names_that_key(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, _, err = sweep(tmp_path, "seed=0,1", "hydra.sweep.dir=file/x")
    assert code == 2 and "choose another hydra.sweep.dir" in err


@pytest.mark.parametrize(
    "error, message",
    [
        (NotWritten(errno.ENOSPC, "full", "jobs.json"), "(full); free some space or choose another "
         "paths.outputs; the same"),
        (OSError("outputs: not writable"), "error: outputs: not writable\n"),
        (KeyError("jobs"), "error: the sweep did not start: KeyError: 'jobs'\n"),
    ],
)  # fmt: skip
def test_an_error_at_the_start_of_a_sweep_ends_it(
    error: Exception, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Hydra would only warn of it."""

    def fail(*_: object) -> None:
        raise error

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(multirun, "note_jobs", fail)
    code, _, err = in_process(["-m", *TINY, "seed=0,1"], monkeypatch, capsys)
    assert code == 2 and message in err and err.count("\n") == 1


def test_a_model_that_cannot_be_built_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    code, out, err = sweep(tmp_path, f"shape.d_ff=16,{10**15}", "seed=0,0")
    warning, note, *others = err.splitlines()
    assert warning.startswith("warning: 2 of 4 jobs (3, 4) will be refused: out of memory: ")
    assert note.startswith("note: job 2 ") and not any("error" in line for line in others)
    assert code == 4 and out.splitlines()[-1].endswith(", 1 skipped, 2 out_of_memory")


def test_a_sweep_whose_reader_has_gone_runs_all_its_jobs(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    words = ["-m", *TINY, "seed=0,1"]
    program = programs.start("run.py", *words, cwd=tmp_path, stdout=write_end)
    os.close(write_end)
    _, err = program.communicate(timeout=300)
    assert program.returncode == 0 and found(tmp_path, "luna").keys() == {0, 1}, err


def test_a_killed_sweep_goes_on_where_it_was(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "cut").mkdir()
    arguments = ["train.num_steps=24", "train.eval_every=8", "seed=0,1,2"]
    assert sweep(tmp_path / "whole", *arguments)[0] == 0
    process = start(tmp_path / "cut", "-m", *TINY, *arguments)
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and not list(
        (tmp_path / "cut").glob("outputs/*seed1*/checkpoints/step-*.pt")
    ):
        time.sleep(0.005)
    process.kill()
    process.communicate()
    (first,) = (tmp_path / "cut").glob("outputs/results/runs/listops/luna/*seed0*.json")
    written = first.stat().st_mtime_ns
    code, out, _ = sweep(tmp_path / "cut", *arguments)
    assert code == 0 and out.count("nothing to do") == 1 and out.count("resuming at step") == 1
    # A job that had ended before says nothing about the pace.
    assert [li for li in out.splitlines() if li.startswith("job 2 of")] == ["job 2 of 3"]
    assert re.search("seed0-[0-9a-f]+ is finished .*nothing to do", out)
    assert first.stat().st_mtime_ns == written
    whole, cut = found(tmp_path / "whole", "luna"), found(tmp_path / "cut", "luna")
    assert set(cut) == {0, 1, 2}
    for seed, record in whole.items():
        assert record.result == cut[seed].result and record.curve == cut[seed].curve
    # Repeats differ in their seed alone, so they share one cell of a table.
    (row,) = make_rows(cut.values())
    assert len(row.cells["listops"].runs) == 3


def test_a_sweep_over_lists_runs_each_list(tmp_path: Path) -> None:
    code, out, err = sweep(tmp_path, "shape.head_hidden=[8],[4,4]")
    assert code == 0, err
    paths = (tmp_path / "outputs/results/runs/listops/luna").glob("*.json")
    heads = [records.load(path).config["shape"]["head_hidden"] for path in paths]
    assert sorted(heads) == [[4, 4], [8]] and "2 jobs: " in out
    # Where each job stands in the sweep, once there is a pace how long the rest takes, and at the
    # end what each has changed.
    first, second = [line for line in out.splitlines() if re.match(r"job \d of", line)]
    assert first == "job 1 of 2"
    assert re.fullmatch(
        r"job 2 of 2; at the pace so far about .* s to the end of the sweep", second
    )
    assert re.search(r"^1 .*-seed0-\w+ \(.*head_hidden=\[8\]", out, re.MULTILINE)


def test_long_and_odd_overrides_give_short_safe_folder_names(tmp_path: Path) -> None:
    odd = tmp_path / "a path with blanks, ä and $"
    odd.mkdir()
    many = [f"train.log_every={n}" for n in range(1, 26)]
    code, _, err = sweep(odd, *many, "paths.cache='x y/ü'")
    assert code == 0, err
    (folder,) = odd.glob("outputs/listops-*")
    assert len(folder.name) < 100 and folder.name.replace("-", "").isalnum()


def test_jobs_side_by_side(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    code, out, err = sweep(tmp_path, *BAD, "sweep.parallel=2", "seed=0,1,4")
    assert code == 1 and "Exception in thread" not in err, err
    by_seed = found(tmp_path, "trouble")
    assert {s: r.status == "failed" for s, r in by_seed.items()} == {0: False, 1: True, 4: False}
    assert "3 jobs: " in out and "1 failed" in out
    threads = max(1, available_cores() // 2)
    assert out.startswith(f"3 jobs, 2 at a time with {threads} thread{'s' * (threads > 1)} each, ")
    *first, last = sorted(re.findall(r"^job \d.*", out, re.MULTILINE))
    assert first == ["job 1 of 3", "job 2 of 3"] and last.startswith("job 3 of 3; at the pace so")
    assert by_seed[0].hardware["num_threads"] == 1  # TINY asks for it


def test_a_signal_saves_jobs_side_by_side_and_starts_no_more(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    words = [*BAD, "sweep.parallel=2", "sweep.plan=false", "seed=9,10,0"]
    code, out, err = sweep(tmp_path, *words)
    by_seed = found(tmp_path, "trouble")
    assert code == 75 and by_seed.keys() == {9, 10} and "Traceback" not in err, err
    for record in by_seed.values():
        assert record.status == "interrupted" and record.message == "stopped by SIGINT at step 1"
    *_, last, count = out.strip().splitlines()
    assert last.split(maxsplit=2) == ["3", "skipped", "the sweep: stopped by SIGINT"]
    assert count == "3 jobs: 2 interrupted, 1 skipped"
    code, out, err = sweep(tmp_path, *words)
    assert code == 0 and out.count("resuming at step 1") == 2, err
    assert all(record.status in GOOD for record in found(tmp_path, "trouble").values())


def test_a_full_disk_keeps_no_job_from_the_signal_to_its_sweep(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise NotWritten(errno.ENOSPC, "full", "stopped")

    sent: list[tuple[int, int]] = []
    with monkeypatch.context() as patch:
        patch.setattr(multirun, "note_stop", full)
        patch.setattr(multirun.multiprocessing, "active_children", lambda: [SimpleNamespace(pid=7)])
        multirun.stop_jobs_with_sweep(Path("launch"))
        patch.setattr(multirun.os, "kill", lambda *what: sent.append(what))
        signal.raise_signal(signal.SIGTERM)
    assert sent == [(7, signal.SIGTERM)]
    assert "full: 'stopped'; jobs to come will start in spite of SIGTERM" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_before_the_training_is_a_jobs_own_once_and_between_jobs_nobodys(
    number: int,
) -> None:
    signal.signal(number, lambda *_: None)  # what is not caught shall not end the tests
    beside = multirun.JobSettings(0, Path("launch"), in_sweep_process=False, at_a_time=2)
    with pytest.raises(KeyboardInterrupt), beside.signals():
        try:
            os.kill(os.getpid(), number)
        finally:
            os.kill(os.getpid(), number)  # the same wish by another way
    os.kill(os.getpid(), number)
    alone = multirun.JobSettings(0, Path("launch"), in_sweep_process=True, at_a_time=1)
    before = signal.getsignal(number)
    with alone.signals():
        assert signal.getsignal(number) == before


def test_a_killed_job_beside_others_is_named_and_the_same_command_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    launcher = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    code, out, err = sweep(
        tmp_path, *BAD, *launcher, "seed=0,8"
    )  # a SIGKILL from itself in its first step
    assert code == 1 and "Traceback" not in err
    assert "a job ended without an outcome" in err and "the same command goes on" in err
    assert re.search(r"^[0-2] jobs?: ", out, re.MULTILINE)
    code, out, err = sweep(tmp_path, *BAD, "seed=0,8")  # a launcher more would change nothing
    assert code == 0, err
    assert set(found(tmp_path, "trouble")) == {0, 8} and "2 jobs: " in out


@pytest.mark.slow
def test_a_job_that_a_scheduler_stops_goes_back_to_its_queue_and_resumes(tmp_path: Path) -> None:
    """With submitit, which also runs Slurm's jobs; its local executor puts back for real."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    launcher = ["hydra/launcher=submitit_local", "hydra.launcher.timeout_min=5"]
    code, out, err = sweep(tmp_path, *BAD, *launcher, "seed=1,6,7")
    by_seed = found(tmp_path, "trouble")
    assert code == 75, err  # of the job that SIGTERM ended for good
    assert [by_seed[s].status for s in (1, 6)] == ["failed", "interrupted"]
    assert by_seed[7].status in GOOD and "SIGTERM at step 1" in by_seed[6].message
    assert [point["step"] for point in by_seed[7].curve] == [4, 8]
    log = (tmp_path / "outputs" / by_seed[7].run_id / "run.log").read_text()
    before, resumed, _ = log.partition("resuming at step 1\n")
    assert resumed and "interrupted: stopped by SIGUSR2 at step 1; the same command" in before
    # Its record was written: the last line; the path in the header says where it will be.
    assert len(re.findall(rf"^.*record   \S*{by_seed[7].run_id}\.json$", before, re.M)) == 1
    (submitit,) = [
        text
        for path in tmp_path.glob("outputs/.sweeps/*/.submitit/*/*_log.out")
        if "Requeued job" in (text := path.read_text())
    ]
    assert by_seed[7].run_id in submitit
    *lines, count = out.strip().splitlines()[-4:]
    assert [line.split()[1] for line in lines] == ["failed", "interrupted", by_seed[7].status]
    assert count.startswith("3 jobs: ")


def test_where_a_job_stands_and_how_long_the_rest_takes(tmp_path: Path) -> None:
    assert position(tmp_path, 0, at_a_time=1) == "job 1"
    note_jobs(tmp_path, 4, {})
    assert position(tmp_path, 0, at_a_time=1) == "job 1 of 4"
    note(tmp_path, Outcome(0, "completed", 0, "run-a", 0.5))  # was there before
    assert position(tmp_path, 1, at_a_time=1) == "job 2 of 4"
    note(tmp_path, Outcome(1, "completed", 0, "run-b", 0.5, trained_s=90))
    assert position(tmp_path, 2, at_a_time=None) == "job 3 of 4"
    assert position(tmp_path, 2, at_a_time=1) == (
        "job 3 of 4; at the pace so far about 3 min 00 s to the end of the sweep"
    )
    assert position(tmp_path, 1, at_a_time=2).endswith("about 3 min 00 s to the end of the sweep")
    assert position(tmp_path, 3, at_a_time=2).endswith("about 1 min 30 s to the end of the sweep")
    assert len(outcomes(tmp_path)) == 2


def test_time_left_is_as_planned_until_jobs_have_shown_their_pace(tmp_path: Path) -> None:
    note_jobs(tmp_path, 4, {}, [0.0, 60.0, 120.0, None])  # the first was finished before
    note(tmp_path, Outcome(0, "completed", 0))
    for number, at_a_time, left in ((1, 1, "4 min 30 s"), (2, 2, "2 min 00 s")):
        assert position(tmp_path, number, at_a_time=at_a_time) == (
            f"job {number + 1} of 4; by the plan about {left} to the end of the sweep"
        )
    note(tmp_path, Outcome(1, "completed", 0, trained_s=90))  # half as long again
    assert position(tmp_path, 2, at_a_time=1) == (
        "job 3 of 4; at the pace so far about 5 min 15 s to the end of the sweep"
    )


def test_jobs_at_a_time_are_as_many_as_cores_memory_and_jobs_allow(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(multirun, "available_cores", lambda: 8)
    monkeypatch.setattr(multirun, "available_memory", lambda: 9 * 2**30)

    def count(*words: str) -> str:
        first, *rest = multirun.launcher_words(["-m", *words]) or ["", ""]
        assert first in ("hydra/launcher=joblib", "")
        return rest[0].removeprefix("hydra.launcher.n_jobs=")

    assert count("sweep.parallel=auto", "seed=0,1,2") == "3"  # jobs
    assert count("sweep.parallel=auto", "seed=range(9)") == "4"  # memory
    assert count("sweep.parallel=auto", "model=glob(s*)", "seed=range(9)") == "4"
    monkeypatch.setattr(multirun, "available_memory", lambda: 2**40)
    assert count("sweep.parallel=auto", "seed=range(9)") == "8"  # cores
    assert count("sweep.parallel=12", "seed=0,1") == "12"  # as asked
    for spelling in ("sweep.parallel=+2", "++sweep.parallel=2", "sweep.parallel= 2"):
        assert count(spelling, "seed=0,1,2") == "2"
    assert count("sweep.parallel='auto'", "seed=0,1,2") == "3"
    assert count("sweep.parallel=1", "seed=0,1") == count("seed=0,1") == ""
    assert multirun.launcher_words(["sweep.parallel=auto", "seed=0"]) == []  # no sweep
    for words, message in (
        (("sweep.parallel=2", "hydra/launcher=joblib"), "says already how jobs are started"),
        (("sweep.parallel=1", "hydra/launcher=joblib"), "says already how jobs are started"),
        (("sweep.parallel=auto", "hardware=gpu"), "counts cores, not what hardware=gpu needs"),
    ):
        with pytest.raises(SystemExit):
            count(*words)
        assert message in capsys.readouterr().err
    assert count("sweep.parallel=2", "hardware=gpu") == "2"
    for wrong in ("many", "0", "1.5"):
        with pytest.raises(ValueError, match=f"sweep.parallel={wrong}: expected"):
            typed(compose_config([f"sweep.parallel={wrong}"]))


def test_outcomes_in_a_folder(tmp_path: Path) -> None:
    note(tmp_path, Outcome(10, "completed", 0, "run-b", 0.5))
    note(tmp_path, Outcome(2, "completed", 0, "run-a", 1 / 32))
    assert [o.number for o in outcomes(tmp_path)] == [2, 10] and not has_failed(tmp_path)
    note(tmp_path, Outcome(3, "busy", 2))  # done by another process, with a code of its own
    assert not has_failed(tmp_path)
    note(tmp_path, Outcome(3, "failed", 1, "run-c", message="why", setting="lr=0.1"))
    assert has_failed(tmp_path)
    assert "\n4    failed             run-c (lr=0.1): why\n" in summary(outcomes(tmp_path), 4)
    text = summary(outcomes(tmp_path), 4)
    assert "50.00" in text and "3.13" in text  # as tables print 3.125
    assert "why" in text and "1 without an outcome" in text


def test_slurm_keys_and_other_options_of_sbatch_stand_in_the_submitted_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitit = pytest.importorskip("submitit")
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    (tmp_path / "srun").touch(mode=0o755)  # submitit wants to find one
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    words = [
        "hardware=slurm", "hardware.slurm.partition=gpu", "hardware.slurm.qos=long",
        "hardware.slurm.constraint='a100|h100'", "hardware.num_devices=2",
        'hardware.slurm.setup=["module load cuda/12.4","source env.sh"]',
        "hydra.launcher.gres=gpu:a100:2", "+hydra.launcher.additional_parameters.reservation=mine",
        f"paths.outputs={tmp_path}",
    ]  # fmt: skip
    slurm = typed(compose_config(words)).hardware.slurm
    assert slurm and slurm.setup == ("module load cuda/12.4", "source env.sh")
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        config = compose("config", overrides=words, return_hydra_config=True)
    launcher = instantiate(config.hydra.launcher)
    launcher.config = config
    texts = []

    def submit(executor: Any, *_: Any) -> list[Any]:
        texts.append(executor._executor._make_submission_file_text("the command", "id"))
        return []

    monkeypatch.setattr(submitit.AutoExecutor, "map_array", submit)
    launcher.launch([["seed=0"]], 0)
    lines = texts[0].splitlines()
    for option in ("partition=gpu", "qos=long", "constraint='a100|h100'", "gres=gpu:a100:2",
                   "reservation=mine", "gpus-per-node=2", "ntasks-per-node=2"):  # fmt: skip
        assert f"#SBATCH --{option}" in lines
    first = lines.index("module load cuda/12.4")
    assert lines[first + 1] == "source env.sh" and lines[-1].endswith("the command")


def test_where_a_run_waits_in_the_queue_is_no_part_of_its_identity() -> None:
    plain, slurm = (
        resolved(typed(compose_config(words)))
        for words in ([], ["hardware=slurm", "hardware.slurm.qos=long", "hardware.slurm.setup=[a]"])
    )
    assert slurm["hardware"]["slurm"]["setup"] == ["a"]
    assert config_hash(plain) == config_hash(slurm)


def test_available_memory_is_under_the_limit_of_the_group(tmp_path: Path) -> None:
    assert available_memory(tmp_path) == 2**40  # nothing is said
    group = tmp_path / "sys/fs/cgroup"
    for folder in (tmp_path / "proc", group):
        folder.mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    4096 kB\n")
    assert available_memory(tmp_path) == 2**22
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("1000\n")
    assert available_memory(tmp_path) == 2**22
    (group / "memory.max").write_text("5000\n")
    assert available_memory(tmp_path) == 4000
