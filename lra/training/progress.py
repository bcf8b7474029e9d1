"""What a person sees of a run: a bar on a terminal, plain lines elsewhere, and a log file."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lra.console import Pace, counting, duration, has_bars, percent, print_line
from lra.files import append


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
        with tqdm.external_write_mode(file=sys.stdout):
            print_line(text)
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
            disable=self.quiet or not has_bars(),
            dynamic_ncols=True,
            smoothing=0,  # the time left is by the mean of all so far, evaluations among them
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

    def update(self, rows: list[dict[str, Any]], step: int, tokens_per_s: float | None) -> None:
        """Show the mean loss and accuracy of some steps, the last of them `step`, and time left.

        `tokens_per_s` is None as long as no step was timed; the first are slower than the others.
        """
        loss = sum(r["loss"] for r in rows) / len(rows)
        accuracy = sum(r["accuracy"] for r in rows) / len(rows)
        shown = {"loss": f"{loss:.3f}", "accuracy": f"{100 * accuracy:.1f}%"}
        if tokens_per_s is not None:
            shown["tokens/s"] = f"{tokens_per_s:,.0f}"
        self._bar.set_postfix(shown, refresh=False)
        self._bar.update(step - self._bar.n)
        if self._bar.disable and (self._pace.is_due() or step == self._num_steps):
            line = f"step {step:>6}/{self._num_steps}  "
            line += "  ".join(f"{k} {v}" for k, v in shown.items())
            if tokens_per_s is not None:
                seconds = time.monotonic() - self._pace.started
                steps, steps_left = step - self._start, self._num_steps - step
                line += f"  {duration(seconds / steps * steps_left)} left"
            self.say(line)
