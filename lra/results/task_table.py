"""A finished run beside what was measured and printed of its task: the table at a run's end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lra.console import percent
from lra.results.leaderboard import LEFT_OUT, REAL, SELF_PRETRAINED, Row, build, why_left_out
from lra.results.published import FAIL, FAMILIES, PUBLISHED_NAMES, Published, task_title
from lra.results.records import Record
from lra.results.settings import setting_text
from lra.results.statistics import wilson
from lra.results.yardsticks import OF_PIXELS


def task_table(
    records: Iterable[Record], published: Sequence[Published], task: str, highlight_run_id: str
) -> str:
    """One run beside the measured and published rows of its task, for a terminal.

    A run on synthetic data stands alone, since its figure means something else.
    """

    def reads(row: Record | Row | Published) -> str:
        return f", {REAL}" * (task in OF_PIXELS and row.inputs == "real")

    records = [r for r in records if r.task == task]
    lines, below = [("", "model", "setting", "test %", "source")], []
    this = next((r for r in records if r.run_id == highlight_run_id), None)
    if this and this.result:
        low, high = wilson(this.result.test.accuracy, this.result.test.num_examples)
        text = FAIL if this.status == "at_chance" else percent(100 * this.result.test.accuracy)
        why = why_left_out(this)
        note = f"this run, 95 % interval {100 * low:.1f} to {100 * high:.1f}"
        note += reads(this)
        note += f", {SELF_PRETRAINED}" * (this.pretraining is not None)
        note += f"; {LEFT_OUT[why].lower()}, no result of the benchmark" if why else ""
        setting, changed = f"{this.recipe}, seed {this.seed}", setting_text(this)
        if changed and len(setting) + len(changed) <= 46:
            setting += f", {changed}"
        elif changed:  # the column has no room for it
            below.append(f"> changed: {changed}")
        lines.append((">", this.model, setting, text, note))
    board = build(records)
    for row in [*board.rows, *(p.row for p in board.pretrained)]:
        cell, setting = row.cells[task], f"{row.recipe}{f', {row.variant}' if row.variant else ''}"
        if cell.runs != (this,):
            told = "measured here" + reads(row)
            told += f", {SELF_PRETRAINED}" * row.pretrained
            lines.append(("", row.model, setting, str(cell), told))
    if this and this.protocol.data == "synthetic":
        published = ()
    names = {PUBLISHED_NAMES.get(r.model, r.model) for r in records} | {"transformer"}
    lines += [
        (
            "",
            p.model,
            p.variant,
            p.cells[task],
            p.failed_by.get(task, p.source).split(" (")[0]
            + reads(p)
            + f", {SELF_PRETRAINED}" * (p.family == FAMILIES[-1]),
        )
        for p in published
        if p.model.lower() in names and p.cells.get(task)
    ]
    lines = [(a, b[:24], c[:48], d, e) for a, b, c, d, e in lines]
    width = [max(len(line[i]) for line in lines) for i in range(4)]
    rows = [
        f"{a.ljust(width[0])} {b.ljust(width[1])}  {c.ljust(width[2])}  {d.rjust(width[3])}  {e}"
        for a, b, c, d, e in lines
    ]
    return "\n".join([task_title(task), *rows, *below])
