"""What a run says while it works: in its first seconds, and in the middle of long parts."""

from __future__ import annotations

import errno
import io
from pathlib import Path

import pytest

from lra import console
from lra.console import PLAIN_LINE_EVERY_S, Pace, counting
from lra.training import progress
from lra.training.progress import Progress
from lra.training.trainer import train
from tests.toy import Hardware, HardwareConfig, ToyModel, toy_data, train_config


class Clock:
    """A clock that tests set; one reading takes `step` seconds."""

    def __init__(self) -> None:
        self.now, self.step = 0.0, 0.0

    def monotonic(self) -> float:
        self.now += self.step
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (console, progress):
        monkeypatch.setattr(module, "time", clock)
    return clock


def test_plain_lines_come_within_seconds_at_first_and_then_every_15(clock: Clock) -> None:
    pace, due = Pace(), []
    for clock.now in range(1, 120):
        if pace.is_due():
            due.append(clock.now)
    assert due[:5] == [1, 2, 4, 8, 16]
    gaps = [b - a for a, b in zip(due[4:], due[5:], strict=False)]
    assert gaps and set(gaps) == {PLAIN_LINE_EVERY_S}


def test_work_that_is_counted_says_how_far_it_is(clock: Clock) -> None:
    said: list[str] = []
    with counting("  train", 4_000, said.append) as show:
        for done in range(4_000):
            clock.now = done / 100
            show(done)
    assert said[0] == "  train: 100 of 4,000 examples" and 5 <= len(said) <= 7
    with counting("  train", None, said.append, unit="pictures") as show:
        clock.now += 2
        show(7)
    assert said[-1] == "  train: 7 pictures"


def test_the_time_left_of_a_bar_counts_evaluations_too(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten steps of a second and an evaluation of 90 s: what is left takes nine times as long."""
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("tqdm.std.time", lambda: clock.now)
    with Progress().bar(100, 0) as bar:
        for step in range(1, 11):
            clock.now += 1 if step < 10 else 91
            bar.update([{"loss": 2.0, "accuracy": 0.5}], step, 1000.0)
        last = terminal.getvalue().split("\r")[-1]
    assert "10/100 [01:40<15:00" in last and "loss=2.000" in last


def test_a_terminal_that_draws_nothing_gets_plain_lines(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "dumb")
    shown = Progress()
    with shown.bar(100, 0) as bar, shown.counting("validation", 20) as show:
        clock.now += 2
        bar.update([{"loss": 2.0, "accuracy": 0.5}], 1, None)
        clock.now += 2
        show(7)
    assert terminal.getvalue() == ""
    step, examples = capsys.readouterr().out.splitlines()
    assert step.startswith("step      1/100  loss 2.000") and examples.startswith(
        "validation: 7 of"
    )


def test_a_full_disk_under_the_output_leaves_the_log_its_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = io.StringIO()

    def full(_: str) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(output, "write", full)
    monkeypatch.setattr("sys.stdout", output)
    Progress(tmp_path / "run.log").say("a line")
    assert (tmp_path / "run.log").read_text().endswith(" a line\n")
    with pytest.raises(OSError, match="run.log"):
        Progress(tmp_path / "none" / "run.log").say("a line")


def test_a_slow_run_shows_its_first_step_and_how_far_an_evaluation_is(
    tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    """Losses are read every 1,000 steps here, and still the first ones are seen."""
    data = toy_data(tmp_path)
    (tmp_path / "run").mkdir()
    capsys.readouterr()
    clock.step = 5.0
    train(
        ToyModel(), data, train_config(log_every=1000, checkpoint_every=None, batch_size=4),
        Hardware(HardwareConfig(device="cpu", num_threads=1)), seed=0, run_dir=tmp_path / "run",
        identity={}, progress=Progress(),
    )  # fmt: skip
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["step", "1/20", "loss"] and "left" not in lines[0]
    assert any(line.startswith("step     20/20  loss") and "left" in line for line in lines)
    assert any(line.startswith("validation: ") and "of 20 examples" in line for line in lines)
    assert any(line.startswith("test: ") for line in lines)
