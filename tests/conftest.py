"""Options and reports shared by all tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
import torch

torch.set_num_threads(1)  # the tensors of tests are too small for more to pay


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    """A stopped run ignores SIGTERM from then on, which whatever starts later would inherit."""
    before = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--golden-dir",
        metavar="DIR",
        help="check the models against every golden file (*.npz) of this folder",
    )


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print what the golden tests measured, one line a file and precision, if asked for them."""
    if not config.getoption("--golden-dir") and not any("golden" in arg for arg in config.args):
        return
    lines = [
        str(value)
        for outcome in ("passed", "failed")
        for report in terminalreporter.getreports(outcome)
        for name, value in report.user_properties
        if name == "golden"
    ]
    if lines:
        terminalreporter.section("golden files: largest difference of outputs, of gradients")
        for line in sorted(lines):
            terminalreporter.write_line(line)
