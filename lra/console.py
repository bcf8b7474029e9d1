"""What a person reads while a program works: figures, durations, how far something is."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

PLAIN_LINE_EVERY_S = 15.0


def print_line(text: str, stream: TextIO | None = None) -> None:
    """Print to standard output, or `stream`, at once; no work ends because nobody can read of it.

    What a reader that is gone, or a full disk, does not take is lost, and nothing else. What the
    encoding lacks is escaped, also in processes that other programs start for a part of the work.
    """
    stream = stream or sys.stdout
    try:
        print(text, file=stream, flush=True)
    except UnicodeEncodeError as error:
        escaped = text.encode(error.encoding, "backslashreplace")
        print_line(escaped.decode(error.encoding), stream)
    except OSError:
        with contextlib.suppress(OSError):
            _discard_buffer(stream)


def _discard_buffer(stream: TextIO) -> None:
    """Forget what could not be written, or Python would raise once more when it ends."""
    number = stream.fileno()
    real, nowhere = os.dup(number), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, number)
        stream.flush()
    finally:
        os.dup2(real, number)
        os.close(real)
        os.close(nowhere)


def has_bars() -> bool:
    """Whether standard error is a terminal on which a line can be drawn anew."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


class Pace:
    """When another plain line is due: after seconds at first, in the end every 15."""

    def __init__(self) -> None:
        self.started = self.last = time.monotonic()

    def is_due(self) -> bool:
        """Whether to print one now."""
        now = time.monotonic()
        if now - self.last < min(PLAIN_LINE_EVERY_S, max(1.0, (now - self.started) / 2)):
            return False
        self.last = now
        return True


@contextlib.contextmanager
def counting(
    what: str,
    total: int | None,
    say: Callable[[str], None] = lambda text: print_line(text, sys.stderr),
    *,
    unit: str = "examples",
    pace: Pace | None = None,
    quiet: bool = False,
    leave: bool = True,
) -> Iterator[Callable[[int], None]]:
    """Show how far some work is: the caller says how many are done, as often as it likes.

    On a terminal that can draw one a bar, which stays there if `leave`; elsewhere a plain line when
    one is due.
    """
    from tqdm import tqdm

    pace = pace or Pace()
    with tqdm(
        desc=what,
        total=total,
        unit=f" {unit}",
        disable=quiet or not has_bars(),
        dynamic_ncols=True,
        leave=leave,
    ) as bar:

        def show(done: int) -> None:
            if not bar.disable:
                bar.update(done - bar.n)
            elif done and not quiet and pace.is_due():
                say(f"{what}: {done:,} {f'of {total:,} ' if total else ''}{unit}")

        yield show


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Lines of a table whose columns stand below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def first_line(error: BaseException) -> str:
    """What an error says, in one line; its class if it says nothing."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def percent(value: float | None) -> str:
    """Two decimals, or nothing. A half goes up, also where binary numbers fall just short of it."""
    return "" if value is None else f"{value + 1e-9:.2f}"


def signed(value: float) -> str:
    """A difference of percentages, rounded as `percent` rounds them."""
    return f"{value + 1e-9:+.2f}"


def duration(seconds: float) -> str:
    """Seconds as a person says them: 8 s, 3 min 20 s, 2 h 05 min."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def reach_text(reach: Sequence[int]) -> str:
    """How far a model of bounded reach reads, layer by layer and in all; empty for any other."""
    if not reach:
        return ""
    layers = f"{reach[0]:,}" if len(set(reach)) == 1 else " + ".join(f"{n:,}" for n in reach)
    return f"{layers} a layer, {sum(reach):,} in all"
