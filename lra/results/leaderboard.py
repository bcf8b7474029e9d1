"""Records to rows: which runs count and share a cell, how it reads (FAIL).

A cell holds the runs of one config hash, one a seed: mean ± sample deviation (n), in percent.
Published rows are kept apart and never enter a mean; neither do runs with self-pretraining, which
stand beside their controls.
"""

from __future__ import annotations

import functools
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np

from lra.console import percent
from lra.results.control import tied_setting
from lra.results.floors import Floor, Floors
from lra.results.published import (
    AVERAGES,
    FAIL,
    FAIL_AS,
    MEANS,
    TASKS,
    Published,
    namesake,
)
from lra.results.records import Record, unpack_correct
from lra.results.settings import variants
from lra.results.statistics import Comparison, compare, mean_std, sign_test

MARKS = {
    "a": "not apples to apples",
    "r": "reduced training budget; not ranked",
    "d": "made from a source tree with uncommitted changes",
    "g": "data from this project's generator, not from the benchmark's files",
    "t": "checkpoint chosen on the test split, as some papers do",
    "b": "not above every rule without a sequence model (sign test over examples, of several "
    "seeds by their majority, 99 %): the score may need no more than such a rule knows",
    "f": "some seeds stayed at chance; the mean includes them",
    "p": "pixels read as real numbers, where the benchmark has ids; never ranked against those",
    "c": "rows and columns of pixels as positions, outside the benchmark's rules; never ranked",
    "s": "self-pretrained, which the arena forbids; never ranked",
    "i": "went on from the weights of another run (init_from); never ranked",
}
UNRANKED = frozenset("rpcsi")  # marks of cells that are set beside others and never above them
NOT_SHOWN = ("partial", "synthetic")  # kinds of data whose figures are no result of the benchmark
REAL = "real pixels"  # the same where a mark has no legend
SELF_PRETRAINED = "self-pretrained"
LEFT_OUT = {  # why a run is not in the main table, in the order they are listed
    "reduced": "Reduced budget",
    "partial": "Partial data",
    "synthetic": "Synthetic data",
    "few seeds": "Fewer seeds than asked for",
    "duplicate": "Older run of a setting and seed",
    "diverged": "Diverged",
    "out_of_memory": "Out of memory",
    "interrupted": "Interrupted",
    "failed": "Failed",
}


@dataclass(frozen=True)
class Options:
    """What the tables show."""

    recipe: str | None = None
    tasks: tuple[str, ...] = ()  # none named: the benchmark's six, then others with a result
    models: tuple[str, ...] = ()  # none named: all, measured and published
    average: str = "both"  # five | six | both
    min_seeds: int = 1
    include_reduced: bool = False
    published: bool = True
    params: bool = True  # the column of parameter counts

    def __post_init__(self) -> None:
        if self.min_seeds < 1:
            raise ValueError(f"min_seeds={self.min_seeds}: expected at least 1")

    @property
    def averages(self) -> list[str]:
        """The means asked for whose tasks are all shown."""
        shown = set(self.tasks or TASKS)
        return [a for a, tasks in AVERAGES.items()
                if self.average in (a, "both") and set(tasks) <= shown]  # fmt: skip

    def shows(self, model: str) -> bool:
        """Whether a model is wanted, by our name or the papers'; `luna:key=value` is luna."""
        return not self.models or namesake(model) in map(namesake, self.models)


@dataclass(frozen=True)
class Cell:
    """Runs of one setting on one task, by seed; percentages are not rounded."""

    runs: tuple[Record, ...]
    rules: tuple[Floor, ...] = ()  # without a sequence model, as measured on its data

    @functools.cached_property
    def _mean_std(self) -> tuple[float, float | None]:
        return mean_std([100 * r.result.test.accuracy for r in self.runs if r.result])

    @property
    def mean(self) -> float:
        return self._mean_std[0]

    @property
    def std(self) -> float | None:
        return self._mean_std[1]

    @property
    def pretrained(self) -> bool:
        """Whether the runs had a phase without labels first."""
        return self.runs[0].pretraining is not None

    @property
    def failed(self) -> bool:
        """Whether every seed stayed at chance."""
        return all(r.status == "at_chance" for r in self.runs)

    @functools.cached_property
    def marks(self) -> str:
        """Letters of `MARKS` that hold for any run."""
        found = {
            "a": any(not r.apples_to_apples for r in self.runs),
            "r": any(r.protocol.budget == "reduced" for r in self.runs),
            "d": any(r.dirty for r in self.runs),
            "g": any(r.protocol.data == "generated" for r in self.runs),
            "t": any(r.protocol.validation == "test" for r in self.runs),
            "b": any(self.is_above(rule) is False for rule in self.rules),
            "f": not self.failed and any(r.status == "at_chance" for r in self.runs),
            "p": any(r.inputs == "real" for r in self.runs),
            "c": any(r.knows_columns for r in self.runs),
            "s": self.pretrained,
            "i": any(r.config.get("init_from") for r in self.runs),
        }
        return "".join(letter for letter, holds in found.items() if holds)

    @property
    def by_device(self) -> dict[str, list[Record]]:
        """The runs by what they ran on, in order of its name."""
        found: dict[str, list[Record]] = defaultdict(list)
        for run in sorted(self.runs, key=lambda run: run.device_text):
            found[run.device_text].append(run)
        return dict(found)

    @property
    def fingerprint(self) -> str:
        """Which data the runs had."""
        return str(self.runs[0].data.get("fingerprint", ""))

    @functools.cached_property
    def correct(self) -> dict[int, np.ndarray]:
        """By seed, which test examples were right; without records that do not say."""
        found = {}
        for run in self.runs:
            test = run.result.test if run.result else None
            if test and test.correct is not None:
                found[run.seed] = unpack_correct(test.correct, test.num_examples)
        return found

    def against(self, other: Cell) -> Comparison | None:
        """The comparison over common seeds; None without any, or on other test examples."""
        seeds = sorted(self.correct.keys() & other.correct.keys())
        sides = [[cell.correct[seed] for seed in seeds] for cell in (self, other)]
        same = self.fingerprint == other.fingerprint and len({len(c) for c in sum(sides, [])}) == 1
        return compare(np.stack(sides[0]), np.stack(sides[1])) if same else None

    def clearly_above(self, other: Cell) -> bool:
        """Whether 95 % intervals over test examples and over two or more common seeds say so."""
        result = self.against(other)
        return result is not None and result.over_seeds is not None and _is_above(result)

    def is_above(self, rule: Floor) -> bool | None:
        """Whether a sign test over test examples says so at 99 %; None where hits are not known.

        Of several seeds, an example counts as right where most of them are, as nothing at a tie:
        what single seeds get right by luck would add up otherwise. Their mean has to be above, too,
        since a vote can be better than any that votes.
        """
        rule_N = rule.test.correct_N
        if {len(correct_N) for correct_N in self.correct.values()} != {len(rule_N)}:
            return None
        share_N = np.mean(list(self.correct.values()), axis=0)
        only_run_N, only_rule_N = (share_N > 0.5) & ~rule_N, (share_N < 0.5) & rule_N
        z, p = sign_test(int(only_run_N.sum()), int(only_rule_N.sum()))
        is_higher = z > 0 and self.mean > 100 * rule.test.accuracy
        return not self.failed and is_higher and p < 0.01

    @property
    def reach(self) -> list[int]:
        """Positions to either side that each layer reads at most; empty where it may read all."""
        return self.runs[0].reach

    def __str__(self) -> str:
        spread = f" ± {percent(self.std)}" if self.std is not None else ""
        figure = FAIL if self.failed else percent(self.mean) + spread
        return f"{figure} ({len(self.runs)})"


def _is_above(result: Comparison) -> bool:
    return result.clear and result.difference > 0


@dataclass(frozen=True)
class Row:
    """One model in one setting, over tasks; `variant` tells it from others of its kind."""

    model: str
    recipe: str
    variant: str
    cells: dict[str, Cell]

    def average(self, kind: str) -> float | None:
        """Mean over the tasks of MEANS, a failed Path-X as 50; None unless all are there.

        A failed cell of the first five counts with the accuracy it has.
        """
        cells = [self.cells.get(task) for task in MEANS[kind]]
        if None in cells:
            return None
        means = [c.mean for c in cells if c]
        if MEANS[kind][-1] == "pathx" and self.cells["pathx"].failed:
            means[-1] = FAIL_AS
        return mean_std(means)[0]

    @property
    def pretrained(self) -> bool:
        """Whether its runs are with self-pretraining; none or all of them are."""
        return any(cell.pretrained for cell in self.cells.values())

    @property
    def inputs(self) -> str:
        """How pixels are read, as INPUTS has it: real if any of the runs reads them so."""
        return "real" if any("p" in cell.marks for cell in self.cells.values()) else "ids"

    @property
    def params(self) -> tuple[int, int]:
        """Smallest and largest parameter count over tasks."""
        counts = [r.num_params for cell in self.cells.values() for r in cell.runs]
        return min(counts), max(counts)


@dataclass(frozen=True)
class Pretrained:
    """A setting with self-pretraining on one task, and its compute-tied control if it is there."""

    task: str
    row: Row  # both with this task's cell alone
    control: Row | None

    @property
    def cell(self) -> Cell:
        """Its runs."""
        return self.row.cells[self.task]

    @property
    def control_cell(self) -> Cell | None:
        """The control's runs."""
        return self.control.cells[self.task] if self.control else None

    @functools.cached_property
    def points(self) -> list[float | None]:
        """Accuracy less the control's over common seeds, in points, and the ends of two intervals.

        Those over examples, those over seeds; None where it is not known.
        """
        result = self.cell.against(other) if (other := self.control_cell) else None
        if result is None:
            return [None] * 5
        over_seeds = result.over_seeds or (None, None)
        found = [result.difference, *result.over_examples, *over_seeds]
        return [None if value is None else 100 * value for value in found]


@dataclass(frozen=True)
class Board:
    """Everything the tables show."""

    options: Options
    rows: list[Row]  # from scratch
    pretrained: list[Pretrained]
    published: list[Published]
    left_out: list[tuple[str, Record]]  # with a key of LEFT_OUT
    notes: list[str]
    floors: list[Floors]


def build(
    records: Iterable[Record],
    published: Sequence[Published] = (),
    options: Options | None = None,
    floors: Iterable[Floors] = (),
) -> Board:
    """Sort records into the table and the lists below it."""
    options = options or Options()
    entering, left_out, notes, rows = [], [], [], []
    for record in records:
        wanted = not options.tasks or record.task in options.tasks
        if wanted and options.shows(record.model) and options.recipe in (None, record.recipe):
            why = why_left_out(record, options.include_reduced)
            if why:
                left_out.append((why, record))
            else:
                entering.append(record)
    unique, duplicates = drop_duplicates(entering)
    left_out += [("duplicate", record) for record in duplicates]
    if duplicates:
        names = ", ".join(f"{r.name} of {r.finished_at}" for r in duplicates)
        count = f"{len(duplicates)} duplicate{'s' if len(duplicates) > 1 else ''}"
        notes.append(f"{count} ignored, the newest run of a setting and seed counts: {names}")
    for of_task in (floors := list(floors)):
        if of_task.data.kind in NOT_SHOWN:
            notes.append(f"floors of {of_task.task} left out: {of_task.data.kind} data")
    floors = [f for f in floors if f.data.kind not in NOT_SHOWN]
    made = [beside_rules(row, floors) for row in make_rows(unique)]
    for row in made:
        few = {t for t, c in row.cells.items() if len(c.runs) < options.min_seeds}
        left_out += [("few seeds", r) for t in few for r in row.cells[t].runs]
        cells = {t: c for t, c in row.cells.items() if t not in few}
        if cells:
            rows.append(Row(row.model, row.recipe, row.variant, cells))
    rows.sort(key=_rank)
    options = replace(options, tasks=options.tasks or tasks_with_own(rows))
    pretrained = beside_controls([r for r in rows if r.pretrained], made)
    pretrained.sort(key=lambda p: options.tasks.index(p.task))
    rows = [row for row in rows if not row.pretrained]
    order = list(LEFT_OUT)
    left_out.sort(key=lambda item: (order.index(item[0]), _natural(item[1])))
    shown = [p for p in published if options.published and options.shows(p.model)]
    floors = [f for f in floors if f.task in options.tasks]
    return Board(options, rows, pretrained, shown, left_out, notes, floors)


def beside_rules(row: Row, floors: Iterable[Floors]) -> Row:
    """The row with the rules in each cell whose data have any."""
    rules = {(f.task, f.data.fingerprint): tuple(f.floors) for f in floors}
    cells = {t: replace(c, rules=rules.get((t, c.fingerprint), ())) for t, c in row.cells.items()}
    return replace(row, cells=cells)


def beside_controls(pretrained: Iterable[Row], rows: Iterable[Row]) -> list[Pretrained]:
    """Each cell of rows with self-pretraining, with its control among the rows of all kinds."""
    pretrained = list(pretrained)
    models = {row.model for row in pretrained}
    controls: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:
        for task, cell in row.cells.items():
            if row.model in models and not cell.pretrained:
                key = task, cell.fingerprint, tied_setting(cell.runs[0])
                controls[key].append(replace(row, cells={task: cell}))
    return [
        Pretrained(task, replace(row, cells={task: cell}), _likest(cell, task, controls[key]))
        for row in pretrained
        for task, cell in row.cells.items()
        for key in [(task, cell.fingerprint, tied_setting(cell.runs[0]))]
    ]


def _likest(cell: Cell, task: str, controls: Sequence[Row]) -> Row | None:
    """Of several controls, which differ in their warm-up, the one with most seeds in common."""
    seeds = {run.seed for run in cell.runs}

    def likeness(control: Row) -> tuple[int, str]:
        runs = control.cells[task].runs
        return len(seeds & {run.seed for run in runs}), runs[0].config_hash

    return max(controls, key=likeness, default=None)


def tasks_with_own(rows: Iterable[Row]) -> tuple[str, ...]:
    """The benchmark's six, then any others that have a result."""
    return *TASKS, *sorted({task for row in rows for task in row.cells} - set(TASKS))


def why_left_out(record: Record, include_reduced: bool = False) -> str | None:
    """A key of LEFT_OUT, or None for a run that belongs in the main table."""
    if record.status not in ("completed", "at_chance"):
        return record.status
    if record.protocol.data in NOT_SHOWN:
        return record.protocol.data
    reduced = record.protocol.budget == "reduced"
    return "reduced" if reduced and not include_reduced else None


def drop_duplicates(records: Iterable[Record]) -> tuple[list[Record], list[Record]]:
    """Keep the newest `finished_at` of each setting, data and seed; return (kept, dropped)."""
    newest: dict[tuple[Any, ...], Record] = {}
    dropped = []
    for record in sorted(records, key=lambda r: (finished(r), _natural(r))):
        key = (*_setting(record), record.seed)
        if key in newest:
            dropped.append(newest[key])
        newest[key] = record
    return sorted(newest.values(), key=_natural), sorted(dropped, key=_natural)


def finished(record: Record) -> datetime:
    """`finished_at` in UTC, which a time without a zone is taken to be; unreadable is oldest."""
    try:
        time = datetime.fromisoformat(record.finished_at)
    except ValueError:
        return datetime.min.replace(tzinfo=UTC)
    return time.astimezone(UTC) if time.tzinfo else time.replace(tzinfo=UTC)


def _setting(record: Record) -> tuple[str, ...]:
    fingerprint = str(record.data.get("fingerprint", ""))
    return record.task, record.model, record.recipe, record.config_hash, fingerprint


def _natural(record: Record) -> tuple[Any, ...]:
    return *_setting(record), record.seed, record.run_id, record.finished_at


def _rank(row: Row) -> tuple[Any, ...]:
    """Recipe; complete rows by their mean of five, best first; the rest by name.

    Those with a cell that is never ranked come behind all others that are complete.
    """
    average = row.average("five")
    apart = any(UNRANKED & set(cell.marks) for cell in row.cells.values())
    return row.recipe, average is None, apart, -(average or 0), row.model, row.variant


def make_rows(records: Iterable[Record]) -> list[Row]:
    """One row per model, recipe, pretraining and variant; two settings never share a cell."""
    groups: dict[tuple[str, ...], list[Record]] = defaultdict(list)
    for record in records:
        groups[_setting(record)].append(record)
    families: dict[tuple[str, ...], list[tuple[Record, ...]]] = defaultdict(list)
    for group in groups.values():
        first = group[0]
        before = json.dumps(first.config.get("pretrain"), sort_keys=True)
        family = first.model, first.recipe, before
        families[family].append(tuple(sorted(group, key=lambda r: r.seed)))
    rows = []
    for (model, recipe, _), cells in families.items():
        by_variant: dict[str, dict[str, Cell]] = defaultdict(dict)
        for runs, variant in zip(cells, variants(cells), strict=True):
            if runs[0].task in by_variant[variant]:  # no key tells them apart
                variant = f"{variant} {runs[0].config_hash[:8]}".strip()
            by_variant[variant][runs[0].task] = Cell(runs)
        rows += [Row(model, recipe, v, by_task) for v, by_task in by_variant.items()]
    return rows
