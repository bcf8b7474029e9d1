"""A trained model in Python says what the run's own evaluation said, of what a person has."""

from __future__ import annotations

import dataclasses
import functools
import runpy
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import lra
from lra.build import make_task
from lra.cli import compose_config, typed
from lra.job import run_job
from lra.plan import Reference
from lra.results import records
from lra.tasks.cache import Dataset, prepare, stratified
from lra.tasks.image import Image
from lra.tasks.listops import ListOps
from lra.tasks.pathfinder import Pathfinder
from lra.tasks.retrieval import Retrieval
from lra.tasks.task import Task
from lra.tasks.text import Text
from lra.trained import evaluate_checkpoint
from lra.training.checkpoint import checkpoints
from lra.training.evaluate import Metrics, evaluate
from lra.training.weights import selected_path
from tests.test_job import SOFTMAX
from tests.test_job import config as toy_config
from tests.toy import Toy

ROOT = Path(__file__).resolve().parent.parent
TINY = [
    "experiment=smoke", "task.num_train=64", "task.num_val=8", "task.num_test=41",
    "shape.d_model=16", "shape.num_layers=1", "shape.d_ff=16", "shape.head_hidden=[8]",
    "train.num_steps=9", "train.warmup_steps=2", "train.eval_every=3", "train.batch_size=8",
    "train.lr=0.01", "hardware.num_threads=1",
]  # fmt: skip
WORDS = {
    "listops": [
        "task.min_tree_length=10",
        "task.max_tree_length=60",
        "task.max_length=64",
        "train.pad_to_max=true",
    ],
    "retrieval": ["task.max_length=400"],  # most documents are longer, and cut
    "image": [],
}


def trained(folder: Path, *words: str) -> tuple[Path, records.Record, Task, Dataset]:
    places = [f"paths.{p}={folder / p}" for p in ("data", "cache", "outputs", "results")]
    config = typed(compose_config([*TINY, *words, *places]))
    record = run_job(config, [], Reference(None, SOFTMAX))
    task = make_task(config)
    return folder / "outputs" / record.run_id, record, task, prepare(task, config.paths.cache)


def as_people_have_it(task: Task, data: Dataset, index: int) -> Any:
    parts = [data.test.sequence(index, s) for s in range(task.num_sequences)]
    if task.name == "image":
        return parts[0].reshape(32, 32)
    texts = tuple(task.decode(part) for part in parts)
    return texts if len(texts) > 1 else texts[0]


@pytest.mark.parametrize("name", WORDS)
def test_predictions_are_those_of_the_runs_own_evaluation(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lra.tasks.cache.available_cores", lambda: 1)  # processes would take longer
    folder, record, task, data = trained(tmp_path, f"task={name}", "model=luna", *WORDS[name])
    run = lra.load(folder)
    inputs = [as_people_have_it(task, data, i) for i in range(len(data.test))]
    predicted = run.predict(inputs)
    labels = data.test.labels.tolist()
    classes = [task.class_names[label] if task.class_names else label for label in labels]
    assert record.result and record.result.test.correct
    correct_N = records.unpack_correct(record.result.test.correct, len(labels))
    assert [p == c for p, c in zip(predicted, classes, strict=True)] == correct_N.tolist()
    assert 0 < correct_N.sum() < len(labels)
    assert run.step == record.result.step and not run.model.training
    if name == "listops":
        blocks = (ROOT / "README.md").read_text(encoding="utf-8").split("```\n")
        (block,) = [block for block in blocks if "lra.load(" in block]
        exec(block.replace("outputs/RUN_ID", str(folder)), found := {})
        assert found["run"].task.name == "listops"
    # One alone, from a checkpoint's folder given as text.
    alone = lra.load(str(folder)).logits(inputs[3])
    assert alone.shape == (task.num_classes,) and not alone.requires_grad
    torch.testing.assert_close(alone, run.logits(inputs)[3], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pads", [True, False])
def test_an_evaluation_pads_as_the_run_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pads: bool
) -> None:
    monkeypatch.setattr("lra.tasks.cache.available_cores", lambda: 1)
    words = [
        "model=none",
        "task.num_test=8",
        *WORDS["listops"],
        f"train.pad_to_max={str(pads).lower()}",
    ]
    folder, *_ = trained(tmp_path, *words)
    given: list[int | None] = []

    def spied(*arguments: Any, pad_to: int | None = None, **others: Any) -> Metrics:
        given.append(pad_to)
        return evaluate(*arguments, pad_to=pad_to, **others)

    monkeypatch.setattr("lra.trained.evaluate", spied)
    places = [f"paths.{p}={tmp_path / p}" for p in ("data", "cache", "outputs", "results")]
    evaluate_checkpoint(typed(compose_config([*places, f"checkpoint={folder}"])), places)
    assert given == [64 if pads else None] * 2


def test_import_stays_light() -> None:
    code = "import sys, lra; print(lra.load.__name__, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["load", "False"]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    record = run_job(toy_config(folder), [], Reference(None, SOFTMAX))
    return folder / "outputs" / record.run_id


def test_a_newcomers_task_takes_its_raw_values(toy: Path) -> None:
    run = lra.load(toy)
    given = [np.array([3, 1, 2]), (0, 9), bytes([7])]
    answers = run.predict(given)
    assert answers == [run.predict(values) for values in given] and set(answers) <= {0, 1}
    assert run.predict([]) == [] and run.logits([]).shape == (0, 2)


@pytest.mark.parametrize(
    "given, expected",
    [
        ([1, 2, 3], "input 0: int .*expected an array of whole numbers, 0 to 9, .*list is several"),
        ([np.array([1]), np.array([1, 10])], "input 1: value 10 at place 1, expected 0 to 9"),
        (np.array([0.5]), "float64"),
        ("123", "input 0: str"),
        (None, "NoneType"),
        (np.zeros((2, 2), int), r"ndarray of shape \(2, 2\)"),
    ],
)
def test_what_is_no_input_is_named(toy: Path, given: Any, expected: str) -> None:
    with pytest.raises(ValueError, match=f"task 'toy', .*{expected}"):
        lra.load(toy).predict(given)


@pytest.mark.parametrize("device", ["gpu", "cuda:99"])
def test_a_device_that_is_not_there_is_named(toy: Path, device: str) -> None:
    with pytest.raises(ValueError, match=f"^device='{device}': cannot be used here \\(.+\\)$"):
        lra.load(toy, device)


def test_too_long_is_cut_and_said_or_refused(toy: Path) -> None:
    run = lra.load(toy)
    with pytest.warns(UserWarning, match=r"1 of 2 inputs are longer .*=12 \(the first: input 1\)"):
        logits = run.logits([np.arange(9), np.arange(20) % 10])
    with warnings.catch_warnings(action="error"):
        assert torch.equal(logits[1], run.logits([np.arange(9), np.arange(12) % 10])[1])
    run.task = dataclasses.replace(run.task, strict=True)
    with pytest.raises(ValueError, match="task.strict=true has none cut"):
        run.predict(np.arange(20) % 10)


def test_runs_that_are_not_there_or_not_finished(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=f"no such run; did you mean '{toy}'"):
        lra.load(toy.with_name(toy.name[:-1]))
    (tmp_path / "outputs").symlink_to(toy.parent)
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        with pytest.raises(ValueError, match=f"no such run; did you mean 'outputs/{toy.name}'"):
            lra.load(toy.name)
    (tmp_path / "empty").mkdir()
    for content in (None, b"", b"- 1", b"\xff\xfe\xff"):
        if content is not None:
            (tmp_path / "empty" / "config.yaml").write_bytes(content)
        with pytest.raises(ValueError, match="empty: no run with a readable config.yaml"):
            lra.load(tmp_path / "empty")
    cut = run_job(
        toy_config(tmp_path, train={"num_steps": 9999, "time_limit": 0.05, "eval_every": 2000}),
        [], Reference(None, SOFTMAX),
    )  # fmt: skip
    assert cut.status == "interrupted"
    with pytest.warns(UserWarning, match=r"not finished \(interrupted\): weights of step \d+ of"):
        lra.load(tmp_path / "outputs" / cut.run_id)


@pytest.mark.parametrize(
    "key, expected",
    [
        ("seed", "an integer"),
        ("model", "keys with values"),
        ("train", "keys with values"),
        ("train.lr", "a number"),
        ("task.max_length", "an integer"),
        ("shape.norm_kind", None),  # which came later
    ],
)
def test_a_key_that_a_run_of_another_version_lacks_is_named_with_the_file(
    toy: Path, tmp_path: Path, key: str, expected: str | None
) -> None:
    (tmp_path / "checkpoints").symlink_to(toy / "checkpoints")
    stored = yaml.safe_load((toy / "config.yaml").read_text())
    *sections, last = key.split(".")
    del functools.reduce(dict.__getitem__, sections, stored)[last]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(stored))
    asked = toy_config(tmp_path, checkpoint=str(tmp_path))
    for use in (lambda: lra.load(tmp_path), lambda: evaluate_checkpoint(asked, [])):
        if expected is None:
            use()
            continue
        with pytest.raises(ValueError) as caught:
            use()
        assert str(caught.value) == (
            f"{tmp_path}/config.yaml: {key} is missing, expected {expected}; edited, or written by "
            "another version?"
        )


@pytest.mark.parametrize("selection", ["last", "best_val"])
def test_of_damaged_weights_the_newest_sound_ones_are_taken(
    toy: Path, tmp_path: Path, selection: str
) -> None:
    """A state that names the best weights counts with them alone."""
    train = {"selection": selection, "checkpoint_every": 4}
    record = run_job(toy_config(tmp_path, train=train), [], Reference(None, SOFTMAX))
    run_dir = tmp_path / "outputs" / record.run_id
    newest, older = checkpoints(run_dir / "checkpoints")
    if selection == "last":
        assert selected_path(run_dir) == newest
        newest.write_bytes(newest.read_bytes()[:1000])
        assert selected_path(run_dir) == older
    else:
        (best,) = (run_dir / "checkpoints").glob("best-*.pt")
        assert selected_path(run_dir) == best
        best.unlink()
        assert selected_path(run_dir) == older  # of a step before there was a best
        older.unlink()
        with pytest.raises(ValueError, match="no checkpoint in its folder .*that can be read"):
            selected_path(run_dir)


def test_what_each_task_takes(tmp_path: Path) -> None:
    listops = ListOps(data_dir=tmp_path)
    values = bytes([11, 4, 3, 10, 2, 3, 14, 14])
    for text in ("[MAX 4 3 [MIN 2 3 ] ]", "[MAX 4 3 [MIN 2 3]]", "( ( [MAX 4 ) 3 ) [MIN 2 3 ] ]"):
        assert bytes(listops.encode(text)) == values
    assert listops.encode(np.array([1, 2])).tolist() == [1, 2]
    with pytest.raises(ValueError, match=r"unknown symbol '\[AVG' \(number 3 of 6\)"):
        listops.encode("[MAX 4 [AVG 1 ] ]")
    with pytest.raises(ValueError, match="1 operator"):
        listops.encode("[MAX 4 5")

    text = Text(data_dir=tmp_path)
    assert text.encode("café") == "café".encode() and text.encode(b"\xff").tolist() == [255]

    # As the files have documents, whether a text or its literal is given.
    for decoded, expected in ((False, rb"b'caf\xc3\xa9'"), (True, b"caf\xc3\xa9")):
        retrieval = Retrieval(data_dir=tmp_path, decode_literals=decoded)
        assert retrieval.encode("café") == retrieval.encode(rb"b'caf\xc3\xa9'") == expected
    assert len(retrieval.encode("a" * 20_000)) == 10_000

    image = Image(data_dir=tmp_path)
    grey = np.arange(1024, dtype=np.uint8).reshape(32, 32)
    assert np.array_equal(image.encode(grey), grey.ravel())
    assert np.array_equal(image.encode(grey.ravel()), grey.ravel())
    assert np.array_equal(image.encode(np.stack([grey] * 3, axis=2)), grey.ravel())
    pathfinder = Pathfinder(data_dir=tmp_path)
    assert np.array_equal(pathfinder.encode(grey), grey.ravel())
    with pytest.raises(ValueError, match=r"shape \(8, 8\) .*one dimension or 32 x 32"):
        pathfinder.encode(grey[:8, :8])
    for task in (text, retrieval, image, pathfinder):
        assert len(task.class_names) == task.num_classes


def test_the_script_shows_test_examples_and_answers(
    toy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main = runpy.run_path(str(ROOT / "scripts/use_model.py"))["main"]

    def call(*words: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["use_model.py", str(toy), *words])
        main()
        return capsys.readouterr().out.splitlines()

    with pytest.raises(ValueError, match="input 0: str"):  # a toy has no texts
        call("[MAX 4 3 ]")
    (path,) = (toy.parent.parent / "results").rglob("*.json")
    test = records.load(path).result.test  # type: ignore[union-attr]
    right = records.unpack_correct(str(test.correct), test.num_examples)
    *lines, last = call("--examples=9")
    data = prepare(lra.load(toy).task, toy.parent.parent / "cache")
    rows = stratified(data.test.labels, 9)  # not the first ones, which may all be of one class
    assert last == f"{right[rows].sum()} of 9 right"
    assert ["(it is " not in line for line in lines] == right[rows].tolist()
    assert lines[4].endswith(f"<-  {''.join(map(str, data.test.sequence(int(rows[4]))))}")
    monkeypatch.setattr(Toy, "encode", lambda self, text: np.array([int(text)]))  # now it has
    assert [line.split()[1:] for line in call("7", "4")] == [["<-", "7"], ["<-", "4"]]
