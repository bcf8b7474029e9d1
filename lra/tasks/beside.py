"""What lies beside the files that a task reads: it is named, never passed over in silence."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

NAMES_SHOWN = 5  # in a message
_SYSTEM = ("Thumbs.db", "desktop.ini")


def entries(folder: Path, pattern: str = ".*") -> list[Path]:
    """What a folder has under names of `pattern`, sorted; without what is hidden or empty."""
    if not folder.is_dir():
        return []
    return sorted(
        entry
        for entry in folder.iterdir()
        if re.fullmatch(pattern, entry.name, re.IGNORECASE)
        and not entry.name.startswith(".")
        and entry.name not in _SYSTEM
        and not _is_empty(entry)
    )


def _is_empty(entry: Path) -> bool:
    try:
        return entry.is_dir() and not any(entry.iterdir())
    except PermissionError:
        return False


def unread(own: Iterable[Path], shared: Iterable[Path], pattern: str) -> list[Path]:
    """What is in folders of a task's own, and what in shared ones has a name of the task's.

    `pattern` matches the whole of such a name. A folder that is searched itself is not listed.
    """
    searched = [*own]
    outer = {parent for folder in searched for parent in (folder, *folder.parents)}
    found = [entry for folder in searched for entry in entries(folder)]
    found += [entry for folder in shared for entry in entries(folder, pattern)]
    return [entry for entry in dict.fromkeys(found) if entry not in outer]


def apart(found: Iterable[Path], read: Iterable[Path]) -> list[str]:
    """Which of `found` neither holds anything that is read nor lies in it; a remark on each."""
    places = [*read]
    return [
        f"{path}: not what is read"
        for path in found
        if not any(path.is_relative_to(p) or p.is_relative_to(path) for p in places)
    ]


def similar(folder: Path, read: Iterable[str], pattern: str) -> Iterator[str]:
    """Files of a folder that are called almost like those that are read, copies and backups say."""
    known = set(read)
    for entry in sorted(folder.iterdir()):
        if entry.name not in known and re.search(pattern, entry.name) and entry.is_file():
            yield f"{entry}: only {', '.join(sorted(known))} are read"


def listing(paths: list[Path]) -> str:
    """The first few of many paths, for a message."""
    more = f" and {len(paths) - NAMES_SHOWN} more" if paths[NAMES_SHOWN:] else ""
    return ", ".join(map(str, paths[:NAMES_SHOWN])) + more


def shortened(names: list[str]) -> str:
    """The first few of many names, for a message."""
    return "; ".join(names[:NAMES_SHOWN]) + ("; ..." if names[NAMES_SHOWN:] else "")
