"""Caches, batches and their order."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import runpy
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import lra.files
import lra.tasks.batches
import lra.tasks.cache
from lra.files import append, write_atomically
from lra.tasks.batches import Batch, TokenArrays, epoch_order, eval_batches, train_batches
from lra.tasks.cache import fingerprint_files, prepare, stratified, verify
from lra.tasks.task import Example, Task
from tests import programs
from tests.programs import ROOT
from tests.toy import SIZES, Toy, toy_data


def toy(folder: Path, **knobs: object) -> Toy:
    return Toy(data_dir=folder, **({"max_length": 12} | knobs))  # type: ignore[arg-type]


def test_cache_round_trip(tmp_path: Path) -> None:
    data = toy_data(tmp_path)
    for split, size in SIZES.items():
        arrays = getattr(data, split)
        wanted = list(toy(tmp_path).examples(split))
        assert len(arrays) == size == len(wanted)
        for i, (sequences, label) in enumerate(wanted):
            assert np.array_equal(arrays.sequence(i), sequences[0]) and arrays.labels[i] == label
    verify(data)


def test_a_batch_holds_ids_above_the_padding_and_true_lengths(tmp_path: Path) -> None:
    rows = {s: [(bytes([0, 9, 3]), 1), (b"", 0), (bytes([5]), 1)] for s in SIZES}
    batch = toy_data(tmp_path, rows=rows).val.batch(np.array([2, 0, 1]))
    assert batch.tokens_BSL.shape == (3, 1, 12)  # not beyond max_length
    assert batch.tokens_BSL[1, 0, :4].tolist() == [1, 10, 4, 0]  # value 0 is not padding
    assert batch.lengths_BS[:, 0].tolist() == [1, 3, 0]
    assert batch.labels_B.tolist() == [1, 1, 0]
    assert toy_data(tmp_path, rows=rows, max_length=70).val.batch(
        np.arange(3)
    ).tokens_BSL.shape == (3, 1, 64)
    padded = toy_data(tmp_path, rows=rows).val.batch(np.array([2]), pad_to=12)
    assert padded.tokens_BSL.shape == (1, 1, 12)


def test_truncation_is_counted_and_an_error_under_strict(tmp_path: Path) -> None:
    rows = {s: [(bytes(n), 0) for n in (4, 10, 12)] for s in SIZES}
    data = toy_data(tmp_path, rows=rows, max_length=10)
    assert data.meta["splits"]["train"]["truncated"] == 1
    assert data.meta["splits"]["train"]["longest_source"] == 12
    assert data.train.lengths.tolist() == [4, 10, 10]
    with pytest.raises(ValueError, match=r"1 of 3 train .*max_length=10 \(longest: 12\)"):
        toy_data(tmp_path / "strict", rows=rows, max_length=10, strict=True)
    assert not list((tmp_path / "strict" / "cache").glob("toy-*/"))
    with pytest.raises(
        ValueError, match="1 of 3 train"
    ):  # also when the cut cache is there already
        toy_data(tmp_path, rows=rows, max_length=10, strict=True)


def test_a_changed_setting_is_another_cache(tmp_path: Path) -> None:
    short, long = toy_data(tmp_path, max_length=8), toy_data(tmp_path, max_length=16)
    assert short.folder != long.folder
    assert short.train.lengths.max() <= 8 < long.train.lengths.max()


def test_a_ready_cache_is_not_built_again(tmp_path: Path) -> None:
    toy_data(tmp_path)
    task = toy(tmp_path)
    task.examples = lambda split: pytest.fail("built again")  # type: ignore[method-assign, assignment]
    assert len(prepare(task, tmp_path / "cache").train) == SIZES["train"]


@pytest.mark.parametrize("name", ["tokens.npy", "offsets.npy", "labels.npy"])
def test_a_truncated_cache_is_reported_by_file(tmp_path: Path, name: str) -> None:
    path = toy_data(tmp_path).folder / "val" / name
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ValueError, match=f"val/{name}: unreadable or truncated.*delete the folder"):
        toy_data(tmp_path)


SMALL = ["task=listops", "task.num_train=8", "task.num_val=4", "task.num_test=4",
         "task.min_tree_length=5", "task.max_tree_length=40", "--workers=1"]  # fmt: skip


def test_preparing_ends_with_a_code_that_tells_of_failures(tmp_path: Path) -> None:
    done = programs.call("scripts/prepare_data.py", *SMALL, "verify=full", cwd=tmp_path)
    assert done.returncode == 0 and "8 examples" in done.stdout, done.stderr
    (labels,) = tmp_path.glob("data/cache/listops-*/val/labels.npy")
    labels.write_bytes(labels.read_bytes()[:-1] + b"\7")
    done = programs.call("scripts/prepare_data.py", *SMALL, cwd=tmp_path)
    assert done.returncode == 2 and "error: listops: " in done.stderr
    assert f"{labels.relative_to(tmp_path)}: checksum differs" in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--show", "-1"], "--show -1: expected 0 or more"),
        (["report=."], "report=.: not a file"),
        (["report=file/x.json"], "file: not writable .* choose another report"),
        (["verify=full", "task.limit_train=6"], "task.limit_train=6: verify=full needs whole"),
    ],
)
def test_what_preparing_would_refuse_later_is_refused_before(
    tmp_path: Path, words: list[str], message: str
) -> None:
    (tmp_path / "file").touch()
    done = programs.call("scripts/prepare_data.py", *SMALL, *words, cwd=tmp_path)
    assert done.returncode == 2 and re.search(message, done.stderr)
    assert os.listdir(tmp_path) == ["file"]


def test_a_part_and_an_odd_name_are_reported(tmp_path: Path) -> None:
    words = [*SMALL, "task.limit_train=6", "paths.cache='not-utf-8-\udcff'"]
    done = programs.call("scripts/prepare_data.py", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert " 6 of 8 examples " in done.stdout and " not-utf-8-\\udcff/listops-" in done.stdout


def test_pictures_are_shown_beside_a_cache_that_is_only_read(tmp_path: Path) -> None:
    words = ["task=pathfinder", "task.num_train=2", "task.num_val=1", "task.num_test=1",
             "report=report.json", "--workers=1", "--show=2"]  # fmt: skip
    places = []
    while not (done := programs.call("scripts/prepare_data.py", *words, cwd=tmp_path)).returncode:
        places.append(tmp_path / done.stdout.split(", row by row in ")[1].strip())
        places[-1].unlink()
        places[-1].mkdir()  # where no picture can be written, even by root
    assert places == [*tmp_path.glob("data/cache/*/train.png"), tmp_path / "pathfinder-train.png"]
    report = json.loads((tmp_path / "report.json").read_text())["pathfinder"]
    assert "pathfinder-train.png" in report["error"] and report["splits"]["train"]


@pytest.mark.parametrize("words", [["prepare_data.py", *SMALL[:-1]], ["export_pathfinder.py", "x"]])
def test_processes_are_as_many_as_cores_that_may_be_used(
    monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    def ended(*_: object, num_workers: int, **__: object) -> None:
        raise KeyboardInterrupt(num_workers)

    for name in ("lra.tasks.cache.prepare", "lra.tasks.pathfinder.export"):
        monkeypatch.setattr(name, ended)
    monkeypatch.setattr("lra.tasks.workers.available_cores", lambda: 3)
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(KeyboardInterrupt, match="3"):
        runpy.run_path(str(ROOT / "scripts" / words[0]))["main"]()


@pytest.mark.parametrize(("task", "code"), [("listops", 1), ("all", 2)])
def test_a_fault_of_the_code_is_no_bad_data_and_stops_no_other_task(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], task: str, code: int
) -> None:
    def fails(task: Task, *_: object, **__: object) -> None:
        raise TypeError("slip") if task.name == "listops" else ValueError("no files")

    monkeypatch.setattr("lra.tasks.cache.prepare", fails)
    monkeypatch.setattr(sys, "argv", ["prepare_data.py", f"task={task}"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert runpy.run_path(str(ROOT / "scripts/prepare_data.py"))["main"]() == code
    shown = capsys.readouterr().err
    assert re.search("listops: Traceback .*in fails\n.*TypeError: slip\n", shown, re.DOTALL)
    assert shown.count("Traceback") == 1 and "error: listops" not in shown
    assert ("error: text: no files\n" in shown) == (task == "all")


def test_a_cache_older_than_the_tasks_code_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, task = toy_data(tmp_path), toy(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    compare = runpy.run_path(str(ROOT / "scripts/prepare_data.py"))["compare_with_source"]
    compare(task, data)
    task.rows = dict.fromkeys(SIZES, [(bytes([1]), 1)])
    with pytest.raises(ValueError, match="example 0 differs from toy.*raise the version in its se"):
        compare(task, data)


def test_a_changed_byte_fails_verification(tmp_path: Path) -> None:
    data = toy_data(tmp_path)
    path = data.folder / "test" / "labels.npy"
    content = bytearray(path.read_bytes())
    content[-8] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="test/labels.npy: checksum differs"):
        verify(toy_data(tmp_path))


@pytest.mark.parametrize("name", ["train/tokens.npy", "val/labels.npy"])
def test_a_cache_overwritten_with_zeros_of_the_same_size_is_refused(
    tmp_path: Path, name: str
) -> None:
    path = toy_data(tmp_path).folder / name
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(128)  # behind the header
        file.write(bytes(size - 128))
    assert path.stat().st_size == size
    with pytest.raises(ValueError, match=f"{name}: checksum differs from meta.json; delete"):
        toy_data(tmp_path)


def test_a_cache_of_other_data_is_refused(tmp_path: Path) -> None:
    short, long = (toy_data(tmp_path, max_length=length).folder for length in (8, 12))
    for name in short.iterdir():
        target = long / name.name
        shutil.rmtree(target) if target.is_dir() else target.unlink()
    shutil.copytree(short, long, dirs_exist_ok=True)  # as a mistaken copy leaves it
    with pytest.raises(
        ValueError, match=r"meta.json: of other data \(fingerprint \w{12}, expected"
    ):
        toy_data(tmp_path)


def test_a_checksum_changed_in_meta_is_refused(tmp_path: Path) -> None:
    meta = toy_data(tmp_path).folder / "meta.json"
    facts = json.loads(meta.read_text())
    facts["splits"]["val"]["sha256"]["tokens"] = "0" * 64
    meta.write_text(json.dumps(facts))
    with pytest.raises(ValueError, match="val/tokens.npy: checksum differs"):
        toy_data(tmp_path)


@pytest.mark.parametrize("how", ["other times", "moved", "built by an earlier version"])
def test_a_cache_whose_files_look_changed_is_checked_once(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "a"
    folder = toy_data(place).folder
    if how == "other times":
        for file in folder.glob("*/*.npy"):
            os.utime(file, (1e9, 1e9))  # as of a container's layers, or a copy without times
    elif how == "moved":
        place = place.rename(tmp_path / "b")
    else:
        shutil.rmtree(folder.parent / "fingerprints")
    capsys.readouterr()
    data = toy_data(place)
    assert len(data.train) == SIZES["train"]
    assert capsys.readouterr().err == f"checking every byte of {data.folder}, once\n"
    monkeypatch.setattr(lra.tasks.cache, "file_sha256", lambda _: pytest.fail("read again"))
    assert len(toy_data(place).train) == SIZES["train"]
    assert capsys.readouterr().err == ""


def test_a_new_cache_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lra.tasks.cache, "file_sha256", lambda _: pytest.fail("read again"))
    for _ in range(2):
        assert len(toy_data(tmp_path).train) == SIZES["train"]


def test_a_source_that_cannot_be_read_is_named_with_its_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OSError, match=r"none.tsv: cannot be read .* paths\.data or task\.path"):
        fingerprint_files([tmp_path / "none.tsv"], tmp_path / "cache")

    def examples(self: Toy, split: str) -> Any:
        raise PermissionError(13, "Permission denied", str(tmp_path / "data" / "x.tsv"))

    monkeypatch.setattr(Toy, "examples", examples)
    with pytest.raises(OSError, match=r"data/x.tsv: cannot be read \(Permission denied\)"):
        toy_data(tmp_path)


def test_damaged_meta_is_reported(tmp_path: Path) -> None:
    data = toy_data(tmp_path)
    (data.folder / "meta.json").write_text("{")
    with pytest.raises(ValueError, match=r"meta.json: damaged"):
        toy_data(tmp_path)
    (data.folder / "meta.json").write_text(json.dumps({"splits": {}}))
    with pytest.raises(ValueError, match=r"meta.json: damaged"):
        toy_data(tmp_path)


@pytest.mark.parametrize(
    "row, message",
    [
        ((bytes([10]), 0), "a value is outside 0 to 9"), ((b"1", 2), "label 2, expected 0 to 1"),
        ((np.array([1.5]), 0), "example 0 has values of float64, expected integers"),
    ],
)  # fmt: skip
def test_examples_outside_the_vocabulary_or_the_classes_are_refused(
    tmp_path: Path, row: tuple[Any, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        toy_data(tmp_path, rows={s: [row] for s in SIZES})
    assert not list((tmp_path / "cache").glob("*toy*/"))


def test_an_empty_split_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the val split of toy generator is empty"):
        toy_data(tmp_path, sizes={"train": 3, "val": 0, "test": 1})


class ToyFiles(Toy):
    """As if the examples had been read from files."""

    protocol_validation: ClassVar[str] = "val"

    @property
    def kind(self) -> Any:
        return "files"

    @property
    def protocol(self) -> dict[str, Any]:
        return {"validation": self.protocol_validation, "difficulty": None}

    def source_files(self) -> list[Path]:
        return [Path(__file__)]


ROWS = [(b"\1\2", 1), (b"\3", 0)]


@pytest.mark.parametrize(
    "pair", [("train", "val"), ("train", "test"), ("val", "test")], ids="-".join
)
def test_files_whose_splits_are_copies_are_refused(tmp_path: Path, pair: tuple[str, str]) -> None:
    rows = {"train": [(b"\4", 1)], "val": [(b"\5", 1)], "test": [(b"\6", 1)]}
    task = ToyFiles(data_dir=tmp_path, max_length=12, rows=rows | {split: ROWS for split in pair})
    said = f"{pair[0]} and {pair[1]} have the same 2 examples in .*{__file__}.*expected examples of"
    with pytest.raises(ValueError, match=said):
        prepare(task, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("toy-*/meta.json"))


def test_a_ready_cache_of_copies_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = ToyFiles(data_dir=tmp_path, max_length=12, rows=dict.fromkeys(SIZES, ROWS))
    with monkeypatch.context() as before:
        before.setattr(lra.tasks.cache, "copies", lambda task, reports: "")
        before.setattr(lra.tasks.cache, "shared", lambda task, digests: [])
        prepare(task, tmp_path / "cache")
    with pytest.raises(ValueError, match="train and val have the same 2 examples"):
        prepare(task, tmp_path / "cache")


def test_examples_in_two_splits_are_counted_and_most_are_refused(tmp_path: Path) -> None:
    """A file copied over one of several leaves no two splits alike."""
    others = [(bytes([i]), 1) for i in range(5)]
    rows = {"train": [*ROWS, *others], "val": [(b"\7", 0)], "test": [*ROWS, (b"\6", 0), (b"\5", 0)]}
    task = ToyFiles(data_dir=tmp_path, max_length=1, rows=rows)  # cut, but compared as they are
    remarks = prepare(task, tmp_path / "cache").meta["remarks"]
    assert remarks == ["2 of the 4 test examples are in train, too"]
    assert prepare(task, tmp_path / "cache").meta["remarks"] == remarks  # of the ready cache, too
    task.rows = rows | {"test": [*rows["test"][:3], others[0]]}
    with pytest.raises(
        ValueError, match="3 of the 4 test examples are in train, .*has a file been"
    ):
        prepare(task, tmp_path / "cache")


def test_a_source_that_changes_while_it_is_read_leaves_no_cache(tmp_path: Path) -> None:
    class Growing(ToyFiles):
        def source_files(self) -> list[Path]:
            return [tmp_path / "source"]

        def examples(self, split: str) -> Iterator[Example]:
            (tmp_path / "source").write_text(split)
            return super().examples(split)

    (tmp_path / "source").write_text("before")
    task = Growing(data_dir=tmp_path, max_length=12)
    with pytest.raises(ValueError, match="task 'toy': toy generator has changed while it was read"):
        prepare(task, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("**/meta.json"))


def test_a_replaced_file_that_kept_its_time_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "source"
    path.write_text("one")
    before, times = fingerprint_files([path], tmp_path), path.stat()
    path.write_text("two")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert fingerprint_files([path], tmp_path) != before


def test_values_beyond_two_bytes_and_pictures_are_kept_or_refused(tmp_path: Path) -> None:
    class Words(Toy):
        num_values: ClassVar[int] = 100_000

        def decode(self, values: np.ndarray) -> str:
            return f"{values[0]}"

        def examples(self, split: str) -> Iterator[Example]:
            yield Example((np.array([65_535, 65_536, 99_999]),), 1)

    task = Words(data_dir=tmp_path, max_length=12)
    assert prepare(task, tmp_path).train.sequence(0).tolist() == [65_535, 65_536, 99_999]
    assert task.encode([99_999]).tolist() == [99_999] and len(task.vocabulary_hash()) == 64

    class Bytes(Words):
        def examples(self, split: str) -> Iterator[Example]:
            yield Example((b"\1\2\3",), 1)

    assert prepare(Bytes(data_dir=tmp_path, max_length=12), tmp_path / "b").train.sequence(
        0
    ).tolist() == [1, 2, 3]
    rows: Any = {split: [(np.ones((4, 4), np.uint8), 1)] for split in SIZES}
    with pytest.raises(ValueError, match=r"train: example 0 has values of shape \(4, 4\)"):
        toy_data(tmp_path / "pictures", rows=rows)


def test_labels_apart_make_no_copies(tmp_path: Path) -> None:
    rows = {"train": ROWS, "val": [(b"\1\2", 0), (b"\3", 0)], "test": [(b"\1", 1), (b"\2\3", 0)]}
    prepare(ToyFiles(data_dir=tmp_path, max_length=12, rows=rows), tmp_path / "cache")


def test_validation_on_test_may_be_a_copy_of_test_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ToyFiles, "protocol_validation", "test")
    rows = {"train": [(b"\4", 1)], "val": ROWS, "test": ROWS}
    data = prepare(ToyFiles(data_dir=tmp_path, max_length=12, rows=rows), tmp_path / "cache")
    assert data.meta["remarks"] == []
    with pytest.raises(ValueError, match="train and val have the same"):
        prepare(
            ToyFiles(data_dir=tmp_path, max_length=12, rows=dict.fromkeys(SIZES, ROWS)),
            tmp_path / "cache",
        )


def test_generated_copies_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = toy_data(tmp_path, rows=dict.fromkeys(SIZES, ROWS))
    assert data.meta["remarks"] == ["train and val have the same 2 examples in the same order"]
    assert data.meta["remarks"][0] in capsys.readouterr().err


def test_empty_sequences_are_counted_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = {split: [(b"\1", 0), (b"", 1), (b"", 0)] for split in SIZES}
    data = toy_data(tmp_path, rows=rows)
    assert [data.meta["splits"][split]["empty"] for split in SIZES] == [2, 2, 2]
    assert "train: 2 empty sequences, the first in example 1\n" in capsys.readouterr().err
    rows = {split: [(b"\1", 1)] for split in SIZES}
    toy_data(tmp_path / "one", rows=rows)
    assert "val: no example of class 0\n" in capsys.readouterr().err


def test_a_cache_folder_that_cannot_be_made_is_named_with_its_key(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, not a folder")
    with pytest.raises(OSError, match=rf"{tmp_path / 'cache'}: not writable .*paths\.cache"):
        toy_data(tmp_path)


def test_a_ready_cache_is_opened_where_nothing_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import lra.tasks.cache

    def refuse(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(lra.tasks.cache, "write_atomically", refuse)
    source = tmp_path / "source.txt"
    source.write_text("content")
    assert len(fingerprint_files([source], tmp_path / "cache")) == 64


def test_a_folder_without_its_meta_is_no_cache_and_is_replaced(tmp_path: Path) -> None:
    whole = toy_data(tmp_path)
    meta = json.loads((whole.folder / "meta.json").read_text())
    (whole.folder / "meta.json").unlink()
    (whole.folder / "train" / "labels.npy").write_bytes(b"half")
    (whole.folder / "left over").touch()
    again = toy_data(tmp_path)
    assert again.meta["splits"] == meta["splits"] and len(again.train) == SIZES["train"]
    assert not (whole.folder / "left over").exists()


def test_the_cache_lies_where_it_is_asked_for_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "source.txt").write_text("content")
    task = toy(tmp_path / "data")
    task.source_files = lambda: [tmp_path / "data" / "source.txt"]  # type: ignore[method-assign]
    data = prepare(task, tmp_path / "place" / "cache")
    assert data.folder.parent == tmp_path / "place" / "cache"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data", "place"]
    assert [p.name for p in (tmp_path / "data").iterdir()] == ["source.txt"]
    # What was learnt of the contents of the source and of the cache lies beside the caches too.
    assert len(list((tmp_path / "place" / "cache" / "fingerprints").iterdir())) == 2


def test_a_file_is_replaced_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_atomically(path, "old")

    def fails(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", fails)
        with pytest.raises(OSError, match="Input/output error"):
            write_atomically(path, "new and longer")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    write_atomically(path, "new")
    assert path.read_text() == "new"


def test_concurrent_builders_make_one_cache(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tests.toy import toy_data; "
        "print(toy_data(Path(sys.argv[1])).folder)"
    )
    builders = [programs.start("-c", code, tmp_path, cwd=ROOT) for _ in range(6)]
    said = [builder.communicate(timeout=60) for builder in builders]
    (folder,) = {out.strip() for out, _ in said}
    assert list((tmp_path / "cache").glob("toy-*/")) == [Path(folder)]
    assert sum(err.count("preparing toy") for _, err in said) == 1


def test_fingerprint_follows_content_not_place(tmp_path: Path) -> None:
    memo = tmp_path / "memo"
    for place in ("a", "b/c"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "x.tsv").write_bytes(b"12")
    first = fingerprint_files([tmp_path / "a/x.tsv"], memo)
    assert first == fingerprint_files([tmp_path / "b/c/x.tsv"], memo)
    assert first == fingerprint_files([tmp_path / "a/x.tsv"], memo)  # remembered
    (tmp_path / "a/x.tsv").write_bytes(b"13")
    assert first != fingerprint_files([tmp_path / "a/x.tsv"], memo)


LENGTHS = np.random.default_rng(0).integers(1, 500, 330)


@pytest.mark.parametrize("bucketing", [True, False])
def test_an_epoch_is_a_permutation_that_depends_on_seed_and_epoch(bucketing: bool) -> None:
    def order(seed: int, epoch: int) -> list[int]:
        batches = epoch_order(LENGTHS, 10, seed=seed, epoch=epoch, bucketing=bucketing)
        return np.concatenate(batches).tolist()

    assert sorted(order(0, 0)) == list(range(330))
    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(0, 1) and order(0, 0) != order(1, 0)


def test_bucketing_pads_less_without_sorting_the_epoch_by_length() -> None:
    lengths = np.random.default_rng(1).integers(1, 2000, 6400)

    def padded(bucketing: bool) -> int:
        batches = epoch_order(lengths, 32, seed=0, epoch=0, bucketing=bucketing)
        return sum(int(lengths[b].max()) * len(b) for b in batches)

    assert padded(True) < 1.1 * lengths.sum() < 0.7 * padded(False)
    longest = [lengths[b].max() for b in epoch_order(lengths, 32, seed=0, epoch=0, bucketing=True)]
    assert abs(np.corrcoef(longest[:64], np.arange(64))[0, 1]) < 0.5


def test_steps_continue_where_they_left_off() -> None:
    def steps(first: int, last: int) -> list[tuple[int, list[int]]]:
        batches = train_batches(
            LENGTHS, 32, seed=3, bucketing=True, first_step=first, last_step=last
        )
        return [(epoch, rows.tolist()) for epoch, rows in batches]

    whole = steps(1, 25)  # ten batches an epoch: the cut falls inside an epoch and at its end
    assert whole == steps(1, 7) + steps(8, 25) == steps(1, 10) + steps(11, 25)
    for epoch in range(2):  # each takes the batches of its epoch from the first to the last
        order = epoch_order(LENGTHS, 32, seed=3, epoch=epoch, bucketing=True)
        assert whole[10 * epoch : 10 * (epoch + 1)] == [(epoch, b.tolist()) for b in order]


def test_fewer_examples_than_a_batch_make_one_batch() -> None:
    assert [len(b) for b in epoch_order(LENGTHS[:5], 32, seed=0, epoch=0, bucketing=True)] == [5]


def test_evaluation_covers_every_example_once() -> None:
    batches = eval_batches(LENGTHS, 32)
    assert sorted(np.concatenate(batches).tolist()) == list(range(330))
    assert [len(b) for b in batches] == [32] * 10 + [10]


def test_micro_batches_cover_the_batch(tmp_path: Path) -> None:
    batch = toy_data(tmp_path).train.batch(np.arange(10))
    parts = list(batch.split(4))
    assert [len(p) for p in parts] == [2, 3, 2, 3]
    assert np.concatenate([p.labels_B for p in parts]).tolist() == batch.labels_B.tolist()
    assert [len(p) for p in batch.split(1)] == [10] and isinstance(parts[0], Batch)


def test_a_limited_split_keeps_both_classes(tmp_path: Path) -> None:
    rows = {s: [(b"", 0)] * 10 + [(b"\1", 1)] * 10 for s in SIZES}
    data = toy_data(tmp_path, rows=rows, limit_train=4)
    counts = np.bincount(data.train.labels, minlength=2).tolist()
    assert sum(counts) == 4 and data.meta["splits"]["train"]["label_histogram"] == counts
    assert sorted(data.train.labels.tolist()) == [0, 0, 1, 1]
    assert data.train.batch(np.array([3])).tokens_BSL[0, 0, 0] == 2
    assert len(data.val) == 20


@pytest.mark.parametrize(
    ("limits", "kind"),
    [
        ({}, "generated"),
        ({"limit_train": 39}, "partial"),
        ({"limit_train": 40}, "partial"),  # of 40: whole, but that cannot be told from the sizes
        ({"limit_train": 41}, "generated"),
        ({"limit_val": 4}, "partial"),
        ({"limit_train": 100, "limit_test": 4}, "partial"),
    ],
)
def test_a_limit_makes_data_partial_also_without_official_sizes(
    tmp_path: Path, limits: dict[str, int], kind: str
) -> None:
    task = toy(tmp_path, **limits)
    assert not task.official_sizes
    assert task.data_kind(prepare(task, tmp_path / "cache").num_examples) == kind


def test_stratified_sizes_are_exact() -> None:
    labels = np.array([0] * 70 + [1] * 25 + [2] * 5)
    for size in (1, 10, 33, 99, 100, 200):
        assert len(set(stratified(labels, size))) == min(size, 100)
    assert np.bincount(labels[stratified(labels, 20)]).tolist() == [14, 5, 1]


def test_opening_a_cache_maps_the_tokens(tmp_path: Path) -> None:
    data = toy_data(tmp_path)
    assert isinstance(data.train.tokens, np.memmap)
    assert data.train.tokens.dtype == np.uint8
    assert isinstance(TokenArrays(data.folder / "val", 1, 12), TokenArrays)


def test_a_full_disk_is_also_known_without_a_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half_written(*_: object) -> None:
        raise OSError("2000 requested and 1520 written")  # as numpy has it

    monkeypatch.setattr(lra.tasks.batches.np, "save", half_written)
    with pytest.raises(OSError, match=r"toy-\w+: the cache was not written \(2000 .*paths.cache"):
        toy_data(tmp_path)


needs_full_disk = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux")


@needs_full_disk
def test_a_full_disk_is_told_with_the_file() -> None:
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        append(Path("/dev/full"), "a line\n")


@needs_full_disk
def test_a_full_disk_leaves_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = lra.tasks.batches.SplitWriter.add

    def fails(self: lra.tasks.batches.SplitWriter, *args: object) -> None:
        original(self, *args)  # type: ignore[arg-type]
        if len(self.labels) == 5:
            with open("/dev/full", "wb", buffering=0) as full:
                full.write(b"x")

    monkeypatch.setattr(lra.tasks.batches.SplitWriter, "add", fails)
    with pytest.raises(
        OSError, match=r"toy-\w+: the cache was not written \(No space left.*paths.cache"
    ):
        toy_data(tmp_path)
    assert not [p for p in (tmp_path / "cache").iterdir() if p.suffix != ".lock"]
    monkeypatch.undo()
    assert len(toy_data(tmp_path).train) == SIZES["train"]


# --- batches ahead ---


def ids(number: int) -> np.ndarray:
    return np.array([number])


@pytest.mark.parametrize("num_threads", [0, 1, 3])
def test_batches_built_ahead_come_in_order(num_threads: int, tmp_path: Path) -> None:
    def slowly(indices: np.ndarray) -> Any:
        time.sleep(0.002 * (indices[0] % 3))
        return indices[0]

    built = lra.tasks.batches.built_ahead(slowly, map(ids, range(40)), num_threads, tmp_path)
    assert list(built) == list(range(40))


def test_batches_take_no_process_and_no_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers have 64 MB of it, and a started process would get a copy of all tokens."""

    def refuse(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", refuse)
    monkeypatch.setattr(torch.Tensor, "share_memory_", refuse)
    train = toy_data(tmp_path).train
    planned = train_batches(train.lengths, 8, seed=0, bucketing=True, first_step=1, last_step=9)
    order = [rows for _, rows in planned]
    state = torch.get_rng_state()
    for alone, ahead in zip(
        map(train.batch, order),
        lra.tasks.batches.built_ahead(train.batch, order, 2, tmp_path),
        strict=True,
    ):
        assert torch.equal(alone.tokens_BSL, ahead.tokens_BSL)
        assert torch.equal(alone.lengths_BS, ahead.lengths_BS)
        assert torch.equal(alone.labels_B, ahead.labels_B)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("error", [ValueError("damaged"), TimeoutError("of the disk itself")])
def test_an_error_in_a_thread_is_the_callers(error: Exception, tmp_path: Path) -> None:
    def fail(indices: np.ndarray) -> Any:
        if indices[0] == 5:
            raise error
        return indices[0]

    built = lra.tasks.batches.built_ahead(fail, map(ids, range(40)), 2, tmp_path)
    assert [next(built) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(type(error), match=str(error)):
        next(built)


def test_a_batch_that_does_not_come_is_told_and_then_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, seconds in {"POLL_S": 0.02, "TELL_AFTER_S": 0.05, "GIVE_UP_AFTER_S": 0.3}.items():
        monkeypatch.setattr(lra.tasks.batches, name, seconds)
    answer, asked = threading.Event(), []

    def hang(indices: np.ndarray) -> Any:
        return answer.wait(20)

    started = time.monotonic()
    built = lra.tasks.batches.built_ahead(hang, [ids(0)], 1, tmp_path, lambda: asked.append(1))
    with pytest.raises(TimeoutError, match=f"{tmp_path}: a batch could not be read"):
        next(built)
    answer.set()
    assert len(asked) > 2 and time.monotonic() - started < 10
    assert capsys.readouterr().err.count(f"waiting for a batch from {tmp_path}") == 1


def test_a_wait_that_nobody_can_read_of_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("POLL_S", "TELL_AFTER_S"):
        monkeypatch.setattr(lra.tasks.batches, name, 0.02)
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stderr", full)
        built = lra.tasks.batches.built_ahead(time.sleep, [0.2], 1, tmp_path)
        assert list(built) == [None]


# --- waiting for a builder ---


def test_who_waits_for_a_builder_says_for_whom_and_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = lra.tasks.cache.cache_folder(toy(tmp_path), tmp_path / "cache")
    building = folder.with_name(f".{folder.name}.building")
    building.mkdir(parents=True)
    (building / lra.tasks.cache.BUILDER).write_text("process 7 on node3\n")
    monkeypatch.setattr(lra.tasks.cache, "TELL_AFTER_S", 0.0)
    monkeypatch.setattr(lra.files, "LOCK_POLL_S", 0.01)
    monkeypatch.setattr(lra.tasks.cache, "BUILDER_IDLE_S", 0.3)
    with (
        lra.files.locked(Path(f"{folder}.lock"), "paths.cache"),
        pytest.raises(OSError, match="process 7 on node3 has the lock and has written nothing"),
    ):
        toy_data(tmp_path)
    assert capsys.readouterr().err == f"waiting for process 7 on node3 to prepare {folder}\n"
    made = toy_data(tmp_path)  # the lock is free, what the builder left means nothing
    assert made.folder == folder and not list(folder.rglob("*.txt")) and not building.exists()


def test_a_builder_that_goes_on_writing_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = lra.tasks.cache.cache_folder(toy(tmp_path), tmp_path / "cache")
    work = folder.with_name(f"{folder.name}.work")
    work.mkdir(parents=True)
    monkeypatch.setattr(lra.files, "LOCK_POLL_S", 0.01)
    monkeypatch.setattr(lra.tasks.cache, "BUILDER_IDLE_S", 0.4)
    locked = threading.Event()

    def build() -> None:
        with lra.files.locked(Path(f"{folder}.lock"), "paths.cache"):
            locked.set()
            for i in range(12):
                (work / f"{i}.npy").touch()
                time.sleep(0.1)

    builder = threading.Thread(target=build)
    builder.start()
    locked.wait(20)
    assert toy_data(tmp_path).folder == folder
    builder.join()


def test_what_killed_builds_of_any_cache_have_left_is_removed_by_the_next(tmp_path: Path) -> None:
    folder, _ = lra.tasks.cache.cache_folder(toy(tmp_path), tmp_path / "cache")
    left = [f".{folder.name}.building-77", ".toy-of-other-keys.building", ".text-1.building-77"]
    for name in (*left, ".text-2.building"):
        (tmp_path / "cache" / name / "train").mkdir(parents=True)
    with lra.files.locked(tmp_path / "cache/text-2.lock", "paths.cache"):  # somebody is at that one
        toy_data(tmp_path)
    assert [path.name for path in tmp_path.glob("cache/.*")] == [".text-2.building"]
