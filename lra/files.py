"""Writing files whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A temporary file beside `path` that takes its name at the end, flushed to disk.

    Readers see the old file or the new one; after an error nothing is left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def check_writable(folder: Path, key: str) -> None:
    """Make a folder and find out whether a file can be made in it.

    Raises:
        OSError: it cannot; names the folder and the config's key.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(f"{folder}: not writable ({reason}); choose another {key}") from None


def write_atomically(path: Path, text: str) -> None:
    """Replace a text file as a whole."""
    with replacing(path) as file:
        file.write(text.encode())
