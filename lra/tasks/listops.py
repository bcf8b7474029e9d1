"""ListOps: nested list operations written out as tokens; the class is the value of the expression.

    [MAX 4 3 [MIN 2 3 ] 1 0 [MED 1 5 8 9 2 ] ]      has the value 5

Task and length-1000 setting: Long Range Arena (Tay et al., 2020, section 2.2.1, arXiv:2011.04006),
after Nangia and Bowman (2018, arXiv:1804.06028). The released files hold the same expressions with
round brackets around every pair; these say nothing that the operators do not, and are dropped.

Sources, by `task.source`:

- `files`: `basic_{train,val,test}.tsv` of the release, also compressed (`.tsv.gz`), or Parquet or
  Arrow files of the same columns; every expression is evaluated and compared with its label.
- `generated`: our own generator of the release's distribution, seeded (listops_generator.py).
- `synthetic`: the generator's trees with the digits overwritten, see `ListOps`.
"""

from __future__ import annotations

import filecmp
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from lra.console import counting
from lra.tasks.archives import count_line_ends
from lra.tasks.beside import apart, similar, unread
from lra.tasks.cache import known_equal
from lra.tasks.columnar import SUFFIXES, find_tables
from lra.tasks.generated import PACKED, GeneratedTask
from lra.tasks.listops_files import encode, evaluate, read_table, read_tsv
from lra.tasks.listops_generator import GENERATOR_VERSION, ORIGINAL, SYMBOLS, Limits, generate
from lra.tasks.listops_levels import ladder
from lra.tasks.task import SPLITS, Example, Rule

if TYPE_CHECKING:
    from lra.tasks.batches import TokenArrays

READER_VERSION = 1
GENERATOR_KEYS = (
    "num_train", "num_val", "num_test", "generator_seed",
    "min_tree_length", "max_tree_length", "max_depth", "max_args",
)  # fmt: skip

FILES = tuple(f"basic_{split}.tsv" for split in SPLITS)
# The release nests its folder; people flatten or rename it.
FOLDERS = (
    "lra_release/lra_release/listops-1000",
    "lra_release/listops-1000",
    "listops-1000",
    "listops",
    "",
)

# Meant for this task by their names; caches are called listops- and 12 digits of base 16.
OWN_NAMES = (
    r"basic_(?:train|val|test)\b.*|listops-[0-9]{1,6}(?![0-9a-f]).*|listops(?:\..*)?"
    r"|listops[-_](?:train|val|valid|validation|test)\b.*"
)


@dataclass(kw_only=True)
class ListOps(GeneratedTask):
    """ListOps from the released files, from our generator, or as a synthetic stand-in.

    The synthetic stand-in is not ListOps: it takes the generator's trees (same symbols, lengths and
    nesting), overwrites half of the digits, chosen at random, with one digit per example, and asks
    for the most frequent digit (the smallest on ties). A model that sees the mean of its embeddings
    solves it; it shows that training works and measures speed, and no more.

    Raises:
        ValueError: a setting is out of range or contradicts another; names the key.
    """

    name: ClassVar[str] = "listops"
    num_classes: ClassVar[int] = 10
    num_values: ClassVar[int] = len(SYMBOLS)
    official_sizes: ClassVar[dict[str, int]] = {"train": 96_000, "val": 2_000, "test": 2_000}

    max_length: int = 2000
    min_tree_length: int = ORIGINAL.min_tree_length
    max_tree_length: int = ORIGINAL.max_tree_length
    max_depth: int = ORIGINAL.max_depth
    max_args: int = ORIGINAL.max_args

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, lowest in (("min_tree_length", 0), ("max_depth", 1), ("max_args", 2)):
            if getattr(self, key) < lowest:
                raise ValueError(f"task.{key}={getattr(self, key)}: expected at least {lowest}")
        if self.max_tree_length < self.min_tree_length + 2:
            raise ValueError(
                f"task.max_tree_length={self.max_tree_length}: expected at least "
                f"{self.min_tree_length + 2} with task.min_tree_length={self.min_tree_length}, "
                "since both limits are exclusive"
            )

    @property
    def has_files(self) -> bool:
        """Whether any of the three files is there."""
        return self._folder is not None

    @property
    def limits(self) -> Limits:
        """The generator's limits."""
        return Limits(self.min_tree_length, self.max_tree_length, self.max_depth, self.max_args)

    def deviations(self) -> list[str]:
        """How generated expressions are drawn otherwise than the original's; sizes apart."""
        if self.kind != "generated":
            return []
        return [
            f"task.{key}={value} (original: {original})"
            for (key, value), original in zip(self.limits._asdict().items(), ORIGINAL, strict=True)
            if value != original
        ]

    def describe_source(self) -> str:
        """The source in words, for people."""
        if self.kind == "files":
            return f"the files in {self.source_files()[0].parent}"
        if self.kind == "synthetic":
            return f"a synthetic stand-in, seed {self.generator_seed}"
        why = f" (no {FILES[0]} under {self.data_dir})" if self.source == "auto" else ""
        return f"our generator, seed {self.generator_seed}{why}"

    def source_files(self) -> list[Path]:
        """The files in the order train, val, test; empty for generated data.

        Raises:
            ValueError: none found, one missing, an archive that is still packed, or several folders
                with different content.
        """
        if self.kind != "files":
            return []
        if self._folder is None:
            raise ValueError(
                f"task 'listops': found no {', '.join(FILES)}; tried "
                f"{', '.join(str(tried) for tried in self._candidates())}"
                f"{'' if self._root.exists() else f' ({self._root} does not exist)'}. Get the "
                "release of "
                "Long Range Arena (lra_release.gz, see google-research/long-range-arena), unpack "
                f"it with `tar xf lra_release.gz -C {self.data_dir}`, or set task.path to the "
                "folder with the three files, or task.source=generated to make an equal set here"
            )
        found = self._files_in(self._folder)
        if missing := [name for name, split in zip(FILES, SPLITS, strict=True) if not found[split]]:
            raise ValueError(
                f"task 'listops': {self._folder} has no {' and no '.join(missing)}; "
                f"expected all of {', '.join(FILES)}"
            )
        return [file for split in SPLITS for file in found[split]]

    def left_out(self) -> list[str]:
        """Copies and other forms beside the files, and what is in other folders of this task."""
        if self.kind != "files":
            return []
        files = self.source_files()
        folder = files[0].parent
        odd = [*similar(folder, [file.name for file in files], r"^[\W_]*basic_")]
        if files[0].suffix in SUFFIXES and self._folder is not None:
            odd = find_tables(self._folder, SPLITS).left_out
        used = [place for place in self._candidates() if self._names_in(place)]
        return odd + apart(self._unread(with_root=False), used)

    def settings(self) -> dict[str, Any]:
        """Every setting that shapes the content.

        Raises:
            ValueError: a key of the generator is set although files are read.
        """
        if self.kind == "files":
            self.refuse_keys(
                GENERATOR_KEYS,
                "for generated data",
                "set task.source=generated, or to use a part of the files task.limit_train, "
                "limit_val, limit_test",
            )
            return {"source": "files", "reader": READER_VERSION}
        return {
            "source": self.kind,
            "generator": GENERATOR_VERSION,
            "generator_seed": self.generator_seed,
            **self.limits._asdict(),
            **{f"num_{split}": size for split, size in self.sizes.items()},
        }

    def examples(self, split: str) -> Iterator[Example]:
        """Yield the examples of one split in a fixed order.

        Raises:
            ValueError: a row of the file is faulty (names file, line and fault), or the limits
                allow too few distinct expressions.
        """
        rows: Iterable[tuple[bytes, int]]
        if self.kind == "files":
            self.source_files()  # complains of what is missing
            assert self._folder is not None
            rows = itertools.chain.from_iterable(
                self._read(file) for file in self._files_in(self._folder)[split]
            )
        else:
            first = sum(self.sizes[earlier] for earlier in SPLITS[: SPLITS.index(split)])
            rows = self._rows[first : first + self.sizes[split]]
            if split == SPLITS[-1]:
                del self._rows  # some 100 MB, which a training has no use for
        for values, label in rows:
            yield Example((values,), label)

    def overlaps(self, other: Mapping[str, Any]) -> str:
        """Likewise: generated splits are slices of one row of distinct expressions, train first.

        Those of other sizes share as many expressions as the slices have numbers in common; a limit
        takes an unknown part of these.
        """
        try:
            theirs = self.with_keys(other)
            if self.kind == "files" or self._stream != theirs._stream:
                return ""
        except (AttributeError, TypeError, ValueError, OSError):
            return ""  # no preparation of this task, or nobody knows of what
        num_seen, start, found = theirs.sizes["train"], self.sizes["train"], []
        for split in ("val", "test"):
            size, limit = self.sizes[split], getattr(self, f"limit_{split}")
            shared = min(start + size, num_seen) - start
            if shared > 0:
                read = min(size, limit or size)
                most = min(shared, read, theirs.limit_train or shared)
                about = "up to " if limit or theirs.limit_train else ""
                found.append(f"{about}{most:,} of the {read:,} {split}")
            start += size
        if not found:
            return ""
        return (
            f"{' and '.join(found)} examples are among those of the other training "
            f"(task.num_train={num_seen} there, {self.sizes['train']} here; generated splits are "
            "slices of one row of expressions); set another task.generator_seed"
        )

    def ladder(self, train: TokenArrays) -> Sequence[Rule]:
        """What following the outer levels of an expression gives; nothing for the stand-in."""
        return ladder(train) if self.kind != "synthetic" else []

    def encode(self, given: Any) -> np.ndarray | bytes:
        """Raw values of an expression, such as `[MAX 4 3 [MIN 2 3] ]`; round brackets are dropped.

        Raises:
            ValueError: a symbol that is none of the 15 (says which and where), or no whole
                expression.
        """
        if not isinstance(given, str):
            return super().encode(given)
        values = self.encode_prompt(given)
        evaluate(bytes(values))
        return values

    def encode_prompt(self, text: str) -> np.ndarray | bytes:
        """Raw values of an expression or of its beginning; round brackets are dropped.

        Raises:
            ValueError: a symbol that is none of the 15; says which and where.
        """
        symbols = text.replace("]", " ] ").translate(str.maketrans("()", "  ")).split()
        for place, symbol in enumerate(symbols, start=1):
            if symbol not in SYMBOLS:
                raise ValueError(
                    f"unknown symbol {symbol[:60]!r} (number {place} of {len(symbols)}), expected "
                    f"{' '.join(SYMBOLS)}"
                )
        return encode(" ".join(symbols))

    def decode(self, values: np.ndarray) -> str:
        """Raw values back to the expression, without round brackets."""
        return " ".join(SYMBOLS[value] for value in values)

    @property
    def _stream(self) -> tuple[str, int, Limits]:
        """What decides which expressions are drawn, in which order."""
        return self.kind, self.generator_seed, self.limits

    @cached_property
    def _rows(self) -> list[tuple[bytes, int]]:
        total = sum(self.sizes.values())
        with counting("  drawing", total, unit="expressions") as show:
            return generate(
                total,
                self.limits,
                seed=self.generator_seed,
                planted=self.kind == "synthetic",
                num_workers=self.num_workers,
                show=show,
            )

    def _read(self, file: Path) -> Iterator[tuple[bytes, int]]:
        if file.suffix in SUFFIXES:
            return read_table(file, num_workers=self.num_workers)
        total, with_return = count_line_ends(file)
        if 0 < with_return < total:  # the release has them throughout
            self.remarks.append(
                f"{file.name}: {with_return:,} of {total:,} lines end in CR LF, the others in LF; "
                "neither is part of an expression"
            )
        return read_tsv(file, num_workers=self.num_workers)

    @property
    def _root(self) -> Path:
        root = self.data_dir if self.path is None else Path(self.path).expanduser()
        return root.parent if root.name.removesuffix(".gz") in FILES else root

    def _files_in(self, folder: Path) -> dict[str, list[Path]]:
        """The files of each split in a folder: text, else compressed; without any, tables."""
        found = {}
        for name, split in zip(FILES, SPLITS, strict=True):
            forms = (folder / name, folder / f"{name}.gz")
            found[split] = [file for file in forms if file.is_file()][:1]
        # The data folder itself may hold another task's tables.
        is_own = self.path is not None or folder != self._root
        if is_own and not any(found.values()):
            found |= find_tables(folder, SPLITS).files
        return found

    def _names_in(self, folder: Path) -> list[str]:
        files = itertools.chain.from_iterable(self._files_in(folder).values())
        return [file.relative_to(folder).as_posix() for file in files]

    def _unread(self, with_root: bool = True) -> list[Path]:
        folders = [folder for folder in self._candidates() if folder != self._root]
        own = [*folders, self._root] if self.path is not None and with_root else folders
        shared = [self._root / name for name in ("", "lra_release", "lra_release/lra_release")]
        return unread(own, shared, f"{OWN_NAMES}|{PACKED}")

    def _candidates(self) -> list[Path]:
        return [self._root / folder for folder in FOLDERS]

    @cached_property
    def _folder(self) -> Path | None:
        """The folder that has the files, or some of them; None if there is no trace of any."""
        found = {
            folder.resolve(): folder for folder in self._candidates() if self._names_in(folder)
        }
        folders = list(found.values())
        if not folders:
            expected = f"a folder with {', '.join(FILES)}, or one of these"
            self.refuse_archive(self._root, expected)
            self.refuse_unread(
                self._unread(),
                f"{', '.join(FILES)}, as they are or each with .gz, or Parquet or Arrow files of "
                "train, validation and test with the columns Source and Target",
            )
            return None
        ours = self._names_in(folders[0])
        for other in folders[1:]:
            first, second = ([folder / name for name in ours] for folder in (folders[0], other))
            if self._names_in(other) == ours and known_equal(first, second, self.memo_dir):
                continue
            _, differing, _ = filecmp.cmpfiles(folders[0], other, ours, shallow=False)
            if faults := differing or sorted({*ours} ^ {*self._names_in(other)}):
                raise ValueError(
                    f"task 'listops': {folders[0]} and {other} differ in {', '.join(faults)}; set "
                    "task.path to the folder to use"
                )
        return folders[0]
