"""Options and reports shared by all tests."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--golden-dir",
        metavar="DIR",
        help="check the models against every golden file (*.npz) of this folder",
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what the golden tests measured, one line a file and precision."""
    lines = [
        value
        for outcome in ("passed", "failed")
        for report in terminalreporter.getreports(outcome)
        for name, value in report.user_properties
        if name == "golden"
    ]
    if lines:
        terminalreporter.section("golden files: largest difference of outputs, of gradients")
        for line in sorted(lines):
            terminalreporter.write_line(line)
