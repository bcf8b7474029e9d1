"""Pathfinder and Path-X: the released files in all forms, damage, our generator, the stand-in.

Files of the original program lie in `../shared` beside the repository; without that folder the
tests that need them are skipped.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import errno
import hashlib
import io
import json
import os
import resource
import shutil
import signal
import struct
import subprocess
import tarfile
import time
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from lra.files import NotWritten
from lra.tasks import pathfinder
from lra.tasks.cache import Dataset, cache_folder, prepare
from lra.tasks.pathfinder import LEVELS, Pathfinder, PathX, export
from lra.tasks.pathfinder_files import (
    TRUTH_COLUMNS,
    Damaged,
    index_level,
    read_picture,
    write_batch,
)
from lra.tasks.pathfinder_generator import generate, params_for
from lra.tasks.task import SPLITS
from tests import programs

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT.parent / "shared" / "data"
needs_reference = pytest.mark.skipif(not REFERENCE.is_dir(), reason="no reference data here")
NESTED = "lra_release/lra_release/pathfinder32/curv_contour_length_14"
LEVEL = "pathfinder32/curv_contour_length_14"
SETTINGS = "1.0 14 4 2 0.5 1 1"
FILES = "lra.tasks.pathfinder_files"


# --- helpers that share nothing with the code under test ---


def png(pixels: np.ndarray, **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", **options)
    return buffer.getvalue()


def chunk(kind: bytes, body: bytes) -> bytes:
    checksum = struct.pack(">I", zlib.crc32(kind + body))
    return struct.pack(">I", len(body)) + kind + body + checksum


def raw_png(
    width: int, height: int, packed: bytes, *, depth: int = 8, colour: int = 0, interlace: int = 0
) -> bytes:
    """A PNG put together by hand."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlace)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def write_release(level: Path, batches: list[int], side: int = 32, seed: int = 0) -> Path:
    """A level's folder with batches of so many noise pictures; picture i has the label i % 2."""
    rng = np.random.default_rng(seed)
    (level / "metadata").mkdir(parents=True)
    for batch, count in enumerate(batches):
        folder = level / "imgs" / str(batch)
        folder.mkdir(parents=True)
        lines = []
        for i in range(count):
            pixels = rng.integers(0, 256, (side, side), np.uint8)
            (folder / f"sample_{i}.png").write_bytes(png(pixels))
            lines.append(f"imgs/{batch} sample_{i}.png {i} {i % 2} {SETTINGS}\n")
        (level / "metadata" / f"{batch}.npy").write_text("".join(lines))
    return level


def small(folder: Path, **settings: Any) -> Pathfinder:
    return Pathfinder(data_dir=folder, **settings)


def rows(task: Pathfinder, split: str) -> list[tuple[bytes, int]]:
    return [(np.asarray(e.sequences[0]).tobytes(), e.label) for e in task.examples(split)]


def all_rows(task: Pathfinder) -> list[tuple[bytes, int]]:
    return [row for split in SPLITS for row in rows(task, split)]


def checksums(data: Dataset) -> dict[str, Any]:
    return {split: data.meta["splits"][split]["sha256"] for split in SPLITS}


def refusal(act: Callable[[], Any]) -> str:
    with pytest.raises(ValueError) as error:
        act()
    return str(error.value)


# --- the original's files ---


@needs_reference
@pytest.mark.parametrize(
    ("side", "difficulty", "counts", "skipped"),
    [
        (32, "hard", (1200, 150, 150), []),
        (32, "intermediate", (160, 20, 20), []),
        (32, "easy", (159, 20, 20), ["imgs/0/sample_172.png: empty file"]),
        (64, "hard", (48, 6, 6), []),
        (128, "hard", (48, 6, 6), []),
        (256, "hard", (16, 2, 2), []),
    ],
)
def test_reference_sets_are_read_whole(
    side: int, difficulty: str, counts: tuple[int, ...], skipped: list[str], tmp_path: Path
) -> None:
    task = small(REFERENCE, resolution=side, max_length=side**2, difficulty=difficulty)
    data = prepare(task, tmp_path)
    assert tuple(len(getattr(data, split)) for split in SPLITS) == counts
    assert sum((data.meta["splits"][split]["skipped"] for split in SPLITS), []) == skipped
    assert data.meta["kind"] == "files"
    assert str(REFERENCE.resolve()) in data.meta["source"]

    # Pixels and labels against Pillow and the table that the original's authors' program gave.
    level = REFERENCE / "lra_release/lra_release" / f"pathfinder{side}" / LEVELS[difficulty]
    name = f"truth_{side}_{LEVELS[difficulty]}.tsv"
    truth = csv.DictReader((REFERENCE / "extra" / "pathfinder" / name).open(), delimiter="\t")
    expected = sorted(
        (np.asarray(Image.open(level / row["file"])).tobytes(), int(row["label"]))
        for row in truth
        if (level / row["file"]).stat().st_size
    )
    assert sorted(all_rows(task)) == expected


@needs_reference
def test_reference_batches_come_in_the_order_of_their_numbers() -> None:
    listed = index_level(REFERENCE / NESTED).listed
    expected = [f"imgs/{batch}/sample_{i}.png" for batch in range(12) for i in range(125)]
    assert [row.path for row in listed] == expected


def test_batches_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    level = write_release(tmp_path, [1] * 12)
    shutil.copy(level / "metadata/3.npy", level / "metadata/extra.npy")
    text = (level / "metadata/extra.npy").read_text()
    (level / "metadata/extra.npy").write_text(text.replace("imgs/3", "imgs/extra"))
    shutil.copytree(level / "imgs/3", level / "imgs/extra")
    batches = [row.path.split("/")[1] for row in index_level(level).listed]
    assert batches == [*map(str, range(12)), "extra"]


# --- splits ---


def test_split_depends_on_neither_file_order_nor_batch_order_nor_run(tmp_path: Path) -> None:
    first = write_release(tmp_path / "a" / LEVEL, [7] * 11)
    # The same files, created the other way round, with the lines of each batch reversed.
    second = tmp_path / "b" / LEVEL
    for folder in ("metadata", *(f"imgs/{batch}" for batch in range(11))):
        (second / folder).mkdir(parents=True)
    files = [file for file in sorted(first.rglob("*")) if file.is_file()]
    for file in reversed(files):
        text = file.read_bytes()
        if file.suffix == ".npy":
            text = b"".join(reversed(text.splitlines(keepends=True)))
        (second / file.relative_to(first)).write_bytes(text)
    tasks = [small(tmp_path / "a"), small(tmp_path / "b")]
    for split in SPLITS:
        ours, theirs = (rows(task, split) for task in tasks)
        assert sorted(ours) == sorted(theirs)
    # A frozen choice: hashes of seed and path. Computed here once more, by itself.
    paths = [f"imgs/{batch}/sample_{i}.png" for batch in range(11) for i in range(7)]
    paths.sort(key=lambda path: hashlib.sha256(f"0\n{path}".encode()).digest())
    expected = {np.asarray(Image.open(first / path)).tobytes() for path in paths[:7]}
    assert {pixels for pixels, _ in rows(tasks[0], "test")} == expected


def test_splits_are_disjoint_cover_everything_and_move_with_the_split_seed_only(
    tmp_path: Path,
) -> None:
    write_release(tmp_path / LEVEL, [30, 31])
    task = small(tmp_path)
    parts = [rows(task, split) for split in SPLITS]
    assert [len(part) for part in parts] == [49, 6, 6]
    assert len({pixels for part in parts for pixels, _ in part}) == 61
    other = small(tmp_path, split_seed=1)
    assert rows(other, "test") != parts[2]
    assert sorted(all_rows(other)) == sorted(row for part in parts for row in part)
    assert cache_folder(task, tmp_path)[1] != cache_folder(other, tmp_path)[1]


def test_another_split_seed_shares_most_of_val_and_test(tmp_path: Path) -> None:
    write_release(tmp_path / LEVEL, [100] * 4)
    task, other = small(tmp_path), small(tmp_path, split_seed=1)
    train = set(rows(other, "train"))
    for split in ("val", "test"):
        assert 25 <= sum(row in train for row in rows(task, split)) <= 38  # of 40
    said = task.overlaps({"_target_": "lra.tasks.pathfinder.Pathfinder", "split_seed": 1})
    assert said.startswith("about 80 % of the val and of the test examples are among those of")
    assert "task.split_seed=1 there, 0 here" in said
    assert task.overlaps({"split_seed": 1, "limit_train": 9}).startswith("up to 80 %")
    elsewhere = write_release(tmp_path / "b" / LEVEL, [3]).parents[1]
    for theirs in (
        {}, {"split_seed": -1}, {"split_seed": 1, "path": str(elsewhere)},
        {"split_seed": 1, "path": str(tmp_path / "nowhere")}, {"source": "generated"},
        {"split_seed": 1, "_target_": "lra.tasks.text.Text"}, 7,
    ):  # fmt: skip
        assert task.overlaps(theirs) == ""  # type: ignore[arg-type]
    assert small(tmp_path, source="generated").overlaps({"split_seed": 1}) == ""


@pytest.mark.parametrize(("count", "sizes"), [(3, (1, 1, 1)), (4, (2, 1, 1)), (29, (25, 2, 2))])
def test_small_sets_have_all_splits(count: int, sizes: tuple[int, ...], tmp_path: Path) -> None:
    write_release(tmp_path / LEVEL, [count])
    assert tuple(len(rows(small(tmp_path), split)) for split in SPLITS) == sizes


def test_two_pictures_are_too_few(tmp_path: Path) -> None:
    write_release(tmp_path / LEVEL, [2])
    assert "the train split of" in refusal(lambda: prepare(small(tmp_path), tmp_path / "cache"))


# --- which set ---


def test_default_is_the_hard_level_and_levels_are_told_apart(tmp_path: Path) -> None:
    for count, name in zip((5, 6, 7), LEVELS.values(), strict=True):
        write_release(tmp_path / "pathfinder32" / name, [count])
    write_release(tmp_path / "pathfinder128" / LEVELS["hard"], [4], side=128)
    assert len(all_rows(small(tmp_path))) == 7
    assert len(all_rows(small(tmp_path, difficulty="easy"))) == 5
    assert len(all_rows(small(tmp_path, difficulty="intermediate"))) == 6
    assert len(all_rows(PathX(data_dir=tmp_path))) == 4
    assert small(tmp_path).protocol == {"validation": "val", "difficulty": "hard"}
    assert small(tmp_path).deviations() == []
    easy = small(tmp_path, difficulty="easy")
    assert easy.protocol["difficulty"] == "easy"
    assert easy.deviations() == ["task.difficulty=easy (benchmark: hard)"]


def test_two_copies_are_refused_until_one_is_named(tmp_path: Path) -> None:
    name = "pathfinder128/curv_contour_length_14"
    outer = write_release(tmp_path / name, [4], side=128)
    inner = write_release(tmp_path / "lra_release" / name, [5], side=128, seed=1)
    message = refusal(lambda: prepare(PathX(data_dir=tmp_path), tmp_path / "cache"))
    assert f"found {name} 2 times" in message
    assert str(outer) in message and str(inner) in message and "task.path" in message
    named = PathX(data_dir=tmp_path, path=str(inner))
    data = prepare(named, tmp_path / "cache")
    assert sum(len(getattr(data, split)) for split in SPLITS) == 5
    assert str(inner.resolve()) in data.meta["source"]
    assert len(all_rows(PathX(data_dir=tmp_path, path=str(outer.parent)))) == 4


def test_a_link_is_no_second_copy(tmp_path: Path) -> None:
    write_release(tmp_path / "lra_release" / LEVEL, [4])
    (tmp_path / "pathfinder32").symlink_to(tmp_path / "lra_release" / "pathfinder32")
    assert len(all_rows(small(tmp_path))) == 4


def test_all_layouts_and_worker_numbers_give_the_same_fingerprint_and_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pathfinder, "PICTURES_PER_JOB", 4)
    level = write_release(tmp_path / "0" / NESTED, [20, 21])
    places = ["1/lra_release/pathfinder32", "2/pathfinder32", "3/pathfinder/pathfinder32", "4/foo"]
    for place in places:
        shutil.copytree(level, tmp_path / place / level.name)
    shutil.copytree(level, tmp_path / "5/foo")
    tasks = [small(tmp_path / str(i)) for i in range(4)]
    tasks += [
        small(tmp_path, path=str(tmp_path / "4/foo")),
        small(tmp_path, path=f"{tmp_path}/5/foo"),
    ]
    built = [
        prepare(task, tmp_path / f"cache{i}", num_workers=workers)
        for i, (task, workers) in enumerate(zip(tasks, (0, 1, 2, 4, 1, 1), strict=True))
    ]
    assert len({data.fingerprint for data in built}) == 1
    assert all(checksums(data) == checksums(built[0]) for data in built[1:])
    assert len(built[0].train) == 33


def test_a_changed_byte_gives_another_cache(tmp_path: Path) -> None:
    level = write_release(tmp_path / LEVEL, [10])
    before = prepare(small(tmp_path), tmp_path / "cache")
    picture = level / "imgs/0/sample_3.png"
    pixels = np.array(Image.open(picture))
    pixels[5, 6] ^= 1
    picture.write_bytes(png(pixels))
    after = prepare(small(tmp_path), tmp_path / "cache")
    assert after.fingerprint != before.fingerprint
    assert checksums(after) != checksums(before)


def test_archives_and_other_files_are_recognised(tmp_path: Path) -> None:
    write_release(tmp_path / "x" / LEVEL, [3])
    for name in ("lra_release", "lra_release.gz"):
        folder = tmp_path / name.replace(".", "-")
        folder.mkdir()
        with tarfile.open(folder / name, "w:gz") as tar:
            tar.add(tmp_path / "x", "lra_release")
        for task in (small(folder), small(tmp_path, path=str(folder / name))):
            message = refusal(lambda task=task: prepare(task, tmp_path / "cache"))
            assert f"{folder / name} is an archive" in message
            assert "tar xf" in message
    notes = tmp_path / "notes.txt"
    notes.write_text("no pictures")
    message = refusal(lambda: small(tmp_path, path=str(notes)).source_files())
    assert str(notes) in message and "imgs" in message


def test_without_files_auto_generates_and_says_so_and_files_names_every_place(
    tmp_path: Path,
) -> None:
    assert small(tmp_path).kind == "generated"
    assert f"no {LEVEL} under {tmp_path}" in small(tmp_path).describe_source()
    message = refusal(lambda: small(tmp_path, source="files").source_files())
    for place in ("lra_release/lra_release", "lra_release", "", "pathfinder"):
        assert str(tmp_path / place / LEVEL) in message
    assert "task.source=generated" in message
    elsewhere = refusal(lambda: small(tmp_path, path=f"{tmp_path}/none").source_files())
    assert f"{tmp_path}/none/{LEVEL}" in elsewhere


def test_a_path_to_another_level_is_refused(tmp_path: Path) -> None:
    level = write_release(tmp_path / "curv_baseline", [4])
    message = refusal(lambda: small(tmp_path, path=str(level)).source_files())
    assert "is the easy level" in message and "task.difficulty=hard" in message
    assert len(all_rows(small(tmp_path, path=str(level), difficulty="easy"))) == 4


# --- metadata ---


def npy(array: np.ndarray, **options: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, **options)
    return buffer.getvalue()


TABLE = [f"imgs/0 sample_{i}.png {i} {i % 2} {SETTINGS}".split() for i in range(5)]
RECORDS = np.array(
    [(a, b, int(i), int(y), 1.0) for a, b, i, y, *_ in TABLE],
    dtype=[("folder", "U9"), ("file", "S16"), ("i", "i4"), ("label", "i4"), ("c", "f4")],
)


@pytest.mark.parametrize(
    "data",
    [
        "\n".join(" ".join(row) for row in TABLE).encode(),
        "\r\n".join("  ".join(row) for row in TABLE).encode() + b"\r\n\r\n",
        "\n".join("\t".join(["./imgs//0/", *row[1:3], f"{row[3]}.0"]) for row in TABLE).encode(),
        npy(np.array(TABLE)),
        npy(np.array(TABLE, "S")),
        npy(np.asfortranarray(np.array(TABLE))),
        npy(np.array(TABLE).astype(">U20")),
        npy(np.array([" ".join(row) for row in TABLE])),
        npy(RECORDS),
    ],
    ids=["text", "crlf", "spelling", "U", "S", "fortran", "big-endian", "lines", "records"],
)
def test_metadata_as_text_or_array_mean_the_same(data: bytes, tmp_path: Path) -> None:
    level = write_release(tmp_path, [5])
    (level / "metadata" / "0.npy").write_bytes(data)
    listed = index_level(level).listed
    assert [row.path for row in listed] == [f"imgs/0/sample_{i}.png" for i in range(5)]
    assert [row.label for row in listed] == [0, 1, 0, 1, 0]


def test_a_single_row_may_lose_its_axis(tmp_path: Path) -> None:
    level = write_release(tmp_path, [1])
    line = f"imgs/0 sample_0.png 0 1 {SETTINGS}"
    for array in (np.array(line.split()), np.array([line.split()]), np.array([line])):
        (level / "metadata" / "0.npy").write_bytes(npy(array))
        (row,) = index_level(level).listed
        assert (row.path, row.label) == ("imgs/0/sample_0.png", 1)


class Bomb:
    """Would leave a file behind if a reader unpickled it."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.target),)


def test_arrays_of_objects_are_not_unpickled(tmp_path: Path) -> None:
    level = write_release(tmp_path / "level", [3])
    array = np.array([[Bomb(tmp_path / "executed")]], object)
    (level / "metadata" / "0.npy").write_bytes(npy(array, allow_pickle=True))
    message = refusal(lambda: index_level(level))
    assert str(level / "metadata" / "0.npy") in message and "never unpickled" in message
    assert not (tmp_path / "executed").exists()


GOOD = f"imgs/0 sample_0.png 0 1 {SETTINGS}"
ARRAY = npy(np.array(TABLE))


@pytest.mark.parametrize(
    ("data", "where", "fault"),
    [
        (b"", "0.npy: ", "empty"),
        (b"\n \n", "0.npy: ", "empty"),
        (f"{GOOD}\nimgs/0 sample_1.png 1".encode(), "0.npy, line 2: ", "found 3 columns"),
        (f"{GOOD}\n\nimgs/0 sample_1.png 1 2 1.0".encode(), "0.npy, line 3: ", "label '2'"),
        (f"imgs/0 sample_0.png 0 -1 {SETTINGS}".encode(), "0.npy, line 1: ", "label '-1'"),
        (b"imgs/0 sample_0.png 0 0.5 1.0", "0.npy, line 1: ", "label '0.5'"),
        (b"imgs/0 sample_0.png 0 yes 1.0", "0.npy, line 1: ", "expected 0 or 1"),
        (b"imgs/0 ../../x.png 0 1 1.0", "0.npy, line 1: ", "does not stay within"),
        (b"../imgs/0 sample_0.png 0 1 1.0", "0.npy, line 1: ", "does not stay within"),
        (b"imgs/0 .. 0 1 1.0", "0.npy, line 1: ", "does not stay within"),
        (b"/etc passwd 0 1 1.0", "0.npy, line 1: ", "does not stay within"),
        (b"imgs/0 /etc/passwd 0 1 1.0", "0.npy, line 1: ", "does not stay within"),
        (b"imgs/0 a\0.png 0 1 1.0", "0.npy, line 1: ", "does not stay within"),
        (b"imgs\\0 sample_0.png 0 1 1.0", "0.npy, line 1: ", "does not stay within"),
        (f"{GOOD}\n{GOOD}".encode(), "0.npy, line 2: ", "listed before, at"),
        (f"{GOOD}\n".encode() + b"\xff\xfe", "0.npy, line 2: ", "neither UTF-8 text"),
        (b"\x80\x04\x95pickle", "0.npy, line 1: ", "neither UTF-8 text"),
        (ARRAY[:-3], "0.npy: ", "bytes follow"),
        (ARRAY[:30], "0.npy: ", "damaged"),
        (ARRAY[:6] + b"\x09" + ARRAY[7:], "0.npy: ", "damaged"),
        (ARRAY.replace(b"(5, 11), }  ", b"(5, 11), }__"), "0.npy: ", "damaged"),
        (ARRAY.replace(b"(5, 11), }         ", b"(5, 99999999999), }"), "0.npy: ", "bytes follow"),
        (npy(np.zeros((3, 11))), "0.npy: ", "float64"),
        (npy(np.array([TABLE])), "0.npy: ", "3 axes"),
        (npy(np.full((5, 11), "\U0010ffff")).replace(b"\xff\xff\x10\x00", b"\xff\xff\xff\x7f"),
         "0.npy: ", "damaged"),
        (npy(np.array([[*TABLE[0][:3], "7"]])), "0.npy, line 1: ", "label '7'"),
        (npy(np.zeros((0, 11), "U3")), "0.npy: ", "empty"),
    ],
)  # fmt: skip
def test_faulty_metadata_are_refused_by_file_and_line(
    data: bytes, where: str, fault: str, tmp_path: Path
) -> None:
    level = write_release(tmp_path, [3])
    (level / "metadata" / "0.npy").write_bytes(data)
    message = refusal(lambda: index_level(level))
    assert message.startswith(str(level / "metadata" / where)), message
    assert fault in message


def test_metadata_folder_is_needed_and_foreign_files_are_not_read(tmp_path: Path) -> None:
    level = write_release(tmp_path / LEVEL, [3])
    (level / "metadata" / "._0.npy").write_bytes(b"left by a Mac")
    (level / "metadata" / "notes.txt").write_bytes(b"no table")
    assert len(index_level(level).listed) == 3
    shutil.rmtree(level / "metadata")
    assert "has no folder metadata" in refusal(lambda: small(tmp_path).source_files())
    (level / "metadata").mkdir()
    assert "no files <batch>.npy" in refusal(lambda: small(tmp_path).source_files())


# --- pictures ---


def test_missing_pictures_are_an_error_with_count_and_names(tmp_path: Path) -> None:
    level = write_release(tmp_path / LEVEL, [3])
    (level / "imgs/0/sample_1.png").unlink()
    message = refusal(lambda: prepare(small(tmp_path), tmp_path / "cache"))
    assert "1 of 3 pictures are missing: imgs/0/sample_1.png" in message
    assert f"{level / 'metadata' / '0.npy'}, line 2" in message
    shutil.rmtree(level / "imgs")
    assert "3 of 3 pictures are missing" in refusal(lambda: index_level(level))


def test_pictures_that_are_not_listed_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    level = write_release(tmp_path / LEVEL, [5, 3])
    lines = (level / "metadata/0.npy").read_text().splitlines(keepends=True)
    (level / "metadata/0.npy").write_text("".join(lines[:4]))
    (level / "metadata/1.npy").unlink()
    (level / "imgs/0/Thumbs.db").write_bytes(b"no picture")
    data = prepare(small(tmp_path), tmp_path / "cache")
    names = ["imgs/0/sample_4.png", *(f"imgs/1/sample_{i}.png" for i in range(3))]
    expected = [f"{name}: not listed in the metadata" for name in names]
    assert data.meta["splits"]["train"]["skipped"] == expected
    assert sum(len(getattr(data, split)) for split in SPLITS) == 4
    assert "4 pictures left out: imgs/0/sample_4.png" in capsys.readouterr().err


def flip(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]


NOISE = png(np.random.default_rng(5).integers(0, 256, (32, 32), np.uint8))
DAMAGED = {
    "empty": b"",
    "half": NOISE[: len(NOISE) // 2],
    "without its end": NOISE[:-12],
    "flipped bit in the pixels": flip(NOISE, 300),
    "flipped bit in the size": flip(NOISE, 19),
    "a page instead": b"<html>403 Forbidden</html>",
    "a pointer": b"version https://git-lfs.github.com/spec/v1\n",
    "JPEG": b"\xff\xd8\xff\xe0" + bytes(100),
    "signature only": NOISE[:8],
    "too few rows": raw_png(32, 32, zlib.compress(bytes(33 * 31))),
    "too many rows": raw_png(32, 32, zlib.compress(bytes(33 * 33))),
    "unknown filter": raw_png(32, 32, zlib.compress(bytes([7, *range(32)]) * 32)),
    "no rows": raw_png(32, 32, b""),
    "not packed": raw_png(32, 32, bytes(1056)),
    "130 MB of rows": raw_png(32, 32, zlib.compress(bytes(130 << 20), 9)),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_pictures_are_recognised_in_no_time(name: str, tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(DAMAGED[name])
    started = time.process_time()
    with pytest.raises(Damaged):
        read_picture(tmp_path / "x.png", 32)
    assert time.process_time() - started < 0.5


@pytest.mark.parametrize("root", ["pathfinder32", "foo"])
def test_damaged_pictures_are_left_out_counted_and_named(
    root: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    level = write_release(tmp_path / root / "curv_contour_length_14", [10])
    for i, data in ((2, b""), (7, NOISE[: len(NOISE) // 2])):
        (level / f"imgs/0/sample_{i}.png").write_bytes(data)
    data = prepare(small(tmp_path, path=str(tmp_path / root)), tmp_path / "cache")
    assert sum(len(getattr(data, split)) for split in SPLITS) == 8
    skipped = sum((data.meta["splits"][split]["skipped"] for split in SPLITS), [])
    assert sorted(name.split(":")[0] for name in skipped) == [
        "imgs/0/sample_2.png",
        "imgs/0/sample_7.png",
    ]
    assert "imgs/0/sample_2.png: empty file" in capsys.readouterr().err


def test_pictures_of_every_filter_are_read_as_pillow_does(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    pixels = np.cumsum(rng.integers(0, 9, (64, 64)), axis=1).astype(np.uint8)
    for level in (0, 1, 9):
        (tmp_path / "x.png").write_bytes(png(pixels, compress_level=level))
        assert np.array_equal(read_picture(tmp_path / "x.png", 64), pixels.ravel())


def other_mode(mode: str) -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, (32, 32)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (png(np.zeros((32, 31), np.uint8)), "a picture of 31 x 32, expected 32 x 32"),
        (png(np.zeros((64, 64), np.uint8)), "a picture of 64 x 64, expected 32 x 32"),
        (raw_png(60_000, 60_000, b""), "a picture of 60000 x 60000"),
        (raw_png(0, 0, b""), "a picture of 0 x 0"),
        (other_mode("RGB"), "8-bit RGB; expected 8-bit grey"),
        (other_mode("RGBA"), "RGB and alpha"),
        (other_mode("LA"), "grey and alpha"),
        (other_mode("P"), "palette"),
        (other_mode("1"), "1-bit grey"),
        (other_mode("I;16"), "16-bit grey"),
        (raw_png(32, 32, zlib.compress(bytes(17 * 32)), depth=4), "4-bit grey"),
        (raw_png(32, 32, zlib.compress(bytes(1100)), interlace=1), "interlaced"),
        (bytes((1 << 20) + 1), "expected at most"),
    ],
)
def test_wrong_pictures_are_refused_by_file_and_line(
    data: bytes, fault: str, tmp_path: Path
) -> None:
    level = write_release(tmp_path / LEVEL, [2, 5])
    (level / "imgs/1/sample_3.png").write_bytes(data)
    message = refusal(lambda: prepare(small(tmp_path), tmp_path / "cache"))
    where = f"{level / 'metadata' / '1.npy'}, line 4: imgs/1/sample_3.png: "
    assert message.startswith(where) and fault in message
    assert not list((tmp_path / "cache").glob("*/meta.json"))


def test_the_first_of_two_wrong_pictures_is_named_with_any_number_of_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pathfinder, "PICTURES_PER_JOB", 2)
    level = write_release(tmp_path / LEVEL, [30])
    for i in (11, 12, 25, 26, 28):
        (level / f"imgs/0/sample_{i}.png").write_bytes(png(np.zeros((i, 32), np.uint8)))
    messages = {
        refusal(lambda workers=workers: prepare(small(tmp_path), tmp_path, num_workers=workers))
        for workers in (0, 1, 3)
    }
    (message,) = messages
    assert "0.npy, line 12: imgs/0/sample_11.png: a picture of 32 x 11" in message


def test_reading_holds_a_few_pictures_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pathfinder, "PICTURES_PER_JOB", 16)
    level = write_release(tmp_path / LEVEL.replace("32", "128"), [1], side=128)
    lines = [f"imgs/0 sample_{i}.png {i} 0 {SETTINGS}\n" for i in range(400)]
    for i in range(1, 400):
        os.link(level / "imgs/0/sample_0.png", level / f"imgs/0/sample_{i}.png")
    (level / "metadata/0.npy").write_text("".join(lines))
    task = PathX(data_dir=tmp_path)
    task.source_files()
    tracemalloc.start()
    try:
        count = sum(1 for _ in task.examples("train"))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == 320
    assert peak < 1.5e6  # all of them have 5.2 MB, a job 0.26


def test_a_cache_beside_is_not_taken_for_pictures(tmp_path: Path) -> None:
    """Path-X is cached under its own name, and paths.cache may be the data folder."""
    task = Pathfinder(data_dir=tmp_path, resolution=128, max_length=128**2)
    (tmp_path / "pathx-4908e425713c" / "train").mkdir(parents=True)
    (tmp_path / "pathx-4908e425713c" / "meta.json").touch()
    (tmp_path / "pathx-4908e425713c.lock").touch()
    assert task.kind == "generated"
    (tmp_path / "path-x.tar").touch()
    with pytest.raises(ValueError, match="path-x.tar cannot be read"):
        Pathfinder(data_dir=tmp_path, resolution=128, max_length=128**2).settings()


def test_few_open_files_suffice(tmp_path: Path) -> None:
    level = write_release(tmp_path / LEVEL, [1])
    lines = [f"imgs/0 sample_{i}.png {i} {i % 2} {SETTINGS}\n" for i in range(2000)]
    for i in range(1, 2000):
        os.link(level / "imgs/0/sample_0.png", level / f"imgs/0/sample_{i}.png")
    (level / "metadata/0.npy").write_text("".join(lines))
    code = (
        "import pathlib, resource, sys, lra.tasks.cache, lra.tasks.pathfinder as p\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
        "p.PICTURES_PER_JOB = 16\n"
        "lra.tasks.cache.shared = lambda task, digests: []\n"
        "task = p.Pathfinder(data_dir=pathlib.Path(sys.argv[1]))\n"
        "data = lra.tasks.cache.prepare(task, pathlib.Path(sys.argv[1], 'cache'), num_workers=4)\n"
        "print(len(data.train), sum(1 for _ in task.examples('train')))\n"
    )
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 64
    out = programs.call("-c", code, tmp_path, cwd=ROOT)
    assert out.stdout.split() == ["1600", "1600"], out.stderr


# --- generated ---

FEW = {"source": "generated", "num_train": 11, "num_val": 5, "num_test": 4}


@pytest.fixture
def small_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pathfinder, "PICTURES_PER_JOB", 4)


@pytest.mark.usefixtures("small_jobs")
def test_generated_bytes_do_not_depend_on_the_number_of_processes(tmp_path: Path) -> None:
    built = []
    for workers in (0, 1, 2, 4):
        task = small(tmp_path / "nothing", **FEW)
        built.append(prepare(task, tmp_path / str(workers), num_workers=workers))
    assert len({data.fingerprint for data in built}) == 1
    assert all(checksums(data) == checksums(built[0]) for data in built[1:])
    sizes = [len(getattr(built[0], split)) for split in SPLITS]
    assert sizes == [11, 5, 4]
    assert built[0].meta["kind"] == "generated"
    pictures = {built[0].train.sequence(i).tobytes() for i in range(11)}
    assert len(pictures) == 11
    assert not list(tmp_path.glob("*/*.work"))


@pytest.mark.usefixtures("small_jobs")
def test_generated_pictures_are_the_generators_and_splits_lie_apart(tmp_path: Path) -> None:
    task = small(tmp_path, **FEW, generator_seed=3)
    for i, split in enumerate(SPLITS):
        expected = generate(params_for(32, "hard"), 3, i << 40, task.sizes[split])
        assert rows(task, split) == [
            (image.tobytes(), label)
            for image, label in zip(expected.images_NRR, expected.labels_N, strict=True)
        ]
    longer = small(tmp_path, **FEW | {"num_train": 14}, generator_seed=3)
    assert rows(longer, "test") == rows(task, "test")
    assert rows(longer, "train")[:11] == rows(task, "train")
    assert not {p for p, _ in rows(task, "val")} & {p for p, _ in rows(task, "train")}
    assert task.overlaps(FEW | {"num_train": 14, "generator_seed": 3}) == ""


def test_labels_are_balanced_and_both_kinds_of_a_level_are_made(tmp_path: Path) -> None:
    task = small(tmp_path, source="generated", difficulty="easy", num_train=1000)
    labels = [label for _, label in rows(task, "train")]
    assert 420 < sum(labels) < 580  # five standard deviations
    # A connected pair has the same expected brightness as another.
    means = [np.frombuffer(pixels, np.uint8).mean() for pixels, _ in rows(task, "train")]
    difference = np.mean(np.array(means)[np.array(labels) == 1]) - np.mean(
        np.array(means)[np.array(labels) == 0]
    )
    assert abs(difference) < 0.6


@pytest.mark.parametrize(
    ("changes", "deviations", "options"),
    [
        ({}, [], {}),
        ({"num_distractors": 5}, [], {"num_distractors": 5}),
        (
            {"num_distractors": 10},
            ["task.num_distractors=10 (benchmark: 5)"],
            {"num_distractors": 10},
        ),
        ({"difficulty": "easy"}, ["task.difficulty=easy (benchmark: hard)"], {}),
        (
            {"resolution": 64, "max_length": 4096},
            ["task.resolution=64 (benchmark: 32)"],
            {"resolution": 64},
        ),
        ({"source": "synthetic", "difficulty": "easy"}, [], {}),
    ],
)
def test_what_differs_from_the_benchmark_is_recorded(
    changes: dict[str, Any], deviations: list[str], options: dict[str, Any], tmp_path: Path
) -> None:
    task = small(tmp_path, **{"source": "generated"} | changes)
    assert task.deviations() == deviations
    protocol = task.protocol
    assert protocol.pop("validation") == "val"
    assert protocol.pop("difficulty") == changes.get("difficulty", "hard")
    assert protocol == options


def test_path_x_is_the_larger_picture(tmp_path: Path) -> None:
    task = PathX(data_dir=tmp_path, source="generated", num_train=2, num_val=1, num_test=1)
    assert (task.name, task.max_length, task.picture_size) == ("pathx", 16_384, (128, 128))
    assert task.vocab_size == 257 and task.num_classes == 2
    assert task.official_sizes == {"train": 160_000, "val": 20_000, "test": 20_000}
    assert task.deviations() == []
    expected = generate(params_for(128, "hard"), 0, 0, 2)
    assert rows(task, "train")[1] == (expected.images_NRR[1].tobytes(), expected.labels_N[1])


def test_every_setting_of_the_generator_gives_another_cache(tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"generator_seed": 1},
        {"num_distractors": 3},
        {"difficulty": "easy"},
        {"num_val": 6},
        {"resolution": 64, "max_length": 4096},
        {"source": "synthetic"},
        {"source": "synthetic", "generator_seed": 1},
    ]
    tasks = [small(tmp_path, **FEW | change) for change in changes]
    assert len({cache_folder(task, tmp_path)[1] for task in tasks}) == len(changes)
    json.dumps([task.settings() for task in tasks])
    same = small(tmp_path, **FEW, num_distractors=5)  # the usual number, spelt out
    assert cache_folder(same, tmp_path) == cache_folder(tasks[0], tmp_path)


@pytest.mark.usefixtures("small_jobs")
def test_a_broken_build_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = prepare(small(tmp_path, **FEW), tmp_path / "whole")
    starts: list[int] = []

    def watched(params: Any, seed: int, start: int, count: int) -> Any:
        if len(starts) == 4:
            raise KeyboardInterrupt
        starts.append(start)
        return generate(params, seed, start, count)

    monkeypatch.setattr(pathfinder, "generate", watched)
    with pytest.raises(KeyboardInterrupt):
        prepare(small(tmp_path, **FEW), tmp_path / "cache", num_workers=1)
    assert starts == [0, 4, 8, 1 << 40]
    (work,) = (tmp_path / "cache").glob("*.work")
    blocks = sorted(work.iterdir())
    assert [block.name for block in blocks] == [
        "train-0.npy",
        "train-4.npy",
        "train-8.npy",
        "val-0.npy",
    ]
    assert not list((tmp_path / "cache").glob("*/meta.json"))
    blocks[1].write_bytes(blocks[1].read_bytes()[:-1])  # cut
    blocks[2].write_bytes(npy(np.zeros((2, 1025), np.uint8)))  # of another size

    starts.clear()
    starts += [-1] * 5  # so that it does not stop again
    data = prepare(small(tmp_path, **FEW), tmp_path / "cache", num_workers=1)
    assert starts[5:] == [4, 8, (1 << 40) + 4, 2 << 40]
    assert data.fingerprint == expected.fingerprint
    assert checksums(data) == checksums(expected)
    assert not work.exists()


def test_a_killed_build_leaves_finished_blocks_and_no_processes(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys, lra.tasks.cache, lra.tasks.pathfinder as p\n"
        "p.PICTURES_PER_JOB = 32\n"
        "task = p.Pathfinder(data_dir=pathlib.Path('x'), num_train=1600,\n"
        "                    num_val=1, num_test=1)\n"
        "data = lra.tasks.cache.prepare(task, pathlib.Path(sys.argv[1]), num_workers=2)\n"
        "print(data.fingerprint)\n"
    )
    builder = programs.start("-c", code, tmp_path, cwd=ROOT, new_session=True)
    try:
        deadline = time.monotonic() + 30
        while len(list(tmp_path.glob("*.work/*.npy"))) < 3:
            assert time.monotonic() < deadline and builder.poll() is None
            time.sleep(0.01)
        builder.kill()
        builder.wait()
        with pytest.raises(ProcessLookupError):
            while time.monotonic() < deadline:
                os.killpg(builder.pid, 0)
                time.sleep(0.05)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(builder.pid, signal.SIGKILL)
    blocks = list(tmp_path.glob("*.work/*.npy"))
    assert 3 <= len(blocks) < 50
    for block in blocks:
        assert np.load(block).shape == (32, 1025)
    out = programs.call("-c", code, tmp_path, cwd=ROOT)
    assert len(out.stdout.strip()) == 64, out.stderr
    arrays = np.load(next(tmp_path.glob("pathfinder-*/train/tokens.npy")), mmap_mode="r")
    expected = generate(params_for(32, "hard"), 0, 1568, 32).images_NRR
    assert np.array_equal(arrays[1568 * 1024 :].reshape(32, 32, 32), expected)
    assert not list(tmp_path.glob("*.work"))


# --- export ---


def released_rows(level: Path) -> dict[str, tuple[bytes, int]]:
    """Pixels and label by name, read as others read the release."""
    found = {}
    for file in (level / "metadata").iterdir():
        for line in file.read_text().split("\n")[:-1]:
            fields = line.split(" ")
            path = f"{fields[0]}/{fields[1]}"
            found[path] = (np.asarray(Image.open(level / path)).tobytes(), int(fields[3]))
    return found


@pytest.mark.usefixtures("small_jobs")
def test_exported_pictures_are_read_back_equal(tmp_path: Path) -> None:
    task = small(tmp_path, **FEW)
    truth = tmp_path / "out" / "truth.tsv"
    level = export(task, tmp_path / "out", truth=truth, pictures_per_batch=4, num_workers=2)
    assert level == tmp_path / "out" / LEVEL
    made = all_rows(task)
    released = released_rows(level)
    batches = [4, 4, 3, 4, 1, 4]  # none has pictures of two splits
    names = [f"imgs/{b}/sample_{i}.png" for b, count in enumerate(batches) for i in range(count)]
    assert [released[name] for name in names] == made
    assert len(released) == len(made) == 20
    again = small(tmp_path / "out")
    assert again.kind == "files"
    assert sorted(all_rows(again)) == sorted(made)
    # Drawn here, they are not the release's, in whatever form and however many.
    assert "of our generator" in again.deviations()[-1]
    assert again.data_kind(again.official_sizes) == "partial"
    (level / "generated.json").rename(tmp_path / "elsewhere")
    assert again.deviations() == []
    lines = [line for f in (level / "metadata").iterdir() for line in f.read_text().splitlines()]
    assert {line.split(" ", 4)[4] for line in lines} == {SETTINGS}

    table = list(csv.DictReader(truth.open(), delimiter="\t"))
    assert tuple(table[0]) == TRUTH_COLUMNS
    assert [row["file"] for row in table] == names
    for row in table:
        pixels, label = released[row["file"]]
        assert int(row["label"]) == label
        ends = {k: (int(row[f"{k}_y"]), int(row[f"{k}_x"])) for k in
                ("mark1", "mark2", "origin0", "origin1", "terminal0", "terminal1")}  # fmt: skip
        contour = "0" if ends["mark1"] == ends["origin0"] else "1"
        assert ends["mark1"] == ends[f"origin{contour}"]
        other = contour if label else str(1 - int(contour))
        assert ends["mark2"] == ends[f"terminal{other}"]
        image = np.frombuffer(pixels, np.uint8).reshape(32, 32)
        assert image[ends["mark1"]] > 150 and image[ends["mark2"]] > 150

    assert "exists already" in refusal(lambda: export(task, tmp_path / "out"))
    assert "only generated" in refusal(lambda: export(again, tmp_path / "out2"))


def test_an_export_that_fails_or_was_killed_leaves_no_level(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, level, truth = small(tmp_path, **FEW), tmp_path / "out" / LEVEL, tmp_path / "truth.tsv"

    def fill_the_disk(self: Image.Image, path: Path) -> None:
        if path.name == "sample_3.png":
            raise OSError(errno.ENOSPC, "No space left on device")

    def without_the_table(path: Path, text: str) -> None:
        if path == truth:
            raise NotWritten(errno.EDQUOT, "Disk quota exceeded", str(path))

    for place, name, instead in (
        (level, "PIL.Image.Image.save", fill_the_disk),
        (truth, f"{FILES}.write_atomically", without_the_table),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(name, instead)
            with pytest.raises(OSError, match=f"{place}: not written .*; free some space or choo"):
                export(task, tmp_path / "out", truth=truth)
        assert list(level.parent.iterdir()) == []
    (level.parent / f".{level.name}.0a1b.part" / "imgs").mkdir(parents=True)  # of a killed one
    assert len(released_rows(export(task, tmp_path / "out"))) == 20
    assert list(level.parent.iterdir()) == [level]


def test_a_second_export_into_a_folder_leaves_the_first_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, told = small(tmp_path, **FEW), []

    def with_another(*arguments: Any) -> list[str]:
        monkeypatch.setattr(f"{FILES}.write_batch", write_batch)  # the other's
        told.append(refusal(lambda: export(task, tmp_path / "out")))
        return write_batch(*arguments)

    monkeypatch.setattr(f"{FILES}.write_batch", with_another)
    level = export(task, tmp_path / "out")
    assert len(told) == 3 and all("another export is writing it" in text for text in told)
    assert len(released_rows(level)) == 20 and list(level.parent.iterdir()) == [level]


def test_a_table_that_cannot_be_written_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{FILES}.generate", lambda *_: pytest.fail("generated"))
    (tmp_path / "file").touch()
    for truth, reason in ((tmp_path, ": not a file"), (tmp_path / "file/x", "choose another tr")):
        with pytest.raises((ValueError, OSError), match=reason):
            export(small(tmp_path, **FEW), tmp_path / "out", truth=truth)
    assert not (tmp_path / "out").exists()


@needs_reference
def test_exported_metadata_look_like_the_originals(tmp_path: Path) -> None:
    for side in (32, 128):
        task = small(tmp_path, **FEW, resolution=side, max_length=side**2)
        task.num_train = task.num_val = task.num_test = 1
        level = export(task, tmp_path)
        name = f"lra_release/lra_release/pathfinder{side}/{level.name}/metadata/0.npy"
        known = {line.split(" ", 4)[4] for line in (REFERENCE / name).read_text().splitlines()}
        for batch in range(3):
            (line,) = (level / f"metadata/{batch}.npy").read_text().splitlines()
            assert line.startswith(f"imgs/{batch} sample_0.png 0 ")
            assert line.split(" ", 4)[4] in known


def test_export_script(tmp_path: Path) -> None:
    def script(*arguments: str) -> subprocess.CompletedProcess[str]:
        return programs.call("scripts/export_pathfinder.py", *arguments, cwd=ROOT)

    sizes = ["task.num_train=3", "task.num_val=2", "task.num_test=1"]
    out = script(str(tmp_path), "task.difficulty=easy", *sizes, "--workers", "1")
    assert out.returncode == 0, out.stderr
    assert len(released_rows(tmp_path / "pathfinder32" / "curv_baseline")) == 6
    out = script(str(tmp_path), "task=listops")
    assert out.returncode == 2 and "expected pathfinder or pathx" in out.stderr


# --- synthetic ---


@pytest.mark.parametrize("kind", [Pathfinder, PathX])
def test_synthetic_stand_in_has_the_shape_and_is_learnable(
    kind: type[Pathfinder], tmp_path: Path
) -> None:
    task = kind(data_dir=tmp_path, source="synthetic", num_train=40, num_val=20, num_test=20)
    data = prepare(task, tmp_path)
    for split in SPLITS:
        arrays = getattr(data, split)
        assert (arrays.lengths == task.max_length).all()
        assert np.bincount(arrays.labels).tolist() == [len(arrays) // 2] * 2
        means = np.array([arrays.sequence(i).mean() for i in range(len(arrays))])
        assert means[arrays.labels == 1].min() > means[arrays.labels == 0].max()
    # Black is there, and is not padding.
    batch = data.train.batch(np.arange(4))
    assert int(batch.tokens_BSL.min()) == 1
    assert batch.tokens_BSL.shape == (4, 1, task.max_length)
    assert checksums(data) == checksums(prepare(task, tmp_path / "again", num_workers=4))


# --- settings ---


@pytest.mark.parametrize(
    "settings",
    [
        {"source": "hub"},
        {"source": "generated", "path": "somewhere"},
        {"source": "synthetic", "path": "somewhere"},
        {"difficulty": "medium"},
        {"resolution": 48, "max_length": 48 * 48},
        {"max_length": 1000},
        {"max_length": 4096},
        {"num_train": 0},
        {"num_distractors": -1},
        {"num_distractors": 256},
        {"generator_seed": -1},
        {"split_seed": -1},
        {"limit_val": 0},
    ],
)
def test_settings_out_of_range_name_the_key(settings: dict[str, Any], tmp_path: Path) -> None:
    message = refusal(lambda: small(tmp_path, **settings))
    key = list(settings)[0] if "path" not in settings else "path"
    assert f"task.{key}={settings[key]}" in message


def test_max_length_follows_the_resolution(tmp_path: Path) -> None:
    message = refusal(lambda: small(tmp_path, resolution=64))
    assert "task.max_length=1024: expected 4096" in message and "task.resolution=64" in message


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({"num_train": 5}, "limit_train"),
        ({"generator_seed": 1}, "task.source=generated"),
        ({"num_distractors": 4}, "task.source=generated"),
        ({"source": "generated", "split_seed": 1}, "task.generator_seed"),
        ({"source": "synthetic", "split_seed": 1}, "task.generator_seed"),
        ({"source": "synthetic", "num_distractors": 1}, "drop it"),
    ],
)
def test_keys_that_the_source_does_not_read_are_refused(
    settings: dict[str, Any], remedy: str, tmp_path: Path
) -> None:
    write_release(tmp_path / LEVEL, [4])
    message = refusal(lambda: prepare(small(tmp_path, **settings), tmp_path / "cache"))
    key = list(settings)[-1]
    assert f"task.{key}={settings[key]}" in message and remedy in message


@pytest.mark.parametrize("kind", [Pathfinder, PathX])
def test_config_file_holds_every_key_with_its_default(kind: type[Pathfinder]) -> None:
    text = (ROOT / "configs" / "task" / f"{kind.name}.yaml").read_text()
    assert text.startswith("# @package _global_\n")
    settings = yaml.safe_load(text)["task"]
    assert settings.pop("_target_") == f"{kind.__module__}.{kind.__name__}"
    defaults = {f.name: f.default for f in dataclasses.fields(kind) if f.init}
    defaults.pop("data_dir")  # comes from paths.data
    assert settings == defaults


def test_decode_shows_rows_of_pixels(tmp_path: Path) -> None:
    values = np.zeros(1024, np.uint8)
    values[33:35] = 255, 128
    lines = small(tmp_path).decode(values).split("\n")
    assert [len(line) for line in lines] == [32] * 32
    assert lines[1] == " @+".ljust(32) and not lines[0].strip()
