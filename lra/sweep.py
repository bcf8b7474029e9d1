"""What the jobs of a sweep leave for each other: one small file each, whatever the launcher."""

from __future__ import annotations

import dataclasses
import heapq
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lra.console import aligned, duration, first_line, percent, print_line
from lra.files import write_atomically
from lra.script import exit_codes

JOBS = "jobs.json"  # what is known of them before the first starts
STOPPED = "stopped"  # there once a signal has asked the whole sweep to stop; its name
STATUS_COLUMNS = ("job", "status", "test %", "run")
launches: list[Path] = []  # the folder of outcomes of the sweep that this process launched
sweep_sizes: list[int] = []  # its number of jobs


@dataclass(frozen=True)
class Outcome:
    """How one job ended. `exit_code` is what it would have left the shell with on its own."""

    number: int
    status: str  # of the record; or refused, busy, skipped
    exit_code: int
    run_id: str = ""
    accuracy: float | None = None
    message: str = ""
    val_accuracy: float | None = None  # at the selected step
    setting: str = ""  # what the command line changed in recipe and model
    trained_s: float | None = None  # None for a job that had nothing to train
    ends_sweep: bool = False  # stopped by a signal, which is meant for all jobs of a process


def objective(outcome: Outcome) -> float | None:
    """What a job is worth to a sweeper that optimises: its validation accuracy, never test's.

    A setting that does not work (diverged, out of memory, refused) is worth nothing: a finite
    number, which every sweeper accepts. Jobs that say nothing about their setting give None, which
    Optuna counts as a failed trial before it goes on.
    """
    if outcome.val_accuracy is not None:
        return outcome.val_accuracy
    is_bad = outcome.status in ("diverged", "failed", "out_of_memory", "refused")
    return 0.0 if is_bad else None


def named(error: Exception) -> str:
    """What happened, of an error that is no message to the user by itself, in one line."""
    from lra.training.gradient import is_out_of_memory  # brings torch

    kind = "out of memory" if is_out_of_memory(error) else type(error).__name__
    return kind if first_line(error) == kind else f"{kind}: {first_line(error)}"


def note(folder: Path, outcome: Outcome) -> None:
    """Leave a job's outcome in the folder of its launch."""
    write_atomically(folder / f"{outcome.number}.json", json.dumps(dataclasses.asdict(outcome)))


def outcomes(folder: Path) -> list[Outcome]:
    """Outcomes so far, by job number."""
    found = [Outcome(**json.loads(path.read_text())) for path in folder.glob("[0-9]*.json")]
    return sorted(found, key=lambda o: o.number)


def note_jobs(
    folder: Path,
    num_jobs: int,
    repeated: Mapping[int, tuple[int, str]],
    seconds: Sequence[float | None] = (),
) -> None:
    """Leave for processes that a launcher starts what is known of the jobs.

    Args:
        num_jobs: 0 if that is not known.
        repeated: by number, jobs that would be the run of an earlier one; its number, the run's id.
        seconds: what each job is expected to take, None where that is not known; empty: of none.
    """
    values = {"num_jobs": num_jobs, "repeated": repeated, "seconds": seconds}
    write_atomically(folder / JOBS, json.dumps(values) + "\n")


def same_as(folder: Path, number: int, run_id: str) -> int | None:
    """The number of the earlier job of the launch that is this very run; None if there is none."""
    earlier, name = _jobs(folder)["repeated"].get(str(number), (None, None))
    return earlier if name == run_id else None


def _jobs(folder: Path) -> dict[str, Any]:
    path = folder / JOBS
    known = {"num_jobs": 0, "repeated": {}, "seconds": ()}
    return known | json.loads(path.read_text()) if path.exists() else known


def position(folder: Path, number: int, *, at_a_time: int | None) -> str:
    """Which of how many jobs starts, counted from 1, and how long it and the rest may take.

    Args:
        number: of the job, from 0.
        at_a_time: jobs that run side by side, so that times can be added up; None: not known.
    """
    jobs = _jobs(folder)
    num_jobs = jobs["num_jobs"]
    text = f"job {number + 1}" + (f" of {num_jobs}" if num_jobs > number else "")
    if not at_a_time or num_jobs <= number:
        return text
    planned = jobs["seconds"] or [None] * num_jobs
    known = [seconds for seconds in planned if seconds]
    # Of a job that nothing is known of, as much as of the others.
    usual = sum(known) / len(known) if known else 1.0
    shares = [usual if seconds is None else seconds for seconds in planned]
    found = outcomes(folder)
    trained = [(o.trained_s, shares[o.number]) for o in found if o.trained_s is not None]
    pace, by = (1.0, "by the plan") if known else (None, "")
    if (share := sum(share for _, share in trained)) > 0:
        pace, by = sum(seconds for seconds, _ in trained) / share, "at the pace so far"
    if pace is not None:
        ended = {o.number for o in found}
        # Jobs that run beside this one are taken to be half done.
        beside = [shares[n] / 2 for n in range(number) if n not in ended]
        left = pace * makespan([*beside, *shares[number:]], at_a_time)
        if left:
            text += f"; {by} about {duration(left)} to the end of the sweep"
    return text


def makespan(seconds: Iterable[float | None], at_a_time: int) -> float:
    """How long jobs take together that start in order, each once another has ended.

    Those of which nothing is known (None) are left out.
    """
    ends = [0.0] * at_a_time
    for one in seconds:
        heapq.heappush(ends, heapq.heappop(ends) + (one or 0.0))
    return max(ends)


def has_failed(folder: Path) -> bool:
    """Whether a job of the sweep failed, so that `sweep.fail_fast` starts no more."""
    return any(o.exit_code and o.status != "busy" for o in outcomes(folder))


def note_stop(folder: Path, name: str) -> None:
    """Leave for jobs that have not started that a signal of this name stopped the sweep."""
    write_atomically(folder / STOPPED, name)


def stopped_by(folder: Path) -> str:
    """The signal that stopped the sweep; empty if none did."""
    path = folder / STOPPED
    return path.read_text() if path.exists() else ""


def summary(found: list[Outcome], num_jobs: int) -> str:
    """One line a job, counted from 1, and their number, for the end of a sweep."""
    lines = [STATUS_COLUMNS]
    said: dict[str, int] = {}  # by which job
    for o in found:
        accuracy = "" if o.accuracy is None else percent(100 * o.accuracy)
        is_repeated = o.status == "refused" and said.setdefault(o.message, o.number) != o.number
        message = f"as job {said[o.message] + 1}" if is_repeated else o.message
        run = o.run_id + (f" ({o.setting})" if o.setting else "")
        note = f"{run}{': ' if run and message else ''}{message}"
        lines.append((str(o.number + 1), o.status, accuracy, note))
    counts: dict[str, int] = {}
    for o in found:
        counts[o.status] = counts.get(o.status, 0) + 1
    if num_jobs > len(found):
        counts["without an outcome"] = num_jobs - len(found)
    return "\n".join(
        [
            *aligned(lines),
            f"{num_jobs} job{'s' * (num_jobs != 1)}: "
            + ", ".join(f"{n} {s}" for s, n in counts.items()),
        ]
    )


def end_sweep(launch: Path) -> None:
    """Print how the jobs of a sweep ended and keep their exit codes."""
    found = print_summary(launch)
    exit_codes.extend(o.exit_code for o in found if o.status != "busy")


def print_summary(launch: Path) -> list[Outcome]:
    """Print how the jobs of a sweep ended so far, and return it."""
    found = outcomes(launch)
    print_line(summary(found, max(len(found), *sweep_sizes, 0)))
    return found
