"""Nothing that lies beside a task's data is taken, or passed over, without a word."""

from __future__ import annotations

import gzip
import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lra.tasks.cache import prepare
from lra.tasks.columnar import find_tables
from lra.tasks.image import Image
from lra.tasks.listops import FILES, ListOps
from lra.tasks.pathfinder import Pathfinder, PathX
from lra.tasks.retrieval import Retrieval
from lra.tasks.task import SPLITS, Task
from lra.tasks.text import Text
from tests.tasks import test_image, test_pathfinder, test_retrieval, test_text
from tests.tasks.test_listops import write_files

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

Report = tuple[dict[str, int], str]


def report(task: Task, folder: Path) -> Report:
    """Examples of each split, and the remarks as one text."""
    data = prepare(task, folder, num_workers=1)
    return {split: len(getattr(data, split)) for split in SPLITS}, "\n".join(data.meta["remarks"])


# --- tables ---


def save_to_disk(folder: Path, parts: int = 1, cached: bool = True, state: Any = None) -> Path:
    """40 reviews of train and 12 of test as `save_to_disk` leaves them, after `.map`."""
    test_text.write_tables(folder, test_text.make_reviews(), "stream")
    (folder / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    for split in ("train", "test"):
        whole = folder / split / "data-00000-of-00001.arrow"
        names = [f"data-{i:05}-of-{parts:05}.arrow" for i in range(parts)]
        if parts > 1:
            table = pa.ipc.open_stream(whole.read_bytes()).read_all()
            whole.unlink()
            for i, name in enumerate(names):
                rows = table.slice(i * table.num_rows // parts, table.num_rows // parts)
                with pa.ipc.new_stream(str(folder / split / name), table.schema) as writer:
                    writer.write_table(rows)
        listed = {"_data_files": [{"filename": name} for name in names], "_split": split}
        (folder / split / "state.json").write_text(json.dumps(listed if state is None else state))
        (folder / split / "dataset_info.json").write_text("{}")
        if cached:
            shutil.copy(folder / split / names[0], folder / split / "cache-0a1b2c3d.arrow")
    return folder


@pytest.mark.parametrize("parts", [1, 4])
def test_of_a_saved_data_set_only_what_it_lists_is_read(tmp_path: Path, parts: int) -> None:
    save_to_disk(tmp_path / "imdb", parts)
    sizes, remarks = report(Text(data_dir=tmp_path), tmp_path / "cache")
    assert sizes == {"train": 36, "val": 4, "test": 12}
    assert "not read (2): " in remarks
    for split in ("train", "test"):
        assert f"imdb/{split}/cache-0a1b2c3d.arrow: not listed in" in remarks


def test_a_data_set_that_the_library_saved_and_mapped(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    reviews = test_text.make_reviews()
    made = {}
    for split in ("train", "test"):
        names = [name for name in reviews if name.startswith(split)]
        columns = {
            "text": [reviews[name].decode() for name in names],
            "label": [int("/pos/" in name) for name in names],
        }
        made[split] = datasets.Dataset.from_dict(columns)
    datasets.DatasetDict(made).save_to_disk(str(tmp_path / "imdb"))
    saved = datasets.load_from_disk(str(tmp_path / "imdb"))
    saved.map(lambda row: {"text": row["text"] + "!"})
    saved["train"].filter(lambda row: row["label"] == 1)
    assert len(list((tmp_path / "imdb" / "train").glob("cache-*.arrow"))) == 2
    sizes, remarks = report(Text(data_dir=tmp_path), tmp_path / "cache")
    assert sizes == {"train": 36, "val": 4, "test": 12}
    assert "not read (3): " in remarks


def test_without_a_list_leftovers_are_known_by_their_names(tmp_path: Path) -> None:
    save_to_disk(tmp_path / "imdb")
    for split in ("train", "test"):
        (tmp_path / "imdb" / split / "state.json").unlink()
    shutil.copytree(tmp_path / "imdb" / "train", tmp_path / "imdb" / "train_old")
    sizes, remarks = report(Text(data_dir=tmp_path), tmp_path / "cache")
    assert sizes == {"train": 36, "val": 4, "test": 12}
    assert "train/cache-0a1b2c3d.arrow: left by the package datasets" in remarks
    assert "train_old/data-00000-of-00001.arrow: not listed in" in remarks


STATES = {
    "no JSON": "{",
    "an empty object": {},
    "no files": {"_data_files": []},
    "another form": {"_data_files": ["data-00000-of-00001.arrow"]},
    "a path": {"_data_files": [{"filename": "../test/data-00000-of-00001.arrow"}]},
    "a choice of rows": {
        "_data_files": [{"filename": "data-00000-of-00001.arrow"}],
        "_indices_data_files": [{"filename": "indices.arrow"}],
    },
}


@pytest.mark.parametrize("name", STATES)
def test_a_damaged_list_is_refused_by_name(tmp_path: Path, name: str) -> None:
    save_to_disk(tmp_path / "imdb")
    state = STATES[name]
    path = tmp_path / "imdb" / "train" / "state.json"
    path.write_text(state if isinstance(state, str) else json.dumps(state))
    with pytest.raises(ValueError, match=r"train/state.json: not what save_to_disk writes"):
        prepare(Text(data_dir=tmp_path), tmp_path / "cache")


def test_a_listed_file_that_is_missing_is_named(tmp_path: Path) -> None:
    save_to_disk(tmp_path / "imdb", parts=2)
    (tmp_path / "imdb/train/data-00001-of-00002.arrow").unlink()
    with pytest.raises(ValueError, match=r"train/state.json: lists data-00001-of-00002.arrow"):
        prepare(Text(data_dir=tmp_path), tmp_path / "cache")


def tables(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"never opened")
    return folder


TRAIN, TEST = "train-00000-of-00001.parquet", "test-00000-of-00001.parquet"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("train-00000-of-00001 (1).parquet", "a copy or a backup"),
        ("train-00000-of-00001 - Copy.parquet", "a copy or a backup"),
        ("train_backup.parquet", "a copy or a backup"),
        ("train-checkpoint.parquet", "a copy or a backup"),
        (".ipynb_checkpoints/train-00000-of-00001.parquet", "hidden"),
        ("._train-00000-of-00001.parquet", "hidden"),
        (".train.tmp.parquet", "hidden"),
        ("cache-train-00000.arrow", "left by the package datasets"),
        ("tmp_train.parquet", "left by the package datasets"),
        ("unsupervised-00000-of-00001.parquet", "of no split that is read"),
        ("validation-00000-of-00001.parquet", "of no split that is read"),
    ],
)
def test_copies_and_leftovers_of_tables_are_named_not_read(
    tmp_path: Path, name: str, reason: str
) -> None:
    found = find_tables(tables(tmp_path, TRAIN, TEST, name))
    assert {split: [f.name for f in files] for split, files in found.files.items()} == {
        "train": [TRAIN],
        "test": [TEST],
    }
    assert found.left_out == [f"{tmp_path / name}: {found.left_out[0].split(': ')[-1]}"]
    assert reason in found.left_out[0]


@pytest.mark.parametrize(
    ("names", "fault"),
    [
        ([TRAIN, "train.parquet", TEST], "are not 1 parts of one set"),
        ([TRAIN, "plain_text/" + TRAIN, TEST], "lie in several folders"),
        (["train-00000-of-00002.parquet", TEST], "are not 2 parts of one set"),
        (["train_a.parquet", "train_b.parquet", TEST], "are not one set of numbered files"),
        (["train_0.parquet", "train_2.parquet", TEST], "are not one set of numbered files"),
        (["train.parquet", "train-1.parquet", TEST], "are not one set of numbered files"),
    ],
)
def test_tables_that_are_no_set_are_refused(tmp_path: Path, names: list[str], fault: str) -> None:
    with pytest.raises(ValueError, match=f"files of the train split {fault}: .*move away"):
        find_tables(tables(tmp_path, *names))


@pytest.mark.parametrize(
    "names",
    [
        ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet"],
        ["train_0.parquet", "train_1.parquet"],
        ["train/0000.parquet", "train/0001.parquet"],
        ["train/part-1-ab12.c000.snappy.parquet", "train/part-2-ab12.c000.snappy.parquet"],
    ],
)
def test_whole_sets_are_taken(tmp_path: Path, names: list[str]) -> None:
    found = find_tables(tables(tmp_path, *names, TEST))
    assert [str(file.relative_to(tmp_path)) for file in found.files["train"]] == names
    assert found.left_out == []


def test_numbered_tables_are_read_by_number(tmp_path: Path) -> None:
    folder = tmp_path / "imdb"
    folder.mkdir()
    for split in ("train", "test"):
        for i in range(12):
            table = pa.table({"text": [f"{split} {i}"] * 2, "label": [0, 1]})
            pq.write_table(table, folder / f"{split}_{i}.parquet")
    found = find_tables(folder, ["train", "test"])
    assert [file.stem for file in found.files["train"]] == [f"train_{i}" for i in range(12)]


# --- other files ---


def images(folder: Path) -> None:
    test_image.write_batches(folder / "cifar-10-batches-py", size=10)


MAKE: dict[str, tuple[Callable[[Path], Any], Callable[..., Task], str]] = {
    "text": (
        lambda d: test_text.write_tree(d / "aclImdb", test_text.make_reviews()), Text,
        "aclImdb/train/pos",
    ),
    "image": (images, Image, "cifar-10-batches-py"),
    "listops": (lambda d: write_files(d / "listops-1000", ["[MAX 1 2 ]"]), ListOps, "listops-1000"),
    "retrieval": (lambda d: test_retrieval.write_files(d / "tsv_data"), Retrieval, "tsv_data"),
    "pathfinder": (
        lambda d: test_pathfinder.write_release(d / test_pathfinder.LEVEL, [4]), Pathfinder,
        f"{test_pathfinder.LEVEL}/metadata",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("task", "copied", "name"),
    [
        ("text", "3_9.txt", "3_9 (1).txt"),
        ("text", "3_9.txt", "3_9 copy.txt"),
        ("text", "3_9.txt", "3_9.txt~"),
        ("text", "3_9.txt", "._3_9.txt"),
        ("text", "3_9.txt", "3_9-checkpoint.txt"),
        ("image", "data_batch_1", "data_batch_1 (1)"),
        ("image", "data_batch_1", "data_batch_6"),
        ("listops", "basic_train.tsv", "basic_train (1).tsv"),
        ("listops", "basic_train.tsv", "basic_train.tsv.bak"),
        ("listops", "basic_train.tsv", "basic_train.tsv.gz"),
        ("listops", "basic_train.tsv", "._basic_train.tsv"),
        ("retrieval", "new_aan_pairs.train.tsv", "new_aan_pairs.train (1).tsv"),
        ("retrieval", "new_aan_pairs.train.tsv", "new_aan_pairs.train.tsv~"),
        ("pathfinder", "0.npy", "0 (1).npy"),
        ("pathfinder", "0.npy", "0-checkpoint.npy"),
        ("pathfinder", "0.npy", "._0.npy"),
        ("pathfinder", "0.npy", "0.npy.tmp"),
    ],
)
def test_copies_beside_the_data_change_nothing_and_are_named(
    tmp_path: Path, task: str, copied: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write, make, place = MAKE[task]
    write(tmp_path / "data")
    expected, remarks = report(make(data_dir=tmp_path / "data"), tmp_path / "before")
    assert remarks == ""
    folder = tmp_path / "data" / place
    shutil.copy(folder / copied, folder / name)
    capsys.readouterr()
    found, remarks = report(make(data_dir=tmp_path / "data"), tmp_path / "after")
    assert found == expected
    assert remarks.startswith(f"not read (1): {folder / name}: ")
    assert remarks in capsys.readouterr().err


def test_an_archive_with_copies_gives_the_reviews_alone(tmp_path: Path) -> None:
    reviews = test_text.make_reviews()
    more = {name.replace(".txt", " (1).txt"): text for name, text in list(reviews.items())[:2]}
    test_text.write_tar(tmp_path / "aclImdb_v1.tar.gz", reviews | more)
    sizes, remarks = report(Text(data_dir=tmp_path), tmp_path / "cache")
    assert sizes == {"train": 36, "val": 4, "test": 12}
    assert remarks.count("(1).txt'") == 2 and "2 members left out" in remarks


# --- data in another form ---


UNREAD = [
    (ListOps, "listops-1000/basic_train.csv"),
    (ListOps, "listops/data.json"),
    (ListOps, "listops-1000.zip"),
    (ListOps, "basic_train.csv"),
    (ListOps, "listops_train.csv"),
    (ListOps, "lra_release/listops-2000/basic_train.tsv"),
    (ListOps, "lra_release.zip"),
    (Pathfinder, "lra_release/lra_release.zip"),
    (ListOps, "lra_release/listops-1000.tar.gz"),
    (ListOps, "lra_release/lra_release/listops-1000/basic_train.csv"),
    (Pathfinder, "pathfinder32/train.npy"),
    (Pathfinder, "pathfinder32/curv_baseline/metadata/0.npy"),
    (Pathfinder, "pathfinder32.zip"),
    (Pathfinder, "lra_release/pathfinder32.tar.gz"),
    (Pathfinder, "pathfinder/train.npy"),
    (Pathfinder, "curv_contour_length_14/metadata/0.npy"),
    (PathX, "pathfinder128/train.parquet"),
    (PathX, "pathx.npz"),
    (Text, "aclImdb.zip"),
    (Text, "imdb/train.csv"),
    (Text, "imdb.parquet"),
    (Image, "cifar-10-binary.tar.gz"),
    (Image, "cifar-10-batches-bin/data_batch_1.bin"),
    (Image, "cifar10/train.npz"),
    (Retrieval, "tsv_data/train.parquet"),
    (Retrieval, "lra_release/tsv_data.zip"),
    (Retrieval, "aan/pairs.csv"),
]


@pytest.mark.parametrize(("make", "name"), UNREAD)
def test_data_in_a_form_that_is_not_read_are_an_error(
    tmp_path: Path, make: Callable[..., Any], name: str
) -> None:
    tables(tmp_path, name)
    with pytest.raises(ValueError) as caught:
        prepare(make(data_dir=tmp_path), tmp_path / "cache")
    message = str(caught.value)
    assert "cannot read" in message or "cannot be read" in message
    head = next(part for part in (tmp_path / name, *(tmp_path / name).parents)
                if str(part) in message)  # fmt: skip
    assert head != tmp_path
    if issubclass(make, ListOps | Pathfinder):  # type: ignore[arg-type]
        assert "task.source=generated" in message
        assert make(data_dir=tmp_path, source="generated").source_files() == []


def test_what_is_nobodys_data_does_not_stand_in_the_way(tmp_path: Path) -> None:
    tables(
        tmp_path, ".DS_Store", "listops/.gitkeep", "pathfinder32/Thumbs.db", "notes.txt",
        "listops-0123456789ab.lock", "pathfinder-0123456789ab/meta.json", "cifar-100-python.tar.gz",
        "pathfinder64/curv_baseline/metadata/0.npy",
    )  # fmt: skip
    (tmp_path / "listops-1000").mkdir()
    assert ListOps(data_dir=tmp_path).kind == "generated"
    assert Pathfinder(data_dir=tmp_path).kind == "generated"
    assert PathX(data_dir=tmp_path).kind == "generated"


def test_other_forms_beside_the_data_are_named(tmp_path: Path) -> None:
    for task, (write, make, _) in MAKE.items():
        write(tmp_path / task)
        name = {"text": "imdb/train.csv", "image": "cifar10/train.npz", "listops": "listops/a.json",
                "retrieval": "aan/pairs.csv", "pathfinder": "pathfinder32/a.npz"}[task]  # fmt: skip
        tables(tmp_path / task, name)
        _, remarks = report(make(data_dir=tmp_path / task), tmp_path / "cache")
        assert f"not read (1): {tmp_path / task / name}: not what is read" == remarks


def test_a_release_named_by_its_path_may_hold_other_tasks(tmp_path: Path) -> None:
    for task in ("listops", "retrieval", "pathfinder"):
        MAKE[task][0](tmp_path)
    for task in ("listops", "retrieval", "pathfinder"):
        make = MAKE[task][1]
        assert report(make(data_dir=tmp_path, path=str(tmp_path)), tmp_path / "cache")[1] == ""


def test_a_folder_that_may_not_be_looked_into_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "pathfinder32").mkdir()
    original = Path.iterdir

    def iterdir(self: Path) -> Any:
        if self != tmp_path:
            raise PermissionError(13, "Permission denied", str(self))
        return original(self)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    assert ListOps(data_dir=tmp_path).kind == "generated"
    (tmp_path / "cifar-10-secret").mkdir()
    with pytest.raises(ValueError, match="cannot read what is there: .*cifar-10-secret"):
        Image(data_dir=tmp_path).source_files()
    (tmp_path / "imdb").mkdir()
    with pytest.raises(OSError, match=r"imdb: cannot be read .*paths\.data or task\.path"):
        prepare(Text(data_dir=tmp_path), tmp_path / "cache")


# --- ListOps and Retrieval, compressed or as tables ---

EXPRESSIONS = {
    "train": ["[MAX 1 2 ]", "[MIN 3 [SM 4 9 ] ]"],
    "val": ["[MED 1 5 9 ]"],
    "test": ["7"],
}
VALUES = {"train": [2, 3], "val": [5], "test": [7]}


def listops_rows(task: ListOps) -> dict[str, list[tuple[str, int]]]:
    return {
        split: [(task.decode(e.sequences[0]), e.label) for e in task.examples(split)]
        for split in SPLITS
    }


EXPECTED = {split: list(zip(EXPRESSIONS[split], VALUES[split], strict=True)) for split in SPLITS}


def write_listops(folder: Path, form: str, types: Any = None, names: Any = None) -> Path:
    folder.mkdir(parents=True)
    for split in SPLITS:
        texts, values = EXPRESSIONS[split], VALUES[split]
        if form == "gz":
            lines = [f"{t}\t{v}\r\n" for t, v in zip(texts, values, strict=True)]
            content = "".join(["Source\tTarget\r\n", *lines]).encode()
            (folder / f"basic_{split}.tsv.gz").write_bytes(gzip.compress(content))
            continue
        source, target = types or (pa.string(), pa.int64())
        labels = values if not pa.types.is_string(target) else [str(v) for v in values]
        table = pa.table({"Source": pa.array(texts, source), "Target": pa.array(labels, target)})
        name = (names or "basic_{}.parquet").format({"val": "validation"}.get(split, split))
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, folder / name)
    return folder


@pytest.mark.parametrize("place", ["listops-1000", "listops", "lra_release/listops-1000"])
@pytest.mark.parametrize("form", ["gz", "parquet"])
def test_listops_is_read_compressed_or_as_tables(tmp_path: Path, form: str, place: str) -> None:
    write_listops(tmp_path / place, form)
    task = ListOps(data_dir=tmp_path)
    assert task.kind == "files" and str(tmp_path / place) in task.describe_source()
    assert listops_rows(task) == EXPECTED
    sizes, remarks = report(ListOps(data_dir=tmp_path), tmp_path / "cache")
    assert sizes == {"train": 2, "val": 1, "test": 1} and remarks == ""
    path = str(next((tmp_path / place).iterdir())) if form == "gz" else str(tmp_path / place)
    assert listops_rows(ListOps(data_dir=tmp_path / "none", path=path)) == EXPECTED


@pytest.mark.parametrize(
    ("types", "names"),
    [
        ((pa.large_string(), pa.int8()), "{}.parquet"),
        ((pa.string_view(), pa.uint16()), "{}-00000-of-00001.parquet"),
        ((pa.dictionary(pa.int32(), pa.string()), pa.string()), "{}/0000.parquet"),
    ],
)
def test_listops_tables_of_any_type_and_name(tmp_path: Path, types: Any, names: str) -> None:
    write_listops(tmp_path / "listops-1000", "parquet", types, names)
    assert listops_rows(ListOps(data_dir=tmp_path)) == EXPECTED


def test_faults_of_listops_in_other_forms_are_named(tmp_path: Path) -> None:
    folder = write_listops(tmp_path / "listops-1000", "gz")
    file = folder / "basic_val.tsv.gz"
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"basic_val.tsv.gz: not a whole gzip file"):
        prepare(ListOps(data_dir=tmp_path), tmp_path / "cache")
    file.unlink()
    with pytest.raises(ValueError, match=r"has no basic_val.tsv; expected all of"):
        prepare(ListOps(data_dir=tmp_path), tmp_path / "cache")
    shutil.rmtree(folder)
    write_listops(folder, "parquet")
    wrong = pa.table({"Source": ["7", "[MAX 1 2 ]"], "Target": [7, 1]})
    pq.write_table(wrong, folder / "basic_test.parquet")
    with pytest.raises(ValueError, match=r"basic_test.parquet, row 1: label 1, but the expression"):
        prepare(ListOps(data_dir=tmp_path), tmp_path / "cache")
    (folder / "basic_validation.parquet").unlink()
    with pytest.raises(ValueError, match=r"listops-1000 has no file of the val split"):
        prepare(ListOps(data_dir=tmp_path), tmp_path / "cache", num_workers=1)
    assert FILES[0] == "basic_train.tsv"


def test_pairs_are_read_compressed(tmp_path: Path) -> None:
    folder = test_retrieval.write_files(tmp_path / "plain" / "tsv_data")
    packed = tmp_path / "packed" / "tsv_data"
    packed.mkdir(parents=True)
    for file in folder.iterdir():
        (packed / f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
    tasks = [Retrieval(data_dir=tmp_path / name) for name in ("plain", "packed")]
    assert test_retrieval.pairs(tasks[0]) == test_retrieval.pairs(tasks[1])
    one = packed / "new_aan_pairs.test.tsv.gz"
    assert Retrieval(data_dir=tmp_path, path=str(one)).place.path == packed
    one.write_bytes(one.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"test.tsv.gz: not a whole gzip file"):
        prepare(Retrieval(data_dir=tmp_path / "packed"), tmp_path / "cache")


# --- line ends ---


def test_pairs_whose_lines_all_end_in_cr_lf_lose_them_and_it_is_said(tmp_path: Path) -> None:
    rows = b"1\tA\tB\tone\rend\ttwo\r\n0\tA\tC\tone\tthree\r\r\n1\tA\tD\t\tlast"
    test_retrieval.write_files(tmp_path / "lf", test_retrieval.GOOD)
    unix = prepare(Retrieval(data_dir=tmp_path / "lf"), tmp_path / "cache")
    assert unix.meta["remarks"] == []
    test_retrieval.write_files(tmp_path / "cr", rows)
    task = Retrieval(data_dir=tmp_path / "cr")
    assert test_retrieval.pairs(task) == [
        (b"one\rend", b"two", 1), (b"one", b"three\r", 0), (b"", b"last", 1)
    ]  # fmt: skip
    data = prepare(Retrieval(data_dir=tmp_path / "cr"), tmp_path / "cache")
    assert data.meta["remarks"] == [
        "new_aan_pairs.train.tsv: all 2 lines end in CR LF, which is none of the documents'"
    ]
    # The cache of an earlier version, with the returns in it, is not this one.
    assert data.meta["settings"]["line_ends"] == "CR LF"
    assert "line_ends" not in unix.meta["settings"]


def test_pairs_with_mixed_ends_keep_them_and_it_is_said(tmp_path: Path) -> None:
    content = b"1\tA\tB\tone\ttwo\n0\tA\tC\tone\tthree\r\n1\tA\tD\tfour\tlast"
    test_retrieval.write_files(tmp_path, content)
    task = Retrieval(data_dir=tmp_path)
    assert test_retrieval.pairs(task)[1] == (b"one", b"three\r", 0)
    data = prepare(Retrieval(data_dir=tmp_path), tmp_path / "cache")
    assert data.meta["remarks"] == [
        "new_aan_pairs.train.tsv: 1 of 2 lines end in CR LF, the others in LF: the 1 carriage "
        "returns are kept as data"
    ]


def test_line_ends_across_blocks_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lra.tasks.archives import count_line_ends

    for size in ((1 << 20) - 2, (1 << 20) - 1, 1 << 20):
        (tmp_path / "file").write_bytes(b"x" * size + b"\r\nend\n\r\r\n")
        assert count_line_ends(tmp_path / "file") == (3, 2)


def test_listops_says_when_ends_are_mixed_and_reads_the_same(tmp_path: Path) -> None:
    folder = write_files(tmp_path / "listops-1000", ["[MAX 1 2 ]", "[MIN 1 2 ]"])
    for ends, said in ((b"\n", False), (b"\r\n", False), (None, True)):
        lines = [b"Source\tTarget", b"[MAX 1 2 ]\t2", b"[MIN 1 2 ]\t1", b""]
        content = ends.join(lines) if ends else b"\r\n".join(lines[:2]) + b"\n" + lines[2] + b"\n"
        (folder / FILES[0]).write_bytes(content)
        task = ListOps(data_dir=tmp_path)
        assert listops_rows(task)["train"] == [("[MAX 1 2 ]", 2), ("[MIN 1 2 ]", 1)]
        expected = (
            ["basic_train.tsv: 1 of 3 lines end in CR LF, the others in LF; neither is part of an "
             "expression"] if said else []
        )  # fmt: skip
        assert task.remarks == expected


def test_metadata_with_carriage_returns_alone_are_refused(tmp_path: Path) -> None:
    level = test_pathfinder.write_release(tmp_path / test_pathfinder.LEVEL, [3])
    file = level / "metadata" / "0.npy"
    text = file.read_bytes()
    file.write_bytes(text.replace(b"\n", b"\r\n"))
    assert sum(report(Pathfinder(data_dir=tmp_path), tmp_path / "cache")[0].values()) == 3
    file.write_bytes(text.replace(b"\n", b"\r"))
    with pytest.raises(ValueError, match=r"0.npy, line 1: a carriage return within"):
        prepare(Pathfinder(data_dir=tmp_path), tmp_path / "cache")


# --- types of columns ---


TEXTS = {
    "string": pa.string(),
    "large_string": pa.large_string(),
    "string_view": pa.string_view(),
    "binary": pa.binary(),
    "large_binary": pa.large_binary(),
    "binary_view": pa.binary_view(),
    "dictionary": pa.dictionary(pa.int8(), pa.string()),
    "dictionary of large strings": pa.dictionary(pa.uint32(), pa.large_string()),
    "dictionary of bytes": pa.dictionary(pa.int64(), pa.large_binary()),
}
VIEWS = pa.dictionary(pa.int32(), pa.string_view())
CLASSES: dict[str, tuple[Any, list[Any]]] = {
    **{f"int{n}": (getattr(pa, f"int{n}")(), [0, 1]) for n in (8, 16, 32, 64)},
    **{f"uint{n}": (getattr(pa, f"uint{n}")(), [0, 1]) for n in (8, 16, 32, 64)},
    "bool": (pa.bool_(), [False, True]),
    "whole floats": (pa.float32(), [0.0, 1.0]),
    "names": (pa.string(), ["neg", "pos"]),
    "names as views": (pa.string_view(), ["Negative", "Positive"]),
    "digits": (pa.large_string(), ["0", "1"]),
    "categories": (pa.dictionary(pa.int8(), pa.string()), ["neg", "pos"]),
    "categories of numbers": (pa.dictionary(pa.int8(), pa.int64()), [0, 1]),
}


def column(values: list[Any], kind: Any) -> Any:
    """An array of any type; of some, pyarrow makes dictionaries only from their parts."""
    if not pa.types.is_dictionary(kind):
        return pa.array(values, kind)
    words = sorted(set(values), reverse=True)  # so that an index is not taken for the value
    indices = pa.array([words.index(value) for value in values], kind.index_type)
    return pa.DictionaryArray.from_arrays(indices, pa.array(words, kind.value_type))


def write_reviews(folder: Path, text: Any, label: Any, names: list[Any], form: str) -> None:
    for split in ("train", "test"):
        texts: list[Any] = [f"{split} é {i}" for i in range(8)]
        if "binary" in str(text):
            texts = [t.encode() for t in texts]
        table = pa.table({"text": column(texts, text), "label": column(names * 4, label)})
        folder.mkdir(parents=True, exist_ok=True)
        if form == "parquet":
            pq.write_table(table, folder / f"{split}.parquet")
            continue
        with pa.ipc.new_file(str(folder / f"{split}.arrow"), table.schema) as writer:
            writer.write_table(table, max_chunksize=3)


@pytest.mark.parametrize(
    ("name", "form"),
    # Parquet files of the last type cannot be written.
    [*itertools.product(TEXTS, ["parquet", "arrow"]), ("dictionary of views", "arrow")],
)
def test_text_of_every_type_is_read(tmp_path: Path, name: str, form: str) -> None:
    write_reviews(tmp_path / "imdb", TEXTS.get(name, VIEWS), pa.int64(), [0, 1], form)
    found = test_text.rows(Text(data_dir=tmp_path))["test"]
    assert found == [(f"test é {i}".encode(), i % 2) for i in range(8)]


@pytest.mark.parametrize("form", ["parquet", "arrow"])
@pytest.mark.parametrize("name", CLASSES)
def test_classes_of_every_type_are_read(tmp_path: Path, name: str, form: str) -> None:
    write_reviews(tmp_path / "imdb", pa.string(), *CLASSES[name], form)
    found = test_text.rows(Text(data_dir=tmp_path))["test"]
    assert [label for _, label in found] == [0, 1] * 4


@pytest.mark.parametrize(
    ("names", "labels"),
    [(["neg", "pos"], [0, 1]), (["pos", "neg"], [1, 0]), (["0", "1"], [0, 1])],
)
def test_numbers_follow_the_class_names_of_the_library(
    tmp_path: Path, names: list[str], labels: list[int]
) -> None:
    feature = {"names": names, "_type": "ClassLabel"}
    about = {b"huggingface": json.dumps({"info": {"features": {"label": feature}}}).encode()}
    for split in ("train", "test"):
        table = pa.table({"text": ["a", "b"] * 4, "label": [0, 1] * 4})
        (tmp_path / "imdb").mkdir(exist_ok=True)
        pq.write_table(table.replace_schema_metadata(about), tmp_path / f"imdb/{split}.parquet")
    found = test_text.rows(Text(data_dir=tmp_path))["test"]
    assert [label for _, label in found] == labels * 4


@pytest.mark.parametrize("kind", ["views", "names", "bytes alone"])
def test_pictures_of_every_type_are_read(tmp_path: Path, kind: str) -> None:
    batches = test_image.write_batches(tmp_path / "made" / test_image.INNER, size=10)
    expected = test_image.rows(Image(data_dir=tmp_path / "made"), "test")
    words = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship",
             "truck"]  # fmt: skip
    for split in ("train", "test"):
        pictures, numbers = batches["test_batch" if split == "test" else "data_batch_1"]
        bytes_ = [test_image.to_png(row) for row in pictures]
        if kind == "views":
            png: Any = pa.array(bytes_, pa.binary_view())
            png = pa.StructArray.from_arrays([png], ["bytes"])
        else:
            png = pa.array(bytes_)
        label = [words[n] for n in numbers] if kind == "names" else pa.array(numbers, pa.uint8())
        (tmp_path / "data/cifar10").mkdir(parents=True, exist_ok=True)
        pq.write_table(
            pa.table({"img": png, "label": label}), tmp_path / f"data/cifar10/{split}.parquet"
        )
    assert test_image.rows(Image(data_dir=tmp_path / "data"), "test") == expected
