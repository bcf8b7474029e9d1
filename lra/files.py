"""Writing files whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TypeGuard


@contextlib.contextmanager
def replacing(path: Path, *, new: bool = False) -> Iterator[BinaryIO]:
    """A temporary file beside `path` that takes its name at the end, flushed to disk.

    Readers see the old file or the new one; after an error nothing is left.

    Raises:
        FileExistsError: with `new`, if there is a file of that name by then; it stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with naming(path), os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        if new:
            _name_once(temporary, path)
        else:
            os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _name_once(temporary: str, path: Path) -> None:
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        os.replace(temporary, path)


def append(path: Path, text: str) -> None:
    """Add text to a file.

    Raises:
        OSError: it cannot be written; names the file.
    """
    with naming(path), path.open("a", encoding="utf-8") as file:
        file.write(text)


class Unwritable(Exception):
    """The disk was full or turned read-only in the middle of a run."""


@contextlib.contextmanager
def storing(key: str) -> Iterator[None]:
    """Say of a write that the disk refused which file it was and which key chooses another place.

    Raises:
        Unwritable: instead of the OSError; what was written before is whole.
    """
    try:
        yield
    except OSError as error:
        if not is_refused(error):
            raise
        raise Unwritable(refusal(error, key)) from None


def refusal(error: OSError, key: str) -> str:
    """What to say of a write that the disk refused."""
    return (
        f"{error.filename or error}: not written ({error.strerror}); free some space or choose "
        f"another {key}; the same command goes on"
    )


def is_refused(error: BaseException) -> TypeGuard[OSError]:
    """Whether the disk is full or cannot be written."""
    refusals = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
    return isinstance(error, OSError) and error.errno in refusals


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let an error of writing, such as of a full disk, say which file it is about."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


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


def write_new(path: Path, text: str) -> None:
    """Write a text file as a whole where none is yet.

    Raises:
        FileExistsError: there is one, also if it came only just now; it stays as it is.
    """
    with replacing(path, new=True) as file:
        file.write(text.encode())
