"""Published figures and the papers' own tables with ours beside them; speed and memory likewise."""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from pathlib import Path

import pytest

from lra.results import efficiency, papers, tables
from lra.results.leaderboard import (
    TASKS,
    Board,
    Options,
    build,
    load_published,
)
from lra.speed.benchmarks import load_benchmarks, slope
from tests.made_up import ACCURACY, benchmark_values, make_record, markdown_rows, sixty_records

ROOT = Path(__file__).resolve().parents[2]


def test_published_rows_stand_apart_with_their_sources(board: Board) -> None:
    both = build(sixty_records().values(), load_published())
    assert tables.results_section(both) == tables.results_section(board)
    published = tables.markdown(both).partition("## Published")[2].partition("## Not")[0]
    lines = markdown_rows(published)[1:]
    assert len(lines) == 39
    assert all(re.search("paper|README|BENCHMARKS", line[-1]) for line in lines)
    kinds = Counter(r["kind"] for r in csv.DictReader(io.StringIO(tables.csv_text(both))))
    assert kinds == {"measured": 7, "published": 39}
    assert "## Published" not in tables.markdown(
        build([], load_published(), Options(published=False))
    )


@pytest.mark.parametrize(
    ("task", "value", "message"),
    [
        ("listops", "0.5439", r"published.csv:2: accuracy_percent=0.5439: .* a fraction\?"),
        ("listops", "101", "at most 100"),
        ("listops", "good", "'good': expected a percentage, FAIL or NA"),
        ("listop", "36.37", "task='listop'; known: listops"),
    ],
)
def test_a_published_table_of_fractions_or_words_is_refused(
    tmp_path: Path, task: str, value: str, message: str
) -> None:
    path = tmp_path / "published.csv"
    path.write_text(
        "model,variant,task,accuracy_percent,setting,source,source_table\n"
        f"A,,{task},{value},s,s,t\n"
    )
    with pytest.raises(ValueError, match=message):
        load_published(path)


def test_a_figure_that_is_not_available_is_an_empty_cell(tmp_path: Path) -> None:
    path = tmp_path / "published.csv"
    path.write_text(
        "model,variant,task,accuracy_percent,setting,source,source_table\n"
        "A,,listops,36.37,s,s,t\nA,,text,NA,s,s,t\nA,,pathx,FAIL,s,s,t\n"
    )
    (row,) = load_published(path)
    assert row.cells == {"listops": "36.37", "text": "", "pathx": "FAIL"}
    assert row.average(["listops", "text"]) is None


def test_a_fraction_is_printed_as_percent() -> None:
    assert str(build([make_record(accuracy=0.5439)]).rows[0].cells["listops"]) == "54.39 (1)"


@pytest.mark.parametrize("paper", papers.PAPERS, ids=lambda p: p.name)
def test_paper_tables_cell_for_cell(paper: papers.Paper) -> None:
    with (ROOT / "results" / "published.csv").open(encoding="utf-8", newline="") as file:
        rows = [r for r in csv.DictReader(file) if r["source"].startswith(paper.source)]
    text = papers.paper_markdown(paper, load_published(), [])
    header, *lines = markdown_rows(text)
    cells = {(line[0], line[1]): dict(zip(header, line, strict=True)) for line in lines}
    titles = {**{t: tables.task_title(t) for t in paper.tasks}, "avg": "Avg as printed"}
    for r in rows:
        title = titles[r["task"]]
        if "WITHOUT Retrieval" in r["setting"]:
            title = "Avg w/o Retrieval as printed"
        assert cells[r["model"], r["variant"]][title] == r["accuracy_percent"], r
    assert len(lines) == len({(r["model"], r["variant"]) for r in rows})


def test_printed_averages_that_are_wrong_are_noted() -> None:
    notes = {p.name: papers.errata(p, load_published()) for p in papers.PAPERS}
    (sinkhorn,) = notes["lra"]
    assert sinkhorn.startswith(
        "Sinkhorn Transformer (lra-jax): the average over 5 tasks is printed"
    )
    assert "printed as 51.39; its cells give 51.48" in sinkhorn
    assert ["59.24; its cells give 59.25" in n for n in notes["luna"]] == [True]
    assert notes["nystromformer"] == []


def test_our_rows_stand_under_their_counterparts_with_the_difference() -> None:
    wide = {"model.projection_length": 128}
    records = [make_record(t, "luna", s, ACCURACY[t] + s / 100, recipe="luna", overrides=wide)
               for t in TASKS[:5] for s in range(2)]  # fmt: skip
    records += [make_record("listops", "softmax", recipe="luna"), make_record("listops", "softmax")]
    records += [make_record("listops", "fastformer", recipe="luna")]
    luna = papers.PAPERS[1]
    lines = papers.paper_table(luna, load_published(), build(records).rows).rows
    at = next(i for i, line in enumerate(lines) if line[1] == "Luna-128")
    assert lines[at + 1][:4] == ["luna", "projection_length=128", "measured", "37.50 ± 0.71 (2)"]
    assert lines[at + 2][2:4] == ["difference", "-0.51"]
    assert lines[at + 2][9] == f"{59.5 - 61.93:+.2f}" and lines[at + 1][9] == "59.50"
    at = next(i for i, line in enumerate(lines) if line[1] == "re-implementation in Luna harness")
    assert lines[at + 1][:4] == ["softmax", "", "measured", "37.00 (1)"]
    assert lines[at + 2][3] == "-0.11" and lines[at + 2][9] == ""
    assert lines[-1][:3] == ["fastformer", "", "measured"]
    assert len(lines) == 15 + 2 + 2 + 1


def test_efficiency_tables_say_device_and_leave_uncounted_memory_empty(tmp_path: Path) -> None:
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    (folder / "gpu.json").write_text(json.dumps(benchmark_values()))
    (folder / "cpu.json").write_text(json.dumps(benchmark_values("cpu")))
    benchmarks, warnings = load_benchmarks(tmp_path)
    assert warnings == [] and [b.name for b in benchmarks] == ["cpu", "gpu"]
    titles = [title for b in benchmarks for title, _ in efficiency.benchmark_tables(b)]
    assert len(titles) == 4 + 6 and all("Some Device, float32, batch 8" in t for t in titles)
    speed = efficiency.benchmark_tables(benchmarks[1])[0][1].rows
    assert speed == [
        ["luna", "10 (1.00)", "5 (2.00)", "2.5 (4.00)", "1.25", "1.00"],
        ["softmax", "10 (1.00)", "2.5 (1.00)", "0.625 (1.00)", "out of memory", "2.00"],
    ]
    run = efficiency.runs_table(build([make_record()]).rows)
    line = dict(zip(run.header, run.rows[0], strict=True))
    assert line["Peak memory, MB"] == "-" and line["Hardware"] == "Some CPU, float32, 4 threads"
    assert (line["Batch"], line["Max. length"], line["Times softmax"]) == ("32", "2000", "1.053")


def test_published_efficiency_keeps_its_sources() -> None:
    rows = efficiency.load_efficiency(ROOT / "results" / "published_efficiency.csv")
    assert {r.source.split(" (")[0] for r in rows} == {
        "LRA paper",
        "Luna paper",
        "Nystromformer paper",
    }
    text = efficiency.efficiency_markdown(efficiency.published_efficiency_tables(rows), rows)
    assert "| Transformer | lra-jax | 8.1 | 4.9 | 2.3 | 1.4 |" in text
    assert "4x4 TPU v3" in text and "likely copy error" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 2}, "schema_version=2: expected 1"),
        ({"device": "tpu"}, "device='tpu': not a choice"),
        ({"threads": "four"}, "threads='four'"),
        ({"cells": [benchmark_values()["cells"][0]] * 2}, "measured twice"),
        ({"cells": [benchmark_values()["cells"][0] | {"steps_per_s": None}]}, "steps_per_s=None"),
        ({"unheard": 1}, "unheard=1: unknown key"),
    ],
)
def test_a_wrong_benchmark_record_is_skipped_by_name(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "bad.json").write_text(json.dumps(benchmark_values(**change)))
    benchmarks, warnings = load_benchmarks(tmp_path)
    assert benchmarks == [] and len(warnings) == 1
    assert "bad.json" in warnings[0] and message in warnings[0]


def test_slope_is_the_growth_exponent() -> None:
    lengths = [256, 512, 1024, 2048, 4096, 8192]
    assert slope(lengths, [1e-3 + 1e-8 * n**2 for n in lengths]) == pytest.approx(1.97, abs=0.03)
    assert slope(lengths, [3.0 * n for n in lengths]) == pytest.approx(1)
    assert slope(lengths[:2], [1.0, 2.0]) is None
