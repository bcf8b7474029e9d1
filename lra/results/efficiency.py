"""Speed and memory: of the runs behind the leaderboard, of benchmarks, as published."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lra.results.leaderboard import REAL, Row, tasks_with_own
from lra.results.markdown import Table, escape_markdown
from lra.results.published import task_title
from lra.results.statistics import mean_std
from lra.results.tables import GENERATED
from lra.speed.benchmarks import BASELINE, Benchmark, BenchmarkCell, Limits, slope


@dataclass(frozen=True)
class Efficiency:
    """One line of results/published_efficiency.csv: a number that its source prints itself.

    Not in the file: what somebody computed or read off a plot, and what a source copies.
    """

    model: str
    variant: str
    metric: str
    length: str
    value: str
    hardware: str
    source: str
    note: str


METRICS = {
    "steps_per_s": "training steps per second",
    "speedup": "speed, times the softmax Transformer's",
    "train_hours": "hours of training",
    "peak_memory_gb": "peak memory per device, GB",
    "memory_ratio": "peak memory, share of the softmax Transformer's",
    "time_ms": "inference time per sequence, ms",
    "memory_mb": "inference memory per sequence, MB",
}


def load_efficiency(path: Path) -> list[Efficiency]:
    """Rows of results/published_efficiency.csv; none if there is no such file.

    Raises:
        ValueError: names line and cell of an unknown metric or a value that is no number.
    """
    if not path.exists():
        return []
    rows = []
    with path.open(encoding="utf-8", newline="") as file:
        for line, row in enumerate(csv.DictReader(file), start=2):
            if row["metric"] not in METRICS:
                raise ValueError(
                    f"{path}:{line}: metric={row['metric']!r}; known: {', '.join(METRICS)}"
                )
            try:
                float(row["value"])
            except ValueError:
                raise ValueError(f"{path}:{line}: value={row['value']!r}: not a number") from None
            rows.append(Efficiency(**row))
    return rows


def published_efficiency_tables(rows: Sequence[Efficiency]) -> list[tuple[str, Table]]:
    """One table per source, metric and hardware, with its title; lengths as the source has them."""
    groups: dict[tuple[str, str, str], list[Efficiency]] = {}
    for row in rows:
        groups.setdefault((row.source, row.metric, row.hardware), []).append(row)
    tables = []
    for (source, metric, hardware), group in groups.items():
        lengths = list(dict.fromkeys(row.length for row in group))
        lines: dict[tuple[str, str], dict[str, str]] = {}
        for row in group:
            lines.setdefault((row.model, row.variant), {})[row.length] = row.value
        cells = [[*key, *(line.get(n, "") for n in lengths)] for key, line in lines.items()]
        title = f"{source}: {METRICS[metric]} ({hardware})"
        tables.append((title, Table(["Model", "Variant", *lengths], cells)))
    return tables


def benchmark_tables(benchmark: Benchmark) -> list[tuple[str, Table]]:
    """`benchmark_blocks` with titles that say what was measured on what; the CPU's limits last."""
    blocks = benchmark_blocks(benchmark)
    tables = [(f"{benchmark.title}: {mode}, {title}", table) for mode, title, table in blocks]
    if benchmark.limits:
        cache = f" ({benchmark.l2_bytes // 1024} KB of L2 a core)" if benchmark.l2_bytes else ""
        title = f"{benchmark.hardware}{cache}: what it does by itself, by number of threads"
        tables.append((title, limits_table(benchmark.limits)))
    return tables


LIMITS = {
    "large_product_gflops": "product of 1,024 x 1,024 matrices, GFLOP/s",
    "medium_products_gflops": "64 products of 64 x 64 matrices, GFLOP/s",
    "small_products_gflops": "512 products of 16 x 32 by 32 x 48 matrices, GFLOP/s",
    "copy_gb_per_s": "copy, read and written, GB/s",
    "softmax_ns": "softmax, ns an element",
    "draw_ns": "drawing for dropout, ns an element",
}


def limits_table(limits: Sequence[Limits]) -> Table:
    """A line for each rate, a column for each number of threads."""
    lines = [[text, *(_figure(getattr(found, name)) for found in limits)]
             for name, text in LIMITS.items()]  # fmt: skip
    return Table(["Rate", *(str(found.threads) for found in limits)], lines)


def benchmark_blocks(benchmark: Benchmark) -> list[tuple[str, str, Table]]:
    """Speed, and memory where it was counted, by length; in brackets against softmax.

    Each with its mode and quantity. The last column is the growth exponent of a step's time, or of
    memory.
    """
    repeats = f", spread over {benchmark.repeats} rounds" if (benchmark.repeats or 1) > 1 else ""
    quantities: tuple[tuple[str, Callable[[BenchmarkCell], float | None], bool, int], ...] = (
        (f"steps per second (times softmax{repeats})", lambda c: c.steps_per_s, True, -1),
        ("tokens per second", lambda c: c.tokens_per_s, False, 0),
        ("peak memory, MB (share of softmax)", lambda c: _mb(c.peak_memory_bytes), True, 1),
    )
    tables = []
    for mode in ("train", "inference"):
        cells = {(c.model, c.length): c for c in benchmark.cells if c.mode == mode}
        models, lengths = sorted({m for m, _ in cells}), sorted({n for _, n in cells})
        for title, read, compared, power in quantities:
            if not any(read(c) for c in cells.values()):
                continue
            lines, growth = [], []
            for model in models:
                line = [model]
                for length in lengths:
                    cell, base = cells.get((model, length)), cells.get((BASELINE, length))
                    value = read(cell) if cell else None
                    text = "-" if value is None else _figure(value)
                    if cell and cell.status != "ok":
                        text = cell.status.replace("_", " ")
                    elif cell and value and compared:
                        text += _against(cell, value, read(base) if base else None, power)
                    line.append(text if cell else "")
                lines.append(line)
                growth.append(_growth(benchmark.series(model, mode), read, power))
            header = ["Model", *map(str, lengths)]
            if any(growth):
                header.append("Growth")
                lines = [[*line, text] for line, text in zip(lines, growth, strict=True)]
            tables.append((mode, title, Table(header, lines)))
    return tables


def _against(cell: BenchmarkCell, value: float, softmax: float | None, power: int) -> str:
    """A figure's ratio to softmax's, in brackets; of speed as it was measured round by round."""
    if power == -1 and cell.ratio_to_softmax is not None:
        spread = "" if cell.ratio_spread is None else f", {100 * cell.ratio_spread:.0f} %"
        return f" ({cell.ratio_to_softmax:.2f}{spread})"
    return f" ({value / softmax:.2f})" if softmax else ""


def _growth(
    series: Sequence[BenchmarkCell], read: Callable[[BenchmarkCell], float | None], power: int
) -> str:
    """Exponent of the figure, or with power -1 of its inverse; empty with too few lengths."""
    points = [(c.length, value) for c in series if (value := read(c))]
    exponent = slope([n for n, _ in points], [v**power for _, v in points]) if power else None
    return "" if exponent is None else f"{exponent:.2f}"


TRAINING_RATIOS = {
    "speedup": "training speed, times the softmax Transformer's",
    "memory_ratio": "peak memory in training, share of the softmax Transformer's",
}


def beside_tables(
    benchmarks: Sequence[Benchmark], published: Sequence[Efficiency]
) -> list[tuple[str, Table]]:
    """Published ratios in training with ours under them, at the lengths that sources print (1K ..).

    A source that prints memory only in GB gets the share that follows from that.
    """
    rows = [r for r in published if re.fullmatch(r"\d+K", r.length)]
    lengths = sorted({r.length for r in rows}, key=_tokens)
    tables = []
    for metric, title in TRAINING_RATIOS.items():
        lines: dict[tuple[str, ...], dict[str, str]] = {}
        for row in rows:
            value = row.value if row.metric == metric else ""
            if metric == "memory_ratio" and row.metric == "peak_memory_gb":
                base = next((r for r in rows if r.model == "Transformer" and (
                    r.metric, r.variant, r.length, r.source
                ) == (row.metric, row.variant, row.length, row.source)), None)  # fmt: skip
                value = f"{float(row.value) / float(base.value):.2f}" if base else ""
            if value:
                key = (row.model, row.variant, f"published, {row.source}")
                lines.setdefault(key, {})[row.length] = value
        ours = {}
        for benchmark in benchmarks:
            for model in sorted({c.model for c in benchmark.cells}):
                line = _own_ratios(benchmark, model, metric, lengths)
                if any(line.values()):
                    ours[model, "", f"measured, {benchmark.title}"] = line
        if lines and ours:
            cells = [[*k[:2], *(line.get(n, "") for n in lengths), k[2]]
                     for k, line in (lines | ours).items()]  # fmt: skip
            header = ["Model", "Variant", *lengths, "Figures"]
            tables.append((f"Published and measured: {title}", Table(header, cells)))
    return tables


def _own_ratios(
    benchmark: Benchmark, model: str, metric: str, lengths: Sequence[str]
) -> dict[str, str]:
    """One measured line of `beside_tables`."""
    cells = {c.length: c for c in benchmark.series(model, "train")}
    bases = {c.length: c for c in benchmark.series(BASELINE, "train")}
    line = {}
    for name in lengths:
        cell, base = cells.get(_tokens(name)), bases.get(_tokens(name))
        ratio = None
        if cell and base and metric == "speedup":
            ratio = cell.ratio_to_softmax
            if ratio is None and cell.steps_per_s and base.steps_per_s:
                ratio = cell.steps_per_s / base.steps_per_s
        elif cell and base and cell.peak_memory_bytes and base.peak_memory_bytes:
            ratio = cell.peak_memory_bytes / base.peak_memory_bytes
        line[name] = "" if ratio is None else f"{ratio:.2f}"
        if cell and cell.status != "ok":
            line[name] = cell.status.replace("_", " ")
    return line


def _tokens(length: str) -> int:
    """4K is 4096."""
    return 1024 * int(length.removesuffix("K"))


def runs_table(rows: Sequence[Row]) -> Table:
    """Size, speed and memory of the training runs behind the leaderboard, means over seeds.

    Runs of one setting on different devices stand apart.
    """
    lines = []
    for row in rows:
        for task, cell in row.cells.items():
            run = cell.runs[0]
            variant = ", ".join([row.variant] * bool(row.variant) + [REAL] * (run.inputs == "real"))
            ratio = f"{run.num_params / run.baseline_params:.3f}" if run.baseline_params else ""
            for device, runs in cell.by_device.items():
                lines.append([
                    task_title(task), row.model, row.recipe, variant, f"{run.num_params:,}", ratio,
                    _mean([r.speed.get("steps_per_s") for r in runs]),
                    _mean([r.speed.get("tokens_per_s") for r in runs]),
                    _mean([_mb(r.peak_memory_bytes) for r in runs]),
                    _mean([_hours(r.speed.get("train_time_s")) for r in runs]),
                    str(run.config.get("train", {}).get("batch_size", "")),
                    str(run.protocol.max_length), device,
                ])  # fmt: skip
    header = [
        "Task",
        "Model",
        "Recipe",
        "Variant",
        "Params",
        "Times softmax",
        "Steps/s",
        "Tokens/s",
        "Peak memory, MB",
        "Train hours",
        "Batch",
        "Max. length",
        "Hardware",
    ]
    order = {task_title(task): i for i, task in enumerate(tasks_with_own(rows))}
    return Table(header, sorted(lines, key=lambda line: (order[line[0]], line[1:4])))


def efficiency_tables(
    rows: Sequence[Row], benchmarks: Sequence[Benchmark], published: Sequence[Efficiency]
) -> list[tuple[str, Table]]:
    """Everything about speed and memory, each with its title."""
    runs = runs_table(rows)
    tables = [("Training runs of the leaderboard", runs)] if runs.rows else []
    tables += beside_tables(benchmarks, published)
    tables += [table for b in benchmarks for table in benchmark_tables(b)]
    return tables + published_efficiency_tables(published)


def efficiency_markdown(
    tables: Sequence[tuple[str, Table]], published: Sequence[Efficiency]
) -> str:
    """results/tables/efficiency.md."""
    legend = (
        "Numbers compare within one table and one device only, and speeds of training runs only if "
        "nothing else ran on the machine. In a benchmark's table, batch and precision are the same "
        "for all, ratios are taken inside each round, a spread is theirs: (largest - smallest) / "
        "median. Growth: exponent of a step's time, or of memory, in the length, over the longer "
        "half. Memory on a CPU is what the process grows by in a step, without parameters and "
        "optimiser. `-`: not counted on that device.\n"
    )
    parts = ["# Speed and memory\n", GENERATED, legend]
    for title, table in tables:
        parts += [f"## {escape_markdown(title)}\n", table.markdown()]
    notes = [f"- {p.source}, {p.model} {p.variant} at {p.length}, {METRICS[p.metric]}: {p.note}.\n"
             for p in published if p.note]  # fmt: skip
    return "\n".join(parts + (["## Notes on published figures\n", "".join(notes)] if notes else []))


def _mean(values: Sequence[float | None]) -> str:
    known = [v for v in values if v is not None]
    return _figure(mean_std(known)[0]) if known else "-"


def _figure(value: float) -> str:
    """Four digits, never in powers of ten."""
    if value >= 1000:
        return f"{value:,.0f}"
    return np.format_float_positional(value, precision=4, unique=False, fractional=False, trim="-")


def _mb(count: int | None) -> float | None:
    return None if count is None else count / 2**20


def _hours(seconds: float | None) -> float | None:
    return None if seconds is None else seconds / 3600
