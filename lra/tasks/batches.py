"""Cached token arrays on disk, and the batches that a model sees.

A split is three arrays: `tokens.npy` (all sequences end to end, as raw values), `offsets.npy`
(where each sequence starts; one more entry than sequences) and `labels.npy`. A batch widens the
values to ids, id = value + 1, so that id 0 is padding in every task, never data.

Shapes: B batch, S sequences per example, L length, N examples of the split.
"""

from __future__ import annotations

import copy
import hashlib
import queue
import sys
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Self, TypeVar

import numpy as np

from lra.console import print_line

if TYPE_CHECKING:
    from torch import Tensor

ARRAYS = ("tokens", "offsets", "labels")
PAD_MULTIPLE = 64  # batches pad to a multiple of this, so that kernels see few distinct lengths
BUCKET_WINDOW = 64  # batches sorted by length together; larger wastes less padding, mixes less
AHEAD = 4  # batches that each thread may be ahead of the training
POLL_S = 0.5  # between looks at whether to go on waiting for a batch
TELL_AFTER_S, GIVE_UP_AFTER_S = 60.0, 1800.0  # of waiting; a file server may need a restart

Planned = TypeVar("Planned")
Built = TypeVar("Built")


@dataclass(frozen=True)
class Batch:
    """Token ids, true lengths and labels of some examples; rows are padded with id 0."""

    tokens_BSL: Tensor
    lengths_BS: Tensor
    labels_B: Tensor

    def __len__(self) -> int:
        return len(self.lengths_BS)

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """What the model takes."""
        return self.tokens_BSL, self.lengths_BS

    @property
    def num_answers(self) -> int:
        """How many the model is asked for: a class of each example."""
        return len(self)

    def split(self, num_parts: int) -> Iterator[Self]:
        """Cut into that many micro-batches, whose sizes differ by a row at most."""
        for i in range(num_parts):
            rows = slice(len(self) * i // num_parts, len(self) * (i + 1) // num_parts)
            yield self._each(lambda part, rows=rows: part[rows])  # type: ignore[misc]

    def to(self, device: Any) -> Self:
        """Move to a device without waiting for the copy."""
        return self._each(lambda part: part.to(device, non_blocking=True))

    def pin_memory(self) -> Self:
        """Page-locked copies, for overlapping the transfer to a GPU."""
        return self._each(lambda part: part.pin_memory())

    def _each(self, change: Callable[[Tensor], Tensor]) -> Self:
        return replace(self, **{f.name: change(getattr(self, f.name)) for f in fields(self)})


class TokenArrays:
    """One split, memory-mapped; opening reads offsets and labels only.

    Raises:
        ValueError: an array is missing, truncated, or does not fit the others.
    """

    def __init__(self, folder: Path, num_sequences: int, max_length: int) -> None:
        self.folder = folder
        self.num_sequences, self.max_length = num_sequences, max_length
        self.tokens = _load(folder / "tokens.npy", mmap=True)
        offsets = _load(folder / "offsets.npy")
        self.labels = _load(folder / "labels.npy")
        if len(offsets) != len(self.labels) * num_sequences + 1 or offsets[-1] != len(self.tokens):
            raise ValueError(
                f"{folder}: arrays do not fit together ({len(self.labels)} labels, {len(offsets)} "
                f"offsets, {len(self.tokens)} tokens); delete the cache folder and prepare again"
            )
        self.starts_NS = offsets[:-1].reshape(-1, num_sequences)
        self.lengths_NS = np.diff(offsets).reshape(-1, num_sequences)

    @classmethod
    def of(
        cls, examples: Sequence[Sequence[np.ndarray | bytes]], num_sequences: int, max_length: int
    ) -> TokenArrays:
        """Examples in memory, as raw values, cut to `max_length`; all labels are 0."""
        arrays = cls.__new__(cls)
        arrays.num_sequences, arrays.max_length = num_sequences, max_length
        sequences = [
            np.frombuffer(values, np.uint8) if isinstance(values, bytes) else values
            for example in examples
            for values in (part[:max_length] for part in example)
        ]
        arrays.tokens = np.concatenate([np.zeros(0, np.uint8), *sequences])
        offsets = np.cumsum([0, *map(len, sequences)])
        arrays.starts_NS = offsets[:-1].reshape(-1, num_sequences)
        arrays.lengths_NS = np.diff(offsets).reshape(-1, num_sequences)
        arrays.labels = np.zeros(len(examples), np.int64)
        return arrays

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def lengths(self) -> np.ndarray:
        """Longest sequence of each example [N]."""
        return self.lengths_NS.max(axis=1)

    def subset(self, rows: np.ndarray) -> TokenArrays:
        """The examples at `rows`, on the same mapped tokens."""
        part = copy.copy(self)
        part.starts_NS, part.lengths_NS = self.starts_NS[rows], self.lengths_NS[rows]
        part.labels = self.labels[rows]
        return part

    def sequence(self, index: int, position: int = 0) -> np.ndarray:
        """Raw values of one sequence of one example."""
        start = self.starts_NS[index, position]
        return self.tokens[start : start + self.lengths_NS[index, position]]

    def num_answers(self, indices: np.ndarray, epoch: int = 0) -> int:
        """As of the batch of these examples."""
        return len(indices)

    def batch(self, indices: np.ndarray, pad_to: int | None = None, epoch: int = 0) -> Batch:
        """Widen the examples at `indices` to ids, padded to `pad_to` or to their own longest row.

        The epoch matters where each asks something else of the examples, as in hidden.py.
        """
        import torch

        lengths_BS = self.lengths_NS[indices]
        width = pad_to or padded_length(int(lengths_BS.max()), self.max_length)
        tokens_BSL = np.zeros((*lengths_BS.shape, width), np.int64)
        for i, index in enumerate(indices):
            for s, length in enumerate(lengths_BS[i]):
                # One step from mapped bytes to ids: value + 1, so that 0 stays free for padding.
                np.add(self.sequence(index, s), 1, out=tokens_BSL[i, s, :length], dtype=np.int64)
        labels_B = self.labels[indices].astype(np.int64)
        return Batch(
            torch.from_numpy(tokens_BSL), torch.from_numpy(lengths_BS), torch.from_numpy(labels_B)
        )


def padded_length(longest: int, max_length: int) -> int:
    """How long rows of a batch are: the next multiple of 64, though never beyond the task's."""
    return min(max(1, -(-longest // PAD_MULTIPLE)) * PAD_MULTIPLE, max_length)


def _load(path: Path, mmap: bool = False) -> np.ndarray:
    try:
        if mmap and path.stat().st_size > 0:
            array_ = np.load(path, mmap_mode="r", allow_pickle=False)
        else:
            array_ = np.load(path, allow_pickle=False)
    except PermissionError:
        raise  # not the file's fault
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(
            f"{path}: unreadable or truncated cache file ({error}); delete the folder "
            f"{path.parent.parent} and prepare the data again"
        ) from None
    return array_


class SplitWriter:
    """Streams examples of one split to disk; `close` returns counts and checksums."""

    def __init__(
        self, folder: Path, num_sequences: int, num_values: int, num_classes: int, max_length: int
    ) -> None:
        folder.mkdir(parents=True)
        self.folder, self.num_sequences, self.max_length = folder, num_sequences, max_length
        self.dtype = np.min_scalar_type(num_values - 1)
        self.num_values, self.num_classes = num_values, num_classes
        self.file: BinaryIO = (folder / "tokens.npy").open("wb+")
        # The header is rewritten at the end; numpy leaves room in it for any length.
        np.lib.format.write_array_header_1_0(self.file, self._header(0))
        self.lengths, self.labels = array("q"), array("q")
        self.truncated, self.longest = 0, 0
        self.digests: list[bytes] = []  # of each example as it came, whole, and its class

    def _header(self, size: int) -> dict[str, Any]:
        return {"descr": self.dtype.str, "fortran_order": False, "shape": (size,)}

    def add(self, sequences: tuple[np.ndarray | bytes, ...], label: int) -> None:
        """Append one example, cut to `max_length` values per sequence (the cut is counted)."""
        where = f"{self.folder.name}: example {len(self.labels)}"
        if len(sequences) != self.num_sequences:
            raise ValueError(f"{where} has {len(sequences)} sequences, "
                             f"expected {self.num_sequences}")  # fmt: skip
        if not 0 <= label < self.num_classes:
            raise ValueError(f"{where} has label {label}, "
                             f"expected 0 to {self.num_classes - 1}")  # fmt: skip
        cut, digest = False, hashlib.blake2b(label.to_bytes(8), digest_size=16)
        for values in sequences:
            values = self._checked(values, where)
            digest.update(len(values).to_bytes(8))
            digest.update(values.data)
            self.longest = max(self.longest, len(values))
            cut |= len(values) > self.max_length
            values = values[: self.max_length]
            self.lengths.append(len(values))
            self.file.write(values.data)
        self.truncated += cut
        self.labels.append(label)
        self.digests.append(digest.digest())

    def _checked(self, values: np.ndarray | bytes, where: str) -> np.ndarray:
        """One sequence's values as they are stored, one after the other."""
        is_raw = isinstance(values, bytes)
        values = np.frombuffer(values, np.uint8) if is_raw else np.asarray(values)
        if values.ndim != 1:
            raise ValueError(
                f"{where} has values of shape {values.shape}, expected a sequence (of a picture, "
                "its pixels row by row)"
            )
        if values.dtype != self.dtype and values.size:
            if values.dtype.kind not in "biu":
                raise ValueError(f"{where} has values of {values.dtype}, expected integers")
            if not 0 <= int(values.min()) <= int(values.max()) < self.num_values:
                raise ValueError(f"{where} has values outside 0 to {self.num_values - 1}")
        return np.ascontiguousarray(values, self.dtype)

    def close(self) -> dict[str, Any]:
        """Finish the files and describe them: counts, label histogram, SHA-256 of each array."""
        offsets = np.zeros(len(self.lengths) + 1, np.int64)
        np.cumsum(np.frombuffer(self.lengths, np.int64) if self.lengths else [], out=offsets[1:])
        labels = np.array(self.labels, np.int64)
        self.file.seek(0)
        np.lib.format.write_array_header_1_0(self.file, self._header(int(offsets[-1])))
        self.file.close()
        np.save(self.folder / "offsets.npy", offsets)
        np.save(self.folder / "labels.npy", labels)
        values = (
            np.load(self.folder / "tokens.npy", mmap_mode="r")
            if offsets[-1]
            else np.zeros(0, self.dtype)
        )
        for start in range(0, len(values), 1 << 24):
            if int(values[start : start + (1 << 24)].max()) >= self.num_values:
                raise ValueError(
                    f"{self.folder.name}: a value is outside 0 to {self.num_values - 1}"
                )
        lengths = np.diff(offsets)
        return {
            "num_examples": len(labels),
            "truncated": self.truncated,
            "empty": int((lengths == 0).sum()),
            "first_empty": int((lengths == 0).argmax()) // self.num_sequences
            if (lengths == 0).any()
            else None,
            "longest_source": self.longest,
            "label_histogram": np.bincount(labels, minlength=self.num_classes).tolist(),
            "length_percentiles": {
                str(q): int(np.percentile(lengths, q, method="nearest")) if len(lengths) else 0
                for q in (0, 5, 25, 50, 75, 95, 100)
            },
            "mean_length": float(lengths.mean()) if len(lengths) else 0.0,
            "sha256": {name: file_sha256(self.folder / f"{name}.npy") for name in ARRAYS},
        }


def file_sha256(path: Path) -> str:
    """Checksum of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def num_train_batches(num_examples: int, batch_size: int) -> int:
    """Batches per epoch: the remainder waits for a later shuffle; a tiny set is one batch."""
    return max(1, num_examples // batch_size)


def epoch_order(
    lengths: np.ndarray, batch_size: int, *, seed: int, epoch: int, bucketing: bool
) -> list[np.ndarray]:
    """The batches of one epoch as example indices; depends on the arguments alone.

    With `bucketing`, windows of the shuffled order are sorted by length and cut into batches, whose
    order is shuffled again: rows of a batch are of similar length, and no length comes first.
    """
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(len(lengths))
    num_batches = num_train_batches(len(order), batch_size)
    order = order[: num_batches * batch_size]
    if bucketing:
        window = BUCKET_WINDOW * batch_size
        for start in range(0, len(order), window):
            part = order[start : start + window]
            order[start : start + window] = part[np.argsort(lengths[part], kind="stable")]
    batches = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    if bucketing:
        for start in range(0, num_batches, BUCKET_WINDOW):
            window_batches = batches[start : start + BUCKET_WINDOW]
            shuffled = rng.permutation(len(window_batches))
            batches[start : start + BUCKET_WINDOW] = [window_batches[i] for i in shuffled]
    return batches


def train_batches(
    lengths: np.ndarray,
    batch_size: int,
    *,
    seed: int,
    bucketing: bool,
    first_step: int,
    last_step: int,
) -> Iterator[tuple[int, np.ndarray]]:
    """Epoch and example indices of steps `first_step` .. `last_step`; step 1 begins epoch 0."""
    per_epoch = num_train_batches(len(lengths), batch_size)
    epoch, batches = -1, []
    for step in range(first_step, last_step + 1):
        if (step - 1) // per_epoch != epoch:
            epoch = (step - 1) // per_epoch
            batches = epoch_order(lengths, batch_size, seed=seed, epoch=epoch, bucketing=bucketing)
        yield epoch, batches[(step - 1) % per_epoch]


def eval_batches(lengths: np.ndarray, batch_size: int) -> list[np.ndarray]:
    """Every example once, neighbours in length together, longest first; the last may be short."""
    order = np.argsort(-lengths, kind="stable")
    return [order[i : i + batch_size] for i in range(0, len(order), batch_size)]


def built_ahead(
    build: Callable[[Planned], Built],
    batches: Iterable[Planned],
    num_threads: int,
    source: Path,
    check: Callable[[], None] = lambda: None,
) -> Iterator[Built]:
    """`build(planned)` of each batch, in order, by threads that run ahead of the training.

    Threads, since building is copying, during which numpy lets others run: processes would have
    to send the batches through memory that containers give little of. With 0 threads the caller
    builds. `check` is called while a batch from `source` is waited for, and may raise.

    Raises:
        TimeoutError: a batch did not come; names `source`. Errors of `build` come as they are.
    """
    if num_threads == 0:
        yield from map(build, batches)
        return
    jobs: queue.SimpleQueue[tuple[Planned, Future[Built]] | None] = queue.SimpleQueue()

    def work() -> None:
        while (job := jobs.get()) is not None:
            planned, future = job
            try:
                future.set_result(build(planned))
            except BaseException as error:
                future.set_exception(error)

    for _ in range(num_threads):
        # Not of a pool, whose threads Python waits for at its end, also when a disk hangs.
        threading.Thread(target=work, name="batches", daemon=True).start()
    ahead: deque[Future[Built]] = deque()
    try:
        for planned in batches:
            ahead.append(Future())
            jobs.put((planned, ahead[-1]))
            if len(ahead) > AHEAD * num_threads:
                yield _patiently(ahead.popleft(), source, check)
        while ahead:
            yield _patiently(ahead.popleft(), source, check)
    finally:
        for _ in range(num_threads):
            jobs.put(None)


def _patiently(future: Future[Built], source: Path, check: Callable[[], None]) -> Built:
    """The result of `future`; a long wait is told of, and a very long one given up."""
    started, told = time.monotonic(), False
    while True:
        try:
            return future.result(timeout=POLL_S)
        except TimeoutError:
            if future.done():  # an error of the batch itself
                return future.result()
        check()
        waited = time.monotonic() - started
        if waited > TELL_AFTER_S and not told:
            print_line(f"waiting for a batch from {source}: does its disk answer?", sys.stderr)
            told = True
        if waited > GIVE_UP_AFTER_S:
            raise TimeoutError(
                f"{source}: a batch could not be read within {GIVE_UP_AFTER_S / 60:g} minutes; "
                "does its disk answer? The same command goes on"
            )
