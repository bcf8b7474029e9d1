"""Signals that ask a run to stop, remembered until it can stop without loss."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from lra.console import print_line
from lra.script import EXIT_INTERRUPTED

PATIENCE_S = 2.0  # in which signals after the first count as the same one
# How long a training may stay inside one operation after a signal: a step or a write may take this
# long, and schedulers that warn give as much; beyond it, it waits for something that is gone.
STUCK_S = 60.0
STUCK_EARLY_S = 1.0  # the same before the training, when there is nothing to save
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Interrupted(Exception):
    """A signal, named in `cause`, or the time limit asked the run to stop; its state is saved."""

    def __init__(self, message: str, cause: str | None = None) -> None:
        super().__init__(message)
        self.cause = cause


class _Stop:
    """Remembers the first wish to stop; `check` turns it into an exception where that is safe."""

    requested: str | None = None
    requested_at = 0.0
    signalled_at: float | None = None  # when the first signal came

    def request(self, why: str) -> None:
        if self.requested is None:
            self.requested, self.requested_at = why, time.monotonic()

    def check(self, after_s: float = 0.0) -> None:
        if self.requested and time.monotonic() - self.requested_at >= after_s:
            raise Interrupted(f"stopped by {self.requested}", self.requested)


@contextlib.contextmanager
def stop_on_signals() -> Iterator[_Stop]:
    """Catch SIGINT, SIGTERM, a closed terminal's SIGHUP, and USR1 and USR2, schedulers' warnings.

    The same wish often comes twice, to a group and from a parent, so repeats are left out at first,
    SIGINT's after the end too; and once a signal has come TERM, HUP and USR1 are ignored, so that
    the record can be written.
    """
    stop = _Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {s: signal.getsignal(s) for s in SIGNALS}
    if before[signal.SIGHUP] == signal.SIG_IGN:  # nohup: a closed terminal is no reason to stop
        del before[signal.SIGHUP]

    def remember(number: int, _frame: object) -> None:
        if number == signal.SIGHUP:
            discard_output()
        stop.request(signal.Signals(number).name)
        if stop.signalled_at is None:  # a time limit is no signal, of which this were a repeat
            stop.signalled_at = time.monotonic()
        elif time.monotonic() - stop.signalled_at > PATIENCE_S:
            signal.signal(number, before[signal.Signals(number)])
            os.kill(os.getpid(), number)

    for s in before:
        signal.signal(s, remember)
    watch_no_more = end_if_stuck(STUCK_S)
    try:
        yield stop
    finally:
        watch_no_more()
        was_signalled = stop.signalled_at is not None  # a time limit leaves other jobs to run
        for s, handler in before.items():
            if was_signalled and s in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
                signal.signal(s, signal.SIG_IGN)
            elif not (was_signalled and s == signal.SIGINT):
                signal.signal(s, handler)


def discard_output() -> None:
    """Writing to a terminal that is gone would fail; run.log has the lines."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        with contextlib.suppress(OSError):
            if stat.S_ISCHR(os.fstat(stream).st_mode):
                os.dup2(nowhere, stream)
    os.close(nowhere)


def end_if_stuck(after_s: float) -> Callable[[], None]:
    """From now on, end the process when it is in one operation for `after_s` after a signal.

    Python runs its handlers between instructions, so inside a library that waits for a device, a
    disk or another process a signal would have no effect. Only the main thread may call this, and
    the function that it returns, which ends the watch.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    over = threading.Event()

    def watch() -> None:
        with os.fdopen(reading, "rb", buffering=0) as arrived:
            while number := arrived.read(1):
                if number[0] in SIGNALS and not over.is_set():
                    _end_once_stuck(signal.Signals(number[0]).name, after_s, over)

    def watch_no_more() -> None:
        over.set()
        signal.set_wakeup_fd(before)
        os.close(writing)

    threading.Thread(target=watch, name="signals", daemon=True).start()
    return watch_no_more


def _end_once_stuck(name: str, after_s: float, over: threading.Event) -> None:
    main = threading.main_thread().ident or 0
    place, since = None, time.monotonic()
    while not over.wait(min(0.25, after_s / 4)):
        frame = sys._current_frames().get(main)
        if frame is None:
            return
        if (frame, frame.f_lasti) != place:
            place, since = (frame, frame.f_lasti), time.monotonic()
        elif time.monotonic() - since >= after_s:
            here = Path(__file__).parent.parent
            while frame.f_back and here not in Path(frame.f_code.co_filename).parents:
                frame = frame.f_back
            where = f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}"
            print_line(
                f"stopped by {name} without saving: nothing came back within {after_s:g} s in "
                f"{where} (another process, the device or the disk); the same command goes on "
                "from the last checkpoint",
                sys.stderr,
            )
            os._exit(EXIT_INTERRUPTED)
