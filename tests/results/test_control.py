"""Runs with self-pretraining: apart from those from scratch, beside their compute-tied controls."""

from __future__ import annotations

import csv
import dataclasses
import io
from pathlib import Path
from typing import Any

import pytest

from lra import messages
from lra.cli import compose_config, typed
from lra.plan import Reference, make_plan, protocol_of
from lra.results import figures, latex, report, tables
from lra.results.control import control_command, phase_text
from lra.results.leaderboard import Options, build
from lra.results.published import load_published
from lra.results.records import Record
from lra.results.settings import setting_text
from lra.results.task_table import task_table
from tests.made_up import make_record, markdown_rows

TWICE = {"train.num_steps": 10000, "train.warmup_steps": 300}
needs_matplotlib = pytest.mark.skipif(bool(figures.unavailable()), reason="matplotlib is missing")


def pretrained(seeds: int = 2, accuracy: float = 0.9, **fields: Any) -> list[Record]:
    return [make_record(seed=s, accuracy=accuracy, pretrain="masked", **fields)
            for s in range(seeds)]  # fmt: skip


def scratch() -> list[Record]:
    """Two models; one also with twice the steps, the control, and one seed of it more."""
    return [
        *(make_record(model=m, seed=s, accuracy=a)
          for m, a in (("luna", 0.4), ("softmax", 0.3)) for s in range(2)),
        *(make_record(seed=s, accuracy=0.5, overrides=TWICE) for s in range(3)),
    ]  # fmt: skip


def test_they_stand_in_a_section_of_their_own_and_change_no_other() -> None:
    board, without = build([*scratch(), *pretrained()], load_published()), build(scratch())
    assert tables.measured_section(board) == tables.measured_section(without)
    assert [r.variant for r in board.rows] == [r.variant for r in without.rows]
    section = tables.markdown(board).partition("## Self-pretraining\n")[2].partition("As pub")[0]
    assert markdown_rows(section)[1] == [
        "ListOps", "luna", "90.00 ± 0.00 (2) [a,s]", "50.00 ± 0.00 (3)", "+40.00",
        "+37.85 to +42.15", "+40.00 to +40.00", "masked 10 %, 5,000 steps of 32: val loss 1.250, "
        "accuracy 61.0 %", "nystromformer",
    ]  # fmt: skip
    readme = tables.readme_section(board).partition("### Self-pretraining\n")[2]
    assert markdown_rows(readme) == markdown_rows(section)
    assert "- [s] self-pretrained" in readme and "pretrain=masked" not in readme
    assert "**" not in section and "- [s] self-pretrained, which the arena forbids" in section
    assert "on ListOps: pretrain=masked: the arena allows none" in section

    whole = tables.markdown(board)
    order = ["## Measured here", "## Self-pretraining", "As published:", "## Published"]
    assert [line for line in whole.splitlines() if line in order] == order
    theirs = whole.partition("As published:")[2].partition("## Published")[0]
    assert (
        "SPT" in theirs and "SPT" not in whole.partition("## Published")[2].partition("### Err")[0]
    )
    assert "### Self-pretraining" in tables.markdown(build(scratch(), load_published()))


def test_their_csv_lines_are_of_other_kinds() -> None:
    board = build([*scratch(), *pretrained()])
    lines = list(csv.DictReader(io.StringIO(tables.csv_text(board))))
    assert [line["kind"] for line in lines] == ["measured"] * 3 + ["self-pretrained", "control"]
    ours, control = lines[3:]
    assert (ours["family"], ours["listops_percent"], ours["difference"]) == (
        "self-pretraining", "90", "40",
    )  # fmt: skip
    assert float(ours["examples_low"]) == pytest.approx(37.85, abs=0.01)
    assert (control["family"], control["listops_percent"], control["pretraining"]) == ("", "50", "")
    assert "pretraining" not in tables.csv_text(build(scratch()))


def test_latex_has_a_float_for_them() -> None:
    tex = latex.leaderboard(build([*scratch(), *pretrained(), *pretrained(accuracy=0.1,
                            overrides={"shape.num_heads": 4})]))  # fmt: skip
    own = tex.partition(r"\label{tab:leaderboard-self-pretraining}")[2]
    assert own and r"\textbf" not in own and own.count("90.00") == 1
    assert r" 50.00 & $\pm$ 0.00 (3) \\" in own and r"$+$40.00 & $\pm$ 2.15, 0.00 \\" in own
    assert "control to be run: python run.py -m model=luna task=listops shape.num" in own
    assert tex.startswith(latex.leaderboard(build(scratch())).partition(r"\ifdefined")[0])


def test_bold_is_among_rows_from_scratch_alone() -> None:
    text = tables.measured_section(build([*scratch()[:4], *pretrained()]))
    assert "**40.00 ± 0.00 (2)**" in text and "**90" not in text


@pytest.mark.parametrize(
    ("changes", "fits"),
    [
        ({}, True),
        ({"train.warmup_steps": 17, "train.eval_every": 9}, True),
        ({"train.log_every": 1}, True),
        ({"train.num_steps": 9999}, False),
        ({"train.batch_size": 16}, False),
        ({"train.lr": 1e-3}, False),
        ({"shape.num_heads": 4}, False),
        ({"model.projection_length": 64}, False),
        ({"task.max_length": 1000}, False),
    ],
)
def test_a_control_differs_in_its_steps_only(changes: dict[str, Any], fits: bool) -> None:
    control = make_record(accuracy=0.5, overrides={"train.num_steps": 10000} | changes)
    (pair,) = build([control, *pretrained(1)]).pretrained
    assert (pair.control is not None) == fits
    elsewhere = dataclasses.replace(control, data=control.data | {"fingerprint": "f" * 64})
    other = [elsewhere, make_record(model="softmax", overrides=TWICE)]
    (pair,) = build([*other, *pretrained(1)]).pretrained
    assert pair.control is None and pair.points == [None] * 5


def test_of_two_controls_the_one_with_more_seeds_in_common_counts() -> None:
    one = [make_record(seed=s, overrides=TWICE) for s in (0, 5, 6, 7)]
    two = [make_record(seed=s, overrides=TWICE | {"train.eval_every": 7}) for s in (0, 1)]
    (pair,) = build([*one, *two, *pretrained()]).pretrained
    assert pair.control_cell and pair.control_cell.runs == tuple(two)
    (pair,) = build([*one[1:], *pretrained()]).pretrained
    assert pair.control and pair.points == [None] * 5  # no seed in common


def test_a_missing_control_is_told_by_its_command() -> None:
    short = {"pretrain.num_steps": 1001, "pretrain.batch_size": 8, "train.num_steps": 500}
    (record,) = pretrained(1, overrides=short | {"paths.data": "d", "train.lr": 0.5})
    # 1001 x 8 examples are 250.25 steps of 32.
    command = "python run.py model=luna task=listops paths.data=d train.lr=0.5 train.num_steps=751"
    assert control_command([record]) == command
    assert f"to be run: {command}" in tables.markdown(build([record]))
    record = dataclasses.replace(record, seed=3, overrides=["+pretrain=next", "experiment=x"])
    command = "python run.py -m model=luna task=listops experiment=x train.num_steps=751 seed=3,4"
    assert control_command([record, dataclasses.replace(record, seed=4)]) == command


def test_settings_of_the_first_phase_share_no_cell() -> None:
    more = {"pretrain.num_steps": 7000}
    records = [*pretrained(), *pretrained(1, overrides=more),
               make_record("text", pretrain="next")]  # fmt: skip
    pairs = build(records).pretrained
    assert [(p.task, len(p.cell.runs), p.row.variant) for p in pairs] == [
        ("listops", 2, ""), ("listops", 1, ""), ("text", 1, ""),
    ]  # fmt: skip
    # A loss of 1.25 nats a token; those of Text are bytes.
    assert phase_text(pairs[-1].cell.runs).startswith("next, 20,000 steps of 32: 1.80 bits a byte")
    # Two that differ in how they were trained alone are told apart by their words.
    pairs = build([*pretrained(), *pretrained(overrides={"pretrain.lr": 0.003})]).pretrained
    phase = "masked 10 %, 5,000 steps of 32"
    told = sorted(phase_text(p.cell.runs).partition(":")[0] for p in pairs)
    assert told == [phase, f"{phase}, lr=0.003"]
    reduced = build(pretrained(1, budget="reduced"))
    assert reduced.pretrained == [] and [why for why, _ in reduced.left_out] == ["reduced"]
    few = build(pretrained(1), options=Options(min_seeds=2))
    assert few.pretrained == [] and [why for why, _ in few.left_out] == ["few seeds"]


def test_the_page_shows_them_below_the_leaderboard() -> None:
    records = [*scratch(), *pretrained()]
    board = build(records, load_published())
    text = report.page(board, records, {}, [])
    section = text.partition('<h2 id="self-pretraining">')[2].partition("<h2")[0]
    assert 'href="runs/listops/luna/listops-luna-seed1-' in section and "SPT" in section
    data = report.content(board, records, [])
    assert len(data["rows"]) == 3 and data["pool"].count("Self-pretrained") == 1
    assert "pretrain=masked, before: masked 10 %, 5,000 steps" in "".join(data["pool"])
    evil = [dataclasses.replace(r, model="<b>'\"") for r in pretrained()]
    assert "<b>" not in report.page(build(evil), evil, {}, [])


@needs_matplotlib
def test_their_curves_are_drawn_by_phase_and_never_with_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    board = build([*scratch(), *pretrained()])
    styles = figures.model_styles(["luna"])
    figure = figures.self_pretraining(board.pretrained, styles)
    first, second = ([line.get_xdata() for line in axes.get_lines()] for axes in figure.axes)
    assert [list(x) for x in first] == [[0, 5000]] * 2
    # The second phase goes on where the first ended; the controls begin at 0.
    assert [x[0] for x in second] == [160_000, 160_000, 0, 0, 0]
    monkeypatch.setattr(figures, "encode", lambda *_: b"")
    drawn = figures.draw([], [], (), board.pretrained)
    assert drawn == dict.fromkeys(("self_pretraining.svg", "self_pretraining.png"), b"")
    assert "Below: validation accuracy" in str(figure.get_label())


def test_the_end_of_a_run_names_its_phases_and_its_control(tmp_path: Path) -> None:
    (record,) = pretrained(1)
    assert setting_text(record) == "pretrain=masked"
    told = "\n".join(messages.conclusion(record, tmp_path, []))
    assert "pretrain=masked" in told and "self-pretrained" in told
    assert "phase 1  masked 10 %, 5,000 steps of 32: val loss 1.250, accuracy 61.0 %" in told
    assert "  python run.py model=luna task=listops train.num_steps=10000\n" in told
    assert "phase 1" not in "\n".join(messages.conclusion(make_record(), tmp_path, []))
    (line,) = [li for li in task_table([record], (), "listops", "").splitlines() if "90.00" in li]
    assert line.endswith("measured here, self-pretrained")


def test_a_budget_is_that_of_both_phases() -> None:
    def budget(*words: str) -> str:
        common = ["task=listops", "task.source=synthetic", "train.num_steps=2500"]
        plan = make_plan(typed(compose_config([*common, *words])), reference)
        return protocol_of(plan, {}).budget

    reference = Reference(typed(compose_config(["task=listops"])), {})  # 5,000 steps
    assert budget() == "reduced" and budget("pretrain=masked") == "full"
    assert budget("pretrain=masked", "pretrain.num_steps=2499") == "reduced"
