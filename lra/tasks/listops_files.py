"""ListOps expressions as people write them: text to raw values, their value, and files of rows.

The released files, `basic_train.tsv` and so on, are tables of two columns, `Source` and `Target`;
Parquet and Arrow files of the same columns are read as well. No label is believed: every expression
is evaluated.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from lra.tasks.archives import open_plain
from lra.tasks.columnar import class_of, table_rows
from lra.tasks.listops_generator import CLOSE, MAX, MIN, SM, SYMBOLS
from lra.tasks.workers import map_in_order

HEADER = b"Source\tTarget"
COLUMNS = (("Source", "source"), ("Target", "target", "label"))
LINES_PER_CHUNK = 512
MAX_LINE_BYTES = 4 << 20  # the longest released row has some 14 thousand

_CLASSES = ((),) * 10  # of tables: numbers only
_TO_VALUE = {symbol.encode(): value for value, symbol in enumerate(SYMBOLS)}
_DROP_ROUND = bytes.maketrans(b"()", b"  ")
_LABELS = {str(digit).encode(): digit for digit in range(10)}


def encode(text: str) -> np.ndarray:
    """Raw values [L] (uint8) of an expression; round brackets are dropped.

    Raises:
        ValueError: a token is none of the 15 symbols.
    """
    return np.frombuffer(_values(text.encode()), np.uint8)


def evaluate(values: bytes) -> int:
    """Value, 0 to 9, of one expression given as raw values.

    Raises:
        ValueError: not one well-formed expression; says why.
    """
    open_operators: list[tuple[int, list[int]]] = []  # and the arguments read before each
    args: list[int] = []  # of the innermost open operator
    for value in values:
        if value < 10:
            args.append(value)
        elif value < CLOSE:
            open_operators.append((value, args))
            args = []
        elif not open_operators:
            raise ValueError("a ']' without an operator")
        else:
            operator, outer = open_operators.pop()
            if not args:
                raise ValueError(f"{SYMBOLS[operator]} without arguments")
            if operator == MIN:
                result = min(args)
            elif operator == MAX:
                result = max(args)
            elif operator == SM:
                result = sum(args) % 10
            else:
                args.sort()
                result = (args[(len(args) - 1) // 2] + args[len(args) // 2]) // 2
            outer.append(result)
            args = outer
    if open_operators:
        raise ValueError(f"the expression ends with {len(open_operators)} operator(s) not closed")
    if len(args) != 1:
        raise ValueError(f"expected one expression, found {len(args)}")
    return args[0]


def read_tsv(file: Path, *, num_workers: int = 1) -> Iterator[tuple[bytes, int]]:
    """Yield raw values and label of every row of a released file; labels are checked.

    The format: header `Source<TAB>Target`, then one expression and its value per line, LF or CRLF,
    no quoting; compressed if the name ends in `.gz`. Processes share the work; the order, and which
    fault is reported, do not depend on their number.

    Raises:
        ValueError: a faulty file or row; names file, line and what was expected.
    """
    with open_plain(file) as stream:
        header = stream.readline(MAX_LINE_BYTES)
        if not header:
            raise ValueError(f"{file}: empty, expected the header Source<TAB>Target and rows")
        if header.rstrip(b"\r\n") != HEADER:
            raise ValueError(
                f"{file}: the first line is {_show(header)}, expected the header Source<TAB>Target"
            )
        lines = _lines(stream, file)
        chunks = iter(lambda: list(itertools.islice(lines, LINES_PER_CHUNK)), [])
        jobs = ((str(file), 2 + i * LINES_PER_CHUNK, lines) for i, lines in enumerate(chunks))
        num_rows = 0
        for rows in map_in_order(_check_lines, jobs, num_workers):
            num_rows += len(rows)
            yield from rows
    if not num_rows:
        raise ValueError(f"{file}: has a header but no rows behind it")


def read_table(file: Path, *, num_workers: int = 1) -> Iterator[tuple[bytes, int]]:
    """Likewise, of a Parquet or Arrow file with the columns `COLUMNS`.

    Raises:
        ValueError: a faulty file or row; names file, row and what was expected.
    """

    def lines() -> Iterator[bytes]:
        for where, (source, target) in table_rows(file, COLUMNS):
            if not isinstance(source, bytes):
                raise ValueError(f"{where}: {source!r:.60}, expected an expression")
            yield b"%s\t%d" % (source, class_of(where, target, _CLASSES))

    rows = lines()
    chunks = iter(lambda: list(itertools.islice(rows, LINES_PER_CHUNK)), [])
    jobs = ((str(file), i * LINES_PER_CHUNK, lines, "row") for i, lines in enumerate(chunks))
    for checked in map_in_order(_check_lines, jobs, num_workers):
        yield from checked


def _lines(stream: BinaryIO, file: Path) -> Iterator[bytes]:
    for number, line in enumerate(iter(lambda: stream.readline(MAX_LINE_BYTES + 1), b""), start=2):
        if len(line) > MAX_LINE_BYTES:
            raise ValueError(
                f"{file}, line {number}: more than {MAX_LINE_BYTES:,} bytes, expected an "
                "expression and its value"
            )
        yield line


def _values(source: bytes) -> bytes:
    """Raw values of an expression's text."""
    tokens = source.translate(_DROP_ROUND).split()
    try:
        return bytes([_TO_VALUE[token] for token in tokens])
    except KeyError as error:
        unknown = error.args[0]
    raise ValueError(f"unknown token {_show(unknown)}, expected one of {' '.join(SYMBOLS)}")


def _check_lines(
    file: str, first_line: int, lines: list[bytes], unit: str = "line"
) -> list[tuple[bytes, int]]:
    """Raw values and label of each line; `file`, `first_line` and `unit` are for messages."""
    rows = []
    for number, line in enumerate(lines, first_line):
        try:
            rows.append(_check_row(line.removesuffix(b"\n").removesuffix(b"\r")))
        except ValueError as error:
            raise ValueError(f"{file}, {unit} {number}: {error}") from None
    return rows


def _check_row(row: bytes) -> tuple[bytes, int]:
    columns = row.split(b"\t")
    if len(columns) != 2:
        raise ValueError(
            f"expected expression, tab, label, found {len(columns) - 1} tabs in {_show(row)}"
        )
    values = _values(columns[0])
    value = evaluate(values)
    label = _LABELS.get(columns[1])
    if label is None:
        raise ValueError(f"label {_show(columns[1])}, expected 0 to 9")
    if label != value:
        raise ValueError(f"label {label}, but the expression has the value {value}")
    return values, label


def _show(text: bytes) -> str:
    """Any bytes as a short, printable, quoted text; says so if they cannot be text."""
    try:
        shown = repr(text[:60].decode(errors="ignore")) + ("..." if len(text) > 60 else "")
        text.decode()
    except UnicodeDecodeError:
        return f"{ascii(text[:60])} (not UTF-8)"
    return f"{shown} (a NUL byte)" if b"\0" in text else shown
