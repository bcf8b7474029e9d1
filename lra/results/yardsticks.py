"""What an accuracy is held against: chance, the best rule without a sequence model, and print."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lra.results.floors import Floor, Floors
from lra.results.leaderboard import REAL, Cell, Row
from lra.results.published import FAMILIES, Published, figures_of

CLASSES = {"listops": 10, "text": 2, "retrieval": 2, "image": 10, "pathfinder": 2, "pathx": 2}
OF_PIXELS = ("image", "pathfinder", "pathx")


@dataclass(frozen=True)
class Yardstick:
    """An accuracy in percent, and whose it is."""

    percent: float
    whose: str


def on_same_data(rows: Sequence[Row], floors: Floors) -> list[tuple[Row, Cell]]:
    """Rows that have the task on the very data that rules were measured on, with that cell."""
    cells = [(row, row.cells[floors.task]) for row in rows if floors.task in row.cells]
    return [(row, c) for row, c in cells if c.fingerprint == floors.data.fingerprint]


def chance(task: str, fingerprint: str, floors: Sequence[Floors]) -> Yardstick | None:
    """The commonest label where that was measured on these data, else a guess among all labels."""
    for floor in _worth_naming(task, fingerprint, floors)[:1]:
        return Yardstick(100 * floor.test.accuracy, floor.title)
    return Yardstick(100 / CLASSES[task], "a guess among all labels") if task in CLASSES else None


def best_rule(task: str, fingerprint: str, floors: Sequence[Floors]) -> Yardstick | None:
    """The rule that is best on validation, if any were measured on these data."""
    for floor in _worth_naming(task, fingerprint, floors)[-1:]:
        return Yardstick(100 * floor.test.accuracy, floor.title)
    return None


def best_published(task: str, published: Sequence[Published]) -> Yardstick | None:
    """The highest figure that was read in print, however pixels are; without self-pretraining."""
    rows = [row for row in figures_of(task, published)
            if row[0].family != FAMILIES[-1] and not row[0].note]  # fmt: skip
    if not rows:
        return None
    best, figure = max(rows, key=lambda row: row[1])
    name = best.variant if best.variant.startswith(best.model) else f"{best.model} {best.variant}"
    real = f", {REAL}" * (task in OF_PIXELS and best.inputs == "real")
    told = f"{name.strip()}{real}, as in {best.source.split(' (')[0]}"
    return Yardstick(figure, told)


def _worth_naming(task: str, fingerprint: str, floors: Sequence[Floors]) -> list[Floor]:
    """The commonest label, then the best rule, of a task on the very data of a run."""
    fitting = [f for f in floors if f.task == task and f.data.fingerprint == fingerprint]
    return [floor for f in fitting[:1] for floor in f.worth_naming()]
