"""Image: grey formulas, batches in both Pythons' pickles, places, hostile files, the stand-in."""

from __future__ import annotations

import dataclasses
import gc
import io
import pickle
import shutil
import struct
import tarfile
import time
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image as PillowImage

from lra.tasks.batches import file_sha256
from lra.tasks.cache import cache_folder, prepare
from lra.tasks.image import FILES, GREY, NUM_PIXELS, Image, read_batch
from lra.tasks.task import SPLITS

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT.parent / "shared" / "data"
needs_reference = pytest.mark.skipif(not REFERENCE.is_dir(), reason="no reference data here")

INNER = "cifar-10-batches-py"
Rows = list[tuple[bytes, int]]
Batch = tuple[np.ndarray, list[int]]


def make_batch(size: int = 20, seed: int = 0) -> Batch:
    """Random pictures [N, 3072] and labels."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (size, 3072), np.uint8), (np.arange(size) % 10).tolist()


def python2_pickle(data: np.ndarray, labels: list[int]) -> bytes:
    """A batch as Python 2 wrote it (protocol 2, `str` for keys and bytes), put together by hand."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n" + b"cnumpy\nndarray\n" + number(0) + b"\x85"
        + text(b"b") + b"\x87R(" + number(1)
        + number(data.shape[0]) + number(data.shape[1]) + b"\x86"
        + b"cnumpy\ndtype\n" + text(b"u1") + number(0) + number(1) + b"\x87R("
        + number(3) + text(b"|") + b"NNN" + number(-1) + number(-1) + number(0) + b"tb"
        + b"\x89T" + struct.pack("<i", data.size) + data.tobytes() + b"tb"
    )  # fmt: skip
    items = (
        text(b"batch_label") + text(b"a batch") + text(b"data") + array
        + text(b"labels") + b"](" + b"".join(map(number, labels)) + b"e"
    )  # fmt: skip
    return b"\x80\x02}(" + items + b"u."


def python3_pickle(data: np.ndarray, labels: list[int], protocol: int = 4) -> bytes:
    return pickle.dumps({b"data": data, b"labels": labels}, protocol)


def write_batches(folder: Path, size: int = 20) -> dict[str, Batch]:
    folder.mkdir(parents=True, exist_ok=True)
    batches = {name: make_batch(size, i) for i, name in enumerate(FILES)}
    for name, batch in batches.items():
        (folder / name).write_bytes(python2_pickle(*batch))
    (folder / "batches.meta").write_bytes(b"never opened")
    (folder / "readme.html").write_bytes(b"<html>")
    return batches


def write_tar(file: Path, folder: Path, mode: Any = "w:gz", prefix: str = INNER) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, mode) as tar:
        for path in sorted(folder.iterdir(), reverse=True):
            tar.add(path, f"{prefix}/{path.name}")
    return file


def png(rgb: np.ndarray, mode: str = "RGB") -> bytes:
    buffer = io.BytesIO()
    PillowImage.fromarray(rgb).convert(mode).save(buffer, "PNG")
    return buffer.getvalue()


def to_png(row: np.ndarray) -> bytes:
    return png(np.ascontiguousarray(row.reshape(3, 32, 32).transpose(1, 2, 0)))


def write_tables(folder: Path, batches: dict[str, Batch], **broken: Any) -> Path:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        names = [name for name in FILES if (name == "test_batch") == (split == "test")]
        pictures = [{"bytes": to_png(row), "path": None} for n in names for row in batches[n][0]]
        columns = {"img": pictures, "label": [label for n in names for label in batches[n][1]]}
        columns |= broken if split == "train" else {}
        pq.write_table(pa.table(columns), folder / f"{split}-00000-of-00001.parquet")
    return folder


def rows(task: Image, split: str = "train") -> Rows:
    return [(bytes(e.sequences[0]), e.label) for e in task.examples(split)]


# --- grey ---


def grey(name: str, *colour: int) -> int:
    red, green, blue = (np.full((2, 3), value, np.uint8) for value in colour)
    values = GREY[name](red, green, blue)
    assert values.shape == (2, 3)
    assert values.dtype == np.uint8
    return int(values[1, 2])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("pil", [76, 150, 29, 255, 0]),
        ("tf", [76, 149, 29, 255, 0]),
        ("tensor", [76, 149, 29, 254, 0]),
    ],
)
def test_grey_of_fixed_colours(name: str, expected: list[int]) -> None:
    colours = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255), (0, 0, 0)]
    assert [grey(name, *colour) for colour in colours] == expected


def test_grey_pil_is_what_pillow_does() -> None:
    rng = np.random.default_rng(0)
    rgb = rng.integers(0, 256, (500, 500, 3), np.uint8)
    expected = np.asarray(PillowImage.fromarray(rgb).convert("L"))
    assert np.array_equal(GREY["pil"](*rgb.transpose(2, 0, 1)), expected)


@pytest.mark.parametrize("name", ["tf", "tensor"])
def test_grey_in_float32_against_a_scalar_version(name: str) -> None:
    rng = np.random.default_rng(1)
    one = np.float32
    for red, green, blue in rng.integers(0, 256, (300, 3)):
        if name == "tf":
            scaled = [one(c) * one(1 / 255) for c in (red, green, blue)]
            value = scaled[0] * one(0.2989) + scaled[1] * one(0.587) + scaled[2] * one(0.114)
            expected = int(np.floor(value * one(255.5)))
        else:
            value = one(0.2989) * one(red) + one(0.587) * one(green) + one(0.114) * one(blue)
            expected = int(value)
        assert grey(name, red, green, blue) == expected


@needs_reference
@pytest.mark.parametrize("name", list(GREY))
def test_reference_grey(name: str) -> None:
    truth = np.load(REFERENCE / "extra/grey/test_batch_grey.npz")[name]
    found = rows(Image(data_dir=REFERENCE, grey=name), "test")[: len(truth)]  # type: ignore[arg-type]
    for (pixels, _), picture in zip(found, truth, strict=True):
        assert pixels == picture.tobytes()


# --- batches ---


def test_pixels_come_row_by_row(tmp_path: Path) -> None:
    batches = write_batches(tmp_path / INNER)
    planes = np.zeros((20, 3, 32, 32), np.uint8)
    planes[:, :, 1, 1] = 255
    batches["test_batch"] = planes.reshape(20, 3072), batches["test_batch"][1]
    (tmp_path / INNER / "test_batch").write_bytes(python2_pickle(*batches["test_batch"]))
    dataset = prepare(Image(data_dir=tmp_path), tmp_path / "cache")
    batch = dataset.test.batch(np.array([0]))
    ids = batch.tokens_BSL[0, 0, : batch.lengths_BS[0, 0]]
    assert len(ids) == 1024
    assert ids.argmax() == 33
    assert (ids.max(), ids.min()) == (256, 1)  # black is data, not padding
    assert Image(data_dir=tmp_path).vocab_size == 257


@pytest.mark.parametrize("form", ["python 2", 0, 1, 2, 3, 4, 5, "Fortran", "text keys"])
def test_batches_of_either_python_and_any_protocol(form: Any) -> None:
    data, labels = make_batch(7)
    expected = read_batch(python2_pickle(data, labels), "here")
    assert [label for _, label in expected] == labels
    grey_NP = GREY["tf"](*data.reshape(-1, 3, NUM_PIXELS).transpose(1, 0, 2))
    assert [pixels for pixels, _ in expected] == [row.tobytes() for row in grey_NP]
    if form == "python 2":
        written = pickle.loads(python2_pickle(data, labels), encoding="bytes")
        assert np.array_equal(written[b"data"], data)  # the hand-made pickle is sound
        return
    if form == "Fortran":
        written = python3_pickle(np.asfortranarray(data), labels, 2)
    elif form == "text keys":
        written = pickle.dumps({"labels": labels, "data": data, "filenames": ["x"] * 7}, 2)
    else:
        written = python3_pickle(data, labels, form)
    assert read_batch(written, "here") == expected


class Runs:
    """Leaves a mark when unpickled in earnest."""

    marks: list[str] = []

    def __init__(self, function: Any, *args: Any) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> Any:
        return self.function, self.args


def mark() -> None:
    Runs.marks.append("ran")


def batch_with(**changes: Any) -> bytes:
    data, labels = make_batch()
    return pickle.dumps({"data": data, "labels": labels} | changes, 2)


def without(key: str) -> bytes:
    data, labels = make_batch()
    batch = {"data": data, "labels": labels}
    del batch[key]
    return pickle.dumps(batch, 2)


GOOD = python2_pickle(*make_batch())
BAD_BATCHES = {
    "runs a function of ours": (pickle.dumps(Runs(mark)), "test_image.mark"),
    "runs a command": (b"cos\nsystem\n(S'touch ran'\ntR.", "names os.system"),
    "runs a command, protocol 4": (pickle.dumps(Runs(exec, "1")), "names builtins.exec"),
    "runs a getattr": (pickle.dumps(Runs(getattr, "", "join")), "names builtins.getattr"),
    "hides in a value": (batch_with(filenames=Runs(mark)), "test_image.mark"),
    "another name of numpy": (b"cnumpy\nload\n(S'x'\ntR.", "names numpy.load"),
    "a dotted name of numpy": (
        b"\x80\x04\x8c\x05numpy\x8c\x0edtype.__init__\x93.",
        "names numpy.dtype.__init__",
    ),
    "an object array": (batch_with(data=np.array([Runs(mark)] * 20, object)), "test_image.mark"),
    "a persistent id": (b"Px\n.", "not a whole pickle"),
    "an extension code": (b"\x80\x02\x82\x01.", "unregistered extension code"),
    "a state for a name": (b"cnumpy\nndarray\n(NNNtb.", "expected a dictionary"),
    "no pickle": (b"PK\x03\x04", "not a whole pickle"),
    "empty": (b"", "not a whole pickle"),
    "cut": (GOOD[: len(GOOD) // 2], "not a whole pickle"),
    "cut at the end": (GOOD[:-1], "not a whole pickle"),
    "a page": (b"<html>403</html>", "not a whole pickle"),
    "a list": (pickle.dumps([1, 2]), "a pickled list, expected a dictionary"),
    "no data": (without("data"), "no 'data'; it has 'labels'"),
    "no labels (CIFAR-100)": (without("labels"), "no 'labels'; it has 'data'"),
    "data is a list": (batch_with(data=[1, 2, 3]), "'data' is a list, expected an array"),
    "data is floats": (batch_with(data=np.zeros((20, 3072))), "has the type 'f8', expected uint8"),
    "data is int8": (batch_with(data=np.zeros((20, 3072), np.int8)), "has the type 'i1'"),
    "data is flat": (batch_with(data=np.zeros(20 * 3072, np.uint8)), "shape (61440,)"),
    "data is 3-D": (batch_with(data=np.zeros((20, 3, 1024), np.uint8)), "shape (20, 3, 1024)"),
    "grey data": (batch_with(data=np.zeros((20, 1024), np.uint8)), "shape (20, 1024)"),
    "no rows": (python3_pickle(np.zeros((0, 3072), np.uint8), []), "shape (0, 3072) and 0 bytes"),
    "an array without a state": (
        b"\x80\x02}(U\x04datacnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n\x85RU\x06labels]u.",
        "'data' is no whole array",
    ),
    "data shorter than its shape": (
        GOOD.replace(b"J" + struct.pack("<i", 20) + b"J", b"J" + struct.pack("<i", 10**9) + b"J"),
        "shape (1000000000, 3072) and 61440 bytes",
    ),
    "negative shape": (
        GOOD.replace(b"J" + struct.pack("<i", 20) + b"J", b"J" + struct.pack("<i", -20) + b"J"),
        "shape (-20, 3072)",
    ),
    "too few labels": (batch_with(labels=[0] * 19), "19 labels for 20 pictures"),
    "labels are an array": (batch_with(labels=np.zeros(20, int)), "for 20 pictures; expected a "),
    "label 10": (batch_with(labels=[0] * 19 + [10]), "picture 19 has label 10"),
    "label -1": (batch_with(labels=[-1] + [0] * 19), "picture 0 has label -1"),
    "label is text": (batch_with(labels=["cat"] * 20), "picture 0 has label 'cat'"),
    "label is a float": (batch_with(labels=[1.0] * 20), "picture 0 has label 1.0"),
    "label is true": (batch_with(labels=[True] * 20), "picture 0 has label True"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_BATCHES)
@pytest.mark.parametrize("form", ["folder", "archive"])
def test_hostile_and_damaged_batches_are_refused_by_name(
    tmp_path: Path, name: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    content, part = BAD_BATCHES[name]
    write_batches(tmp_path / "data" / INNER)
    (tmp_path / "data" / INNER / "data_batch_4").write_bytes(content)
    if form == "archive":
        write_tar(tmp_path / "data" / "cifar-10-python.tar.gz", tmp_path / "data" / INNER)
        shutil.rmtree(tmp_path / "data" / INNER)
    with pytest.raises(ValueError) as caught:
        prepare(Image(data_dir=tmp_path / "data"), tmp_path / "cache")
    message = str(caught.value)
    assert "data_batch_4" in message
    assert part in message
    assert len(message) < 500
    assert Runs.marks == []
    assert not (tmp_path / "ran").exists()
    assert not list((tmp_path / "cache").glob("image-*/meta.json"))


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02Nr\xff\xff\xff\x7f.",  # remembers under the number 2**31 - 1
        b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"x.",  # a terabyte of bytes to come
        b"\x80\x05\x96" + struct.pack("<Q", 1 << 35) + b"x.",  # 32 GiB of changeable bytes
        b"\x80\x04\x95" + struct.pack("<Q", 1 << 40) + b"N.",  # in a frame of a terabyte
        b"\x80\x02\x8b" + struct.pack("<i", (1 << 31) - 1) + b"\x01.",  # a number of 2 GiB
    ],
)
def test_sizes_in_a_pickle_take_no_memory(content: bytes) -> None:
    gc.collect()
    tracemalloc.start()
    started = time.perf_counter()
    with pytest.raises(ValueError, match="here: "):
        read_batch(content, "here")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10e6
    assert time.perf_counter() - started < 5


# --- splits ---


def test_val_is_the_last_tenth_of_train(tmp_path: Path) -> None:
    batches = write_batches(tmp_path / INNER)
    dataset = prepare(Image(data_dir=tmp_path), tmp_path / "cache")
    assert (len(dataset.train), len(dataset.val), len(dataset.test)) == (90, 10, 20)
    expected = read_batch(python2_pickle(*batches["data_batch_5"]), "here")[-10:]
    assert rows(Image(data_dir=tmp_path), "val") == expected
    first = read_batch(python2_pickle(*batches["data_batch_1"]), "here")
    assert rows(Image(data_dir=tmp_path))[:20] == first
    wider = Image(data_dir=tmp_path, val_fraction=0.25)
    assert [len(rows(wider, split)) for split in SPLITS] == [75, 25, 20]


@pytest.mark.parametrize(
    ("split", "fraction", "amount"),
    [("lra", 0.9999, "all"), ("lra", 1e-4, "none"), ("stratified", 0.9999, "all")],
)
def test_a_fraction_that_leaves_a_split_empty_is_named(
    tmp_path: Path, split: Any, fraction: float, amount: str
) -> None:
    write_batches(tmp_path / INNER)
    task = Image(data_dir=tmp_path, split=split, val_fraction=fraction)
    expected = f"task.val_fraction={fraction}: of 100 training examples it holds out {amount};"
    with pytest.raises(ValueError, match=expected):
        prepare(task, tmp_path / "cache")


def test_the_stratified_split_follows_seed_and_content(tmp_path: Path) -> None:
    write_batches(tmp_path / INNER)
    task = Image(data_dir=tmp_path, split="stratified")
    assert [len(rows(task, split)) for split in SPLITS] == [90, 10, 20]
    assert sorted(label for _, label in rows(task, "val")) == list(range(10))
    other = Image(data_dir=tmp_path, split="stratified", split_seed=1)
    assert rows(task, "val") != rows(other, "val")
    first, last = tmp_path / INNER / "data_batch_1", tmp_path / INNER / "data_batch_5"
    swapped = first.read_bytes(), last.read_bytes()
    last.write_bytes(swapped[0])
    first.write_bytes(swapped[1])
    moved = Image(data_dir=tmp_path, split="stratified")
    assert sorted(rows(task, "val")) == sorted(rows(moved, "val"))


@pytest.mark.parametrize(
    ("ours", "theirs", "percent"),
    [
        ({}, {}, 0),
        ({}, {"split_seed": 1}, 0),  # which nothing reads
        ({}, {"val_fraction": 0.25}, 0),
        ({"val_fraction": 0.25}, {}, 60),
        ({}, {"split": "stratified"}, 90),
        ({"split": "stratified"}, {}, 90),
        ({"split": "stratified"}, {"split": "stratified", "split_seed": 1}, 90),
        ({"split": "stratified"}, {"split": "stratified", "val_fraction": 0.2}, 0),
    ],
)
def test_other_splits_share_as_many_examples_as_is_said(
    tmp_path: Path, ours: dict[str, Any], theirs: dict[str, Any], percent: int
) -> None:
    write_batches(tmp_path / INNER)
    task = Image(data_dir=tmp_path, **ours)
    train, val = set(rows(Image(data_dir=tmp_path, **theirs))), rows(task, "val")
    assert abs(100 * sum(row in train for row in val) / len(val) - percent) <= 20  # of ten
    said = task.overlaps({"_target_": "lra.tasks.image.Image", "grey": "pil", **theirs})
    assert said.partition(" %")[0] == (f"about {percent}" if percent else "")


def test_official_sizes() -> None:
    assert Image.official_sizes == {"train": 45_000, "val": 5_000, "test": 10_000}


# --- places and forms ---


@pytest.mark.parametrize("form", ["tar.gz", "tar", "path to a tar", "parquet"])
def test_every_form_gives_the_same_examples(tmp_path: Path, form: str) -> None:
    batches = write_batches(tmp_path / "made" / INNER)
    expected = [rows(Image(data_dir=tmp_path / "made"), split) for split in SPLITS]
    data, path = tmp_path / "data", None
    if form == "tar.gz":
        write_tar(data / "cifar-10-python.tar.gz", tmp_path / "made" / INNER)
    elif form == "tar":
        write_tar(data / "image" / "cifar-10-python.tar", tmp_path / "made" / INNER, "w", "./x")
    elif form == "path to a tar":
        path = str(write_tar(data / "renamed", tmp_path / "made" / INNER))
    else:
        write_tables(data / "cifar10" / "plain_text", batches)
    before = sorted(data.rglob("*"))
    task = Image(data_dir=data, path=path)
    assert [rows(task, split) for split in SPLITS] == expected
    assert sorted(data.rglob("*")) == before  # nothing is unpacked


def test_the_hub_gives_the_same_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    batches = write_batches(tmp_path / INNER)

    def load_dataset(name: str, revision: str | None) -> Any:
        assert (name, revision) == ("uoft-cs/cifar10", None)
        features = datasets.Features(
            {
                "img": datasets.Image(),
                "label": datasets.ClassLabel(num_classes=10),
            }
        )
        made = {}
        for split in ("train", "test"):
            names = [n for n in FILES if (n == "test_batch") == (split == "test")]
            columns = {
                "img": [{"bytes": to_png(r), "path": None} for n in names for r in batches[n][0]],
                "label": [label for n in names for label in batches[n][1]],
            }
            made[split] = datasets.Dataset.from_dict(columns, features=features)
        return datasets.DatasetDict(made)

    monkeypatch.setattr("lra.tasks.columnar._unreachable", lambda endpoint: "")
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    hub = Image(data_dir=tmp_path / "none", source="hub")
    files = Image(data_dir=tmp_path)
    for split in SPLITS:
        assert rows(hub, split) == rows(files, split)


def test_nestings_have_one_fingerprint(tmp_path: Path) -> None:
    folders = [f"a/{INNER}", f"b/image/{INNER}", f"c/{INNER}/{INNER}", "d"]
    for folder in folders:
        write_batches(tmp_path / folder)
    tasks = [Image(data_dir=tmp_path / name) for name in "abcd"]
    tasks += [Image(data_dir=tmp_path / "none", path=str(tmp_path / folder)) for folder in folders]
    assert len({cache_folder(task, tmp_path / "cache") for task in tasks}) == 1
    file = tmp_path / "b/image" / INNER / "data_batch_2"
    file.write_bytes(file.read_bytes().replace(b"a batch", b"b batch"))
    assert cache_folder(tasks[0], tmp_path / "cache") != cache_folder(tasks[1], tmp_path / "cache")


@pytest.mark.parametrize("second", ["folder", "archive", "parquet"])
def test_copies_may_be_equal_but_not_differ(tmp_path: Path, second: str) -> None:
    batches = write_batches(tmp_path / INNER)
    for equal in (True, False):
        if not equal:
            data, labels = batches["data_batch_3"]
            batches["data_batch_3"] = data, labels[::-1]
        changed = tmp_path / f"made-{equal}"
        write_batches(changed)
        (changed / "data_batch_3").write_bytes(python2_pickle(*batches["data_batch_3"]))
        if second == "folder":
            place = tmp_path / "image"
            shutil.copytree(changed, place, dirs_exist_ok=True)
        elif second == "archive":
            place = write_tar(tmp_path / "cifar-10-python.tar.gz", changed)
        else:
            place = write_tables(tmp_path / "cifar10", batches)
        if equal:
            assert len(rows(Image(data_dir=tmp_path))) == 90
            continue
        with pytest.raises(ValueError) as caught:
            prepare(Image(data_dir=tmp_path), tmp_path / "cache")
        for part in (str(tmp_path / INNER), str(place), "task.path"):
            assert part in str(caught.value)


def test_nothing_found_names_every_place_and_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:
        prepare(Image(data_dir=tmp_path), tmp_path / "cache")
    for part in (f"{tmp_path}/{INNER}", f"{tmp_path}/image", f"{tmp_path}/cifar-10-python.tar.gz",
                 "https://www.cs.toronto.edu", "get_data.sh", "task.source=hub",
                 "task.path"):  # fmt: skip
        assert part in str(caught.value)


def test_a_folder_without_some_training_batches_is_read_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batches = write_batches(tmp_path / INNER)
    whole = prepare(Image(data_dir=tmp_path), tmp_path / "cache")
    for number in (2, 4):
        (tmp_path / INNER / f"data_batch_{number}").unlink()
    part = prepare(Image(data_dir=tmp_path), tmp_path / "cache")
    assert (len(part.train), len(part.val), len(part.test)) == (54, 6, 20)
    assert part.fingerprint != whole.fingerprint and "lacks" not in whole.meta["source"]
    expected = [
        row
        for number in (1, 3, 5)
        for row in read_batch(python2_pickle(*batches[f"data_batch_{number}"]), "here")
    ]
    assert rows(Image(data_dir=tmp_path)) + rows(Image(data_dir=tmp_path), "val") == expected
    said = f"{tmp_path / INNER}, which lacks data_batch_2, data_batch_4"
    assert (
        part.meta["source"] == said and f"preparing image from {said}\n" in capsys.readouterr().err
    )


FAULTS = {
    "the test batch is missing": (
        lambda d: (d / INNER / "test_batch").unlink(),
        [INNER, "no test_batch", "expected test_batch and at least one of data_batch_1"],
    ),
    "all training batches are missing": (
        lambda d: [file.unlink() for file in (d / INNER).glob("data_batch_*")],
        [INNER, "no data_batch_1 and no data_batch_2", "at least one of data_batch_1"],
    ),
    "a batch is missing in the archive": (
        lambda d: ((d / INNER / "test_batch").unlink(),
                   write_tar(d / "cifar-10-python.tar.gz", d / INNER), shutil.rmtree(d / INNER)),
        ["cifar-10-python.tar.gz", "no test_batch"],
    ),
    "a huge batch": (
        lambda d: (d / INNER / "data_batch_2").open("wb").truncate((64 << 20) + 1),
        ["data_batch_2", "67108865 bytes"],
    ),
    "the archive of two trees": (
        lambda d: (shutil.copytree(d / INNER, d / INNER / "again"),
                   write_tar(d / "cifar-10-python.tar.gz", d / INNER), shutil.rmtree(d / INNER)),
        ["cifar-10-python.tar.gz", "another folder too"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_faulty_sources_are_refused_by_name(tmp_path: Path, name: str) -> None:
    write, parts = FAULTS[name]
    write_batches(tmp_path / INNER)
    write(tmp_path)
    with pytest.raises(ValueError) as caught:
        prepare(Image(data_dir=tmp_path), tmp_path / "cache")
    for part in parts:
        assert part in str(caught.value)


PNG = to_png(make_batch()[0][0])


def with_chunk(kind: bytes, body: bytes) -> bytes:
    """The picture with another chunk behind its header; `IHDR` takes the place of that."""
    chunk = struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
    return (PNG[:8] if kind == b"IHDR" else PNG[:33]) + chunk + PNG[33:]


BOMB = with_chunk(b"IHDR", struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0))
LONG_TEXT = with_chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(2 << 20)))
BAD_TABLES = {
    "no bytes": ({"img": [{"bytes": None, "path": "x.png"}] * 100}, "row 0: no picture in the row"),
    "no picture": ({"img": [PNG] * 5 + [None] * 95}, "row 5: no picture"),
    "a list": ({"img": [[1, 2]] * 100}, "row 0: no picture"),
    "cut PNG": ({"img": [PNG[:-60]] * 100}, "row 0: not a whole PNG picture"),
    "no PNG": ({"img": [b"GIF89a"] * 100}, "row 0: not a whole PNG picture"),
    "a bitmap": ({"img": [b"BM" + bytes(60)] * 100}, "row 0: not a whole PNG picture"),
    "too many pixels": ({"img": [PNG] * 7 + [BOMB] * 93}, "row 7: not a whole PNG picture (Dec"),
    "a long text": ({"img": [PNG] * 7 + [LONG_TEXT] * 93}, "row 7: not a whole PNG picture (Val"),
    "28 x 28": ({"img": [png(np.zeros((28, 28, 3), np.uint8))] * 100}, "row 0: a picture of 28 x "),
    "grey": (
        {"img": [png(np.zeros((32, 32, 3), np.uint8), "L")] * 100},
        "row 0: a picture of 32 x 32 in L",
    ),
    "label 10": ({"label": [0] * 99 + [10]}, "row 99: label 10"),
    "no label": ({"label": [None] * 100}, "row 0: label None"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_TABLES)
def test_faulty_tables_are_refused_by_file_and_row(tmp_path: Path, name: str) -> None:
    broken, part = BAD_TABLES[name]
    batches = write_batches(tmp_path / "made")
    write_tables(tmp_path / "data" / "image", batches, **broken)
    with pytest.raises(ValueError) as caught:
        prepare(Image(data_dir=tmp_path / "data"), tmp_path / "cache")
    assert f"train-00000-of-00001.parquet, {part}" in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"grey": "mean"}, "task.grey=mean: expected tf, pil or tensor"),
        ({"split": "random"}, "task.split=random: expected lra or stratified"),
        ({"source": "generated"}, "task.source=generated"),
        ({"val_fraction": 1.5}, "task.val_fraction=1.5"),
        ({"source": "hub", "path": "x"}, "task.path=x"),
        ({"num_test": 5}, "task.limit_test"),
    ],
)
def test_bad_settings_are_refused_by_key(tmp_path: Path, settings: Any, part: str) -> None:
    with pytest.raises(ValueError, match=part.replace(".", r"\.")):
        Image(data_dir=tmp_path, **settings)


def test_the_yaml_lists_every_key_with_the_class_default() -> None:
    file = ROOT / "configs/task/image.yaml"
    assert file.read_text().startswith("# @package _global_\n")
    task = yaml.safe_load(file.read_text())["task"]
    assert task.pop("_target_") == "lra.tasks.image.Image"
    fields = {f.name: f.default for f in dataclasses.fields(Image) if f.init}
    del fields["data_dir"]
    assert task == fields


def test_each_setting_makes_another_cache(tmp_path: Path) -> None:
    write_batches(tmp_path)
    settings: list[dict[str, Any]] = [
        {}, {"grey": "pil"}, {"grey": "tensor"}, {"split": "stratified"}, {"val_fraction": 0.2},
        {"split": "stratified", "split_seed": 1}, {"source": "synthetic"},
        {"source": "synthetic", "synthetic_seed": 1}, {"source": "synthetic", "num_train": 9},
    ]  # fmt: skip
    tasks = [Image(data_dir=tmp_path, **s) for s in settings]
    assert len({cache_folder(task, tmp_path / "cache") for task in tasks}) == len(settings)
    assert tasks[0].deviations() == []
    assert tasks[1].deviations() == ["task.grey=pil (benchmark: tf)"]
    assert tasks[2].protocol["grey"] == "tensor"


def test_decoding_shows_the_picture(tmp_path: Path) -> None:
    values = np.zeros(NUM_PIXELS, np.uint8)
    values[33] = 255
    lines = Image(data_dir=tmp_path).decode(values).split("\n")
    assert [len(line) for line in lines] == [32] * 32
    assert lines[1] == " @" + " " * 30


# --- the stand-in ---


def test_stand_in_is_deterministic_balanced_and_has_black(tmp_path: Path) -> None:
    task = Image(data_dir=tmp_path, source="synthetic", num_train=100)
    found = rows(task)
    assert found == rows(dataclasses.replace(task))
    assert found != rows(dataclasses.replace(task, synthetic_seed=1))
    assert [len(rows(task, split)) for split in SPLITS] == [100, 200, 200]
    assert np.bincount([label for _, label in found]).tolist() == [10] * 10
    for pixels, _ in found:
        assert len(pixels) == 1024
        assert pixels.count(0) >= 64
    assert task.kind == "synthetic"


def test_stand_in_is_learnable_from_brightness(tmp_path: Path) -> None:
    task = Image(data_dir=tmp_path, source="synthetic")
    x = np.array([np.median(list(pixels)) for pixels, _ in rows(task, "val")])
    y = np.array([label for _, label in rows(task, "val")])
    assert (((x - 20) / 23).round().clip(0, 9) == y).mean() > 0.98


def test_preparation_is_the_same_for_any_number_of_workers(tmp_path: Path) -> None:
    write_batches(tmp_path / INNER)
    for source in ("files", "synthetic"):
        sums = set()
        for workers in (0, 1, 4):
            task = Image(data_dir=tmp_path, source=source)  # type: ignore[arg-type]
            folder = prepare(task, tmp_path / f"{source}{workers}", num_workers=workers).folder
            sums.add(tuple(file_sha256(file) for file in sorted(folder.rglob("*.npy"))))
        assert len(sums) == 1


# --- the reference pictures ---


@needs_reference
def test_reference_pictures(tmp_path: Path) -> None:
    dataset = prepare(Image(data_dir=REFERENCE), tmp_path / "cache")
    splits = dataset.meta["splits"]
    assert [splits[split]["num_examples"] for split in SPLITS] == [900, 100, 200]
    counts = [111, 105, 100, 119, 91, 92, 96, 88, 96, 102]
    both = np.add(splits["train"]["label_histogram"], splits["val"]["label_histogram"])
    assert both.tolist() == counts
    for encoding, key in (("bytes", b"data"), ("latin1", "data")):
        with (REFERENCE / INNER / "data_batch_5").open("rb") as file:
            data = pickle.load(file, encoding=encoding)[key]
        red = data[-100:, :1024].astype(int)
        green, blue = data[-100:, 1024:2048], data[-100:, 2048:]
        assert np.array_equal(green, 20 + 3 * red // 4)
        assert np.array_equal(blue, 255 - red // 2)
        expected = 0.2989 * red + 0.587 * green + 0.114 * blue
        found = np.array([dataset.val.sequence(i) for i in range(100)])
        assert np.abs(found - expected).max() <= 1


@needs_reference
def test_reference_archive_and_nestings(tmp_path: Path) -> None:
    inner = REFERENCE / INNER
    write_tar(tmp_path / "cifar-10-python.tar.gz", inner)
    archive = prepare(Image(data_dir=tmp_path), tmp_path / "c1")
    folder = prepare(Image(data_dir=REFERENCE), tmp_path / "c2")
    for split in SPLITS:
        assert archive.meta["splits"][split]["sha256"] == folder.meta["splits"][split]["sha256"]
    shutil.copytree(inner, tmp_path / "x" / "image" / INNER)
    shutil.copytree(inner, tmp_path / "y")
    fingerprints = {cache_folder(Image(data_dir=d), tmp_path / "c2")
                    for d in (REFERENCE, tmp_path / "x", tmp_path / "y")}  # fmt: skip
    assert len(fingerprints) == 1
