"""Figures from probes: which runs, what is drawn, zeros and reach, the same bytes twice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lra.results import figures, probe_figures
from lra.results.floors import Data, Floor, Floors, Score
from lra.results.leaderboard import Options
from lra.results.probes import Probes
from lra.results.records import pack_correct
from tests.made_up import make_probes, make_record

needs_matplotlib = pytest.mark.skipif(bool(figures.unavailable()), reason="matplotlib is missing")
RECORD = make_record()


def test_probes_go_with_a_record_of_the_same_run_and_data() -> None:
    probes = make_probes(RECORD)
    found = probe_figures.beside_records([probes], [make_record("text"), RECORD], Options())
    assert found == ([(probes, RECORD)], [])
    strangers = [replace(probes, run_id="x"), replace(probes, fingerprint="x")]
    runs, messages = probe_figures.beside_records(strangers, [RECORD], Options())
    assert runs == [] and messages == [
        f"probes/{p.run_id}.json: no record of this run on the same data; not drawn"
        for p in strangers
    ]
    for options in (Options(tasks=("text",)), Options(models=("conv",)), Options(recipe="lra")):
        assert probe_figures.beside_records([probes], [RECORD], options) == ([], [])


def test_of_two_records_of_a_run_the_one_with_a_result_counts() -> None:
    stopped = replace(make_record(status="interrupted"), finished_at="2099-01-01T00:00:00+00:00")
    assert stopped.run_id == RECORD.run_id and stopped.result is None
    for records in ([RECORD, stopped], [stopped, RECORD]):
        runs, messages = probe_figures.beside_records([make_probes(RECORD)], records, Options())
        assert [record for _, record in runs] == [RECORD] and messages == []


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"data": "synthetic"}, "synthetic data"),
        ({"data": "partial"}, "partial data"),
        ({"status": "failed"}, "failed"),
    ],
)
def test_probes_of_what_is_no_result_are_named_and_not_drawn(
    fields: dict[str, Any], why: str
) -> None:
    record = make_record(**fields)
    runs, (message,) = probe_figures.beside_records([make_probes(record)], [record], Options())
    assert runs == [] and message == (
        f"probes/{record.run_id}.json: of a run that is no result ({why}); not drawn"
    )
    short = make_record(budget="reduced")
    assert probe_figures.beside_records([make_probes(short)], [short], Options())[1] == []


@needs_matplotlib
def test_both_figures_of_a_task_are_the_same_bytes_twice() -> None:
    runs = [(make_probes(RECORD, reach=4), RECORD)]
    drawn = probe_figures.draw(runs)
    names = [f"{f}_listops.{kind}" for f in ("windows", "influence") for kind in ("svg", "png")]
    assert sorted(drawn) == sorted(names) and drawn == probe_figures.draw(runs)
    captions = [figures.caption(drawn[f"{f}_listops.svg"]) for f in ("windows", "influence")]
    assert all("ListOps" in c and "one standard error" in c for c in captions)
    assert probe_figures.draw([]) == {}
    bare = replace(runs[0][0], windows=[], shuffles=[], influence=[])
    assert probe_figures.draw([(bare, RECORD)]) == {}


@needs_matplotlib
def test_windows_are_drawn_between_chance_the_best_rule_and_the_run_itself() -> None:
    scores = [Score(a, 2000, pack_correct(np.arange(2000) < 2000 * a)) for a in (0.2, 0.3)]
    rules = [Floor(f"r{s.accuracy}", f"rule {s.accuracy}", s, s) for s in scores]
    data = Data("s", "files", RECORD.data["fingerprint"], {"val": 2000, "test": 2000})
    floors = [Floors("listops", data, rules)]
    probes = make_probes(RECORD)
    figure = probe_figures.by_window("listops", [(probes, RECORD)], floors)
    windows, shuffles = figure.axes
    for axes, kinds in ((windows, probe_figures.PLACES), (shuffles, probe_figures.KINDS)):
        bars = {c.get_label(): c.lines[0].get_xydata().tolist() for c in axes.containers}
        assert list(bars) == list(kinds.values())
        heights = [line.get_ydata()[0] for line in axes.get_lines() if len(line.get_xdata()) == 2
                   and list(line.get_xdata()) == [0, 1]]  # fmt: skip
        assert heights == pytest.approx([100 * probes.accuracy, 30, 20])
    first = [[w.size, 100 * w.accuracy] for w in probes.windows if w.place == "first"]
    drawn = next(c for c in windows.containers if c.get_label() == probe_figures.PLACES["first"])
    assert drawn.lines[0].get_xydata().tolist() == first
    assert windows.get_title() == "luna, seed\u00a00: 37.00 %"
    assert windows.get_ylim() == shuffles.get_ylim()


@needs_matplotlib
def test_exact_zeros_stand_on_a_line_marked_0_and_reach_is_a_line() -> None:
    def axes_of(probes: Probes) -> Any:
        return probe_figures.by_distance("listops", [(probes, RECORD)]).axes[0]

    axes = axes_of(make_probes(RECORD, reach=4))
    lines = {str(line.get_label()): line for line in axes.get_lines()}
    height = dict(
        zip([t.get_text() for t in axes.get_yticklabels()], axes.get_yticks(), strict=True)
    )
    x, y = lines["outputs at this distance"].get_data()
    assert list(x) == [0.5, 1, 2, 4, 8, 16]
    assert list(y[-2:]) == [height["0"]] * 2 and 0 < height["0"] < height["0.01"] < min(y[:4])
    assert list(lines["reach of all layers together"].get_xdata()) == [4, 4]
    assert "reach 4" in axes.get_title()
    everywhere = axes_of(make_probes(RECORD))
    assert "0" not in [t.get_text() for t in everywhere.get_yticklabels()]
    assert "reach" not in everywhere.get_title() + str([t.get_label() for t in everywhere.lines])


def test_runs_are_named_by_what_tells_them_apart() -> None:
    changed = make_record(seed=3, overrides={"shape.num_heads": 4})
    other = make_record(recipe="lra")
    runs = [(make_probes(r), r) for r in (RECORD, changed)]
    assert probe_figures.labels(runs) == ["luna, seed\u00a00", "luna (num_heads=4), seed\u00a03"]
    both = probe_figures.labels([*runs[:1], (make_probes(other), other)])
    assert both == ["luna (nystromformer), seed\u00a00", "luna (lra), seed\u00a00"]
    folder = "/home/somebody/a-folder/with/a/long/name/outputs/listops-luna-seed0-0123abcd"
    for path in (folder, f"{folder}/", f"{folder}/checkpoints/step-100.pt"):
        goes_on = replace(RECORD, overrides=[f"init_from={path}"])
        (title,) = probe_figures.labels([(make_probes(goes_on), goes_on)])
        assert title == "luna (init_from=listops-luna-seed0-0123abcd),\nseed\u00a00"
