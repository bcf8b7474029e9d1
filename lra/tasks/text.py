"""Text: is a movie review positive? The bytes of the review, two classes.

Data: IMDb reviews (Maas et al. 2011), https://ai.stanford.edu/~amaas/data/sentiment/.
Task: Long Range Arena (Tay et al. 2020, section 2.2.2, arXiv:2011.04006); up to 4,000 bytes, id =
byte + 1.

A review is its UTF-8 bytes as they stand. They are never decoded, so that a cut within a letter or
an odd control character cannot hurt.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from lra.tasks.archives import read_file, tar_members
from lra.tasks.beside import shortened
from lra.tasks.columnar import TableRow, class_of
from lra.tasks.sources import CorpusTask, Row, held_out
from lra.tasks.task import Example

LABELS = {"neg": 0, "pos": 1}
NO_REVIEW = "left out, not called NUMBER_RATING.txt"
TREE = tuple(f"{split}/{name}" for split in ("train", "test") for name in LABELS)

_REVIEW = re.compile(r"[0-9]+(?:_[0-9]+)?\.txt")  # number and rating; not its copy or backup
_MEMBER = re.compile(r"(?:[^/]+/)*((?:train|test)/(?:neg|pos))/([^/]*\.txt)")

# The stand-in's letters: 5 of 8 are common to both classes, 3 of 8 tell the class.
_COMMON = b" etaoinshrdlu .,"
_TELLING = (b"bcfgjk", b"mpqvwy")
_LETTERS = [
    np.frombuffer((_COMMON * 10)[:160] + (telling * 16)[:96], np.uint8) for telling in _TELLING
]


@dataclass(kw_only=True)
class Text(CorpusTask):
    """Reviews from an `aclImdb` folder or archive, from Parquet or Arrow files, or from the hub.

    The corpus has no validation split. `validation=val` holds out `val_fraction` of the training
    reviews of each class, chosen by hashes of `split_seed` and content: the same ones in whatever
    form they come. `validation=test` trains on all of them and validates on the test split, as
    published results do.

    The synthetic stand-in has random letters, some of which tell the class, and lengths like the
    real ones: half below 980 bytes, one in fifty above 3,500.

    Raises:
        ValueError: a setting is out of range; names the key.
    """

    name: ClassVar[str] = "text"
    num_classes: ClassVar[int] = 2
    num_values: ClassVar[int] = 256
    class_names: ClassVar[tuple[str, ...]] = tuple(LABELS)
    what: ClassVar[str] = "IMDb reviews"
    remedy: ClassVar[str] = (
        "Get https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz (84 MB, read as it is)"
        " with `bash scripts/get_data.sh {data} text`, or set task.source=hub to take them from "
        "the Hugging Face hub."
    )
    folders: ClassVar[tuple[str, ...]] = (
        "aclImdb",
        "aclImdb/aclImdb",
        "aclImdb_v1/aclImdb",
        "text/aclImdb",
        "text",
        "imdb/aclImdb",
        "imdb",
        "stanfordnlp/imdb",
        "",
    )
    archives: ClassVar[tuple[str, ...]] = tuple(
        f"{folder}aclImdb_v1{suffix}"
        for folder in ("", "text/", "imdb/")
        for suffix in (".tar.gz", ".tar")
    )
    own_folders: ClassVar[tuple[str, ...]] = tuple(name for name in folders if name)
    own_names: ClassVar[str] = r"aclImdb.*|imdb\..*"
    columns: ClassVar[tuple[tuple[str, ...], ...]] = (("text",), ("label",))
    class_spellings: ClassVar[tuple[tuple[str, ...], ...]] = (
        ("neg", "negative"),
        ("pos", "positive"),
    )

    max_length: int = 4000
    validation: Literal["val", "test"] = "val"
    hub_name: str = "stanfordnlp/imdb"

    @property
    def official_sizes(self) -> dict[str, int]:  # type: ignore[override]
        """Examples per split of the benchmark, under the chosen `validation`."""
        if self.validation == "test":
            return {"train": 25_000, "val": 25_000, "test": 25_000}
        return {"train": 22_500, "val": 2_500, "test": 25_000}

    @property
    def protocol(self) -> dict[str, Any]:
        """`validation` says which split chooses the checkpoint."""
        return {"validation": self.validation, "difficulty": None}

    @property
    def held_by(self) -> tuple[Any, ...] | None:
        """Likewise: with `validation=test` nothing is held out."""
        return ("hashes", self.split_seed) if self.validation == "val" else None

    def settings(self) -> dict[str, Any]:
        """Every setting that shapes the content."""
        if self.source == "synthetic":
            return {**self.synthetic_settings(), "validation": self.validation}
        settings = {**self.file_settings(), "validation": self.validation}
        if self.validation == "val":
            settings |= {"val_fraction": self.val_fraction, "split_seed": self.split_seed}
        return settings

    def examples(self, split: str) -> Iterator[Example]:
        """Yield the reviews of a split: negative first, by their numbers (tables: as they stand).

        Raises:
            ValueError: a file, member or row is faulty; names it.
        """
        stored = "test" if split == "val" and self.validation == "test" else split
        if self.source == "synthetic":
            yield from self._synthetic(stored)
            return
        if stored == "test":
            rows = self.rows("test", last=split == "test")
        else:
            rows = self.rows("train")
            if self.validation == "val":
                rows = self.part(split, held_out(rows, self.val_fraction, self.split_seed))
        for text, label in rows:
            yield Example((text,), label)

    def encode(self, given: Any) -> np.ndarray | bytes:
        """The bytes of a review, given as text or as bytes."""
        return given.encode() if isinstance(given, str) else super().encode(given)

    def decode(self, values: np.ndarray) -> str:
        """The bytes as UTF-8; what is none, as escapes."""
        return bytes(values).decode(errors="backslashreplace")

    def _synthetic(self, split: str) -> Iterator[Example]:
        rng, labels = self.synthetic_labels(split)
        lengths = np.exp(rng.normal(np.log(980), 0.62, len(labels))).clip(50, 14_000).astype(int)
        for label, length in zip(labels, lengths.tolist(), strict=True):
            yield Example((_LETTERS[label][rng.integers(0, 256, length, np.uint8)],), label)

    def left_out(self) -> list[str]:
        """Likewise; and what lies among the reviews."""
        is_tree = self.kind == "files" and self.source != "hub" and self.place.form == "folder"
        return [*(odd_files(self.place.path) if is_tree else []), *super().left_out()]

    def _has_folder(self, folder: Path) -> bool:
        return any((folder / name).is_dir() for name in TREE)

    def _files_in(self, folder: Path) -> list[Path]:
        return [Path(path) for _, path in review_files(folder)]

    def _read_folder(self, folder: Path) -> dict[str, list[Row]]:
        rows: dict[str, list[Row]] = {"train": [], "test": []}
        for name, path in review_files(folder):
            split, class_name = name.split("/")
            rows[split].append((read_file(path), LABELS[class_name]))
        return rows

    def _read_archive(self, archive: Path) -> dict[str, list[Row]]:
        texts: dict[str, dict[str, bytes]] = {name: {} for name in TREE}
        odd: list[str] = []
        for member, text in tar_members(archive, lambda name: bool(_MEMBER.fullmatch(name))):
            match = _MEMBER.fullmatch(member)
            assert match
            if not _REVIEW.fullmatch(match[2]):
                odd.append(repr(member))
                continue
            if match[2] in texts[match[1]]:
                raise ValueError(f"{archive}: member {member!r} is there in another folder too")
            texts[match[1]][match[2]] = text
        if odd:
            self.remarks.append(f"{archive}: {len(odd)} members {NO_REVIEW}: {shortened(odd)}")
        rows: dict[str, list[Row]] = {"train": [], "test": []}
        for name in TREE:
            if not texts[name]:
                raise ValueError(f"{archive}: no reviews (*.txt) in {name}; not the IMDb archive")
            split, class_name = name.split("/")
            for file_name in sorted(texts[name], key=_number):
                rows[split].append((texts[name][file_name], LABELS[class_name]))
        return rows

    def _read_table(self, rows: Iterator[TableRow]) -> list[Row]:
        reviews = []
        for where, (text, label) in rows:
            if not isinstance(text, bytes):
                raise ValueError(f"{where}: text {text!r:.60}, expected a string")
            reviews.append((text, class_of(where, label, self.class_spellings)))
        return reviews


def review_files(folder: Path) -> list[tuple[str, str]]:
    """Folder (of `TREE`) and path of every review of an `aclImdb` folder, ordered by number.

    `unsup` and whatever is not called NUMBER_RATING.txt is left out, see `odd_files`.

    Raises:
        ValueError: one of the four folders is missing or empty, or a review is no plain file.
    """
    found = []
    for name in TREE:
        path = folder / name
        files = []
        if path.is_dir():
            with os.scandir(path) as entries:
                for entry in entries:
                    if _REVIEW.fullmatch(entry.name):
                        if not entry.is_file():
                            raise ValueError(f"{entry.path}: not a plain file")
                        files.append(entry.name)
        if not files:
            raise ValueError(
                f"task 'text': {folder} has no reviews (NUMBER_RATING.txt) in {name}; expected "
                f"some in each of {', '.join(TREE)}"
            )
        files.sort(key=_number)
        found += [(name, f"{path}{os.sep}{file}") for file in files]
    return found


def odd_files(folder: Path) -> list[str]:
    """What lies among the reviews of an `aclImdb` folder and is not called like one."""
    return [
        f"{file}: not called NUMBER_RATING.txt"
        for name in TREE
        for file in sorted((folder / name).glob("*"))
        if not _REVIEW.fullmatch(file.name)
    ]


def _number(name: str) -> tuple[int, str]:
    """Sort key: the number that a name begins with; as text, 10 would come before 2."""
    digits = re.match(r"[0-9]{1,18}", name)
    return (int(digits[0]) if digits else 1 << 62, name)
