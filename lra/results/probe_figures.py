"""Figures of how far trained runs look, a small panel for each run. Needs matplotlib."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from lra.console import percent
from lra.results.figures import COLORS, DASHES, encode, equal_heights, make_panels
from lra.results.floors import Floors
from lra.results.leaderboard import LEFT_OUT, Options, why_left_out
from lra.results.probes import Influence, Probes
from lra.results.published import task_title
from lra.results.records import Record
from lra.results.settings import setting_text
from lra.results.yardsticks import best_rule, chance

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_RUNS = 16  # in one figure
PLACES = {"first": "the first tokens", "last": "the last tokens", "best": "the best of five cuts",
          "mean": "five cuts, mean of their logits"}  # fmt: skip
KINDS = {"blocks": "blocks shuffled", "within": "tokens shuffled within blocks"}
LINES: dict[str, dict[str, Any]] = {
    "first": {"color": COLORS[1], "marker": "o"}, "last": {"color": COLORS[2], "marker": "s"},
    # Often on the line of the first tokens, so pale and wide behind it.
    "best": {"color": "#BBBBBB", "marker": "D", "linewidth": 4, "markersize": 7, "zorder": 1.5},
    "mean": {"color": COLORS[3], "marker": "v"},
    "blocks": {"color": COLORS[4], "marker": "P"}, "within": {"color": COLORS[5], "marker": "X"},
    "positions": {"color": COLORS[2], "marker": "o"},
    "logits": {"color": COLORS[1], "marker": "s", "linestyle": DASHES[1]},
    "untrained": {"color": "#555555", "marker": "^", "linestyle": DASHES[2]},
}  # fmt: skip

Run = tuple[Probes, Record]


def beside_records(
    probes: Iterable[Probes], records: Iterable[Record], options: Options
) -> tuple[list[Run], list[str]]:
    """Probes of the runs that are wanted, with their records; a message for each that has none.

    Those of runs that are no result are left out with a message, too.
    """
    # Of several records of a run the one with a result counts, of these the latest.
    latest_last = sorted(records, key=lambda r: (r.result is not None, r.finished_at))
    by_run = {(r.run_id, r.task, r.data.get("fingerprint")): r for r in latest_last}
    found, messages = [], []
    for p in probes:
        record = by_run.get((p.run_id, p.task, p.fingerprint))
        if record is None:
            messages.append(
                f"probes/{p.run_id}.json: no record of this run on the same data; not drawn"
            )
        elif (why := why_left_out(record, include_reduced=True)) is not None:
            messages.append(
                f"probes/{p.run_id}.json: of a run that is no result ({LEFT_OUT[why].lower()}); "
                "not drawn"
            )
        elif (
            (not options.tasks or p.task in options.tasks)
            and options.shows(record.model)
            and options.recipe in (None, record.recipe)
        ):
            found.append((p, record))
    return found, messages


def draw(runs: Sequence[Run], floors: Sequence[Floors] = ()) -> dict[str, bytes]:
    """Both figures of each task: file name to content, an SVG and a PNG of each."""
    figures = {}
    for task in dict.fromkeys(p.task for p, _ in runs):
        of_task = sorted((run for run in runs if run[0].task == task),
                         key=lambda run: (-run[0].accuracy, run[0].run_id))  # fmt: skip
        if seen := [run for run in of_task if run[0].windows and run[0].shuffles]:
            figures[f"windows_{task}"] = by_window(task, seen, floors)
        if changed := [run for run in of_task if max(_changes(run[0].influence), default=0) > 0]:
            figures[f"influence_{task}"] = by_distance(task, changed)
    return {f"{name}.{kind}": encode(figure, name, kind)
            for name, figure in figures.items() for kind in ("svg", "png")}  # fmt: skip


def by_window(task: str, runs: Sequence[Run], floors: Sequence[Floors]) -> Figure:
    """Two panels a run: accuracy by how many tokens are shown, and by the size of moved blocks.

    A panel each, since a run is held against itself; equal axes, so that runs compare too.
    """
    shown = runs[:MAX_RUNS]
    title = f"What trained runs get right on {task_title(task)}, shown in part or shuffled"
    figure, panels = _grid(title, runs, num_panels=2 * len(shown))
    figure.set_label(
        f"Test accuracy on {task_title(task)} by run, where only some tokens of each example are "
        "shown, and after shuffles. Bars: one standard error over the test examples probed."
    )
    for i, ((probes, _), label) in enumerate(zip(shown, labels(shown), strict=True)):
        pair = panels[2 * i], panels[2 * i + 1]
        for axes, values, kinds in (
            (pair[0], [(w.size, w.place, w) for w in probes.windows], PLACES),
            (pair[1], [(s.block, s.kind, s) for s in probes.shuffles], KINDS),
        ):
            for kind, name in kinds.items():
                points = [(x, 100 * v.accuracy, 100 * v.error) for x, k, v in values if k == kind]
                if points:
                    x, y, error = zip(*points, strict=True)
                    style = {"linewidth": 1.1, "markersize": 4, "zorder": 2, **LINES[kind]}
                    axes.errorbar(x, y, error, label=name, capsize=2, elinewidth=1, **style)
            axes.axhline(100 * probes.accuracy, color="#000000", linewidth=1, linestyle=DASHES[1],
                         zorder=1, label="the run on whole examples")  # fmt: skip
            for yardstick, name, dashes in (
                (best_rule(task, probes.fingerprint, floors), "best rule", DASHES[3]),
                (chance(task, probes.fingerprint, floors), "chance", DASHES[2]),
            ):
                if yardstick:
                    axes.axhline(yardstick.percent, color="#555555", linewidth=1.2, zorder=1,
                                 linestyle=dashes, label=f"{name}: {yardstick.whose}")  # fmt: skip
            axes.set_title(f"{label}: {percent(100 * probes.accuracy)} %", fontsize=8)
            _log_tokens(axes, [x for x, _, _ in values])
        pair[0].set_ylabel("test accuracy (%)")
        pair[0].set_xlabel("tokens shown")
        pair[1].set_xlabel("tokens in a block")
    equal_heights(panels)
    _one_legend(figure, panels)
    return figure


def by_distance(task: str, runs: Sequence[Run]) -> Figure:
    """A panel a run: how outputs and logits change by the distance from a replaced token.

    Exact zeros, as beyond a finite reach, stand on a line of their own below all other values.
    """
    shown = runs[:MAX_RUNS]
    title = f"What a replaced token changes on {task_title(task)}, by distance"
    figure, panels = _grid(title, runs, num_panels=len(shown))
    figure.set_label(
        f"Change of outputs at a distance from a replaced token on {task_title(task)}, over their "
        "size, with trained and untrained weights; and of the logits, over their spread, where the "
        "token is so far behind the first. By run; bands: one standard error over examples."
    )
    values = [value for probes, _ in shown for value in _changes(probes.influence)]
    lowest = math.floor(math.log10(min(value for value in values if value > 0)))
    highest = math.ceil(math.log10(max(values)))
    zero = 10.0 ** (lowest - 0.6)
    for axes, (probes, _), label in zip(panels, shown, labels(shown), strict=False):
        found = probes.influence
        for name, text, points in (
            ("positions", "outputs at this distance",
             [(i.distance, i.positions, i.positions_error) for i in found]),
            ("untrained", "the same, untrained", [(i.distance, i.untrained, 0) for i in found]),
            ("logits", "logits, by a token so far behind the first",
             [(i.distance, i.logits, i.logits_error) for i in found]),
        ):  # fmt: skip
            known = [
                (_place(d), v, error or 0)
                for d, v, error in points
                if v is not None and math.isfinite(v)
            ]
            ends = [[max(v + side * error, zero) for _, v, error in known] for side in (-1, 0, 1)]
            x, style = [d for d, _, _ in known], LINES[name]
            axes.plot(x, ends[1], label=text, linewidth=1.2, markersize=4, alpha=0.85, **style)
            axes.fill_between(x, ends[0], ends[2], color=style["color"], alpha=0.2, linewidth=0)
        if probes.reach is not None:
            axes.axvline(_place(probes.reach), color=COLORS[3], linestyle=DASHES[3], zorder=1,
                         linewidth=1.3, label="reach of all layers together")  # fmt: skip
            label += f", reach {probes.reach:,}"
        axes.set_title(label, fontsize=8)
        axes.set_xlabel("distance (tokens)")
        axes.set_ylabel("relative change")
        _log_tokens(axes, [i.distance for i in found])
        axes.set_yscale("log")
        heights = {10.0**k: f"{10.0**k:g}" for k in range(lowest, highest + 1)}
        if 0 in values:
            heights |= {zero: "0"}
            axes.axhline(zero, color="#555555", linewidth=0.8, zorder=1)
        axes.set_yticks(list(heights), list(heights.values()))
        axes.minorticks_off()
        axes.set_ylim(min(heights) / 1.5, 10.0**highest * 1.5)
    _one_legend(figure, panels)
    return figure


def labels(runs: Sequence[Run]) -> list[str]:
    """Name each run by its model, what was set by hand, and its seed."""
    several = len({record.recipe for _, record in runs}) > 1
    texts = []
    for _, record in runs:
        changed = setting_text(record, short=True)
        details = ", ".join(filter(None, [record.recipe * several, changed]))
        text = f"{record.model} ({details})" if details else record.model
        text = f"{text}, seed\u00a0{record.seed}"
        texts.append(textwrap.fill(text, 50, break_on_hyphens=False))
    return texts


def _changes(influence: Iterable[Influence]) -> list[float]:
    """All values that a panel draws."""
    values = [v for i in influence for v in (i.positions, i.untrained, i.logits)]
    return [v for v in values if v is not None and math.isfinite(v)]


def _place(tokens: int) -> float:
    """Where a number of tokens stands on a log axis; 0 a step before 1."""
    return max(tokens, 0.5)


def _log_tokens(axes: Axes, tokens: Iterable[int]) -> None:
    """A log axis from the least to the most, a tick at each, of many at every second."""
    places = sorted(set(tokens))
    ticks = places[:: 1 + len(places) // 13]
    axes.set_xscale("log", base=2)
    axes.set_xticks([_place(n) for n in ticks], [f"{n:,}" for n in ticks], rotation=30)
    axes.minorticks_off()
    axes.set_xlim(_place(places[0]) / 1.2, _place(places[-1]) * 1.2)


def _grid(title: str, runs: Sequence[Run], num_panels: int) -> tuple[Figure, list[Axes]]:
    """A figure with room for so many panels, up to four in a row; the rest is not seen."""
    more = f" (the best {MAX_RUNS} of {len(runs)} runs)" if len(runs) > MAX_RUNS else ""
    num_columns = min(num_panels, 4)
    figure, panels = make_panels(title + more, -(-num_panels // num_columns), num_columns)
    for axes in panels[num_panels:]:
        axes.set_visible(False)
    return figure, panels[:num_panels]


def _one_legend(figure: Figure, panels: Iterable[Axes]) -> None:
    """Below all panels, an entry for each name."""
    named: dict[str, Artist] = {}
    for axes in panels:
        handles, names = axes.get_legend_handles_labels()
        named |= dict(zip(map(str, names), handles, strict=True))
    figure.legend(list(named.values()), list(named), loc="outside lower center", ncols=2,
                  fontsize=7, handlelength=4)  # fmt: skip
