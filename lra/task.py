"""What a task is, and how its source becomes a cache once, atomically.

A task is a dataclass that derives from `Task`: its fields are the keys of
`configs/task/<name>.yaml`. It says where its data come from and yields examples; everything else
(cache, batches, metrics) is shared.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from lra.data import ARRAYS, SplitWriter, TokenArrays, file_sha256
from lra.files import check_writable, is_refused, write_atomically
from lra.progress import counting

SPLITS = ("train", "val", "test")
FORMAT_VERSION = 1  # of the cache folder; part of its name


class Example(NamedTuple):
    """Raw values (id - 1) of each sequence, as bytes or an unsigned array, and the class."""

    sequences: tuple[np.ndarray | bytes, ...]
    label: int


@dataclass(kw_only=True)
class Task(ABC):
    """One task. Class constants say what it is, fields how it is prepared.

    A subclass sets the constants, calls `super().__post_init__()` if it has checks of its own, and
    implements `settings`, `source_files` (if it reads any) and `examples`.
    """

    name: ClassVar[str]
    num_classes: ClassVar[int]
    num_values: ClassVar[int]  # raw values are 0 .. num_values - 1
    num_sequences: ClassVar[int] = 1
    official_sizes: ClassVar[dict[str, int]] = {}  # examples per split of the benchmark itself
    class_names: ClassVar[tuple[str, ...]] = ()  # none: a class is called by its number
    picture_size: ClassVar[tuple[int, int] | None] = None  # height and width, if values are pixels

    data_dir: Path
    max_length: int
    strict: bool = False  # a sequence over max_length is an error instead of a counted cut
    limit_train: int | None = None  # use a class-balanced part; the record then says `partial`
    limit_val: int | None = None
    limit_test: int | None = None

    # Set by `prepare`; not configuration.
    num_workers: int = field(default=1, init=False, repr=False)
    work_dir: Path | None = field(default=None, init=False, repr=False)  # survives a killed build
    skipped: dict[str, list[str]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.max_length < 1:
            raise ValueError(f"task.max_length={self.max_length}: expected at least 1")
        for name in ("limit_train", "limit_val", "limit_test"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"task.{name}={value}: expected at least 1, or null for all")

    @property
    def vocab_size(self) -> int:
        """Number of ids: padding and one id per raw value."""
        return self.num_values + 1

    @property
    @abstractmethod
    def kind(self) -> Literal["files", "generated", "synthetic"]:
        """Where the data come from, for the record."""

    @property
    def protocol(self) -> dict[str, Any]:
        """Further facts that decide what a number means, e.g. validation or difficulty."""
        return {"validation": "val", "difficulty": None}

    def deviations(self) -> list[str]:
        """How the data differ from the benchmark's own, e.g. other generator limits; [] if not."""
        return []

    @abstractmethod
    def describe_source(self) -> str:
        """The source in words, for people: a path, or the generator and its seed."""

    def source_files(self) -> list[Path]:
        """Files whose content shapes the cache, in a fixed order; empty for generated data.

        Raises:
            ValueError: nothing found; names every place tried, what to get and how.
        """
        return []

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Every setting that shapes the content, JSON-able; `max_length` is added by the caller."""

    @abstractmethod
    def examples(self, split: str) -> Iterator[Example]:
        """Yield the examples of `train`, `val` or `test` in a fixed order, whole (not yet cut).

        Names of examples that had to be left out go to `self.skipped[split]`.
        """

    def vocabulary_hash(self) -> str:
        """What each raw value stands for, as one hash; stored with checkpoints."""
        words = [self.decode(np.array([value], np.uint16)) for value in range(self.num_values)]
        return hashlib.sha256("\n".join(words).encode(errors="surrogateescape")).hexdigest()

    def encode(self, given: Any) -> np.ndarray | bytes:
        """Raw values of one sequence from what a person has, whole: here numbers, or a picture's.

        A task whose raw values are no numbers to a person overrides this.

        Raises:
            ValueError: not of this form, or a value is out of range; says which and where.
        """
        values = np.frombuffer(given, np.uint8) if isinstance(given, bytes) else np.asarray(given)
        if values.shape == self.picture_size:
            values = values.ravel()
        if values.ndim != 1 or values.dtype.kind not in "iu":
            shape = f" of shape {values.shape}" if values.ndim else ""
            size = " or {} x {}".format(*self.picture_size) if self.picture_size else ""
            raise ValueError(
                f"{type(given).__name__}{shape} ({values.dtype}), expected an array of whole "
                f"numbers, 0 to {self.num_values - 1}, of one dimension{size} (a list is several "
                "inputs)"
            )
        outside = np.flatnonzero((values < 0) | (values >= self.num_values))
        if len(outside):
            raise ValueError(
                f"value {values[outside[0]]} at place {outside[0]}, expected 0 to "
                f"{self.num_values - 1}"
            )
        return values.astype(np.uint16)

    @abstractmethod
    def decode(self, values: np.ndarray) -> str:
        """Raw values back to what a person can read."""


@dataclass(frozen=True)
class Dataset:
    """The three splits of a prepared task, and the report of their preparation."""

    train: TokenArrays
    val: TokenArrays
    test: TokenArrays
    meta: dict[str, Any]
    folder: Path

    @property
    def fingerprint(self) -> str:
        """Hash of the source's content and of all settings that shaped the cache."""
        return self.meta["fingerprint"]


def fingerprint_files(files: list[Path], memo_dir: Path) -> str:
    """SHA-256 over the files' names and bytes, wherever they lie.

    Reading gigabytes at every start would be slow, so the result is remembered under the files'
    paths, sizes and modification times.
    """
    if not files:
        return ""
    # Plain strings and one hash update: a tree of 50,000 files is checked at every start.
    paths = [os.fspath(file) for file in files]
    root = os.path.commonpath([os.path.dirname(path) for path in paths])
    names = [path[len(root) :].lstrip(os.sep).replace(os.sep, "/") for path in paths]
    stats = [os.stat(path) for path in paths]
    listing = "\n".join(
        f"{name}\t{stat.st_size}\t{stat.st_mtime_ns}"
        for name, stat in zip(names, stats, strict=True)
    )
    signature = hashlib.sha256(
        f"{os.path.realpath(root)}\n{listing}".encode(errors="surrogateescape")
    )
    memo = memo_dir / "fingerprints" / signature.hexdigest()
    if memo.is_file() and len(remembered := memo.read_text()) == 64:
        return remembered
    content = hashlib.sha256()
    for name, file in zip(names, files, strict=True):
        content.update(f"{name}\t{file_sha256(file)}\n".encode(errors="surrogateescape"))
    with contextlib.suppress(OSError):  # a ready cache may lie where nothing can be written
        write_atomically(memo, content.hexdigest())
    return content.hexdigest()


def cache_folder(task: Task, cache_dir: Path) -> tuple[Path, str]:
    """Where this task's cache lies, and its fingerprint (of source content and settings)."""
    key = {
        "format": FORMAT_VERSION,
        "task": task.name,
        "max_length": task.max_length,
        "source": fingerprint_files(task.source_files(), cache_dir),
        "settings": task.settings(),
    }
    fingerprint = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return cache_dir / f"{task.name}-{fingerprint[:12]}", fingerprint


def available_cores() -> int:
    """Processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def prepare(task: Task, cache_dir: Path, *, num_workers: int | None = None) -> Dataset:
    """Open the task's cache, building it first if it is not there, on all cores by default.

    Concurrent callers wait for one builder. A killed build leaves no cache behind.

    Raises:
        ValueError: the source is missing or faulty, or a sequence is too long under `strict`.
        OSError: the cache cannot be written, e.g. the disk is full.
    """
    from filelock import FileLock

    folder, fingerprint = cache_folder(task, cache_dir)
    if not (folder / "meta.json").is_file():
        check_writable(cache_dir, "paths.cache")
        with FileLock(f"{folder}.lock"):
            if not (folder / "meta.json").is_file():
                _build(task, folder, fingerprint, num_workers or available_cores())
    return open_dataset(task, folder)


def open_dataset(task: Task, folder: Path) -> Dataset:
    """Open a finished cache folder and apply the task's limits."""
    try:
        meta = json.loads((folder / "meta.json").read_text())
        splits = {
            split: TokenArrays(folder / split, task.num_sequences, task.max_length)
            for split in SPLITS
        }
        for split, arrays in splits.items():
            if len(arrays) != meta["splits"][split]["num_examples"]:
                raise ValueError(
                    f"{folder}: {split} has {len(arrays)} examples, its meta.json says "
                    f"{meta['splits'][split]['num_examples']}; delete the folder and prepare again"
                )
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{folder / 'meta.json'}: damaged ({error}); delete the folder and prepare again"
        ) from None
    for split in SPLITS:
        if task.strict and meta["splits"][split]["truncated"]:
            message = truncation(task, split, meta["splits"][split])
            raise ValueError(f"{message}; raise it, or set task.strict=false to have them cut")
        limit = getattr(task, f"limit_{split}")
        if limit is not None:
            splits[split] = splits[split].subset(stratified(splits[split].labels, limit))
    return Dataset(**splits, meta=meta, folder=folder)


def remarks(report: dict[str, Any]) -> list[str]:
    """What is odd about a split, although it may be meant so."""
    found = []
    if report["empty"]:
        found.append(f"{report['empty']} empty sequences, the first in example "
                     f"{report['first_empty']}")  # fmt: skip
    if absent := [c for c, count in enumerate(report["label_histogram"]) if not count]:
        found.append(f"no example of class {', '.join(map(str, absent))}")
    return found


def truncation(task: Task, split: str, report: dict[str, Any]) -> str:
    """How many examples of a split do not fit, in words."""
    return (
        f"task '{task.name}': {report['truncated']} of {report['num_examples']} {split} examples "
        f"are longer than task.max_length={task.max_length} (longest: {report['longest_source']})"
    )


def stratified(labels: np.ndarray, size: int, seed: int = 0) -> np.ndarray:
    """Sorted indices of a part of `size` examples that keeps the shares of the classes.

    Independent of the run's seed, so that every run sees the same part.
    """
    if size >= len(labels):
        return np.arange(len(labels))
    order = np.random.default_rng(seed).permutation(len(labels))
    by_class = [order[labels[order] == c] for c in np.unique(labels)]
    # Largest remainders: the counts differ from exact shares by less than one and sum to `size`.
    exact = np.array([len(rows) * size / len(labels) for rows in by_class])
    counts = np.floor(exact).astype(int)
    counts[np.argsort(counts - exact, kind="stable")[: size - counts.sum()]] += 1
    return np.sort(np.concatenate([rows[:n] for rows, n in zip(by_class, counts, strict=True)]))


def verify(dataset: Dataset) -> None:
    """Compare every array's checksum with the one written when the cache was built.

    Raises:
        ValueError: an array differs; names the file.
    """
    for split in SPLITS:
        for name in ARRAYS:
            path = dataset.folder / split / f"{name}.npy"
            if file_sha256(path) != dataset.meta["splits"][split]["sha256"][name]:
                raise ValueError(
                    f"{path}: checksum differs from meta.json; delete {dataset.folder} "
                    "and prepare again"
                )


def _build(task: Task, folder: Path, fingerprint: str, num_workers: int) -> None:
    temporary = folder.with_name(f".{folder.name}.building")
    shutil.rmtree(temporary, ignore_errors=True)  # left by a killed builder; the lock is ours now
    task.num_workers = num_workers
    task.work_dir = folder.with_name(f"{folder.name}.work")
    started = time.monotonic()
    meta: dict[str, Any] = {
        "format": FORMAT_VERSION,
        "task": task.name,
        "fingerprint": fingerprint,
        "kind": task.kind,
        "source": task.describe_source(),
        "max_length": task.max_length,
        "settings": task.settings(),
        "splits": {},
    }
    print(f"preparing {task.name} from {task.describe_source()}", file=sys.stderr, flush=True)
    try:
        for split in SPLITS:
            task.skipped[split] = []
            writer = SplitWriter(
                temporary / split,
                task.num_sequences,
                task.num_values,
                task.num_classes,
                task.max_length,
            )
            total = task.official_sizes.get(split) if task.kind != "synthetic" else None
            with counting(f"  {split}", total) as show:
                for number, (sequences, label) in enumerate(task.examples(split), start=1):
                    writer.add(sequences, label)
                    show(number)
            report = writer.close()
            if not report["num_examples"]:
                raise ValueError(
                    f"task '{task.name}': the {split} split of {task.describe_source()} is empty"
                )
            if report["truncated"]:
                message = truncation(task, split, report)
                if task.strict:
                    raise ValueError(f"{message}; raise it, or set task.strict=false to cut them")
                print(f"  {message}; cut", file=sys.stderr)
            for remark in remarks(report):
                print(f"  task '{task.name}', {split}: {remark}", file=sys.stderr)
            report["skipped"] = task.skipped[split]
            meta["splits"][split] = report
        meta["seconds"] = round(time.monotonic() - started, 3)
        (temporary / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
        shutil.rmtree(folder, ignore_errors=True)  # a cache without its meta.json
        os.replace(temporary, folder)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        # numpy tells of a full disk without a number, in how many values were written.
        if is_refused(error) or (isinstance(error, OSError) and error.errno is None):
            raise OSError(
                f"{folder}: the cache was not written "
                f"({error.strerror or f'{error}: no space is left, perhaps'}); "
                "free some space or choose another paths.cache"
            ) from error
        raise
    shutil.rmtree(task.work_dir, ignore_errors=True)
    task.work_dir = None
