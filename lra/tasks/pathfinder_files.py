"""Pathfinder's files as the release has them: reading, with checks, and writing.

A folder `pathfinder<R>/<level>` has pictures `imgs/<batch>/sample_<i>.png` (8-bit grey) and, in
spite of their names, text files `metadata/<batch>.npy` with a line for each picture; some people
save the same rows as real arrays:

    imgs/0 sample_7.png 7 1 1.0 14 4 2 0.5 1 1

These are folder, file, number in the batch, label (1: joined), continuity, paddles of a target
contour and of a distractor, length, thickness and margin of a paddle, number of contrasts.

Legend: N pictures, R side of a picture, P = R * R pixels, S = 2 target contours, E = 2 ends of
each, C = 2 coordinates.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import secrets
import shutil
import struct
import zlib
from collections.abc import Iterator
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from lra.files import Held, check_writable, is_refused, locked, way_out, write_atomically
from lra.tasks.archives import read_file
from lra.tasks.beside import NAMES_SHOWN
from lra.tasks.pathfinder_generator import PathfinderParams, generate
from lra.tasks.workers import map_in_order

MAX_PICTURE_BYTES = 1 << 20  # of a file; a picture that cannot be packed at all has 65 kB
# Of the table of the truth: points are (y, x); an origin is the end at which a contour starts.
TRUTH_COLUMNS = (
    "file", "label", "mark1_y", "mark1_x", "mark2_y", "mark2_x",
    "origin0_y", "origin0_x", "terminal0_y", "terminal0_x",
    "origin1_y", "origin1_x", "terminal1_y", "terminal1_x", "margin", "distractors",
)  # fmt: skip

GENERATED = "generated.json"  # in a level's folder: how we have drawn it

_BATCH = re.compile(r"(?!.*(?:-checkpoint|[-_.](?:copy|bak|backup|old|orig))$)[\w-]+")
_PNG = b"\x89PNG\r\n\x1a\n"
_COLOURS = {0: "grey", 2: "RGB", 3: "palette", 4: "grey and alpha", 6: "RGB and alpha"}
_LABELS = {"0": 0, "1": 1, "0.0": 0, "1.0": 1}


class Listed(NamedTuple):
    """What a line of the metadata says: a picture's path in the level's folder, and its label."""

    path: str
    label: int
    file: str  # and line, of the metadata
    line: int


class Index(NamedTuple):
    """The pictures of a level's folder in the order of its metadata, and those not listed there."""

    metadata: list[Path]
    listed: list[Listed]
    unlisted: list[str]
    left_out: list[str]  # files beside the metadata's, with the reason


def index_level(level: Path) -> Index:
    """List the pictures of a level's folder, batches in the order of their numbers.

    Raises:
        ValueError: no metadata, a faulty line, a picture listed twice, or pictures listed but
            missing; names file and line.
    """
    folder = level / "metadata"
    if not folder.is_dir():
        raise ValueError(f"{level}: has no folder metadata; expected imgs and metadata")
    metadata, left_out = [], []
    for file in sorted(folder.iterdir(), key=_batch_order):
        if file.suffix == ".npy" and _BATCH.fullmatch(file.stem):
            metadata.append(file)
        elif ".npy" in file.name:
            left_out.append(f"{file}: not called <batch>.npy")
    if not metadata:
        raise ValueError(f"{folder}: no files <batch>.npy")
    listed = [row for file in metadata for row in read_metadata(file)]
    if not listed:
        raise ValueError(f"{folder}: lists no pictures")
    lines: dict[str, Listed] = {}
    for row in listed:
        first = lines.setdefault(row.path, row)
        if first is not row:
            raise ValueError(f"{_where(row)}: {row.path} is listed before, at {_where(first)}")

    present: set[str] = set()
    folders = {os.path.dirname(row.path) for row in listed}
    if (level / "imgs").is_dir():
        with os.scandir(level / "imgs") as entries:
            folders |= {f"imgs/{entry.name}" for entry in entries if entry.is_dir()}
    for name in sorted(folders):
        prefix = f"{name}/" if name else ""
        if (level / name).is_dir():
            with os.scandir(level / name) as entries:
                present.update([prefix + entry.name for entry in entries if entry.is_file()])
    if missing := [row for row in listed if row.path not in present]:
        names = ", ".join(f"{row.path} ({_where(row)})" for row in missing[:NAMES_SHOWN])
        raise ValueError(
            f"{level}: {len(missing)} of {len(listed)} pictures are missing: {names}"
            f"{', ...' if len(missing) > NAMES_SHOWN else ''}; unpack the release again"
        )
    unlisted = sorted(path for path in present - lines.keys() if path.endswith(".png"))
    return Index(metadata, listed, unlisted, left_out)


def read_metadata(file: Path) -> list[Listed]:
    """The rows of a metadata file, text or a NumPy array of texts.

    Raises:
        ValueError: a faulty row, or an array of another kind; names file and line (row of an array,
            from 1).
    """
    data = read_file(file)
    if data.startswith(b"\x93NUMPY"):
        lines = _array_lines(data, str(file))
    else:
        try:
            lines = data.decode("utf-8-sig").split("\n")
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, error.start) + 1
            raise ValueError(f"{file}, line {line}: neither UTF-8 text nor a NumPy array") from None
    name, rows = str(file), []
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            rows.append(Listed(*_parse_line(text), name, number))
        except ValueError as error:
            raise ValueError(f"{file}, line {number}: {error}") from None
    if not rows:
        raise ValueError(f"{file}: empty, expected a line for each picture")
    return rows


def _parse_line(line: str) -> tuple[str, int]:
    """Path and label of a line."""
    if "\r" in line.removesuffix("\r"):
        raise ValueError(f"a carriage return within {line[:80]!r}; expected lines that end in LF")
    columns = line.split()
    if len(columns) < 4:
        raise ValueError(
            f"expected folder, file, number, label and more, found {len(columns)} columns in "
            f"{line[:80]!r}"
        )
    folder, name, _, label = columns[:4]
    prefix = _prefix(folder)
    if prefix is None or name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise ValueError(f"{f'{folder} {name}'[:80]!r} does not stay within the level's folder")
    if label not in _LABELS:
        raise ValueError(f"label {label[:80]!r} in column 4, expected 0 or 1")
    return prefix + name, _LABELS[label]


@lru_cache(maxsize=1024)
def _prefix(folder: str) -> str | None:
    """A folder as the first part of a path, in one spelling; None if it leads elsewhere."""
    path = PurePosixPath(folder)
    if path.is_absolute() or ".." in path.parts or "\\" in folder or "\0" in folder:
        return None
    return f"{path}/" if path.parts else ""


def _array_lines(data: bytes, where: str) -> list[str]:
    """The rows of a NumPy array of texts as lines; nothing in it is unpickled."""
    stream = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(stream)
        read_header = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[version]
        shape, is_fortran, dtype = read_header(stream)
        fault = _fault(shape, dtype, len(data) - stream.tell())
        if not fault:
            array = np.frombuffer(data, dtype, offset=stream.tell())
            rows = array.reshape(shape, order="F" if is_fortran else "C").tolist()
    except Exception as error:  # a damaged array may fail in any way
        fault = f"which is damaged ({error})"
    if fault:
        raise ValueError(f"{where}: a NumPy array {fault}")
    lines = [_join(row) for row in rows]
    # A single row may have lost its axis.
    return lines if any(" " in line for line in lines) else [" ".join(lines)]


def _fault(shape: tuple[int, ...], dtype: np.dtype, num_bytes: int) -> str:
    """Why an array is not one of metadata, empty if it is."""
    if dtype.hasobject:
        return "of Python objects, which are never unpickled; expected rows of texts"
    if not (dtype.kind in "US" or dtype.names) or len(shape) not in (1, 2):
        return f"of {dtype} with {len(shape)} axes, expected rows of texts"
    if math.prod(shape) * dtype.itemsize != num_bytes:
        return f"of shape {shape} and {dtype}, but {num_bytes} bytes follow"
    return ""


def _join(row: Any) -> str:
    """A row of an array, or a part of one, as text."""
    if isinstance(row, list | tuple):
        return " ".join(map(_join, row))
    return row.decode() if isinstance(row, bytes) else str(row)


def _batch_order(file: Path) -> tuple[bool, int, str]:
    """By number: as texts, 10 comes before 2."""
    is_number = file.stem.isascii() and file.stem.isdigit()
    return not is_number, int(file.stem) if is_number else 0, file.name


def _where(row: Listed) -> str:
    return f"{row.file}, line {row.line}"


# --- pictures -------------------------------------------------------------------------------------


class Damaged(ValueError):
    """A picture's file is empty, cut or altered."""


class ReadPictures(NamedTuple):
    """Whole pictures [N, P] (uint8) and their labels, and the names and faults of damaged ones."""

    pixels: list[np.ndarray]
    labels: list[int]
    damaged: list[str]


def read_pictures(level: str, resolution: int, rows: list[Listed]) -> ReadPictures:
    """Read some pictures of a level's folder.

    Raises:
        ValueError: a picture is whole but of another size or kind; names the line that lists it.
    """
    read = ReadPictures([], [], [])
    for row in rows:
        try:
            read.pixels.append(read_picture(os.path.join(level, row.path), resolution))
            read.labels.append(row.label)
        except Damaged as error:
            read.damaged.append(f"{row.path}: {error}")
        except ValueError as error:
            raise ValueError(f"{_where(row)}: {row.path}: {error}") from None
    return read


def read_picture(file: str | Path, resolution: int) -> np.ndarray:
    """Grey values [P] (uint8) of a PNG file of `resolution` x `resolution` pixels, 8-bit grey.

    Every checksum is compared, and the size looked at, before anything is unpacked.

    Raises:
        Damaged: empty, not PNG, cut or altered.
        ValueError: another size or kind of picture.
    """
    from PIL import Image

    data = read_file(file, MAX_PICTURE_BYTES)
    _check_png(data, resolution)
    try:
        with Image.open(io.BytesIO(data), formats=["PNG"]) as image:
            return np.asarray(image).reshape(resolution * resolution)
    except Exception as error:  # damaged files fail in many ways
        raise Damaged(f"cannot be unpacked ({type(error).__name__}: {error})") from None


def _check_png(data: bytes, resolution: int) -> None:
    if not data:
        raise Damaged("empty file")
    if not data.startswith(_PNG):
        raise Damaged(f"not a PNG file, it begins with {data[:8]!r}")
    packed, start, kind = b"", len(_PNG), b""
    while kind != b"IEND":
        if start + 12 > len(data):
            raise Damaged(f"cut off after {len(data)} bytes")
        length, kind = struct.unpack_from(">I4s", data, start)
        end = start + 12 + length
        if end > len(data):
            raise Damaged(f"cut off after {len(data)} bytes")
        if zlib.crc32(data[start + 4 : end - 4]) != int.from_bytes(data[end - 4 : end]):
            raise Damaged(f"wrong checksum at byte {start}")
        body = data[start + 8 : end - 4]
        if start == len(_PNG):
            if kind != b"IHDR" or length != 13:
                raise Damaged("has no header")
            width, height, depth, colour, _, _, interlace = struct.unpack(">IIBBBBB", body)
            if (width, height) != (resolution, resolution):
                raise ValueError(
                    f"a picture of {width} x {height}, expected {resolution} x {resolution}"
                )
            if (depth, colour, interlace) != (8, 0, 0):
                raise ValueError(
                    f"a picture of {depth}-bit {_COLOURS.get(colour, 'unknown colour')}"
                    f"{', interlaced' if interlace else ''}; expected 8-bit grey"
                )
        if kind == b"IDAT":
            packed += body
        start = end
    # A row begins with the number of its filter.
    expected = resolution * (resolution + 1)
    try:
        size = len(zlib.decompressobj().decompress(packed, expected + 1))
    except zlib.error as error:
        raise Damaged(f"cannot be unpacked ({error})") from None
    if size != expected:
        raise Damaged(f"has {'less' if size < expected else 'more'} than {resolution} rows")


# --- writing --------------------------------------------------------------------------------------


def write_level(
    level: Path,
    params: PathfinderParams,
    seed: int,
    batches: list[tuple[int, int]],
    *,
    truth: Path | None = None,
    num_workers: int = 1,
) -> None:
    """Write a level's folder of generated pictures; a batch is its first picture and their number.

    `truth` is a table of tab-separated columns, see `TRUTH_COLUMNS`, with a row for each picture.
    The folder has its name only when it and the table are whole.

    Raises:
        ValueError: the folder is there already or being written, or `truth` is no file.
        OSError: the folder or `truth` cannot be written, e.g. the disk is full; names it.
    """
    if truth is not None:
        _check_table(truth)
    check_writable(level.parent, "folder")
    with _alone(level):
        if level.exists():
            raise ValueError(f"{level}: exists already; move it away or write to another folder")
        for left in level.parent.glob(f".{level.name}.*.part"):  # by an export that was killed
            shutil.rmtree(left)
        written = level.with_name(f".{level.name}.{secrets.token_hex(4)}.part")
        jobs = (
            (written, batch, params, seed, start, count)
            for batch, (start, count) in enumerate(batches)
        )
        rows = ["\t".join(TRUTH_COLUMNS) + "\n"]
        try:
            for name in ("imgs", "metadata"):
                (written / name).mkdir(parents=True)
            facts = {"seed": seed, "params": asdict(params), "batches": batches}
            write_atomically(written / GENERATED, json.dumps(facts) + "\n")
            for batch_rows in map_in_order(write_batch, jobs, num_workers):
                if truth is not None:
                    rows += batch_rows
            written = written.replace(level)
            if truth is not None:
                write_atomically(truth, "".join(rows))
        except BaseException as error:
            shutil.rmtree(written, ignore_errors=True)
            if not is_refused(error):
                raise
            place, key = (truth, "truth") if error.filename == str(truth) else (level, "folder")
            remedy = way_out(error, key)
            raise OSError(f"{place}: not written ({error.strerror}); {remedy}") from error


@contextlib.contextmanager
def _alone(level: Path) -> Iterator[None]:
    """Keep other exports off a level, which would take what is half written for left behind."""
    lock = level.with_name(f".{level.name}.lock")
    try:
        with locked(lock, "folder"):
            try:
                yield
            finally:
                lock.unlink()
    except Held:
        raise ValueError(f"{level}: another export is writing it; let it end first") from None


def _check_table(truth: Path) -> None:
    """See that the table can be written, before hours are spent on it; makes no folder yet."""
    if truth.exists() and not truth.is_file():
        raise ValueError(f"{truth}: not a file, expected the name of a table to write (truth)")
    check_writable(next(p for p in truth.absolute().parents if p.exists()), "truth")


def write_batch(
    level: Path, batch: int, params: PathfinderParams, seed: int, start: int, count: int
) -> list[str]:
    """Generate and write a batch; returns its rows for the table of the truth."""
    from PIL import Image

    pictures = generate(params, seed, start, count)
    ends_NSEC = np.stack([pictures.origins_NSC, pictures.terminals_NSC], axis=2)
    folder = level / "imgs" / str(batch)
    folder.mkdir()  # without its parents: another export may have taken them for left behind
    metadata, truth = [], []
    for i, image_RR in enumerate(pictures.images_NRR):
        name, label, margin = f"sample_{i}.png", pictures.labels_N[i], pictures.margins_N[i]
        paddle = f"{params.paddle_length} {params.thickness:g} {margin}"
        Image.fromarray(image_RR).save(folder / name)
        metadata.append(
            f"imgs/{batch} {name} {i} {label} {params.continuity} {params.num_paddles} "
            f"{params.paddles_per_distractor} {paddle} 1\n"
        )
        points = [*pictures.markers_N2C[i].ravel(), *ends_NSEC[i].ravel()]
        row = [f"imgs/{batch}/{name}", label, *points, margin, pictures.num_distractors_N[i]]
        truth.append("\t".join(map(str, row)) + "\n")
    write_atomically(level / "metadata" / f"{batch}.npy", "".join(metadata))
    return truth
