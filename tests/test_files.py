"""Writing where the mount refuses this or that, and locks that a group shares."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lra import files
from lra.files import (
    Held,
    NotWritten,
    append,
    locked,
    replacing,
    storing,
    write_atomically,
    write_new,
)
from lra.tasks.batches import SplitWriter
from lra.tasks.task import Example
from tests.toy import SIZES, Toy, toy_data

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root may act for another user")


def refusing(number: int) -> Any:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    return refuse


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_permissions_are_those_of_any_new_file_and_never_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int, mode: int
) -> None:
    for name in ("chmod", "fchmod"):
        monkeypatch.setattr(os, name, refusing(errno.EPERM))
    before = os.umask(umask)
    try:
        write_atomically(tmp_path / "file", "text")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == mode
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("write", [append, write_atomically, write_new])
def test_what_is_written_may_name_a_file_that_is_not_utf8(
    tmp_path: Path, write: Callable[[Path, str], None]
) -> None:
    write(tmp_path / "log", "output /data/\udcff\n")  # as Python has the byte 0xff
    assert (tmp_path / "log").read_text() == "output /data/\\udcff\n"


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_mount_without_fsync_is_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(os, "fsync", refusing(number))
    write_atomically(tmp_path / "file", "text")
    assert (tmp_path / "file").read_text() == "text"


@pytest.mark.parametrize(
    ("operation", "number"),
    [
        ("fsync", errno.EIO),
        *itertools.product(("replace", "open"), (errno.EIO, errno.EPERM, errno.ENOSYS)),
    ],
)
def test_what_is_refused_names_the_file_and_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str, number: int
) -> None:
    path = tmp_path / "folder" / "file"
    write_atomically(path, "old")
    if operation == "open":
        monkeypatch.setattr(Path, "open", refusing(number))
    else:
        monkeypatch.setattr(os, operation, refusing(number))
    with pytest.raises(files.Unwritable) as caught, storing("paths.outputs"):
        write_atomically(path, "new")
    assert str(caught.value).startswith(f"{path}: not written ({os.strerror(number)})")
    assert "choose another paths.outputs" in str(caught.value)
    assert ".tmp" not in str(caught.value) and "free some space" not in str(caught.value)
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert [path.name for path in path.parent.iterdir()] == ["file"]


def test_errors_of_the_writer_itself_pass_as_they_are(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="elsewhere"), replacing(tmp_path / "file"):
        (tmp_path / "elsewhere").read_text()
    with pytest.raises(NotWritten, match="'.*/file/file'"):
        write_atomically(tmp_path / "file", "")
        write_atomically(tmp_path / "file" / "file", "")


def test_a_file_that_is_to_be_new_does_not_replace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, link in (("a", os.link), ("b", refusing(errno.EPERM))):  # without hard links
        monkeypatch.setattr(os, "link", link)
        for content in (b"first", b"second"):
            with contextlib.suppress(FileExistsError), replacing(tmp_path / name, new=True) as file:
                file.write(content)
        with (
            pytest.raises(FileExistsError, match=str(tmp_path / name)),
            replacing(tmp_path / name, new=True),
        ):
            pass
        assert (tmp_path / name).read_bytes() == b"first"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


# --- locks ---


class GaveUp(Exception):
    pass


def test_who_waits_for_a_lock_is_asked_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "LOCK_POLL_S", 0)
    asked = []

    def waiting() -> None:
        asked.append(1)
        if len(asked) == 3:
            raise GaveUp

    path = tmp_path / "a.lock"
    with locked(path, "paths.cache"), pytest.raises(GaveUp), locked(path, "paths.cache", waiting):
        pass


def test_a_lock_is_held_by_one_and_left_for_all(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    before = os.umask(0o077)
    try:
        with locked(path, "paths.cache"):
            assert path.stat().st_mode & 0o777 == 0o666
            with pytest.raises(Held), locked(path, "paths.cache"):
                pass
    finally:
        os.umask(before)
    with locked(path, "paths.cache"):
        pass


def test_a_lock_whose_file_its_holder_removed_is_held_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run" / "a.lock"
    first = locked(path, "paths.cache")
    first.__enter__()

    def waiting() -> None:  # has opened the file already
        path.unlink()
        path.parent.rmdir()
        first.__exit__(None, None, None)

    with locked(path, "paths.cache", waiting), pytest.raises(Held), locked(path, "paths.cache"):
        pass


def test_a_lock_is_had_though_its_folder_goes_away_before_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, make, removed = tmp_path / "run" / "a.lock", Path.mkdir, []

    def make_in_vain(folder: Path, *arguments: Any, **others: Any) -> None:
        make(folder, *arguments, **others)
        if len(removed) < 3:
            removed.append(folder)
            folder.rmdir()

    monkeypatch.setattr(Path, "mkdir", make_in_vain)
    with locked(path, "paths.cache"):
        assert path.exists() and len(removed) == 3
    dangling = tmp_path / "b.lock"
    dangling.symlink_to(tmp_path / "none" / "b.lock")
    with (
        pytest.raises(OSError, match=r"b\.lock: this lock cannot be opened \(No such file"),
        locked(dangling, "paths.cache"),
    ):
        pass


def test_a_lock_is_free_again_though_a_child_has_inherited_it(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    with locked(path, "paths.cache"):
        child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(0)
    try:
        with locked(path, "paths.cache"):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF])
def test_a_file_system_without_locks_is_named_with_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(fcntl, "flock", refusing(number))
    with pytest.raises(OSError, match=r"toy-\w+\.lock: cannot be locked .* another paths\.cache"):
        toy_data(tmp_path)


def as_user(folder: Path, user: int, group: int, umask: int = 0o022, killed: bool = False) -> str:
    """What a process of another user gets when it prepares the toy task: its size, or an error.

    While building, it keeps a block for a later build, as the generator of Pathfinder does.
    """
    original = Toy.examples

    def examples(self: Toy, split: str) -> Iterator[Example]:
        assert self.work_dir is not None
        write_atomically(self.work_dir / split, "")
        yield from original(self, split)

    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setgroups([group])
            os.setgid(group)
            os.setuid(user)
            os.umask(umask)
            Toy.examples = examples  # type: ignore[method-assign]
            if killed:
                SplitWriter.close = lambda _: os._exit(9)  # type: ignore[method-assign, assignment]
            try:
                said = str(len(toy_data(folder).train))
            except OSError as error:
                said = str(error)
            except BaseException as error:
                said = repr(error)
            os.write(writer, said.encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as pipe:
        return pipe.read()


@pytest.fixture
def shared() -> Iterator[Path]:
    """A cache folder of the group 5000, in a place that other users may enter."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o755)
    (folder / "cache").mkdir()
    os.chown(folder / "cache", 5001, 5000)
    (folder / "cache").chmod(0o2775)
    yield folder
    shutil.rmtree(folder)


@needs_root
def test_a_group_shares_a_cache_also_after_a_killed_build(shared: Path) -> None:
    assert as_user(shared, 5001, 5000, killed=True) == ""
    assert list((shared / "cache").glob("toy-*.lock"))
    assert list((shared / "cache").glob(".toy-*.building*"))
    assert list((shared / "cache").glob("toy-*.work/train"))
    assert as_user(shared, 5002, 5000) == str(SIZES["train"])
    assert as_user(shared, 5003, 5000) == str(SIZES["train"])
    assert as_user(shared, 5004, 6000) == str(SIZES["train"])  # reads what everybody may read


@needs_root
def test_a_lock_made_for_its_owner_only_still_serves_the_group(shared: Path) -> None:
    as_user(shared, 5001, 5000, killed=True)
    (lock,) = (shared / "cache").glob("toy-*.lock")
    lock.chmod(0o644)  # as earlier versions left it
    assert as_user(shared, 5002, 5000) == str(SIZES["train"])


@needs_root
def test_what_the_group_cannot_use_is_named_with_the_way_out(shared: Path) -> None:
    as_user(shared, 5001, 5000, killed=True)
    (lock,) = (shared / "cache").glob("toy-*.lock")
    lock.chmod(0o600)
    message = as_user(shared, 5002, 5000)
    assert message.startswith(f"{lock}: this lock cannot be opened (Permission denied)")
    assert "chmod a+rw" in message and "paths.cache" in message
    assert as_user(shared, 5001, 5000, 0o077) == str(SIZES["train"])
    message = as_user(shared, 5002, 5000)
    assert "not readable (Permission denied)" in message
    assert f"chmod -R a+rX {lock.with_suffix('')}" in message and "paths.cache" in message


@needs_root
def test_a_ready_cache_that_is_only_read_is_checked_once(
    shared: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = shared / "tmp"
    place.mkdir()
    place.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    assert as_user(shared, 5001, 5000) == str(SIZES["train"])
    shutil.rmtree(shared / "cache" / "fingerprints")
    (shared / "cache").chmod(0o755)
    capfd.readouterr()
    for checks in (1, 0, 0):
        assert as_user(shared, 5002, 5000) == str(SIZES["train"])
        assert capfd.readouterr().err.count("checking every byte") == checks
    memory = place / "lra-fingerprints-5002"
    memory.chmod(0o777)
    os.chown(memory, 5003, 5003)  # somebody else's memory is not believed
    assert as_user(shared, 5002, 5000) == str(SIZES["train"])
    assert capfd.readouterr().err.count("checking every byte") == 1
