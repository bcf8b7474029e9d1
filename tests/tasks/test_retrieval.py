"""Retrieval: rows and literals, places, faulty files, the stand-in, the reference pairs."""

from __future__ import annotations

import ast
import csv
import dataclasses
import gzip
import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from lra.tasks.batches import file_sha256
from lra.tasks.cache import cache_folder, prepare
from lra.tasks.retrieval import FILES, Retrieval, decode_literal, parse_row
from lra.tasks.task import SPLITS

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT.parent / "shared" / "data"
TSV = REFERENCE / "lra_release/lra_release/tsv_data"
needs_reference = pytest.mark.skipif(not REFERENCE.is_dir(), reason="no reference data here")

GOOD = b"1.0\tA\tB\tb'one'\tb'two'\n0.0\tA\tC\tb'one'\tb'three'\n"
Pair = tuple[bytes, bytes, int]


def write_files(folder: Path, train: bytes = GOOD, **others: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    held = {name: GOOD.replace(b"one", name.encode()) for name in ("eval", "test")}
    contents = {"train": train, **held} | others
    for name, content in contents.items():
        (folder / f"new_aan_pairs.{name}.tsv").write_bytes(content)
    return folder


def pairs(task: Retrieval, split: str = "train") -> list[Pair]:
    found = []
    for example in task.examples(split):
        first, second = (bytes(sequence) for sequence in example.sequences)
        found.append((first, second, example.label))
    return found


def read(tmp_path: Path, train: bytes, **settings: Any) -> list[Pair]:
    return pairs(Retrieval(data_dir=write_files(tmp_path, train), **settings))


# --- rows ---


def test_a_row_is_two_documents_and_a_label(tmp_path: Path) -> None:
    assert read(tmp_path, GOOD) == [(b"b'one'", b"b'two'", 1), (b"b'one'", b"b'three'", 0)]
    dataset = prepare(Retrieval(data_dir=tmp_path), tmp_path / "cache")
    batch = dataset.train.batch(np.array([1]))
    assert batch.tokens_BSL[0, 1, : batch.lengths_BS[0, 1]].tolist() == [
        byte + 1 for byte in b"b'three'"
    ]
    assert dataset.meta["splits"]["train"]["label_histogram"] == [1, 1]


@pytest.mark.parametrize(("written", "label"), [(b"0", 0), (b"1", 1), (b"0.0", 0), (b"1.0", 1)])
def test_labels_may_be_floats(written: bytes, label: int) -> None:
    assert parse_row(written + b"\tA\tB\tx\ty\n").label == label


def test_quotes_mean_nothing(tmp_path: Path) -> None:
    texts = [(b'"quoted start', b"text b"), (b"plain", b"x"), (b'ends" here', b"y"), (b"NA", b"z"),
             (b"", b"empty first")]  # fmt: skip
    content = b"".join(b"1.0\tA\tB\t%s\t%s\n" % pair for pair in texts)
    default = csv.reader(io.StringIO(content.decode()), delimiter="\t")
    assert len(list(default)) < 5  # what quoting would do
    assert [found[:2] for found in read(tmp_path, content)] == texts


def test_only_line_feeds_end_a_row(tmp_path: Path) -> None:
    odd = b"a\r\x0b\x0c\x1c\x1d\x1e\x85\x00\xe2\x80\xa8b"
    content = b"1.0\tA\tB\t%s\tx\r\n0\tA\tB\ty\tz\n0\tA\tB\ty\tlast row without a line feed" % odd
    assert read(tmp_path, content) == [
        (odd, b"x\r", 1),
        (b"y", b"z", 0),
        (b"y", b"last row without a line feed", 0),
    ]


def test_long_documents_are_cut_at_10000_then_max_length(tmp_path: Path) -> None:
    content = b"1.0\tA\tB\t%s\tshort\n" % (b"x" * 140_000)
    assert [len(text) for text in read(tmp_path, content)[0][:2]] == [10_000, 5]
    dataset = prepare(Retrieval(data_dir=tmp_path), tmp_path / "cache")
    assert dataset.train.lengths_NS.tolist() == [[4000, 5]]
    assert dataset.meta["splits"]["train"]["truncated"] == 1
    with pytest.raises(ValueError, match=r"1 of 1 train examples .* task\.max_length=4000"):
        prepare(Retrieval(data_dir=tmp_path, strict=True), tmp_path / "other")


BAD_ROWS = {
    "label 0.5": (b"0.5\tA\tB\tx\ty", "label '0.5', expected 0, 1, 0.0 or 1.0"),
    "label 2.0": (b"2.0\tA\tB\tx\ty", "label '2.0'"),
    "label nan": (b"nan\tA\tB\tx\ty", "label 'nan'"),
    "label -1": (b"-1\tA\tB\tx\ty", "label '-1'"),
    "label with a blank": (b"1.0 \tA\tB\tx\ty", "label '1.0 '"),
    "label in quotes": (b'"1.0"\tA\tB\tx\ty', "label '\"1.0\"'"),
    "no label": (b"\tA\tB\tx\ty", "label ''"),
    "a header": (b"label\tid1\tid2\ttext1\ttext2", "label 'label'"),
    "byte order mark": (b"\xef\xbb\xbf1.0\tA\tB\tx\ty", r"label '\ufeff1.0'"),
    "not UTF-8": (b"\xff\xfe1\tA\tB\tx\ty", r"label '\\xff\\xfe1'"),
    "long label": (b"x" * 99_999 + b"\tA\tB\tx\ty", "label 'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxx ... "),
    "tab in a document": (
        b"1.0\tA\tB\tx\tinside\ty",
        "6 columns, expected 5 (label, id1, id2, text1, text2); is there a tab in a document?",
    ),
    "ids only": (
        b"1.0\tA\tB",
        "3 columns, expected 5 (label, id1, id2, text1, text2); rows of ids only lack the texts",
    ),
    "commas": (b"1.0,A,B,x,y", "1 columns"),
    "empty line": (b"", "1 columns"),
    "four columns": (b"1.0\tA\tB\tx", "4 columns"),
    "seven columns": (b"1.0\tA\tB\tx\ty\tz\t", "7 columns"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_ROWS)
@pytest.mark.parametrize("split", ["train", "eval", "test"])
def test_a_bad_row_is_refused_by_file_and_line_or_skipped(
    tmp_path: Path, name: str, split: str
) -> None:
    row, part = BAD_ROWS[name]
    good = GOOD.replace(b"one", b"own")  # of no other split
    content = good + row + b"\n" + good
    write_files(tmp_path, **{split: content})
    with pytest.raises(ValueError) as caught:
        prepare(Retrieval(data_dir=tmp_path), tmp_path / "cache")
    assert f"new_aan_pairs.{split}.tsv, line 3: " in str(caught.value)
    assert part in str(caught.value)
    assert len(str(caught.value)) < 500
    dataset = prepare(Retrieval(data_dir=tmp_path, on_bad_row="skip"), tmp_path / "cache")
    report = dataset.meta["splits"][{"eval": "val"}.get(split, split)]
    assert report["num_examples"] == 4
    assert len(report["skipped"]) == 1
    assert report["skipped"][0].startswith(f"new_aan_pairs.{split}.tsv, line 3: ")


def test_a_file_cut_within_its_last_document_is_refused(tmp_path: Path) -> None:
    assert len(read(tmp_path / "whole", GOOD[:-1])) == 2  # a line feed less is nothing
    with pytest.raises(ValueError, match=r"train\.tsv, line 2: ends within a bytes literal"):
        read(tmp_path / "cut", GOOD[:-3])
    write_files(tmp_path / "empty", test=b"")
    with pytest.raises(
        ValueError, match=r"new_aan_pairs\.test\.tsv: empty, expected rows of label"
    ):
        Retrieval(data_dir=tmp_path / "empty").source_files()


def test_an_endless_row_is_refused_without_reading_it_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lra.tasks.retrieval.MAX_ROW_BYTES", 1000)
    content = GOOD + b"1.0\tA\tB\tx\t" + b"y" * 5000 + b"\n" + GOOD + b"z" * 2500
    with pytest.raises(ValueError, match="line 3: longer than 1000 bytes"):
        read(tmp_path, content)
    task = Retrieval(data_dir=tmp_path, on_bad_row="skip")
    assert len(pairs(task)) == 4
    assert [text.split(":")[0][-6:] for text in task.skipped["train"]] == ["line 3", "line 6"]


# --- literals ---


def test_literals_are_fed_as_they_stand_unless_asked(tmp_path: Path) -> None:
    content = rb"""1.0	A	B	b'caf\xc3\xa9\n\tx'	b"it's \\ \"" """.rstrip() + b"\n"
    second = rb'b"it' + rb"'s \\ \"" + b'"'
    assert read(tmp_path, content)[0][:2] == (rb"b'caf\xc3\xa9\n\tx'", second)
    assert read(tmp_path, content, decode_literals=True)[0][:2] == (
        "café\n\tx".encode(),
        b"it's \\ \"",
    )
    kept, decoded = Retrieval(data_dir=tmp_path), Retrieval(data_dir=tmp_path, decode_literals=True)
    assert (kept.protocol["literals"], decoded.protocol["literals"]) == ("kept", "decoded")
    assert (kept.deviations(), len(decoded.deviations())) == ([], 1)
    assert cache_folder(kept, tmp_path / "c") != cache_folder(decoded, tmp_path / "c")


def test_decoding_is_the_inverse_of_repr() -> None:
    rng = np.random.default_rng(0)
    documents = [bytes(range(256)), b"", b"'", b'"', b"'\"", b"\\", b"\\x41", b"\n" * 9]
    documents += [rng.integers(0, 256, n, np.uint8).tobytes() for n in range(1, 200)]
    documents += [bytes(rng.choice(list(b"'\"\\xn07\n"), n).tolist()) for n in range(1, 200)]
    for document in documents:
        assert decode_literal(repr(document).encode()) == document


@pytest.mark.parametrize(
    "literal",
    [rb"b'\a\b\f\n\r\t\v\\\'\"'", rb"b'\0\7\07\007\0071\377'", rb"b'\q\ \X41\N{DASH}\u0041'",
     rb"b'\x00\xfF'", b"b'\\\nx'", rb"""b"'" """.strip()],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::SyntaxWarning")
def test_decoding_agrees_with_python_on_every_escape(literal: bytes) -> None:
    assert decode_literal(literal) == ast.literal_eval(literal.decode())


BAD_LITERALS = [
    b"plain", b"", b"b", b"b'", b"b'x", b"b'x\"", b"'x'", b"b''x'", rb"b'x\'", rb"b'\xc'",
    rb"b'\x'", rb"b'\xg0'", rb"b'\400'", b"b'caf\xc3\xa9'", b"b'x' ", b" b'x'", b"b'x'+b'y'",
    b"B'x'", b"rb'x'", b"b'''x'''", b"b'x'\r", rb"b'x\xe2\x80",
]  # fmt: skip


@pytest.mark.parametrize("literal", BAD_LITERALS)
def test_a_broken_literal_is_refused_by_line_and_column(tmp_path: Path, literal: bytes) -> None:
    content = GOOD + b"1.0\tA\tB\tb'fine'\t" + literal + b"\n"
    with pytest.raises(ValueError, match=r"new_aan_pairs\.train\.tsv, line 3: text2 (is|has) "):
        read(tmp_path, content, decode_literals=True)
    assert read(tmp_path, content)[2][1] == literal  # fed as it stands, nothing is wrong with it
    skipping = Retrieval(data_dir=tmp_path, decode_literals=True, on_bad_row="skip")
    assert len(pairs(skipping)) == 2
    assert len(skipping.skipped["train"]) == 1


def test_decoding_takes_linear_time() -> None:
    decode_literal(b"b'" + rb"\\" * 2_000_000 + b"'")
    with pytest.raises(ValueError):
        decode_literal(b"b'" + rb"\\" * 2_000_000)


# --- places ---


def test_nestings_have_one_fingerprint(tmp_path: Path) -> None:
    folders = ("lra_release/lra_release/tsv_data", "lra_release/tsv_data", "tsv_data", "aan",
               "lra_release/aan", "retrieval", "")  # fmt: skip
    tasks = []
    for i, folder in enumerate(folders):
        place = write_files(tmp_path / str(i) / folder)
        tasks.append(Retrieval(data_dir=tmp_path / str(i)))
        tasks.append(Retrieval(data_dir=tmp_path / "none", path=str(place)))
        tasks.append(Retrieval(data_dir=tmp_path / "none", path=str(place / FILES["train"])))
        assert tasks[-2].place.path == place
    assert len({cache_folder(task, tmp_path / "cache") for task in tasks}) == 1
    write_files(tmp_path / "2" / "tsv_data", GOOD.replace(b"one", b"0ne"))
    assert cache_folder(tasks[0], tmp_path / "cache") != cache_folder(tasks[6], tmp_path / "cache")


def test_copies_may_be_equal_but_not_differ(tmp_path: Path) -> None:
    outer = write_files(tmp_path / "lra_release/tsv_data")
    inner = write_files(tmp_path / "lra_release/lra_release/tsv_data")
    assert Retrieval(data_dir=tmp_path).place.path == inner
    write_files(outer, GOOD.replace(b"1.0", b"0.0"))
    with pytest.raises(ValueError) as caught:
        prepare(Retrieval(data_dir=tmp_path), tmp_path / "cache")
    for part in (f"{inner}, {outer}", "new_aan_pairs.train.tsv differs", "task.path"):
        assert part in str(caught.value)
    assert len(pairs(Retrieval(data_dir=tmp_path, path=str(outer)))) == 2


def test_nothing_found_names_every_place_and_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:
        prepare(Retrieval(data_dir=tmp_path), tmp_path / "cache")
    for part in ("lra_release/lra_release/tsv_data", f"{tmp_path}/tsv_data", f"{tmp_path}/aan",
                 "new_aan_pairs.eval.tsv", "lra_release.gz", "get_data.sh", "task.source=synthetic",
                 "task.path"):  # fmt: skip
        assert part in str(caught.value)


def _only(*names: str) -> Any:
    def write(folder: Path) -> None:
        (folder / "tsv_data").mkdir()
        for name in names:
            (folder / "tsv_data" / f"new_aan_pairs.{name}.tsv").write_bytes(GOOD)

    return write


def _archive(name: str, mode: Any) -> Any:
    def write(folder: Path) -> None:
        write_files(folder.parent / "packed")
        with tarfile.open(folder / name, mode) as tar:
            tar.add(folder.parent / "packed", "lra_release/lra_release/tsv_data")

    return write


PLACES = {
    "val for eval": (
        _only("train", "val", "test"),
        ["has no new_aan_pairs.eval.tsv", "eval is expected", "found new_aan_pairs.val.tsv"],
    ),
    "val alone": (_only("val"), ["tsv_data has none of", "eval is expected"]),
    "one missing": (_only("train", "eval"), ["has no new_aan_pairs.test.tsv", "expected new_aan"]),
    "two missing": (_only("test"), ["no new_aan_pairs.train.tsv and no new_aan_pairs.eval.tsv"]),
    "ids only": (
        _only("train.only_ids", "eval.only_ids", "test.only_ids"),
        ["tsv_data", "three columns", "text columns are missing"],
    ),
    "packed, no suffix": (
        _archive("lra_release", "w:gz"),
        ["lra_release is a tar archive", "mv ", "tar -xzf"],
    ),
    "packed": (_archive("lra_release.gz", "w:gz"), ["lra_release.gz is a tar archive", "tar -xzf"]),
    "packed plain": (_archive("lra_release.tar", "w"), ["lra_release.tar is a tar archive"]),
}


@pytest.mark.parametrize("name", PLACES)
def test_incomplete_places_are_explained(tmp_path: Path, name: str) -> None:
    write, parts = PLACES[name]
    (tmp_path / "data").mkdir()
    write(tmp_path / "data")
    with pytest.raises(ValueError) as caught:
        prepare(Retrieval(data_dir=tmp_path / "data"), tmp_path / "cache")
    for part in parts:
        assert part in str(caught.value)


def test_a_path_to_a_file_is_explained(tmp_path: Path) -> None:
    packed = tmp_path / "download"
    packed.write_bytes(gzip.compress(b"x"))
    with pytest.raises(ValueError, match="download is a tar archive"):
        Retrieval(data_dir=tmp_path, path=str(packed)).source_files()
    packed.write_bytes(b"hello")
    with pytest.raises(ValueError, match="download: not a folder; expected one with new_aan"):
        Retrieval(data_dir=tmp_path, path=str(packed)).source_files()


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"source": "hub"}, "task.source=hub: expected auto, files or synthetic"),
        ({"on_bad_row": "drop"}, "task.on_bad_row=drop: expected error or skip"),
        ({"source": "synthetic", "path": "x"}, "task.path=x"),
        ({"num_val": 5}, "task.limit_val"),
    ],
)
def test_bad_settings_are_refused_by_key(tmp_path: Path, settings: Any, part: str) -> None:
    with pytest.raises(ValueError, match=part.replace(".", r"\.")):
        Retrieval(data_dir=tmp_path, **settings)


def test_the_yaml_lists_every_key_with_the_class_default() -> None:
    file = ROOT / "configs/task/retrieval.yaml"
    assert file.read_text().startswith("# @package _global_\n")
    task = yaml.safe_load(file.read_text())["task"]
    assert task.pop("_target_") == "lra.tasks.retrieval.Retrieval"
    fields = {f.name: f.default for f in dataclasses.fields(Retrieval) if f.init}
    del fields["data_dir"]
    assert task == fields


def test_each_setting_makes_another_cache(tmp_path: Path) -> None:
    write_files(tmp_path)
    settings: list[dict[str, Any]] = [
        {}, {"decode_literals": True}, {"on_bad_row": "skip"}, {"max_length": 9},
        {"source": "synthetic"}, {"source": "synthetic", "synthetic_seed": 1},
        {"source": "synthetic", "num_train": 9},
    ]  # fmt: skip
    tasks = [Retrieval(data_dir=tmp_path, **s) for s in settings]
    assert len({cache_folder(task, tmp_path / "cache") for task in tasks}) == len(settings)


# --- the stand-in ---


def test_stand_in_is_deterministic_balanced_and_long(tmp_path: Path) -> None:
    task = Retrieval(data_dir=tmp_path, source="synthetic", num_train=400)
    found = pairs(task)
    assert found == pairs(Retrieval(data_dir=tmp_path, source="synthetic", num_train=400))
    assert found != pairs(
        Retrieval(data_dir=tmp_path, source="synthetic", num_train=400, synthetic_seed=1)
    )
    assert [len(pairs(task, split)) for split in SPLITS] == [400, 200, 200]
    assert sum(label for *_, label in found) == 200
    lengths = np.array([[len(first), len(second)] for first, second, _ in found])
    assert 0.6 < (lengths > 4000).mean() < 0.8
    assert lengths.max() <= 10_000
    assert task.kind == "synthetic"


def test_stand_in_needs_both_documents_and_is_learnable_from_counts(tmp_path: Path) -> None:
    task = Retrieval(data_dir=tmp_path, source="synthetic", num_train=300, num_val=200)

    def telling(split: str) -> tuple[np.ndarray, np.ndarray]:
        found = pairs(task, split)
        shares = [[sum(map(t.count, b"mpqvwy")) / len(t) for t in pair[:2]] for pair in found]
        return np.array(shares), np.array([label for *_, label in found])

    x, y = telling("val")
    assert (((x.sum(axis=1) < 0.1) == y).mean()) == 1
    for document in range(2):  # one of the two alone leaves a quarter of the pairs open
        assert ((x[:, document] < 0.1) == y).mean() < 0.85


def test_preparation_is_the_same_for_any_number_of_workers(tmp_path: Path) -> None:
    write_files(tmp_path / "data", GOOD * 50)
    for settings in ({"source": "files"}, {"source": "synthetic", "num_train": 50}):
        sums = set()
        for workers in (0, 1, 4):
            task = Retrieval(data_dir=tmp_path / "data", **settings)  # type: ignore[arg-type]
            cache = tmp_path / f"{settings['source']}{workers}"
            folder = prepare(task, cache, num_workers=workers).folder
            sums.add(tuple(file_sha256(file) for file in sorted(folder.rglob("*.npy"))))
        assert len(sums) == 1


# --- the reference pairs ---


def reference_rows(split: str) -> list[list[bytes]]:
    lines = (TSV / FILES[split]).read_bytes().split(b"\n")
    assert lines.pop() == b""
    return [line.split(b"\t") for line in lines]


@needs_reference
def test_reference_pairs(tmp_path: Path) -> None:
    dataset = prepare(Retrieval(data_dir=REFERENCE), tmp_path / "cache")
    splits = dataset.meta["splits"]
    assert [splits[split]["num_examples"] for split in SPLITS] == [300, 60, 60]
    assert [splits[split]["label_histogram"] for split in SPLITS] == [[150] * 2, [30] * 2, [30] * 2]
    for split in SPLITS:
        arrays = getattr(dataset, split)
        for i, (label, _, _, *texts) in enumerate(reference_rows(split)):
            assert arrays.labels[i] == float(label)
            for position, text in enumerate(texts):
                assert arrays.sequence(i, position).tobytes() == text[:4000]
    assert dataset.train.sequence(12, 0).tobytes() == b"b''"
    assert splits["train"]["longest_source"] == 10_000  # row 4 has a page of 126 kB


@needs_reference
def test_reference_literals(tmp_path: Path) -> None:
    task = Retrieval(data_dir=REFERENCE, decode_literals=True)
    for split in SPLITS:
        expected = [
            tuple(ast.literal_eval(text.decode())[:10_000] for text in row[3:])
            for row in reference_rows(split)
        ]
        assert [pair[:2] for pair in pairs(task, split)] == expected
    found = pairs(task)
    assert found[12][0] == b""
    assert found[20][1].startswith(b'"')
    assert b"\x00" in found[23][0] + found[23][1]


@needs_reference
def test_reference_odd_rows(tmp_path: Path) -> None:
    odd = (REFERENCE / "extra/aan-odd/new_aan_pairs.train.tsv").read_bytes()
    found = read(tmp_path, odd)
    assert len(found) == 5
    assert found[1][0] == b""
    assert len(found[2][0]) == 10_000 or len(found[2][1]) == 10_000
    assert found[3][2] == 0
    with pytest.raises(ValueError, match=r"train\.tsv, line 2: text1 is not a whole bytes literal"):
        read(tmp_path, odd, decode_literals=True)
    task = Retrieval(data_dir=tmp_path, decode_literals=True, on_bad_row="skip")
    assert len(pairs(task)) == 2
    assert [reason.split(":")[0][-1] for reason in task.skipped["train"]] == ["2", "4", "5"]


@needs_reference
def test_reference_nestings(tmp_path: Path) -> None:
    fingerprints = {cache_folder(Retrieval(data_dir=REFERENCE), tmp_path / "cache")}
    for folder in ("a/aan", "b/lra_release/tsv_data"):
        (tmp_path / folder).mkdir(parents=True)
        for name in FILES.values():
            (tmp_path / folder / name).write_bytes((TSV / name).read_bytes())
        task = Retrieval(data_dir=tmp_path / folder[0])
        fingerprints.add(cache_folder(task, tmp_path / "cache"))
    assert len(fingerprints) == 1
