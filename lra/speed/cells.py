"""A measurement in a process of its own, so that its peak memory is its own and it may fail alone.

The request is JSON on standard input: `config` (a run's config as plain values) with the arguments
of `measure.measure`, with `breakdown` those of `breakdown.breakdown`, with `limits` those of
`limits.machine_limits`; or `configs` by name with those of `measure.step_times` or, with
`at_a_time`, of `forecast.print_forecasts`. The answer is JSON lines on standard output: `hardware`
first (not of forecasts), so that a process which is ended from outside has at least said where it
ran.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lra.config import RunConfig
from lra.speed.benchmarks import Measurement, Status
from lra.values import fill

ROOT = Path(__file__).resolve().parent.parent.parent
REFUSED = 2
LIMIT_S = 3600.0  # a cell takes minutes; a device that hangs takes for ever
# The timer of measure.py, and the kernel's way to say that memory ran out.
ENDED_BY: dict[int, Status] = {-signal.SIGALRM: "too_slow", -signal.SIGKILL: "out_of_memory"}


class CellFailed(Exception):
    """The process ended with an error of its own; the message is what it printed."""


def in_own_process(request: dict[str, Any]) -> dict[str, Any]:
    """Run this module in a fresh process and return its answer; how it ended decides its status.

    Raises:
        ValueError: the hardware is not there, or cannot compute in the precision asked for.
        CellFailed: it failed in another way.
    """
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    try:
        done = subprocess.run(
            [sys.executable, "-m", "lra.speed.cells"],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": paths.rstrip(os.pathsep)},
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        raise CellFailed(f"no answer within {LIMIT_S / 60:g} minutes") from None
    answer: dict[str, Any] = {}
    for line in done.stdout.splitlines():
        answer |= json.loads(line) if line.startswith("{") else {}
    if done.returncode in ENDED_BY:
        return answer | {"measured": asdict(Measurement(ENDED_BY[done.returncode]))}
    if done.returncode == REFUSED:
        raise ValueError(done.stderr.strip().splitlines()[-1])
    if done.returncode:
        raise CellFailed(done.stderr.strip() or f"exit code {done.returncode}")
    return answer


def main() -> None:
    """In the process: read the request, print the answer."""
    request: dict[str, Any] = json.load(sys.stdin)
    given = request.pop("configs", None) or {"": request.pop("config")}
    configs = {name: fill(RunConfig, values) for name, values in given.items()}
    config = next(iter(configs.values()))
    if "at_a_time" in request:
        from lra.speed.forecast import print_forecasts

        print_forecasts(configs, **request)
        return

    from lra.training.hardware import Hardware

    try:
        hardware = Hardware(config.hardware)
    except ValueError as error:
        print(error, file=sys.stderr)
        sys.exit(REFUSED)
    described = hardware.describe(config.hardware.micro_batch_size)
    print(json.dumps({"hardware": described}), flush=True)
    if request.pop("breakdown", False):
        from lra.speed.breakdown import breakdown

        print(json.dumps(breakdown(config, hardware, **request)))
        return
    if request.pop("limits", False):
        from lra.speed.limits import l2_bytes, machine_limits

        found = machine_limits(**request) if hardware.device.type == "cpu" else []
        print(json.dumps({"limits": [asdict(rates) for rates in found], "l2_bytes": l2_bytes()}))
        return
    from lra.speed.measure import measure, step_times

    if "num_rounds" in request:
        print(json.dumps({"times": step_times(configs, hardware, **request)}))
    else:
        print(json.dumps({"measured": asdict(measure(config, hardware, **request))}))


if __name__ == "__main__":
    main()
