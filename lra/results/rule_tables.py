"""Scores beside rules without a sequence model, models of bounded reach, and a task's ladder."""

from __future__ import annotations

from collections import defaultdict

from lra.console import percent, reach_text
from lra.results.floors import Floor, Floors, Score
from lra.results.leaderboard import Board, Row
from lra.results.markdown import Table, escape_markdown, marked
from lra.results.published import figures_of, task_title
from lra.results.statistics import sign_test
from lra.results.yardsticks import on_same_data
from lra.tasks.task import DataKind

BOUNDED_LEGEND = (
    "Accuracy on test in percent. Rules need no sequence model, and the models here read so far "
    "and no further: Reach, in positions to either side. A score at their level says nothing of "
    "long range; yet a model that pools over all positions still sees the whole as a bag of what "
    "is local. Rules: ± standard error over examples; bold is the best of a task on validation; "
    "mark b compares runs with every rule on the same data. Models: as in the leaderboard.\n"
)
LADDER_LEGEND = (
    "What solving a part of each example exactly gives, where the rest is guessed by what is common"
    " on train. No floors, but what a score may be worth. Rows are above by a sign test at 99 %; "
    "figures in print may be of other files, and are compared as they stand.\n"
)


def floor_notes(board: Board) -> list[str]:
    """For each task with rules measured on its data: what the best reaches, how many rows do too.

    `bounded_sections` has all rules.
    """
    notes = []
    for floors in board.floors:
        cells = [cell for _, cell in on_same_data(board.rows, floors)]
        if not cells or not floors.floors:
            continue
        chosen = [
            f"{percent(100 * floor.test.accuracy)} % ({floor.title}{best}; "
            f"{sum(bool(c.is_above(floor)) for c in cells)} of {len(cells)} rows above)"
            for floor, best in zip(
                floors.worth_naming(),
                ("", f", on validation the best of {len(floors.floors)} rules"),
                strict=False,
            )
        ]
        notes.append(
            f"On {task_title(floors.task)}, rules without a sequence model are right in "
            f"{' and '.join(chosen)} of test; a row counts as above where a sign test over "
            "examples says so at 99 %, and [b] marks those that are not above every rule. Figures "
            "at a rule's own level tell no two models apart: each may have learned it and no more."
        )
        if floors.ladder:
            rungs = [f"{percent(100 * r.test.accuracy)} % ({r.title})" for r in floors.ladder]
            note = (
                f"On {task_title(floors.task)}, solving a part exactly and guessing the rest gives "
                + ", ".join(rungs)
            )
            if printed := [figure for _, figure in figures_of(floors.task, board.published)]:
                note += (
                    f"; the highest of {len(printed)} figures in print that are shown here is "
                    f"{percent(max(printed))} %"
                )
            notes.append(f"{note}.")
    return notes


def bounded_table(board: Board) -> Table:
    """What rules reach, and models whose layers read so far and no further; tasks with any."""
    by_rule: dict[str, dict[str, str]] = {}
    best = {}
    for floors in board.floors:
        for floor in floors.floors:
            by_task = by_rule.setdefault(floor.name, {})
            by_task[floors.task] = score_text(floor.test) + data_note(floors.data.kind)
            if floor is floors.worth_naming()[-1]:
                best[floors.task] = floor.name
    bounded = [(row, reach) for row in board.rows if (reach := reaches(row))]
    tasks = [t for t in board.options.tasks
             if t in best or any(t in row.cells for row, _ in bounded)]  # fmt: skip
    rows = [[name.replace("_", " "), "", *(by_task.get(t, "") for t in tasks)]
            for name, by_task in by_rule.items()]  # fmt: skip
    for row, reach in bounded:
        name = f"{row.model}{f' ({row.variant})' if row.variant else ''}, {row.recipe}"
        cells = (row.cells.get(task) for task in tasks)
        rows.append([name, reach, *(marked(c) if c and c.reach else "" for c in cells)])
    order = list(by_rule)
    bold = {(order.index(best[t]), 2 + j) for j, t in enumerate(tasks) if t in best}
    header = ["Rule or model", "Reach", *(task_title(t) for t in tasks)]
    return Table(header, rows, frozenset(bold))


def reaches(row: Row) -> str:
    """How far the row's models read; empty if they may read all. Layers may differ by task."""
    tasks: dict[str, list[str]] = defaultdict(list)
    for task, cell in row.cells.items():
        if cell.reach:
            tasks[reach_text(cell.reach)].append(task_title(task))
    if len(tasks) < 2:
        return "".join(tasks)
    return "; ".join(f"{', '.join(names)} {text}" for text, names in tasks.items())


def score_text(score: Score) -> str:
    """Accuracy in percent and its standard error."""
    return f"{percent(100 * score.accuracy)} ± {percent(100 * score.error)}"


def data_note(kind: DataKind) -> str:
    """What a figure's data are, where they are not the benchmark's own files."""
    return f" ({kind})" if kind != "files" else ""


def bounded_sections(board: Board) -> list[str]:
    """The section *Without long range*: all of it together, then the rules of each task."""
    table = bounded_table(board)
    if not table.rows:
        return []
    parts = ["## Without long range\n", BOUNDED_LEGEND, table.markdown()]
    for floors in board.floors:
        cells = [cell for _, cell in on_same_data(board.rows, floors)]
        header = ["Rule", "Val", "Test", *[f"Rows above, of {len(cells)}"] * bool(cells)]
        rows = [
            [floor.description, score_text(floor.val), score_text(floor.test),
             *[str(sum(bool(c.is_above(floor)) for c in cells))] * bool(cells)]
            for floor in floors.floors
        ]  # fmt: skip
        parts += [f"### Rules on {escape_markdown(task_title(floors.task))}\n",
                  f"Data: {escape_markdown(floors.data.source)}{data_note(floors.data.kind)}.\n",
                  Table(header, rows).markdown()]  # fmt: skip
        if floors.ladder:
            parts += [LADDER_LEGEND, ladder_table(floors, board).markdown()]
        if cells and floors.floors:
            rule = floors.worth_naming()[-1]
            lines = beside_rule_table(rule, floors, board)
            parts += [f"Each run beside {escape_markdown(rule.title)}: test examples that only one "
                      "of them has right, and p of a two-sided sign test.\n",
                      lines.markdown()] * bool(lines.rows)  # fmt: skip
    return parts


def ladder_table(floors: Floors, board: Board) -> Table:
    """What solving a part gives, and how many figures are higher."""
    cells = [cell for _, cell in on_same_data(board.rows, floors)]
    printed = [figure for _, figure in figures_of(floors.task, board.published)]
    header = ["Solved", "Val", "Test", *[f"Rows above, of {len(cells)}"] * bool(cells),
              *[f"In print higher, of {len(printed)}"] * bool(printed)]  # fmt: skip
    rows = [
        [rung.description, score_text(rung.val), score_text(rung.test),
         *[str(sum(bool(c.is_above(rung)) for c in cells))] * bool(cells),
         *[str(sum(p > 100 * rung.test.accuracy for p in printed))] * bool(printed)]
        for rung in floors.ladder
    ]  # fmt: skip
    return Table(header, rows)


def beside_rule_table(rule: Floor, floors: Floors, board: Board) -> Table:
    """A line for each run on the rule's data that says which examples it has right."""
    rule_N, rows = rule.test.correct_N, []
    for row, cell in on_same_data(board.rows, floors):
        for seed, correct_N in cell.correct.items():
            if len(correct_N) == len(rule_N):
                only_run, only_rule = (correct_N & ~rule_N).sum(), (rule_N & ~correct_N).sum()
                _, p = sign_test(int(only_run), int(only_rule))
                rows.append([row.model, row.variant, row.recipe, str(seed),
                             percent(100 * float(correct_N.mean())), str(only_run),
                             str(only_rule), f"{p:.2g}"])  # fmt: skip
    header = ["Model", "Variant", "Recipe", "Seed", "Test", "Only the run", "Only the rule", "p"]
    return Table(header, rows)
