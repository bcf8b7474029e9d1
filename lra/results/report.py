"""results/report.html: one self-contained page with tables, figures and every run's details."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from lra.console import percent
from lra.results.control import phase_text
from lra.results.leaderboard import LEFT_OUT, REAL, Board, Cell
from lra.results.markdown import Table, marked
from lra.results.published import FAMILIES, task_title
from lra.results.records import Record
from lra.results.rule_tables import floor_notes
from lra.results.settings import setting_text
from lra.results.statistics import wilson
from lra.results.tables import (
    LEGEND,
    PRETRAINED_LEGEND,
    PUBLISHED_LEGEND,
    average_titles,
    by_recipe,
    footnotes,
    measured_table,
    pretrained_notes,
    pretrained_table,
    published_sections,
)
from lra.results.yardsticks import best_published, best_rule, chance
from lra.values import flatten

FOLDER = Path(__file__).resolve().parent
MAX_POINTS = 32  # of a curve
POOLED = ("task", "model", "recipe", "outcome", "message", "protocol", "why_not", "overrides",
          "inputs", "hardware", "environment", "data", "command", "steps")  # fmt: skip


def page(
    board: Board,
    records: Sequence[Record],
    figures: Mapping[str, bytes],
    tables: Sequence[tuple[str, Table]],
) -> str:
    """The whole page.

    Args:
        records: all runs, also those the board left out.
        figures: title to SVG.
        tables: further tables with their titles.
    """
    script = (FOLDER / "report.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    parts = {
        # Only this very script may run, whatever else finds its way into the page.
        "script_hash": f"sha256-{digest}",
        "script": script,
        "legend": html.escape(LEGEND),
        "published": html.escape(PUBLISHED_LEGEND if board.published else ""),
        "floors": "".join(f'<p class="note">{html.escape(n)}</p>' for n in floor_notes(board)),
        "pretrained": _pretrained(board),
        "figures": "".join(_picture(title, svg) for title, svg in figures.items()),
        # "<" could end the script element that holds the data.
        "data": json.dumps(content(board, records, tables), separators=(",", ":"))
        .replace("<", "\\u003c"),
    }  # fmt: skip
    template = (FOLDER / "report.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def _pretrained(board: Board) -> str:
    """The section of runs with self-pretraining, each figure above links to its records."""
    if not board.pretrained:
        return ""
    table = pretrained_table(board.pretrained)
    ours, control, phase = (table.header.index(title) for title in
                            ("Self-pretrained", "Control from scratch", "First phase"))  # fmt: skip
    lines = [[html.escape(text) for text in row] for row in table.rows]
    for line, p in zip(lines, board.pretrained, strict=True):
        for column, cell in ((ours, p.cell), (control, p.control_cell)):
            line[column] += _links(cell) if cell else ""
        line[phase] = f'<div style="min-width: 11rem">{line[phase]}</div>'
    notes = "".join(
        f"<li>[{k}] {html.escape(v)}</li>" for k, v in pretrained_notes(board.pretrained)
    )
    parts = [
        '<h2 id="self-pretraining">Self-pretraining</h2>',
        _static("Runs with self-pretraining, each beside its control", table, lines),
        f'<ul class="note">{notes}</ul><p class="note">{html.escape(PRETRAINED_LEGEND)}</p>',
    ]
    if theirs := published_sections(board.published, board.options).get(FAMILIES[-1]):
        escaped = [[html.escape(text) for text in row] for row in theirs.rows]
        parts.append(_static("Self-pretraining as published", theirs, escaped))
    return "".join(parts)


def _links(cell: Cell) -> str:
    """Records of a cell's runs, by seed."""
    links = []
    for r in cell.runs:
        path = "/".join(quote(x, safe="") for x in ("runs", r.task, r.model, f"{r.name}.json"))
        links.append(f'<a href="{html.escape(path)}">{r.seed}</a>')
    return f'<br><span class="count">seed{"s" * (len(links) > 1)} {", ".join(links)}</span>'


def _static(caption: str, table: Table, lines: Sequence[Sequence[str]]) -> str:
    """A table that is not sorted; `lines` are its cells in HTML."""
    kinds = [' class="number"' * table.is_numeric(j) for j in range(len(table.header))]
    titles = "".join(
        f'<th scope="col"{kind}>{html.escape(title)}</th>'
        for title, kind in zip(table.header, kinds, strict=True)
    )
    rows = "".join(
        f'<tr><th scope="row">{line[0]}</th>'
        + "".join(f"<td{k}>{text}</td>" for text, k in zip(line[1:], kinds[1:], strict=True))
        + "</tr>"
        for line in lines
    )
    name = html.escape(caption)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{name}"><table>'
        f"<caption>{name}</caption><thead><tr>{titles}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _picture(title: str, svg: bytes) -> str:
    source = "data:image/svg+xml;base64," + base64.b64encode(svg).decode()
    name, width = html.escape(title), re.search(rb'<svg [^>]*?\bwidth="([\d.]+)pt"', svg)
    style = f' style="--width: {width[1].decode()}pt"' if width else ""
    return (
        f'<figure{style}><img src="{source}" alt="{name}"><figcaption>{name}</figcaption></figure>'
    )


def content(
    board: Board, records: Sequence[Record], tables: Sequence[tuple[str, Table]]
) -> dict[str, Any]:
    """What report.js draws."""
    index = {id(record): i for i, record in enumerate(records)}
    recipes = by_recipe(board.rows)
    rows, notes = [], {}
    for recipe, members in recipes.items():
        notes[recipe] = footnotes(members)
        best = measured_table(members, board.options).best
        for i, row in enumerate(members):
            cells = {
                task: {"text": marked(cell), "value": None if cell.failed else cell.mean,
                       "strip": strip(task, cell, board),
                       "best": (i, 2 + board.options.tasks.index(task)) in best,
                       "runs": [index[id(run)] for run in cell.runs]}
                for task, cell in row.cells.items()
            }  # fmt: skip
            rows.append({
                "model": row.model, "recipe": recipe, "variant": row.variant, "cells": cells,
                "averages": [row.average(a) for a in board.options.averages], "params": row.params,
            })  # fmt: skip
    pool: dict[str, int] = {}
    outcomes = {id(r): LEFT_OUT[why] for why, r in board.left_out}
    outcomes |= {id(r): "In the table" for row in board.rows
                 for cell in row.cells.values() for r in cell.runs}  # fmt: skip
    outcomes |= {id(r): "Self-pretrained" for p in board.pretrained for r in p.cell.runs}
    lines = []
    for record in records:
        run = describe(record, outcomes.get(id(record), "Not shown"))
        lines.append([pool.setdefault(v, len(pool)) if k in POOLED else v for k, v in run.items()])
    return {
        "titles": {t: task_title(t) for t in board.options.tasks}, "tasks": board.options.tasks,
        "recipes": list(recipes), "rows": rows,
        "averages": average_titles(board.options), "footnotes": notes, "pool": list(pool),
        "pooled": POOLED, "fields": list(run) if records else [], "runs": lines,
        "tables": [[title, t.header, t.rows, [t.is_numeric(j) for j in range(len(t.header))]]
                   for title, t in tables],
    }  # fmt: skip


def strip(task: str, cell: Cell, board: Board) -> dict[str, Any]:
    """A cell between its yardsticks, in percent and in words; `ends` are of all seeds' intervals.

    A yardstick that is not known is left out.
    """
    tests = [r.result.test for r in cell.runs if r.result]
    intervals = [wilson(test.accuracy, test.num_examples) for test in tests]
    ends = [100 * min(low for low, _ in intervals), 100 * max(high for _, high in intervals)]
    of = f"intervals of {len(tests)} seeds" if len(tests) > 1 else "interval"
    words = [f"this {percent(cell.mean)} % (95 % {of} {ends[0]:.1f} to {ends[1]:.1f})"]
    places: dict[str, Any] = {"score": cell.mean, "ends": ends}
    for name, title, yardstick in (
        ("chance", "chance", chance(task, cell.fingerprint, board.floors)),
        ("rule", "best rule", best_rule(task, cell.fingerprint, board.floors)),
        ("published", "best published", best_published(task, board.published)),
    ):
        if yardstick:
            places[name] = yardstick.percent
            words.append(f"{title} {percent(yardstick.percent)} % ({yardstick.whose})")
    rounded = {
        k: [round(x, 2) for x in v] if k == "ends" else round(v, 4) for k, v in places.items()
    }
    return rounded | {"words": "; ".join(words)}


def describe(record: Record, outcome: str) -> dict[str, Any]:
    """One run as flat values; the page shows them and draws `curve`."""
    result, speed = record.result, record.speed
    test = result.test if result else None
    low, high = wilson(test.accuracy, test.num_examples) if test else (None, None)
    before = f"before: {phase_text([record])}" if record.pretraining else ""
    curve = _thinned([p for p in record.curve if p.get("val_accuracy") is not None])
    return {
        "id": record.name, "task": record.task, "model": record.model, "recipe": record.recipe,
        "seed": record.seed, "outcome": outcome, "message": record.message,
        "test": test and _rounded(100 * test.accuracy, 6), "n_test": test and test.num_examples,
        "low": low and _rounded(100 * low, 2), "high": high and _rounded(100 * high, 2),
        "val": result and _rounded(100 * result.val.accuracy, 4), "step": result and result.step,
        "params": record.num_params, "baseline": record.baseline_params,
        "protocol": listed(vars(record.protocol)),
        "why_not": "; ".join(record.why_not),
        "overrides": ", ".join(filter(None, [setting_text(record), before])),
        "inputs": REAL if record.inputs == "real" else "",
        "steps_per_s": _rounded(speed.get("steps_per_s")),
        "tokens_per_s": _rounded(speed.get("tokens_per_s")),
        "train_s": _rounded(speed.get("train_time_s")),
        "memory_mb": record.peak_memory_bytes and _rounded(record.peak_memory_bytes / 2**20, 1),
        "hardware": listed(record.hardware), "environment": listed(record.environment),
        "data": listed(record.data),
        "finished": record.finished_at, "command": shlex.join(record.overrides),
        "steps": ",".join(str(p["step"]) for p in curve),
        "curve": [round(1e4 * p["val_accuracy"]) for p in curve],  # hundredths of a percent
    }  # fmt: skip


def listed(values: Mapping[str, Any]) -> str:
    """Nested values in one line, without what is empty; a hash by its first twelve digits."""
    flat = {k: str(v) for k, v in flatten(values).items() if v not in (None, {}, "")}
    return ", ".join(
        f"{k} {v[:12] if re.fullmatch('[0-9a-f]{40,}', v) else v}" for k, v in flat.items()
    )


def _rounded(value: float | None, digits: int = 3) -> float | None:
    return None if value is None else round(value, digits)


def _thinned(points: list[Any]) -> list[Any]:
    """At most MAX_POINTS, evenly chosen, first and last kept."""
    if len(points) <= MAX_POINTS:
        return points
    last = len(points) - 1
    return [points[round(i * last / (MAX_POINTS - 1))] for i in range(MAX_POINTS)]
