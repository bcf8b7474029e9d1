"""What a sweep says beforehand: arithmetic on made-up times, and one real plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from lra import estimate, multirun
from lra.build import make_task, resolved
from lra.cli import compose_config, typed
from lra.config import PretrainConfig, config_hash
from lra.estimate import Setting, memory_needed, plan_sweep, plan_text
from lra.plan import Plan
from lra.pretraining import WEIGHTS, folder_name, identity_of
from lra.speed.forecast import (
    Batches,
    Forecast,
    batches_of,
    extended,
    run_seconds,
    typical,
)
from lra.tasks.cache import prepare
from tests import test_sweep
from tests.test_cli import TINY

HOUR, GIB = 3600.0, 2**30


def config(folder: Path, *words: str) -> Any:
    return typed(compose_config([*TINY, f"paths.cache={folder}", *words]))


def checked(folder: Path, *groups: list[str]) -> tuple[list[list[str]], dict[int, Plan]]:
    """Jobs and plans of words that each are crossed with two seeds."""
    places = [f"paths.{name}={folder}/{name}" for name in ("cache", "outputs", "results")]
    jobs = [[*TINY, *places, *words, f"seed={seed}"] for words in groups for seed in (0, 1)]
    return jobs, multirun.check_jobs(jobs, [])[0]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Mapping[str, Any]]:
    """Instead of a measurement: an hour for softmax, two for others, half of one for a first
    phase; what was asked for."""
    asked: list[Mapping[str, Any]] = []

    def forecasts(
        configs: Mapping[str, Mapping[str, Any]], at_a_time: int
    ) -> dict[str, Forecast | str]:
        asked.append({"at_a_time": at_a_time, **configs})
        return {
            name: Forecast(
                HOUR if "softmax" in plain["model"]["_target_"] else 2 * HOUR, GIB,
                HOUR / 2 if "pretrain" in plain else 0.0,
            )
            for name, plain in configs.items()
        }  # fmt: skip

    monkeypatch.setattr(estimate, "forecasts", forecasts)
    monkeypatch.setattr(estimate, "available_memory", lambda: 3 * GIB)
    return asked


def test_seconds_of_a_run_are_those_of_its_steps_and_evaluations(tmp_path: Path) -> None:
    run = config(tmp_path, "train.num_steps=10", "train.eval_every=4", "train.batch_size=8")
    batches = Batches([64], [64], num_val=20, num_test=30)
    assert run_seconds(run, batches, step_s=2.0, example_s=0.1) == (20 + 3 * 2 + 3, 0)
    pretrain = PretrainConfig("next", num_steps=5, batch_size=16, lr=0.1, eval_every=5)
    both = run_seconds(replace(run, pretrain=pretrain), batches, step_s=2.0, example_s=0.1)
    assert both == pytest.approx((29, 5 * 2 * 2 + 2))  # twice the rows a step; one evaluation


def test_lengths_are_those_of_the_batches_that_will_be_made(tmp_path: Path) -> None:
    run = config(tmp_path, "task.max_length=128", "task.max_tree_length=120")
    found, data = batches_of(make_task(run), run), prepare(make_task(run), tmp_path)
    assert len(found.train) == 16 and len(found.val) == 8 and found.num_test == 32
    assert set(found.train) == {64, 128} and found.train == sorted(found.train)
    assert found.val.count(128) == -(-int((data.val.lengths > 64).sum()) // 4)
    padded = replace(run, train=replace(run.train, pad_to_max=True))
    assert set(batches_of(make_task(padded), padded).train) == {128}
    pictures = typed(compose_config(["task=image", "task.limit_test=7", f"paths.data={tmp_path}"]))
    assert batches_of(make_task(pictures), pictures) == Batches([1024], [1024], 5_000, 7)
    made_up = typed(compose_config(["task=image", "task.source=synthetic", "task.num_val=3"]))
    assert batches_of(make_task(made_up), made_up) == Batches([1024], [1024], 3, 200)
    assert typical(range(90)) == [15, 45, 75] and typical([5]) == [5, 5, 5]


def test_jobs_that_differ_in_seed_and_rate_alone_are_timed_once(
    tmp_path: Path, measured: list[Mapping[str, Any]]
) -> None:
    jobs, plans = checked(
        tmp_path, ["model=luna"], ["model=luna", "train.lr=0.1"], ["model=softmax"],
        ["model=luna", "model.projection_length=8"],
    )  # fmt: skip
    settings, seconds = plan_sweep(jobs, plans, at_a_time=2, num_threads=3)
    assert seconds == [2 * HOUR] * 4 + [HOUR] * 2 + [2 * HOUR] * 2
    (asked,) = measured
    assert asked.keys() == {"at_a_time", "0", "1", "2"} and asked["at_a_time"] == 2
    assert asked["0"]["hardware"]["num_threads"] == 1  # as the job itself says
    assert plan_text(settings, seconds, 2, "8 jobs").splitlines() == [
        "setting                                 jobs  time each         memory each",
        "luna listops                            4     about 2 h 00 min  1.0 GiB",
        "softmax listops                         2     about 1 h 00 min  1.0 GiB",
        "luna listops model.projection_length=8  2     about 2 h 00 min  1.0 GiB",
        "8 jobs: about 7 h 00 min",
    ]
    assert "warning: 4 jobs at a time may need 4.0 GiB" in plan_text(settings, seconds, 4, "")


def test_what_is_done_already_takes_no_time(
    tmp_path: Path, measured: list[Mapping[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs, plans = checked(tmp_path, ["model=luna"], ["model=softmax"])
    checkpoints = plans[1].run_dir / "checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints / "step-00000006.pt").touch()  # of 8
    done = {plans[n].run_dir: Path("record.json") for n in (2, 3)}
    monkeypatch.setattr(estimate.runs, "own_record", lambda run_dir, _: done.get(run_dir))
    monkeypatch.setattr(estimate.records, "load", lambda path: type("Done", (), {"result": path}))
    settings, seconds = plan_sweep(jobs, plans, at_a_time=1, num_threads=None)
    assert seconds == [2 * HOUR, HOUR / 2, 0, 0] and measured[0].keys() == {"at_a_time", "0"}
    text = plan_text(settings, seconds, 1, "4 jobs")
    assert "\nsoftmax listops  2 (2 finished)  -\n" in text
    assert text.endswith("4 jobs: about 2 h 30 min")
    assert plan_text(settings[1:], [0.0, 0.0], 1, "2 jobs").endswith("2 jobs: all finished")


def test_a_first_phase_is_counted_once_for_the_jobs_that_share_it(
    tmp_path: Path, measured: list[Mapping[str, Any]]
) -> None:
    # The rate and the steps of the second phase are none of the first's; the model is.
    jobs, plans = checked(
        tmp_path, ["model=luna", "pretrain=masked"], ["model=luna"],
        ["model=luna", "pretrain=masked", "train.lr=0.1"],
        ["model=luna", "pretrain=masked", "pretrain.num_steps=8", "train.num_steps=16"],
        ["model=softmax", "pretrain=masked"],
    )  # fmt: skip
    settings, seconds = plan_sweep(jobs, plans, at_a_time=1, num_threads=None)
    half = HOUR / 2
    assert seconds == [5 * half] * 2 + [4 * half] * 6 + [3 * half] * 2
    text = plan_text(settings, seconds, 1, "10 jobs")
    assert "about 2 h 30 min, phase 1 30 min 00 s  1.0 GiB" in text.splitlines()[1]
    assert "phase 1 is in the sum once for jobs that share it" in text and "wait" not in text
    assert "; jobs beside the one that does it wait for it\n" in plan_text(settings, seconds, 2, "")
    assert text.endswith("10 jobs: about 20 h 00 min")
    assert "phase 1" not in plan_text(settings[1:2], [2 * HOUR], 1, "")


def test_what_is_done_of_a_first_phase_takes_no_time(
    tmp_path: Path, measured: list[Mapping[str, Any]]
) -> None:
    jobs, plans = checked(
        tmp_path, ["model=luna", "pretrain=masked"], ["model=softmax", "pretrain=masked"]
    )

    def folder(number: int) -> Path:
        data = prepare(plans[number].task, plans[number].config.paths.cache)
        name = folder_name(plans[number], identity_of(plans[number], data))
        return plans[number].config.paths.outputs / name

    def leave(path: Path) -> None:
        path.parent.mkdir(parents=True)
        path.touch()

    leave(folder(0) / "checkpoints/step-00000006.pt")  # of 8
    leave(folder(1) / "result.json")
    leave(plans[2].run_dir / WEIGHTS)
    leave(plans[2].run_dir / "checkpoints/step-00000004.pt")
    _, seconds = plan_sweep(jobs, plans, at_a_time=1, num_threads=None)
    assert seconds == [HOUR / 2 / 4 + 2 * HOUR, 2 * HOUR, HOUR / 2, HOUR / 2 + HOUR]


def test_pictures_that_are_not_there_leave_a_first_phase_without_an_estimate(
    tmp_path: Path, measured: list[Mapping[str, Any]]
) -> None:
    places = [f"paths.{name}={tmp_path}/{name}" for name in ("cache", "outputs", "results", "data")]
    jobs = [["model=luna", "task=image", "pretrain=masked", *places]]
    settings, seconds = plan_sweep(
        jobs, multirun.check_jobs(jobs, [])[0], at_a_time=1, num_threads=None
    )
    assert seconds == [None] and "cifar" in str(settings[0].forecast) and not measured


def joblib_settings(n_jobs: int) -> Any:
    """What Hydra holds of a launcher that the command line chose."""
    return OmegaConf.create({
        "launcher": {"_target_": "JoblibLauncher", "n_jobs": n_jobs},
        "overrides": {"hydra": ["hydra/launcher=joblib", f"hydra.launcher.n_jobs={n_jobs}"]},
    })  # fmt: skip


def test_fewer_jobs_run_at_a_time_where_memory_has_no_room_for_as_many(
    tmp_path: Path, measured: list[Mapping[str, Any]], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    jobs, plans = checked(tmp_path, ["model=luna"], ["model=softmax"])
    hydra = joblib_settings(4)
    OmegaConf.set_readonly(hydra, True)
    seconds = multirun.show_plan(jobs, plans, hydra, may_lower=True)
    assert seconds == [2 * HOUR] * 2 + [HOUR] * 2  # in 3 GiB, a job needs one
    assert [one["at_a_time"] for one in measured] == [4, 3]  # as jobs slow each other
    out = capsys.readouterr().out
    assert "sweep.parallel=auto: memory for 3 jobs at a time\n" in out and "warning" not in out
    assert out.splitlines()[-1].startswith("4 jobs, 3 at a time with ")
    assert hydra.launcher.n_jobs == 3
    assert hydra.overrides.hydra == ["hydra/launcher=joblib", "hydra.launcher.n_jobs=3"]
    monkeypatch.setattr(estimate, "available_memory", lambda: GIB / 2)
    multirun.show_plan(jobs, plans, hydra, may_lower=True)
    assert hydra.launcher.n_jobs == 1  # never none
    asked = joblib_settings(4)
    multirun.show_plan(jobs, plans, asked, may_lower=False)
    assert asked.launcher.n_jobs == 4 and "warning: 4 jobs" in capsys.readouterr().out


def test_memory_is_that_of_the_jobs_that_need_most() -> None:
    settings = [
        Setting("small", [0, 1, 2], 1, Forecast(60, GIB)), Setting("no idea", [3], 0, "no data"),
        Setting("large", [4, 5], 1, Forecast(60, 8 * GIB)),
    ]  # fmt: skip
    assert [memory_needed(settings, n) / GIB for n in (0, 1, 2, 3, 9)] == [0, 8, 9, 10, 10]


def test_no_sweep_ends_for_want_of_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs, plans = checked(tmp_path, ["model=luna"], ["model=softmax"])

    def fail(_: object) -> dict[str, Any]:
        raise RuntimeError("injected\nmore")

    monkeypatch.setattr(estimate, "in_own_process", fail)
    hydra = joblib_settings(1)
    assert multirun.show_plan(jobs, plans, hydra, may_lower=True) == []
    assert capsys.readouterr().out.endswith("otherwise: no estimate (injected)\n")
    # One setting that fails, or is killed, leaves the others their estimate.
    minute = {"seconds": 60.0, "memory_bytes": GIB, "pretrain_seconds": 0.0}
    answer = {"1 0": minute, "0 0": {"error": "no data"}}
    monkeypatch.setattr(estimate, "in_own_process", lambda request: answer)
    assert multirun.show_plan(jobs, plans, hydra, may_lower=True) == [None, None, 60, 60]
    out = capsys.readouterr().out
    assert "\nluna listops     2     not estimated\n" in out and "\nnot estimated: no data\n" in out
    assert out.endswith("otherwise: about 2 min 00 s and what is not estimated\n")


def test_the_plan_is_no_part_of_a_run() -> None:
    plain = [resolved(typed(compose_config([f"sweep.plan={p}"]))) for p in ("true", "false")]
    assert plain[0] != plain[1] and config_hash(plain[0]) == config_hash(plain[1])


def test_a_sweep_with_its_plan(tmp_path: Path) -> None:
    code, out, err = test_sweep.sweep(tmp_path, "model=luna,softmax", "sweep.plan=true")
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0].startswith("plan: ") and lines[1].startswith("setting ")
    for line, name in zip(lines[2:4], ("luna", "softmax"), strict=True):
        assert line.startswith(f"{name} listops") and line.endswith(" GiB") and "about" in line
    assert lines[4].startswith("2 jobs, one after the other: about ")
    assert lines[5].startswith("job 1 of 2; by the plan about ")
    assert "2 jobs: 2 " in lines[-1]


def test_what_a_batch_takes_once_is_counted_once() -> None:
    assert extended([(2, 11.0), (4, 12.0), (8, 14.0)], 32) == 26  # ten, and a half for each row
    assert extended([(2, 11.0), (8, 10.0)], 32) == 10  # noise: no row takes less than nothing
    assert extended([(2, 11.0)], 32) == 176 and extended([(32, 9.0)], 32) == 9
