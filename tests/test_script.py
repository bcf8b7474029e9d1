"""Scripts whose reader has gone, such as `head`, end at once, without a word and nothing broken."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from lra import script
from lra.console import print_line
from tests import programs


@pytest.mark.parametrize(
    "command",
    [
        "records.py list",
        "make_tables.py --check --no-figures",
        "inspect_model.py model=luna --lengths=64",
        "prepare_data.py task=text task.source=synthetic",
    ],
)
def test_nobody_reads_on(tmp_path: Path, command: str) -> None:
    script, *words = command.split()
    (tmp_path / "results" / "runs").mkdir(parents=True)
    read_end, write_end = os.pipe()
    os.close(read_end)
    program = programs.start(f"scripts/{script}", *words, cwd=tmp_path, stdout=write_end)
    os.close(write_end)
    _, err = program.communicate(timeout=60)
    assert program.returncode == 141
    assert "rror" not in err and "Traceback" not in err


def test_a_line_that_nobody_reads_is_lost_and_nothing_else() -> None:
    read_end, write_end = os.pipe()
    with open(write_end, "w") as stream:
        print_line("first", stream)
        assert os.read(read_end, 100) == b"first\n"
        os.close(read_end)
        print_line("second", stream)  # and closing, which writes what is left, does not raise


def test_what_an_encoding_lacks_is_escaped_also_in_a_process_that_another_started(
    tmp_path: Path,
) -> None:
    """Such as a job of a launcher, or one of several processes of a run."""
    place = tmp_path / "said"
    with place.open("w", encoding="ascii") as stream:
        print_line("/data/größe", stream)
    assert place.read_text() == "/data/gr\\xf6\\xdfe\n"


def test_closed_output_is_read_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `>&- 2>&-` leaves it."""
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    with pytest.raises(SystemExit) as left:
        script.run_script(lambda: print(sys.stderr.isatty()))
    assert left.value.code is None and os.get_inheritable(sys.stdout.fileno())
    for stream in (sys.stdout, sys.stderr):
        stream.close()
