"""What the jobs of a sweep leave for each other: one small file each, whatever the launcher."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from lra.files import write_atomically
from lra.progress import percent

STATUS_COLUMNS = ("job", "status", "test %", "run")


@dataclass(frozen=True)
class Outcome:
    """How one job ended. `exit_code` is what it would have left the shell with on its own."""

    number: int
    status: str  # of the record; or refused, busy, skipped
    exit_code: int
    run_id: str = ""
    accuracy: float | None = None
    message: str = ""


def first_line(error: Exception) -> str:
    """What an error says, in one line; its class if it says nothing."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def note(folder: Path, outcome: Outcome) -> None:
    """Leave a job's outcome in the sweep's folder."""
    write_atomically(folder / f"{outcome.number}.json", json.dumps(dataclasses.asdict(outcome)))


def outcomes(folder: Path) -> list[Outcome]:
    """Outcomes so far, by job number."""
    found = [Outcome(**json.loads(path.read_text())) for path in folder.glob("[0-9]*.json")]
    return sorted(found, key=lambda o: o.number)


def has_failed(folder: Path) -> bool:
    """Whether a job of the sweep failed, so that `sweep.fail_fast` starts no more."""
    return any(o.exit_code for o in outcomes(folder))


def summary(found: list[Outcome], num_jobs: int) -> str:
    """One line a job and a count, for the end of a sweep."""
    lines = [STATUS_COLUMNS]
    for o in found:
        accuracy = "" if o.accuracy is None else percent(100 * o.accuracy)
        note = f"{o.run_id}{': ' if o.run_id and o.message else ''}{o.message}"
        lines.append((str(o.number), o.status, accuracy, note))
    widths = [max(len(line[i]) for line in lines) for i in range(3)]
    text = [
        "  ".join(c.ljust(w) for c, w in zip(line, [*widths, 0], strict=True)).rstrip()
        for line in lines
    ]
    counts: dict[str, int] = {}
    for o in found:
        counts[o.status] = counts.get(o.status, 0) + 1
    if num_jobs > len(found):
        counts["without an outcome"] = num_jobs - len(found)
    return "\n".join(
        [
            *text,
            f"{num_jobs} job{'s' * (num_jobs != 1)}: "
            + ", ".join(f"{n} {s}" for s, n in counts.items()),
        ]
    )
