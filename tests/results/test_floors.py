"""Rules without a sequence model: counted by hand, read back, refused when damaged, as shipped."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lra.results import rules
from lra.results.floors import Floors, load, load_all, save
from lra.results.records import load_all as load_records
from lra.results.records import pack_correct
from lra.tasks.batches import TokenArrays
from lra.tasks.cache import prepare
from lra.tasks.task import Rule
from lra.tasks.text import Text
from scripts import floors as script
from tests.toy import Toy, toy_data

ROOT = Path(__file__).resolve().parents[2]
ROWS = {
    # 7 is mostly 1, 3 mostly 0, 5 both as often; label 1 is the commonest.
    "train": [(b"\7\1", 1), (b"\7", 1), (b"\7\2", 0), (b"\3", 0), (b"\5", 1), (b"\5", 0),
              (b"\6", 1)],
    "val": [(b"\3\7", 0), (b"\7", 1)],
    "test": [(b"\7", 1), (b"\3", 1), (b"\5", 0), (b"\1", 1), (b"", 0)],
}  # fmt: skip


@pytest.fixture
def toy(tmp_path: Path) -> Floors:
    return measured(tmp_path, max_length=12)


def measured(folder: Path, max_length: int) -> Floors:
    """Without classifiers, which test_rules.py has."""
    task = Toy(data_dir=folder, max_length=max_length)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rules, "unavailable", lambda: "left out")
        return rules.measure(task, toy_data(folder, rows=ROWS, max_length=max_length))


def test_rules_are_counted_on_train_and_measured_elsewhere(toy: Floors) -> None:
    commonest, first = toy.floors[:2]
    assert (commonest.name, first.name) == ("commonest_label", "first_token")
    assert commonest.test.correct_N.tolist() == [True, True, False, True, False]
    # 7: 1, 3: 0, 5: the smaller of two equally common, 1 and no token: the commonest of all.
    assert first.test.correct_N.tolist() == [True, False, True, True, False]
    assert (commonest.val.accuracy, first.val.accuracy) == (0.5, 1.0)
    assert (commonest.test.accuracy, first.test.accuracy) == (0.6, 0.6)
    assert toy.data.num_examples == {"train": 7, "val": 2, "test": 5}


def test_a_task_may_have_a_ladder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rules_of(task: Toy, train: TokenArrays) -> list[Rule]:
        label = int(train.labels[0])
        return [Rule("always", "what train has first", lambda part: np.full(len(part), label))]

    monkeypatch.setattr(Toy, "ladder", rules_of)
    toy = measured(tmp_path, max_length=12)
    (rung,) = toy.ladder
    assert (rung.val.accuracy, rung.test.accuracy) == (0.5, 0.6) and rung not in toy.floors
    assert rung.test.correct_N.tolist() == [True, True, False, True, False]
    with pytest.raises(ValueError, match="name='first_token' stands there more than once"):
        replace(toy, ladder=[replace(rung, name="first_token")])
    path = save(toy, tmp_path)
    assert load(path) == toy
    with pytest.raises(ValueError, match=r"rules that were not measured now \(always\)"):
        save(replace(toy, ladder=[]), tmp_path)
    path.write_text(path.read_text().replace('"accuracy": 0.6', '"accuracy": 0.7'))
    with pytest.raises(ValueError, match=r"(floors|ladder)\[0\].test.accuracy=0.7, but 3 of 5"):
        load(path)
    without = {k: v for k, v in json.loads(toy.to_json()).items() if k != "ladder"}
    path.write_text(json.dumps(without))  # as files were before
    assert load(path) == replace(toy, ladder=[])


def test_part_of_a_split_is_refused(tmp_path: Path) -> None:
    data = toy_data(tmp_path, rows=ROWS, limit_test=3)
    with pytest.raises(ValueError, match="task.limit_test=3: .* whole splits"):
        rules.measure(Toy(data_dir=tmp_path, max_length=12), data)


def test_a_file_is_read_back_and_never_replaced_by_that_of_other_data(
    tmp_path: Path, toy: Floors
) -> None:
    path = save(toy, tmp_path)
    assert load(path) == toy and load_all(tmp_path) == ([toy], [])
    before = path.read_bytes()
    assert save(toy, tmp_path).read_bytes() == before
    other = measured(tmp_path, max_length=11)
    with pytest.raises(ValueError, match="toy.json: holds the floors of other data"):
        save(other, tmp_path)
    assert path.read_bytes() == before
    partial = replace(other, data=replace(other.data, kind="partial"))
    path.write_text(partial.to_json())
    assert load(save(toy, tmp_path)) == toy  # what is of a part gives way to the whole


def test_the_best_on_validation_is_worth_naming(toy: Floors) -> None:
    assert [floor.name for floor in toy.worth_naming()] == ["commonest_label", "first_token"]
    alone = replace(toy, floors=toy.floors[:1])
    assert alone.worth_naming() == toy.floors[:1]
    assert replace(toy, floors=[]).worth_naming() == []
    detailed = replace(toy.floors[0], description="a classifier (of 3)")
    assert (detailed.title, toy.floors[0].title) == ("a classifier", "the commonest label")


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("floors.0.test.accuracy", 0.8, r"floors\[0\].test.accuracy=0.8, but 3 of 5 .* right"),
        ("floors.0.test.accuracy", float("nan"), r"floors\[0\].test.accuracy=nan, but 3 of 5"),
        ("floors.1.val.correct", "AA==AA", r"floors\[1\].val: "),
        ("floors.1.val.correct", "AAAA", r"floors\[1\].val: correct: 24 bits do not hold 2"),
        ("floors.1.val.num_examples", 0, r"floors\[1\].val.num_examples=0: data has 2"),
        (
            "ladder",
            [{"name": "a", "description": "b", "val": None, "test": None}],
            r"ladder\[0\].val",
        ),
        ("data.num_examples", {}, r"floors\[0\].val.num_examples=2: data has None"),
        ("data.fingerprint", None, "data.fingerprint=null: expected"),
        ("floors.0.rule", 1, "rule=1: unknown key"),
        ("task", "text", "toy.json: holds task text"),
    ],
)
def test_a_damaged_file_is_named(
    tmp_path: Path, toy: Floors, place: str, value: Any, message: str
) -> None:
    path = save(toy, tmp_path)
    values = json.loads(path.read_text())
    *keys, last = place.split(".")
    inner = values
    for key in keys:
        inner = inner[int(key) if key.isdigit() else key]
    inner[last] = value
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=message) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert load_all(tmp_path) == ([], [f"skipped {caught.value}"])


@pytest.mark.parametrize("text", ["", "[]", '{"task": "to', "\\xff"])
def test_what_is_no_file_of_floors_is_named(tmp_path: Path, toy: Floors, text: str) -> None:
    path = save(toy, tmp_path)
    path.write_text(text)
    with pytest.raises(ValueError, match="toy.json: (not a JSON file|expected a JSON object)"):
        load(path)


def test_the_command_writes_where_results_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["task=text", "task.source=synthetic", "task.num_train=40", "task.num_val=8",
             "task.num_test=8", f"paths.cache={tmp_path / 'cache'}",
             f"paths.results={tmp_path / 'results'}"]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["floors.py", *words])
    script.main()
    found = load(tmp_path / "results" / "floors" / "text.json")
    task = Text(data_dir=tmp_path, source="synthetic", num_train=40, num_val=8, num_test=8)
    data = prepare(task, tmp_path / "cache")
    assert found.data.fingerprint == data.fingerprint
    assert np.bincount(data.train.labels).argmax() in (0, 1)
    right = data.test.labels == np.bincount(data.train.labels).argmax()
    assert found.floors[0].test.correct == pack_correct(right)
    assert "the commonest label of the first token: val " in capsys.readouterr().out


def test_the_shipped_floors_are_those_of_the_shipped_runs() -> None:
    """The figures of results/NOTES.md, and as many examples as it says only the run or rule has."""
    found, warnings = load_all(ROOT / "results")
    kinds = {f.task: f.data.kind for f in found}
    assert warnings == [] and kinds == {"listops": "generated", "pathfinder": "generated"}
    (listops,) = (f for f in found if f.task == "listops")
    figures = {f.name: (f.val.accuracy, f.test.accuracy) for f in listops.floors}
    assert figures["commonest_label"] == (0.1655, 0.1785)
    assert figures["first_token"] == (0.348, 0.372)
    assert listops.worth_naming() == listops.floors[:2]
    assert [f.test.accuracy for f in listops.ladder] == [0.6085, 0.77, 0.852, 0.9035, 0.946]
    assert [f.task for f in found if f.ladder] == ["listops"]
    runs = [r for r in load_records(ROOT / "results")[0] if r.task == "listops"]
    runs = [r for r in runs if r.protocol.data == "generated"]  # others are no results of the task
    assert {r.data["fingerprint"] for r in runs} == {listops.data.fingerprint}


@pytest.mark.slow
@pytest.mark.skipif(bool(rules.unavailable()), reason="scikit-learn is missing")
def test_the_shipped_floors_are_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [f"paths.{p}={tmp_path / p}" for p in ("data", "cache", "results")]
    monkeypatch.setattr(sys, "argv", ["floors.py", "task=listops", *folders])
    script.main()
    again, shipped = (load(p / "floors" / "listops.json")
                      for p in (tmp_path / "results", ROOT / "results"))  # fmt: skip
    assert again.data.fingerprint == shipped.data.fingerprint
    for ours, theirs in zip(again.floors, shipped.floors, strict=True):
        if ours.name.startswith("linear"):  # another processor may add up in another order
            assert ours.title == theirs.title
            assert abs(ours.test.accuracy - theirs.test.accuracy) < 0.01
        else:
            assert ours == theirs
    assert again.ladder == shipped.ladder
