"""Floors: what rules reach that any model should beat, on whole val and test; and a task's ladder,
what rules reach that solve a part of each example exactly, which say what a score may be worth.

`scripts/floors.py` has rules.py measure them and writes results/floors/<task>.json; tables and
figures set runs beside it where both have the same data, by fingerprint.

Shapes: N examples of a split.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lra.files import write_atomically
from lra.results import stored
from lra.results.records import unpack_correct
from lra.tasks.task import DataKind


@dataclass(frozen=True)
class Score:
    """Accuracy of a rule on a split, a fraction; `correct` packs which examples were right."""

    accuracy: float
    num_examples: int
    correct: str

    @property
    def error(self) -> float:
        """Standard error of the accuracy over examples, a fraction."""
        return math.sqrt(self.accuracy * (1 - self.accuracy) / self.num_examples)

    @property
    def correct_N(self) -> np.ndarray:
        """Which examples were right."""
        return unpack_correct(self.correct, self.num_examples)


@dataclass(frozen=True)
class Floor:
    """One rule; at the end of `description` stands in brackets what a table has no room for."""

    name: str
    description: str
    val: Score
    test: Score

    @property
    def title(self) -> str:
        """The description without what stands in brackets."""
        return self.description.partition(" (")[0]


@dataclass(frozen=True)
class Data:
    """Which data the rules were counted and measured on."""

    source: str
    kind: DataKind
    fingerprint: str
    num_examples: dict[str, int]


@dataclass(frozen=True)
class Floors:
    """The floors of one task and its ladder on one version of its data."""

    task: str
    data: Data
    floors: list[Floor]
    ladder: list[Floor] = field(default_factory=list)

    def __post_init__(self) -> None:
        names = [rule.name for rule in (*self.floors, *self.ladder)]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"floors, ladder: name={name!r} stands there more than once")
        named = {f"floors[{i}]": floor for i, floor in enumerate(self.floors)}
        named |= {f"ladder[{i}]": rung for i, rung in enumerate(self.ladder)}
        for place, rule in named.items():
            for split, score in (("val", rule.val), ("test", rule.test)):
                where, expected = f"{place}.{split}", self.data.num_examples.get(split)
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

    def worth_naming(self) -> list[Floor]:
        """The first, which is the commonest label, and the best of all on val; none of none."""
        best = sorted(self.floors, key=lambda floor: -floor.val.accuracy)[:1]
        return self.floors[:1] + [floor for floor in best if floor is not self.floors[0]]

    def to_json(self) -> str:
        """The file's text."""
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"


def floors_path(results_dir: Path, task: str) -> Path:
    """Where a task's floors lie."""
    return results_dir / "floors" / f"{task}.json"


def save(floors: Floors, results_dir: Path) -> Path:
    """Write a task's floors as a whole, over earlier ones of the same data, or of a part of them.

    Raises:
        ValueError: the file there has the floors of other data or a rule that these lack, or is
            damaged.
    """
    path = floors_path(results_dir, floors.task)
    if path.exists():
        there, names = load(path), {rule.name for rule in (*floors.floors, *floors.ladder)}
        lost = [r.name for r in (*there.floors, *there.ladder) if r.name not in names]
        what = ""
        if there.data.fingerprint != floors.data.fingerprint:
            gives_way = there.data.kind == "partial" and floors.data.kind in ("files", "generated")
            what = "" if gives_way else "the floors of other data"
        elif lost:
            what = f"rules that were not measured now ({', '.join(lost)})"
        if what:
            raise ValueError(f"{path}: holds {what}; move it away or choose another paths.results")
    write_atomically(path, floors.to_json())
    return path


def load(path: Path) -> Floors:
    """Read and check one file.

    Raises:
        ValueError: not JSON, an unknown or missing field, a wrong type, figures that do not fit
            together, or another task's name; names the file and the field.
    """
    floors = stored.read(path, Floors, "floors")
    if path.stem != floors.task:
        raise ValueError(f"{path}: holds task {floors.task}")
    return floors


def load_all(results_dir: Path) -> tuple[list[Floors], list[str]]:
    """All readable floors by task, and a warning for each file that is not one."""
    return stored.read_all(sorted((results_dir / "floors").glob("*.json")), load)
