"""Which runs count and which share a cell; tables as Markdown, LaTeX and CSV; papers' tables."""

from __future__ import annotations

import csv
import dataclasses
import importlib.util
import io
import json
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lra.console import percent
from lra.results import efficiency, latex, papers, tables
from lra.results.floors import Data, Floor, Floors, Score
from lra.results.leaderboard import (
    FAIL,
    TASKS,
    Board,
    Options,
    Row,
    build,
    load_published,
    make_rows,
    setting_text,
    task_table,
)
from lra.results.records import Protocol, Record, load_all, pack_correct, save
from lra.speed.benchmarks import load_benchmarks, slope
from tests import programs
from tests.made_up import ACCURACY, benchmark_values, make_record, sixty_records, write_sixty

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("make_tables", ROOT / "scripts" / "make_tables.py")
assert SPEC and SPEC.loader
SCRIPT = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(SCRIPT)


@pytest.fixture(scope="module")
def board() -> Board:
    return build(sixty_records().values())


def row(board: Board, model: str, variant: str = "", recipe: str = "nystromformer") -> Row:
    (found,) = [r for r in board.rows if (r.model, r.variant, r.recipe) == (model, variant, recipe)]
    return found


def markdown_rows(text: str) -> list[list[str]]:
    """Cells of every table line, bold and escapes undone."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip().replace("**", "").replace("\\", "") for cell in line] for line in lines]


def make_tables(
    *args: str | Path, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return programs.call("scripts/make_tables.py", *args, env=env)


def test_sixty_records_land_where_they_belong(board: Board) -> None:
    names = [(r.recipe, r.model, r.variant) for r in board.rows]
    assert names == [
        ("lra", "softmax", ""),
        ("luna", "softmax", ""),
        ("nystromformer", "softmax", ""),
        ("nystromformer", "luna", "projection_length=16"),
        ("nystromformer", "fastformer", ""),
        ("nystromformer", "luna", "projection_length=128"),
        ("nystromformer", "nystromformer", ""),
    ]
    assert Counter(why for why, _ in board.left_out) == {
        "reduced": 1, "partial": 1, "synthetic": 1, "duplicate": 2, "diverged": 2,
        "out_of_memory": 1, "interrupted": 1, "failed": 1,
    }  # fmt: skip
    in_cells = sum(len(c.runs) for r in board.rows for c in r.cells.values())
    assert in_cells + len(board.left_out) == 60


def test_a_cell_is_mean_sample_deviation_and_count(board: Board) -> None:
    luna = row(board, "luna", "projection_length=16")
    assert str(luna.cells["listops"]) == "37.00 ± 1.00 (3)"  # 36, 37, 38; the older seed 0 is out
    assert str(row(board, "luna", "projection_length=128").cells["text"]) == "66.00 (1)"
    assert str(row(board, "softmax").cells["text"]) == "66.00 ± 2.00 (3)"  # 64, 68 (rerun), 66


def test_missing_tasks_stay_empty_and_give_no_average(board: Board) -> None:
    nystrom = row(board, "nystromformer")
    assert nystrom.cells.keys() == {"listops", "text", "image"}
    assert nystrom.average("five") is None
    line = next(r for r in markdown_rows(tables.markdown(board)) if r[0] == "nystromformer")
    assert line[2:10] == [
        "38.00 ± 1.41 (2)",
        "66.00 ± 1.41 (2)",
        "",
        "43.00 ± 1.41 (2)",
        "",
        "",
        "",
        "",
    ]


def test_averages_of_five_and_of_six_with_a_failed_path_x_as_50() -> None:
    values = {
        "listops": 0.3637,
        "text": 0.6427,
        "retrieval": 0.5746,
        "image": 0.4244,
        "pathfinder": 0.7140,
    }
    records = [make_record(task, accuracy=value) for task, value in values.items()]
    records.append(make_record("pathx", accuracy=0.507, status="at_chance"))
    (only,) = build(records).rows
    assert percent(only.average("five")) == "54.39"
    assert percent(only.average("six")) == "53.66"
    text = tables.markdown(build(records))
    assert "Avg of 5 tasks" in text and "Avg of 6 tasks" in text and "| FAIL (1) |" in text
    assert percent(only.average("five")) == percent(load_published()[0].average(TASKS[:5]))


def test_at_chance_prints_fail_unless_another_seed_learned(board: Board) -> None:
    assert str(row(board, "softmax").cells["pathx"]) == "FAIL (3)"
    mixed = row(board, "luna", "projection_length=16").cells["pathx"]
    assert (str(mixed), mixed.marks) == ("60.10 ± 14.14 (2)", "f")


def test_of_duplicates_the_newest_counts_and_a_message_says_so() -> None:
    day = "2026-01-0{}T00:00:00Z"
    records = [
        make_record(accuracy=0.61, finished_at=day.format(2)),
        make_record(accuracy=0.60, finished_at=day.format(1)),
        make_record(seed=1, accuracy=0.62),
    ]
    for order in (records, records[::-1]):
        board = build(order)
        assert str(board.rows[0].cells["listops"]) == "61.50 ± 0.71 (2)"
        assert board.notes[0].startswith("1 duplicate ignored, the newest run")
        assert board.notes[0].endswith(f"{records[1].run_id} of 2026-01-01T00:00:00Z")


def test_a_later_failure_does_not_push_out_a_finished_run() -> None:
    late = make_record(status="interrupted", finished_at="2027-01-01T00:00:00Z")
    board = build([make_record(), late])
    assert len(board.rows) == 1 and [why for why, _ in board.left_out] == ["interrupted"]


def test_times_are_compared_in_utc() -> None:
    early = make_record(accuracy=0.1, finished_at="2026-01-01T02:00:00+02:00")  # midnight in UTC
    late = make_record(accuracy=0.2, finished_at="2026-01-01T01:00:00")
    assert build([late, early]).rows[0].cells["listops"].mean == pytest.approx(20)


def test_two_settings_are_not_averaged_and_the_differing_key_is_printed() -> None:
    records = [make_record(), make_record(overrides={"shape.num_heads": 4})]
    assert sorted(r.variant for r in build(records).rows) == ["num_heads=2", "num_heads=4"]
    # The same without a trace on the command line: the recipe's file was edited between two runs.
    edited = dataclasses.replace(records[1], overrides=records[0].overrides)
    assert sorted(r.variant for r in build([records[0], edited]).rows) == [
        "num_heads=2",
        "num_heads=4",
    ]


def test_a_row_holds_one_setting_over_tasks_although_budgets_differ_by_task() -> None:
    long = {"train.num_steps": 9000}
    records = [make_record(t) for t in ("listops", "text")] + [make_record("text", overrides=long)]
    assert {r.variant: set(r.cells) for r in make_rows(records)} == {
        "as the recipe": {"listops", "text"},
        "num_steps=9000": {"text"},
    }
    # A model's own knob makes a row also where the tasks do not overlap.
    records = [
        make_record("listops"),
        make_record("text", overrides={"model.projection_length": 64}),
    ]
    assert {r.variant for r in make_rows(records)} == {
        "projection_length=16",
        "projection_length=64",
    }


def test_runs_on_other_data_do_not_share_a_cell() -> None:
    other = make_record(seed=1)
    other = dataclasses.replace(other, data=other.data | {"fingerprint": "f" * 64})
    variants = sorted(r.variant for r in make_rows([make_record(), other]))
    assert variants == ["data=ffffffff", "data=listops0"]


def test_an_experiment_that_changes_the_setting_is_named() -> None:
    plain, changed = make_record(), make_record(overrides={"train.lr": 1e-3})
    changed = dataclasses.replace(changed, overrides=["model=luna", "experiment=warm"])
    assert {r.variant for r in make_rows([plain, changed])} == {
        "lr=0.0001", "experiment=warm, lr=0.001",
    }  # fmt: skip


def test_marks_and_their_reasons(board: Board) -> None:
    text = tables.markdown(board)
    assert "37.00 ± 0.00 (3) [a]" in text
    assert "fastformer on ListOps: 220,000 parameters, +15.8 % over softmax" in text
    for cell in ("42.00 (1) [d,g]", "60.10 ± 14.14 (2) [f]", "65.10 (1) [t]"):
        assert f"| {cell} |" in text
    for letter in "adgft":
        assert f"\n- [{letter}] " in text


def test_a_mark_holds_if_it_holds_for_any_run_of_the_cell() -> None:
    plain = make_record("text", seed=0)
    odd = {
        "a": {"apples_to_apples": False, "why_not": ["seed 1 only"]},
        "d": {"environment": plain.environment | {"git_dirty": True}},
        "f": {"status": "at_chance"},
    }
    for letter, fields in odd.items():
        (row,) = build([plain, make_record("text", seed=1, **fields)]).rows
        assert row.cells["text"].marks == letter and len(row.cells["text"].runs) == 2


def test_reduced_budget_enters_only_on_request_marked_and_unranked() -> None:
    records = list(sixty_records().values())
    assert "num_steps=500" not in tables.results_section(build(records))
    board = build(records, options=Options(include_reduced=True))
    line = next(r for r in markdown_rows(tables.markdown(board)) if "num_steps=500" in r[1])
    assert line[2] == "97.00 (1) [r]"
    table = tables.measured_table(
        [r for r in board.rows if r.recipe == "nystromformer"], board.options
    )
    assert not any(table.rows[i][1] == line[1] for i, _ in table.best)


def test_runs_that_are_no_result_are_listed_below_with_their_figures(board: Board) -> None:
    below = tables.markdown(board).partition("## Not in the table")[2]
    for title in ("Reduced budget", "Partial data", "Synthetic data", "Diverged", "Out of memory",
                  "Interrupted", "Failed"):  # fmt: skip
        assert f"### {title}\n" in below
    assert "| test 99.00 at step 10000 | partial |" in below
    assert "| val 28.12 at step 2000 |  | step 77: nan |" in below
    assert "disk full" in below
    assert "| luna | nystromformer | 6 | train.num_steps=500 | test 97.00 at step " in below
    assert "99.00" not in tables.results_section(board)


def test_one_finished_one_killed_one_diverged() -> None:
    records = [
        make_record(),
        make_record(seed=1, status="interrupted"),
        make_record(seed=2, status="diverged"),
    ]
    board = build(records)
    assert len(board.rows[0].cells["listops"].runs) == 1 and len(board.left_out) == 2


def bold(records: list[Record]) -> list[str]:
    """What stands in bold in the measured tables."""
    text = tables.results_section(build(records, options=Options(include_reduced=True)))
    return [cell for line in text.splitlines() for cell in re.findall(r"\*\*(.*?)\*\*", line)]


def seeds(model: str, *accuracies: float, task: str = "listops", **fields: Any) -> list[Record]:
    """A run for each accuracy, seeds from 0; the better of two has all right that the other has."""
    return [make_record(task, model, s, a, **fields) for s, a in enumerate(accuracies)]


def test_bold_is_what_stands_out_over_examples_and_over_seeds() -> None:
    others = seeds("softmax", 0.37, 0.37, 0.38) + seeds("fastformer", 0.36, 0.36, 0.37)
    assert bold(seeds("luna", 0.41, 0.42, 0.42) + others) == ["41.67 ± 0.58 (3)"]
    # A third row at its heels: clear against the others is not enough.
    near = seeds("nystromformer", 0.415, 0.415, 0.415)
    assert bold(seeds("luna", 0.41, 0.42, 0.42) + others + near) == []
    # Over other seeds it might be the other way round.
    assert bold(seeds("luna", 0.60, 0.30, 0.40) + others) == []
    # Above in the mean, but below in the seeds that both have.
    assert bold(seeds("luna", 0.2, 0.2, 0.9, 0.9, 0.9) + seeds("softmax", 0.5, 0.5)) == []
    # A difference in every seed, of too few examples: 1 of 2000, then 8 of them.
    for more, found in ((1, []), (8, ["37.40 ± 0.00 (3)"])):
        close = seeds("luna", *[0.37 + more / 2000] * 3) + seeds("softmax", 0.37, 0.37, 0.37)
        assert bold(close) == found


def test_one_seed_other_seeds_or_other_data_are_never_bold() -> None:
    assert bold(seeds("luna", 0.9) + seeds("softmax", 0.2)) == []
    best, low = seeds("luna", 0.9, 0.9), seeds("softmax", 0.2, 0.2)
    assert bold(best + low) == ["90.00 ± 0.00 (2)"]
    assert bold(best) == []
    later = [make_record(model="softmax", seed=s, accuracy=0.2) for s in (1, 2)]
    assert bold(best + later) == []  # one seed in common
    elsewhere = [dataclasses.replace(r, data=r.data | {"fingerprint": "f" * 64}) for r in low]
    assert bold(best + elsewhere) == []
    assert low[0].result and low[1].result
    for correct in (None, "AAAA"):  # a record that does not, or wrongly, say which were right
        test = dataclasses.replace(low[1].result.test, correct=correct)
        silent = dataclasses.replace(low[1], result=dataclasses.replace(low[1].result, test=test))
        assert bold([*best, low[0], silent]) == []


def test_failed_and_reduced_cells_are_not_ranked() -> None:
    low = seeds("softmax", 0.2, 0.2)
    failed = [dataclasses.replace(r, status="at_chance") for r in low]
    assert bold(seeds("luna", 0.9, 0.9) + failed) == []
    middle = seeds("fastformer", 0.5, 0.5)
    assert bold(seeds("luna", 0.9, 0.9, budget="reduced") + low + middle) == ["50.00 ± 0.00 (2)"]


def test_means_of_several_tasks_are_never_bold() -> None:
    records = [r for t in TASKS for m, a in (("luna", 0.9), ("softmax", 0.2))
               for r in seeds(m, a, a, task=t)]  # fmt: skip
    assert bold(records) == ["90.00 ± 0.00 (2)"] * 6


def test_what_rules_reach_stands_beside_runs_on_the_same_data_only() -> None:
    scores = {name: made_up_score(right) for name, right in (("a", 0.15), ("b", 0.37))}
    rules = [Floor(name, f"answer {name}", score, score) for name, score in scores.items()]
    records = seeds("luna", 0.37, 0.371, 0.37) + seeds("softmax", 0.50)
    data = Data("s", records[0].data["fingerprint"], {"val": 2000, "test": 2000})
    text = tables.results_section(build(records, floors=[Floors("listops", data, rules)]))
    assert text.startswith("On ListOps, rules without any model are right in 15.00 % (always answer"
                           " a; 2 of 2 rows above) and 37.00 % (always answer b; 1 of 2 rows above)"
                           " of test;")  # fmt: skip
    board = build(records, floors=[Floors("listops", data, rules)])
    assert r"37.00 \% (always answer b; 1 of 2 rows above) of test;" in latex.leaderboard(board)
    better = [dataclasses.replace(rules[0], test=made_up_score(0.9))]
    assert "0 of 2 rows above" in tables.results_section(
        build(records, floors=[Floors("listops", data, better)])
    )
    # A run at chance is above nothing, whatever its test figure.
    failed = [dataclasses.replace(r, status="at_chance") for r in records]
    assert "0 of 2 rows above" in tables.results_section(
        build(failed, floors=[Floors("listops", data, rules)])
    )
    other = dataclasses.replace(data, fingerprint="f" * 64)
    for floors in ([Floors("listops", other, rules)], [Floors("text", data, rules)]):
        assert tables.results_section(build(records, floors=floors)).startswith("### Recipe")


def made_up_score(accuracy: float) -> Score:
    correct_N = np.arange(2000) < round(2000 * accuracy)
    return Score(accuracy, 2000, pack_correct(correct_N))


def test_a_half_rounds_up() -> None:
    assert [percent(v) for v in (2.675, 49.985, 71.3949, None)] == ["2.68", "49.99", "71.39", ""]


def test_a_task_of_ones_own_has_a_column_after_the_six() -> None:
    six = [make_record(task) for task in TASKS]
    before = build(six)
    board = build([*six, make_record("digitsum", accuracy=0.875)])
    header, cells = markdown_rows(tables.results_section(board))[:2]
    assert header[2:9] == ["ListOps", "Text", "Retrieval", "Image", "Pathfinder", "Path-X",
                           "digitsum"]  # fmt: skip
    assert cells[8] == "87.50 (1)"
    averages = [board.rows[0].average(kind) for kind in ("five", "six")]
    assert averages == [before.rows[0].average(kind) for kind in ("five", "six")]
    lines = list(csv.DictReader(io.StringIO(tables.csv_text(board))))
    assert lines[0]["digitsum_percent"] == "87.5"
    assert any(line[0] == "digitsum" for line in efficiency.runs_table(board.rows).rows)
    only = build([*six, make_record("digitsum")], options=Options(tasks=("digitsum",)))
    assert [list(r.cells) for r in only.rows] == [["digitsum"]]
    unfinished = build([*six, make_record("digitsum", status="failed")])
    assert "digitsum" not in unfinished.options.tasks


def test_min_seeds_recipe_and_task_options() -> None:
    records = list(sixty_records().values())
    board = build(records, options=Options(min_seeds=3))
    assert {r.model for r in board.rows} == {"softmax", "luna", "fastformer"}
    assert sum(why == "few seeds" for why, _ in board.left_out) == 14
    board = build(records, options=Options(recipe="lra"))
    assert [(r.model, r.recipe) for r in board.rows] == [("softmax", "lra")]
    options = Options(tasks=("listops", "text"))
    table = tables.measured_table(build(records, options=options).rows, options)
    assert table.header == ["Model", "Variant", "ListOps", "Text", "Params"]
    assert Options(average="six").averages == ["six"]
    with pytest.raises(ValueError, match="min_seeds=0: expected at least 1"):
        Options(min_seeds=0)


def test_order_of_files_changes_nothing() -> None:
    records = list(sixty_records().values())
    texts = set()
    for seed in range(3):
        random.Random(seed).shuffle(records)
        board = build(records, load_published())
        texts.add(tables.markdown(board) + tables.csv_text(board) + latex.leaderboard(board))
    assert len(texts) == 1


def test_three_records_give_this_very_table() -> None:
    records = [make_record(accuracy=0.3712), make_record(seed=1, accuracy=0.3744),
               make_record("text", "softmax", accuracy=0.6501)]  # fmt: skip
    assert tables.results_section(build(records)).split("\n\n")[1] == (
        "| Model | Variant | ListOps | Text | Retrieval | Image | Pathfinder | Path-X |"
        " Avg of 5 tasks | Avg of 6 tasks | Params |\n"
        "|---|---|---:|---:|---|---|---|---|---|---|---:|\n"
        "| luna |  | 37.28 ± 0.23 (2) |  |  |  |  |  |  |  | 200,000 |\n"
        "| softmax |  |  | 65.01 (1) |  |  |  |  |  |  | 200,000 |"
    )


def test_no_record_gives_a_sentence() -> None:
    assert "No finished run" in tables.markdown(build([]))


def test_csv_holds_raw_numbers(board: Board) -> None:
    rows = list(csv.DictReader(io.StringIO(tables.csv_text(board))))
    luna = next(r for r in rows if r["model"] == "luna" and r["variant"] == "projection_length=16")
    assert float(luna["listops_percent"]) == pytest.approx(37)
    assert (float(luna["listops_std"]), luna["listops_n"]) == (pytest.approx(1), "3")
    assert float(luna["avg_of_five"]) == pytest.approx(59)
    assert next(r for r in rows if r["model"] == "nystromformer")["retrieval_percent"] == ""
    softmax = next(r for r in rows if r["recipe"] == "nystromformer" and r["model"] == "softmax")
    assert softmax["pathx_percent"] == FAIL


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


def test_names_cannot_break_markdown() -> None:
    evil = "a|b <i>_x_</i> & $100% {c}\\\n[d](e) ~^#"
    board = build([make_record(model=evil)])
    line = next(li for li in tables.markdown(board).splitlines() if li.startswith("| a"))
    assert line.startswith("| a\\|b \\<i\\>\\_x\\_\\</i\\> &amp; $100% {c}\\\\ [d\\](e) ~^# |")


def test_a_setting_is_told_by_what_the_command_line_changed() -> None:
    quiet = {"task.source": "files", "train.lr": 1e-3, "paths.data": "/d"}
    record = make_record(overrides=quiet)
    assert setting_text(record) == "lr=0.001"
    flat = record.config["train"] | {"log_every": 3, "time_limit": 9.0}
    record = dataclasses.replace(
        record, config=record.config | {"train": flat, "sweep": {"fail_fast": True}},
        overrides=["experiment=smoke", "train.log_every=3", "train.time_limit=9", "seed=0",
                   "sweep.fail_fast=true"],
    )  # fmt: skip
    assert setting_text(record) == "experiment=smoke"
    assert setting_text(make_record()) == ""


def test_task_table_shows_this_run_beside_the_published_rows() -> None:
    this = make_record(seed=4, accuracy=0.3725)
    text = task_table([this], load_published(), "listops", this.run_id)
    lines = text.splitlines()
    assert lines[0] == "ListOps"
    assert lines[2].split()[:2] == [">", "luna"] and " 37.25 " in lines[2]
    assert "95 % interval 35.2 to 39.4" in lines[2]
    assert any("Luna-128" in li and "38.01" in li and "Luna paper" in li for li in lines)
    assert not any("Reformer" in li or "measured here" in li for li in lines)
    assert max(map(len, lines)) <= 120
    assert "nystromformer, seed 4  " in lines[2] and "changed" not in text
    wide = make_record(overrides={"model.projection_length": 64, "shape.num_layers": 3})
    shown = task_table([wide], load_published(), "listops", wide.run_id)
    assert shown.splitlines()[-1] == "> changed: projection_length=64, num_layers=3"
    short = make_record(overrides={"model.tie_kv": True})
    assert "nystromformer, seed 0, tie_kv=true" in task_table([short], (), "listops", short.run_id)
    made_up = make_record(data="synthetic", accuracy=1.0)
    shown = task_table([made_up], load_published(), "listops", made_up.run_id)
    assert len(shown.splitlines()) == 3 and "synthetic data, no result" in shown
    both = task_table([this, make_record(accuracy=0.37)], load_published(), "listops", this.run_id)
    assert "37.13 ± 0.18 (2)" in both
    reduced = make_record(budget="reduced")
    assert "reduced budget, no result of the benchmark" in task_table(
        [reduced], (), "listops", reduced.run_id
    )


def test_readme_is_filled_between_its_markers_only() -> None:
    begin, end = tables.README_MARKERS
    text = f"# Title\n{begin}\nold\n{end}\nrest\n"
    assert tables.fill_readme(text, "new\n") == f"# Title\n{begin}\n\nnew\n\n{end}\nrest\n"
    for broken in ("# Title\n", f"{begin}\n", f"{end}\n{begin}\n", f"{begin}{begin}{end}"):
        assert tables.fill_readme(broken, "new\n") is None


def test_command_builds_checks_and_rebuilds_byte_for_byte(tmp_path: Path) -> None:
    results = tmp_path / "results"
    write_sixty(results)
    assert make_tables("--results", results, "--no-figures", "--check").returncode == 1
    done = make_tables("--results", results, "--no-figures")
    assert done.returncode == 0, done.stderr
    assert "half-written.json" in done.stdout and "2 duplicates ignored" in done.stdout
    generated = {
        p: p.read_bytes() for p in results.rglob("*") if p.is_file() and "runs" not in p.parts
    }
    assert len(generated) == 3 + 8 + 1
    assert str(tmp_path).encode() not in b"".join(generated.values())
    for path in generated:
        path.unlink()
    # Another process with another hash seed and time zone gives the same bytes.
    env = {"PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo"}
    assert make_tables("--results", results, "--no-figures", env=env).returncode == 0
    assert all(p.read_bytes() == content for p, content in generated.items())

    # The tables are what the records say, but one of those cannot be read.
    checked = make_tables("--results", results, "--no-figures", "--check")
    assert checked.returncode == 1 and "stale" not in checked.stdout
    assert "bad record: runs" in checked.stdout and "half-written.json" in checked.stdout
    next(results.rglob("half-written.json")).unlink()
    assert make_tables("--results", results, "--no-figures").returncode == 0
    assert make_tables("--results", results, "--no-figures", "--check").returncode == 0

    (results / "leaderboard.csv").write_text("edited by hand\n")
    (results / "floors").mkdir()
    (results / "floors" / "text.json").write_text("{")
    checked = make_tables("--results", results, "--no-figures", "--check")
    assert checked.returncode == 1 and "stale: " in checked.stdout
    assert "bad record: floors" in checked.stdout and "text.json: not a JSON" in checked.stdout
    assert "leaderboard.csv" in checked.stdout and "leaderboard.tex" not in checked.stdout
    assert (results / "leaderboard.csv").read_text() == "edited by hand\n"


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder where `tables_of` runs as in a checkout: records, tables and README."""
    monkeypatch.setattr(SCRIPT, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    Path("README.md").write_text("{}\n\n{}\n".format(*tables.README_MARKERS))
    Path("results").mkdir()
    for name in ("published.csv", "published_efficiency.csv"):
        shutil.copy(ROOT / "results" / name, "results")
    save(make_record("listops", "luna"), Path("results"))
    save(make_record("text", "softmax", budget="reduced"), Path("results"))
    assert tables_of(monkeypatch) == 0
    return tmp_path


def tables_of(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """scripts/make_tables.py in this process."""
    monkeypatch.setattr(sys, "argv", ["make_tables.py", "--no-figures", *words])
    return SCRIPT.main()


def content(folder: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_the_checkouts_own_records_fill_its_readme(checkout: Path) -> None:
    text = Path("README.md").read_text()
    assert "### Recipe nystromformer" in text and "| luna |  | 37.00 (1) |" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--task listop", "--task=listop: unknown; did you mean 'listops'"),
        ("--recipe luuna", "--recipe=luuna: unknown; did you mean 'luna'"),
        ("--models luna,sofmax", "--models=sofmax: unknown; did you mean 'softmax'"),
        ("--results result", "--results=result: holds no runs/; expected a results folder"),
        ("--results results/runs", "--results=results/runs: holds no runs/"),
    ],
)
def test_what_does_not_exist_is_refused_before_anything_is_written(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, words: str, message: str
) -> None:
    before = content(checkout)
    for place in ([], ["--out", "paper"]):
        with pytest.raises(ValueError, match=re.escape(message)):
            tables_of(monkeypatch, *words.split(), *place)
    assert content(checkout) == before


@pytest.mark.parametrize(
    "words",
    ["--task listops", "--recipe luna", "--models luna", "--average five", "--min-seeds 2",
     "--include-reduced", "--no-published", "--no-params"],
)  # fmt: skip
def test_a_choice_needs_a_folder_of_its_own(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    before = content(checkout)
    for place in ([], ["--out", "results"]):
        with pytest.raises(ValueError, match=f"{words.split()[0]}: results/ holds .* --out DIR"):
            tables_of(monkeypatch, *words.split(), *place)
    assert content(checkout) == before
    assert tables_of(monkeypatch, *words.split(), "--out", "paper") == 0
    after = content(checkout)
    assert before.items() <= after.items()
    assert {p.parts[len(checkout.parts)] for p in after.keys() - before.keys()} == {"paper"}
    assert Path("paper/tables/luna.tex").exists()


def test_other_records_do_not_enter_the_checkouts_tables(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save(make_record("image", "luna", data="synthetic"), Path("outputs/results"))
    Path("outputs/README.md").write_text(Path("README.md").read_text())
    before = content(checkout)
    with pytest.raises(ValueError, match="--out=results: holds records, so its tables are theirs"):
        tables_of(monkeypatch, "--results", "outputs/results", "--out", "results")
    assert content(checkout) == before
    assert tables_of(monkeypatch, "--results", "outputs/results") == 0
    assert "none of the records counts (1 synthetic data)" in capsys.readouterr().out
    assert before.items() <= content(checkout).items()
    assert "image" in Path("outputs/results/leaderboard.md").read_text()


def test_no_record_yet_is_not_a_wrong_folder(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("fresh/runs").mkdir(parents=True)
    assert tables_of(monkeypatch, "--results", "fresh") == 0
    assert "fresh/runs holds no record yet" in capsys.readouterr().out
    assert "No finished run" in Path("fresh/leaderboard.md").read_text()


def test_models_are_chosen_by_our_names_or_the_papers() -> None:
    records = [make_record(model=m) for m in ("luna", "softmax", "fastformer")]
    for names in (("softmax", "Luna"), ("transformer", "luna")):
        board = build(records, load_published(), Options(models=names))
        assert {r.model for r in board.rows} == {"luna", "softmax"}
        assert {p.model for p in board.published} == {"Luna", "Transformer"}
    assert Options(models=("luna",)).shows("luna:projection_length=16")


def test_command_works_without_matplotlib(tmp_path: Path) -> None:
    write_sixty(tmp_path / "results")
    code = ("import sys, runpy; sys.modules.update(matplotlib=None); "
            f"sys.argv = ['x', '--results', {str(tmp_path / 'results')!r}]; "
            "runpy.run_path('scripts/make_tables.py', run_name='__main__')")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "matplotlib is missing; pip install" in done.stdout
    assert (tmp_path / "results" / "leaderboard.md").exists()
    assert not (tmp_path / "results" / "figures").exists()


def test_command_names_what_is_wrong_with_a_published_file(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "published.csv").write_text(
        "model,variant,task,accuracy_percent,setting,source,source_table\nA,,listops,0.36,s,s,t\n"
    )
    done = make_tables("--results", tmp_path)
    assert (
        done.returncode == 2 and "published.csv:2" in done.stderr and "Traceback" not in done.stderr
    )


def test_records_of_eight_processes_all_enter(tmp_path: Path) -> None:
    code = ("import sys; from pathlib import Path; from lra.results.records import save; "
            "from tests.made_up import make_record; "
            "save(make_record(seed=int(sys.argv[1])), Path(sys.argv[2]))")  # fmt: skip
    processes = [programs.start("-c", code, str(seed), tmp_path, cwd=ROOT) for seed in range(8)]
    assert [p.wait(timeout=60) for p in processes] == [0] * 8
    records, warnings = load_all(tmp_path)
    assert warnings == [] and sorted(r.seed for r in records) == list(range(8))
    assert len(build(records).rows[0].cells["listops"].runs) == 8


def test_protocol_of_val_on_test_is_marked() -> None:
    record: Record = make_record("text", protocol=Protocol("files", "full", "test", "last", 4000))
    assert build([record]).rows[0].cells["text"].marks == "t"
