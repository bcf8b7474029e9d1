"""What papers print: names of tasks, averages over them, FAIL, and the rows of published.csv.

Which rows are in it: whole models with figures of some of the six tasks, each once. Not in it are
ablations, figures of other tasks, averages without the figures, and what a paper copies of a row
that is there already; what it adds to that, an average or that Path-X failed, is.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lra.results.statistics import mean_std

PUBLISHED = Path(__file__).resolve().parent.parent.parent / "results" / "published.csv"
TITLES = {"listops": "ListOps", "text": "Text", "retrieval": "Retrieval", "image": "Image",
          "pathfinder": "Pathfinder", "pathx": "Path-X"}  # fmt: skip
TASKS = tuple(TITLES)
AVERAGES = {"five": TASKS[:5], "six": TASKS}
# What averages in print are taken over; a failed Path-X counts as FAIL_AS in those that have it.
MEANS = AVERAGES | {"without retrieval": tuple(t for t in TASKS[:5] if t != "retrieval"),
                    "without listops": TASKS[1:], "without images": TASKS[:3]}  # fmt: skip
FAIL = "FAIL"
FAIL_AS = 50.0  # what a failed Path-X counts in the mean of six tasks
PUBLISHED_NAMES = {"softmax": "transformer"}  # where papers use another name than our configs
# Kinds of published models, in the order of their sections. Self-pretrained models saw a task's
# inputs without labels before they were trained on it: never in one section with any other.
FAMILIES = ("attention", "state space", "linear recurrence", "long convolution", "moving average",
            "other", "self-pretraining")  # fmt: skip
GUESSES = ("Chance", "Random guessing")  # rows that are no models
IDENTITY = ("model", "variant", "source", "source_table", "setting")  # columns that name a row
INPUTS = ("", "ids", "real")  # how pixels are read: not known, as ids of a table, as numbers


def task_title(task: str) -> str:
    """How a task is called in tables; one of your own keeps its name."""
    return TITLES.get(task, task)


def namesake(model: str) -> str:
    """What our name of a model and the papers' have in common."""
    name = model.partition(":")[0].lower()
    return PUBLISHED_NAMES.get(name, name)


@dataclass(frozen=True)
class Published:
    """A row as a paper prints it: cells as text (a percentage, FAIL or empty)."""

    model: str
    variant: str
    source: str
    table: str
    setting: str
    cells: dict[str, str]  # by task
    # By kind of MEANS: as printed, and by which source; first the row's own, then what papers that
    # take the row over print for it.
    averages: dict[str, tuple[str, str]]
    family: str = FAMILIES[0]
    inputs: str = INPUTS[0]
    note: str = ""  # where the figures are from, unless the source itself was read
    failed_by: dict[str, str] = field(default_factory=dict)  # by task: another source that says so

    @property
    def printed(self) -> tuple[str, str]:
        """The average of the row's own source, and its kind; empty if it prints none."""
        own = ((text, kind) for kind, (text, by) in self.averages.items() if by == self.source)
        return next(own, ("", ""))

    def average(self, tasks: Sequence[str]) -> float | None:
        """Mean of the printed cells; a failed Path-X counts as 50."""
        cells = [self.cells.get(task, "") for task in tasks]
        if "" in cells or FAIL in cells[:5]:
            return None
        return mean_std([FAIL_AS if c == FAIL else float(c) for c in cells])[0]


def figures_of(task: str, published: Sequence[Published]) -> list[tuple[Published, float]]:
    """Rows of models that have a figure for a task, in percent; guessing is no model."""
    cells = ((p, p.cells.get(task, "")) for p in published if p.model not in GUESSES)
    return [(p, float(cell)) for p, cell in cells if cell not in ("", FAIL)]


def load_published(path: Path | None = None) -> list[Published]:
    """Rows of results/published.csv, in its order; none if there is no such file here.

    An average or a FAIL without figures of the same source and setting is what a paper adds to
    another's row, the last one before of that model and variant.

    Raises:
        ValueError: names line and cell of an unknown task or kind, or of a value that is no
            percentage, an average without its row, or a FAIL of a task that its row has.
    """
    if path is None and not PUBLISHED.exists():
        return []
    path = path or PUBLISHED
    rows: dict[tuple[str, ...], Published] = {}
    with path.open(encoding="utf-8", newline="") as file:
        lines = [(tuple(row[k] for k in IDENTITY), row) for row in csv.DictReader(file)]
    with_figures = {identity for identity, row in lines
                    if row["task"] != "avg" and row["accuracy_percent"] != FAIL}  # fmt: skip
    for line, (identity, row) in enumerate(lines, start=2):
        where, task, text = f"{path}:{line}", row["task"], row["accuracy_percent"]
        if task not in (*TASKS, "avg"):
            raise ValueError(f"{where}: task={task!r}; known: {', '.join(TASKS)}, avg")
        if text not in (FAIL, "NA"):
            check_percent(text, f"{where}: accuracy_percent")
        family, inputs, average_of = (  # a file may lack these columns
            _known(row.get(column) or known[0], known, f"{where}: {column}")
            for column, known in (("family", FAMILIES), ("inputs", INPUTS),
                                  ("average_of", tuple(MEANS)))
        )  # fmt: skip
        model, variant, source, table, setting = identity
        figure = "" if text == "NA" else text
        found = rows.get(identity)
        is_own = identity in with_figures or found is not None
        if not is_own:  # what a paper prints for a row of another one, unless there is none
            same = [p for p in rows.values() if (p.model, p.variant) == (model, variant)]
            found = same[-1] if same else None
        if task == "avg":
            if not found or (not is_own and average_of in found.averages):
                raise ValueError(f"{where}: no row {[model, variant]} before this average")
            found.averages[average_of] = figure, source
        elif not found:
            new = Published(model, variant, source, table, setting, {task: figure}, {}, family,
                            inputs, row.get("note") or "")  # fmt: skip
            rows[identity] = new
        elif not is_own and task in found.cells:
            raise ValueError(f"{where}: {[model, variant]} has this task already")
        else:
            found.cells[task] = figure
            if not is_own:
                found.failed_by[task] = source
    return list(rows.values())


def _known(value: str, known: Sequence[str], where: str) -> str:
    if value not in known:
        raise ValueError(f"{where}={value!r}; known: {', '.join(filter(None, known))}")
    return value


def check_percent(text: str, where: str) -> None:
    """Refuse what is not a percentage; a fraction in a percent table is the usual slip."""
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{where}={text!r}: expected a percentage, {FAIL} or NA") from None
    if not 1 < value <= 100:
        raise ValueError(f"{where}={text}: expected a percentage above 1, at most 100; a fraction?")
