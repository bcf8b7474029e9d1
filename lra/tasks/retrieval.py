"""Retrieval: does one paper cite the other? Two documents as bytes, two classes.

Data: pairs from the ACL Anthology Network (Radev et al. 2013), the `new_aan_pairs.*.tsv` in the
release of Long Range Arena (Tay et al. 2020, section 2.2.3, arXiv:2011.04006). A document is cut to
10,000 bytes as the benchmark's loader does, then to `max_length` = 4,000; id = byte + 1.

A file has no header and no quoting: a row ends at a line feed and a column at a tab, whatever the
documents hold. Where every line of a file ends in CR LF, the carriage returns are none of the
documents'; where only some do, they cannot be told from data and stay. Texts are written as Python
bytes literals (`b'...'`), which the benchmark feeds to its models as they stand, prefix, quotes and
escapes included; see `Retrieval.decode_literals`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from lra.tasks.archives import count_line_ends, is_archive, open_plain
from lra.tasks.beside import similar
from lra.tasks.generated import ARCHIVES
from lra.tasks.sources import READER_VERSION, FileTask, Place, distinct
from lra.tasks.task import SPLITS, Example

FILES = {split: f"new_aan_pairs.{name}.tsv"
         for split, name in zip(SPLITS, ("train", "eval", "test"), strict=True)}  # fmt: skip
FOLDERS = tuple(
    f"{outer}{inner}"
    for outer in ("lra_release/lra_release/", "lra_release/", "")
    for inner in ("tsv_data", "aan", "retrieval", "")
)
COLUMNS = "label, id1, id2, text1, text2"
LABELS = {b"0": 0, b"1": 1, b"0.0": 0, b"1.0": 1}
MAX_DOCUMENT_BYTES = 10_000
MAX_ROW_BYTES = 64 << 20

# Possessive, so that a document of any length is matched in one pass.
_LITERAL = re.compile(
    rb"""b(?:'([^'\\]*+(?:\\.[^'\\]*+)*+)'|"([^"\\]*+(?:\\.[^"\\]*+)*+)")""", re.DOTALL
)
_ESCAPE = re.compile(rb"\\(?:x([0-9a-fA-F]{2})|([0-7]{1,3})|(.))", re.DOTALL)
_SIMPLE = {b"\\": b"\\", b"'": b"'", b'"': b'"', b"a": b"\a", b"b": b"\b", b"f": b"\f",
           b"n": b"\n", b"r": b"\r", b"t": b"\t", b"v": b"\v", b"\n": b""}  # fmt: skip

# The stand-in's letters: on the common topic, or off it.
_COMMON = b" etaoinshrdlu .,"
_ON, _OFF = (
    np.frombuffer((_COMMON * 10)[:160] + (letters * 16)[:96], np.uint8)
    for letters in (b"bcfgjk", b"mpqvwy")
)


@dataclass(kw_only=True)
class Retrieval(FileTask):
    """Citation pairs from the released files.

    `decode_literals=true` feeds the documents that the bytes literals stand for, instead of the
    literals themselves. `on_bad_row=skip` leaves faulty rows out and lists them in the report.

    The synthetic stand-in asks whether two documents are on the same topic: of a positive pair both
    have one mixture of letters; of a negative pair one of the two, at random, has another. Most
    documents are longer than 4,000 bytes.

    Raises:
        ValueError: a setting is none of its choices; names the key.
    """

    name: ClassVar[str] = "retrieval"
    num_classes: ClassVar[int] = 2
    num_values: ClassVar[int] = 256
    num_sequences: ClassVar[int] = 2
    class_names: ClassVar[tuple[str, ...]] = ("no citation", "citation")
    official_sizes: ClassVar[dict[str, int]] = {"train": 147_086, "val": 18_090, "test": 17_437}
    what: ClassVar[str] = f"AAN pairs ({', '.join(FILES.values())})"
    own_folders: ClassVar[tuple[str, ...]] = tuple(
        name for name in FOLDERS if name.rsplit("/", 1)[-1] in ("tsv_data", "aan", "retrieval")
    )
    own_names: ClassVar[str] = r"new_aan_pairs.*|(?:tsv_data|aan|retrieval)\..*"
    remedy: ClassVar[str] = (
        "Get https://storage.googleapis.com/long-range-arena/lra_release.gz (8 GB, a tar archive) "
        "with `bash scripts/get_data.sh {data} release` and unpack it with "
        "`tar -xzf {data}/lra_release.gz -C {data}`."
    )

    max_length: int = 4000
    source: Literal["auto", "files", "synthetic"] = "auto"
    decode_literals: bool = False
    on_bad_row: Literal["error", "skip"] = "error"

    @property
    def protocol(self) -> dict[str, Any]:
        """`literals` says whether the documents' bytes literals were fed as they stand."""
        literals = "decoded" if self.decode_literals else "kept"
        return {"validation": "val", "difficulty": None, "literals": literals}

    def deviations(self) -> list[str]:
        """How the documents differ from the benchmark's."""
        return ["task.decode_literals=true (benchmark: false)"] if self.decode_literals else []

    def settings(self) -> dict[str, Any]:
        """Every setting that shapes the content."""
        if self.source == "synthetic":
            return self.synthetic_settings()
        settings = {
            "source": "files",
            "reader": READER_VERSION,
            "decode_literals": self.decode_literals,
            "on_bad_row": self.on_bad_row,
        }
        # Such files gave other documents before, so their caches have another name since.
        return settings | ({"line_ends": "CR LF"} if self._has_returns() else {})

    def examples(self, split: str) -> Iterator[Example]:
        """Yield the pairs of a split in the order of its file.

        Raises:
            ValueError: a faulty row, unless `on_bad_row=skip`; names file, line and fault.
        """
        if self.source == "synthetic":
            yield from self._synthetic(split)
            return
        path = self._files_at(self.place)[SPLITS.index(split)]
        end = self._line_end(path)
        with open_plain(path) as file:
            number = 0
            while line := file.readline(MAX_ROW_BYTES + 1):
                number += 1
                is_cut = not line.endswith(b"\n") and _is_open(line)
                line = line.removesuffix(end)
                try:
                    example = parse_row(line, self.decode_literals)
                    if is_cut:
                        raise ValueError("ends within a bytes literal: has the file been cut?")
                    yield example
                except ValueError as error:
                    if self.on_bad_row == "error":
                        raise ValueError(f"{path}, line {number}: {error}") from None
                    self.skipped.setdefault(split, []).append(
                        f"{path.name}, line {number}: {error}"
                    )
                    while len(line) > MAX_ROW_BYTES and not line.endswith(b"\n"):
                        line = file.readline(MAX_ROW_BYTES + 1) or b"\n"

    def encode(self, given: Any) -> np.ndarray | bytes:
        """The bytes of a document, given as its text or as the bytes literal of the files."""
        if not isinstance(given, str | bytes):
            return super().encode(given)
        document = given.encode() if isinstance(given, str) else given
        if self.source != "synthetic":
            is_literal = _LITERAL.fullmatch(document) is not None
            if self.decode_literals and is_literal:
                document = decode_literal(document)
            elif not self.decode_literals and not is_literal:
                document = repr(document).encode()
        return document[:MAX_DOCUMENT_BYTES]

    def encode_prompt(self, text: str) -> np.ndarray | bytes:
        """As `encode`; a literal lacks its closing quote, so that it can go on."""
        document = self.encode(text)
        has_no_quotes = self.source == "synthetic" or self.decode_literals
        return document if has_no_quotes else document[:-1]

    def decode(self, values: np.ndarray) -> str:
        """The bytes as UTF-8; what is none, as escapes."""
        return bytes(values).decode(errors="backslashreplace")

    def _synthetic(self, split: str) -> Iterator[Example]:
        rng, labels = self.synthetic_labels(split)
        for label in labels:
            topics = [_ON, _ON if label else _OFF]
            if rng.random() < 0.5:
                topics.reverse()
            lengths = np.exp(rng.normal(np.log(6_000), 0.7, 2)).clip(200, MAX_DOCUMENT_BYTES)
            documents = (
                topic[rng.integers(0, 256, int(length), np.uint8)]
                for topic, length in zip(topics, lengths, strict=True)
            )
            yield Example(tuple(documents), label)

    def _has_returns(self) -> bool:
        """Whether the first line of one of the files ends in CR LF."""
        for path in self.source_files():
            with open_plain(path) as file:
                if file.readline(MAX_ROW_BYTES + 1).endswith(b"\r\n"):
                    return True
        return False

    def _line_end(self, path: Path) -> bytes:
        """What ends each line of a file, see the module's head; a remark says what is odd."""
        total, with_return = count_line_ends(path)
        if not with_return:
            return b"\n"
        if with_return == total:
            self.remarks.append(
                f"{path.name}: all {total:,} lines end in CR LF, which is none of the documents'"
            )
            return b"\r\n"
        self.remarks.append(
            f"{path.name}: {with_return:,} of {total:,} lines end in CR LF, the others in LF: the "
            f"{with_return:,} carriage returns are kept as data"
        )
        return b"\n"

    def left_out(self) -> list[str]:
        """Likewise; and files that are called almost like those that are read."""
        if self.source == "synthetic":
            return []
        read = [path.name for path in self.source_files()]
        return [*similar(self.place.path, read, r"new_aan_pairs"), *super().left_out()]

    def _tried(self) -> list[Path]:
        return [self.root / folder for folder in FOLDERS]

    def _places(self) -> list[Place]:
        if self.root.is_file() and self.root.name.removesuffix(".gz") in FILES.values():
            return [Place(self.root.parent, "folder")]
        return distinct(
            Place(folder, "folder")
            for folder in self._tried()
            if any(_form(folder, name).is_file() for name in FILES.values())
        )

    def _files_at(self, place: Place) -> list[Path]:
        files = [_form(place.path, name) for name in FILES.values()]
        if missing := [file.name for file in files if not file.is_file()]:
            raise ValueError(
                f"task 'retrieval': {place.path} has no {' and no '.join(missing)}; expected "
                f"{', '.join(FILES.values())}{_other_names(place.path)}"
            )
        for file in files:  # before gigabytes of the others are read
            if file.stat().st_size == 0:
                raise ValueError(f"{file}: empty, expected rows of {COLUMNS}")
        return files

    def _not_found(self) -> ValueError:
        for packed in (self.root, *(self.root / name for name in ARCHIVES)):
            if is_archive(packed):
                # The archive's own folder is called lra_release: a file of that name is in its way.
                move, file = "", packed
                if packed.name == "lra_release":
                    file = packed.with_name("lra_release.gz")
                    move = f"mv {packed} {file} && "
                return ValueError(f"task 'retrieval': {packed} is a tar archive; unpack it with "
                                  f"`{move}tar -xzf {file} -C {file.parent}`")  # fmt: skip
        if self.root.is_file():
            names = ", ".join(FILES.values())
            return ValueError(f"{self.root}: not a folder; expected one with {names}")
        for folder in self._tried():
            if hint := _other_names(folder):
                return ValueError(
                    f"task 'retrieval': {folder} has none of {', '.join(FILES.values())}{hint}"
                )
        return super()._not_found()


def _form(folder: Path, name: str) -> Path:
    """A file as it is, or else compressed."""
    packed = folder / f"{name}.gz"
    return packed if packed.is_file() and not (folder / name).is_file() else folder / name


def _is_open(line: bytes) -> bool:
    """Whether a row's last document begins as a bytes literal and does not end as one."""
    last = line.rpartition(b"\t")[2]
    return last[:2] in (b"b'", b'b"') and not _LITERAL.fullmatch(last)


def _other_names(folder: Path) -> str:
    """What files with similar names are, empty if there are none."""
    names = sorted(file.name for file in folder.glob("new_aan_pairs.*"))
    hint = ""
    if any(".val" in name or ".dev" in name for name in names):
        hint += "; the validation file is called eval in the release, and eval is expected here"
    if any("only_ids" in name for name in names):
        hint += "; files named only_ids have three columns, the text columns are missing"
    known = set(FILES.values())
    others = [name for name in names if name.removesuffix(".gz") not in known]
    return f"{hint} (found {', '.join(others)})" if others else ""


def parse_row(line: bytes, decode_literals: bool = False) -> Example:
    """One row with or without its line feed, as documents of at most 10,000 bytes and a label.

    Raises:
        ValueError: not five columns, another label than 0 or 1, or a broken literal; says which.
    """
    if len(line) > MAX_ROW_BYTES:
        raise ValueError(f"longer than {MAX_ROW_BYTES} bytes")
    columns = line.removesuffix(b"\n").split(b"\t")
    if len(columns) != 5:
        why = {1: "", 3: "; rows of ids only lack the texts"}.get(
            len(columns), "; is there a tab in a document?" if len(columns) > 5 else ""
        )
        raise ValueError(f"{len(columns)} columns, expected 5 ({COLUMNS}){why}")
    label, _, _, *texts = columns
    if label not in LABELS:
        raise ValueError(f"label {_show(label)}, expected 0, 1, 0.0 or 1.0")
    if decode_literals:
        for i, text in enumerate(texts):
            try:
                texts[i] = decode_literal(text)
            except ValueError as error:
                raise ValueError(f"text{i + 1} {error}") from None
    return Example((texts[0][:MAX_DOCUMENT_BYTES], texts[1][:MAX_DOCUMENT_BYTES]), LABELS[label])


def decode_literal(text: bytes) -> bytes:
    r"""The bytes that a Python bytes literal stands for, e.g. `b'caf\xc3\xa9\n'`; runs nothing.

    Raises:
        ValueError: not one whole literal of ASCII characters.
    """
    literal = _LITERAL.fullmatch(text)
    if not literal:
        raise ValueError(f"is not a whole bytes literal: {_show(text)}")
    if not text.isascii():
        raise ValueError(f"is a bytes literal with a byte beyond ASCII: {_show(text)}")
    body = literal[1] if literal[1] is not None else literal[2]
    return _ESCAPE.sub(_unescape, body) if b"\\" in body else body


def _unescape(escape: re.Match[bytes]) -> bytes:
    hexadecimal, octal, simple = escape.groups()
    if hexadecimal:
        return bytes.fromhex(hexadecimal.decode())
    if octal:
        if (value := int(octal, 8)) > 255:
            raise ValueError(f"has the escape {_show(escape[0])}, over 255")
        return bytes([value])
    if simple == b"x":
        raise ValueError("has an escape \\x without two hexadecimal digits")
    return _SIMPLE.get(simple, escape[0])  # Python keeps the backslash of an unknown escape


def _show(text: bytes) -> str:
    """The beginning, or beginning and end, of any bytes, printable and quoted."""
    if len(text) > 60:
        text = text[:30] + b" ... " + text[-30:]
    return repr(text.decode(errors="backslashreplace"))
