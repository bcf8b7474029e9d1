"""A run's folder and its records: which was made here, which came along, how they compare.

status.json in outputs/RUN_ID/ names the record that was made there, and when the training behind
it started, as the record itself does. Any other record of the run, such as one that came with the
repository, stops nothing and is never replaced: the run's own takes the next free number.
"""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lra import files
from lra.console import percent
from lra.files import write_atomically
from lra.results import records
from lra.results.records import Record, unpack_correct
from lra.results.statistics import compare

STATUS = "status.json"


class Busy(ValueError):
    """Another process is working on the same run."""


@contextlib.contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Keep other processes off a run's folder, and leave none behind in which nothing happened.

    Raises:
        Busy: one is at it.
    """
    lock = run_dir / "run.lock"
    try:
        with files.locked(lock, "paths.outputs"):
            try:
                yield
            finally:
                with contextlib.suppress(OSError):  # another process came, or moved the folder away
                    if [path.name for path in run_dir.iterdir()] == [lock.name]:
                        lock.unlink()
                        run_dir.rmdir()
    except files.Held:
        raise Busy(f"{run_dir}: another process is working on this very run") from None


def now() -> str:
    """The time as records give it."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def write_status(
    run_dir: Path,
    status: str,
    started_at: str,
    record: str,
    recorded: str | None,
    wall_time_s: float,
) -> None:
    """Say how the run stands.

    Args:
        record: the name of its record's file, or of the file that is to be it.
        recorded: `started_at` of the training that is in that file; None before there is one.
        wall_time_s: what all starts of the run have taken, less those that were killed.
    """
    values = {"status": status, "started_at": started_at, "updated_at": now(),
              "record": record, "recorded": recorded, "wall_time_s": wall_time_s}  # fmt: skip
    write_atomically(run_dir / STATUS, json.dumps(values) + "\n")


def wall_time_s(run_dir: Path) -> float:
    """What earlier starts of the run have taken, as far as it is known."""
    try:
        status: Any = json.loads((run_dir / STATUS).read_text(encoding="utf-8"))
        return float(status["wall_time_s"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0


def own_record(run_dir: Path, first: Path) -> Path | None:
    """The record that was made in this folder; None if it was removed or there never was one.

    Args:
        first: where RUN_ID.json has its place; a folder of an earlier version means that one.
    """
    try:
        status: Any = json.loads((run_dir / STATUS).read_text(encoding="utf-8"))
        path = first.with_name(status.get("record", first.name))
        # The second is of a session that was killed between its record and its last word here.
        starts = (status.get("recorded"), status["started_at"])
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return None
    found = records.started(path)
    return path if found is not None and found in starts else None


def others(first: Path, own: Path | None) -> tuple[list[tuple[Path, Record]], list[str]]:
    """Records of the run that were not made in its folder; what is wrong with unreadable ones."""
    found, warnings = [], []
    for path in records.siblings(first):
        if path != own:
            try:
                found.append((path, records.load(path)))
            except ValueError as error:
                warnings.append(f"{error}; it stays as it is")
    return found, warnings


def introduce(path: Path, record: Record, fingerprint: str) -> str:
    """One line on a record that was there before: what it says, and when it was made."""
    test = f"test {percent(100 * record.result.test.accuracy)} %, " if record.result else ""
    data = "" if record.data.get("fingerprint") == fingerprint else ", on other data"
    status = record.status.replace("_", " ")
    return f"{path} ({test}{status}, {record.finished_at[:10]}{data})"


def likeness(ours: Record, other: Record) -> str:
    """How a finished run compares with another record of it, in plain words."""
    if ours.result is None or other.result is None:
        return f"nothing to compare, it ended as {other.status}"
    prints = [str(r.data.get("fingerprint"))[:12] for r in (ours, other)]
    if prints[0] != prints[1]:
        return (
            f"nothing to compare, it was made on other data (fingerprint {prints[1]}, "
            f"here {prints[0]})"
        )
    a, b = ours.result.test, other.result.test
    difference = f"{100 * (a.accuracy - b.accuracy):+.2f} points"
    try:
        a_N, b_N = (unpack_correct(t.correct or "", a.num_examples) for t in (a, b))
    except ValueError:  # left out, damaged, or of another number of examples
        return f"{difference}; which examples were right is not known of both"
    if (a_N == b_N).all():
        same = f"the same in each of the {a.num_examples:,} test examples"
        if ours.curve == other.curve:
            return f"{same} and at every evaluation on the way"
        return f"{same}, though not at every evaluation on the way"
    result = compare(a_N[None], b_N[None])
    low, high = (f"{100 * end:+.2f}" for end in result.over_examples)
    words = (
        f"{difference}: {(a_N & ~b_N).sum():,} of {a.num_examples:,} test examples are right only "
        f"here, {(b_N & ~a_N).sum():,} only there; 95 % interval {low} to {high}, "
    ) + ("more than noise over test examples" if result.clear else "within noise")
    made_on = [f"{r.device_text}, torch {r.environment.get('torch')}" for r in (ours, other)]
    return words + (f"; made on {made_on[1]}, here {made_on[0]}" if len(set(made_on)) > 1 else "")
