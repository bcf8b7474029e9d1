"""Time and peak memory of a training step by length: linear where the paper says so.

Measured in the default recipe on one thread, as CPU time, which other work on the machine disturbs
least, and as the peak of a process of its own for each length.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lra.build import make_model, make_task
from lra.cli import compose_config, typed
from models.classifier import Classifier

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = (1024, 2048, 4096, 8192, 16384)
LINEAR = {
    "luna": ["model=luna"],
    "causal luna": ["model=luna", "model.causal=true"],
    "nystromformer": ["model=nystromformer"],
    "fastformer": ["model=fastformer"],
    "linear": ["model=linear"],
    "performer": ["model=performer"],
    "causal performer": ["model=performer", "model.causal=true"],
}
SOFTMAX = ["model=softmax"]

pytestmark = [pytest.mark.slow, pytest.mark.timed]


def build(overrides: list[str]) -> Classifier:
    config = typed(compose_config([*overrides, "task=listops", f"task.max_length={LENGTHS[-1]}"]))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return make_model(config, make_task(config)).train()


def rows(batch_size: int, length: int) -> tuple[Tensor, Tensor]:
    tokens_BSL = torch.randint(1, 16, (batch_size, 1, length))
    return tokens_BSL, torch.full((batch_size, 1), length)


def seconds_per_token(
    overrides: list[str], lengths: tuple[int, ...], *, repeats: int
) -> dict[int, float]:
    """Least CPU time of a step of as many tokens at each length; the lengths take turns."""
    model = build(overrides)
    batches = {n: rows(max(lengths) // n, n) for n in lengths}
    best: dict[int, float] = {}
    for repeat in range(repeats + 1):  # the first one warms up
        for n, batch in batches.items():
            started = time.process_time()
            model(*batch).sum().backward()
            took = (time.process_time() - started) / max(lengths)
            if repeat:
                best[n] = min(took, best.get(n, took))
    return best


def peak_bytes(overrides: list[str], length: int) -> tuple[int, int]:
    """What a step at batch 1 adds to a process's memory at its peak, and all that it then has."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the peak of a process is read from Linux's /proc")
    done = subprocess.run(
        [sys.executable, "-m", "tests.speed.test_linear_cost", str(length), *overrides],
        cwd=ROOT,
        # Every larger tensor gets pages of its own, which go back when it is freed.
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    added, whole = map(int, done.stdout.split())
    return added, whole


def measure(length: int, overrides: list[str]) -> None:
    """Print both figures of `peak_bytes`; run in a process of its own."""

    def status(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(key))

    model = build(overrides)
    model(*rows(1, 16)).sum().backward()  # gradients are there from now on
    batch = rows(1, length)
    ctypes.CDLL(None).malloc_trim(0)
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    model(*batch).sum().backward()
    print(status("VmHWM") - before, status("VmHWM"))


def show(title: str, per_token: dict[int, float], unit: str) -> None:
    print(f"{title}: " + ", ".join(f"{n:,}: {v:,.1f}" for n, v in per_token.items()), unit)


@pytest.mark.parametrize("name", LINEAR)
def test_time_per_token_does_not_grow_with_length(name: str) -> None:
    found = seconds_per_token(LINEAR[name], LENGTHS, repeats=4)
    show(f"time of {name}", {n: 1e6 * s for n, s in found.items()}, "us a token")
    assert found[16384] < 1.15 * found[1024]


def test_time_per_token_of_softmax_grows_with_length() -> None:
    found = seconds_per_token(SOFTMAX, LENGTHS[:3], repeats=2)
    show("time of softmax", {n: 1e6 * s for n, s in found.items()}, "us a token")
    assert found[4096] > 2 * found[1024]


@pytest.mark.parametrize("name", LINEAR)
def test_peak_memory_per_token_does_not_grow_and_the_longest_input_fits(name: str) -> None:
    peaks = {n: peak_bytes(LINEAR[name], n) for n in LENGTHS}
    per_token = {n: added / n for n, (added, _) in peaks.items()}
    show(f"memory of {name}", per_token, "bytes a token")
    print(f"process at 16,384 tokens: {peaks[16384][1] / 2**30:.2f} GiB")
    assert per_token[16384] < 1.15 * per_token[1024]
    assert peaks[16384][1] < 4 * 2**30


if __name__ == "__main__":
    measure(int(sys.argv[1]), sys.argv[2:])
