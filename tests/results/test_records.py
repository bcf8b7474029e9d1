"""Run records: what a file must hold, and the command that lists, checks and merges them."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lra.build import resolved
from lra.cli import compose_config, typed
from lra.config import config_hash
from lra.results import records
from lra.results.records import (
    Record,
    load,
    load_all,
    pack_correct,
    save,
    save_beside,
    unpack_correct,
)
from lra.training.evaluate import is_at_chance
from tests import programs
from tests.made_up import make_record, sixty_records, write_sixty

ROOT = Path(__file__).resolve().parents[2]


def command(results: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    return programs.call("scripts/records.py", "--results", results, *words)


def write(folder: Path, record: Record, **changes: Any) -> Path:
    path = save(record, folder)
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(values))
    return path


def test_a_record_survives_its_file(tmp_path: Path) -> None:
    for record in sixty_records().values():
        assert load(save(record, tmp_path)) == record


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": "0"}, "seed='0': expected an integer"),
        ({"accuracy": 0.5}, "accuracy=0.5: unknown key"),
        ({"status": "done"}, "status='done': not a choice"),
        ({"schema_version": 99}, "schema_version=99, but this program reads version 1"),
        ({"schema_version": [1]}, r"schema_version=\[1\]"),
        ({"result": None}, "does not go with result=None"),
        ({"protocol": {"data": "files"}}, "protocol.budget is missing"),
    ],
)
def test_a_wrong_field_is_named_with_its_file(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = write(tmp_path, make_record(), **changes)
    with pytest.raises(ValueError, match=message) as error:
        load(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"curve": [{"val_accuracy": 0.5}]}, "curve[0].step is missing"),
        ({"curve": [{"step": 1}, {"step": "a"}]}, "curve[1].step='a': expected an integer"),
        ({"curve": [{"step": 1.5}]}, "curve[0].step=1.5: expected an integer"),
        ({"curve": [{"step": None}]}, "curve[0].step=null: expected an integer"),
        ({"curve": [{"step": 1, "acc": 1}]}, "curve[0].acc=1: unknown key"),
        ({"curve": [{"step": 1, "val_loss": "b"}]}, "curve[0].val_loss='b': expected a number"),
        ({"curve": [{"step": 1, "val_loss": True}]}, "curve[0].val_loss=True: expected a number"),
        ({"curve": 3}, "curve=3: expected a list of keys with values"),
        ({"curve": [{"step": 1, "val_loss": float("nan")}]}, "NaN, where a finite number"),
        ({"speed": {"tokens_per_s": "x"}}, "speed.tokens_per_s='x': expected a number or null"),
        ({"speed": [1]}, "speed=[1]: expected keys with values"),
    ],
)
def test_numbers_that_no_table_could_use_are_named_with_their_file(
    tmp_path: Path, wrong: dict[str, Any], expected: str
) -> None:
    path = save(make_record(), tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | wrong))
    read, (warning,) = load_all(tmp_path)
    assert read == [] and path.name in warning and expected in warning


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"accuracy": "x"}, "result.test.accuracy='x': expected a number"),
        ({"accuracy": 37.12}, "accuracy=37.12: expected a fraction"),
        ({"loss": None}, "result.test.loss=null: expected a number"),
        ({"num": 1}, "result.test.num=1: unknown key"),
    ],
)
def test_a_wrong_part_of_a_result_is_named_by_itself(
    tmp_path: Path, wrong: dict[str, Any], expected: str
) -> None:
    path = save(make_record(), tmp_path)
    values = json.loads(path.read_text())
    values["result"]["test"] |= wrong
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=re.escape(f"{path}: {expected}")):
        load(path)


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"objective": "none"}, "pretraining.objective='none': not a choice"),
        ({"num_steps": 0}, "pretraining.num_steps=0: expected at least 1"),
        ({"num_steps": 2.5}, "pretraining.num_steps=2.5: expected an integer"),
        ({"mask_rate": None}, "pretraining.mask_rate=None with objective=masked: expected a rate"),
        ({"mask_rate": 1.5}, "pretraining.mask_rate=1.5: expected 0 < rate < 1"),
        ({"identity": "no"}, "pretraining.identity='no': expected a hash"),
        ({"val": {"loss": None, "accuracy": 0.5}}, "pretraining.val.loss=null: expected a number"),
        (
            {"val": {"loss": 1.0, "accuracy": 5}},
            "pretraining.val.accuracy=5.0: expected a fraction",
        ),
        ({"curve": [{"step": "a"}]}, "pretraining.curve[0].step='a': expected an integer"),
        ({"steps": 1}, "pretraining.steps=1: unknown key"),
    ],
)
def test_a_wrong_part_of_pretraining_is_named(
    tmp_path: Path, wrong: dict[str, Any], expected: str
) -> None:
    path = save(make_record(pretrain="masked"), tmp_path)
    assert records.problems(load(path), path) == []
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"pretraining": values["pretraining"] | wrong}))
    with pytest.raises(ValueError, match=re.escape(f"{path}: {expected}")):
        load(path)


def test_a_result_and_its_phases_belong_together(tmp_path: Path) -> None:
    record = make_record(pretrain="next")
    assert record.pretraining
    with pytest.raises(ValueError, match="pretraining: no such block does not go with config"):
        dataclasses.replace(record, pretraining=None)
    with pytest.raises(ValueError, match="pretraining: such a block does not go with config"):
        dataclasses.replace(make_record(), pretraining=record.pretraining)
    make_record(pretrain="next", status="interrupted", pretraining=None)  # in its first phase
    other = dataclasses.replace(record.pretraining, batch_size=8, seed=3)
    path = save(dataclasses.replace(record, pretraining=other), tmp_path)
    assert records.problems(load(path), path) == [
        "pretraining.batch_size=8, but the config has 32",
        "pretraining.seed=3, but the run has 0",
    ]


@pytest.mark.parametrize(
    "path", sorted((ROOT / "results/runs").glob("*/*/*.json")), ids=lambda p: p.stem
)
def test_a_shipped_record_is_read_as_it_was_written(path: Path) -> None:
    record = load(path)
    assert record.to_json() == path.read_text()
    assert records.problems(record, path) == []
    assert all(type(point["step"]) is int for point in record.curve)


@pytest.mark.parametrize("accuracy", [37.12, -0.1])
def test_accuracy_is_a_fraction(accuracy: float) -> None:
    with pytest.raises(ValueError, match=f"accuracy={accuracy}: expected a fraction from 0 to 1"):
        records.SplitResult(accuracy, 1.0, 2000)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"x"', "\udcff", "[" * 100_000])
def test_a_damaged_file_is_skipped_with_a_warning(tmp_path: Path, text: str) -> None:
    good = save(make_record(), tmp_path)
    bad = good.with_name("bad.json")
    bad.write_bytes(text.encode("utf-8", "surrogateescape"))
    found, warnings = load_all(tmp_path)
    assert len(found) == 1 and len(warnings) == 1 and str(bad) in warnings[0]


def test_older_schemas_pass_through_their_migrations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, make_record(seed=3), schema_version=0)
    values = json.loads(path.read_text())
    values["network"] = values.pop("model")
    path.write_text(json.dumps(values))
    before = path.read_bytes()

    def renamed(old: dict[str, Any]) -> dict[str, Any]:
        new = {k: v for k, v in old.items() if k != "network"}
        return new | {"model": old["network"], "schema_version": 1}

    with pytest.raises(ValueError, match="schema_version=0"):
        load(path)
    monkeypatch.setitem(records.MIGRATIONS, 0, renamed)
    assert load(path) == make_record(seed=3)
    assert path.read_bytes() == before


def test_numbers_that_are_not_finite_become_null() -> None:
    record = make_record(status="diverged", curve=[{"step": 1, "train_loss": float("nan")}])
    assert json.loads(record.to_json())["curve"] == [{"step": 1, "train_loss": None}]


@pytest.mark.parametrize("n", [1, 7, 8, 9, 2000])
def test_packed_results_come_back(n: int) -> None:
    correct_N = np.random.default_rng(n).random(n) < 0.4
    text = pack_correct(correct_N)
    np.testing.assert_array_equal(unpack_correct(text, n), correct_N)
    with pytest.raises(ValueError, match=f"bits do not hold {n + 8} examples"):
        unpack_correct(text, n + 8)


def test_at_chance_is_the_binomial_bound_of_the_majority_class() -> None:
    # 10,000 of 20,000: the bound is 0.5 + 2.326 * sqrt(0.25 / 20,000) = 0.50822.
    assert is_at_chance(0.5082, [10_000, 10_000])
    assert not is_at_chance(0.5083, [10_000, 10_000])
    assert is_at_chance(0.18, [340, 1660 // 9] + [184] * 8)


def test_list_show_and_diff(tmp_path: Path) -> None:
    write_sixty(tmp_path)
    done = command(tmp_path, "list", "task=text", "status=diverged")
    assert done.returncode == 0 and "1 records" in done.stdout and "text-luna-seed7" in done.stdout
    assert "half-written.json" in done.stdout
    done = command(tmp_path, "list", "task=listops", "seed=6")
    assert re.search(r" 97\.00  \S+  num_steps=500$", done.stdout, re.MULTILINE)
    assert f"1 records in {tmp_path}/runs" in done.stdout.splitlines()
    elsewhere = command(tmp_path / "nowhere", "list").stdout
    assert elsewhere.startswith(f"0 records in {tmp_path}/nowhere/runs, which is not there")
    assert command(tmp_path, "list", "tsk=text").returncode == 2
    for wrong, meant in (("model=luuna", "luna"), ("task=txt", "text"), ("status=done", "")):
        done = command(tmp_path, "list", wrong)
        assert done.returncode == 2 and f"error: {wrong}: " in done.stderr
        assert not meant or f"did you mean '{meant}'?" in done.stderr

    done = command(tmp_path, "show", "listops-fastformer-seed1")
    assert "num_params: 220000" in done.stdout and "config.train.lr: 0.0001" in done.stdout
    assert done.stdout.splitlines()[:3] == [
        "test accuracy 37.00 % on 2,000 examples (95 % interval 34.9 to 39.1), completed",
        "fastformer on ListOps, recipe nystromformer, seed 1, changed: nothing",
        "data files, budget full, finished 2026-01-01T01:00:00+00:00",
    ]
    done = command(tmp_path, "show", "text-luna-seed7")
    assert done.stdout.startswith("no result, diverged: step 77: nan\n")
    done = command(tmp_path, "show", "listops-luna")
    assert done.returncode == 2 and "expected one record, found" in done.stderr
    assert command(tmp_path, "show", "nothing").returncode == 2

    one, two = make_record(), make_record(overrides={"shape.num_heads": 4})
    paths = [save(r, tmp_path / "other") for r in (one, two)]
    done = command(tmp_path, "diff", *paths)
    assert done.stdout.splitlines() == [
        "config.shape.num_heads: 2 -> 4",
        "overrides: ['model=luna', 'task=listops', 'seed=0'] -> "
        "['model=luna', 'task=listops', 'seed=0', 'shape.num_heads=4']",
    ]
    assert command(tmp_path, "diff", paths[0], paths[0]).stdout == "no difference\n"


def test_a_second_record_of_a_run_has_a_number(tmp_path: Path) -> None:
    first = save(make_record(started_at="2025-12-31T00:00:00Z"), tmp_path)
    second = save_beside(make_record(accuracy=0.38), tmp_path)
    name = f"{first.stem}.2"
    assert second == first.with_name(f"{name}.json")
    assert (load(first).name, load(second).name) == (first.stem, name)
    assert load(second).run_id == first.stem and "number" not in json.loads(second.read_text())
    listed = command(tmp_path, "list").stdout
    assert re.search(rf"^{first.stem}  .* 37\.00", listed, re.M)
    assert re.search(rf"^{name}  .* 38\.00", listed, re.M)
    assert "2 files, 0 complaints" in command(tmp_path, "validate").stdout
    shown = command(tmp_path, "show", name).stdout
    assert "accuracy 38.00 %" in shown and f"also of this run: {first}\n" in shown
    assert "accuracy 37.00 %" in command(tmp_path, "show", first.stem).stdout
    beginning = command(tmp_path, "show", first.stem[:-2])
    assert beginning.returncode == 2 and f"found {name}, {first.stem}\n" in beginning.stderr
    done = command(tmp_path, "diff", first.stem, name)
    assert "result.test.accuracy: 0.37 -> 0.38" in done.stdout


@pytest.mark.parametrize("wrong", ["1", "02", "x", "2.3"])
def test_a_number_that_no_run_would_give_is_a_complaint(tmp_path: Path, wrong: str) -> None:
    path = save(make_record(), tmp_path)
    path = path.rename(path.with_name(f"{path.stem}.{wrong}.json"))
    assert "holds task listops" in command(tmp_path, "validate").stdout


@pytest.mark.parametrize("section", ["shape", "pretrain", "train"])
@pytest.mark.parametrize("value", [None, [], "x"])
def test_a_config_with_no_object_for_a_section_is_named(
    tmp_path: Path, section: str, value: object
) -> None:
    record = make_record()
    path = write(tmp_path, record, config=record.config | {section: value})
    with pytest.raises(ValueError, match=rf"{re.escape(str(path))}: config\.{section}=.*an object"):
        load(path)


def test_an_accuracy_that_the_test_results_contradict_never_reaches_a_table(tmp_path: Path) -> None:
    result = json.loads(make_record().to_json())["result"]
    result["test"]["accuracy"] = 0.95
    path = write(tmp_path, make_record(), result=result)
    assert load_all(tmp_path) == (
        [], [f"skipped {path}: accuracy=0.95, but 740 of 2000 right"])  # fmt: skip
    result["test"] |= {"accuracy": 0.37, "correct": "AAAA"}
    write(tmp_path, make_record(), result=result)
    assert load_all(tmp_path) == (
        [], [f"skipped {path}: correct: 24 bits do not hold 2000 examples"])  # fmt: skip


def test_command_makes_the_same_run_or_says_what_has_changed(tmp_path: Path) -> None:
    words = ["model=luna", "task=listops", "task.path='/data/a b'", "train.lr=3e-4", "seed=2"]
    config = resolved(typed(compose_config(words)))
    record = dataclasses.replace(
        make_record(), config=config, config_hash=config_hash(config), overrides=words
    )
    done = command(tmp_path, "command", save(record, tmp_path))
    assert done.returncode == 0 and shlex.split(done.stdout) == [
        "python",
        "run.py",
        *words,
        "hardware.num_threads=4",
    ]  # as the machine had chosen
    record.overrides.append("hardware.num_threads=2")
    done = command(tmp_path, "command", save(record, tmp_path))
    assert "hardware.num_threads=2" in done.stdout and "=4" not in done.stdout
    record.overrides.pop()

    older = config | {"train": config["train"] | {"lr": 1e-4}, "paths": {}}
    edited = dataclasses.replace(record, config=older, config_hash=config_hash(older))
    done = command(tmp_path, "command", save(edited, tmp_path / "older"))
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.endswith("configs have changed since: train.lr is 0.0003, was 0.0001\n")

    gone = dataclasses.replace(record, overrides=["model=lunar"])
    done = command(tmp_path, "command", save(gone, tmp_path / "gone"))
    assert done.returncode == 2 and "lunar" in done.stderr and "Traceback" not in done.stderr


def test_validate_finds_what_does_not_fit_together(tmp_path: Path) -> None:
    good = save(make_record(), tmp_path)
    assert command(tmp_path, "validate").returncode == 0
    record = make_record(seed=1)
    edited = dataclasses.replace(record, config=record.config | {"train": {}})
    write(tmp_path, edited)
    write(tmp_path, make_record(seed=2), finished_at="yesterday")
    values = json.loads(make_record(seed=3).to_json())
    values["result"]["test"]["accuracy"] = 0.5
    write(tmp_path, make_record(seed=3), result=values["result"])
    moved = good.with_name("moved.json")
    moved.write_bytes(good.read_bytes())
    good.with_name("half.json").write_text("{")
    done = command(tmp_path, "validate")
    assert done.returncode == 1 and "6 files, 5 complaints" in done.stdout
    for message in ("not the hash of its config", "finished_at='yesterday': not a time",
                    "accuracy=0.5, but 740 of 2000 right", "moved.json: holds task listops",
                    "half.json: not a JSON record"):  # fmt: skip
        assert message in done.stdout
    assert command(tmp_path, "validate", good).returncode == 0


def test_merge_keeps_both_trainings_of_one_run(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    days = [f"2026-01-0{n}T00:00:00Z" for n in (1, 2, 3, 4)]
    shipped = make_record(started_at=days[0])
    for folder, start in ((here, days[1]), (there, days[2])):
        save(shipped, folder)
        save_beside(make_record(started_at=start), folder)
    save(make_record(seed=5), there)
    done = command(here, "merge", there)
    assert done.returncode == 0, done.stderr
    renamed, count = done.stdout.splitlines()
    assert f"{shipped.run_id}.2.json is " in renamed and f"{shipped.run_id}.3.json here" in renamed
    assert count == "2 records added, 1 were here already"
    found, _ = load_all(here)
    assert sorted((r.seed, r.number, r.started_at[:10]) for r in found) == [
        (0, 1, "2026-01-01"), (0, 2, "2026-01-02"), (0, 3, "2026-01-03"), (5, 1, "2026-01-01"),
    ]  # fmt: skip
    assert command(here, "validate").returncode == 0
    assert command(here, "merge", there).stdout == "0 records added, 3 were here already\n"


def test_merge_adds_what_is_new_and_refuses_conflicts(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder, seeds in ((here, (0, 1)), (there, (1, 2))):
        for seed in seeds:
            save(make_record(seed=seed), folder)
    done = command(here, "merge", there)
    assert done.stdout == "1 records added, 1 were here already\n"
    assert sorted(r.seed for r in load_all(here)[0]) == [0, 1, 2]

    save(make_record(seed=3), there)
    changed = save(make_record(seed=2, accuracy=0.9), there)
    before = {p: p.read_bytes() for p in here.rglob("*.json")}
    done = command(here, "merge", there / "runs")
    assert done.returncode == 2 and f"{changed}: differs from" in done.stderr
    assert {p: p.read_bytes() for p in here.rglob("*.json")} == before

    changed.write_text("{")
    done = command(here, "merge", there)
    assert done.returncode == 2 and "not a JSON record" in done.stderr
    assert {p: p.read_bytes() for p in here.rglob("*.json")} == before
    assert command(here, "merge", tmp_path / "empty").returncode == 2
