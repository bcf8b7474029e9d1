"""One run from config to record: statuses, protocol, the comparison rule."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lra import plan
from lra.cli import compose_config, typed
from lra.config import HardwareConfig, RunConfig
from lra.files import Unwritable
from lra.job import EXIT_CODES, run_job
from lra.plan import Reference
from lra.results import records
from lra.results.leaderboard import make_rows
from lra.results.statistics import wilson
from lra.script import terminate
from lra.tasks.task import Example
from lra.trained import evaluate_checkpoint
from lra.training import hardware
from lra.training.evaluate import is_at_chance
from lra.training.hardware import Hardware
from lra.values import fill
from models.classifier import Classifier
from models.softmax import SoftmaxAttention
from tests.toy import SIZES, Toy

SOFTMAX = {"_target_": "models.softmax.SoftmaxAttention", "causal": False}
SHAPE = {"d_model": 8, "d_ff": 8, "num_layers": 1, "num_heads": 1, "head_hidden": [4]}
TRAIN = {"num_steps": 8, "batch_size": 8, "lr": 0.01, "warmup_steps": 2, "eval_every": 4}


def config(folder: Path, **changes: Any) -> RunConfig:
    values: dict[str, Any] = {
        "seed": 0,
        "task": {"_target_": "tests.toy.Toy", "max_length": 12},
        "model": dict(SOFTMAX),
        "shape": dict(SHAPE),
        "train": dict(TRAIN),
        "pretrain": {},
        "hardware": {"device": "cpu", "num_threads": 1},
        "logger": {"name": "none"},
        "paths": {p: str(folder / p) for p in ("data", "cache", "outputs", "results")},
        "recipe": "nystromformer",
    }
    for section, change in changes.items():
        values[section] = values[section] | change if isinstance(change, dict) else change
    return fill(RunConfig, values)


def run(folder: Path, reference: RunConfig | None = None, **changes: Any) -> records.Record:
    return run_job(config(folder, **changes), [], Reference(reference, SOFTMAX))


def test_a_completed_run_and_its_files(tmp_path: Path) -> None:
    record = run(tmp_path, config(tmp_path), train={"num_steps": 60, "lr": 0.05})
    (path,) = (tmp_path / "results/runs/toy/softmax").glob("*.json")
    assert records.load(path) == record and record.run_id == path.stem
    assert (
        record.run_id == f"toy-softmax-seed0-{record.config_hash[:8]}" and len(record.run_id) < 100
    )
    folder = tmp_path / "outputs" / record.run_id
    assert {p.name for p in folder.iterdir()} >= {
        "config.yaml",
        "run.log",
        "metrics.jsonl",
        "checkpoints",
        "status.json",
    }
    assert json.loads((folder / "status.json").read_text())["status"] == record.status
    assert 0 < (record.speed["eval_time_s"] or 0) < (record.speed["wall_time_s"] or 0)
    assert ", evaluation share " in (folder / "run.log").read_text()
    assert record.data["num_examples"] == {"train": 40, "val": 20, "test": 20}
    assert record.environment["torch"].startswith(torch.__version__.split("+")[0])
    assert record.protocol.budget == "full" and record.protocol.data == "generated"


def test_groups_of_parameters_stand_in_the_record_if_there_are_several(tmp_path: Path) -> None:
    record = run(tmp_path, train={"groups": {"norm": {"lr": 0.5, "weight_decay": None}}})
    found = {group["name"]: (group["peak_lr"], group["weight_decay"]) for group in record.groups}
    assert found == {"general": (0.01, 0.0), "norm": (0.5, 0.0)}
    assert sum(group["num_params"] for group in record.groups) == record.num_params
    (path,) = (tmp_path / "results/runs/toy/softmax").glob("*.json")
    assert records.load(path) == record
    assert run(tmp_path / "plain").groups == [] and record.config_hash != run(tmp_path).config_hash
    assert "groups" not in json.loads(next((tmp_path / "plain").rglob("toy-*.json")).read_text())


def test_the_reach_of_a_model_that_has_one_stands_in_its_record(tmp_path: Path) -> None:
    conv = {"_target_": "models.conv.ConvMixer", "kernel_size": 7}
    changes = {"shape": {"num_layers": 3}, "train": {"num_steps": 4}}
    asked = config(tmp_path, **changes)
    record = run_job(replace(asked, model=conv), [], Reference(None, SOFTMAX))
    (path,) = (tmp_path / "results/runs/toy/conv").glob("*.json")
    assert record.reach == [3, 3, 3] and records.load(path) == record
    log = (tmp_path / "outputs" / record.run_id / "run.log").read_text()
    assert "reach    3 a layer, 9 in all, in positions" in log
    softmax = run(tmp_path, **changes)
    assert "reach" not in json.loads(softmax.to_json())
    broken = path.read_text().replace('"reach": [\n  3,', '"reach": [\n  -3,')
    path.write_text(broken)
    with pytest.raises(ValueError, match=r"reach=\[-3, 3, 3\]: expected positions of at least 0"):
        records.load(path)


def test_real_input_is_for_pixels_and_stands_in_the_protocol(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="shape.input=real: values of task toy are symbols"):
        run(tmp_path, shape={"input": "real"})
    for change in ({"input_mean": 0.4}, {"input_std": 0.5}):
        with pytest.raises(ValueError, match="act only where .*, not with task toy; expected 0"):
            run(tmp_path, shape=change)
    monkeypatch.setattr(Toy, "picture_size", (3, 4))
    assert run(tmp_path, shape={"input": "real"}).protocol.options == {"input": "real"}
    assert run(tmp_path / "ids").protocol.options == {}


def test_positions_in_a_picture_are_for_pixels_and_outside_the_rules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change = {"positions": "rotary_2d"}
    with pytest.raises(ValueError, match="positions=rotary_2d: inputs of task toy are no pictures"):
        run(tmp_path, shape=change)
    monkeypatch.setattr(Toy, "picture_size", (3, 4))
    record = run(tmp_path, shape=change)
    assert record.protocol.options == change and record.knows_columns
    assert not record.apples_to_apples
    assert "rows and columns of pixels, outside the benchmark's rules" in record.why_not
    assert "picture_width" not in record.config["shape"]


def test_batch_norm_in_parts_of_a_batch_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind, size, warns in (("batch", 2, True), ("batch", 8, False), ("layer", 2, False)):
        changes = {"shape": {"norm_kind": kind}, "hardware": {"micro_batch_size": size}}
        run(tmp_path / f"{kind}{size}", **changes)
        assert ("batch norm takes its statistics" in capsys.readouterr().out) == warns


@pytest.mark.parametrize(
    "error, status, code",
    [
        (RuntimeError("broken part"), "failed", 1),
        (torch.OutOfMemoryError("no memory"), "out_of_memory", 4),
        (OSError(5, "Input/output error"), "failed", 1),
    ],
)
def test_a_failure_leaves_a_record_a_traceback_and_a_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, status: str, code: int
) -> None:
    def fails(self: SoftmaxAttention, *_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(SoftmaxAttention, "forward", fails)
        record = run(tmp_path)
    assert record.status == status and record.result is None and EXIT_CODES[status] == code
    assert str(error).split("] ")[-1] in record.message
    folder = tmp_path / "outputs" / record.run_id
    assert "Traceback" in (folder / "traceback.txt").read_text()
    assert json.loads((folder / "status.json").read_text())["status"] == status
    assert run(tmp_path).status in ("completed", "at_chance")  # the next start replaces it
    assert not (folder / "traceback.txt").exists()


def test_a_diverged_run_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, calls = SoftmaxAttention.forward, []

    def breaks(self: SoftmaxAttention, *inputs: torch.Tensor) -> torch.Tensor:
        calls.append(inputs)
        return forward(self, *inputs) * (float("inf") if len(calls) == 3 else 1)

    monkeypatch.setattr(SoftmaxAttention, "forward", breaks)
    record = run(tmp_path)
    assert record.status == "diverged" and "step 3: the loss is nan" in record.message
    assert record.result is None and EXIT_CODES["diverged"] == 3
    folder = tmp_path / "outputs" / record.run_id
    assert json.loads((folder / "status.json").read_text())["status"] == "diverged"
    assert not (folder / "traceback.txt").exists()  # no fault of the code


def test_a_change_of_precision_within_a_run_stands_in_its_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forward, calls, bf16 = SoftmaxAttention.forward, [], {"precision": "bf16"}

    def stops(self: SoftmaxAttention, *inputs: torch.Tensor) -> torch.Tensor:
        calls.append(inputs)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return forward(self, *inputs)

    here = records.environment()
    with monkeypatch.context() as patch:
        patch.setattr(SoftmaxAttention, "forward", stops)
        patch.setattr(records, "environment", lambda: here | {"git_dirty": True})
        stopped = run(tmp_path, hardware=bf16)
    monkeypatch.setattr(records, "environment", lambda: here | {"git_dirty": False})
    assert stopped.status == "interrupted" and "stretches" not in stopped.hardware
    assert "computed otherwise" not in capsys.readouterr().out
    record = run(tmp_path)
    assert "precision bf16 before, now float32" in capsys.readouterr().out
    assert record.run_id == stopped.run_id and record.hardware["precision"] == "float32"
    first, second = record.hardware["stretches"]
    assert (first["from_step"], first["precision"]) == (1, "bf16")
    assert (second["from_step"], second["precision"]) == (4, "float32")
    assert first["torch"] == second["torch"] == record.environment["torch"]
    assert (first["git_dirty"], second["git_dirty"]) == (True, False) and record.dirty
    assert f"{second['name']}, bf16 then {second['name']}, float32, 1 th" in record.device_text
    (path,) = (tmp_path / "results/runs/toy/softmax").glob("*.json")
    assert records.load(path) == record and not records.problems(record, path)
    # Finished in two ways: neither is what a command for one of them asks.
    run(tmp_path)
    assert "precision bf16 then float32, now float32" in capsys.readouterr().out


def test_a_finished_run_says_that_it_was_computed_otherwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = run(tmp_path, hardware={"precision": "bf16"})
    capsys.readouterr()
    assert run(tmp_path, hardware={"precision": "bf16"}) == made
    assert "computed" not in capsys.readouterr().out
    assert run(tmp_path) == made
    out = capsys.readouterr().out
    assert "nothing to do" in out and "choose another paths.outputs" in out
    assert "not computed as asked for now (precision bf16, now float32)" in out


def test_stretches_that_cannot_be_shown_are_refused(tmp_path: Path) -> None:
    record = run(tmp_path)
    record.hardware["stretches"] = "bf16"
    path = records.save(record, tmp_path / "results")
    with pytest.raises(ValueError, match=r"hardware\.stretches='bf16': expected a list of objects"):
        records.load(path)


class Two(Toy):
    """Two classes, equally many of each; 2,000 examples to validate on."""

    max_length = 2

    def examples(self, split: str) -> Iterator[Example]:
        for i in range(2000 if split == "val" else 20):
            yield Example((np.array([i % 7], np.uint8),), i % self.num_classes)


class Ten(Two):
    """The same with ten classes."""

    num_classes = 10


@pytest.mark.parametrize("task, share", [("Two", 0.5), ("Ten", 0.1)])
def test_a_constant_predictor_is_at_chance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str, share: float
) -> None:
    monkeypatch.setattr(
        Classifier,
        "forward",
        lambda self, tokens_BSL, _: (
            self.head[-1].bias.expand(len(tokens_BSL), -1) * 0
            + torch.arange(self.head[-1].out_features)
        ),
    )
    record = run(tmp_path, task={"_target_": f"tests.test_job.{task}"})
    assert record.status == "at_chance" and record.result is not None
    assert record.result.val.accuracy == share and record.result.val.num_examples == 2000
    row = make_rows([replace(record, task="listops")])[0]
    assert str(row.cells["listops"]) == "FAIL (1)"


@pytest.mark.parametrize("num_classes", [2, 10])
def test_the_bound_of_chance(num_classes: int) -> None:
    balanced = [2000 // num_classes] * num_classes
    chance = 1 / num_classes
    assert is_at_chance(chance, balanced)
    spread = (chance * (1 - chance) / 2000) ** 0.5
    assert is_at_chance(chance + 2.3 * spread, balanced)
    assert not is_at_chance(chance + 2.4 * spread, balanced)
    assert is_at_chance(0.17, [334, 186, 158, 162, 176, 170, 156, 144, 174, 340])


def test_a_run_of_more_steps_is_another_run_and_leaves_the_first_alone(tmp_path: Path) -> None:
    first = run(tmp_path)
    kept = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    longer = run(tmp_path, train={"num_steps": 16})
    assert longer.run_id != first.run_id
    assert [point["step"] for point in longer.curve] == [4, 8, 12, 16]  # from the beginning
    assert {p: p.read_bytes() for p in kept} == kept


def test_checkpoints_of_another_setting_are_never_loaded(tmp_path: Path) -> None:
    narrow, wide = run(tmp_path), {"shape": {"d_model": 16}}
    folder = tmp_path / "outputs" / narrow.run_id
    in_its_place = tmp_path / "outputs" / run(tmp_path, **wide).run_id
    assert in_its_place != folder
    for path in (tmp_path / "results").rglob("*.json"):
        path.unlink()  # so that both are to be run again
    shutil.rmtree(in_its_place / "checkpoints")
    shutil.copytree(folder / "checkpoints", in_its_place / "checkpoints")
    with pytest.raises(ValueError, match=r"holds a run with another config_hash \(.*, now .*\)"):
        run(tmp_path, **wide)
    assert not list((tmp_path / "results").rglob("*.json"))


def test_the_device_taken_by_itself_is_told_and_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = run(tmp_path, hardware={"device": "auto"})
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert record.hardware["device"] == device
    assert f"device   {record.hardware['name']} ({device}, float32)" in capsys.readouterr().out


def test_what_differs_from_recipe_and_model_is_told_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = config(tmp_path)
    run(tmp_path, usual, model={"causal": True}, train={"lr": 0.02, "time_limit": 900})
    out = capsys.readouterr().out
    assert (
        "recipe   nystromformer, changed: model.causal=True (default: False); train.lr=0.02 "
        "(recipe: 0.01)\n"
    ) in out
    run(tmp_path / "usual", usual)
    assert "recipe   nystromformer, nothing changed\n" in capsys.readouterr().out


def test_a_limit_of_time_does_not_change_what_a_number_means(tmp_path: Path) -> None:
    assert run(tmp_path, config(tmp_path), train={"time_limit": 900}).why_not == []


@pytest.mark.parametrize("there", [True, False])
def test_made_up_data_are_told_where_there_are_real_ones(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    there: bool,
) -> None:
    monkeypatch.setattr("filecmp.cmpfiles", None)  # equal copies are known by their checksums
    words = ["task=listops", "experiment=smoke", *sizes_of_listops()]
    place = [f"paths.{p}={tmp_path / p}" for p in ("data", "cache", "outputs", "results")]
    if there:
        (tmp_path / "data/listops").mkdir(parents=True)
        for split in ("train", "val", "test"):
            rows = ["Source\tTarget", "[MAX 2 9 ]\t9"]
            for folder in (tmp_path / "data/listops", tmp_path / "data"):
                (folder / f"basic_{split}.tsv").write_text("\n".join(rows) + "\n")
    smoke = typed(compose_config([*words, *place]))
    run_job(smoke, [], Reference(typed(compose_config(["task=listops"])), SOFTMAX))
    out = capsys.readouterr().out
    told = f"not used: the files in {tmp_path}/data/listops (task.source=auto)"
    assert (told in out) == there and "published" not in out


def sizes_of_listops() -> list[str]:
    return ["task.num_train=16", "task.num_val=8", "task.num_test=8", "task.min_tree_length=10",
            "task.max_tree_length=40", "task.max_length=40", "train.num_steps=2",
            "train.warmup_steps=1", "train.batch_size=4", "hardware.num_threads=1"]  # fmt: skip


def test_changed_settings_and_a_reduced_budget_are_named(tmp_path: Path) -> None:
    reference = config(tmp_path, train={"num_steps": 16})
    record = run(tmp_path, reference, train={"lr": 0.02})
    assert record.protocol.budget == "reduced" and not record.apples_to_apples
    assert record.why_not == ["train.lr=0.02 (recipe: 0.01)", "train.num_steps=8 (recipe: 16)"]
    assert run(tmp_path / "same", config(tmp_path)).why_not == []


def test_the_protocol_says_what_this_run_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each field follows the config or the task, so that none is a constant."""
    usual = run(tmp_path, config(tmp_path)).protocol
    assert (usual.max_length, usual.selection, usual.validation) == (12, "best_val", "val")
    assert usual.difficulty is None and usual.options == {}
    facts = {"validation": "test", "difficulty": "hard", "literals": "kept"}
    monkeypatch.setattr(Toy, "protocol", property(lambda self: dict(facts)))
    other = run(tmp_path / "other", config(tmp_path), task={"max_length": 9},
                train={"selection": "last"}).protocol  # fmt: skip
    assert (other.max_length, other.selection, other.validation) == (9, "last", "test")
    assert other.difficulty == "hard" and other.options == {"literals": "kept"}


def test_the_seed_decides_initial_weights(tmp_path: Path) -> None:
    # One batch that holds all examples, and a rate of almost nothing: only the start differs.
    still = {"num_steps": 1, "eval_every": 1, "batch_size": 40, "lr": 1e-12, "warmup_steps": 0}
    losses = [
        run(tmp_path / name, seed=seed, train=still).curve[0]["val_loss"]
        for name, seed in (("a", 3), ("b", 3), ("c", 4))
    ]
    assert losses[0] == losses[1] and abs(losses[0] - losses[2]) > 1e-4


def test_nothing_of_the_job_before_is_left_in_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr(hardware, "DEFAULT_THREADS", 3)
    try:
        Hardware(HardwareConfig(device="cpu", num_threads=2))
        assert torch.get_num_threads() == 2
        Hardware(HardwareConfig(device="cpu"))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    peaks = [7]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: peaks.append(0))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: peaks[-1])
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    assert Hardware(HardwareConfig(device="cuda")).peak_memory_bytes() == 0


@pytest.mark.parametrize("params, fair", [(110_000, True), (111_000, False)])
def test_the_ten_percent_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, params: int, fair: bool
) -> None:
    monkeypatch.setattr(plan, "num_params", lambda model: 100_000)
    made = config(tmp_path)
    why_not, baseline = plan.compare(plan.make_plan(made, Reference(made, SOFTMAX)), params)
    assert baseline == 100_000 and (why_not == []) == fair
    assert fair or why_not == ["111,000 parameters, +11.0 % over softmax"]


def test_limited_data_are_partial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Toy, "official_sizes", SIZES)
    assert run(tmp_path / "whole").protocol.data == "generated"
    record = run(tmp_path / "part", task={"limit_train": 20})
    assert record.protocol.data == "partial" and record.data["num_examples"]["train"] == 20


def test_a_finished_run_on_other_data_is_not_passed_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(tmp_path)
    assert run(tmp_path) == first
    monkeypatch.setattr(Toy, "settings", lambda self: {"changed": True})
    with pytest.raises(ValueError, match="this run is finished, on other data"):
        run(tmp_path)


def test_a_record_of_a_newer_program_is_never_replaced(tmp_path: Path) -> None:
    first = run(tmp_path)
    path = records.record_path(tmp_path / "results", first.task, first.model, first.run_id)
    path.write_text(path.read_text().replace('"schema_version": 1,', '"schema_version": 2,'))
    newer = path.read_bytes()
    with pytest.raises(ValueError, match=rf"{path}: schema_version=2, .*paths\.results"):
        run(tmp_path)
    assert path.read_bytes() == newer


def test_correctness_bits_round_trip() -> None:
    correct = np.random.default_rng(0).random(21) < 0.5
    text = records.pack_correct(correct)
    assert np.array_equal(records.unpack_correct(text, 21), correct)
    with pytest.raises(ValueError, match="do not hold 99"):
        records.unpack_correct(text, 99)


def test_activation_checkpointing_changes_no_number(tmp_path: Path) -> None:
    plain = run(tmp_path / "plain")
    saving = run(tmp_path / "saving", hardware={"activation_checkpointing": True})
    assert plain.curve == saving.curve and plain.result == saving.result


def test_evaluate_only_and_starting_from_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = run(tmp_path, train={"num_steps": 60, "lr": 0.05})
    assert record.result is not None
    folder = str(tmp_path / "outputs" / record.run_id)
    words = [f"checkpoint={folder}", "sweep.parallel=2"]
    evaluate_checkpoint(config(tmp_path, checkpoint=folder), words)
    low, high = wilson(record.result.test.accuracy, 20)
    shown = (
        f"test  accuracy {100 * record.result.test.accuracy:.2f} % (95 % interval "
        f"{100 * low:.1f} to {100 * high:.1f})"
    )
    out = capsys.readouterr().out
    assert shown in out
    assert f"weights of step {record.result.step}, the best on validation ({folder}/" in out
    (last,) = Path(folder).glob("checkpoints/step-00000060.pt")
    evaluate_checkpoint(config(tmp_path, checkpoint=str(last)), [])
    assert f"weights of step 60, the last one saved ({last})" in capsys.readouterr().out
    other = last.rename(last.with_name("mine.pt"))
    evaluate_checkpoint(config(tmp_path, checkpoint=str(other)), [])
    assert "mine.pt, whose name tells no step" in capsys.readouterr().out
    other.rename(last)
    with pytest.raises(ValueError, match="train.lr=1: with checkpoint="):
        evaluate_checkpoint(config(tmp_path, checkpoint=folder), ["train.lr=1"])
    with pytest.raises(ValueError, match="no run with a readable config.yaml"):
        evaluate_checkpoint(config(tmp_path, checkpoint=str(tmp_path)), [])
    going_on = run(tmp_path, config(tmp_path), init_from=folder)
    assert going_on.run_id != record.run_id and going_on.why_not == [f"init_from={folder}"]
    assert going_on.curve[0]["val_loss"] < 0.69 and going_on.curve[0]["step"] == 4
    with pytest.raises(ValueError, match="weights of another architecture"):
        run(tmp_path, init_from=folder, shape={"d_model": 16})
    assert len(list((tmp_path / "results/runs/toy/softmax").glob("*.json"))) == 2


def test_no_run_goes_on_from_weights_that_have_seen_its_test_examples(tmp_path: Path) -> None:
    """Generated ListOps of other sizes shares examples; a run between does not hide it."""

    def words(num_train: int, seed: int = 0) -> dict[str, Any]:
        limits = {"max_depth": 3, "max_args": 3,
                  "min_tree_length": 3, "max_tree_length": 12}  # fmt: skip
        return {"_target_": "lra.tasks.listops.ListOps", "source": "generated", "max_length": 12,
                "generator_seed": seed, "num_train": num_train, "num_val": 8,
                "num_test": 8} | limits  # fmt: skip

    first = run(tmp_path, task=words(40))
    folder = tmp_path / "outputs" / first.run_id
    message = "8 of the 8 val and 2 of the 8 test examples are among those of the other training"
    for source in (folder, folder / "checkpoints/step-00000008.pt"):
        with pytest.raises(ValueError, match=f"init_from={source}: {message}"):
            run(tmp_path, task=words(30), init_from=str(source))
    other = run(tmp_path, task=words(30, seed=1), init_from=str(folder))
    with pytest.raises(ValueError, match=message):
        run(tmp_path, task=words(30), init_from=str(tmp_path / "outputs" / other.run_id))


def test_weights_are_not_read_with_another_vocabulary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = run(tmp_path)
    folder = str(tmp_path / "outputs" / record.run_id)
    monkeypatch.setattr(Toy, "decode", lambda self, values: "".join(str(9 - v) for v in values))
    with pytest.raises(ValueError, match="another vocabulary"):
        evaluate_checkpoint(config(tmp_path, checkpoint=folder), [])


def test_a_time_limit_saves_and_the_next_start_goes_on(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole")
    first = run(tmp_path / "cut", train={"time_limit": 1e-9})
    assert first.status == "interrupted" and "train.time_limit" in first.message
    assert first.timed_out and not whole.timed_out
    status = tmp_path / "cut/outputs" / first.run_id / "status.json"
    taken = json.loads(status.read_text())["wall_time_s"]
    assert taken > (first.speed["wall_time_s"] or 0) > 0
    second = run(tmp_path / "cut")
    assert second.result == whole.result and second.curve == whole.curve
    assert (second.speed["wall_time_s"] or 0) > taken > 0


@pytest.mark.parametrize("stopped", [True, False])
def test_a_run_needs_the_weights_that_it_began_from_no_more(tmp_path: Path, stopped: bool) -> None:
    source = tmp_path / "outputs" / run(tmp_path).run_id
    words: dict[str, Any] = {"init_from": str(source), "seed": 1}
    whole = run(tmp_path / "whole", **words)
    going = tmp_path / "going"
    run(going, **words, train={"time_limit": 1e-9} if stopped else {})
    source.rename(source.with_name("gone"))
    assert run(going, **words).result == whole.result
    with pytest.raises(ValueError, match=f"init_from={source}: {source}: no such run folder"):
        run(tmp_path / "new", **words)
    for state in going.glob("outputs/*/checkpoints/step-*.pt"):  # nothing to go on from
        state.write_bytes(b"")
    with pytest.raises(ValueError, match="no such run folder"):
        run(going, **words)


def test_a_run_at_chance_is_told_early(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, train={"num_steps": 40, "lr": 1e-9})
    out = capsys.readouterr().out
    assert out.count("warning: validation is still at chance after 12 of 40 steps") == 1


def test_a_task_that_lacks_a_method_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="task._target_=lra.tasks.task.Task: the class lacks decode, "
    ):
        run(tmp_path, task={"_target_": "lra.tasks.task.Task"})


@pytest.mark.parametrize("handler", ["of a scheduler", "our own", "none"])
def test_a_scheduler_gets_its_signal_back_once_the_record_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handler: str
) -> None:
    seen: list[str] = []

    def puts_back(*_: object) -> None:
        (path,) = (tmp_path / "results/runs/toy/softmax").glob("*.json")
        (state,) = tmp_path.glob("outputs/*/status.json")
        seen.extend([records.load(path).status, json.loads(state.read_text())["status"]])
        raise SystemExit(144)

    forward = SoftmaxAttention.forward

    def warned(self: SoftmaxAttention, *inputs: torch.Tensor) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGUSR2)
        return forward(self, *inputs)

    handlers: Any = {"of a scheduler": puts_back, "our own": terminate, "none": signal.SIG_DFL}
    before = signal.signal(signal.SIGUSR2, handlers[handler])
    try:
        with monkeypatch.context() as patch:
            patch.setattr(SoftmaxAttention, "forward", warned)
            if handler != "of a scheduler":
                assert run(tmp_path).status == "interrupted"
            else:
                with pytest.raises(SystemExit):
                    run(tmp_path)
                assert seen == ["interrupted", "interrupted"]
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert run(tmp_path).curve == run(tmp_path / "whole").curve


@pytest.mark.parametrize("key", ["outputs", "results"])
def test_a_disk_that_fills_up_is_one_message_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    whole = run(tmp_path / "whole")
    original, fills = os.fsync, [True]

    def full(handle: int) -> None:
        path = os.readlink(f"/proc/self/fd/{handle}")
        # The last state, or the record: whatever comes after it is left out.
        if fills and (".step-" in path if key == "outputs" else "/results/" in path):
            raise OSError(errno.ENOSPC, "No space left on device")
        original(handle)

    monkeypatch.setattr(os, "fsync", full)
    try:
        record = run(tmp_path / "cut")
        assert key == "outputs" and record.status == "failed"  # the record's disk has room
        message = record.message
    except Unwritable as error:
        assert key == "results" and not list(tmp_path.glob("cut/results/runs/*/*/*.json"))
        message = str(error)
    assert re.match(
        rf"{tmp_path}/cut/{key}/.*: not written \(No space.*another paths\.{key}; the same", message
    )
    assert not list(tmp_path.rglob("traceback*")) and not list(tmp_path.rglob(".*.tmp"))
    fills.clear()
    again = run(tmp_path / "cut")
    assert again.result == whole.result and again.curve == whole.curve


@pytest.mark.parametrize("key", ["outputs", "results"])
def test_what_cannot_be_written_is_refused_before_data_are_prepared(
    tmp_path: Path, key: str
) -> None:
    (tmp_path / key).write_text("a file, not a folder")
    with pytest.raises(OSError, match=rf"not writable .* choose another paths\.{key}"):
        run(tmp_path)
    assert not (tmp_path / "cache").exists()


def test_a_folder_of_results_that_cannot_be_written_is_refused_before_training(
    tmp_path: Path,
) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results/runs").write_text("a file, not a folder")
    with pytest.raises(OSError, match=r"not writable .* choose another paths\.results"):
        run(tmp_path)
    assert not list(tmp_path.glob("outputs/*/metrics.jsonl"))
