"""Runs with self-pretraining: hand-over, stops at every moment, what runs share, refusals."""

from __future__ import annotations

import copy
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor

import lra.files
import lra.job
import lra.pretraining
from lra.build import num_params, resolved
from lra.cli import CONFIGS, compose_config, typed
from lra.config import NO_NUMBERS, RunConfig, config_hash
from lra.job import first_weights
from lra.multirun import check_job
from lra.plan import Reference, make_plan
from lra.results import records
from lra.results.records import Record
from lra.tasks.cache import prepare
from lra.tasks.task import Example
from lra.trained import TrainedModel, evaluate_checkpoint
from lra.training import checkpoint
from lra.values import fill
from models.softmax import SoftmaxAttention
from tests import test_job
from tests.programs import ROOT
from tests.test_cli import TINY, call, start, timeless
from tests.test_job import SOFTMAX
from tests.toy import Toy

PRETRAIN = {"objective": "masked", "num_steps": 6, "batch_size": 8, "lr": 0.01, "warmup_steps": 2,
            "mask_rate": 0.3, "eval_every": 3}  # fmt: skip
NEXT = {"pretrain": {"objective": "next", "mask_rate": None}, "model": {"causal": True}}


def config(folder: Path, **changes: Any) -> RunConfig:
    pretrain = PRETRAIN | changes.pop("pretrain", {})
    return test_job.config(folder, pretrain=pretrain, **changes)


def run(folder: Path, **changes: Any) -> Record:
    return lra.job.run_job(config(folder, **changes), [], Reference(None, SOFTMAX))


def only(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(f"outputs/{pattern}")
    return path


def last_weights(run_dir: Path) -> dict[str, Tensor]:
    newest = checkpoint.checkpoints(run_dir / "checkpoints")[0]
    weights: dict[str, Tensor] = checkpoint.read(newest)["model"]
    return weights


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def bare(record: Record) -> dict[str, Any]:
    """Without times, places and how often states are saved, none of which is in an identity."""
    values: dict[str, Any] = timeless(record)
    del values["config"]["paths"]
    for name in NO_NUMBERS:
        del values["config"]["train"][name]
    if values.get("pretraining"):
        del values["pretraining"]["speed"], values["pretraining"]["hardware"]
    return values


def assert_equal_ends(whole: Path, cut: Path) -> None:
    """Both phases of a run in each folder: weights, curves, metrics and record to the last bit."""
    for pattern in ("pretraining-*", "toy-*"):
        one, other = only(whole, pattern), only(cut, pattern)
        assert one.name == other.name and same(last_weights(one), last_weights(other))
        assert (one / "metrics.jsonl").read_text() == (other / "metrics.jsonl").read_text()
    paths = [next(folder.glob("results/runs/*/*/*.json")) for folder in (whole, cut)]
    one, other = (bare(records.load(path)) for path in paths)
    assert one == other and one["pretraining"]["curve"]


class Killed(BaseException):
    """Nothing in a run catches it, and no file is written after it, as of SIGKILL."""


def at_step(number: int, act: Callable[[], None]) -> Callable[[pytest.MonkeyPatch], None]:
    """Do something at the beginning of a training step, counted over both phases."""

    def arrange(patch: pytest.MonkeyPatch) -> None:
        forward, steps = SoftmaxAttention.forward, [0]

        def acts(self: SoftmaxAttention, *inputs: Tensor) -> Tensor:
            steps[0] += self.training
            if self.training and steps[0] == number:
                act()
            return forward(self, *inputs)

        patch.setattr(SoftmaxAttention, "forward", acts)

    return arrange


def kill() -> None:
    raise Killed


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def before_file(
    module: Any, function: str, name: str, act: Callable[[], None] = kill
) -> Callable[[pytest.MonkeyPatch], None]:
    """Do something before a file of that name is written."""

    def arrange(patch: pytest.MonkeyPatch) -> None:
        write = getattr(module, function)

        def acts(path: Path, *content: Any) -> None:
            if path.name == name:
                act()
            write(path, *content)

        patch.setattr(module, function, acts)

    return arrange


def before_second_phase(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lra.job, "train", lambda *_, **__: kill())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing has stopped; not to be changed."""
    folder = tmp_path_factory.mktemp("whole")
    assert run(folder).status in ("completed", "at_chance")
    return folder


# --- hand-over ---


class OneValue(Toy):
    """Twelve times the same digit."""

    def examples(self, split: str) -> Iterator[Example]:
        for i in range(self.sizes[split]):
            yield Example((np.full(12, i % 10, np.uint8),), i % 2)


@pytest.mark.parametrize("changes", [{}, NEXT, {"shape": {"pooling": "cls"}}])
def test_the_second_phase_begins_with_the_best_encoder_and_a_head_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    began: list[tuple[dict[str, Tensor], Tensor]] = []
    train = lra.job.train

    def noting(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        began.append((copy.deepcopy(model.state_dict()), torch.get_rng_state()))
        return train(model, *args, **kwargs)

    monkeypatch.setattr(lra.job, "train", noting)
    record = run(tmp_path, **changes)
    given = {k: v for k, v in changes.items() if k != "pretrain"}
    scratch = test_job.run(tmp_path / "scratch", **given)
    (found, found_state), (fresh, fresh_state) = began
    folder = only(tmp_path, "pretraining-*")
    assert record.pretraining is not None
    best = checkpoint.read(checkpoint.best_path(folder / "checkpoints", record.pretraining.step))
    encoder = {k: v for k, v in best["model"].items() if k.startswith("encoder.")}
    symbol = encoder.pop("encoder.embedding.mask_symbol", None)
    assert (symbol is not None) == (record.pretraining.objective == "masked")
    assert same({k: v for k, v in found.items() if k in encoder}, encoder)
    assert found.keys() == fresh.keys() and not encoder.keys() - found.keys()
    heads = [{k: v for k, v in w.items() if k not in encoder} for w in (found, fresh)]
    assert heads[0] and same(*heads) and torch.equal(found_state, fresh_state)
    assert not same(found, fresh)
    assert record.num_params == scratch.num_params and scratch.pretraining is None
    losses = {row["step"]: row["val_loss"] for row in record.pretraining.curve}
    assert losses[record.pretraining.step] == min(losses.values())
    assert record.pretraining.val.loss == min(losses.values())
    assert "pretrain=" in record.why_not[0] and record.config["pretrain"]["num_steps"] == 6
    (path,) = (tmp_path / "results").rglob("*.json")
    assert records.load(path) == record and not records.problems(record, path)


def test_the_first_phase_learns(tmp_path: Path) -> None:
    """Rows of one value: whoever reads the others knows what is hidden."""
    task = {"_target_": "tests.test_pretraining.OneValue"}
    for name, changes in {"masked": {}, "next": NEXT}.items():
        longer = {"num_steps": 50, "lr": 0.05, **changes.get("pretrain", {})}
        record = run(tmp_path / name, task=task, **(changes | {"pretrain": longer}))
        assert record.pretraining is not None
        assert record.pretraining.val.accuracy > 0.9, record.pretraining.curve


class Mirror(Toy):
    """Random digits; those of the second half are the first's, or others."""

    def examples(self, split: str) -> Iterator[Example]:
        rng = np.random.default_rng([len(split), 11])
        for i in range(self.sizes[split]):
            first, other = rng.integers(0, 10, (2, self.max_length // 2), np.uint8)
            yield Example((np.concatenate([first, first if i % 2 else other]),), i % 2)


@pytest.mark.slow
def test_what_labels_alone_do_not_teach_is_learned_from_hidden_tokens(tmp_path: Path) -> None:
    """To look 64 places back is easy to find for who has to tell a token, and hard for who has 200
    labels: without the first phase, and as many steps in all, the class stays a guess."""
    sizes = {"train": 200, "val": 400, "test": 1000}
    changes: dict[str, Any] = {
        "task": {"_target_": f"{__name__}.Mirror", "max_length": 128, "sizes": sizes},
        "shape": {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 2, "head_hidden": [32],
                  "dropout": 0.0, "attention_dropout": 0.0},
    }  # fmt: skip
    train = {"batch_size": 32, "lr": 0.001, "warmup_steps": 50, "eval_every": 50,
             "schedule": "constant"}  # fmt: skip
    own = {"num_steps": 600, "batch_size": 32, "lr": 0.002, "warmup_steps": 50, "eval_every": 200}
    told = run(tmp_path, **changes, train=train | {"num_steps": 100}, pretrain=own)
    scratch = test_job.run(tmp_path, **changes, train=train | {"num_steps": 700})
    assert told.result and scratch.result
    assert told.result.test.accuracy > 0.95 and scratch.result.test.accuracy < 0.6


# --- stops ---


STOPS = {
    "first step": at_step(1, kill),
    "first phase": at_step(5, kill),
    "before the result": before_file(lra.pretraining, "write_atomically", "result.json"),
    "before the weights": before_file(checkpoint, "write", "pretrained.pt"),
    "between": before_second_phase,
    "second phase": at_step(12, kill),
}


@pytest.mark.parametrize("moment", list(STOPS))
def test_a_killed_run_ends_as_if_it_had_been_left_alone(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    with monkeypatch.context() as patch:
        STOPS[moment](patch)
        with pytest.raises(Killed):
            run(tmp_path, train={"checkpoint_every": 1})
    run(tmp_path, train={"checkpoint_every": 1})
    assert_equal_ends(whole, tmp_path)


SIGNALS = {
    "first step": (at_step(1, terminate), "phase 1, stopped by SIGTERM at step 1"),
    "last step": (at_step(6, terminate), "phase 1, stopped by SIGTERM at step 6"),
    "last save": (
        before_file(checkpoint, "write", "step-00000006.pt", terminate),
        "phase 1, stopped by SIGTERM at step 6",
    ),
    "second phase": (at_step(7, terminate), "stopped by SIGTERM at step 1"),
}


@pytest.mark.parametrize("moment", list(SIGNALS))
def test_a_signal_stops_either_phase_with_its_state(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    arrange, message = SIGNALS[moment]
    with monkeypatch.context() as patch:
        arrange(patch)
        record = run(tmp_path)
    assert record.status == "interrupted" and record.message == message
    assert (record.pretraining is None) == message.startswith("phase 1")
    run(tmp_path)
    assert_equal_ends(whole, tmp_path)


def test_the_time_limit_is_of_both_phases(tmp_path: Path, whole: Path) -> None:
    messages = []
    for _ in range(14):  # a step for each start
        messages.append(run(tmp_path, train={"time_limit": 1e-9}).message)
        assert len(messages) < 14 or run(tmp_path).status in ("completed", "at_chance")
    wanted = [f"phase 1, stopped by train.time_limit=1e-09 s at step {n}" for n in range(1, 7)]
    wanted += [f"stopped by train.time_limit=1e-09 s at step {n}" for n in range(1, 9)]
    assert messages == wanted
    assert_equal_ends(whole, tmp_path)


def test_a_first_phase_that_diverges_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, calls = SoftmaxAttention.forward, []

    def breaks(self: SoftmaxAttention, *inputs: Tensor) -> Tensor:
        calls.append(inputs)
        return forward(self, *inputs) * (float("inf") if len(calls) == 3 else 1)

    monkeypatch.setattr(SoftmaxAttention, "forward", breaks)
    record = run(tmp_path)
    assert record.status == "diverged" and record.message == (
        "phase 1, step 3: the loss is nan; lower pretrain.lr, lengthen pretrain.warmup_steps or "
        "set train.clip_norm"
    )
    assert record.pretraining is None and record.result is None and record.curve == []


def test_out_of_memory_makes_the_parts_of_the_first_phase_smaller(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forward, first_phase = SoftmaxAttention.forward, [True]

    def small(self: SoftmaxAttention, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
        if first_phase[0] and len(x_BLD) > 4:
            raise torch.OutOfMemoryError("no memory")
        return forward(self, x_BLD, mask_BL)

    train = lra.job.train  # of the second phase

    def second(*args: Any, **kwargs: Any) -> Any:
        first_phase[0] = False
        return train(*args, **kwargs)

    monkeypatch.setattr(lra.job, "train", second)
    monkeypatch.setattr(SoftmaxAttention, "forward", small)
    no_dropout = {"shape": {"dropout": 0.0, "attention_dropout": 0.0}}
    record = run(tmp_path, **no_dropout)
    assert "step 1: out of memory; micro-batch is now 4" in capsys.readouterr().out
    assert record.pretraining is not None and record.result is not None
    assert record.pretraining.hardware["micro_batch_size"] == 4
    assert record.hardware["micro_batch_size"] == 8
    monkeypatch.undo()
    other = run(tmp_path / "enough", **no_dropout)
    assert other.pretraining is not None
    for row, wanted in zip(record.pretraining.curve, other.pretraining.curve, strict=True):
        assert row == pytest.approx(wanted, rel=1e-4)


# --- what runs share ---


def identity(folder: Path, **changes: Any) -> str:
    record = run(folder, **changes)
    assert record.pretraining is not None
    found: str = record.pretraining.identity
    return found


def test_runs_that_ask_for_the_same_share_the_first_phase(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = identity(tmp_path)
    folder = only(tmp_path, "pretraining-*")
    kept = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    monkeypatch.setattr(lra.pretraining, "_train", lambda *_, **__: pytest.fail("trains again"))
    for changes in (
        {"train": {"lr": 0.02}}, {"train": {"num_steps": 4, "eval_every": 2, "batch_size": 4}},
        {"shape": {"pooling": "max"}}, {"shape": {"pooling": "attention", "head_hidden": [7, 5]}},
        {"train": {"selection": "last", "schedule": "constant", "weight_decay": 0.1}},
        {"task": {"limit_test": 10}, "hardware": {"num_workers": 1, "precision": "bf16"}},
    ):  # fmt: skip
        capsys.readouterr()
        assert identity(tmp_path, **changes) == wanted
        assert "phase 1  was done by a run that asked for the same" in capsys.readouterr().out
    assert {p: p.read_bytes() for p in kept} == kept


def test_whoever_comes_first_the_shared_weights_are_the_same(tmp_path: Path, whole: Path) -> None:
    """The head of the classifier, drawn before, is none of the first phase's business."""
    head = {"head_hidden": [7, 5], "pooling": "attention", "head_bias": False}
    run(tmp_path, shape=head, train={"lr": 0.02})
    one, other = only(whole, "pretraining-*"), only(tmp_path, "pretraining-*")
    assert one.name == other.name and same(last_weights(one), last_weights(other))


def test_what_changes_the_weights_is_another_first_phase(tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [
        {}, {"pretrain": {"mask_rate": 0.4}}, {"pretrain": {"lr": 0.02}}, {"seed": 1},
        {"pretrain": {"num_steps": 7}}, {"pretrain": {"batch_size": 4}},
        {"pretrain": {"warmup_steps": 1}}, {"pretrain": {"weight_decay": 0.1}},
        {"pretrain": {"schedule": "cosine"}}, {"pretrain": {"eval_every": 2}},
        {"train": {"betas": [0.8, 0.9]}}, {"train": {"length_bucketing": False}},
        {"train": {"pad_to_max": True}}, {"train": {"clip_norm": 1.0}},
        {"shape": {"pooling": "cls"}}, {"shape": {"num_layers": 2}}, {"shape": {"dropout": 0.2}},
        {"model": {"causal": True}}, NEXT, {"task": {"limit_train": 20}},
        {"task": {"limit_val": 10}}, {"task": {"max_length": 13}},
    ]  # fmt: skip
    found = set()
    for change in changes:
        plan = make_plan(config(tmp_path, **change), Reference(None, SOFTMAX))
        asked = lra.pretraining.identity_of(plan, prepare(plan.task, plan.config.paths.cache))
        found.add(lra.pretraining.folder_name(plan, asked))
    assert len(found) == len(changes)


@contextmanager
def held(path: Path) -> Iterator[Callable[[], None]]:
    """Another process has the lock, until the function is called."""
    released, taken = threading.Event(), threading.Event()

    def hold() -> None:
        with lra.files.locked(path, "paths.outputs"):
            taken.set()
            released.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait(20)
    try:
        yield released.set
    finally:
        released.set()
        thread.join()


@contextmanager
def once_it_waits(folder: Path, act: Callable[[], None]) -> Iterator[None]:
    """Inside, as soon as the run in a folder says once more that it waits, `act` is called."""

    def waits() -> int:
        logs = [path.read_text() for path in folder.glob("outputs/toy-*/run.log")]
        return sum(log.count("waiting for another run") for log in logs)

    def watch() -> None:
        while not over.wait(0.01):
            if waits() > before:
                act()
                break

    before, over = waits(), threading.Event()
    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_a_run_waits_for_another_that_is_at_it_but_not_beyond_its_limit(
    tmp_path: Path, whole: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lra.files, "LOCK_POLL_S", 0.01)
    folder = tmp_path / "outputs" / only(whole, "pretraining-*").name
    folder.mkdir(parents=True)
    with held(folder / "run.lock") as release:
        record = run(tmp_path, train={"time_limit": 0.5})
        assert record.status == "interrupted" and record.message == (
            "stopped by train.time_limit=0.5 s"
        )
        assert "phase 1  waiting for another run that is at it in " in capsys.readouterr().out
        with once_it_waits(tmp_path, terminate):
            record = run(tmp_path)
        assert record.status == "interrupted" and record.message == "stopped by SIGTERM"
        assert not list(folder.glob("checkpoints/*"))
        shutil.copytree(only(whole, "pretraining-*"), folder, dirs_exist_ok=True,
                        ignore=shutil.ignore_patterns("run.lock"))  # fmt: skip
        capsys.readouterr()
        with once_it_waits(tmp_path, release):
            run(tmp_path)
        out = capsys.readouterr().out
        assert out.count("waiting for another run") == out.count("was done by a run") == 1
    assert_equal_ends(whole, tmp_path)


TINIER = [*TINY, "model=softmax", "pretrain=masked"]


def test_two_runs_at_once_pretrain_once(tmp_path: Path) -> None:
    steps = ["pretrain.num_steps=10", "pretrain.warmup_steps=1"]
    programs = [start(tmp_path, *TINIER, *steps, f"train.lr={lr}") for lr in (0.001, 0.002)]
    said = [program.communicate(timeout=120) for program in programs]
    assert [program.returncode for program in programs] == [0, 0], said
    assert sum("was done by a run that asked for the same" in out for out, _ in said) == 1
    assert len(list(tmp_path.glob("outputs/pretraining-*"))) == 1
    paths = list(tmp_path.glob("outputs/results/runs/listops/softmax/*.json"))
    one, other = (records.load(path).pretraining for path in paths)
    assert one == other and one is not None


def losses(folder: Path) -> list[float]:
    (path,) = folder.glob("outputs/pretraining-*/metrics.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [row.get("loss", row.get("val_loss")) for row in rows]


@pytest.mark.parametrize("objective", ["masked", pytest.param("next", marks=pytest.mark.slow)])
def test_two_processes_pretrain_as_one(tmp_path: Path, objective: str) -> None:
    plain = [*TINY, "model=softmax", f"pretrain={objective}", "shape.dropout=0.0",
             "shape.attention_dropout=0.0", "task.num_train=61"]  # fmt: skip
    plain += ["model.causal=true"] * (objective == "next")
    ways = {"one": [], "two": ["hardware.num_devices=2", "hardware.micro_batch_size=1"]}
    for name, extra in ways.items():
        (tmp_path / name).mkdir()
        code, _, err = call(tmp_path / name, *plain, *extra, fork=True)
        assert code == 0, err
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    paths = [next(tmp_path.glob(f"{name}/outputs/results/runs/*/*/*.json")) for name in ways]
    one, two = (records.load(path) for path in paths)
    assert one.pretraining and two.pretraining and one.result and two.result
    assert vars(one.pretraining.val) == pytest.approx(vars(two.pretraining.val), rel=1e-5)
    assert one.pretraining.identity == two.pretraining.identity
    assert one.result.test.loss == pytest.approx(two.result.test.loss, rel=1e-4)


@pytest.mark.slow
def test_two_processes_wait_together_for_another_run(tmp_path: Path) -> None:
    assert call(tmp_path, *TINIER, "train.time_limit=1e-9")[0] == 75  # so that the folder is there
    lock = only(tmp_path, "pretraining-*/run.lock")
    log = only(tmp_path, "listops-*/run.log")
    for extra, wanted in (("train.time_limit=1", 75), ("train.time_limit=null", 0)):
        before = log.read_text().count("waiting for another run")
        with held(lock) as release:
            program = start(tmp_path, *TINIER, "hardware.num_devices=2", extra)
            while log.read_text().count("waiting for another run") == before:
                time.sleep(0.05)
                assert program.poll() is None
            if wanted == 0:
                time.sleep(1)  # some turns of both
                release()
            out, err = program.communicate(timeout=120)
        assert program.returncode == wanted, out + err


# --- folders that are not as they were ---


def interrupted(folder: Path) -> Path:
    """The folder of a run that stopped in its second phase."""
    with pytest.MonkeyPatch.context() as patch:
        at_step(12, terminate)(patch)
        assert run(folder).status == "interrupted"
    return only(folder, "toy-*")


def test_once_the_weights_are_handed_over_the_first_phase_may_go(
    tmp_path: Path, whole: Path
) -> None:
    interrupted(tmp_path)
    folder = only(tmp_path, "pretraining-*")
    kept = folder.rename(tmp_path / "elsewhere")
    run(tmp_path)
    assert not folder.exists()
    kept.rename(folder)
    assert_equal_ends(whole, tmp_path)


@pytest.mark.parametrize("damage", [b"", b"not a checkpoint", None])
@pytest.mark.parametrize("when", ["between", "second phase"])
def test_damaged_weights_are_named_and_can_be_taken_again(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, damage: bytes | None, when: str
) -> None:
    with monkeypatch.context() as patch:
        STOPS[when](patch)
        with pytest.raises(Killed):
            run(tmp_path)
    path = only(tmp_path, "toy-*/pretrained.pt")
    path.write_bytes(path.read_bytes()[:-50] if damage is None else damage)
    with pytest.raises(ValueError, match=r"pretrained\.pt: .*; delete it, and the same command"):
        run(tmp_path)
    path.unlink()
    run(tmp_path)
    assert_equal_ends(whole, tmp_path)


@pytest.mark.parametrize(
    ("pattern", "damage"),
    [("result.json", b""), ("result.json", b"[]"), ("result.json", b"\xff\xfe"),
     ("result.json", b"{}"), ("checkpoints/best-*.pt", b""), ("checkpoints/best-*.pt", None)],
)  # fmt: skip
def test_a_damaged_first_phase_is_named_and_can_be_made_again(
    tmp_path: Path, whole: Path, pattern: str, damage: bytes | None
) -> None:
    shutil.copytree(whole / "outputs", tmp_path / "outputs")
    shutil.rmtree(only(tmp_path, "toy-*"))
    path = only(tmp_path, f"pretraining-*/{pattern}")
    path.unlink()
    if damage is not None:
        path.write_bytes(damage)
    with pytest.raises(ValueError, match=r"result\.json: the first phase was done, .* delete this"):
        run(tmp_path)
    only(tmp_path, "pretraining-*/result.json").unlink()
    run(tmp_path)
    assert_equal_ends(whole, tmp_path)


def test_weights_of_other_data_are_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        before_second_phase(patch)
        with pytest.raises(Killed):
            run(tmp_path)
    settings = Toy.settings
    monkeypatch.setattr(Toy, "settings", lambda self: settings(self) | {"edition": 2})
    with pytest.raises(ValueError, match=r"pretrained\.pt: weights of a first phase on other data"):
        run(tmp_path)


def test_a_pretrained_run_is_evaluated_and_used_as_any_other(
    whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = only(whole, "toy-*")
    (path,) = whole.glob("results/runs/*/*/*.json")
    result = records.load(path).result
    evaluate_checkpoint(test_job.config(whole, checkpoint=str(folder)), [])
    assert result is not None
    assert f"test  accuracy {100 * result.test.accuracy:.2f} %" in capsys.readouterr().out
    assert TrainedModel(folder).predict([[1, 2, 3], [4]])
    with pytest.raises(ValueError, match="weights of another architecture"):
        TrainedModel(only(whole, "pretraining-*"))


# --- what is refused ---


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("pretrain=next", "pretrain=next with model=softmax: the model sees later tokens"),
        ("pretrain=next model=local model.pattern=blocks", "pretrain=next with model=local"),
        ("pretrain=next model=mega model.bidirectional=false", "pretrain=next with model=mega"),
        ("pretrain=masked model=luna model.pool_memory=true", "LunaEncoder returns no row for"),
        (
            "pretrain=masked model=luna model.pool_memory=true model.projection_length=4000",
            "LunaEncoder returns no row for",
        ),
        ("pretrain=masked init_from=outputs/x", "both say where the first weights come from"),
        ("pretrain=masked pretrain.mask_rate=0", "pretrain.mask_rate=0.0: expected 0 < rate < 1"),
        ("pretrain=masked pretrain.mask_rate=1", "pretrain.mask_rate=1.0: expected 0 < rate < 1"),
        ("pretrain=masked pretrain.mask_rate=nan", "pretrain.mask_rate=nan: expected 0 < rate"),
        ("pretrain=masked pretrain.mask_rate=null", "pretrain.mask_rate=null with pretrain=masked"),
        ("pretrain=next pretrain.mask_rate=0.1", "pretrain.mask_rate=0.1 with pretrain=next"),
        ("pretrain=masked pretrain.num_steps=0", "pretrain.num_steps=0: expected at least 1"),
        ("pretrain=masked pretrain.batch_size=0", "pretrain.batch_size=0: expected at least 1"),
        ("pretrain=masked pretrain.lr=0", "pretrain.lr=0.0: expected a number above 0"),
        ("pretrain=masked pretrain.eval_every=0", "pretrain.eval_every=0: expected at least 1"),
        ("pretrain=masked pretrain.weight_decay=-1", "pretrain.weight_decay=-1.0: expected at"),
        (
            "pretrain=masked pretrain.schedule=linear pretrain.warmup_steps=9 pretrain.num_steps=9",
            "pretrain.warmup_steps=9 is not below pretrain.num_steps=9: the rate would not reach",
        ),
        # A constant rate rises at first as well, with the second phase's warm-up if not told.
        ("pretrain=masked pretrain.num_steps=1", "pretrain.num_steps=1: the rate would not reach"),
        ("pretrain.objective=masked", "pretrain.mask_rate=null with pretrain=masked"),
    ],
)
def test_what_cannot_be_is_refused_before_data_are_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, message: str
) -> None:
    given = ["task=listops", "model=softmax", *words.split(), *TINY[2:]]
    given += [f"paths.{p}={tmp_path / p}" for p in ("data", "cache", "outputs", "results")]
    monkeypatch.setattr(lra.job, "prepare", lambda *_: pytest.fail("touches data"))
    with pytest.raises(ValueError) as refused:
        lra.job.run_job(typed(compose_config(given)), [], Reference(None, SOFTMAX))
    assert message in str(refused.value)
    plan, why = check_job(given, [])  # as a sweep asks before its first job
    assert plan is None and message in why
    assert not list(tmp_path.iterdir())


def test_an_unreached_peak_may_be_meant_in_the_first_phase_too() -> None:
    given = ["task=listops", "model=softmax", "pretrain=masked", "pretrain.schedule=linear",
             "pretrain.warmup_steps=9", "pretrain.num_steps=9",
             "train.allow_unreached_peak=true"]  # fmt: skip
    assert typed(compose_config(given)).pretrain.warmup_steps == 9


@pytest.mark.parametrize("task", sorted(path.stem for path in (CONFIGS / "task").glob("*.yaml")))
def test_every_task_has_the_papers_values(task: str) -> None:
    for recipe, objective in product(("lra", "s4"), ("masked", "next")):
        words = [f"task={task}", f"recipe={recipe}", f"pretrain={objective}"]
        found = typed(compose_config([*words, "train.num_steps=77777"])).pretrain
        assert found.num_steps == 77777 and found.schedule == "constant"
        wanted = yaml.safe_load((CONFIGS / f"pretrain_task/{objective}/{task}.yaml").read_text())
        of_recipe = CONFIGS / f"pretrain_recipe/{recipe}/{objective}/{task}.yaml"
        if of_recipe.exists():
            wanted |= yaml.safe_load(of_recipe.read_text())
        assert "lr" in wanted and {name: getattr(found, name) for name in wanted} == wanted


# --- without ---


def test_without_it_runs_are_who_they_were() -> None:
    """Config, identity and bytes of the records that came with the repository."""
    paths = sorted((ROOT / "results/runs").glob("*/*/*.json"))
    assert paths
    hardware = {"hardware": {}, "logger": {"name": "none"}}
    for path in paths:
        record = records.load(path)
        if "pretrain" in record.config:
            continue
        plain = resolved(fill(RunConfig, record.config | hardware))
        assert "pretrain" not in plain and config_hash(plain) == record.config_hash, path
        assert record.to_json() == path.read_text()


def test_a_run_without_it_says_nothing_of_it(tmp_path: Path) -> None:
    record = test_job.run(tmp_path)
    assert record.pretraining is None and "pretrain" not in record.config
    run_dir = tmp_path / "outputs" / record.run_id
    assert "pretrain" not in yaml.safe_load((run_dir / "config.yaml").read_text())
    assert not [p for p in tmp_path.rglob("*.json") if "pretrain" in p.read_text()]
    assert not list(tmp_path.rglob("*pretrain*"))
    plan = make_plan(test_job.config(tmp_path), Reference(None, SOFTMAX))
    assert num_params(first_weights(plan)) == record.num_params
