"""Which runs count and which share a cell; tables as Markdown and CSV."""

from __future__ import annotations

import csv
import dataclasses
import io
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lra.console import percent
from lra.results import efficiency, latex, papers, settings, tables
from lra.results.floors import Data, Floor, Floors, Score
from lra.results.leaderboard import (
    MARKS,
    Board,
    Cell,
    Options,
    Row,
    build,
    make_rows,
)
from lra.results.published import FAIL, GUESSES, TASKS, load_published
from lra.results.records import Protocol, Record, pack_correct
from lra.results.settings import setting_text
from lra.results.task_table import task_table
from tests.made_up import NUM_TEST, make_record, markdown_rows, sixty_records

ROOT = Path(__file__).resolve().parents[2]


def row(board: Board, model: str, variant: str = "", recipe: str = "nystromformer") -> Row:
    (found,) = [r for r in board.rows if (r.model, r.variant, r.recipe) == (model, variant, recipe)]
    return found


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


def test_knobs_that_a_recipe_sets_by_task_part_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "configs" / "task_knobs" / "s4" / "s4d"
    folder.mkdir(parents=True)
    (folder / "image.yaml").write_text("model:\n  state_size: 64\n")
    monkeypatch.setattr(settings, "CONFIGS", tmp_path / "configs")

    def run(task: str, size: int, model: str = "s4d", by_hand: bool = False) -> Record:
        record = make_record(task, model, recipe="s4", overrides={"model.state_size": size})
        return record if by_hand else dataclasses.replace(record, overrides=[])

    records, other = [run("listops", 4), run("image", 64)], run("image", 16, by_hand=True)
    assert [(r.variant, set(r.cells)) for r in make_rows(records)] == [("", {"listops", "image"})]
    assert {r.variant: set(r.cells) for r in make_rows([*records, other])} == {
        "as the recipe": {"listops", "image"}, "state_size=16": {"image"},
    }  # fmt: skip
    # Two values on one task part a row all the same, and so do knobs that the recipe leaves alone.
    assert len(make_rows([*records, run("image", 16)])) > 1
    assert len(make_rows([run("listops", 4, "s5"), run("image", 64, "s5")])) == 2


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
    assert "num_steps=500" not in tables.measured_section(build(records))
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
    assert "99.00" not in tables.measured_section(board)
    short = make_record(budget="reduced", environment={"git_dirty": True})
    assert f"|  | {MARKS['d']} |" in tables.markdown(build([short]))


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
    text = tables.measured_section(build(records, options=Options(include_reduced=True)))
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
    test = dataclasses.replace(low[1].result.test, correct=None)  # does not say which were right
    silent = dataclasses.replace(low[1], result=dataclasses.replace(low[1].result, test=test))
    assert bold([*best, low[0], silent]) == []


def test_failed_and_reduced_cells_are_not_ranked() -> None:
    low = seeds("softmax", 0.2, 0.2)
    failed = [dataclasses.replace(r, status="at_chance") for r in low]
    assert bold(seeds("luna", 0.9, 0.9) + failed) == []
    middle = seeds("fastformer", 0.5, 0.5)
    assert bold(seeds("luna", 0.9, 0.9, budget="reduced") + low + middle) == ["50.00 ± 0.00 (2)"]


def test_a_complete_row_that_is_never_ranked_stands_behind_those_that_are() -> None:
    records = [make_record(t, "softmax", accuracy=0.6) for t in TASKS]
    best = [make_record(t, "luna", accuracy=0.7) for t in TASKS]
    assert [row.model for row in build(records + best).rows] == ["luna", "softmax"]
    best[3].config["shape"]["input"] = "real"
    assert [row.model for row in build(records + best).rows] == ["softmax", "luna"]
    best[3].config["shape"]["input"] = "ids"
    best[3].config["init_from"] = "outputs/a"
    assert [row.model for row in build(records + best).rows] == ["softmax", "luna"]


def test_a_run_that_went_on_from_another_is_marked_and_never_bold() -> None:
    others = seeds("softmax", 0.37, 0.37, 0.38)
    best = seeds("luna", 0.41, 0.42, 0.42)
    assert bold(best + others) == ["41.67 ± 0.58 (3)"]
    for record in best:
        record.config["init_from"] = "outputs/a"
    assert bold(best + others) == []
    assert "41.67 ± 0.58 (3) [i]" in tables.measured_section(build(best + others))


def test_a_step_with_uncommitted_changes_marks_the_run_whatever_came_later() -> None:
    both = {"stretches": [{"from_step": 1, "git_dirty": True}, {"from_step": 9}]}
    record = make_record(pretrain="masked")
    assert not record.dirty and dataclasses.replace(record, hardware=record.hardware | both).dirty
    first = record.pretraining
    assert first is not None
    for hardware in ({"git_dirty": True}, both):
        of_phase = dataclasses.replace(
            record, pretraining=dataclasses.replace(first, hardware=hardware)
        )
        assert of_phase.dirty and build([of_phase]).pretrained[0].cell.marks == "ads"


def test_means_of_several_tasks_are_never_bold() -> None:
    records = [
        record
        for task, n in NUM_TEST.items()
        for model, right in (("luna", round(0.9 * n)), ("softmax", round(0.2 * n)))
        for record in seeds(model, right / n, right / n, task=task)
        if task in TASKS
    ]
    assert bold(records) == ["90.00 ± 0.00 (2)"] * 6  # each of one task


def test_what_rules_reach_stands_beside_runs_on_the_same_data_only() -> None:
    scores = {name: made_up_score(right) for name, right in (("a", 0.15), ("b", 0.37))}
    rules = [Floor(name, f"answer {name}", score, score) for name, score in scores.items()]
    records = seeds("luna", 0.37, 0.371, 0.37) + seeds("softmax", 0.50)
    data = Data("s", "files", records[0].data["fingerprint"], {"val": 2000, "test": 2000})
    text = tables.measured_section(build(records, floors=[Floors("listops", data, rules)]))
    assert text.startswith("On ListOps, rules without a sequence model are right in 15.00 % (answer"
                           " a; 2 of 2 rows above) and 37.00 % (answer b, on validation the best of"
                           " 2 rules; 1 of 2 rows above) of test;")  # fmt: skip
    board = build(records, floors=[Floors("listops", data, rules)])
    assert r"37.00 \% (answer b, on validation the best of 2 rules; 1 of 2" in latex.leaderboard(
        board
    )
    better = [dataclasses.replace(rules[0], test=made_up_score(0.9))]
    assert "0 of 2 rows above" in tables.measured_section(
        build(records, floors=[Floors("listops", data, better)])
    )
    # A run at chance is above nothing, whatever its test figure.
    failed = [dataclasses.replace(r, status="at_chance") for r in records]
    assert "0 of 2 rows above" in tables.measured_section(
        build(failed, floors=[Floors("listops", data, rules)])
    )
    other = dataclasses.replace(data, fingerprint="f" * 64)
    for floors in ([Floors("listops", other, rules)], [Floors("text", data, rules)]):
        assert tables.measured_section(build(records, floors=floors)).startswith("### Recipe")


def test_a_ladder_says_what_a_score_is_worth_and_is_no_floor() -> None:
    rule, *rungs = (Floor(name, f"answer {name} (and more)", made_up_score(right),
                          made_up_score(right))
                    for name, right in (("a", 0.15), ("one", 0.45), ("two", 0.6)))  # fmt: skip
    records = seeds("luna", 0.50) + seeds("softmax", 0.40)
    data = Data("s", "files", records[0].data["fingerprint"], {"val": 2000, "test": 2000})
    floors = [Floors("listops", data, [rule], rungs)]
    guesses = [p for p in load_published() if p.model in GUESSES and p.cells.get("listops")]
    published = [p for p in load_published() if p.cells.get("listops") and p not in guesses]
    above = [sum(float(p.cells["listops"]) > limit for p in published) for limit in (45, 60)]
    assert above[0] > above[1] > 0
    board = build(records, published + guesses, floors=floors)
    assert guesses and all("b" not in row.cells["listops"].marks for row in board.rows)
    text = tables.measured_section(board)
    assert (
        "On ListOps, solving a part exactly and guessing the rest gives 45.00 % (answer one), "
        f"60.00 % (answer two); the highest of {len(published)} figures in print that are shown "
        "here is 63.85 %.\n"
    ) in text
    (by_task,) = tables.markdown(board).split("### Rules on ")[1:]
    named = [f"answer {name} (and more)" for name in ("one", "two")]
    assert markdown_rows(by_task)[2:5] == [
        ["Solved", "Val", "Test", "Rows above, of 2", f"In print higher, of {len(published)}"],
        [named[0], "45.00 ± 1.11", "45.00 ± 1.11", "1", str(above[0])],
        [named[1], "60.00 ± 1.10", "60.00 ± 1.10", "0", str(above[1])],
    ]
    alone = tables.markdown(build(records, floors=floors))
    assert "(answer two).\n" in alone and "In print higher" not in alone


def test_the_leaderboard_has_all_rules_also_where_no_run_has_their_data() -> None:
    scores = {"the first": 0.15, "a classifier (tried 1, 2)": 0.2, "the best": 0.37, "a last": 0.1}
    rules = [Floor(n, n, made_up_score(a), made_up_score(a)) for n, a in scores.items()]
    records = seeds("luna", 0.37, 0.371, 0.37)
    data = Data("our_files", "files", records[0].data["fingerprint"], {"val": 2000, "test": 2000})
    elsewhere = dataclasses.replace(data, fingerprint="f" * 64, kind="generated")
    partial = dataclasses.replace(elsewhere, kind="partial")
    floors = [Floors("listops", data, rules), Floors("text", elsewhere, rules[:1]),
              Floors("image", partial, rules)]  # fmt: skip
    board = build(records, floors=floors)
    assert board.notes == ["floors of image left out: partial data"]
    text = tables.markdown(board)
    whole, *by_task = text.partition("## Without long range\n")[2].split("### Rules on ")
    figures = ["15.00 ± 0.80", "20.00 ± 0.89", "37.00 ± 1.08", "10.00 ± 0.67"]
    assert markdown_rows(whole) == [
        ["Rule or model", "Reach", "ListOps", "Text"],
        ["the first", "", figures[0], "15.00 ± 0.80 (generated)"],
        ["a classifier (tried 1, 2)", "", figures[1], ""],
        ["the best", "", figures[2], ""],
        ["a last", "", figures[3], ""],
    ]
    assert re.findall(r"\*\*(.*?)\*\*", whole) == ["15.00 ± 0.80 (generated)", figures[2]]
    assert [markdown_rows(part) for part in by_task] == [
        [
            ["Rule", "Val", "Test", "Rows above, of 1"],
            *([n, f, f, "01"[scores[n] < 0.3]] for n, f in zip(scores, figures, strict=True)),
            ["Model", "Variant", "Recipe", "Seed", "Test", "Only the run", "Only the rule", "p"],
            ["luna", "", "nystromformer", "0", "37.00", "0", "0", "1"],
            ["luna", "", "nystromformer", "1", "37.10", "2", "0", "0.5"],
            ["luna", "", "nystromformer", "2", "37.00", "0", "0", "1"],
        ],
        [["Rule", "Val", "Test"], ["the first", figures[0], figures[0]]],
    ]
    assert "Data: our_files.\n" in by_task[0] and "Data: our_files (generated).\n" in by_task[1]
    # README names two of four, without what was tried.
    assert "a last" not in tables.measured_section(build(records, floors=floors))
    assert "Without long range" not in tables.markdown(build(records))


def test_a_mark_says_that_a_score_is_not_above_every_rule() -> None:
    score = made_up_score(0.37)
    rule = Floor("first_token", "the first", score, score)
    lucky = Floor("lucky", "the best on validation", made_up_score(0.99), made_up_score(0.1))
    hits_N = np.arange(2000) < 740

    def cell(*gains: int, lost: int = 0, status: str = "completed") -> Cell:
        """Seeds that are right on so many more examples than the rule, and wrong on `lost`."""
        records = []
        for seed, more in enumerate(gains):
            correct_N = hits_N | (np.arange(2000) >= 2000 - more)
            correct_N[:lost] = False
            accuracy = float(correct_N.mean())
            records.append(
                make_record(seed=seed, accuracy=accuracy, correct=correct_N, status=status)
            )
        data = Data("s", "files", records[0].data["fingerprint"], {"val": 2000, "test": 2000})
        (row,) = build(records, floors=[Floors("listops", data, [rule, lucky])]).rows
        return row.cells["listops"]

    assert "b" in cell(0).marks and "b" in cell(0, lost=50).marks
    assert "b" in cell(7).marks and "b" not in cell(8).marks  # p = 0.016 and 0.008
    assert "b" in cell(20, lost=8).marks and "b" not in cell(30, lost=8).marks  # 0.04, 0.0005
    # Of several seeds the majority counts, once for each example.
    assert "b" in cell(7, 7, 7).marks and "b" in cell(0, 0, 99).marks
    assert "b" in cell(0, 99).marks and "b" not in cell(0, 8, 8).marks
    assert "b" in cell(50, status="at_chance").marks
    # A vote that is above does not lift seeds whose mean is below.
    low = []
    for seed in range(3):
        lost_N = (np.arange(2000) % 3 == seed) & (np.arange(2000) < 740)
        correct_N = (hits_N | (np.arange(2000) >= 1900)) & ~lost_N
        low.append(make_record(seed=seed, accuracy=float(correct_N.mean()), correct=correct_N))
    assert Cell(tuple(low)).mean < 37 and Cell(tuple(low)).is_above(rule) is False
    row = Row("luna", "nystromformer", "", {"listops": cell(0)})
    assert ("b", MARKS["b"]) in tables.footnotes([row])
    assert "b" not in Cell(cell(0).runs).marks  # no rules were measured


def test_models_of_bounded_reach_stand_beside_the_rules_with_their_reach() -> None:
    near = [dataclasses.replace(r, reach=[7, 7]) for r in seeds("conv", 0.3)]
    far = [dataclasses.replace(r, reach=[1, 2]) for r in seeds("conv", 0.4, task="text")]
    text = tables.markdown(build([*near, *far, *seeds("luna", 0.5)]))
    section = text.partition("## Without long range\n")[2].partition("##")[0]
    assert markdown_rows(section) == [
        ["Rule or model", "Reach", "ListOps", "Text"],
        ["conv, nystromformer", "ListOps 7 a layer, 14 in all; Text 1 + 2 a layer, 3 in all",
         "30.00 (1)", "40.00 (1)"],
    ]  # fmt: skip


def made_up_score(accuracy: float) -> Score:
    correct_N = np.arange(2000) < round(2000 * accuracy)
    return Score(accuracy, 2000, pack_correct(correct_N))


def test_a_half_rounds_up() -> None:
    assert [percent(v) for v in (2.675, 49.985, 71.3949, None)] == ["2.68", "49.99", "71.39", ""]


def test_a_task_of_ones_own_has_a_column_after_the_six() -> None:
    six = [make_record(task) for task in TASKS]
    before = build(six)
    board = build([*six, make_record("digitsum", accuracy=0.875)])
    header, cells = markdown_rows(tables.measured_section(board))[:2]
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


def test_readme_leaves_out_empty_columns_and_reasons() -> None:
    records = seeds("luna", 0.50, 0.51, 0.52) + seeds("softmax", 0.30, 0.31, 0.32)
    records.append(make_record("text", apples_to_apples=False, why_not=["too wide"]))
    board = build(records)
    text, whole = tables.readme_section(board), tables.measured_section(board)
    assert text.splitlines()[2] == "| Model | ListOps | Text | Params |"
    assert "**51.00 ± 1.00 (3)**" in text and "**51.00 ± 1.00 (3)**" in whole
    assert "- [a] not apples to apples\n" in text and "too wide" in whole
    assert tables.readme_section(build([])) == tables.measured_section(build([]))


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
    assert tables.measured_section(build(records)).split("\n\n")[1] == (
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
    record = dataclasses.replace(
        record, config=record.config | {"init_from": "outputs/a"}, overrides=["init_from=outputs/a"]
    )
    assert setting_text(record) == "init_from=outputs/a"
    other_yaml = dataclasses.replace(record, overrides=["model=my_luna", "task=listops"])
    assert setting_text(other_yaml) == "model=my_luna"


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
    assert "real pixels" in task_table([], load_published(), "image", "")
    assert "real pixels" not in task_table([], load_published(), "text", "")
    both = task_table([this, make_record(accuracy=0.37)], load_published(), "listops", this.run_id)
    assert "37.13 ± 0.18 (2)" in both
    reduced = make_record(budget="reduced")
    assert "reduced budget, no result of the benchmark" in task_table(
        [reduced], (), "listops", reduced.run_id
    )


def real_pixels(*args: Any, **fields: Any) -> Record:
    """A run whose recipe, not the command line, reads pixels as real numbers."""
    record = make_record(*args, **fields, overrides={"shape.input": "real"})
    return dataclasses.replace(record, overrides=record.overrides[:-1])


def test_real_pixels_are_marked_in_every_table() -> None:
    records = [real_pixels("image", "softmax"), make_record("listops", "softmax"),
               make_record("image"), real_pixels("image", budget="reduced")]  # fmt: skip
    assert [r.inputs for r in records] == ["real", "ids", "ids", "real"]
    board = build(records)
    luna, softmax = sorted(board.rows, key=lambda r: r.model)
    assert (luna.inputs, softmax.inputs) == ("ids", "real")
    assert (softmax.cells["image"].marks, softmax.cells["listops"].marks) == ("p", "")
    text = tables.markdown(board)
    assert "| 42.00 (1) [p] |" in text and "- [p] pixels read as real numbers" in text
    assert text.count("[p]") == 2 and "| real pixels |" in text.partition("## Not in")[2]
    rows = {r["model"]: r for r in csv.DictReader(io.StringIO(tables.csv_text(board)))}
    assert (rows["softmax"]["inputs"], rows["softmax"]["image_marks"]) == ("real", "p")
    assert (rows["luna"]["inputs"], rows["luna"]["image_marks"]) == ("ids", "")
    speed = {tuple(line[:2]): line[3] for line in efficiency.runs_table(board.rows).rows}
    assert (speed["Image", "softmax"], speed["ListOps", "softmax"]) == ("real pixels", "")
    tex = latex.leaderboard(board)
    assert r"42.00 & \textsuperscript{p}" in tex and r"\textsuperscript{p}~pixels read as" in tex
    text = papers.paper_markdown(papers.PAPERS[2], load_published(), board.rows)
    assert "| softmax |  | measured | real |" in text and "- [p] pixels read as real" in text
    for run_id, said in (
        ("", "measured here"),
        (records[0].run_id, "this run, 95 % interval 41.0"),
    ):
        shown = task_table(records[:1], load_published(), "image", run_id).splitlines()[2]
        assert said in shown and shown.endswith(", real pixels")
    assert not any("[p]" in tables.markdown(build([r])) for r in records[1:3])


def test_real_pixels_are_never_bold_beside_ids() -> None:
    high = [real_pixels("image", "s4d", s, 0.9) for s in range(2)]
    low = seeds("luna", 0.5, 0.5, task="image")
    lowest = seeds("softmax", 0.4, 0.4, task="image")
    assert bold(high + low) == []  # one of ids, so nothing to rank it with
    assert bold(high + low + lowest) == ["50.00 ± 0.00 (2)"]
    assert bold([real_pixels("image", "s5", s, 0.6) for s in range(2)] + high) == [
        "90.00 ± 0.00 (2) [p]"
    ]


def test_keys_that_came_later_tell_no_rows_apart() -> None:
    old = make_record("listops", "softmax")
    new = make_record("listops", "softmax", overrides={"train.lr": 0.01})
    groups = {"norm": {"lr": None, "weight_decay": None}}
    new.config["shape"] |= {"norm_kind": "layer", "rotary_theta": 10000.0}
    new.config["train"] |= {"groups": groups}
    assert sorted(r.variant for r in build([old, new]).rows) == ["lr=0.0001", "lr=0.01"]
    new.config["shape"]["rotary_theta"] = 100.0
    assert "rotary_theta=100.0, lr=0.01" in [r.variant for r in build([old, new]).rows]


def test_rows_and_columns_of_pixels_are_marked_and_never_bold() -> None:
    change = {"shape.positions": "rotary_2d"}
    high = [make_record("image", "luna", s, 0.9, overrides=change) for s in range(2)]
    low, lowest = (seeds(m, a, a, task="image") for m, a in (("softmax", 0.5), ("s4d", 0.4)))
    text = tables.markdown(build(high))
    assert "90.00 ± 0.00 (2) [c]" in text and "- [c] rows and columns of pixels" in text
    assert bold(high + low + lowest) == ["50.00 ± 0.00 (2)"]


def test_protocol_of_val_on_test_is_marked() -> None:
    record: Record = make_record("text", protocol=Protocol("files", "full", "test", "last", 4000))
    assert build([record]).rows[0].cells["text"].marks == "t"
