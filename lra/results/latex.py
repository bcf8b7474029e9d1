"""Tables for papers: our rows, and the rows of one paper beside them; Markdown has everything."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from lra import CONFIGS
from lra.console import percent, signed
from lra.results.control import control_command, phase_text
from lra.results.efficiency import Efficiency, benchmark_blocks, beside_tables, runs_table
from lra.results.leaderboard import MARKS, REAL, Board, Cell, Pretrained, Row
from lra.results.papers import (
    Paper,
    averages_note,
    difference,
    stands,
    theirs,
)
from lra.results.published import AVERAGES, FAIL, FAIL_AS, Published, task_title
from lra.results.rule_tables import floor_notes
from lra.results.tables import (
    BOLD,
    PRETRAINED_LEGEND,
    by_recipe,
    footnotes,
    measured_table,
    misprint,
    rows_and_controls,
)
from lra.results.typeset import Column, Float, Pair, document, escape, superscript
from lra.speed.benchmarks import Benchmark

SHORT = 14  # letters of a published variant that stands beside its model; a longer one is a note
SHORT_TITLES = {"retrieval": "Retr.", "pathfinder": "Pathf."}
# A record's reason against a comparison that has numbers of its own for each task.
MORE_PARAMETERS = re.compile(r"[\d,]+ parameters, \+([\d.]+) % over softmax")
AVERAGE_TITLES = {"five": "Avg", "six": "Avg", "without retrieval": "w/o Retr."}
MODES = {"train": "Training", "inference": "Inference"}
RUN_COLUMNS = {"Params": "Params", "Steps/s": "Steps/s", "Peak memory, MB": "Memory, MB",
               "Train hours": "Hours"}  # fmt: skip


@functools.cache
def _titles() -> dict[str, str]:
    """A model's name is what the first line of its yaml begins with, `# Luna: attention ...`."""
    found = {}
    for path in CONFIGS.glob("model/*.yaml"):
        first = path.read_text(encoding="utf-8").partition("\n")[0]
        if match := re.match(r"# ([^:]{1,40}): ", first):
            found[path.stem] = match[1]
    return found


def model_title(model: str) -> str:
    """How a model is called in a paper; one whose yaml does not say keeps its name."""
    name, _, settings = model.partition(":")
    return setting_title(_titles().get(name.lower(), name), settings)


def setting_title(name: str, variant: str) -> str:
    """`Luna (projection length 16)`."""
    return f"{name} ({variant_title(variant)})" if variant else name


def variant_title(variant: str) -> str:
    """`projection_length=16, tie_kv=true` as words."""
    return re.sub("[_=]", " ", variant)


def row_title(row: Row) -> str:
    """A row by model and variant."""
    return setting_title(model_title(row.model), row.variant)


def leaderboard(board: Board) -> str:
    """results/leaderboard.tex: our rows, one float a recipe, and one for self-pretraining."""
    options, floats = board.options, []
    for recipe, rows in by_recipe(board.rows).items():
        best = measured_table(rows, options).best
        legend, counted = _deviations(_cells(rows, options.tasks))
        columns = [
            _task(t, [_measured(row.cells.get(t), counted, (i, j) in best)
                      for i, row in enumerate(rows)])
            for j, t in enumerate(options.tasks, start=2)
        ]  # fmt: skip
        for j, kind in enumerate(options.averages, start=2 + len(options.tasks)):
            texts = [_bold(percent(row.average(kind)), (i, j) in best)
                     for i, row in enumerate(rows)]  # fmt: skip
            columns.append(Column(f"Avg of {len(AVERAGES[kind])}", [(text, "") for text in texts]))
            if kind == "six" and any(row.average(kind) is not None for row in rows):
                legend += f" In the average of six a failed Path-X counts as {FAIL_AS:.0f}."
        if options.params:
            columns.append(Column("Params (k)", [(_thousands(row.params), "") for row in rows]))
        if best:
            legend += f" {escape(BOLD)}"
        caption = rf"Test accuracy in percent, recipe \texttt{{{escape(recipe)}}}. {legend}"
        heads = _heads(("Model", [model_title(row.model) for row in rows]),
                       ("Variant", [variant_title(row.variant) for row in rows]))  # fmt: skip
        notes = [("", escape(text)) for text in floor_notes(replace(board, rows=rows))]
        notes += _notes(rows)
        floats.append(Float(f"leaderboard-{_slug(recipe)}", caption, heads, columns, notes))
    return document(floats + [_pretrained_float(board.pretrained)] * bool(board.pretrained))


def _pretrained_float(pretrained: Sequence[Pretrained]) -> Float:
    """Each setting with self-pretraining on a task, its control and how far they are apart."""
    cells = [c for p in pretrained for c in (p.cell, p.control_cell) if c]
    legend, counted = _deviations(cells)
    numbered: dict[str, str] = {}  # text of a note to its number
    names = []
    for p in pretrained:
        texts = [f"{phase_text(p.cell.runs)} (recipe {p.row.recipe})"]
        texts += [] if p.control else [f"control to be run: {control_command(p.cell.runs)}"]
        marks = [numbered.setdefault(escape(t), str(len(numbered) + 1)) for t in texts]
        names.append((escape(row_title(p.row)) + superscript(marks), ""))
    columns = [
        Column("Pretrained", [_measured(p.cell, counted) for p in pretrained]),
        Column("Control", [_measured(p.control_cell, counted) for p in pretrained]),
        Column("Difference", [_change(p) for p in pretrained]),
    ]
    heads = [*_heads(("Task", [task_title(p.task) for p in pretrained])), Column("Model", names)]
    caption = (
        f"Test accuracy in percent with self-pretraining. {escape(PRETRAINED_LEGEND.strip())} "
        rf"Behind its $\pm$ stands half the width of these, in that order. {legend}"
    )
    notes = [(k, text) for text, k in numbered.items()]
    notes += _notes(rows_and_controls(pretrained))
    return Float("leaderboard-self-pretraining", caption, heads, columns, notes)


def _change(p: Pretrained) -> Pair:
    """Points that self-pretraining makes, and half the width of their intervals."""
    difference, *ends = p.points
    if difference is None:
        return "", ""
    halves = [percent((high - low) / 2) for low, high in (ends[:2], ends[2:])
              if low is not None and high is not None]  # fmt: skip
    return _signed(signed(difference)), rf"$\pm$ {', '.join(halves)}"


def paper_file(paper: Paper, board: Board) -> str:
    """results/tables/<paper>.tex: its rows as printed, ours under them, and the differences."""
    found = _paper_float(paper, board)
    return document([found] if found else [])


def _paper_float(paper: Paper, board: Board) -> Float | None:
    tasks = [t for t in paper.tasks if t in board.options.tasks]
    averages = paper.averages if paper.averages[0] in board.options.averages else ()
    published = theirs(paper, board.published)
    rows = [row for row in board.rows if row.recipe == paper.recipe]
    left, (legend, counted) = list(rows), _deviations(_cells(rows, tasks))
    numbered: dict[str, str] = {}  # text of a note to its number

    def note(*texts: str) -> str:
        numbers = [numbered.setdefault(escape(t), str(len(numbered) + 1)) for t in texts]
        return superscript(sorted(numbers, key=int))

    def ours(row: Row, name: str) -> list[Pair]:
        means = [percent(row.average(paper.kind(of, row))) for of in averages]
        cells = [_measured(row.cells.get(t), counted) for t in tasks]
        return [(name, ""), *cells, *((text, "") for text in means)]

    lines: list[list[Pair]] = []
    for p in published:
        line = [(_published_name(paper, p, published, note), "")]
        line += [(p.cells.get(t, ""), "") for t in tasks]
        for kind in (paper.kind(of, p) for of in averages):
            text, printed_by = p.averages.get(kind, ("", ""))
            mean = misprint(p, kind) if printed_by.startswith(paper.sources) else None
            mark = "" if mean is None else note(f"as printed; the row's cells give {percent(mean)}")
            line.append((text, mark))
        lines.append(line)
        against = [row for row in left if stands(paper, p, row)]
        for row in against:
            variant = row.variant if len(against) > 1 else ""
            lines.append(ours(row, r"\quad " + escape(setting_title("measured", variant))))
            found = [row.cells.get(t) for t in tasks]
            means = [c.mean if c and not c.failed else None for c in found]
            kinds = [paper.kind(of, row) for of in averages]
            means += [row.average(k) if k == paper.kind(of, p) else None
                      for k, of in zip(kinds, averages, strict=True)]  # fmt: skip
            change = map(_difference, means, [printed for printed, _ in line[1:]])
            lines.append([(r"\quad difference", ""), *((text, "") for text in change)])
            left.remove(row)
    rules = frozenset({len(lines)} if lines and left else ())
    lines += [ours(row, escape(row_title(row))) for row in left]
    if not lines:
        return None
    caption = f"{escape(paper.title)}: test accuracy in percent"
    caption += ", as published." if published else "."
    caption += averages_note(paper) if averages else ""
    caption += " The last column is the average without Retrieval." if len(averages) > 1 else ""
    if rows:
        caption += rf" Measured here: recipe \texttt{{{escape(paper.recipe)}}}. {legend}"
        caption += " Differences are in points." if len(left) < len(rows) else ""
        caption += " Below the line: without a counterpart in the paper." if rules else ""
    notes = [(k, text) for text, k in numbered.items()]
    notes += _notes(rows)
    names, *cells = (list(column) for column in zip(*lines, strict=True))
    columns = [_task(t, column) for t, column in zip(tasks, cells, strict=False)]
    columns += [Column(AVERAGE_TITLES[key], column)
                for key, column in zip(averages, cells[len(tasks):], strict=True)]  # fmt: skip
    return Float(paper.name, caption, [Column("Model", names)], columns, notes, rules)


def _published_name(
    paper: Paper, p: Published, rows: Sequence[Published], note: Callable[..., str]
) -> str:
    """A published row's model, with what tells it from the source's other rows."""
    name, notes = escape(model_title(p.model)), []
    variants = {other.variant for other in rows if other.source == p.source}
    if p.variant.lower().startswith(p.model.lower()):
        name = escape(p.variant)
    elif p.variant and len(variants) > 1:
        if len(p.variant) <= SHORT:
            name += f" ({escape(p.variant)})"
        else:
            notes.append(p.variant)
    notes += [f"{p.source}, {p.table}"] * (not p.source.startswith(paper.sources))
    notes += [p.note] * bool(p.note) + [REAL] * (p.inputs == "real")
    return name + note(*notes)


def efficiency_file(
    board: Board, benchmarks: Sequence[Benchmark], published: Sequence[Efficiency]
) -> str:
    """results/tables/efficiency.tex: ratios beside published ones, each benchmark, our runs."""
    floats = [_beside_float(benchmarks, published)]
    floats += [_benchmark_float(b, mode) for b in benchmarks for mode in ("train", "inference")]
    floats.append(_runs_float(board.rows))
    return document([f for f in floats if f])


def _beside_float(benchmarks: Sequence[Benchmark], published: Sequence[Efficiency]) -> Float | None:
    """Speed and memory in training as shares of softmax's, published and measured."""
    tables = beside_tables(benchmarks, published)
    groups = {title: "Speed" if "speed" in title else "Peak memory" for title, _ in tables}
    lines: dict[tuple[str, ...], dict[str, list[str]]] = {}  # by model, variant and source
    for title, table in tables:
        for row in table.rows:
            lines.setdefault((*row[:2], row[-1]), {})[title] = row[2:-1]
    numbered: dict[str, str] = {}
    names = []
    for model, variant, source in lines:
        several = sum((model, source) == (m, s) for m, _, s in lines) > 1
        name = escape(f"{model_title(model)} ({variant})" if several else model_title(model))
        if variant.lower().startswith(model.lower()):
            name = escape(variant)
        number = numbered.setdefault(source, str(len(numbered) + 1))
        names.append((name + superscript([number]), ""))
    columns = [
        Column(length, [(escape(line[title][k]) if title in line else "", "")
                        for line in lines.values()], groups[title])
        for title, table in tables for k, length in enumerate(table.header[2:-1])
    ]  # fmt: skip
    if not lines:
        return None
    ours = [source.startswith("measured") for _, _, source in lines]
    return Float(
        "efficiency-ratios",
        "Speed and peak memory in training by length of the input, as multiples of the softmax "
        "Transformer's, as published and as measured here.",
        [Column("Model", names)], columns, [(k, escape(text)) for text, k in numbered.items()],
        frozenset({ours.index(True)} if True in ours and False in ours else ()),
    )  # fmt: skip


def _benchmark_float(benchmark: Benchmark, mode: str) -> Float | None:
    """Steps per second and memory by length; tokens per second follow from them."""
    blocks = [(title, table) for found, title, table in benchmark_blocks(benchmark)
              if found == mode and not title.startswith("tokens")]  # fmt: skip
    if not blocks:
        return None
    names = [model_title(row[0]) for row in blocks[0][1].rows]
    columns, growth = [], []
    for title, table in blocks:
        name, _, of = title.rstrip(")").partition(" (")
        group = f"{name[:1].upper()}{name[1:]}"
        if speed := name.startswith("steps"):
            group += f" ({of.partition(',')[0]})"
        for j, head in enumerate(table.header[1:], start=1):
            texts = [row[j].partition(" (") for row in table.rows]
            # The spread of a ratio, and the share of memory, are left to Markdown.
            tails = [f"({of.partition(',')[0].rstrip(')')})" if of and speed else ""
                     for _, _, of in texts]  # fmt: skip
            if head == "Growth":
                powers = [(row[j], "") for row in table.rows]
                growth.append(Column("Time" if speed else "Memory", powers, head))
            else:
                numbers = [_rounded(text) for text, _, _ in texts]
                cells = list(zip(numbers, tails, strict=True))
                columns.append(Column(head, cells, escape(group)))
    columns += growth
    repeats = f", medians over {benchmark.repeats} rounds" if (benchmark.repeats or 1) > 1 else ""
    caption = f"{MODES[mode]} by length of the input ({escape(benchmark.title)}){repeats}."
    if growth:
        caption += " Growth: exponent of a step's time, or of memory, in the length."
    label = f"benchmark-{_slug(benchmark.name)}-{mode}"
    return Float(label, caption, _heads(("Model", names)), columns, [])


def _runs_float(rows: Sequence[Row]) -> Float | None:
    """Size, speed and memory of our runs; what is the same for all of them is in the caption."""
    table = runs_table(rows)
    if not table.rows:
        return None
    lines = [dict(zip(table.header, row, strict=True)) for row in table.rows]
    settings = {"Recipe": "recipe ", "Batch": "batch ", "Max. length": "max. length ",
                "Hardware": ""}  # fmt: skip
    same = {title for title in (*settings, "Task") if len({line[title] for line in lines}) == 1}
    told = [lines[0]["Task"]] * ("Task" in same)
    told += [before + lines[0][title] for title, before in settings.items() if title in same]
    differing = {title: before for title, before in settings.items() if title not in same}
    notes = [escape(", ".join(before + line[title] for title, before in differing.items()))
             for line in lines]  # fmt: skip
    numbered = {text: str(i) for i, text in enumerate(dict.fromkeys(filter(None, notes)), start=1)}
    marks = [superscript([numbered[note]] if note else []) for note in notes]
    models = [(escape(model_title(line["Model"])) + mark, "")
              for line, mark in zip(lines, marks, strict=True)]  # fmt: skip
    heads = [] if "Task" in same else _heads(("Task", [line["Task"] for line in lines]))
    heads += [Column("Model", models)]
    heads += _heads(("Variant", [variant_title(line["Variant"]) for line in lines]))
    columns = [Column(title, [(_rounded(line[name]), "") for line in lines])
               for name, title in RUN_COLUMNS.items()]  # fmt: skip
    caption = "Size, speed and memory of the training runs, means over seeds"
    caption += f" ({escape(', '.join(told))})." if told else "."
    return Float(
        "efficiency-runs", caption, heads, columns, [(k, text) for text, k in numbered.items()]
    )


def _task(task: str, cells: list[Pair]) -> Column:
    return Column(escape(task_title(task)), cells, short=SHORT_TITLES.get(task, ""))


def _heads(*titled: tuple[str, Sequence[str]]) -> list[Column]:
    return [Column(title, [(escape(text), "") for text in texts]) for title, texts in titled]


def _rounded(text: str) -> str:
    """A figure of Markdown's tables with three digits, whole if it has more before the point."""
    if not re.fullmatch(r"\d{1,3}\.\d+", text):
        return escape(text)
    value = float(text)
    return f"{value:.0f}" if value >= 99.95 else f"{value:#.3g}"


def _cells(rows: Sequence[Row], tasks: Sequence[str]) -> list[Cell]:
    return [row.cells[task] for row in rows for task in tasks if task in row.cells]


def _deviations(cells: Sequence[Cell]) -> tuple[str, bool]:
    """What ± and FAIL mean in these cells, and whether each says its number of seeds."""
    counts = {len(c.runs) for c in cells if not c.failed}
    failed = {len(c.runs) for c in cells if c.failed}
    several, most = sorted(counts - {1}), max(failed, default=1)
    told = []
    if several:
        many = "seeds, their number in brackets" if len(several) > 1 else f"{several[0]} seeds"
        rest = "; numbers without it are of one seed" * (1 in counts)
        told.append(rf"Mean $\pm$ sample standard deviation over {many}{rest}.")
    elif most == 1:
        told.append("One seed each.")
    elif counts:
        told.append("Numbers are of one seed each.")
    if failed:
        seeds = f", in none of {'up to ' * (len(failed) > 1)}{most} seeds" * (most > 1)
        told.append(f"{FAIL}: not above chance{seeds}.")
    return " ".join(told), len(several) > 1


def _notes(rows: Sequence[Row]) -> list[Pair]:
    """`footnotes`, in which a row stands once, whatever number of tasks its reasons come from."""
    whose = []
    for row in rows:
        cells = [cell for cell in row.cells.values() if "a" in cell.marks]
        reasons = dict.fromkeys(why for cell in cells for run in cell.runs for why in run.why_not)
        shares = [float(m[1]) for why in reasons if (m := MORE_PARAMETERS.fullmatch(why))]
        found = [why for why in reasons if not MORE_PARAMETERS.fullmatch(why)]
        if shares:
            ends = dict.fromkeys(f"{share:.1f}" for share in (min(shares), max(shares)))
            found.append(f"{' to '.join(ends)} % more parameters than the softmax Transformer")
        if cells:
            whose.append(f"{row_title(row)}, {', '.join(found)}")
    texts = {"a": f"{MARKS['a']}: {'; '.join(whose)}"}
    return [(mark, escape(texts.get(mark, text))) for mark, text in footnotes(rows)]


def _measured(cell: Cell | None, counted: bool, best: bool = False) -> Pair:
    if cell is None:
        return "", ""
    deviation = "" if cell.failed or cell.std is None else rf"$\pm$ {percent(cell.std)}"
    number = f" ({len(cell.runs)})" if deviation and counted else ""
    text = FAIL if cell.failed else percent(cell.mean)
    return _bold(text, best), deviation + number + superscript(cell.marks)


def _bold(text: str, best: bool) -> str:
    return rf"\textbf{{{text}}}" if best else text


def _difference(ours: float | None, printed: str) -> str:
    return _signed(difference(ours, printed))


def _signed(text: str) -> str:
    return re.sub("[-+]", r"$\g<0>$", text)


def _thousands(counts: tuple[int, int]) -> str:
    """One number, or two where it differs by task."""
    return "--".join(dict.fromkeys(f"{count / 1000:,.1f}" for count in counts))


def _slug(name: str) -> str:
    """What a label may hold."""
    return re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")
