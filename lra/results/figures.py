"""Figures as SVG and PNG, byte for byte the same on every rebuild. Needs matplotlib."""

from __future__ import annotations

import html
import io
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from lra.console import percent
from lra.results.floors import Floors
from lra.results.leaderboard import Cell, Pretrained, Row, tasks_with_own
from lra.results.published import FAMILIES, Published, figures_of, task_title
from lra.results.records import Record
from lra.results.yardsticks import on_same_data
from lra.speed.benchmarks import Benchmark, slope

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

T = TypeVar("T")

# Okabe and Ito's colours, told apart with any colour vision; markers and dashes do it in grey.
COLORS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "h")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 2, 1, 2)), (0, (8, 2, 2, 2)))
FIRST = ("softmax", "luna", "nystromformer", "fastformer")  # have the same style in every project
RC: Any = {"svg.fonttype": "none", "text.parse_math": False, "axes.spines.top": False,
      "axes.spines.right": False, "font.size": 8}  # fmt: skip
MAX_ROWS = 10  # in one panel, unless there are more models
RUNS = "Validation accuracy while training, by task: a line for each run."


def unavailable() -> str:
    """Why no figures can be drawn, and what to do; empty if they can."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return "figures skipped: matplotlib is missing; pip install -e '.[tables]'"
    return ""


def draw(
    rows: Sequence[Row],
    benchmarks: Sequence[Benchmark],
    floors: Sequence[Floors] = (),
    pretrained: Sequence[Pretrained] = (),
    published: Sequence[Published] = (),
    family_of: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, bytes]:
    """All figures: file name to content, an SVG and a PNG of each."""
    models = {row.model for row in rows} | {c.model for b in benchmarks for c in b.cells}
    styles = model_styles(models | {p.row.model for p in pretrained})
    figures = {}
    if rows:
        figures["accuracy_speed"] = accuracy_speed(rows, styles)
        figures["learning_curves"] = learning_curves(rows, styles, floors, family_of)
    for of_task in floors:
        if of_task.ladder and (drawn := beside_ladder(of_task, rows, published)):
            figures[f"ladder_{of_task.task}"] = drawn
    if pretrained:
        figures["self_pretraining"] = self_pretraining(pretrained, styles)
    for benchmark in benchmarks:
        if any(c.status == "ok" for c in benchmark.cells):
            figures[f"benchmark_{benchmark.name}"] = by_length(benchmark, styles)
    return {f"{name}.{kind}": encode(figure, name, kind)
            for name, figure in figures.items() for kind in ("svg", "png")}  # fmt: skip


def model_styles(models: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Colour and marker of each model, the same in every figure."""
    names = [*FIRST, *sorted(set(models) - set(FIRST))]
    return {name: {"color": COLORS[i % len(COLORS)], "marker": MARKERS[i % len(MARKERS)]}
            for i, name in enumerate(names)}  # fmt: skip


def accuracy_speed(rows: Sequence[Row], styles: dict[str, dict[str, Any]]) -> Figure:
    """One panel a task; bubble area is peak memory, hollow where memory was not counted."""
    tasks = _with_results(rows)
    counted = any(r.peak_memory_bytes for row in rows for c in row.cells.values() for r in c.runs)
    title = "Test accuracy against training speed" + " (bubble area: peak memory)" * counted
    figure, panels = make_panels(title, *_grid(len(tasks)))
    bars = any(cell.std for row in rows for cell in row.cells.values())
    figure.set_label(
        "Test accuracy against training speed, by task."
        + " Bars: sample deviation over seeds." * bars
        + " Bubble area: peak memory, hollow where it was not counted." * counted
    )
    drawn = {row.model for task in tasks for row, _ in _chosen(rows, task)}
    for task, axes in zip_panels(tasks, panels):
        cells = _chosen(rows, task)
        memory = [max(run.peak_memory_bytes or 0 for run in cell.runs) for _, cell in cells]
        largest, devices = max(memory, default=0), set()
        labels: Counter[str] = Counter()
        for (row, cell), used in zip(cells, memory, strict=True):
            x, color = 0.0, styles[row.model]["color"]
            area = max(25, 400 * used / largest) if used else 45
            for device, runs in cell.by_device.items():  # whose speeds have no mean together
                speeds = [s for s in (r.speed.get("tokens_per_s") for r in runs) if s]
                if not speeds:
                    continue
                devices.add(device)
                x = sum(speeds) / len(speeds)
                if cell.std is not None:  # of one seed nothing is known, which is no bar of 0
                    axes.errorbar(x, cell.mean, cell.std, color=color, linewidth=1, capsize=3)
                axes.scatter(x, cell.mean, marker=styles[row.model]["marker"], edgecolor=color,
                             s=area, facecolor=color if used else "none", alpha=0.75)  # fmt: skip
            if x and sum(other.model == row.model for other, _ in cells) > 1:
                # Often side by side, so by turns above and below, each further out.
                turn, below = divmod(labels[row.model], 2)
                labels[row.model] += 1
                shift = -16 - 8 * turn if below else 10 + 8 * turn
                axes.annotate(row.variant, (x, cell.mean), xytext=(0, shift), fontsize=6,
                              ha="center", textcoords="offset points")  # fmt: skip
        if largest:
            axes.text(0.02, 0.04, f"largest bubble: {largest / 2**30:.2g} GiB", fontsize=6.5,
                      transform=axes.transAxes)  # fmt: skip
        if devices:
            axes.set_xscale("log")
            plain_log(axes.xaxis)
            axes.tick_params(axis="x", rotation=30)
        axes.margins(0.2)
        where = "".join(devices)[:60] if len(devices) < 2 else "on different devices or threads"
        axes.set_title(f"{_heading(rows, task)}\n{where}", fontsize=9)
        axes.set_xlabel("training speed (tokens/s)")
        axes.set_ylabel("test accuracy (%)")
    from matplotlib.lines import Line2D

    models = [m for m in styles if m in drawn]
    figure.legend(handles=[Line2D([], [], linestyle="", label=m, **styles[m]) for m in models],
                  loc="outside lower center", fontsize=7,
                  ncols=max(3, int(figure.get_figwidth() / 1.2)))  # fmt: skip
    return figure


def _chosen(rows: Sequence[Row], task: str) -> list[tuple[Row, Cell]]:
    """The best row of each model, then, as far as a panel has room, the best of the rest."""
    cells = sorted(((r, r.cells[task]) for r in rows if task in r.cells), key=lambda c: -c[1].mean)
    firsts = {row.model: i for i, (row, _) in reversed(list(enumerate(cells)))}.values()
    order = sorted(range(len(cells)), key=lambda i: i not in firsts)
    return [cells[i] for i in order[: max(MAX_ROWS, len(firsts))]]


def _heading(rows: Sequence[Row], task: str, family: str = "") -> str:
    count, shown = sum(task in row.cells for row in rows), len(_chosen(rows, task))
    heading = ", ".join(filter(None, (task_title(task), family)))
    told = f" ({shown} of {count} rows, each model's best first)"
    return heading + told * (count > shown)


def learning_curves(
    rows: Sequence[Row],
    styles: dict[str, dict[str, Any]],
    floors: Sequence[Floors] = (),
    family_of: Mapping[str, str] = MappingProxyType({}),
) -> Figure:
    """Validation accuracy by step, a line for each run and for two rules; a panel for each task.

    Where that has no room for all rows, there is one for each family of models, by `family_of`. No
    mean over seeds: where some have left a plateau and others not, it shows what no run had.
    Rules are drawn where all runs of the panel have the data that these were measured on.
    """
    several = len({row.recipe for row in rows}) > 1
    parts = [part for task in _with_results(rows) for part in _by_family(rows, task, family_of)]
    figure, panels = make_panels(
        "Validation accuracy while training, each seed", *_grid(len(parts))
    )
    if several_panels := len(parts) > 1:  # a legend of one column, which is narrow and long
        figure.set_figheight(figure.get_figheight() + _grid(len(parts))[0])
    figure.set_label(RUNS)
    for (task, family, members), axes in zip_panels(parts, panels):
        cells = _chosen(members, task)
        seen: Counter[str] = Counter()
        for i, (row, cell) in enumerate(cells):
            details = [row.recipe] * several + [row.variant] * bool(row.variant)
            label = f"{row.model} ({', '.join(details)})" if details else row.model
            # Models may share a color; where each has its lines in one panel, rows need not.
            style = styles[row.model] | ({"color": COLORS[i % len(COLORS)]} if family else {})
            dashes = DASHES[seen[style["color"]] % len(DASHES)]
            seen[style["color"]] += 1
            for run in cell.runs:
                if _line(axes, _accuracies(run), linestyle=dashes, label=label, **style):
                    label = "_"  # one entry in the legend for all seeds of a row
        fitting = [f for f in floors if f.task == task
                   and {f.data.fingerprint} == {cell.fingerprint for _, cell in cells}]  # fmt: skip
        for i, floor in enumerate(floor for f in fitting for floor in f.worth_naming()):
            figure.set_label(f"{RUNS} In grey: what rules without a sequence model reach.")
            height, dashes = 100 * floor.val.accuracy, DASHES[1:][i % len(DASHES[1:])]
            axes.axhline(height, color="#555555", linewidth=1.2, linestyle=dashes, zorder=1,
                         label=f"{floor.title}: {percent(height)}")  # fmt: skip
        axes.set_title(_heading(members, task, family), fontsize=9)
        axes.set_xlabel("training step")
        axes.set_ylabel("validation accuracy (%)")
        if axes.get_lines():
            axes.legend(fontsize=6, loc="upper center", bbox_to_anchor=(0.5, -0.2),
                        ncols=1 if several_panels else 2, handlelength=3, handletextpad=0.4,
                        columnspacing=0.8)  # fmt: skip
    for task in {task for task, *_ in parts}:
        equal_heights([a for part, a in zip(parts, panels, strict=False) if part[0] == task])
    return figure


def _by_family(
    rows: Sequence[Row], task: str, family_of: Mapping[str, str]
) -> list[tuple[str, str, list[Row]]]:
    """Task, family and rows of each panel; one without a family if it has room for all rows."""
    of_task = [row for row in rows if task in row.cells]
    found = {family: [row for row in of_task if family_of.get(row.model, "other") == family]
             for family in FAMILIES}  # fmt: skip
    several = [(task, family, members) for family, members in found.items() if members]
    return several if len(of_task) > MAX_ROWS and len(several) > 1 else [(task, "", of_task)]


def self_pretraining(pretrained: Sequence[Pretrained], styles: dict[str, dict[str, Any]]) -> Figure:
    """Both phases by task: loss of the first by step, then accuracy by examples seen in both."""
    tasks = list(dict.fromkeys(p.task for p in pretrained))
    figure, panels = make_panels("Self-pretraining and its controls, each seed", 2, len(tasks))
    figure.set_label(
        "Self-pretraining by task. Above: validation loss of the first phase. Below: validation "
        "accuracy by training examples of both phases; in grey the controls from scratch."
    )
    for task, first, second in zip(tasks, panels, panels[len(tasks) :], strict=False):
        for i, p in enumerate([p for p in pretrained if p.task == task][:MAX_ROWS]):
            style = styles[p.row.model] | {"linestyle": DASHES[i % len(DASHES)]}
            for k, run in enumerate(p.cell.runs):
                assert run.pretraining
                label = "_" if k else f"{p.row.model}, {run.pretraining.objective}"
                losses = [(point["step"], loss) for point in run.pretraining.curve
                          if (loss := point.get("val_loss")) is not None]  # fmt: skip
                _line(first, losses, label=label, **style)
                before = run.pretraining.num_steps * run.pretraining.batch_size
                _line(second, _accuracies(run, before), label=label, **style)
            for k, run in enumerate(p.control_cell.runs if p.control_cell else ()):
                label = "_" if k else f"{p.row.model}, control"
                grey = style | {"color": "#777777", "zorder": 1}
                _line(second, _accuracies(run, 0), label=label, **grey)
        first.set_title(task_title(task), fontsize=9)
        first.set_xlabel("step of the first phase")
        first.set_ylabel("validation loss")
        second.set_xlabel("training examples of both phases")
        second.set_ylabel("validation accuracy (%)")
        second.legend(fontsize=6, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)
    return figure


def beside_ladder(
    floors: Floors, rows: Sequence[Row], published: Sequence[Published]
) -> Figure | None:
    """A dot for each test accuracy, by family; a line for each rule worth naming and each rung.

    Rows measured here are those on the data that rules were measured on. None if there is no dot.
    """
    task, lines = floors.task, [*floors.worth_naming(), *floors.ladder]
    groups = {"measured here": [(row.model, cell.mean) for row, cell in on_same_data(rows, floors)]}
    printed = figures_of(task, published)
    for family in FAMILIES:
        groups[family] = [(p.model, figure) for p, figure in printed if p.family == family]
    groups = {name: sorted(found, key=lambda f: f[1]) for name, found in groups.items() if found}
    if not groups:
        return None
    title = f"{task_title(task)}: scores beside what solving a part gives"
    figure, (axes,) = make_panels(title, 1, 1)
    figure.set_size_inches(8, 1.8 + 0.4 * len(groups))
    figure.set_label(
        f"Test accuracy on {task_title(task)}, a dot for each row measured here on the same data "
        "and for each figure in print, which may be of other files; the best of a line is named. "
        "Dotted: rules without a sequence model. Solid: rules that solve a part exactly and guess "
        "the rest."
    )
    for y, (name, found) in enumerate(groups.items()):
        heights = [y + shift for shift in _apart([accuracy for _, accuracy in found])]
        color = COLORS[1] if name == "measured here" else COLORS[2]
        axes.scatter([accuracy for _, accuracy in found], heights, s=12, color=color, alpha=0.7,
                     linewidth=0, zorder=3)  # fmt: skip
        axes.annotate(found[-1][0], (found[-1][1], heights[-1]), xytext=(5, 0), fontsize=6.5,
                      textcoords="offset points", va="center")  # fmt: skip
    for line in lines:
        accuracy = 100 * line.test.accuracy
        axes.axvline(accuracy, color="#555555", linewidth=1.1, zorder=1,
                     linestyle=DASHES[0 if line in floors.ladder else 2])  # fmt: skip
        label = textwrap.fill(f"{line.title}: {percent(accuracy)}", 34)
        axes.annotate(label, (accuracy, 1), xytext=(0, 3), textcoords="offset points", fontsize=6.5,
                      xycoords=("data", "axes fraction"), rotation=35,
                      rotation_mode="anchor")  # fmt: skip
    axes.set_yticks(range(len(groups)), [f"{name} ({len(f)})" for name, f in groups.items()])
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("test accuracy (%)")
    return figure


def _apart(values: Sequence[float], near: float = 0.8, step: float = 0.07) -> list[float]:
    """Shifts that keep sorted values that are nearly equal off each other: 0, 1 up, 1 down, ..."""
    shifts, count = [], 0
    for i, value in enumerate(values):
        count = count + 1 if i and value - values[i - 1] < near else 0
        turn = count % 12  # more would reach the next line
        shifts.append(step * ((turn + 1) // 2) * (-1) ** turn)
    return shifts


def _accuracies(run: Record, seen: int | None = None) -> list[tuple[float, float]]:
    """Validation accuracy in percent by step; by training examples, given those seen before."""
    each, before = (1, 0) if seen is None else (run.config["train"]["batch_size"], seen)
    return [
        (before + each * point["step"], 100 * accuracy)
        for point in run.curve
        if (accuracy := point.get("val_accuracy")) is not None
    ]


def _line(axes: Axes, points: Sequence[tuple[float, float]], **style: Any) -> bool:
    """Draw a curve; False if it has no point."""
    if points:
        axes.plot(*zip(*points, strict=True), markersize=4, linewidth=1.1, alpha=0.8,
                  markevery=max(1, len(points) // 6), **style)  # fmt: skip
    return bool(points)


def by_length(benchmark: Benchmark, styles: dict[str, dict[str, Any]]) -> Figure:
    """Time of a step and memory by sequence length, log axes, with each model's growth exponent."""
    modes = sorted({c.mode for c in benchmark.cells}, reverse=True)
    quantities: list[tuple[str, Any]] = [
        ("time per step (s)", lambda c: 1 / c.steps_per_s if c.steps_per_s else None),
        ("peak memory (GiB)", lambda c: c.peak_memory_bytes and c.peak_memory_bytes / 2**30),
    ]
    quantities = [q for q in quantities if any(q[1](c) for c in benchmark.cells)]
    figure, panels = make_panels(benchmark.title, len(modes), len(quantities))
    num_models = sum(any(benchmark.series(m, mode) for mode in modes) for m in styles)
    if num_models > MAX_ROWS:  # legends of two columns need room below
        figure.set_figheight(figure.get_figheight() + len(modes) * num_models / 12)
    shown = " and ".join(title.partition(" (")[0] for title, _ in quantities)
    figure.set_label(f"By sequence length, {benchmark.name}: {shown}.")
    for axes, (mode, (title, read)) in zip(
        panels, [(m, q) for m in modes for q in quantities], strict=True
    ):
        for i, model in enumerate(m for m in styles if benchmark.series(m, mode)):
            series = [c for c in benchmark.series(model, mode) if read(c)]
            lengths, values = [c.length for c in series], [read(c) for c in series]
            if not lengths:
                continue
            exponent = slope(lengths, values)
            label = model if exponent is None else f"{model}, slope {exponent:.2f}"
            stopped = next((c for c in benchmark.series(model, mode) if c.status != "ok"), None)
            if stopped:
                label += f" ({stopped.status.replace('_', ' ')} at {stopped.length})"
            axes.plot(lengths, values, linestyle=DASHES[i % len(DASHES)], linewidth=1.3,
                      markersize=5, label=label, **styles[model])  # fmt: skip
        lengths = sorted({c.length for c in benchmark.cells})
        axes.set_yscale("log")
        plain_log(axes.yaxis)
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [str(n) for n in lengths], rotation=30)
        axes.set_xlabel("sequence length (tokens)")
        axes.set_ylabel(title)
        axes.set_title({"train": "training", "inference": "inference"}[mode], fontsize=9)
        axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.36),
                    ncols=1 + (num_models > MAX_ROWS))  # fmt: skip
    return figure


def _with_results(rows: Sequence[Row]) -> list[str]:
    return [task for task in tasks_with_own(rows) if any(task in row.cells for row in rows)]


def _grid(num_panels: int) -> tuple[int, int]:
    num_columns = 2 if num_panels == 4 else min(num_panels, 3)
    return -(-num_panels // num_columns), num_columns


def make_panels(title: str, num_rows: int, num_columns: int) -> tuple[Figure, list[Axes]]:
    """A figure with a title, and its axes row by row."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(RC):
        size = (max(6, 4 * num_columns), 3.4 * num_rows + 0.4)
        figure = Figure(figsize=size, layout="constrained")
        figure.suptitle(title, fontsize=11)
        panels = list(figure.subplots(num_rows, num_columns, squeeze=False).flat)
    for axes in panels:
        axes.grid(True, which="major", linewidth=0.4, alpha=0.5)
    return figure, panels


def zip_panels(parts: Sequence[T], panels: Sequence[Axes]) -> Iterable[tuple[T, Axes]]:
    """Each part with its panel; panels that are left over are not seen."""
    for axes in panels[len(parts) :]:
        axes.set_visible(False)
    return zip(parts, panels, strict=False)


def equal_heights(panels: Sequence[Axes]) -> None:
    """The same limits of accuracy in all panels, so that they compare."""
    lows, highs = zip(*(axes.get_ylim() for axes in panels), strict=True)
    for axes in panels:
        axes.set_ylim(min(lows), max(highs))


def plain_log(axis: Axis) -> None:
    """Plain numbers at 1, 2 and 5 of each decade of a log axis."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.12g}"))


def encode(figure: Figure, name: str, kind: str) -> bytes:
    """The file's content, free of dates, versions and random ids; an SVG holds its caption."""
    from matplotlib import rc_context

    metadata = {
        "svg": {"Date": None, "Creator": None, "Title": str(figure.get_label())},
        "png": {"Software": None},
    }[kind]
    buffer = io.BytesIO()
    with rc_context({**RC, "svg.hashsalt": name}):
        # A legend below its axes moves when they shrink: one pass leaves it cut off.
        for _ in range(3):
            figure.draw_without_rendering()
        figure.savefig(buffer, format=kind, dpi=130, metadata=metadata)
    return buffer.getvalue()


def caption(svg: bytes) -> str:
    """What `encode` wrote into a picture about what it shows."""
    found = re.search(rb"<title>(.*?)</title>", svg, re.DOTALL)
    return html.unescape(found[1].decode()) if found else ""
