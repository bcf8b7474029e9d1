"""Writing files whole or not at all, and locks among processes."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeGuard

FULL = (errno.ENOSPC, errno.EDQUOT)
# Of `fsync`: the mount has no such thing, which is no failure to write.
NO_FSYNC = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EACCES)
LOCK_POLL_S = 0.1
FOLDER_TRIES = 10  # to open a lock in a folder that others remove


@contextlib.contextmanager
def replacing(path: Path, *, new: bool = False) -> Iterator[BinaryIO]:
    """A temporary file beside `path` that takes its name at the end, flushed to disk.

    Readers see the old file or the new one; after an error nothing is left. Permissions are those
    of any new file, by the umask: some mounts refuse to change them.

    Raises:
        FileExistsError: with `new`, if there is a file of that name by then; it stays.
        NotWritten: it cannot be made, written or renamed; names `path`.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    with naming(path, temporary):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("xb") as file:
                yield file
                file.flush()
                flush_to_disk(file.fileno())
            if new:
                _name_once(temporary, path)
            else:
                os.replace(temporary, path)
        finally:
            with contextlib.suppress(OSError):  # the first error is the one to tell
                temporary.unlink(missing_ok=True)


def flush_to_disk(handle: int) -> None:
    """`fsync`, where the mount has it."""
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in NO_FSYNC:
            raise


def _name_once(temporary: Path, path: Path) -> None:
    exists = FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(path))
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise exists from None
    except OSError:  # a file system without hard links
        if path.exists():
            raise exists from None
        os.replace(temporary, path)


def append(path: Path, text: str) -> None:
    """Add text to a file.

    Raises:
        OSError: it cannot be written; names the file.
    """
    with naming(path), path.open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)


class Held(Exception):
    """Another process has the lock."""


@contextlib.contextmanager
def locked(path: Path, key: str, waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the lock that is called `path` among all processes that can see this file.

    Its folder is made where it is not there, also if the holder before removes it just now.
    While another process has it, `waiting` is called again and again; it may raise to give up.

    Whoever can read the file can use it, so that a group may share a folder. The system frees the
    lock when its holder ends, however it ends; the empty file stays and means nothing.

    Raises:
        Held: another process has it, and there is no `waiting`.
        OSError: no lock can be had here; names the file and the config's key.
    """
    import fcntl

    handle = _open_lock(path, key)
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if waiting is None:
                    raise Held(str(path)) from None
                waiting()
                time.sleep(LOCK_POLL_S)
                continue
            except OSError as error:
                raise OSError(
                    f"{path}: cannot be locked ({error.strerror}); this file system may have no "
                    f"locks: choose another {key}, on a local disk, say"
                ) from None
            if _is_at(path, handle):
                break
            removed, handle = handle, _open_lock(path, key)  # by the holder before
            os.close(removed)
        try:
            yield
        finally:
            fcntl.flock(handle, fcntl.LOCK_UN)  # also for processes that have inherited it
    finally:
        os.close(handle)


def _is_at(path: Path, handle: int) -> bool:
    """Whether an open file still has this name."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(handle))
    except FileNotFoundError:
        return False


def _open_lock(path: Path, key: str) -> int:
    """A handle of a lock's file; both it and its folder are made if they are not there."""
    tries_left = FOLDER_TRIES
    while True:
        tries_left -= 1
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return _open_for_all(path)
        except OSError as error:
            if isinstance(error, FileNotFoundError) and tries_left:
                continue  # the folder was removed just now
            raise OSError(
                f"{path}: this lock cannot be opened ({error.strerror}); let the owner of the "
                f"file, or of its folder, run `chmod a+rw` on it, or choose another {key}"
            ) from None


def _open_for_all(path: Path) -> int:
    try:
        with contextlib.suppress(FileNotFoundError):
            return os.open(path, os.O_RDWR)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except PermissionError:
        return os.open(path, os.O_RDONLY)  # somebody else's, and enough for a lock
    with contextlib.suppress(OSError):  # beyond the umask: there is nothing in it to protect
        os.fchmod(handle, 0o666)
    return handle


class NotWritten(OSError):
    """A file was not written, for whatever reason its disk or mount has; it knows which file."""


class Unwritable(Exception):
    """The disk was full, or refused a write, in the middle of a run."""


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
        f"{error.filename or error}: not written ({error.strerror}); {way_out(error, key)}; the "
        "same command goes on"
    )


def way_out(error: OSError, key: str) -> str:
    """What to do about a write that was refused; `key` chooses another place."""
    return f"{'free some space or ' if error.errno in FULL else ''}choose another {key}"


def is_refused(error: BaseException) -> TypeGuard[OSError]:
    """Whether a file could not be written, or anything at all for want of room."""
    if isinstance(error, NotWritten):
        return True
    return isinstance(error, OSError) and error.errno in (*FULL, errno.EROFS)


@contextlib.contextmanager
def naming(path: Path, temporary: Path | None = None) -> Iterator[None]:
    """Let an error of writing say which file it is about: `path`, not its temporary name.

    Raises:
        NotWritten: instead of the OSError, unless that says that `path` is there already.
    """
    try:
        yield
    except OSError as error:
        name = error.filename
        is_own = name in (None, os.fspath(temporary or path)) or str(path).startswith(str(name))
        was_there = isinstance(error, FileExistsError) and name == os.fspath(path)
        if error.errno is None or not is_own or was_there:
            raise
        raise NotWritten(error.errno, error.strerror, os.fspath(path)) from error


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
    """Replace a text file as a whole; what is no UTF-8, such as in a file's name, is escaped."""
    with replacing(path) as file:
        file.write(text.encode(errors="backslashreplace"))


def write_new(path: Path, text: str) -> None:
    """Likewise where none is yet.

    Raises:
        FileExistsError: there is one, also if it came only just now; it stays as it is.
    """
    with replacing(path, new=True) as file:
        file.write(text.encode(errors="backslashreplace"))
