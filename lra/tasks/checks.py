"""What is odd about the splits of a prepared task: what is refused, and what is only told."""

from __future__ import annotations

import itertools
from typing import Any

from lra.tasks.beside import listing
from lra.tasks.task import SPLITS, Task


def oddities(report: dict[str, Any]) -> list[str]:
    """What is odd about a split, although it may be meant so."""
    found = []
    if report["empty"]:
        found.append(f"{report['empty']} empty sequences, the first in example "
                     f"{report['first_empty']}")  # fmt: skip
    if absent := [c for c, count in enumerate(report["label_histogram"]) if not count]:
        found.append(f"no example of class {', '.join(map(str, absent))}")
    return found


def copies(task: Task, reports: dict[str, Any]) -> str:
    """Which two splits have the same examples in the same order, in words; empty if none have.

    Not val and test where the protocol validates on test.

    Raises:
        ValueError: the data were read from files: one of them lies in another's place.
    """
    for first, second in itertools.combinations(SPLITS, 2):
        is_meant = first == "val" and task.protocol.get("validation") == "test"
        if is_meant or reports[first]["sha256"] != reports[second]["sha256"]:
            continue
        count = reports[first]["num_examples"]
        found = f"{first} and {second} have the same {count:,} examples in the same order"
        if task.kind != "files":
            return found
        files = listing(task.source_files())
        raise ValueError(
            f"task '{task.name}': {found}{f' (read from {files})' if files else ''}; expected "
            "examples of its own in each split: has a file been copied over another?"
        )
    return ""


def shared(task: Task, digests: dict[str, list[bytes]]) -> list[str]:
    """How many examples of val and test are in train, too, and how many of test in val, in words.

    Not val and test where the protocol validates on test. The benchmark's own files have a few
    (IMDb reviews that were posted twice), so few are a remark.

    Raises:
        ValueError: more than half of a split are.
    """
    found = []
    for first, second in itertools.combinations(SPLITS, 2):
        if first == "val" and task.protocol.get("validation") == "test":
            continue
        known = set(digests[first])
        count, total = sum(d in known for d in digests[second]), len(digests[second])
        if 2 * count > total:
            files = listing(task.source_files())
            raise ValueError(
                f"task '{task.name}': {count:,} of the {total:,} {second} examples are in {first}, "
                f"too{f' (read from {files})' if files else ''}; expected examples of its own in "
                "each split: has a file been copied over another?"
            )
        if count:
            found.append(f"{count:,} of the {total:,} {second} examples are in {first}, too")
    return found


def truncation(task: Task, split: str, report: dict[str, Any]) -> str:
    """How many examples of a split do not fit, in words."""
    return (
        f"task '{task.name}': {report['truncated']} of {report['num_examples']} {split} examples "
        f"are longer than task.max_length={task.max_length} (longest: {report['longest_source']})"
    )
