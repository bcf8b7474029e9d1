"""What the tasks read from files share: where files lie, and how archives and tables are read.

Archives are read in place. Nothing is unpacked to disk, nothing that a file says is executed, and a
size is checked before memory is taken for it.
"""

from __future__ import annotations

import filecmp
import gzip
import hashlib
import importlib.util
import io
import os
import re
import tarfile
import typing
import urllib.error
import urllib.request
import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from lra.task import SPLITS, Task

READER_VERSION = 1  # raise it when the same files give other examples; part of the cache's name
STAND_IN_VERSION = 1  # likewise for the synthetic stand-ins
MAX_FILE_BYTES = 64 << 20  # of one file, in an archive or not; the largest real one has 31 MB
MAX_ARCHIVE_BYTES = 4 << 30  # of a whole archive, uncompressed

_TABLE_SPLIT = re.compile(r"(?:^|[-_.])(train|test)(?:[-_.]|$)")
_HUB_TIMEOUT_S = 5
_INSTALL_HUB = "run: pip install 'lra-harness[hub]'"

Row = tuple[bytes, int]  # raw values of one sequence, and the label
TableRow = tuple[str, tuple[Any, ...]]  # where it stands, for messages, and its columns


class Place(NamedTuple):
    """Where a task's data were found: a folder of files, an archive, or a folder of tables."""

    path: Path
    form: Literal["folder", "archive", "table"]


@dataclass(kw_only=True)
class FileTask(Task):
    """A task read from files that people have, with a synthetic stand-in of the same shape.

    `source=auto` and `source=files` are the same: without files there is nothing to fall back on.

    Raises:
        ValueError: a setting is none of its choices, or not read with this source; names it.
    """

    synthetic_sizes: ClassVar[dict[str, int]] = {"train": 2_000, "val": 200, "test": 200}
    what: ClassVar[str]  # the data in a few words, for messages
    remedy: ClassVar[str]  # what to get and how; `{data}` is the data folder

    source: Literal["auto", "files", "hub", "synthetic"] = "auto"
    path: str | None = None
    num_train: int | None = None
    num_val: int | None = None
    num_test: int | None = None
    synthetic_seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, hint in typing.get_type_hints(type(self)).items():
            choices = typing.get_args(hint)
            if typing.get_origin(hint) is Literal and getattr(self, key) not in choices:
                raise ValueError(
                    f"task.{key}={getattr(self, key)}: expected {', '.join(choices[:-1])} "
                    f"or {choices[-1]}"
                )
        if self.path is not None and self.source not in ("auto", "files"):
            raise ValueError(
                f"task.path={self.path} names files, but task.source={self.source} reads none; "
                "drop one of them"
            )
        for key in ("num_train", "num_val", "num_test"):
            value = getattr(self, key)
            if value is None:
                continue
            if self.source != "synthetic":
                raise ValueError(
                    f"task.{key}={value} is for task.source=synthetic only; "
                    f"use task.limit_{key[4:]} for a part of the files"
                )
            if value < 1:
                raise ValueError(f"task.{key}={value}: expected at least 1, or null for the usual")
        if self.synthetic_seed < 0:
            raise ValueError(f"task.synthetic_seed={self.synthetic_seed}: expected at least 0")

    @property
    def kind(self) -> Literal["files", "generated", "synthetic"]:
        """`synthetic` for the stand-in, else `files`."""
        return "synthetic" if self.source == "synthetic" else "files"

    @property
    def root(self) -> Path:
        """The only place looked into: `path` if it is given, else the data folder."""
        return Path(self.data_dir) if self.path is None else Path(self.path).expanduser()

    @cached_property
    def place(self) -> Place:
        """Where the data are; looked for once.

        Raises:
            ValueError: nothing found, or several places with different files.
        """
        places = self._places()
        if not places:
            raise self._not_found()
        for other in places[1:]:
            if other.form == places[0].form and (
                difference := _difference(places[0], other, self._files_at)
            ):
                found = ", ".join(str(place.path) for place in places)
                raise ValueError(
                    f"task '{self.name}': {self.what} found in several places that differ: "
                    f"{found} ({difference}); set task.path to the one to use"
                )
        return places[0]

    def describe_source(self) -> str:
        """The source in words, for people."""
        if self.source == "synthetic":
            return f"a synthetic stand-in, seed {self.synthetic_seed}"
        return str(self.place.path)

    def source_files(self) -> list[Path]:
        """The files that are read, in a fixed order; empty for the hub and the stand-in.

        Raises:
            ValueError: nothing found, an incomplete set, or several places with different files.
        """
        if self.source in ("hub", "synthetic"):
            return []
        return self._files_at(self.place)

    def synthetic_settings(self) -> dict[str, Any]:
        """What shapes the stand-in."""
        sizes = {split: self._synthetic_size(split) for split in SPLITS}
        seed = self.synthetic_seed
        return {"source": "synthetic", "version": STAND_IN_VERSION, "sizes": sizes, "seed": seed}

    def synthetic_labels(self, split: str) -> tuple[np.random.Generator, list[int]]:
        """Balanced, shuffled labels of a synthetic split, and the generator for the rest of it."""
        rng = np.random.default_rng([self.synthetic_seed, SPLITS.index(split)])
        labels = np.arange(self._synthetic_size(split)) % self.num_classes
        return rng, rng.permutation(labels).tolist()

    def _synthetic_size(self, split: str) -> int:
        return getattr(self, f"num_{split}") or self.synthetic_sizes[split]

    @abstractmethod
    def _places(self) -> list[Place]:
        """All places with at least a part of the data, the preferred one first."""

    @abstractmethod
    def _files_at(self, place: Place) -> list[Path]:
        """The files to read at a place, in a fixed order."""

    @abstractmethod
    def _tried(self) -> list[Path]:
        """Every place that `_places` looks at."""

    def _not_found(self) -> ValueError:
        tried = ", ".join(str(path) for path in self._tried())
        missing = "" if self.root.exists() else f" ({self.root} does not exist)"
        return ValueError(
            f"task '{self.name}': found no {self.what}; tried {tried}{missing}. "
            f"{self.remedy.format(data=self.data_dir)} task.path names another place, "
            "and task.source=synthetic makes a small stand-in"
        )


@dataclass(kw_only=True)
class CorpusTask(FileTask):
    """A task whose files may also come as an archive, as Parquet or Arrow tables, or from the hub.

    It has no validation split of its own; a part of train is held out. All examples of such a task
    fit in memory: they are read once, and given back when the last split has been asked for.

    Raises:
        ValueError: a setting is out of range; names the key.
    """

    folders: ClassVar[tuple[str, ...]]  # under the data folder, in order of preference
    archives: ClassVar[tuple[str, ...]]
    columns: ClassVar[tuple[tuple[str, ...], ...]]  # of tables, each with its possible names

    val_fraction: float = 0.1
    split_seed: int = 0
    hub_name: str
    hub_revision: str | None = None

    _loaded: dict[str, list[Row]] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.val_fraction < 1:
            raise ValueError(f"task.val_fraction={self.val_fraction}: expected 0 < fraction < 1")

    def describe_source(self) -> str:
        """The source in words, for people."""
        if self.source == "hub":
            return f"{self.hub_name} of the hub, revision {self.hub_revision or 'main'}"
        return super().describe_source()

    def file_settings(self) -> dict[str, Any]:
        """What shapes the examples as they are read, before any split."""
        if self.source == "hub":
            hub = {"name": self.hub_name, "revision": self.hub_revision}
            return {"source": "hub", "reader": READER_VERSION, **hub}
        return {"source": "files", "reader": READER_VERSION}

    def rows(self, split: Literal["train", "test"], last: bool = False) -> list[Row]:
        """The examples of one of the source's splits, in its order; `last` frees the memory.

        Raises:
            ValueError: a file, member or row is faulty, or places hold different examples.
        """
        if self._loaded is None:
            self._loaded = self._load()
        rows = self._loaded[split]
        if last:
            self._loaded = None
        return rows

    @abstractmethod
    def _has_folder(self, folder: Path) -> bool:
        """Whether a folder has at least a part of the task's own files."""

    @abstractmethod
    def _files_in(self, folder: Path) -> list[Path]:
        """The task's own files in a folder, in a fixed order."""

    @abstractmethod
    def _read_folder(self, folder: Path) -> dict[str, list[Row]]:
        """Examples of each of the source's splits, from its own files."""

    @abstractmethod
    def _read_archive(self, archive: Path) -> dict[str, list[Row]]:
        """Likewise, from an archive that is read in place."""

    @abstractmethod
    def _read_table(self, rows: Iterator[TableRow]) -> list[Row]:
        """Examples of one split, from the rows of a table."""

    def _tried(self) -> list[Path]:
        if self.root.is_file():
            return [self.root]
        return [self.root / name for name in (*self.folders, *self.archives)]

    def _places(self) -> list[Place]:
        if self.root.is_file() and not is_archive(self.root):
            raise ValueError(
                f"{self.root}: neither a folder nor a tar archive; expected {self.folders[0]}, its "
                "archive, or a folder of Parquet or Arrow files"
            )
        folders = [path for path in self._tried() if self._has_folder(path)]
        tables = [
            self.root / name
            for name in self.folders
            # The data folder itself may hold another task's tables.
            if (name or self.path is not None) and self.root / name not in folders
        ]
        found = [Place(path, "folder") for path in folders]
        found += [Place(path, "archive") for path in self._tried() if path.is_file()]
        found += [Place(path, "table") for path in tables if table_files(path)]
        return distinct(found)

    def _files_at(self, place: Place) -> list[Path]:
        if place.form == "archive":
            return [place.path]
        if place.form == "folder":
            return self._files_in(place.path)
        files = table_files(place.path)
        return [file for split in ("train", "test") for file in files[split]]

    def _load(self) -> dict[str, list[Row]]:
        if self.source == "hub":
            return {
                split: self._read_table(
                    arrow_rows(table, f"{self.hub_name}, {split}", self.columns)
                )
                for split, table in hub_tables(self.hub_name, self.hub_revision).items()
            }
        rows = self._load_place(self.place)
        for other in self._places():
            # Those of the same form have been compared file by file.
            if other.form != self.place.form and not _same_rows(rows, self._load_place(other)):
                raise ValueError(
                    f"task '{self.name}': {self.place.path} and {other.path} hold different "
                    f"{self.what}; set task.path to the one to use"
                )
        return rows

    def _load_place(self, place: Place) -> dict[str, list[Row]]:
        if place.form == "folder":
            return self._read_folder(place.path)
        if place.form == "archive":
            return self._read_archive(place.path)
        return {
            split: [
                row for file in files for row in self._read_table(table_rows(file, self.columns))
            ]
            for split, files in table_files(place.path).items()
        }


def distinct(places: Iterable[Place]) -> list[Place]:
    """The places in order, without those that are an earlier one by a link."""
    found: dict[Path, Place] = {}
    for place in places:
        found.setdefault(place.path.resolve(), place)
    return list(found.values())


def _difference(first: Place, second: Place, files_at: Callable[[Place], list[Path]]) -> str:
    """What differs between the files of two places, empty if nothing."""

    def names(place: Place) -> dict[str, Path]:
        if place.form == "archive":
            return {"the archive": place.path}
        return {file.relative_to(place.path).as_posix(): file for file in files_at(place)}

    try:
        ours, theirs = names(first), names(second)
    except ValueError as incomplete:
        return str(incomplete)
    if unmatched := sorted(ours.keys() ^ theirs.keys()):
        return f"{unmatched[0]} is in one only"
    for name, file in ours.items():
        if not filecmp.cmp(file, theirs[name], shallow=False):
            return f"{name} differs"
    return ""


def _same_rows(ours: dict[str, list[Row]], theirs: dict[str, list[Row]]) -> bool:
    """Whether two places hold the same examples, in whatever order."""
    return all(sorted(rows) == sorted(theirs[split]) for split, rows in ours.items())


def held_out(rows: list[Row], fraction: float, seed: int) -> np.ndarray:
    """Which rows [N] (bool) are held out: `fraction` of each class, at least one row of it.

    Chosen by hashes of seed and content, so that a row's side does not depend on its place, and
    equal rows stay together (but for those at the edge of the fraction).
    """
    salt = f"{seed}\n".encode()
    order = sorted(
        (label, hashlib.sha256(salt + values).digest(), i) for i, (values, label) in enumerate(rows)
    )
    chosen = np.zeros(len(rows), bool)
    for label in {label for _, label in rows}:
        members = [i for other, _, i in order if other == label]
        chosen[members[: max(1, int(fraction * len(members) + 0.5))]] = True
    return chosen


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


# --- archives -------------------------------------------------------------------------------------


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


# --- Parquet and Arrow tables, the hub ------------------------------------------------------------


def table_files(folder: Path) -> dict[str, list[Path]]:
    """Parquet or Arrow files of `train` and `test`, at most one folder down; empty without any.

    A file belongs to the split that its name, else the name of its folder, has as a word.

    Raises:
        ValueError: one of the two splits is missing, or there are files of both kinds.
    """
    found: dict[str, list[Path]] = {}
    for pattern in ("*", "*/*"):
        for file in sorted(folder.glob(pattern)):
            if file.suffix not in (".parquet", ".arrow") or file.name.startswith("."):
                continue
            for part in reversed(file.relative_to(folder).parts):
                if word := _TABLE_SPLIT.search(part):
                    found.setdefault(word[1], []).append(file)
                    break
    suffixes = sorted({file.suffix for files in found.values() for file in files})
    if len(suffixes) > 1:
        raise ValueError(f"{folder} has {' and '.join(suffixes)} files; expected one kind only")
    if len(found) == 1:
        missing = "test" if "train" in found else "train"
        raise ValueError(
            f"{folder} has no file of the {missing} split, e.g. {missing}{suffixes[0]}"
        )
    return found


def table_rows(file: Path, columns: Sequence[tuple[str, ...]]) -> Iterator[TableRow]:
    """Yield the rows of a Parquet or Arrow file; a column is given by its possible names.

    Text comes as its UTF-8 bytes.

    Raises:
        ValueError: pyarrow is missing, or the file is damaged or lacks a column; names the file.
    """
    if importlib.util.find_spec("pyarrow") is None:
        raise ValueError(f"{file}: reading it needs the package pyarrow; {_INSTALL_HUB}")
    import pyarrow as pa
    import pyarrow.parquet as pq

    def batches() -> Iterator[Any]:
        if file.suffix == ".parquet":
            yield from pq.ParquetFile(file).iter_batches(batch_size=1024)
            return
        with pa.memory_map(str(file)) as mapped:
            try:
                reader = pa.ipc.open_stream(mapped)
            except pa.ArrowInvalid:  # the other of Arrow's two formats
                reader = pa.ipc.open_file(mapped)
                yield from (reader.get_batch(i) for i in range(reader.num_record_batches))
            else:
                yield from reader

    try:
        yield from arrow_rows(batches(), str(file), columns)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{file}: not a whole {file.suffix[1:]} file ({error})") from None


def arrow_rows(
    batches: Iterable[Any], name: str, columns: Sequence[tuple[str, ...]]
) -> Iterator[TableRow]:
    """The rows of pyarrow record batches or tables, see `table_rows`; `name` is for messages."""
    import pyarrow as pa

    row = 0
    for batch in batches:
        known = batch.schema.names
        chosen = []
        for names in columns:
            present = [column for column in names if column in known]
            if not present:
                raise ValueError(
                    f"{name}: no column {' or '.join(names)}; it has {', '.join(known)}"
                )
            values = batch.column(present[0])
            if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
                values = values.cast(pa.large_binary())
            chosen.append(values.to_pylist())
        for values in zip(*chosen, strict=True):
            yield f"{name}, row {row}", values
            row += 1


def hub_tables(name: str, revision: str | None) -> dict[str, Iterator[Any]]:
    """Pyarrow tables of `train` and `test` of a data set of the Hugging Face hub.

    A local copy is taken when the hub cannot be reached.

    Raises:
        ValueError: `datasets` is missing, there is neither hub nor copy, or a split is missing.
    """
    if importlib.util.find_spec("datasets") is None:
        raise ValueError(f"task.source=hub needs the package datasets; {_INSTALL_HUB}")
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    state = "reachable"
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        state = "not asked, since HF_HUB_OFFLINE is set"
    elif fault := _unreachable(endpoint):
        # Read by the library when imported; without it, it retries for half a minute.
        os.environ["HF_HUB_OFFLINE"] = "1"
        state = f"unreachable: {fault}"
    import datasets
    from huggingface_hub.constants import HF_HUB_CACHE

    try:
        data = datasets.load_dataset(name, revision=revision)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(
            f"task.source=hub: cannot load '{name}', revision {revision or 'main'}: {error}. "
            f"Tried {endpoint} ({state}) and the local copies in {HF_HUB_CACHE} and "
            f"{datasets.config.HF_DATASETS_CACHE}; without network use task.source=files"
        ) from None
    if missing := sorted({"train", "test"} - set(data)):
        raise ValueError(
            f"task.source=hub: '{name}' has no split {' and no '.join(missing)}; "
            f"it has {', '.join(data)}"
        )
    return {
        split: data[split].with_format("arrow").iter(batch_size=1024) for split in ("train", "test")
    }


def _unreachable(endpoint: str) -> str:
    """Why a server cannot be reached, empty if it answers at all."""
    try:
        request = urllib.request.Request(endpoint, method="HEAD")
        urllib.request.urlopen(request, timeout=_HUB_TIMEOUT_S).close()
    except urllib.error.HTTPError:
        return ""
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", error))
    return ""
