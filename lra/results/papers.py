"""The papers' own tables with our numbers under theirs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lra.config import flatten
from lra.console import percent
from lra.results.leaderboard import (
    AVERAGES,
    FAIL,
    TASKS,
    Published,
    Row,
    task_title,
)
from lra.results.statistics import mean_std
from lra.results.tables import GENERATED, Table, marked

WITHOUT_RETRIEVAL = tuple(t for t in AVERAGES["five"] if t != "retrieval")


@dataclass(frozen=True)
class Paper:
    """Which published rows make up a paper's table, and which of our rows stand against them."""

    name: str
    title: str
    source: str  # start of the published rows' source
    recipe: str
    tasks: tuple[str, ...]
    # (published model, variant or "" for any) -> (our model, config keys it must have)
    ours: dict[tuple[str, str], tuple[str, dict[str, Any]]] = field(default_factory=dict)
    four_task_average: bool = False


PAPERS = (
    Paper("lra", "Long Range Arena (Tay et al. 2021, arXiv 2011.04006), Table 1",
          "LRA paper", "lra", TASKS, {("Transformer", ""): ("softmax", {})}),
    Paper("luna", "Luna (Ma et al. 2021, arXiv 2106.01540)", "Luna paper", "luna",
          AVERAGES["five"],
          {("Transformer", "re-implementation in Luna harness"): ("softmax", {}),
           **{("Luna", f"Luna-{n}"): ("luna", {"model.projection_length": n})
              for n in (16, 128, 256)}}, four_task_average=True),
    Paper("nystromformer", "Nyströmformer (Xiong et al. 2021, arXiv 2102.03902), Table 3",
          "Nystromformer paper", "nystromformer", AVERAGES["five"],
          {("Transformer", ""): ("softmax", {}), ("Nystromformer", ""): ("nystromformer", {})}),
)  # fmt: skip


def paper_table(paper: Paper, published: Sequence[Published], rows: Sequence[Row]) -> Table:
    """Published rows in the paper's order; under each our rows and the difference to it.

    Our rows of the same recipe that stand against none follow at the end.
    """
    header = [
        "Model",
        "Variant",
        "Figures",
        *(task_title(t) for t in paper.tasks),
        "Avg as printed",
    ]
    header += ["Avg computed"]
    header += ["Avg w/o Retrieval as printed", "computed"] if paper.four_task_average else []
    lines, left = [], [row for row in rows if row.recipe == paper.recipe]
    for p in theirs(paper, published):
        line = [p.model, p.variant, "published", *(p.cells.get(t, "") for t in paper.tasks)]
        for key, tasks in printed_averages(paper).items():
            line += [p.cells.get(key, ""), percent(p.average(tasks))]
        lines.append(line)
        for row in [r for r in left if p.source.startswith(paper.source) and stands(paper, p, r)]:
            lines += measured_lines(paper, row, p)
            left.remove(row)
    for row in left:
        lines += measured_lines(paper, row, None)
    return Table(header, lines)


def printed_averages(paper: Paper) -> dict[str, tuple[str, ...]]:
    """The averages a paper prints, as keys of `Published.cells`, and their tasks."""
    averages = {"avg": AVERAGES["five"]}
    return averages | ({"avg4": WITHOUT_RETRIEVAL} if paper.four_task_average else {})


def theirs(paper: Paper, published: Sequence[Published]) -> list[Published]:
    """The rows a paper prints; Luna's also holds those it takes over from the LRA paper."""
    return [
        p for p in published
        if p.source.startswith(paper.source) or (paper.four_task_average and "avg4" in p.cells)
    ]  # fmt: skip


def stands(paper: Paper, p: Published, row: Row) -> bool:
    """Whether our row is the published row's counterpart."""
    model, keys = paper.ours.get((p.model, p.variant)) or paper.ours.get((p.model, "")) or ("", {})
    config = flatten(next(iter(row.cells.values())).runs[0].config)
    return row.model == model and all(config.get(k) == v for k, v in keys.items())


def measured_lines(paper: Paper, row: Row, p: Published | None) -> list[list[str]]:
    """Our figures and, given a counterpart, how far they lie from it, in points."""
    cells = [row.cells.get(t) for t in paper.tasks]
    ours: list[float | None] = [c.mean if c and not c.failed else None for c in cells]
    printed = [p.cells.get(t, "") if p else "" for t in paper.tasks]
    line = [row.model, row.variant, "measured", *("" if c is None else marked(c) for c in cells)]
    change = [row.model, row.variant, "difference", *map(difference, ours, printed)]
    for tasks in printed_averages(paper).values():
        average = mean_over(row, tasks)
        line += ["", percent(average)]
        change += ["", difference(average, percent(p.average(tasks)) if p else "")]
    return [line, change] if p else [line]


def mean_over(row: Row, tasks: Sequence[str]) -> float | None:
    """Our mean over tasks; None unless all are there."""
    known = [row.cells[t].mean for t in tasks if t in row.cells]
    return mean_std(known)[0] if len(known) == len(tasks) else None


def difference(ours: float | None, printed: str) -> str:
    """Ours minus the printed figure, in points; empty where one of them is none."""
    return "" if ours is None or printed in ("", FAIL) else f"{ours - float(printed):+.2f}"


def errata(paper: Paper, published: Sequence[Published]) -> list[str]:
    """Printed averages that are not the mean of the printed cells, to the last digit."""
    found = []
    for p in theirs(paper, published):
        for key, tasks in printed_averages(paper).items():
            mean = misprint(paper, p, key, tasks)
            if mean is not None:
                found.append(
                    f"{p.model} ({p.variant}): the average over {len(tasks)} tasks is printed as "
                    f"{p.cells[key]}; its cells give {percent(mean)} ({p.source})."
                )
    return found


def misprint(paper: Paper, p: Published, key: str, tasks: Sequence[str]) -> float | None:
    """The mean of a row's printed cells where the average printed as `key` is another."""
    mean, text = p.average(tasks), p.cells.get(key)
    copied = key == "avg" and not p.source.startswith(paper.source)
    wrong = mean is not None and text and not copied and abs(mean - float(text)) > 0.00501
    return mean if wrong else None


def paper_markdown(paper: Paper, published: Sequence[Published], rows: Sequence[Row]) -> str:
    """results/tables/<paper>.md."""
    legend = (
        "Accuracy in percent. Measured: mean ± sample standard deviation (number of seeds), recipe "
        f"{paper.recipe}; difference: measured minus published, in points.\n"
    )
    table = paper_table(paper, published, rows).markdown()
    parts = [f"# {paper.title}\n", GENERATED, legend, table]
    notes = errata(paper, published)
    if notes:
        parts += ["Errata:\n", "".join(f"- {note}\n" for note in notes)]
    return "\n".join(parts)
