"""Archives and compressed files, read in place.

Nothing is unpacked to disk, nothing that a file says is executed, and a size is checked before
memory is taken for it.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO

MAX_FILE_BYTES = 64 << 20  # of one file, in an archive or not; the largest real one has 31 MB
MAX_ARCHIVE_BYTES = 4 << 30  # of a whole archive, uncompressed


def read_file(path: str | Path, max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """The content of a file.

    Raises:
        ValueError: larger than `max_bytes`.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise ValueError(f"{path}: {size} bytes, expected at most {max_bytes}")
        return file.read()


@contextlib.contextmanager
def open_plain(path: Path) -> Iterator[BinaryIO]:
    """The bytes of a file, those inside if its name ends in `.gz`.

    Raises:
        ValueError: damaged, also while it is read; names the file.
    """
    with path.open("rb") as file:
        if path.suffix != ".gz":
            yield file
            return
        try:
            yield gzip.GzipFile(fileobj=file)  # type: ignore[misc]
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{path}: not a whole gzip file ({error}); get it again") from None


def count_line_ends(path: Path) -> tuple[int, int]:
    """How many lines of a file end in a line feed, and how many of these in CR LF."""
    total, with_return, before = 0, 0, b""
    with open_plain(path) as file:
        while block := file.read(1 << 20):
            total += block.count(b"\n")
            with_return += (before + block).count(b"\r\n")
            before = block[-1:].replace(b"\n", b"")
    return total, with_return


def is_archive(path: Path) -> bool:
    """Whether a file, whatever its name, is a tar archive or compressed with gzip."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(512)
    return head[:2] == b"\x1f\x8b" or head[257:262] == b"ustar"


def tar_members(archive: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of the wanted files of a tar archive, plain or gzip, in its order.

    Raises:
        ValueError: damaged, or a member (wanted or not) is neither a plain file nor a folder,
            points outside of the archive, is too large or appears twice; names both.
    """
    seen: set[str] = set()
    with archive.open("rb") as file:
        is_packed = file.peek(2)[:2] == b"\x1f\x8b"
        reader = _BoundedReader(gzip.GzipFile(fileobj=file) if is_packed else file)  # type: ignore[arg-type]
        try:
            with tarfile.open(fileobj=reader, mode="r:") as tar:
                while (member := tar.next()) is not None:
                    tar.members = []  # type: ignore[attr-defined] # headers would fill the memory
                    name = member.name.removeprefix("./")
                    is_wanted = member.isreg() and wanted(name)
                    if fault := _fault(member, is_wanted and name in seen):
                        raise _Refused(f"{archive}: member {member.name!r} {fault}; refused")
                    if not is_wanted:
                        continue
                    seen.add(name)
                    content = tar.extractfile(member)
                    assert content is not None
                    yield name, content.read()
            # The module takes a damaged header for the end, which is a block of zeros.
            if reader.last != bytes(tarfile.BLOCKSIZE):
                raise tarfile.ReadError("cut, or with a damaged header")
            # The checksum of a gzip stream is compared at its very end.
            for _ in range(MAX_ARCHIVE_BYTES >> 20):
                if not reader.read(1 << 20):
                    break
        except _Refused:
            raise
        # A damaged header may fail in many ways.
        except (tarfile.TarError, EOFError, zlib.error, ValueError, gzip.BadGzipFile) as error:
            raise ValueError(
                f"{archive}: not a whole tar archive, plain or gzip ({error}); get it again"
            ) from None


class _Refused(ValueError):
    """A member that no honest archive has."""


class _BoundedReader(io.BufferedReader):
    """Reads no more at once than a file may have: the sizes in headers are not to be trusted."""

    last = b""  # what was read last

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= MAX_FILE_BYTES:
            raise tarfile.ReadError(f"a header asks for {size} bytes")
        self.last = super().read(size)
        return self.last


def _fault(member: tarfile.TarInfo, is_repeated: bool) -> str:
    """Why a member is refused, empty if it is not."""
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts:
        return "points outside of the archive"
    if member.issym() or member.islnk():
        return f"is a link to {member.linkname!r}"
    if member.isdir():
        return ""
    if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.issparse():
        return "is neither a plain file nor a folder"
    if not 0 <= member.size <= MAX_FILE_BYTES:
        return f"has {member.size} bytes, expected at most {MAX_FILE_BYTES}"
    if member.offset_data + member.size > MAX_ARCHIVE_BYTES:
        return f"brings the archive over {MAX_ARCHIVE_BYTES} bytes"
    return "appears twice" if is_repeated else ""
