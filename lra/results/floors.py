"""Floors: what rules reach that any model should beat, counted on train, measured on val and test.

`scripts/floors.py` writes results/floors/<task>.json; tables and figures set runs beside it where
both have the same data, by fingerprint.

Shapes: N examples of a split, S sequences per example, K different keys.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lra.config import fill
from lra.files import write_atomically
from lra.results.records import pack_correct, unpack_correct
from lra.tasks.batches import TokenArrays
from lra.tasks.cache import Dataset
from lra.tasks.task import SPLITS, Task

FIRST_TOKEN = {"listops": "outermost operator"}  # what the first token is, in a task's own words


@dataclass(frozen=True)
class Score:
    """Accuracy of a rule on a split, a fraction; `correct` packs which examples were right."""

    accuracy: float
    num_examples: int
    correct: str

    @property
    def correct_N(self) -> np.ndarray:
        """Which examples were right."""
        return unpack_correct(self.correct, self.num_examples)


@dataclass(frozen=True)
class Floor:
    """One rule; `description` goes on after "always answering"."""

    name: str
    description: str
    val: Score
    test: Score


@dataclass(frozen=True)
class Data:
    """Which data the rules were counted and measured on."""

    source: str
    fingerprint: str
    num_examples: dict[str, int]


@dataclass(frozen=True)
class Floors:
    """The floors of one task, on one version of its data."""

    task: str
    data: Data
    floors: list[Floor]

    def __post_init__(self) -> None:
        for i, floor in enumerate(self.floors):
            for split, score in (("val", floor.val), ("test", floor.test)):
                where, expected = f"floors[{i}].{split}", self.data.num_examples.get(split)
                if score.num_examples != expected or not score.num_examples:
                    raise ValueError(
                        f"{where}.num_examples={score.num_examples}: data has {expected}"
                    )
                try:
                    right = int(score.correct_N.sum())
                except ValueError as error:
                    raise ValueError(f"{where}: {error}") from None
                if not abs(right / score.num_examples - score.accuracy) < 1e-9:
                    raise ValueError(
                        f"{where}.accuracy={score.accuracy}, but {right} of "
                        f"{score.num_examples} examples are right"
                    )

    def to_json(self) -> str:
        """The file's text."""
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"


def measure(task: Task, dataset: Dataset) -> Floors:
    """Every rule on a prepared task, whole splits.

    Raises:
        ValueError: the task is limited to a part of its data.
    """
    sizes = {split: len(getattr(dataset, split)) for split in SPLITS}
    for split, size in sizes.items():
        if size != dataset.meta["splits"][split]["num_examples"]:
            raise ValueError(
                f"task.limit_{split}={size}: floors are those of whole splits; drop it"
            )
    first = FIRST_TOKEN.get(task.name, "first token")
    rules = (
        ("commonest_label", "the commonest label", lambda arrays: np.zeros((len(arrays), 1), int)),
        ("first_token", f"the commonest label of the {first}", first_tokens),
    )
    floors = []
    for name, description, keys in rules:
        splits = (dataset.val, dataset.test)
        train, *others = (keys(arrays) for arrays in (dataset.train, *splits))
        answers = commonest(train, dataset.train.labels, others)
        floors.append(Floor(name, description, *map(_score, answers, splits)))
    data = Data(dataset.meta["source"], dataset.fingerprint, sizes)
    return Floors(task.name, data, floors)


def first_tokens(arrays: TokenArrays) -> np.ndarray:
    """The first raw value of every sequence, -1 where there is none. [N, S]"""
    empty_NS = arrays.lengths_NS == 0
    values_NS = np.full(empty_NS.shape, -1)
    values_NS[~empty_NS] = arrays.tokens[arrays.starts_NS[~empty_NS]]
    return values_NS


def commonest(
    train_NS: np.ndarray, labels_N: np.ndarray, others: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """For each row of `others` the commonest label of the train rows that equal it.

    Of equally common labels the smallest; for a row that train does not have, the commonest of all.
    """
    keys_KS, index_N = np.unique(train_NS, axis=0, return_inverse=True)
    counts_KC = np.zeros((len(keys_KS), int(labels_N.max()) + 1), np.int64)
    np.add.at(counts_KC, (index_N.ravel(), labels_N), 1)
    answer = dict(zip(map(tuple, keys_KS.tolist()), counts_KC.argmax(axis=1), strict=True))
    overall = counts_KC.sum(axis=0).argmax()
    return [
        np.array([answer.get(tuple(row), overall) for row in rows_NS.tolist()])
        for rows_NS in others
    ]


def _score(answer_N: np.ndarray, arrays: TokenArrays) -> Score:
    correct_N = answer_N == arrays.labels
    return Score(float(correct_N.mean()), len(correct_N), pack_correct(correct_N))


def floors_path(results_dir: Path, task: str) -> Path:
    """Where a task's floors lie."""
    return results_dir / "floors" / f"{task}.json"


def save(floors: Floors, results_dir: Path) -> Path:
    """Write a task's floors as a whole, over earlier ones of the same data only.

    Raises:
        ValueError: the file there has the floors of other data, or is damaged.
    """
    path = floors_path(results_dir, floors.task)
    if path.exists() and load(path).data.fingerprint != floors.data.fingerprint:
        raise ValueError(
            f"{path}: holds the floors of other data; move it away or choose another paths.results"
        )
    write_atomically(path, floors.to_json())
    return path


def load(path: Path) -> Floors:
    """Read and check one file.

    Raises:
        ValueError: not JSON, an unknown or missing field, a wrong type, figures that do not fit
            together, or another task's name; names the file and the field.
    """
    try:
        values: Any = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not a JSON file of floors ({error})") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(values).__name__}")
    try:
        floors = fill(Floors, values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if path.stem != floors.task:
        raise ValueError(f"{path}: holds task {floors.task}")
    return floors


def load_all(results_dir: Path) -> tuple[list[Floors], list[str]]:
    """All readable floors by task, and a warning for each file that is not one."""
    found, warnings = [], []
    for path in sorted((results_dir / "floors").glob("*.json")):
        try:
            found.append(load(path))
        except ValueError as error:
            warnings.append(f"skipped {error}")
    return found, warnings
