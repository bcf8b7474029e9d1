"""The papers' own tables with our numbers under theirs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lra.console import percent, signed
from lra.results.leaderboard import Row
from lra.results.markdown import Table, escape_markdown, marked
from lra.results.published import (
    AVERAGES,
    FAIL,
    FAIL_AS,
    FAMILIES,
    MEANS,
    TASKS,
    Published,
    task_title,
)
from lra.results.tables import GENERATED, errata, footnotes
from lra.values import flatten


@dataclass(frozen=True)
class Paper:
    """Which published rows make up a paper's table, and which of our rows stand against them."""

    name: str
    title: str
    sources: tuple[str, ...]  # starts of the published rows' sources
    recipe: str
    tasks: tuple[str, ...]
    # (published model, variant or "" for any) -> (our model, config keys it must have: a value, or
    # a tuple of those that will do)
    ours: dict[tuple[str, str], tuple[str, dict[str, Any]]] = field(default_factory=dict)
    averages: tuple[str, ...] = ("five",)  # kinds of MEANS
    solved_only: bool = False  # its mean of six is one of five where Path-X failed
    # Rows of other sources that stand in it too, beside those for which it prints an average: by
    # start of the source, their models or variants.
    also: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def kind(self, average: str, row: Row | Published) -> str:
        """Which of MEANS its average of this kind is for a row."""
        if isinstance(row, Row):
            failed = "pathx" in row.cells and row.cells["pathx"].failed
        else:
            failed = row.cells.get("pathx", "") in ("", FAIL)
        return "five" if self.solved_only and average == "six" and failed else average


PAPERS = (
    Paper("lra", "Long Range Arena (Tay et al. 2021, arXiv 2011.04006), Table 1",
          ("LRA paper",), "lra", TASKS,
          {("Transformer", ""): ("softmax", {}),
           ("Local Attention", ""): ("local", {"model.pattern": "strided"}),
           ("Sparse Transformer", ""): ("sparse", {"model.block_size": 50}),
           ("Longformer", ""): ("longformer", {"model.window": 512, "model.num_global": 0}),
           ("Linformer", ""): ("linformer", {"model.rank": 16}),
           ("Reformer", ""): ("reformer", {"model.variant": "arena"}),
           ("Sinkhorn Transformer", ""): ("sinkhorn", {"model.variant": "arena"}),
           ("Synthesizer", ""): ("synthesizer", {"model.mode": "random"}),
           ("BigBird", ""): ("bigbird", {"model.block_size": 64, "model.filled_keys": True}),
           ("Linear Transformer", ""): ("linear", {"model.normalize": True}),
           ("Performer", ""): ("performer", {"model.num_features": (None, 2)})}),
    Paper("luna", "Luna (Ma et al. 2021, arXiv 2106.01540)", ("Luna paper",), "luna",
          AVERAGES["five"],
          {("Transformer", "re-implementation in Luna harness"): ("softmax", {}),
           **{("Luna", f"Luna-{n}"): ("luna", {"model.projection_length": n})
              for n in (16, 128, 256)}}, averages=("five", "without retrieval")),
    Paper("nystromformer", "Nyströmformer (Xiong et al. 2021, arXiv 2102.03902), Table 3",
          ("Nystromformer paper",), "nystromformer", AVERAGES["five"],
          {("Transformer", ""): ("softmax", {}), ("Nystromformer", ""): ("nystromformer", {}),
           ("Reformer", ""): ("reformer", {"model.variant": "hashed", "model.num_hashes": 2}),
           ("Linformer", ""): ("linformer", {"model.rank": 256}),
           ("Performer", ""): ("performer", {"model.scale_twice": True})}),
    Paper("s4", "S4 (Gu et al. 2022, arXiv 2111.00396), Table 10; S4D (Gu et al. 2022, arXiv "
          "2206.11893); LRU (Orvieto et al. 2023, arXiv 2303.06349)",
          ("S4 paper", "S4D paper"), "s4", TASKS,
          {("LRU", ""): ("lru", {}),
           **{("S4D", f"S4D-{name}"): ("s4d", {"model.init": name.lower()})
              for name in ("LegS", "Inv", "Lin")}},
          averages=("six",), also={"state-space survey": ("S4D-LegS",), "LRU paper": ("LRU",)}),
    Paper("s5", "S5 (Smith et al. 2023, arXiv 2208.04933), as later papers list it", (), "s5",
          TASKS, {("S5", ""): ("s5", {})}, averages=("six",),
          also={"state-space survey": ("S5",), "LRU paper": ("S5",),
                "S4D-DFouT": ("S5-Inv", "S5-Lin"), "FRACTAL": ("S5",)}),
    Paper("mega", "Mega (Ma et al. 2023, arXiv 2209.10655), Table 2", ("Mega paper",), "mega",
          TASKS,
          {("Mega", "Mega"): ("mega", {"model.chunk_size": None}),
           ("Mega", "Mega-chunk"): ("mega", {"model.chunk_size": (128, 4096)})},
          averages=("six",), solved_only=True,
          also={"LRA paper": ("Transformer", "Reformer", "Linformer", "BigBird", "Performer"),
                "S4 paper": ("S4-v1", "S4-v2")}),
)  # fmt: skip
UNPRINTED = {"fastformer": "attention"}  # families of models for which no paper prints the arena


def families(published: Sequence[Published]) -> dict[str, str]:
    """Family of each of our models that stands in a paper's table; none without published rows."""
    of = {p.model: p.family for p in published if p.family != FAMILIES[-1]}
    found = UNPRINTED if of else {}  # without published rows nothing is told apart
    pairs = [(theirs, ours) for paper in PAPERS for (theirs, _), (ours, _) in paper.ours.items()]
    return found | {ours: of[theirs] for theirs, ours in pairs if theirs in of}


def paper_table(paper: Paper, published: Sequence[Published], rows: Sequence[Row]) -> Table:
    """Published rows in the file's order; under each our rows and the difference to it.

    Our rows of the same recipe that stand against none follow at the end.
    """
    header = [
        "Model",
        "Variant",
        "Figures",
        "Inputs",
        *(task_title(t) for t in paper.tasks),
        "Avg as printed",
    ]
    header += ["Avg computed"]
    header += ["Avg w/o Retrieval as printed", "computed"] if len(paper.averages) > 1 else []
    lines, left = [], [row for row in rows if row.recipe == paper.recipe]
    for p in theirs(paper, published):
        figures = f"published{f', {p.note}' if p.note else ''}"
        line = [p.model, p.variant, figures, p.inputs, *(p.cells.get(t, "") for t in paper.tasks)]
        for kind in (paper.kind(average, p) for average in paper.averages):
            line += [p.averages.get(kind, ("", ""))[0], percent(p.average(MEANS[kind]))]
        lines.append(line)
        for row in [r for r in left if stands(paper, p, r)]:
            lines += measured_lines(paper, row, p)
            left.remove(row)
    for row in left:
        lines += measured_lines(paper, row, None)
    return Table(header, lines)


def theirs(paper: Paper, published: Sequence[Published]) -> list[Published]:
    """The rows a paper prints, with those that it takes over from others."""
    return [
        p for p in published
        if p.source.startswith(paper.sources)
        or any(source.startswith(paper.sources)
               for source in [*(by for _, by in p.averages.values()), *p.failed_by.values()])
        or any(p.source.startswith(source) and {p.model, p.variant} & set(names)
               for source, names in paper.also.items())
    ]  # fmt: skip


def stands(paper: Paper, p: Published, row: Row) -> bool:
    """Whether our row is the published row's counterpart."""
    model, keys = paper.ours.get((p.model, p.variant)) or paper.ours.get((p.model, "")) or ("", {})
    config = flatten(next(iter(row.cells.values())).runs[0].config)
    return row.model == model and all(
        config.get(k) in (v if isinstance(v, tuple) else (v,)) for k, v in keys.items()
    )


def measured_lines(paper: Paper, row: Row, p: Published | None) -> list[list[str]]:
    """Our figures and, given a counterpart, how far they lie from it, in points."""
    cells = [row.cells.get(t) for t in paper.tasks]
    ours: list[float | None] = [c.mean if c and not c.failed else None for c in cells]
    printed = [p.cells.get(t, "") if p else "" for t in paper.tasks]
    line = [row.model, row.variant, "measured", row.inputs]
    line += ["" if c is None else marked(c) for c in cells]
    change = [row.model, row.variant, "difference", "", *map(difference, ours, printed)]
    for average in paper.averages:
        kind = paper.kind(average, row)
        mean = row.average(kind)
        line += ["", percent(mean)]
        same = p and paper.kind(average, p) == kind
        change += ["", difference(mean, percent(p.average(MEANS[kind])) if p and same else "")]
    return [line, change] if p else [line]


def difference(ours: float | None, printed: str) -> str:
    """Ours minus the printed figure, in points; empty where one of them is none."""
    return "" if ours is None or printed in ("", FAIL) else signed(ours - float(printed))


def averages_note(paper: Paper) -> str:
    """What a paper's averages are over, where a failed Path-X may be one of them."""
    if "six" not in paper.averages:
        return ""
    failed = "left out" if paper.solved_only else f"counted as {FAIL_AS:.0f}"
    return f" Averages are over six tasks, a failed Path-X {failed}."


def paper_markdown(paper: Paper, published: Sequence[Published], rows: Sequence[Row]) -> str:
    """results/tables/<paper>.md."""
    legend = (
        "Accuracy in percent. Measured: mean ± sample standard deviation (number of seeds), recipe "
        f"{paper.recipe}; difference: measured minus published, in points. Inputs: pixels as ids "
        f"or as real numbers; empty where that is not known.{averages_note(paper)}\n"
    )
    table = paper_table(paper, published, rows).markdown()
    parts = [f"# {paper.title}\n", GENERATED, legend, table]
    marks = footnotes([row for row in rows if row.recipe == paper.recipe])
    parts += ["".join(f"- [{k}] {escape_markdown(v)}\n" for k, v in marks)] if marks else []
    if notes := errata(published, paper.sources):
        parts += ["Errata:\n", "".join(f"- {note}\n" for note in notes)]
    return "\n".join(parts)
