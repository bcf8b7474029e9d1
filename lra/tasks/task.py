"""What a task is: where its data come from, what its values and classes are.

A task is a dataclass that derives from `Task`: its fields are the keys of
`configs/task/<name>.yaml`. It says where its data come from and yields examples; everything else
(cache, batches, metrics) is shared.
"""

from __future__ import annotations

import hashlib
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self

import numpy as np

if TYPE_CHECKING:
    from lra.tasks.batches import TokenArrays

SPLITS = ("train", "val", "test")


DataKind = Literal["files", "generated", "synthetic", "partial"]


class Example(NamedTuple):
    """Raw values (id - 1) of each sequence, as bytes or an unsigned array, and the class."""

    sequences: tuple[np.ndarray | bytes, ...]
    label: int


def check_path(path: str | None, source: str) -> None:
    """Refuse a `task.path` that is empty, or that is not read.

    Raises:
        ValueError: names the key.
    """
    if path is not None and not path.strip():
        raise ValueError(f"task.path={path!r}: expected a path, or null for paths.data")
    if path is not None and source not in ("auto", "files"):
        raise ValueError(
            f"task.path={path} names files, but task.source={source} reads none; drop one of them"
        )


class Rule(NamedTuple):
    """Answers [N] to the examples of a split, found without a model."""

    name: str
    description: str
    answers: Callable[[TokenArrays], np.ndarray]


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
    memo_dir: Path | None = field(default=None, init=False, repr=False)  # of files once compared
    work_dir: Path | None = field(default=None, init=False, repr=False)  # survives a killed build
    skipped: dict[str, list[str]] = field(default_factory=dict, init=False, repr=False)
    remarks: list[str] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.max_length < 1:
            raise ValueError(f"task.max_length={self.max_length}: expected at least 1")
        for name in ("limit_train", "limit_val", "limit_test"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"task.{name}={value}: expected at least 1, or null for all")
        for name, hint in typing.get_type_hints(type(self)).items():
            choices = typing.get_args(hint)
            if typing.get_origin(hint) is Literal and getattr(self, name) not in choices:
                *others, last = choices
                raise ValueError(
                    f"task.{name}={getattr(self, name)}: expected {', '.join(map(str, others))} "
                    f"or {last}"
                )

    @property
    def vocab_size(self) -> int:
        """Number of ids: padding and one id per raw value."""
        return self.num_values + 1

    @property
    def _dtype(self) -> np.dtype:
        """Of raw values that a person has given or reads."""
        return np.promote_types(np.uint16, np.min_scalar_type(self.num_values - 1))

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

    def data_kind(self, num_examples: Mapping[str, int]) -> DataKind:
        """`kind`; `partial` where data of these sizes by split are not what the benchmark has.

        A task without `official_sizes` is whole unless a limit has cut it. A limit over a split's
        size has not; one that equals the size may have, and counts.
        """
        if self.official_sizes:
            whole = num_examples == self.official_sizes
        else:
            limits = {split: getattr(self, f"limit_{split}") for split in SPLITS}
            whole = all(
                limit is None or num_examples.get(split, limit) < limit
                for split, limit in limits.items()
            )
        return (
            self.kind
            if self.kind == "synthetic" or (whole and not self.deviations())
            else "partial"
        )

    def overlaps(self, other: Mapping[str, Any]) -> str:
        """How many examples of val and test here another preparation of this task has in train.

        To be asked where weights come from another run. `other` has the keys of the task's yaml,
        those that it lacks at their defaults; `source=auto` is decided as it would be here.

        Returns:
            One sentence, with what to do; empty where nothing is known to be shared. Odd content is
            no error.
        """
        return ""

    def with_keys(self, config: Mapping[str, Any]) -> Self:
        """The preparation of this task that has these keys of the yaml, and this data folder.

        Raises:
            AttributeError, TypeError, ValueError: it is of another task, or no such mapping.
        """
        target = str(config.get("_target_") or type(self).__name__)
        if target.rpartition(".")[2] != type(self).__name__:
            raise ValueError(f"task._target_={target}: expected {type(self).__name__}")
        names = {key.name for key in fields(self) if key.init} - {"data_dir"}
        given = {key: config[key] for key in names if config.get(key) is not None}
        return type(self)(data_dir=self.data_dir, **given)

    @abstractmethod
    def describe_source(self) -> str:
        """The source in words, for people: a path, or the generator and its seed."""

    def source_files(self) -> list[Path]:
        """Files whose content shapes the cache, in a fixed order; empty for generated data.

        Raises:
            ValueError: nothing found; names every place tried, what to get and how.
        """
        return []

    def left_out(self) -> list[str]:
        """Files beside those that are read that look as if they were meant to be, with the reason.

        Asked when a cache is built; the cache's report and the run's log name them.
        """
        return []

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Every setting that shapes the content, JSON-able; `max_length` is added by the caller."""

    @abstractmethod
    def examples(self, split: str) -> Iterator[Example]:
        """Yield the examples of `train`, `val` or `test` in a fixed order, whole (not yet cut).

        Names of examples that had to be left out go to `self.skipped[split]`, whatever else a
        person should know of the source to `self.remarks`.
        """

    def ladder(self, train: TokenArrays) -> Sequence[Rule]:
        """Rules that solve a part of each example exactly and guess the rest, more each time.

        No floors, since a model need not be above them: they say what a score may be worth. None
        here. A description ends in brackets with what a table has no room for.
        """
        return []

    def vocabulary_hash(self) -> str:
        """What each raw value stands for, as one hash; stored with checkpoints."""
        words = [self.decode(np.array([value], self._dtype)) for value in range(self.num_values)]
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
        return values.astype(self._dtype)

    def encode_prompt(self, text: str) -> np.ndarray | bytes:
        """Raw values of a text that begins a sequence and is to be continued.

        Raises:
            ValueError: as for `encode`.
        """
        return self.encode(text)

    @abstractmethod
    def decode(self, values: np.ndarray) -> str:
        """Raw values back to what a person can read."""
