"""Options and reports shared by all tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator, Iterator
from typing import Any

import pytest
import torch

from tests import programs

costs: dict[str, float] = {}  # processor time of each test, in seconds

torch.set_num_threads(1)  # the tensors of tests are too small for more to pay


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    """A stopped run ignores SIGTERM from then on, which whatever starts later would inherit."""
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
    before = {s: signal.getsignal(s) for s in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--golden-dir",
        metavar="DIR",
        help="check the models against every golden file (*.npz) of this folder",
    )


def processor_time() -> float:
    """Seconds of this process, of those it has waited for and of programs that have ended."""
    used = os.times()
    own = used.user + used.system + used.children_user + used.children_system
    return own + sum(programs.processor_times)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, bool, bool]:
    """Note what a test costs, its fixtures included, whatever else the machine does."""
    before = processor_time()
    result = yield
    costs[item.nodeid] = processor_time() - before
    return result


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker process of pytest-xdist hands on what its tests cost."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["costs"] = costs


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker process has ended; one that was killed leaves nothing."""
    costs.update(getattr(node, "workeroutput", {}).get("costs", {}))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """After many tests, the ten that cost most; what the golden tests measured, if asked for."""
    if len(costs) > 500:
        terminalreporter.section("seconds of processor time")
        for name in sorted(costs, key=costs.__getitem__, reverse=True)[:10]:
            terminalreporter.write_line(f"{costs[name]:6.1f} {name}")
        terminalreporter.write_line(f"{sum(costs.values()):6.1f} all {len(costs):,} tests")
    if not config.getoption("--golden-dir") and not any("golden" in arg for arg in config.args):
        return
    lines = [
        str(value)
        for outcome in ("passed", "failed", "skipped")
        for report in terminalreporter.getreports(outcome)
        for name, value in report.user_properties
        if name == "golden"
    ]
    if lines:
        terminalreporter.section("golden files: largest difference of outputs, of gradients")
        for line in sorted(lines):
            terminalreporter.write_line(line)
