"""Image: what does a grey picture show? 32 x 32 pixels, row by row, as one sequence; ten classes.

Data: CIFAR-10 (Krizhevsky 2009), python version, https://www.cs.toronto.edu/~kriz/cifar.html.
Task: Long Range Arena (Tay et al. 2020, section 2.2.4, arXiv:2011.04006); grey values 0 to 255 are
the tokens, neither centred nor scaled, id = value + 1.

Legend: N pictures, P pixels of a picture (1,024).
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from lra.tasks.archives import read_file, tar_members
from lra.tasks.beside import similar
from lra.tasks.columnar import TableRow, class_of
from lra.tasks.sources import CorpusTask, Row, held_out
from lra.tasks.task import Example

SIDE = 32
NUM_PIXELS = SIDE * SIDE
TRAIN_FILES = tuple(f"data_batch_{i}" for i in range(1, 6))
FILES = (*TRAIN_FILES, "test_batch")
INNER = "cifar-10-batches-py"
CLASSES = tuple((name,) for name in (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"
))  # fmt: skip

# All that the pickles of these files name, of old and new numpy; protocol 5 has the second form.
_ARRAYS = {f"{package}.multiarray._reconstruct" for package in ("numpy.core", "numpy._core")}
_BUFFERS = {f"{package}.numeric._frombuffer" for package in ("numpy.core", "numpy._core")}
_ENCODE = "_codecs.encode"
_KNOWN_NAMES = {*_ARRAYS, *_BUFFERS, _ENCODE, "numpy.ndarray", "numpy.dtype"}

# Red, green and blue values, of any shape, to grey ones of that shape; all uint8.
Grey = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


@dataclass(kw_only=True)
class Image(CorpusTask):
    """CIFAR-10 in grey, from its batches (folder or archive), Parquet or Arrow files, or the hub.

    A folder may lack training batches; the record of a run on fewer pictures says `partial`.
    `grey` is the formula, see `GREY`. `split=lra` validates on the last `val_fraction` of the
    training pictures in the order of the source: that of the batches, while the benchmark's library
    stored them in another. `split=stratified` takes a part of each class, chosen by hashes of
    `split_seed` and content.

    The synthetic stand-in is noise around a brightness that tells the class, and a black square.

    Raises:
        ValueError: a setting is out of range; names the key.
    """

    name: ClassVar[str] = "image"
    num_classes: ClassVar[int] = 10
    num_values: ClassVar[int] = 256
    class_names: ClassVar[tuple[str, ...]] = tuple(name for (name,) in CLASSES)
    picture_size: ClassVar[tuple[int, int] | None] = (SIDE, SIDE)
    official_sizes: ClassVar[dict[str, int]] = {"train": 45_000, "val": 5_000, "test": 10_000}
    what: ClassVar[str] = "CIFAR-10 pictures"
    remedy: ClassVar[str] = (
        "Get https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz (170 MB, read as it is) with "
        "`bash scripts/get_data.sh {data} image`, or set task.source=hub for the Hugging Face hub."
    )
    folders: ClassVar[tuple[str, ...]] = (
        INNER,
        f"{INNER}/{INNER}",
        f"cifar-10-python/{INNER}",
        f"image/{INNER}",
        "image",
        f"cifar10/{INNER}",
        "cifar10",
        "uoft-cs/cifar10",
        "",
    )
    archives: ClassVar[tuple[str, ...]] = tuple(
        f"{folder}cifar-10-python{suffix}"
        for folder in ("", "image/", "cifar10/")
        for suffix in (".tar.gz", ".tar")
    )
    own_folders: ClassVar[tuple[str, ...]] = tuple(name for name in folders if name)
    own_names: ClassVar[str] = r"cifar[-_]?10(?![0-9]).*"
    columns: ClassVar[tuple[tuple[str, ...], ...]] = (("img", "image"), ("label",))
    class_spellings: ClassVar[tuple[tuple[str, ...], ...]] = CLASSES

    max_length: int = NUM_PIXELS
    grey: Literal["tf", "pil", "tensor"] = "tf"
    split: Literal["lra", "stratified"] = "lra"
    hub_name: str = "uoft-cs/cifar10"

    @property
    def protocol(self) -> dict[str, Any]:
        """`grey` and `split` say how pixels and validation pictures were made."""
        return {"validation": "val", "difficulty": None, "grey": self.grey, "split": self.split}

    def deviations(self) -> list[str]:
        """How the pictures differ from the benchmark's."""
        return [] if self.grey == "tf" else [f"task.grey={self.grey} (benchmark: tf)"]

    def describe_source(self) -> str:
        """The source in words, for people; with the batches that a folder lacks."""
        text = super().describe_source()
        if self.source in ("hub", "synthetic") or self.place.form != "folder":
            return text
        missing = ", ".join(_missing(self.place.path))
        return f"{text}, which lacks {missing}" if missing else text

    @property
    def held_by(self) -> tuple[Any, ...] | None:
        """Likewise."""
        return ("hashes", self.split_seed) if self.split == "stratified" else ("place",)

    def settings(self) -> dict[str, Any]:
        """Every setting that shapes the content."""
        if self.source == "synthetic":
            return self.synthetic_settings()
        settings = {**self.file_settings(), "grey": self.grey, "split": self.split}
        settings["val_fraction"] = self.val_fraction
        if self.split == "stratified":
            settings["split_seed"] = self.split_seed
        return settings

    def examples(self, split: str) -> Iterator[Example]:
        """Yield the pictures of a split in the order of the source.

        Raises:
            ValueError: a file, member or row is faulty; names it.
        """
        if self.source == "synthetic":
            yield from self._synthetic(split)
            return
        if split == "test":
            rows = self.rows("test", last=True)
        else:
            rows = self.rows("train")
            if self.split == "stratified":
                held = held_out(rows, self.val_fraction, self.split_seed)
            else:
                held = np.arange(len(rows)) >= int((1 - self.val_fraction) * len(rows) + 0.5)
            rows = self.part(split, held)
        for pixels, label in rows:
            yield Example((pixels,), label)

    def encode(self, given: Any) -> np.ndarray | bytes:
        """Grey values of a picture: grey [P] or [32, 32], or in colour [32, 32, 3]."""
        pixels = np.asarray(given)
        if pixels.shape == (SIDE, SIDE, 3) and pixels.dtype == np.uint8:
            pixels = GREY[self.grey](*pixels.reshape(-1, 3).T)
        return super().encode(pixels.ravel() if pixels.shape == (SIDE, SIDE) else pixels)

    def decode(self, values: np.ndarray) -> str:
        """The picture in ten shades, one line a row."""
        shades = np.frombuffer(b" .:-=+*#%@", np.uint8)[values.astype(int) * 10 // 256]
        return "\n".join(bytes(shades[i : i + SIDE]).decode() for i in range(0, len(shades), SIDE))

    def _synthetic(self, split: str) -> Iterator[Example]:
        rng, labels = self.synthetic_labels(split)
        for label in labels:
            noisy = rng.normal(20 + 23 * label, 12, (SIDE, SIDE)).clip(0, 255)
            top, left = rng.integers(0, SIDE - 8, 2)
            noisy[top : top + 8, left : left + 8] = 0
            yield Example((noisy.astype(np.uint8).ravel(),), label)

    def left_out(self) -> list[str]:
        """Likewise; and files that are called almost like the batches."""
        is_folder = self.kind == "files" and self.source != "hub" and self.place.form == "folder"
        odd = similar(self.place.path, FILES, r"(?:data|test)_batch") if is_folder else ()
        return [*odd, *super().left_out()]

    def _has_folder(self, folder: Path) -> bool:
        return any((folder / name).is_file() for name in FILES)

    def _files_in(self, folder: Path) -> list[Path]:
        files = [folder / name for name in FILES if (folder / name).is_file()]
        names = [file.name for file in files]
        if "test_batch" not in names or len(names) < 2:
            raise ValueError(
                f"task 'image': {folder} has no {' and no '.join(_missing(folder))}; expected "
                f"test_batch and at least one of {', '.join(TRAIN_FILES)}"
            )
        return files

    def _read_folder(self, folder: Path) -> dict[str, list[Row]]:
        files = self._files_in(folder)
        return _join({f.name: read_batch(read_file(f), str(f), GREY[self.grey]) for f in files})

    def _read_archive(self, archive: Path) -> dict[str, list[Row]]:
        batches: dict[str, list[Row]] = {}
        for member, data in tar_members(archive, lambda name: name.split("/")[-1] in FILES):
            name = member.split("/")[-1]
            if name in batches:
                raise ValueError(f"{archive}: member {member!r} is there in another folder too")
            where = f"{archive}: member {member!r}"
            batches[name] = read_batch(data, where, GREY[self.grey])
        if missing := [name for name in FILES if name not in batches]:
            raise ValueError(
                f"{archive}: no {' and no '.join(missing)}; not CIFAR-10, python version"
            )
        return _join(batches)

    def _read_table(self, rows: Iterator[TableRow]) -> list[Row]:
        to_grey = GREY[self.grey]
        return [read_picture(where, png, label, to_grey) for where, (png, label) in rows]


def _missing(folder: Path) -> list[str]:
    """Names of the batches that a folder lacks."""
    return [name for name in FILES if not (folder / name).is_file()]


def _join(batches: dict[str, list[Row]]) -> dict[str, list[Row]]:
    train = [row for name in TRAIN_FILES for row in batches.get(name, ())]
    return {"train": train, "test": batches["test_batch"]}


# --- grey -----------------------------------------------------------------------------------------


def grey_tf(red: np.ndarray, green: np.ndarray, blue: np.ndarray) -> np.ndarray:
    """The benchmark's own: TensorFlow's weights on 0..1 in float32, then floor(255.5 v)."""
    scale = np.float32(1 / 255)
    weights = (np.float32(0.2989), np.float32(0.5870), np.float32(0.1140))
    r, g, b = (w * (c * scale) for w, c in zip(weights, (red, green, blue), strict=True))
    return ((r + g + b) * np.float32(255.5)).astype(np.uint8)


def grey_pil(red: np.ndarray, green: np.ndarray, blue: np.ndarray) -> np.ndarray:
    """Pillow's `convert("L")`: ITU-R 601 weights in 16-bit fixed point, rounded."""
    r, g, b = (c.astype(np.uint32) for c in (red, green, blue))
    return ((19595 * r + 38470 * g + 7471 * b + 32768) >> 16).astype(np.uint8)


def grey_tensor(red: np.ndarray, green: np.ndarray, blue: np.ndarray) -> np.ndarray:
    """torchvision's on tensors: 0.2989, 0.587, 0.114 on 0..255 in float32, truncated."""
    r, g, b = (c.astype(np.float32) for c in (red, green, blue))
    return (np.float32(0.2989) * r + np.float32(0.587) * g + np.float32(0.114) * b).astype(np.uint8)


GREY: dict[str, Grey] = {"tf": grey_tf, "pil": grey_pil, "tensor": grey_tensor}


# --- batches --------------------------------------------------------------------------------------


class _Recipe:
    """Stands for what a pickle wants built: its name, arguments and state. Builds nothing."""

    def __init__(self, name: str, args: tuple[Any, ...] = ()) -> None:
        self.name, self.args = name, args
        self.state: Any = None

    def __call__(self, *args: Any) -> Any:
        if self.name == _ENCODE:  # how older protocols write bytes
            return _bytes(args[0])
        return _Recipe(self.name, args)

    def __setstate__(self, state: Any) -> None:
        self.state = state


# The one written in Python: a hostile memo index costs it nothing, while the one in C takes memory.
_PythonUnpickler: Any = pickle._Unpickler


class _Unpickler(_PythonUnpickler):
    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in _KNOWN_NAMES:
            raise ValueError(f"names {module}.{name}, which no CIFAR-10 batch needs; refused")
        return _Recipe(f"{module}.{name}")

    def load_bytearray8(self) -> None:
        """As for bytes: read what is there, while the original first takes what is declared."""
        (size,) = struct.unpack("<Q", self.read(8))
        self.append(self.read(size))

    dispatch = {**_PythonUnpickler.dispatch, pickle.BYTEARRAY8[0]: load_bytearray8}


def read_batch(data: bytes, where: str, to_grey: Grey = grey_tf) -> list[Row]:
    """Grey pixels [P] (as bytes) and label of each picture of a pickled batch.

    Nothing in the pickle is executed. Its strings may be of Python 2 or 3. `where` is for messages.

    Raises:
        ValueError: no pickle, a name that such files do not need, or not a batch; says what.
    """
    try:
        batch = _Unpickler(io.BytesIO(data), encoding="latin1").load()
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    except Exception as error:  # a damaged pickle may fail in any way, but can do nothing
        raise ValueError(f"{where}: not a whole pickle ({type(error).__name__}: {error})") from None
    if not isinstance(batch, dict):
        raise ValueError(f"{where}: a pickled {type(batch).__name__}, expected a dictionary")
    fields = {_text(key): value for key, value in batch.items()}
    for key in ("data", "labels"):
        if key not in fields:
            raise ValueError(f"{where}: no '{key}'; it has {', '.join(map(repr, fields))}")
    try:
        rgb_N3P = _array(fields["data"])
    except ValueError as error:
        raise ValueError(f"{where}: 'data' {error}") from None
    labels = fields["labels"]
    if not isinstance(labels, list) or len(labels) != len(rgb_N3P):
        size = f"{len(labels)} labels" if isinstance(labels, list) else type(labels).__name__
        raise ValueError(f"{where}: {size} for {len(rgb_N3P)} pictures; expected a list of as many")
    for i, label in enumerate(labels):
        if type(label) is not int or not 0 <= label < 10:
            raise ValueError(f"{where}: picture {i} has label {label!r:.40}, expected 0 to 9")
    pixels: list[bytes] = []
    for start in range(0, len(rgb_N3P), 1000):  # few at a time: the formulas need wider numbers
        red_NP, green_NP, blue_NP = rgb_N3P[start : start + 1000].transpose(1, 0, 2)
        pixels += [row.tobytes() for row in to_grey(red_NP, green_NP, blue_NP)]
    return list(zip(pixels, labels, strict=True))


def _array(recipe: Any) -> np.ndarray:
    """The pictures [N, 3, P] (uint8) that a recipe of an array describes."""
    if not isinstance(recipe, _Recipe) or recipe.name not in _ARRAYS | _BUFFERS:
        raise ValueError(f"is a {type(recipe).__name__}, expected an array")
    try:
        if recipe.name in _BUFFERS:
            raw, dtype, shape, order = recipe.args
        else:
            _, shape, dtype, is_fortran, raw = recipe.state
            order = "F" if is_fortran else "C"
        kind, raw = _text(dtype.args[0]), _bytes(raw)
    except (TypeError, ValueError, IndexError, AttributeError) as error:
        raise ValueError(f"is no whole array ({error})") from None
    if kind not in ("u1", "uint8"):
        raise ValueError(f"has the type {kind!r:.40}, expected uint8")
    size = len(raw) // (3 * NUM_PIXELS)
    if not size or shape != (size, 3 * NUM_PIXELS) or len(raw) != size * 3 * NUM_PIXELS:
        raise ValueError(
            f"has shape {shape!r:.60} and {len(raw)} bytes, expected rows of {3 * NUM_PIXELS}"
        )
    array = np.frombuffer(raw, np.uint8).reshape(shape, order="F" if order == "F" else "C")
    return np.ascontiguousarray(array).reshape(size, 3, NUM_PIXELS)


def _bytes(value: Any) -> bytes:
    """Bytes, however the pickle holds them: Python 2 strings come as Latin-1 text."""
    return value.encode("latin1") if isinstance(value, str) else bytes(memoryview(value))


def _text(value: Any) -> Any:
    return value.decode("latin1") if isinstance(value, bytes) else value


# --- tables ---------------------------------------------------------------------------------------


def read_picture(where: str, picture: Any, label: Any, to_grey: Grey) -> Row:
    """Grey pixels [P] (as bytes) and label of a table's row.

    `picture` is a PNG file, or a record with one under `bytes`. `where` is for messages.

    Raises:
        ValueError: no PNG file of 32 x 32 pixels in RGB, or the label is out of range.
    """
    from PIL import Image as PillowImage

    number = class_of(where, label, CLASSES)
    png = picture.get("bytes") if isinstance(picture, dict) else picture
    if not isinstance(png, bytes):
        raise ValueError(f"{where}: no picture in the row, expected the bytes of a PNG file")
    try:
        with PillowImage.open(io.BytesIO(png), formats=["PNG"]) as image:
            size, mode = image.size, image.mode
            # Of the right size only: others may be meant to fill the memory.
            is_right = size == (SIDE, SIDE) and mode == "RGB"
            rgb_P3 = np.asarray(image).reshape(NUM_PIXELS, 3) if is_right else None
    except Exception as error:  # Pillow refuses pictures in many ways
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{where}: not a whole PNG picture ({reason})") from None
    if rgb_P3 is None:
        raise ValueError(
            f"{where}: a picture of {size[0]} x {size[1]} in {mode}, expected {SIDE} x {SIDE} in "
            "RGB"
        )
    return to_grey(*rgb_P3.T).tobytes(), number
