"""A task's cache: built once and whole, checked at every start, opened as memory-mapped arrays."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lra.console import counting, print_line
from lra.files import Held, check_writable, locked, way_out, write_atomically
from lra.tasks.batches import ARRAYS, SplitWriter, TokenArrays, file_sha256
from lra.tasks.beside import shortened
from lra.tasks.checks import copies, oddities, shared, truncation
from lra.tasks.task import SPLITS, Task
from lra.tasks.workers import available_cores

FORMAT_VERSION = 1  # of the cache folder; part of its name
BUILDER = "builder.txt"  # who is at it, in a cache that is being built
BUILDER_IDLE_S = 3600.0  # without a write, after which it is not waited for; a download may take so
TELL_AFTER_S = 1.0  # of waiting; most caches are ready by then
# Errors of pipes, processes and memory, which say nothing of the files.
NOT_OF_FILES = (
    errno.EPIPE, errno.EAGAIN, errno.EINTR, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ECHILD
)  # fmt: skip


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

    @property
    def num_examples(self) -> dict[str, int]:
        """By split."""
        return {split: len(getattr(self, split)) for split in SPLITS}


def fingerprint_files(files: list[Path], memo_dir: Path) -> str:
    """SHA-256 over the files' names and bytes, wherever they lie.

    Reading gigabytes at every start would be slow, so the result is remembered under the files'
    paths, sizes and times.

    Raises:
        OSError: a file cannot be read; names it and the config's keys.
    """
    if not files:
        return ""
    try:
        names, signature = _signature(files)
        if (known := _recall(signature, memo_dir)) is None:
            known = _content([*zip(names, map(file_sha256, files), strict=True)])
            _remember(signature, known, memo_dir)
    except OSError as error:
        raise _unreadable(error) from None
    return known


def known_equal(ours: list[Path], theirs: list[Path], memo_dir: Path | None) -> bool:
    """Whether files have the same names and bytes; False also where nothing can be remembered."""
    return memo_dir is not None and (
        fingerprint_files(ours, memo_dir) == fingerprint_files(theirs, memo_dir)
    )


def _signature(files: list[Path]) -> tuple[list[str], str]:
    """The files' names below their common folder, and a hash of what `stat` says of them."""
    # Plain strings and one hash update: a tree of 50,000 files is checked at every start.
    paths = [os.fspath(file) for file in files]
    root = os.path.commonpath([os.path.dirname(path) for path in paths])
    names = [path[len(root) :].lstrip(os.sep).replace(os.sep, "/") for path in paths]
    stats = [os.stat(path) for path in paths]
    listing = "\n".join(
        # The last also tells a copy that kept the time of its original.
        f"{name}\t{stat.st_size}\t{stat.st_mtime_ns}\t{stat.st_ctime_ns}"
        for name, stat in zip(names, stats, strict=True)
    )
    text = f"{os.path.realpath(root)}\n{listing}"
    return names, hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


def _content(checksums: list[tuple[str, str]]) -> str:
    """One hash of the names and checksums of files."""
    text = "".join(f"{name}\t{checksum}\n" for name, checksum in checksums)
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


def _memos(memo_dir: Path) -> tuple[Path, Path]:
    """Folders of what is remembered: beside the caches, or, where these are only read, among the
    machine's temporary files."""
    own = Path(tempfile.gettempdir()) / f"lra-fingerprints-{os.getuid()}"
    return memo_dir / "fingerprints", own


def _recall(signature: str, memo_dir: Path) -> str | None:
    beside, own = _memos(memo_dir)
    for folder in (beside, own):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if folder == own and own.lstat().st_uid != os.getuid():
                continue  # anybody may have made it
            if len(known := (folder / signature).read_text()) == 64:
                return known
    return None


def _remember(signature: str, content: str, memo_dir: Path) -> None:
    for folder in _memos(memo_dir):
        with contextlib.suppress(OSError):  # a ready cache may lie where nothing can be written
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / signature, content)
            return


def _unreadable(error: OSError) -> OSError:
    """What to say of a file of the source that cannot be read."""
    reason = error.strerror or str(error)
    return OSError(
        f"{error.filename or 'the source'}: cannot be read ({reason}); let its owner change that, "
        "or choose another paths.data or task.path"
    )


def cache_folder(task: Task, cache_dir: Path) -> tuple[Path, str]:
    """Where this task's cache lies, and its fingerprint (of source content and settings)."""
    task.memo_dir = cache_dir
    key = {
        "format": FORMAT_VERSION,
        "task": task.name,
        "max_length": task.max_length,
        "source": fingerprint_files(task.source_files(), cache_dir),
        "settings": task.settings(),
    }
    fingerprint = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return cache_dir / f"{task.name}-{fingerprint[:12]}", fingerprint


def prepare(task: Task, cache_dir: Path, *, num_workers: int | None = None) -> Dataset:
    """Open the task's cache, building it first if it is not there, on all cores by default.

    Concurrent callers wait for one builder. A killed build leaves no cache behind.

    Raises:
        ValueError: the source is missing or faulty, or a sequence is too long under `strict`.
        OSError: the cache cannot be written, e.g. the disk is full, or something cannot be read;
            names it and the config's key. Or whoever builds the cache stands still.
    """
    try:
        folder, fingerprint = cache_folder(task, cache_dir)
    except PermissionError as error:
        raise _unreadable(error) from None
    try:
        if not _is_there(folder):
            check_writable(cache_dir, "paths.cache")
            with locked(Path(f"{folder}.lock"), "paths.cache", waiting=_Patience(folder).check):
                if not _is_there(folder):
                    _remove_left_behind(folder)
                    _build(task, folder, fingerprint, num_workers or available_cores())
        return open_dataset(task, folder, fingerprint)
    except PermissionError as error:
        raise OSError(
            f"{error.filename or folder}: not readable ({error.strerror}); let the cache's owner "
            f"run `chmod -R a+rX {folder}`, or choose another paths.cache"
        ) from None


def _is_there(folder: Path) -> bool:
    """Whether a cache has been built; a folder that may not be looked into is an error."""
    try:
        (folder / "meta.json").stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


class _Patience:
    """With another process that builds `folder`: says so, and ends when that one stands still."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started = self.looked = time.monotonic()
        self.since = time.time()  # by the clock that files are stamped with
        self.told = False

    def check(self) -> None:
        """To be called while the lock is not free.

        Raises:
            OSError: the builder has written nothing for BUILDER_IDLE_S; says who it is.
        """
        now = time.monotonic()
        if not self.told and now - self.started > TELL_AFTER_S:
            print_line(f"waiting for {self._builder()} to prepare {self.folder}", sys.stderr)
            self.told = True
        if now - self.started > BUILDER_IDLE_S and now - self.looked > BUILDER_IDLE_S / 60:
            self.looked = now
            idle = time.time() - self._last_written()
            if idle > BUILDER_IDLE_S:
                raise OSError(
                    f"{self.folder}: {self._builder()} has the lock and has written nothing for "
                    f"{idle / 60:.0f} minutes; end it, or choose another paths.cache"
                )

    def _places(self) -> Iterator[Path]:
        """Where a cache is being built, by whatever user; see `_working_places`."""
        for pattern in (f".{self.folder.name}.building*", f"{self.folder.name}.work*"):
            yield from self.folder.parent.glob(pattern)

    def _builder(self) -> str:
        for place in self._places():
            with contextlib.suppress(OSError):
                return (place / BUILDER).read_text().strip()
        return "another process"

    def _last_written(self) -> float:
        times = [self.since]
        for place in self._places():
            for folder in (place, *(place / split for split in SPLITS)):
                with contextlib.suppress(OSError):
                    times += [entry.stat().st_mtime for entry in os.scandir(folder)]
        return max(times)


def _working_places(folder: Path) -> tuple[Path, Path]:
    """Where a cache is built, and where tasks keep what survives a killed build.

    What another user's killed build has left, only that user can remove; then they are others.
    """
    building, work = (
        place.with_name(f"{place.name}-{os.getuid()}")
        if place.exists() and not os.access(place, os.W_OK)
        else place
        for place in (
            folder.with_name(f".{folder.name}.building"),
            folder.with_name(f"{folder.name}.work"),
        )
    )
    return building, work


def _remove_left_behind(folder: Path) -> None:
    """Remove what killed builds have left of `folder`, whose lock is held, and of other caches.

    A build holds its cache's lock from before its first file to behind its last, so where the lock
    is free nobody is at it. What another user has left stays.
    """
    for place in folder.parent.glob(".*.building*"):
        name = place.name[1:].partition(".building")[0]
        lock = folder.with_name(f"{name}.lock")
        with contextlib.ExitStack() as held, contextlib.suppress(Held, OSError):
            if name != folder.name:
                held.enter_context(locked(lock, "paths.cache"))
            shutil.rmtree(place, ignore_errors=True)


def open_dataset(task: Task, folder: Path, fingerprint: str) -> Dataset:
    """Open a finished cache folder, see that it is as it was built, and apply the task's limits.

    Checksums of all files are compared once, and again when a size, a modification time or the
    place has changed; see `fingerprint_files`.

    Raises:
        ValueError: the cache is damaged, or is another one than its name says; names the file.
    """
    try:
        meta = json.loads((folder / "meta.json").read_text())
        if meta["fingerprint"] != fingerprint:
            raise ValueError(
                f"{folder / 'meta.json'}: of other data (fingerprint "
                f"{str(meta['fingerprint'])[:12]}, expected {fingerprint[:12]}); delete the folder "
                "and prepare again"
            )
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
        copies(task, meta["splits"])
        _check_once(Dataset(**splits, meta=meta, folder=folder))
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
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
            found = np.bincount(splits[split].labels, minlength=task.num_classes).tolist()
            meta["splits"][split]["label_histogram"] = found
    return Dataset(**splits, meta=meta, folder=folder)


def _check_once(dataset: Dataset) -> None:
    """`verify`, unless the files are those of the last time, by their sizes and times."""
    signature, content = _as_built(dataset.folder, dataset.meta)
    if _recall(signature, dataset.folder.parent) != content:
        print_line(f"checking every byte of {dataset.folder}, once", sys.stderr)
        verify(dataset)
        _remember(signature, content, dataset.folder.parent)


def _as_built(folder: Path, meta: dict[str, Any]) -> tuple[str, str]:
    """What `stat` says of a cache's files now, and what their checksums were, each as one hash."""
    files = [folder / split / f"{name}.npy" for split in SPLITS for name in ARRAYS]
    checksums = [meta["splits"][split]["sha256"][name] for split in SPLITS for name in ARRAYS]
    names, signature = _signature(files)
    return signature, _content([*zip(names, checksums, strict=True)])


def stratified(labels: np.ndarray, size: int) -> np.ndarray:
    """Sorted indices of a part of `size` examples that keeps the shares of the classes.

    Independent of the run's seed, so that every run sees the same part.
    """
    if size >= len(labels):
        return np.arange(len(labels))
    order = np.random.default_rng(0).permutation(len(labels))
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
    temporary, task.work_dir = _working_places(folder)
    task.num_workers = num_workers
    task.remarks = []
    started = time.monotonic()
    meta: dict[str, Any] = {
        "format": FORMAT_VERSION,
        "task": task.name,
        "fingerprint": fingerprint,
        "kind": task.kind,
        "source": task.describe_source(),
        "max_length": task.max_length,
        "settings": task.settings(),
        "remarks": [],
        "splits": {},
    }
    digests: dict[str, list[bytes]] = {}
    print_line(f"preparing {task.name} from {task.describe_source()}", sys.stderr)
    try:
        temporary.mkdir()
        (temporary / BUILDER).write_text(f"process {os.getpid()} on {platform.node()}\n")
        for split in SPLITS:
            task.skipped[split] = []
            writer = SplitWriter(
                temporary / split,
                task.num_sequences,
                task.num_values,
                task.num_classes,
                task.max_length,
            )
            sizes = getattr(task, "sizes", task.official_sizes)  # a generator may make others
            total = sizes.get(split) if task.kind != "synthetic" else None
            with counting(f"  {split}", total) as show:
                for number, (sequences, label) in enumerate(task.examples(split), start=1):
                    writer.add(sequences, label)
                    show(number)
            report, digests[split] = writer.close(), writer.digests
            if not report["num_examples"]:
                raise ValueError(
                    f"task '{task.name}': the {split} split of {task.describe_source()} is empty"
                )
            if report["truncated"]:
                message = truncation(task, split, report)
                if task.strict:
                    raise ValueError(f"{message}; raise it, or set task.strict=false to cut them")
                print_line(f"  {message}; cut", sys.stderr)
            for remark in oddities(report):
                print_line(f"  task '{task.name}', {split}: {remark}", sys.stderr)
            report["skipped"] = task.skipped[split]
            meta["splits"][split] = report
        if remark := copies(task, meta["splits"]):
            task.remarks.append(remark)
        elif task.kind == "files":
            task.remarks += shared(task, digests)
        if left_out := task.left_out():
            task.remarks.append(f"not read ({len(left_out)}): {shortened(left_out)}")
        meta["remarks"] = task.remarks
        for remark in task.remarks:
            print_line(f"  task '{task.name}': {remark}", sys.stderr)
        meta["seconds"] = round(time.monotonic() - started, 3)
        (temporary / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
        if cache_folder(task, folder.parent)[1] != fingerprint:
            raise ValueError(
                f"task '{task.name}': {task.describe_source()} has changed while it was read; once "
                "it is whole, run the same command again"
            )
        (temporary / BUILDER).unlink()
        shutil.rmtree(folder, ignore_errors=True)  # a cache without its meta.json
        os.replace(temporary, folder)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if not isinstance(error, OSError) or error.errno in NOT_OF_FILES:
            raise
        # Of a full disk, numpy tells without a number how many values were requested and written.
        if error.errno is None and "requested" not in str(error):
            raise
        raise _refused(error, folder) from error
    _remember(*_as_built(folder, meta), folder.parent)
    shutil.rmtree(task.work_dir, ignore_errors=True)
    task.work_dir = None


def _refused(error: OSError, folder: Path) -> OSError:
    """What to say of an error while a cache was built: it is the source's, or the cache's."""
    if error.filename and not Path(error.filename).is_relative_to(folder.parent):
        return _unreadable(error)
    remedy = way_out(error, "paths.cache")
    reason = error.strerror
    if error.errno is None:
        reason, remedy = f"{error}: no space is left, perhaps", f"free some space or {remedy}"
    return OSError(f"{folder}: the cache was not written ({reason}); {remedy}")
