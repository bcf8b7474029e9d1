"""Scripts whose reader has gone, such as `head`, end at once, without a word and nothing broken."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

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
