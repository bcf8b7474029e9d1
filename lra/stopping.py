"""Signals that ask a run to stop, remembered until it can stop without loss."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import threading
import time
from collections.abc import Iterator

PATIENCE_S = 2.0  # in which signals after the first count as the same one


class Interrupted(Exception):
    """A signal, named in `cause`, or the time limit asked the run to stop; its state is saved."""

    def __init__(self, message: str, cause: str | None = None) -> None:
        super().__init__(message)
        self.cause = cause


class _Stop:
    """Remembers the first signal; `check` turns it into an exception where that is safe."""

    requested: str | None = None
    requested_at = 0.0

    def check(self) -> None:
        if self.requested:
            raise Interrupted(f"stopped by {self.requested}", self.requested)


@contextlib.contextmanager
def stop_on_signals() -> Iterator[_Stop]:
    """Catch SIGINT, SIGTERM, a closed terminal's SIGHUP, and USR1 and USR2, schedulers' warnings.

    The same wish often comes twice, to a group and from a parent, so repeats are left out at first,
    and once the run has stopped SIGTERM and SIGHUP are ignored, so that the record can be written.
    """
    stop = _Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    before = {s: signal.getsignal(s) for s in signals}
    if before[signal.SIGHUP] == signal.SIG_IGN:  # nohup: a closed terminal is no reason to stop
        del before[signal.SIGHUP]

    def remember(number: int, _frame: object) -> None:
        if number == signal.SIGHUP:
            discard_output()
        if stop.requested is None:
            stop.requested, stop.requested_at = signal.Signals(number).name, time.monotonic()
        elif time.monotonic() - stop.requested_at > PATIENCE_S:
            signal.signal(number, before[signal.Signals(number)])
            os.kill(os.getpid(), number)

    for s in before:
        signal.signal(s, remember)
    try:
        yield stop
    finally:
        for s, handler in before.items():
            is_over = stop.requested and s in (signal.SIGTERM, signal.SIGHUP)
            signal.signal(s, signal.SIG_IGN if is_over else handler)


def discard_output() -> None:
    """Writing to a terminal that is gone would fail; run.log has the lines."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        with contextlib.suppress(OSError):
            if stat.S_ISCHR(os.fstat(stream).st_mode):
                os.dup2(nowhere, stream)
    os.close(nowhere)
