"""What tasks that read files share: where the files lie, and which of them are taken."""

from __future__ import annotations

import filecmp
import hashlib
import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from lra.tasks.archives import is_archive
from lra.tasks.beside import apart, listing, unread
from lra.tasks.cache import known_equal
from lra.tasks.columnar import (
    TableRow,
    arrow_rows,
    find_tables,
    hub_tables,
    is_commit,
    table_rows,
)
from lra.tasks.task import SPLITS, Task, check_path

READER_VERSION = 1  # raise it when the same files give other examples; part of the cache's name
STAND_IN_VERSION = 1  # likewise for the synthetic stand-ins

Row = tuple[bytes, int]  # raw values of one sequence, and the label


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
    own_folders: ClassVar[tuple[str, ...]] = ()  # under the data folder, of this task alone
    own_names: ClassVar[str] = "(?!)"  # what else is meant for this task, by its name: a pattern
    remedy: ClassVar[str]  # what to get and how; `{data}` is the data folder

    source: Literal["auto", "files", "hub", "synthetic"] = "auto"
    path: str | None = None
    num_train: int | None = None
    num_val: int | None = None
    num_test: int | None = None
    synthetic_seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_path(self.path, self.source)
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
    def sizes(self) -> dict[str, int]:
        """Examples per split of the stand-in, or of the benchmark where files are read."""
        if self.source != "synthetic":
            return self.official_sizes
        return {s: getattr(self, f"num_{s}") or self.synthetic_sizes[s] for s in SPLITS}

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
                difference := _difference(places[0], other, self._files_at, self.memo_dir)
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

    def left_out(self) -> list[str]:
        """What lies beside the place that is read, in the folders that are searched."""
        if self.source in ("hub", "synthetic"):
            return []
        return apart(self._unread(with_root=False), [place.path for place in self._places()])

    def synthetic_settings(self) -> dict[str, Any]:
        """What shapes the stand-in."""
        version, seed = STAND_IN_VERSION, self.synthetic_seed
        return {"source": "synthetic", "version": version, "sizes": self.sizes, "seed": seed}

    def synthetic_labels(self, split: str) -> tuple[np.random.Generator, list[int]]:
        """Balanced, shuffled labels of a synthetic split, and the generator for the rest of it."""
        rng = np.random.default_rng([self.synthetic_seed, SPLITS.index(split)])
        labels = np.arange(self.sizes[split]) % self.num_classes
        return rng, rng.permutation(labels).tolist()

    @abstractmethod
    def _places(self) -> list[Place]:
        """All places with at least a part of the data, the preferred one first."""

    @abstractmethod
    def _files_at(self, place: Place) -> list[Path]:
        """The files to read at a place, in a fixed order."""

    def _unread(self, with_root: bool = True) -> list[Path]:
        """What lies in the folders of this task alone, or is called as if it were meant for it.

        The one that `path` names is such a folder, but where it has the data, it may be shared.
        """
        if not self.root.is_dir():
            return []
        own = [self.root / name for name in self.own_folders]
        shared = [self.root / name for name in ("", "lra_release", "lra_release/lra_release")]
        if self.path is not None and with_root:
            own.append(self.root)
        return unread(own, shared, self.own_names)

    @abstractmethod
    def _tried(self) -> list[Path]:
        """Every place that `_places` looks at."""

    def _not_found(self) -> ValueError:
        tried = ", ".join(str(path) for path in self._tried())
        missing = "" if self.root.exists() else f" ({self.root} does not exist)"
        if found := self._unread():
            missing = f", and cannot read what is there: {listing(found)}"
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

    A `hub_name` that is a folder here is read as such (the library does so), and its files count
    for the cache as others do. Of the hub itself only name and revision count: which commit a
    branch stands for is known once it has been read, and a ready cache has to open without a
    network. So a cache of a revision that moves stays as it was built, and a remark says of which
    commit that was; only with a commit in full as `hub_revision` are the data certain.

    Raises:
        ValueError: a setting is out of range; names the key.
    """

    folders: ClassVar[tuple[str, ...]]  # under the data folder, in order of preference
    archives: ClassVar[tuple[str, ...]]
    columns: ClassVar[tuple[tuple[str, ...], ...]]  # of tables, each with its possible names
    class_spellings: ClassVar[tuple[tuple[str, ...], ...]]  # spellings of each class in tables

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
        if self._hub_folder is not None:
            return f"the folder {self._hub_folder.resolve()}"
        if self.source == "hub":
            return f"{self.hub_name} of the hub, revision {self.hub_revision or 'main'}"
        return super().describe_source()

    def source_files(self) -> list[Path]:
        """Likewise; of the hub those of a local folder, if `hub_name` is one."""
        return super().source_files() if self._hub_folder is None else _data_files(self._hub_folder)

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

    def part(self, split: str, held_N: np.ndarray) -> list[Row]:
        """Of the source's train those rows that are held out for `val`, or the others.

        Raises:
            ValueError: one of the two has none; names the key.
        """
        if len(np.unique(held_N)) == 1:
            raise ValueError(
                f"task.val_fraction={self.val_fraction}: of {len(held_N):,} training examples it "
                f"holds out {'all' if held_N[0] else 'none'}; expected some in train and in val"
            )
        rows = self.rows("train")
        return [rows[i] for i in np.flatnonzero(held_N if split == "val" else ~held_N)]

    def overlaps(self, other: Mapping[str, Any]) -> str:
        """Likewise: what is validation here is train where another part was held out, or none.

        By the fractions, since nothing is read for it. Every source counts as the same corpus.
        """
        try:
            theirs = self.with_keys(other)
        except (AttributeError, TypeError, ValueError, OSError):
            return ""
        if self.held_by is None or "synthetic" in (self.source, theirs.source):
            return ""
        share = 1 if theirs.held_by is None else 1 - theirs.val_fraction
        if theirs.held_by == self.held_by:  # the smaller part is the beginning of the larger
            share = 1 - theirs.val_fraction / self.val_fraction
        if share <= 0:
            return ""
        keys = ("validation", "split", "split_seed", "val_fraction")
        differing = ", ".join(
            f"task.{key}={getattr(theirs, key)} there, {getattr(self, key)} here"
            for key in keys
            if getattr(theirs, key, None) != getattr(self, key, None)
        )
        about = "up to" if theirs.limit_train else "about"
        return (
            f"{about} {100 * share:.0f} % of the validation examples are among those of the other "
            f"training ({differing}); set as there"
        )

    @property
    @abstractmethod
    def held_by(self) -> tuple[Any, ...] | None:
        """What decides which of the source's train are validation, but for `val_fraction`.

        None: none of them is.
        """

    @property
    def _hub_folder(self) -> Path | None:
        """The folder that the library reads in place of the hub, if there is one of that name."""
        is_local = self.source == "hub" and os.path.isdir(self.hub_name)
        return Path(self.hub_name) if is_local else None

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
        found += [Place(path, "table") for path in tables if find_tables(path).files]
        return distinct(found)

    def left_out(self) -> list[str]:
        """Likewise; and tables beside the data's own."""
        if self.source in ("hub", "synthetic") or self.place.form != "table":
            return super().left_out()
        return [*find_tables(self.place.path).left_out, *super().left_out()]

    def _files_at(self, place: Place) -> list[Path]:
        if place.form == "archive":
            return [place.path]
        if place.form == "folder":
            return self._files_in(place.path)
        files = find_tables(place.path).files
        return [file for split in ("train", "test") for file in files[split]]

    def _load(self) -> dict[str, list[Row]]:
        if self.source == "hub":
            tables, commit = hub_tables(self.hub_name, self.hub_revision)
            if self._hub_folder is None and not is_commit(self.hub_revision):
                self.remarks.append(
                    f"{self.describe_source()} may move, and this cache will not follow"
                    + (f": it has commit {commit}" if commit else "")
                    + f"; task.hub_revision={commit or 'COMMIT'} names data that stay"
                )
            return {
                split: self._read_table(
                    arrow_rows(table, f"{self.hub_name}, {split}", self.columns)
                )
                for split, table in tables.items()
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
            for split, files in find_tables(place.path).files.items()
        }


def _data_files(folder: Path) -> list[Path]:
    """All files below a folder, sorted, links followed; of hidden ones that of settings alone.

    The library looks at no others (`.cache` and `.git` are of the tools that fetched the folder).
    """
    found = []
    for parent, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [
            Path(parent, name)
            for name in names
            if not name.startswith(".") or name == ".huggingface.yaml"
        ]
    return sorted(file for file in found if file.is_file())


def distinct(places: Iterable[Place]) -> list[Place]:
    """The places in order, without those that are an earlier one by a link."""
    found: dict[Path, Place] = {}
    for place in places:
        found.setdefault(place.path.resolve(), place)
    return list(found.values())


def _difference(
    first: Place, second: Place, files_at: Callable[[Place], list[Path]], memo_dir: Path | None
) -> str:
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
    if known_equal([*ours.values()], [*theirs.values()], memo_dir):
        return ""
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
