"""Text: bytes as they stand, splits, places, faults, the stand-in, the reference reviews."""

from __future__ import annotations

import dataclasses
import io
import os
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from lra.tasks.batches import file_sha256
from lra.tasks.cache import Dataset, cache_folder, prepare
from lra.tasks.task import SPLITS
from lra.tasks.text import Text
from tests import programs

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT.parent / "shared" / "data"
needs_reference = pytest.mark.skipif(not REFERENCE.is_dir(), reason="no reference data here")

Tree = dict[str, bytes]  # path below aclImdb -> content


def make_reviews(train: int = 20, test: int = 6) -> Tree:
    """`train` and `test` reviews of each class, all different."""
    return {
        f"{split}/{name}/{i}_{rating}.txt": f"{split} {name} review {i} ".encode() * (i + 1)
        for split, size in (("train", train), ("test", test))
        for name, rating in (("neg", 2), ("pos", 9))
        for i in range(size)
    }


def write_tree(folder: Path, reviews: Tree) -> Path:
    for name, content in reviews.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return folder


def write_tar(file: Path, reviews: Tree, mode: Any = "w:gz", prefix: str = "aclImdb/") -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, mode) as tar:
        for name, content in reviews.items():
            member = tarfile.TarInfo(prefix + name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return file


def write_tables(folder: Path, reviews: Tree, kind: str = "parquet") -> Path:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        chosen = [n for n in reviews if n.startswith(split)]
        table = pa.table(
            {
                "text": [reviews[name].decode() for name in chosen],
                "label": [int("/pos/" in name) for name in chosen],
            }
        )
        if kind == "parquet":
            pq.write_table(table, folder / f"{split}-00000-of-00001.parquet", row_group_size=7)
            continue
        opener = pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file
        (folder / split).mkdir()
        path = folder / split / "data-00000-of-00001.arrow"
        with pa.OSFile(str(path), "wb") as file, opener(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=7)
    return folder


def rows(task: Text) -> dict[str, list[tuple[bytes, int]]]:
    return {
        split: [(bytes(e.sequences[0]), e.label) for e in task.examples(split)] for split in SPLITS
    }


def hashes(dataset: Dataset) -> dict[str, Any]:
    return {split: report["sha256"] for split, report in dataset.meta["splits"].items()}


# --- bytes ---


def ids_of(tmp_path: Path, review: bytes, max_length: int = 4000) -> list[int]:
    """Ids of one review after its way through the cache."""
    reviews = make_reviews() | {"test/neg/0_1.txt": review}
    task = Text(data_dir=write_tree(tmp_path / "data", reviews), max_length=max_length)
    batch = prepare(task, tmp_path / "cache").test.batch(np.array([0]))
    return batch.tokens_BSL[0, 0, : batch.lengths_BS[0, 0]].tolist()


@pytest.mark.parametrize(
    ("review", "ids"),
    [
        (b"C", [68]),
        ("é".encode(), [195 + 1, 169 + 1]),
        (b"\x00\xff", [1, 256]),
        (b"a\x00\x00", [98, 1, 1]),
        (b"a\xc2\x85b\x96\r\n\x0c\x1c", [98, 195, 134, 99, 151, 14, 11, 13, 29]),
        (b"\xef\xbb\xbfx", [240, 188, 192, 121]),
        (b"", []),
    ],
)
def test_ids_are_bytes_plus_one(tmp_path: Path, review: bytes, ids: list[int]) -> None:
    assert ids_of(tmp_path, review) == ids


def test_length_counts_bytes_not_characters(tmp_path: Path) -> None:
    line = "né – “ï” 😀 où"
    assert (len(line), len(line.encode())) == (13, 25)
    assert len(ids_of(tmp_path, line.encode())) == 25


def test_a_cut_within_a_letter_is_kept(tmp_path: Path) -> None:
    ids = ids_of(tmp_path, "café".encode(), max_length=4)
    assert ids == [0x63 + 1, 0x61 + 1, 0x66 + 1, 0xC3 + 1]
    assert Text(data_dir=tmp_path).decode(np.array(ids, np.uint8) - 1) == "caf\\xc3"


def test_every_byte_has_an_embedding(tmp_path: Path) -> None:
    task = Text(data_dir=tmp_path)
    assert task.vocab_size == 257
    ids = torch.tensor(ids_of(tmp_path, bytes(range(256))))
    assert ids.min() == 1
    assert torch.nn.Embedding(task.vocab_size, 2, padding_idx=0)(ids).shape == (256, 2)


def test_an_empty_review_is_a_row_of_length_0(tmp_path: Path) -> None:
    reviews = make_reviews() | {"train/pos/3_8.txt": b"", "test/pos/0_8.txt": b""}
    dataset = prepare(Text(data_dir=write_tree(tmp_path, reviews)), tmp_path / "cache")
    assert len(dataset.train) + len(dataset.val) == 41  # 3_9.txt is there as well
    assert (dataset.test.lengths == 0).sum() == 1
    batch = dataset.test.batch(np.argsort(dataset.test.lengths)[:2])
    assert batch.lengths_BS[0, 0] == 0
    assert not batch.tokens_BSL[0].any()


# --- order and splits ---


def test_order_is_by_class_then_number_and_the_rest_is_ignored(tmp_path: Path) -> None:
    reviews = make_reviews(train=12)
    noise = {
        "train/unsup/0_0.txt": b"unlabelled",
        "train/pos/._0_9.txt": b"left by an archiver",
        "train/pos/notes.md": b"no review",
        "train/urls_pos.txt": b"http://",
        "test/labeledBow.feat": b"0 1:2",
        "imdb.vocab": b"the",
    }
    names = list(reviews)
    shuffled = {name: reviews[name] for name in np.random.default_rng(0).permutation(names)}
    task = Text(data_dir=write_tree(tmp_path, noise | shuffled), validation="test")
    assert rows(task)["train"] == [
        (reviews[name], int("/pos/" in name)) for name in names if name.startswith("train")
    ]
    assert [text for text, _ in rows(task)["train"]][2] == reviews["train/neg/2_2.txt"]


@pytest.mark.parametrize(("fraction", "expected"), [(0.25, (30, 10, 12)), (0.1, (36, 4, 12))])
def test_val_is_a_stratified_part_of_train(
    tmp_path: Path, fraction: float, expected: tuple[int, int, int]
) -> None:
    task = Text(data_dir=write_tree(tmp_path, make_reviews()), val_fraction=fraction)
    found = rows(task)
    assert tuple(len(found[split]) for split in SPLITS) == expected
    for split in SPLITS:
        assert sum(label for _, label in found[split]) == len(found[split]) // 2
    texts = [text for split in SPLITS for text, _ in found[split]]
    assert len(set(texts)) == sum(expected)
    assert all(text.startswith(b"test") for text, _ in found["test"])
    assert not any(text.startswith(b"test") for text, _ in found["train"] + found["val"])


def test_a_tiny_class_still_has_a_validation_row(tmp_path: Path) -> None:
    found = rows(Text(data_dir=write_tree(tmp_path, make_reviews(train=2))))
    assert [len(found[split]) for split in SPLITS] == [2, 2, 12]
    assert sorted(label for _, label in found["val"]) == [0, 1]


def test_a_fraction_that_leaves_nothing_to_train_on_is_named(tmp_path: Path) -> None:
    task = Text(data_dir=write_tree(tmp_path, make_reviews()), val_fraction=0.9999)
    with pytest.raises(ValueError, match=r"task\.val_fraction=0\.9999: of 40 .* holds out all"):
        prepare(task, tmp_path / "cache")


def test_limits_keep_both_classes(tmp_path: Path) -> None:
    task = Text(data_dir=write_tree(tmp_path, make_reviews()), limit_train=4, limit_test=2)
    dataset = prepare(task, tmp_path / "cache")
    assert sorted(dataset.train.labels) == [0, 0, 1, 1]
    assert sorted(dataset.test.labels) == [0, 1]


def test_validation_on_test_uses_all_of_train(tmp_path: Path) -> None:
    write_tree(tmp_path, make_reviews())
    usual = Text(data_dir=tmp_path)
    published = Text(data_dir=tmp_path, validation="test")
    found = rows(published)
    assert [len(found[split]) for split in SPLITS] == [40, 12, 12]
    assert found["val"] == found["test"]
    assert sorted(found["train"]) == sorted(rows(usual)["train"] + rows(usual)["val"])
    assert (usual.protocol["validation"], published.protocol["validation"]) == ("val", "test")
    assert usual.official_sizes == {"train": 22_500, "val": 2_500, "test": 25_000}
    assert published.official_sizes == {"train": 25_000, "val": 25_000, "test": 25_000}
    assert cache_folder(usual, tmp_path / "c") != cache_folder(published, tmp_path / "c")


def test_the_split_follows_seed_and_content_only(tmp_path: Path) -> None:
    reviews = make_reviews()
    renamed = {
        f"{name.rsplit('/', 1)[0]}/{1000 - i}_7.txt": text
        for i, (name, text) in enumerate(reviews.items())
    }
    first = rows(Text(data_dir=write_tree(tmp_path / "a", reviews)))
    second = rows(Text(data_dir=write_tree(tmp_path / "b", renamed)))
    other = rows(Text(data_dir=tmp_path / "a", split_seed=1))
    assert sorted(first["val"]) == sorted(second["val"])
    assert sorted(first["val"]) != sorted(other["val"])


def test_equal_reviews_stay_on_one_side(tmp_path: Path) -> None:
    once = make_reviews()
    twice = once | {name.replace("_", "00_"): t for name, t in once.items()}
    assert len(twice) == 2 * len(once)
    for seed in range(5):
        found = rows(Text(data_dir=write_tree(tmp_path, twice), split_seed=seed))
        assert len(found["val"]) == 8
        assert not {text for text, _ in found["val"]} & {text for text, _ in found["train"]}


@pytest.mark.parametrize(
    ("ours", "theirs", "percent"),
    [
        ({}, {}, 0),
        ({}, {"validation": "test"}, 100),
        ({}, {"split_seed": 1}, 90),
        ({"split_seed": 2}, {"split_seed": 1, "val_fraction": 0.3}, 70),
        ({}, {"val_fraction": 0.2}, 0),
        ({"val_fraction": 0.4}, {"val_fraction": 0.1}, 75),
    ],
)
def test_other_splits_share_as_many_examples_as_is_said(
    tmp_path: Path, ours: dict[str, Any], theirs: dict[str, Any], percent: int
) -> None:
    write_tree(tmp_path, make_reviews(train=400))
    task = Text(data_dir=tmp_path, **ours)
    train, val = set(rows(Text(data_dir=tmp_path, **theirs))["train"]), rows(task)["val"]
    share = 100 * sum(row in train for row in val) / len(val)
    assert abs(share - percent) < (8 if "split_seed" in theirs else 1)
    said = task.overlaps({"_target_": "lra.tasks.text.Text", "max_length": 9, **theirs})
    assert said.partition(" %")[0] == (f"about {percent}" if percent else "")
    for key, value in theirs.items() if percent else ():
        assert f"task.{key}={value} there, {getattr(task, key)} here" in said


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"validation": "test"}, {}),  # its train may be theirs; nothing of test is
        ({"source": "synthetic"}, {"source": "synthetic", "validation": "test"}),
        ({}, {"split_seed": 1, "source": "synthetic"}),
        ({}, {"split_seed": 1, "_target_": "lra.tasks.image.Image"}),
        ({}, {"validation": "test", "val_fraction": "most"}),
    ],
)
def test_what_is_other_data_or_no_config_has_no_overlaps(
    tmp_path: Path, ours: dict[str, Any], theirs: dict[str, Any]
) -> None:
    assert Text(data_dir=tmp_path, **ours).overlaps(theirs) == ""
    limited = Text(data_dir=tmp_path).overlaps({"split_seed": 1, "limit_train": 10})
    assert limited.startswith("up to 90 % of the validation examples")


# --- places and forms ---


@pytest.mark.parametrize("form", ["tar.gz", "tar", "flat tar", "parquet", "stream", "file"])
def test_every_form_gives_the_same_examples(tmp_path: Path, form: str) -> None:
    reviews = make_reviews()
    tree = rows(Text(data_dir=write_tree(tmp_path / "tree", reviews)))
    data = tmp_path / "data"
    backwards = dict(reversed(reviews.items()))
    if form == "tar.gz":
        write_tar(data / "aclImdb_v1.tar.gz", backwards | {"train/unsup/0_0.txt": b"none"})
    elif form == "tar":
        write_tar(data / "text" / "aclImdb_v1.tar", backwards, "w")
    elif form == "flat tar":
        write_tar(data / "aclImdb_v1.tar.gz", backwards, prefix="./")
    else:
        write_tables(data / "imdb", reviews, form)
    task = Text(data_dir=data)
    before = sorted(data.rglob("*"))
    found = rows(task)
    assert found == tree
    assert sorted(data.rglob("*")) == before  # nothing is unpacked
    assert task.kind == "files"
    assert str(data) in task.describe_source()


def test_the_hub_gives_the_same_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    reviews = make_reviews()
    asked = []

    def load_dataset(name: str, revision: str | None) -> Any:
        asked.append((name, revision))
        features = datasets.Features(
            {
                "text": datasets.Value("string"),
                "label": datasets.ClassLabel(names=["neg", "pos"]),
            }
        )
        made = {}
        for split in ("train", "test", "unsupervised"):
            chosen = [n for n in reviews if n.startswith(split)]
            columns = {
                "text": [reviews[name].decode() for name in chosen],
                "label": [int("/pos/" in name) for name in chosen],
            }
            made[split] = datasets.Dataset.from_dict(columns, features=features)
        return datasets.DatasetDict(made)

    monkeypatch.setattr("lra.tasks.columnar._unreachable", lambda endpoint: "")
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    task = Text(data_dir=tmp_path / "none", source="hub", hub_revision="abc")
    assert rows(task) == rows(Text(data_dir=write_tree(tmp_path / "tree", reviews)))
    assert asked == [("stanfordnlp/imdb", "abc")]  # one visit for three splits
    assert task.source_files() == []
    assert task.settings() != dataclasses.replace(task, hub_revision=None).settings()


def test_three_nestings_have_one_fingerprint(tmp_path: Path) -> None:
    reviews = make_reviews()
    folders = [tmp_path / "a", tmp_path / "b" / "aclImdb", tmp_path / "c" / "text" / "aclImdb"]
    tasks = [Text(data_dir=tmp_path / name) for name in "abc"]
    for folder in folders:
        write_tree(folder, reviews)
    tasks += [Text(data_dir=tmp_path / "none", path=str(folder)) for folder in folders]
    assert len({cache_folder(task, tmp_path / "cache") for task in tasks}) == 1
    (folders[0] / "train/pos/3_9.txt").write_bytes(b"changed")
    assert cache_folder(tasks[0], tmp_path / "cache") != cache_folder(tasks[1], tmp_path / "cache")


def test_each_setting_and_each_byte_makes_another_cache(tmp_path: Path) -> None:
    reviews = make_reviews()
    write_tree(tmp_path, reviews)
    settings: list[dict[str, Any]] = [
        {},
        {"max_length": 16},
        {"split_seed": 1},
        {"val_fraction": 0.2},
        {"validation": "test"},
        {"source": "synthetic"},
        {"source": "synthetic", "validation": "test"},
        {"source": "synthetic", "synthetic_seed": 1},
        {"source": "synthetic", "num_val": 7},
    ]
    folders = [cache_folder(Text(data_dir=tmp_path, **s), tmp_path / "cache")[0] for s in settings]
    assert len(set(folders)) == len(settings)
    short = prepare(Text(data_dir=tmp_path, max_length=8), tmp_path / "cache")
    assert short.train.lengths.max() == 8
    longer = prepare(Text(data_dir=tmp_path, max_length=16), tmp_path / "cache")
    assert longer.train.lengths.max() == 16
    file = tmp_path / "test/neg/2_2.txt"
    file.write_bytes(file.read_bytes().replace(b"t", b"T", 1))
    again = prepare(Text(data_dir=tmp_path, max_length=16), tmp_path / "cache")
    assert again.folder != longer.folder
    assert hashes(again)["test"] != hashes(longer)["test"]
    assert hashes(again)["train"] == hashes(longer)["train"]


def test_preparation_is_the_same_for_any_number_of_workers(tmp_path: Path) -> None:
    write_tree(tmp_path / "data", make_reviews(train=50))
    for source in ("files", "synthetic"):
        task = Text(data_dir=tmp_path / "data", source=source)
        made = [prepare(task, tmp_path / f"{source}{n}", num_workers=n) for n in (0, 1, 4)]
        assert hashes(made[0]) == hashes(made[1]) == hashes(made[2])


def test_equal_copies_are_fine_and_links_are_no_copies(tmp_path: Path) -> None:
    reviews = make_reviews()
    write_tree(tmp_path / "aclImdb", reviews)
    (tmp_path / "imdb").symlink_to(tmp_path / "aclImdb")
    write_tree(tmp_path / "text" / "aclImdb", reviews)
    write_tar(tmp_path / "aclImdb_v1.tar.gz", reviews)
    write_tar(tmp_path / "text" / "aclImdb_v1.tar", reviews, "w")
    task = Text(data_dir=tmp_path)
    assert task.place.path == tmp_path / "aclImdb"
    assert len(rows(task)["train"]) == 36


@pytest.mark.parametrize("second", ["tree", "archive", "parquet", "missing file"])
def test_places_that_differ_are_refused(tmp_path: Path, second: str) -> None:
    reviews = make_reviews()
    first = write_tree(tmp_path / "aclImdb", reviews)
    other = reviews | {"train/neg/7_2.txt": b"other"}
    if second == "tree":
        place = write_tree(tmp_path / "text" / "aclImdb", other)
    elif second == "archive":
        place = write_tar(tmp_path / "aclImdb_v1.tar.gz", other)
    elif second == "parquet":
        place = write_tables(tmp_path / "imdb", other)
    else:
        place = write_tree(tmp_path / "text", reviews)
        (place / "test/pos/1_9.txt").unlink()
    with pytest.raises(ValueError) as caught:
        prepare(Text(data_dir=tmp_path), tmp_path / "cache")
    message = str(caught.value)
    assert str(first) in message
    assert str(place) in message
    assert "task.path" in message
    assert len(rows(Text(data_dir=tmp_path, path=str(first)))["train"]) == 36


def test_nothing_found_names_every_place_and_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:
        prepare(Text(data_dir=tmp_path / "data"), tmp_path / "cache")
    message = str(caught.value)
    for part in ("data/aclImdb", "data/text/aclImdb", "data/imdb", "data/aclImdb_v1.tar.gz",
                 "does not exist", "https://ai.stanford.edu", f"get_data.sh {tmp_path}/data text",
                 "task.source=hub", "task.source=synthetic", "task.path"):  # fmt: skip
        assert part in message
    assert not (tmp_path / "cache").exists() or not any((tmp_path / "cache").glob("text-*"))


def test_with_a_path_no_other_place_is_taken(tmp_path: Path) -> None:
    write_tree(tmp_path / "aclImdb", make_reviews())
    with pytest.raises(ValueError, match="elsewhere does not exist"):
        rows(Text(data_dir=tmp_path, path=str(tmp_path / "elsewhere")))


# --- faults: what is written, and what the message must name ---


def _no_class(reviews: Tree) -> Tree:
    return {name: text for name, text in reviews.items() if not name.startswith("test/pos")}


def _pipe(folder: Path) -> None:
    os.mkfifo(write_tree(folder, make_reviews()) / "train/neg/99_1.txt")


def _large(folder: Path) -> None:
    with (write_tree(folder, make_reviews()) / "train/neg/99_1.txt").open("wb") as file:
        file.truncate((64 << 20) + 1)


def _directory(folder: Path) -> None:
    (write_tree(folder, make_reviews()) / "train/neg/99_1.txt").mkdir()


def _table(folder: Path, **columns: Any) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    write_tables(folder / "imdb", make_reviews())
    pq.write_table(pa.table(columns), folder / "imdb" / "train-00000-of-00001.parquet")


def _days(*numbers: int) -> Any:
    pa = pytest.importorskip("pyarrow")
    return pa.array(numbers, pa.date32())


def _not_utf8(folder: Path, kind: str, first: int = 1030) -> None:
    """A text in Latin-1 in a column that says UTF-8, in the second of the batches that are read."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    write_tables(folder / "imdb", make_reviews(), "parquet" if kind == "parquet" else "file")
    raw = pa.array([b"good"] * first + ["caf\xe9".encode("latin-1")] * 2)
    table = pa.table(
        {
            "text": pa.Array.from_buffers(pa.string(), len(raw), raw.buffers()),
            "label": [0] * len(raw),
        }
    )
    if kind == "parquet":
        pq.write_table(table, folder / "imdb" / "train-00000-of-00001.parquet")
        return
    file = folder / "imdb/train/data-00000-of-00001.arrow"
    with pa.OSFile(str(file), "wb") as stream, pa.ipc.new_file(stream, table.schema) as writer:
        writer.write_table(table, max_chunksize=1000)


def _column_not_utf8(folder: Path) -> None:
    _table(folder, text=["a"], label=[0], remarque=["b"])
    file = folder / "imdb" / "train-00000-of-00001.parquet"
    # Arrow's own description of the columns has been left out by then.
    pq = pytest.importorskip("pyarrow.parquet")
    pq.write_table(pq.read_table(file), file, store_schema=False)
    file.write_bytes(file.read_bytes().replace(b"remarque", b"remarqu\xe9"))


def _cut_table(folder: Path, kind: str) -> None:
    write_tables(folder / "imdb", make_reviews(), kind)
    file = next(f for f in (folder / "imdb").rglob("*train*") if f.is_file()) if kind == "parquet" \
        else folder / "imdb/train/data-00000-of-00001.arrow"  # fmt: skip
    file.write_bytes(file.read_bytes()[:-100])


def _wrong_offset(folder: Path) -> None:
    """The last review of a batch seems to end far beyond the text."""
    write_tables(folder / "imdb", make_reviews(), "file")
    file = folder / "imdb/train/data-00000-of-00001.arrow"
    first = [len(review) for name, review in make_reviews().items() if name.startswith("train")][:7]
    offsets = np.cumsum([0, *first], dtype="<i4")
    broken = offsets.copy()
    broken[-1] += 100_000
    content = file.read_bytes()
    assert content.count(offsets.tobytes()) >= 1
    file.write_bytes(content.replace(offsets.tobytes(), broken.tobytes(), 1))


def _both_kinds(folder: Path) -> None:
    write_tables(folder / "imdb", make_reviews())
    write_tables(folder / "imdb", make_reviews(), "stream")


def _train_only(folder: Path) -> None:
    (write_tables(folder / "imdb", make_reviews()) / "test-00000-of-00001.parquet").unlink()


FAULTS = {
    "a class is missing": (lambda d: write_tree(d, _no_class(make_reviews())), ["test/pos"]),
    "only test": (lambda d: write_tree(d, make_reviews(train=0)), ["train/neg"]),
    "a pipe": (_pipe, ["99_1.txt", "plain file"]),
    "a folder called .txt": (_directory, ["99_1.txt", "plain file"]),
    "a huge review": (_large, ["99_1.txt", "67108865 bytes"]),
    "archive without a class": (
        lambda d: write_tar(d / "aclImdb_v1.tar.gz", _no_class(make_reviews())),
        ["aclImdb_v1.tar.gz", "test/pos"],
    ),
    "archive with two trees": (
        lambda d: write_tar(
            d / "aclImdb_v1.tar.gz",
            make_reviews() | {f"more/{n}": t for n, t in make_reviews().items()},
        ),
        ["aclImdb_v1.tar.gz", "aclImdb/more/train/neg/0_2.txt"],
    ),
    "archive that is a page": (
        lambda d: (d / "aclImdb_v1.tar.gz").write_bytes(b"<html>404</html>"),
        ["aclImdb_v1.tar.gz", "not a whole tar archive"],
    ),
    "label out of range": (
        lambda d: _table(d, text=["a", "b"], label=[0, 2]),
        ["train-00000-of-00001.parquet, row 1", "label 2"],
    ),
    "label of the unlabelled": (
        lambda d: _table(d, text=["a", "b"], label=[-1, -1]),
        ["train-00000-of-00001.parquet, row 0", "label -1"],
    ),
    "label is no whole number": (
        lambda d: _table(d, text=["a"], label=[0.5]),
        ["row 0", "label 0.5"],
    ),
    "label is another word": (
        lambda d: _table(d, text=["a", "b"], label=["pos", "good"]),
        ["row 1", "label 'good', expected 0 to 1 or one of neg, pos"],
    ),
    "no text": (lambda d: _table(d, text=["a", None], label=[0, 1]), ["row 1", "text None"]),
    "text is a number": (lambda d: _table(d, text=[5], label=[0]), ["row 0", "text 5"]),
    "other columns": (
        lambda d: _table(d, review=["a"], sentiment=[0]),
        ["train-00000-of-00001.parquet", "no column text", "review, sentiment"],
    ),
    "cut parquet": (lambda d: _cut_table(d, "parquet"), ["train-00000-of-00001.parquet", "whole"]),
    "cut arrow": (lambda d: _cut_table(d, "file"), ["data-00000-of-00001.arrow", "whole"]),
    "arrow offset": (_wrong_offset, ["data-00000-of-00001.arrow", "whole"]),
    "parquet text in Latin-1": (
        lambda d: _not_utf8(d, "parquet"),
        ["train-00000-of-00001.parquet, row 1030: text that is not UTF-8 in the column text"],
    ),
    "arrow text in Latin-1": (
        lambda d: _not_utf8(d, "file"),
        ["data-00000-of-00001.arrow, row 1030: text that is not UTF-8 in the column text"],
    ),
    "column in Latin-1": (
        _column_not_utf8,
        ["train-00000-of-00001.parquet: the name of a column is not UTF-8"],
    ),
    "no day": (
        lambda d: _table(d, text=["a", "b"], label=_days(0, 1 << 30)),
        ["train-00000-of-00001.parquet, row 1: column label: "],
    ),
    "both kinds of tables": (_both_kinds, [".arrow and .parquet", "imdb"]),
    "train table only": (_train_only, ["imdb", "no file of the test split"]),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faulty_sources_are_refused_by_name(tmp_path: Path, name: str) -> None:
    write, parts = FAULTS[name]
    (tmp_path / "data").mkdir()
    write(tmp_path / "data")
    with pytest.raises(ValueError) as caught:
        prepare(Text(data_dir=tmp_path / "data"), tmp_path / "cache")
    for part in parts:
        assert part in str(caught.value)
    assert not list((tmp_path / "cache").glob("text-*/meta.json"))


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"source": "generated"}, "task.source=generated: expected auto, files, hub or synthetic"),
        ({"validation": "dev"}, "task.validation=dev: expected val or test"),
        ({"val_fraction": 0.0}, "task.val_fraction=0.0"),
        ({"val_fraction": 1.0}, "task.val_fraction=1.0"),
        ({"source": "hub", "path": "x"}, "task.path=x"),
        ({"source": "synthetic", "path": "x"}, "task.path=x"),
        ({"num_train": 5}, "task.limit_train"),
        ({"source": "synthetic", "num_test": 0}, "task.num_test=0"),
        ({"source": "synthetic", "synthetic_seed": -1}, "task.synthetic_seed=-1"),
        ({"max_length": 0}, "task.max_length=0"),
    ],
)
def test_bad_settings_are_refused_by_key(tmp_path: Path, settings: Any, part: str) -> None:
    with pytest.raises(ValueError, match=part.replace(".", r"\.")):
        Text(data_dir=tmp_path, **settings)


def test_the_yaml_lists_every_key_with_the_class_default() -> None:
    file = ROOT / "configs/task/text.yaml"
    assert file.read_text().startswith("# @package _global_\n")
    task = yaml.safe_load(file.read_text())["task"]
    assert task.pop("_target_") == "lra.tasks.text.Text"
    fields = {f.name: f.default for f in dataclasses.fields(Text) if f.init}
    del fields["data_dir"]
    assert task == fields


# --- the stand-in ---


def test_stand_in_is_deterministic_balanced_and_like_reviews(tmp_path: Path) -> None:
    task = Text(data_dir=tmp_path, source="synthetic")
    found = rows(task)
    assert found == rows(Text(data_dir=tmp_path, source="synthetic"))
    assert found != rows(Text(data_dir=tmp_path, source="synthetic", synthetic_seed=1))
    assert [len(found[split]) for split in SPLITS] == [2000, 200, 200]
    assert task.kind == "synthetic"
    lengths = np.array([len(text) for text, _ in found["train"]])
    assert 900 < np.median(lengths) < 1060
    assert 0.005 < (lengths > 4000).mean() < 0.03
    for split in SPLITS:
        assert sum(label for _, label in found[split]) == len(found[split]) // 2
    assert len({text for split in SPLITS for text, _ in found[split]}) == 2400


def test_stand_in_is_learnable_from_counts_of_bytes(tmp_path: Path) -> None:
    found = rows(Text(data_dir=tmp_path, source="synthetic", num_train=200, num_val=100))

    def counts(split: str) -> tuple[np.ndarray, np.ndarray]:
        texts = [np.frombuffer(text, np.uint8) for text, _ in found[split]]
        features = np.stack([np.bincount(t, minlength=256) / len(t) for t in texts])
        return features, np.array([label for _, label in found[split]])

    x, y = counts("train")
    centres = np.stack([x[y == label].mean(axis=0) for label in (0, 1)])
    x, y = counts("val")
    nearest = ((x[:, None] - centres) ** 2).sum(axis=-1).argmin(axis=1)
    assert (nearest == y).mean() > 0.98


def test_opening_a_ready_cache_takes_no_memory_for_tokens(tmp_path: Path) -> None:
    program = """
import resource, sys
from pathlib import Path
from lra.tasks.cache import prepare
from lra.tasks.text import Text
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
task = Text(data_dir=Path("."), source="synthetic", num_train=20_000, num_val=10, num_test=10)
before = resident()
dataset = prepare(task, Path(sys.argv[1]))
print(resident() - before, len(dataset.train.tokens))
"""
    if not Path("/proc/self/statm").exists():
        pytest.skip("needs /proc")
    for _ in ("build", "open"):
        done = programs.call("-c", program, tmp_path, cwd=ROOT)
        assert done.returncode == 0, done.stderr
    grown, size = map(int, done.stdout.split())
    assert size > 20e6
    assert grown < 10e6


# --- the reference reviews ---


@needs_reference
def test_reference_reviews(tmp_path: Path) -> None:
    task = Text(data_dir=REFERENCE)
    dataset = prepare(task, tmp_path / "cache")
    splits = dataset.meta["splits"]
    assert [splits[split]["num_examples"] for split in SPLITS] == [360, 40, 200]
    labels = [splits[split]["label_histogram"] for split in SPLITS]
    assert labels == [[180, 180], [20, 20], [100, 100]]
    assert splits["train"]["truncated"] + splits["val"]["truncated"] == 4
    assert splits["test"]["truncated"] == 4
    assert splits["test"]["longest_source"] == 6128
    assert max(splits[split]["longest_source"] for split in ("train", "val")) == 6098
    published = rows(Text(data_dir=REFERENCE, validation="test"))
    texts = [text for split in ("train", "test") for text, _ in published[split]]
    assert sum(b"<br /><br />" in text for text in texts) >= 300
    assert sum(b"\xc2\x85" in text or b"\xc2\x96" in text for text in texts) >= 100
    for (text, label), file in zip(published["train"], task.source_files()[:400], strict=True):
        assert text == file.read_bytes()
        assert label == (file.parent.name == "pos")


@needs_reference
def test_reference_reviews_in_every_form_and_nesting(tmp_path: Path) -> None:
    tree = REFERENCE / "aclImdb"
    reviews = {file.relative_to(tree).as_posix(): file.read_bytes() for file in tree.rglob("*.txt")}
    expected = hashes(prepare(Text(data_dir=REFERENCE), tmp_path / "c0"))
    places = [tmp_path / "flat", tmp_path / "deep" / "text" / "aclImdb"]
    for place in places:
        shutil.copytree(tree, place)
    fingerprints = {
        cache_folder(Text(data_dir=data), tmp_path / "c0")
        for data in (REFERENCE, places[0], tmp_path / "deep")
    }
    assert len(fingerprints) == 1
    write_tar(tmp_path / "tar" / "aclImdb_v1.tar.gz", reviews)
    labelled = {
        name: text for name, text in reviews.items() if name.split("/")[1] in ("pos", "neg")
    }
    ordered = sorted(labelled, key=lambda n: (n.split("/")[1], int(n.split("/")[2].split("_")[0])))
    write_tables(tmp_path / "table" / "imdb", {name: labelled[name] for name in ordered})
    for form in ("tar", "table"):
        task = Text(data_dir=tmp_path / form)
        assert hashes(prepare(task, tmp_path / f"c-{form}")) == expected


@needs_reference
def test_reference_cache_is_the_same_for_any_number_of_workers(tmp_path: Path) -> None:
    sums = set()
    for workers in (0, 1, 4):
        cache = tmp_path / str(workers)
        folder = prepare(Text(data_dir=REFERENCE), cache, num_workers=workers).folder
        sums.add(tuple(file_sha256(file) for file in sorted(folder.rglob("*.npy"))))
    assert len(sums) == 1
