"""What a person sees of a run: a bar on a terminal, plain lines elsewhere, and a log file."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lra.files import append

if TYPE_CHECKING:
    from lra.trainer import State

PLAIN_LINE_EVERY_S = 15.0


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
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
    *,
    unit: str = "examples",
    pace: Pace | None = None,
    quiet: bool = False,
    leave: bool = True,
) -> Iterator[Callable[[int], None]]:
    """Show how far some work is: the caller says how many are done, as often as it likes.

    On a terminal a bar, which stays there if `leave`; elsewhere a plain line when one is due.
    """
    from tqdm import tqdm

    pace = pace or Pace()
    with tqdm(
        desc=what,
        total=total,
        unit=f" {unit}",
        disable=quiet or not sys.stderr.isatty(),
        dynamic_ncols=True,
        leave=leave,
    ) as bar:

        def show(done: int) -> None:
            if not bar.disable:
                bar.update(done - bar.n)
            elif done and not quiet and pace.is_due():
                say(f"{what}: {done:,} {f'of {total:,} ' if total else ''}{unit}")

        yield show


class Progress:
    """Prints to standard output and to `log`, which may be set once the run's folder exists.

    Only one of several processes talks; the others are `quiet`.
    """

    def __init__(self, log: Path | None = None, *, quiet: bool = False) -> None:
        self.log = log
        self.quiet = quiet
        self._bar: Any = None
        self._pace = Pace()

    def say(self, text: str) -> None:
        """One message, above the bar if there is one."""
        from tqdm import tqdm

        if self.quiet:
            return
        with contextlib.suppress(BrokenPipeError):
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()
        if self.log is not None:
            append(self.log, f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    def evaluation(self, row: dict[str, Any], *, best: bool) -> None:
        """One line per evaluation."""
        self.say(
            f"step {row['step']:>6}  train loss {row['train_loss']:.4f}  "
            f"val loss {row['val_loss']:.4f}  val accuracy {percent(100 * row['val_accuracy'])} %"
            + ("  best" if best else "")
        )

    @contextlib.contextmanager
    def bar(self, num_steps: int, start: int) -> Iterator[Progress]:
        """A tqdm bar over the steps; without a terminal, a plain line every few seconds."""
        from tqdm import tqdm

        self._num_steps, self._start = num_steps, start
        self._pace = Pace()
        with tqdm(
            total=num_steps,
            initial=start,
            unit="step",
            disable=self.quiet or not sys.stderr.isatty(),
            dynamic_ncols=True,
        ) as self._bar:
            yield self
        self._bar = None

    def counting(
        self, what: str, total: int
    ) -> contextlib.AbstractContextManager[Callable[[int], None]]:
        """Show how many examples of a split are done; the bar is gone afterwards."""
        return counting(what, total, self.say, pace=self._pace, quiet=self.quiet, leave=False)

    def advance(self, step: int) -> None:
        """Move the bar without waiting for the device."""
        self._bar.update(step - self._bar.n)

    def update(self, rows: list[dict[str, Any]], state: State) -> None:
        """Show the mean loss and accuracy of some steps, tokens per second and the time left."""
        loss = sum(r["loss"] for r in rows) / len(rows)
        accuracy = sum(r["accuracy"] for r in rows) / len(rows)
        shown = {"loss": f"{loss:.3f}", "accuracy": f"{100 * accuracy:.1f}%"}
        if state.train_time_s:  # the first steps are slower than the others
            shown["tokens/s"] = f"{state.timed_tokens / state.train_time_s:,.0f}"
        self._bar.set_postfix(shown, refresh=False)
        self._bar.update(state.step - self._bar.n)
        if self._bar.disable and (self._pace.is_due() or state.step == self._num_steps):
            line = f"step {state.step:>6}/{self._num_steps}  "
            line += "  ".join(f"{k} {v}" for k, v in shown.items())
            if state.train_time_s:
                seconds = time.monotonic() - self._pace.started
                steps, steps_left = state.step - self._start, self._num_steps - state.step
                line += f"  {duration(seconds / steps * steps_left)} left"
            self.say(line)


def percent(value: float | None) -> str:
    """Two decimals, or nothing. A half goes up, also where binary numbers fall just short of it."""
    return "" if value is None else f"{value + 1e-9:.2f}"


def duration(seconds: float) -> str:
    """Seconds as a person says them: 8 s, 3 min 20 s, 2 h 05 min."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
