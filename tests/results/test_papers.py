"""Published figures and the papers' own tables with ours beside them; speed and memory likewise."""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from lra.cli import compose_config
from lra.results import efficiency, latex, papers, tables
from lra.results.leaderboard import Board, Options, build
from lra.results.published import FAIL, FAMILIES, GUESSES, TASKS, Published, load_published
from lra.results.task_table import task_table
from lra.speed.benchmarks import load_benchmarks, slope
from lra.values import flatten
from tests.made_up import ACCURACY, benchmark_values, make_record, markdown_rows, sixty_records

ROOT = Path(__file__).resolve().parents[2]
HEADER = "model,variant,task,accuracy_percent,setting,source,source_table"


def test_published_rows_stand_apart_with_their_sources(board: Board) -> None:
    both = build(sixty_records().values(), load_published())
    assert tables.measured_section(both) == tables.measured_section(board)
    lines = [line for _, _, line in published_lines(both)]
    with (ROOT / "results" / "published.csv").open(encoding="utf-8", newline="") as file:
        every = [r for r in csv.DictReader(file)
                 if r["task"] != "avg" and r["accuracy_percent"] != FAIL]  # fmt: skip
    number = len({(r["model"], r["variant"], r["source"], r["setting"]) for r in every})
    assert len(lines) == number > 90
    sources = {r["source"] for r in every}
    assert all(line[-1].replace("&amp;", "&").startswith(tuple(sources)) for line in lines)
    kinds = Counter(r["kind"] for r in csv.DictReader(io.StringIO(tables.csv_text(both))))
    assert kinds == {"measured": 7, "published": number}
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


def test_what_a_paper_adds_to_a_row_of_another_one_stands_there_with_its_source(
    tmp_path: Path,
) -> None:
    def load(*lines: str) -> list[Published]:
        (tmp_path / "x.csv").write_text("\n".join([f"{HEADER},average_of", *lines]))
        return load_published(tmp_path / "x.csv")

    own, failed = "A,1,listops,36.37,s,Old,t,", "A,1,pathx,FAIL,copied,New,t,"
    (row,) = load(own, failed, "A,1,avg,43.19,copied,New,t,six")
    assert (row.source, row.cells) == ("Old", {"listops": "36.37", "pathx": FAIL})
    assert (row.failed_by, row.averages) == ({"pathx": "New"}, {"six": ("43.19", "New")})
    assert tables.source(row) == "Old, t; Path-X: New"
    # With figures of its own it is a row of its own, whichever comes first.
    both = load(own, failed, "A,1,listops,40,copied,New,t,")
    assert [(p.source, p.failed_by) for p in both] == [("Old", {}), ("New", {})]
    assert [p.cells for p in load(failed)] == [{"pathx": FAIL}]
    with pytest.raises(ValueError, match=r"csv:4: \['A', '1'\] has this task already"):
        load(own, failed, "A,1,pathx,FAIL,copied,Third,t,")

    found = {(p.model, p.variant): p for p in load_published()}
    assert found["Luna", "Luna-256"].failed_by["pathx"].startswith("Mega paper")
    mega = papers.PAPERS[-1]
    lines = markdown_rows(papers.paper_markdown(mega, load_published(), []))
    at = lines[0].index("Path-X")
    assert {line[at] == FAIL for line in lines[1:8]} == {True} and FAIL not in {
        line[at] for line in lines[8:]
    }
    shown = task_table([make_record("pathx", "luna")], load_published(), "pathx", "")
    (line,) = [li for li in shown.splitlines() if "Luna-256  " in li]
    assert line.endswith("FAIL  Mega paper")


def test_no_figures_are_counted_twice() -> None:
    rows = [p for p in load_published() if p.model not in GUESSES]
    for a, b in itertools.combinations(rows, 2):
        both = [{float(p.cells[t]) for p in (a, b)} for t in TASKS
                if {a.cells.get(t) or FAIL, b.cells.get(t) or FAIL}.isdisjoint({FAIL})]  # fmt: skip
        assert len(both) < 3 or max(map(len, both)) > 1, (a, b)


def test_a_fraction_is_printed_as_percent() -> None:
    assert str(build([make_record(accuracy=0.5439)]).rows[0].cells["listops"]) == "54.39 (1)"


@pytest.mark.parametrize("paper", papers.PAPERS, ids=lambda p: p.name)
def test_paper_tables_cell_for_cell(paper: papers.Paper) -> None:
    with (ROOT / "results" / "published.csv").open(encoding="utf-8", newline="") as file:
        rows = [r for r in csv.DictReader(file) if r["source"].startswith(paper.sources)]
    text = papers.paper_markdown(paper, load_published(), [])
    header, *lines = markdown_rows(text)
    cells = {(line[0], line[1]): dict(zip(header, line, strict=True)) for line in lines}
    titles = {**{t: tables.task_title(t) for t in paper.tasks}, "avg": "Avg as printed"}
    for r in rows:
        title = titles[r["task"]]
        if r["average_of"] == "without retrieval":
            title = "Avg w/o Retrieval as printed"
        assert cells[r["model"], r["variant"]][title] == r["accuracy_percent"], r
    own = {(r["model"], r["variant"]) for r in rows}
    others = [{line[0], line[1]} for line in lines if (line[0], line[1]) not in own]
    taken_over = [{name} for names in paper.also.values() for name in names]
    assert len(lines) == len(own) + len(taken_over) and len(others) == len(taken_over)
    assert all(any(name & other for other in others) for name in taken_over)


def test_printed_averages_that_are_wrong_are_noted() -> None:
    notes = {p.name: tables.errata(load_published(), p.sources) for p in papers.PAPERS}
    (sinkhorn,) = notes["lra"]
    assert sinkhorn.startswith(
        "Sinkhorn Transformer (lra-jax): the average over 5 tasks is printed"
    )
    assert "printed as 51.39; its cells give 51.48" in sinkhorn
    assert ["59.24; its cells give 59.25" in n for n in notes["luna"]] == [True]
    assert notes["nystromformer"] == notes["mega"] == notes["s5"] == []
    assert ["54.17; its cells give 54.18 (S4 paper" in n for n in notes["s4"]] == [True]
    text = tables.markdown(build([], load_published())).partition("### Errata")[2]
    assert text.count("the average over") == len(tables.errata(load_published()))
    for told in (
        "RWKV: the average over 5 tasks is printed as 72.07; its cells give 71.84 (",
        "S4 (masked SPT): the average over 6 tasks is printed as 86.75; its cells give",
    ):
        assert told in text  # fmt: skip


def test_what_a_printed_average_is_over_and_how_a_failure_counts() -> None:
    found = {(p.model, p.variant): p for p in load_published()}
    s4, mega = (p for p in papers.PAPERS if p.name in ("s4", "mega"))
    lin = found["S4D", "S4D-Lin"]  # six, the failure as 50
    assert (lin.printed, lin.average(TASKS)) == (("78.39", "six"), pytest.approx(78.39, abs=0.005))
    softmax = found["Transformer", "lra-jax"]  # printed over five, and over six by the S4 paper
    assert softmax.printed == ("54.39", "five") and softmax.averages["six"][0] == "53.66"
    for paper, printed, computed in ((s4, "53.66", "53.66"), (mega, "54.39", "54.39")):
        header, first, *_ = markdown_rows(papers.paper_markdown(paper, load_published(), []))
        line = dict(zip(header, first, strict=True))
        assert (line["Avg as printed"], line["Avg computed"]) == (printed, computed)
    assert mega.kind("six", found["Mega", "Mega"]) == "six"
    other = found["MS-SSM", "S4 kernel"]
    assert tables.mean_title(other.printed[1]) == "5 (without ListOps)"
    assert other.average(TASKS[1:]) == pytest.approx(91.89, abs=0.005)
    board = build([], load_published())
    shown = {tuple(line[:2]): dict(zip(head, line, strict=True))
             for _, head, line in published_lines(board)}  # fmt: skip
    columns = ("Avg as printed", "Over", "Avg of 5 tasks", "Avg of 6 tasks")
    assert [shown["S4D", "S4D-Lin"][c] for c in columns] == ["78.39", "6", "84.07", "78.39"]
    assert [shown["Transformer", "lra-jax"][c] for c in columns] == ["54.39", "5", "54.39", "53.66"]
    # Ours likewise: a failed Path-X is 50 in the one table and left out in the other.
    records = [make_record(t, "mega", recipe=paper.recipe, overrides={"model.chunk_size": None})
               for paper in (s4, mega) for t in TASKS[:5]]  # fmt: skip
    records += [make_record("pathx", "mega", recipe=paper.recipe, status="at_chance",
                            overrides={"model.chunk_size": None})
                for paper in (s4, mega)]  # fmt: skip
    five = 59.0
    for paper, mean in ((s4, (5 * five + 50) / 6), (mega, five)):
        rows = papers.paper_table(paper, load_published(), build(records).rows).rows
        (ours,) = [line for line in rows if line[2] == "measured"]
        assert ours[-1] == f"{mean:.2f}" and ours[9] == "FAIL (1)"
    # A mean of five says nothing against one of six.
    (change,) = [line for line in rows if line[2] == "difference"]
    assert (change[4], change[9], change[-1]) == (f"{37 - 63.14:.2f}", "", "")
    tex = latex.paper_file(mega, build(records, load_published()))
    assert "over six tasks, a failed Path-X left out." in tex
    (line,) = [li for li in tex.splitlines() if li.startswith(r"\quad difference")]
    assert line.startswith(r"\quad difference & $-$26.14 &") and line.endswith(r"&  &  \\")


def test_state_space_and_mega_rows_stand_under_their_counterparts() -> None:
    def against(name: str, model: str, key: str, value: Any) -> list[str]:
        record = make_record("image", model, recipe=name, overrides={key: value})
        (paper,) = (p for p in papers.PAPERS if p.name == name)
        rows = papers.paper_table(paper, load_published(), build([record]).rows).rows
        at = next(i for i, line in enumerate(rows) if line[2] == "measured")
        return rows[at - 1][:2] if rows[at + 1 :] else []

    for init, variant in (("legs", "S4D-LegS"), ("inv", "S4D-Inv"), ("lin", "S4D-Lin")):
        assert against("s4", "s4d", "model.init", init) == ["S4D", variant]
    assert against("s4", "s4d", "model.init", "real") == []
    assert against("mega", "mega", "model.chunk_size", None) == ["Mega", "Mega"]
    for size in (128, 4096):  # 4096 on Path-X
        assert against("mega", "mega", "model.chunk_size", size) == ["Mega", "Mega-chunk"]
    assert against("mega", "mega", "model.chunk_size", 64) == []
    assert against("s4", "lru", "model.tie_kv", False) == ["LRU", ""]
    assert against("s5", "s5", "model.tie_kv", False) == ["S5", ""]


def published_lines(board: Board) -> list[tuple[str, list[str], list[str]]]:
    """Section, header and cells of every published row of the leaderboard."""
    found = []
    text = tables.markdown(board).partition("## Published")[2].partition("\n## ")[0]
    for section in text.split("\n### ")[1:]:
        if rows := markdown_rows(section):
            found += [(section.partition("\n")[0], rows[0], line) for line in rows[1:]]
    return found


def test_self_pretrained_rows_share_no_section_with_rows_from_scratch() -> None:
    pretrained = re.compile("SPT|self-pretrain", re.I)
    rows = load_published()
    assert [p.family == "self-pretraining" for p in rows] == [
        bool(pretrained.search(p.variant + p.setting)) for p in rows
    ]
    sections: dict[str, list[str]] = {}
    for section, _, line in published_lines(build([], rows)):
        sections.setdefault(section, []).append(line[1])
    assert list(sections)[-1] == "Self-pretraining" and len(sections) == len(FAMILIES)
    for section, variants in sections.items():
        found = {bool(pretrained.search(v)) for v in variants}
        assert found == {section == "Self-pretraining"}, section
    text = latex.paper_file(papers.PAPERS[3], build([], rows))
    assert "SPT" not in text  # nor in a table of a paper
    run = make_record("listops", "softmax")
    shown = task_table([run], rows, "listops", run.run_id).splitlines()
    assert {bool(pretrained.search(li)) for li in shown if "self-pretrained" in li} == {True}
    assert sum("self-pretrained" in li for li in shown) == 3


def test_figures_that_were_not_read_in_print_say_so_wherever_they_stand() -> None:
    board = build([], load_published())
    noted = {(p.model, p.variant, p.source.partition(" (")[0]) for p in board.published if p.note}
    assert {("S4D", "S4D-Inv"), ("S4", "masked SPT")} <= {row[:2] for row in noted}
    for _, _, line in published_lines(board):
        row = (line[0], line[1], line[-1].partition(" (")[0])
        told = re.search("from memory|copied there|as listed by", line[-1])
        assert bool(told) == (row in noted), line
    s4 = papers.PAPERS[3]
    lines = markdown_rows(papers.paper_markdown(s4, board.published, []))
    assert [line[1] for line in lines if "from memory" in line[2]] == ["S4D-Inv", "S4D-Lin"]
    tex = latex.paper_file(s4, board)
    (number,) = set(re.findall(r"superscript{(\d)}~from memory, not checked", tex))
    marked = [
        li for li in tex.splitlines() if re.match(rf"[^&]*superscript{{[\d,]*\b{number}\b.*&", li)
    ]
    assert [li.partition("\\")[0] for li in marked] == ["S4D-Inv", "S4D-Lin"]
    numbers = [[*map(int, n.split(","))] for n in re.findall(r"superscript{([\d,]+)}", tex)]
    assert all(n == sorted(n) for n in numbers) and max(map(len, numbers)) > 1


def test_inputs_are_told_and_empty_where_not_known() -> None:
    lines = published_lines(build([], load_published()))
    told = [(line[0], line[1], line[header.index("Inputs")]) for _, header, line in lines]
    assert {("Transformer", "lra-jax", "ids"), ("Liquid-S4", "", "")} <= set(told)
    assert {(*row, "real") for row in (("S4", "S4-v2"), ("Mega", "Mega"), ("B2S6", ""))} <= set(
        told
    )
    rows = list(csv.DictReader(io.StringIO(tables.csv_text(build([], load_published())))))
    assert all(row["family"] for row in rows)
    assert sorted((r["model"], r["variant"], r["inputs"]) for r in rows) == sorted(told)


def test_a_file_without_kinds_is_of_attention_and_of_five_tasks(tmp_path: Path) -> None:
    path = tmp_path / "published.csv"
    path.write_text(f"{HEADER}\nA,,listops,36.37,s,s,t\nA,,avg,54.39,s,s,t\n")
    (row,) = load_published(path)
    assert (row.family, row.inputs, row.note) == ("attention", "", "")
    assert row.averages == {"five": ("54.39", "s")}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("A,,listops,36,s,s,t,atention,,", "csv:2: family='atention'; known: attention, state"),
        ("A,,listops,36,s,s,t,,reals,", "csv:2: inputs='reals'; known: ids, real$"),
        ("A,,avg,36,s,s,t,,,seven", "csv:2: average_of='seven'; known: five, six, without"),
        ("A,,avg,36,s,s,t,,,", r"csv:2: no row \['A', ''\] before this average"),
        ("B,,text,36,s,s,t,,,\nB,,avg,36,s,s,t,,,\nB,,avg,36,s,r,t,,,", "csv:4: no row"),
    ],
)
def test_a_published_table_of_other_kinds_is_refused(
    tmp_path: Path, line: str, message: str
) -> None:
    path = tmp_path / "published.csv"
    path.write_text(f"{HEADER},family,inputs,average_of\n{line}\n")
    with pytest.raises(ValueError, match=message):
        load_published(path)


def test_our_rows_stand_under_their_counterparts_with_the_difference() -> None:
    wide = {"model.projection_length": 128}
    records = [make_record(t, "luna", s, ACCURACY[t] + s / 100, recipe="luna", overrides=wide)
               for t in TASKS[:5] for s in range(2)]  # fmt: skip
    records += [make_record("listops", "softmax", recipe="luna"), make_record("listops", "softmax")]
    records += [make_record("listops", "fastformer", recipe="luna")]
    luna = papers.PAPERS[1]
    lines = papers.paper_table(luna, load_published(), build(records).rows).rows
    at = next(i for i, line in enumerate(lines) if line[1] == "Luna-128")
    assert lines[at + 1][:5] == [
        "luna", "projection_length=128", "measured", "ids", "37.50 ± 0.71 (2)",
    ]  # fmt: skip
    assert lines[at + 2][2:5] == ["difference", "", "-0.51"]
    assert lines[at + 2][10] == f"{59.5 - 61.93:+.2f}" and lines[at + 1][10] == "59.50"
    assert papers.difference(37.425, "37.10") == "+0.33"  # of what is printed, 37.43
    at = next(i for i, line in enumerate(lines) if line[1] == "re-implementation in Luna harness")
    assert lines[at + 1][:5] == ["softmax", "", "measured", "ids", "37.00 (1)"]
    assert lines[at + 2][4] == "-0.11" and lines[at + 2][10] == ""
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
    # Speeds on two devices have no mean together.
    fast = {"hardware": {**make_record().hardware, "name": "Other CPU"},
            "speed": make_record().speed | {"steps_per_s": 1.234e-5}}  # fmt: skip
    run = efficiency.runs_table(build([make_record(), make_record(seed=1, **fast)]).rows)
    found = [(line[run.header.index("Steps/s")], line[-1].partition(",")[0]) for line in run.rows]
    assert found == [("10", "Some CPU"), ("0.00001234", "Other CPU")] or found == [
        ("0.00001234", "Other CPU"), ("10", "Some CPU")
    ]  # fmt: skip


def test_published_efficiency_keeps_its_sources() -> None:
    rows = efficiency.load_efficiency(ROOT / "results" / "published_efficiency.csv")
    assert {r.source.split(" ")[0] for r in rows} == {
        "LRA", "Luna", "Nystromformer", "Mega", "Skyformer", "S4", "FlashAttention",
        "facebookresearch/xformers",
    }  # fmt: skip
    text = efficiency.efficiency_markdown(efficiency.published_efficiency_tables(rows), rows)
    assert "| Transformer | lra-jax | 8.1 | 4.9 | 2.3 | 1.4 |" in text
    assert "4x4 TPU v3" in text and "likely copy error" in text
    assert "| Skyformer | 128 features | 1.02 | 1.29 | 1.86 | 2.03 | 3.4 |" in text
    assert "| 8192 |\n|---|---|---:|---:" in text  # a variant called 256 is no number
    # A module alone, in inference: no speed of training.
    assert "Table 1: speed, times the softmax Transformer's (1x NVIDIA 1080Ti; inference" in text


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


def test_models_that_stand_against_published_rows_have_the_options_that_are_asked_of_them() -> None:
    for paper in papers.PAPERS:
        for model, keys in paper.ours.values():
            composed = compose_config([f"model={model}", f"recipe={paper.recipe}"])
            plain = flatten(OmegaConf.to_container(composed))
            assert keys.keys() <= plain.keys(), (paper.name, model)
