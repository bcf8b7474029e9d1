"""ListOps: symbols, the released files, our generator against exact statistics, the stand-in."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import pytest
import yaml

from lra.tasks.cache import cache_folder, prepare
from lra.tasks.listops import ListOps
from lra.tasks.listops_files import encode, evaluate, read_tsv
from lra.tasks.listops_generator import SYMBOLS, Limits, draw_block, generate
from lra.tasks.task import SPLITS

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT.parent / "shared" / "data"
NESTED = "lra_release/lra_release/listops-1000"
SHORT = Limits(10, 60)
ROWS = [
    ("[SM 3 [MAX 8 ] 1 ]", 2),
    ("[SM 3 [MAX 8 1 ] ]", 1),
    ("[SM 3 [MIN 8 1 ] 5 ]", 9),
    ("[SM 3 [MIN 8 1 5 ] ]", 4),
    ("[MAX 4 3 [MIN 2 3 ] 1 0 [MED 1 5 8 9 2 ] ]", 5),
    ("[SM 9 9 9 ]", 7),
    ("[MIN 7 [SM 5 5 ] ]", 0),
    ("[MED 1 2 ]", 1),
    ("[MED 3 4 ]", 3),
    ("[MED 9 0 9 ]", 9),
    ("7", 7),
]


# --- helpers that share nothing with the code under test ---


def parse(tokens: list[str]) -> list | str:
    """A nested list [operator, argument, ...] or a digit; recursive, from the text alone."""
    token = tokens.pop()
    if not token.startswith("["):
        return token
    node: list = [token]
    while tokens[-1] != "]":
        node.append(parse(tokens))
    tokens.pop()
    return node


def value_of(node: list | str) -> int:
    if isinstance(node, str):
        return int(node)
    args = [value_of(arg) for arg in node[1:]]
    return {
        "[MIN": min,
        "[MAX": max,
        "[MED": lambda a: int(statistics.median(a)),
        "[SM": lambda a: sum(a) % 10,
    }[node[0]](args)


def operators_of(node: list | str, depth: int = 1) -> list[tuple[str, int, int]]:
    """(operator, number of arguments, depth) of every operator."""
    if isinstance(node, str):
        return []
    below = [found for arg in node[1:] for found in operators_of(arg, depth + 1)]
    return [(node[0], len(node) - 1, depth), *below]


def bracketed(node: list | str) -> str:
    """The released form: a left-nested chain of pairs in round brackets."""
    if isinstance(node, str):
        return node
    text = node[0]
    for arg in [*map(bracketed, node[1:]), "]"]:
        text = f"( {text} {arg} )"
    return text


def tree_of(text: str) -> list | str:
    return parse(text.split()[::-1])


def length_distribution(limits: Limits) -> np.ndarray:
    """Probability of each length below the upper limit, by convolution instead of drawing."""
    size = limits.max_tree_length
    chance = np.eye(1, size, 1)[0]  # at the last depth: one token
    for _ in range(limits.max_depth - 1):
        args, power = np.zeros(size), chance
        for _ in range(2, limits.max_args + 1):
            power = np.convolve(power, chance)[:size]
            args += power / (limits.max_args - 1)
        chance = 0.75 * np.eye(1, size, 1)[0]
        chance[2:] += 0.25 * args[:-2]
    return chance


def write_files(
    folder: Path, train: list[str], val: list[str] | None = None, test: list[str] | None = None
) -> Path:
    """The three files in the released form (round brackets, CRLF) with true labels."""
    folder.mkdir(parents=True, exist_ok=True)
    few = [text for text, _ in ROWS[:6]]
    for split, rows in zip(SPLITS, (train, val or few[:3], test or few[3:]), strict=True):
        lines = ["Source\tTarget"]
        lines += [f"{bracketed(tree_of(row))}\t{value_of(tree_of(row))}" for row in rows]
        (folder / f"basic_{split}.tsv").write_bytes("".join(f"{x}\r\n" for x in lines).encode())
    return folder


def all_bytes(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*.npy")}


@pytest.fixture(scope="module")
def texts() -> list[str]:
    task = ListOps(data_dir=Path("nowhere"))
    rows = generate(100, SHORT, seed=3)
    return [task.decode(np.frombuffer(values, np.uint8)) for values, _ in rows]


# --- symbols ---


@pytest.mark.parametrize(("text", "value"), ROWS)
def test_encode_keeps_every_token_and_evaluate_gives_the_value(text: str, value: int) -> None:
    values = encode(text)
    assert ListOps(data_dir=Path("nowhere")).decode(values) == text
    assert evaluate(values.tobytes()) == value == value_of(tree_of(text))


def test_brackets_decide() -> None:
    assert encode(ROWS[0][0]).tolist() != encode(ROWS[1][0]).tolist()
    assert encode(ROWS[2][0]).tolist() != encode(ROWS[3][0]).tolist()


def test_round_brackets_are_dropped() -> None:
    values = encode("( ( ( [MAX 2 ) 9 ) ] )")
    assert [SYMBOLS[value] for value in values] == ["[MAX", "2", "9", "]"]
    assert evaluate(values.tobytes()) == 9
    assert bracketed(tree_of("[MAX 4 3 ]")) == "( ( ( [MAX 4 ) 3 ) ] )"


def test_vocabulary_is_closed_and_ids_fit() -> None:
    assert " ".join(SYMBOLS) == "0 1 2 3 4 5 6 7 8 9 [MIN [MAX [MED [SM ]"
    assert encode(" ".join(SYMBOLS)).tolist() == list(range(15))
    task = ListOps(data_dir=Path("nowhere"))
    assert task.vocab_size == 16  # padding and 15 symbols
    assert encode("]").max() + 1 < task.vocab_size
    with pytest.raises(ValueError, match=r"unknown token '\[FIRST', expected one of 0 1"):
        encode("[FIRST 3 4 ]")


def test_vocabulary_is_the_same_in_every_process() -> None:
    code = (
        "from lra.tasks.listops_files import SYMBOLS, encode\n"
        "print(encode(' '.join(sorted(SYMBOLS))))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in "123"
    }
    assert outputs == {f"{encode(' '.join(sorted(SYMBOLS)))}\n"}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "expected one expression, found 0"),
        ("3 4", "expected one expression, found 2"),
        ("[MAX 1 ] [MIN 2 ]", "expected one expression, found 2"),
        ("[SM 3 [MAX 8 1 ]", r"ends with 1 operator\(s\) not closed"),
        ("[SM 3 ] ]", "a ']' without an operator"),
        ("] 3", "a ']' without an operator"),
        ("[SM 3 [MED ] ]", r"\[MED without arguments"),
    ],
)
def test_evaluate_refuses_what_is_not_one_expression(text: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        evaluate(encode(text).tobytes())


def test_evaluate_does_not_recurse() -> None:
    assert evaluate(encode("[SM 1 " * 5003 + "] " * 5003).tobytes()) == 3


# --- the generator ---


@pytest.fixture(scope="module")
def drawn() -> tuple[list[str], list[int]]:
    """Texts and labels of all trees kept from six blocks, about 4,000."""
    task = ListOps(data_dir=Path("nowhere"))
    found: list[str] = []
    labels: list[int] = []
    for number in range(6):
        block = draw_block(Limits(), 0, number)
        values, start = np.frombuffer(block.tokens, np.uint8), 0
        for length in block.lengths:
            found.append(task.decode(values[start : start + length]))
            start += length
        assert start == len(values)
        labels += block.labels
    return found, labels


@pytest.fixture(scope="module")
def operators(drawn: tuple[list[str], list[int]]) -> list[list[tuple[str, int, int]]]:
    return [operators_of(tree_of(text)) for text in drawn[0]]


def test_labels_are_the_values(drawn: tuple[list[str], list[int]]) -> None:
    texts, labels = drawn
    assert [value_of(tree_of(text)) for text in texts] == labels
    assert [evaluate(encode(text).tobytes()) for text in texts[:500]] == labels[:500]


def test_trees_are_written_as_the_original_writes_them(drawn: tuple[list[str], list[int]]) -> None:
    for text in drawn[0][:200]:
        source = bracketed(tree_of(text))
        assert len(source.split()) == 3 * len(text.split()) - 2
        assert encode(source).tolist() == encode(text).tolist()


@pytest.mark.parametrize(("limits", "num_blocks"), [(Limits(), 6), (SHORT, 12)])
def test_lengths_follow_the_exact_distribution(limits: Limits, num_blocks: int) -> None:
    chance = length_distribution(limits)
    chance[: limits.min_tree_length + 1] = 0
    lengths = np.concatenate([draw_block(limits, 0, i).lengths for i in range(num_blocks)])
    num_drawn = 8192 * num_blocks
    kept = chance.sum()  # 8.3 % at the original's limits
    assert abs(len(lengths) / num_drawn - kept) < 3.3 * np.sqrt(kept * (1 - kept) / num_drawn)
    # Chi-square over ten bins of about equal chance; 27.9 is exceeded once in 1,000.
    edges = np.searchsorted(np.cumsum(chance) / kept, np.linspace(0.1, 0.9, 9))
    expected = np.add.reduceat(chance, [0, *(edges + 1)]) / kept * len(lengths)
    counts = np.bincount(np.searchsorted(edges, lengths), minlength=10)
    assert ((counts - expected) ** 2 / expected).sum() < 27.9
    assert lengths.min() > limits.min_tree_length
    assert lengths.max() < limits.max_tree_length


def test_length_distribution_is_the_reference(drawn: tuple[list[str], list[int]]) -> None:
    """Statistics of 20,000 trees of the original program, within sampling error of both."""
    lengths = np.array([len(text.split()) for text in drawn[0]])
    reference = [2630, 2386, 2163, 1967, 1730, 1596, 1319, 1152, 1034, 899, 821, 713, 611, 529, 450]
    counts = np.histogram(lengths, np.arange(500, 2001, 100))[0]
    pooled = (counts + reference) / (len(lengths) + 20_000)
    chi2 = sum(
        ((sample - pooled * size) ** 2 / (pooled * size)).sum()
        for sample, size in ((counts, len(lengths)), (np.array(reference), 20_000))
    )
    assert chi2 < 36.1  # 14 degrees of freedom, exceeded once in 1,000
    assert abs(lengths.mean() - 1030.3) < 3.3 * 393.9 * np.sqrt(1 / len(lengths) + 1 / 20_000)


def test_operators_and_digits(
    drawn: tuple[list[str], list[int]], operators: list[list[tuple[str, int, int]]]
) -> None:
    # Every long tree reaches the last depth at which an operator may stand.
    assert {max(depth for _, _, depth in found) for found in operators} == {9}
    flat = [operator for found in operators for operator in found]
    mean = len(flat) / len(operators)
    assert abs(mean - 146.6) < 3.3 * 56 * np.sqrt(1 / len(operators) + 1 / 20_000)
    names = collections.Counter(name for name, _, _ in flat)
    assert sorted(names) == ["[MAX", "[MED", "[MIN", "[SM"]
    for count in names.values():
        assert abs(count / len(flat) - 0.25) < 3.3 * np.sqrt(0.25 * 0.75 / len(flat))
    shares = [0.1095, 0.1101, 0.1103, 0.1109, 0.1109, 0.1114, 0.1120, 0.1125, 0.1125]
    num_args = collections.Counter(number for _, number, _ in flat)
    assert sorted(num_args) == list(range(2, 11))
    for number, share in enumerate(shares, 2):
        assert abs(num_args[number] / len(flat) - share) < 0.002
    digits = collections.Counter("".join(drawn[0]))
    total = sum(digits[digit] for digit in "0123456789")
    for digit in "0123456789":
        assert abs(digits[digit] / total - 0.1) < 3.3 * np.sqrt(0.1 * 0.9 / total)


def test_label_shares(drawn: tuple[list[str], list[int]]) -> None:
    texts, labels = drawn
    shares = np.array([0.167, 0.093, 0.079, 0.081, 0.088, 0.085, 0.078, 0.072, 0.087, 0.169])
    found = np.bincount(labels, minlength=10) / len(labels)
    error = np.sqrt(shares * (1 - shares) * (1 / len(labels) + 1 / 20_000))
    assert (abs(found - shares) < 3.3 * error).all()
    roots = np.array([text.split()[0] for text in texts])
    assert abs(np.mean(np.array(labels)[roots == "[MIN"] == 0) - 0.56) < 0.06
    assert abs(np.mean(np.array(labels)[roots == "[MAX"] == 9) - 0.57) < 0.06


def test_short_set_is_the_reference() -> None:
    rows = generate(3000, SHORT, seed=1)
    task = ListOps(data_dir=Path("nowhere"))
    trees = [tree_of(task.decode(np.frombuffer(values, np.uint8))) for values, _ in rows]
    assert [value_of(tree) for tree in trees] == [label for _, label in rows]
    lengths = np.array([len(values) for values, _ in rows])
    assert (lengths.min(), lengths.max()) == (11, 59)
    assert abs(lengths.mean() - 23.0) < 1
    assert abs(np.median(lengths) - 19) <= 1
    depths = np.array([max(depth for _, _, depth in operators_of(tree)) for tree in trees])
    for depth, share in enumerate([0.08, 0.41, 0.27, 0.14, 0.06, 0.03], 1):
        assert abs(np.mean(depths == depth) - share) < 0.03
    shares = np.array([0.148, 0.099, 0.086, 0.083, 0.095, 0.089, 0.078, 0.081, 0.094, 0.146])
    found = np.bincount([label for _, label in rows], minlength=10) / len(rows)
    assert (abs(found - shares) < 3.5 * np.sqrt(shares * (1 / 3000 + 1 / 5000))).all()


def test_limits_are_exclusive_and_obeyed() -> None:
    assert {len(values) for values, _ in generate(300, Limits(10, 12), seed=0)} == {11}
    rows = generate(300, Limits(3, 40, max_depth=3, max_args=2), seed=0)
    for values, label in rows:
        tree = tree_of(" ".join(SYMBOLS[value] for value in values))
        found = operators_of(tree)
        assert 3 < len(values) < 40
        assert max(depth for _, _, depth in found) <= 2
        assert {number for _, number, _ in found} == {2}
        assert value_of(tree) == label
    # Sums of so many digits do not fit a byte.
    for values, label in generate(200, Limits(60, 100, max_depth=2, max_args=100), seed=0):
        assert value_of(tree_of(" ".join(SYMBOLS[value] for value in values))) == label


def test_repeated_expressions_are_dropped_and_too_few_is_an_error() -> None:
    """Below five tokens there are 10 digits and 4 x 10 x 10 pairs."""
    rows = generate(410, Limits(0, 5), seed=0)
    assert len({values for values, _ in rows}) == 410
    with pytest.raises(ValueError, match="found only 410 of 411 distinct .*max_tree_length=5"):
        generate(411, Limits(0, 5), seed=0)
    with pytest.raises(ValueError, match="found only 0 of 1 distinct"):
        generate(1, Limits(1, 4), seed=0)  # no expression has two or three tokens


def test_splits_are_disjoint_and_in_order(tmp_path: Path) -> None:
    sizes = {"num_train": 500, "num_val": 60, "num_test": 40}
    task = ListOps(
        data_dir=tmp_path, source="generated", min_tree_length=3, max_tree_length=6, **sizes
    )
    rows = [list(task.examples(split)) for split in SPLITS]
    assert [len(part) for part in rows] == [500, 60, 40]
    everything = [example.sequences[0] for part in rows for example in part]
    assert len(set(everything)) == 600
    assert everything == [values for values, _ in generate(600, Limits(3, 6), seed=0)]


TINY = {"source": "generated", "min_tree_length": 3, "max_tree_length": 6}


@pytest.mark.parametrize("num_train", [250, 300, 301, 320, 345, 360, 385, 400, 500])
def test_other_sizes_share_as_many_examples_as_is_said(tmp_path: Path, num_train: int) -> None:
    ours = ListOps(data_dir=tmp_path, **TINY, num_train=300, num_val=40, num_test=60)
    config = TINY | {"num_train": num_train, "num_val": 7, "num_test": 1}
    theirs = ListOps(data_dir=tmp_path, **config)
    seen = {example.sequences[0] for example in theirs.examples("train")}
    counts = {
        split: sum(example.sequences[0] in seen for example in ours.examples(split))
        for split in ("val", "test")
    }
    expected = " and ".join(
        f"{count} of the {ours.sizes[split]} {split}" for split, count in counts.items() if count
    )
    said = ours.overlaps({"_target_": "lra.tasks.listops.ListOps", "max_length": 2000, **config})
    assert said.partition(" examples are among")[0] == expected
    assert not expected or f"task.num_train={num_train} there, 300 here" in said
    assert bool(expected) == (num_train > 300)


def test_overlaps_with_the_defaults_and_with_limits(tmp_path: Path) -> None:
    ours = ListOps(data_dir=tmp_path, source="auto", num_train=95_000)
    assert ours.overlaps({}).startswith("1,000 of the 2,000 val examples")
    assert ours.overlaps({"num_train": None}) == ours.overlaps({"source": "auto"}) != ""
    assert ours.overlaps({"limit_train": 50}).startswith("up to 50 of the 2,000 val examples")
    limited = dataclasses.replace(ours, num_train=90_000, limit_val=10, limit_test=9_999)
    assert limited.overlaps({}).startswith("up to 10 of the 10 val and up to 2,000 of the 2,000 t")
    stand_in = ListOps(data_dir=tmp_path, source="synthetic", num_train=1_990)
    assert stand_in.overlaps({"source": "synthetic"}).startswith("10 of the 200 val examples")


@pytest.mark.parametrize(
    "other",
    [
        {"generator_seed": 1}, {"max_tree_length": 1999}, {"source": "files"}, {"path": "x"},
        {"source": "synthetic"}, {"_target_": "lra.tasks.pathfinder.Pathfinder"},
        {"num_train": "many"}, {"num_train": [1]}, {"generator_seed": {}}, {"source": 5}, None, 7,
    ],
)  # fmt: skip
def test_what_shares_no_stream_or_is_no_config_has_no_overlaps(tmp_path: Path, other: Any) -> None:
    task = ListOps(data_dir=tmp_path, source="generated", num_train=300)
    assert task.overlaps({"source": "generated"}) != ""
    assert (
        task.overlaps({"source": "generated", **other} if isinstance(other, dict) else other) == ""
    )


def test_output_is_pinned() -> None:
    """Changes when numpy's streams or the generator do; then raise GENERATOR_VERSION."""
    digest = hashlib.sha256()
    for values, label in generate(700, seed=0):  # reaches into the second block
        digest.update(values + bytes([label]))
    assert digest.hexdigest() == "693894601dfac36a46d7553681b9983f25f8b8c9d2f735675f29ae2dc18d02aa"
    assert generate(5, seed=0) == generate(5, seed=0) != generate(5, seed=1)
    assert generate(5, seed=0) == generate(800, seed=0)[:5]


@pytest.mark.parametrize("source", ["generated", "synthetic", "files"])
def test_same_bytes_for_any_number_of_processes(
    tmp_path: Path, source: str, texts: list[str]
) -> None:
    settings: dict = {"num_train": 900, "num_val": 50, "num_test": 50}
    if source == "files":
        write_files(tmp_path, texts * 15)  # several chunks of lines
        settings = {}
    caches = []
    for num_workers in (0, 1, 2, 4):
        task = ListOps(data_dir=tmp_path, source=source, **settings)
        data = prepare(task, tmp_path / f"cache{num_workers}", num_workers=num_workers)
        caches.append(all_bytes(data.folder))
    assert len(caches[0]) == 9
    assert all(cache == caches[0] for cache in caches)


def test_how_far_a_build_is_counts_what_will_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    totals: dict[str, Any] = {}

    def counting(what: str, total: int | None) -> Any:
        totals[what.strip()] = total
        return contextlib.nullcontext(lambda done: None)

    monkeypatch.setattr("lra.tasks.cache.counting", counting)
    sizes = {"num_train": 40, "num_val": 10, "num_test": 10}
    prepare(ListOps(data_dir=tmp_path, **TINY, **sizes), tmp_path / "cache")  # type: ignore[arg-type]
    assert totals == {"train": 40, "val": 10, "test": 10}


def test_killed_build_leaves_no_workers_no_lock_and_no_cache(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys, lra.tasks.cache, lra.tasks.listops\n"
        "task = lra.tasks.listops.ListOps(data_dir=pathlib.Path('x'), num_train=10**7)\n"
        "lra.tasks.cache.prepare(task, pathlib.Path(sys.argv[1]), num_workers=2)\n"
    )
    builder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert builder.stderr is not None
        assert b"preparing listops" in builder.stderr.readline()
        time.sleep(1.5)  # the workers are at it
        assert builder.poll() is None
        builder.kill()
        builder.wait()
        (lock,) = tmp_path.glob("listops-*.lock")
        with filelock.FileLock(lock, timeout=10):
            assert not list(tmp_path.glob("listops-*/meta.json"))
        deadline = time.monotonic() + 10
        with pytest.raises(ProcessLookupError):
            while time.monotonic() < deadline:
                os.killpg(builder.pid, 0)
                time.sleep(0.05)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(builder.pid, signal.SIGKILL)
        builder.stderr.close()


# --- settings ---


@pytest.mark.parametrize(
    "settings",
    [
        {"source": "hub"},
        {"source": "generated", "path": "somewhere"},
        {"num_val": 0},
        {"min_tree_length": -1},
        {"max_tree_length": 501},
        {"max_depth": 0},
        {"max_args": 1},
        {"generator_seed": -1},
        {"max_length": 0},
    ],
)
def test_settings_out_of_range_name_the_key(tmp_path: Path, settings: dict) -> None:
    with pytest.raises(
        ValueError, match=rf"task\.{list(settings)[-1]}={list(settings.values())[-1]}"
    ):
        ListOps(data_dir=tmp_path, **settings)


def test_every_setting_shapes_the_fingerprint(tmp_path: Path) -> None:
    changes: list[dict] = [
        {},
        {"num_train": 7},
        {"num_val": 7},
        {"num_test": 7},
        {"min_tree_length": 7},
        {"max_tree_length": 777},
        {"max_depth": 7},
        {"max_args": 7},
        {"generator_seed": 7},
        {"max_length": 7},
        {"source": "synthetic"},
    ]
    tasks = [ListOps(**({"data_dir": tmp_path, "source": "generated"} | c)) for c in changes]
    assert len({cache_folder(task, tmp_path)[1] for task in tasks}) == len(changes)


def test_deviations_from_the_original(tmp_path: Path) -> None:
    assert ListOps(data_dir=tmp_path).deviations() == []
    task = ListOps(data_dir=tmp_path, max_depth=5, min_tree_length=100)
    assert task.deviations() == [
        "task.min_tree_length=100 (original: 500)",
        "task.max_depth=5 (original: 10)",
    ]


def test_generator_keys_are_refused_for_files(tmp_path: Path) -> None:
    write_files(tmp_path, ["[MAX 1 2 ]"])
    for key in ("num_train", "max_depth", "generator_seed"):
        with pytest.raises(ValueError, match=rf"task\.{key}=7 is for generated data.*{tmp_path}"):
            ListOps(data_dir=tmp_path, **{key: 7}).settings()


def test_config_file_holds_every_key_with_its_default() -> None:
    text = (ROOT / "configs" / "task" / "listops.yaml").read_text()
    assert text.startswith("# @package _global_\n")
    settings = yaml.safe_load(text)["task"]
    assert settings.pop("_target_") == f"{ListOps.__module__}.{ListOps.__name__}"
    defaults = {f.name: f.default for f in dataclasses.fields(ListOps) if f.init}
    defaults.pop("data_dir")  # comes from paths.data
    assert settings == defaults


# --- where files are found ---


def test_every_layout_gives_the_same_fingerprint(tmp_path: Path, texts: list[str]) -> None:
    layouts = [NESTED, "lra_release/listops-1000", "listops-1000", "listops", ""]
    tasks = [
        ListOps(data_dir=write_files(tmp_path / str(i) / layout, texts).parents[layout.count("/")])
        if layout
        else ListOps(data_dir=write_files(tmp_path / str(i), texts))
        for i, layout in enumerate(layouts)
    ]
    inside = tmp_path / "0" / NESTED
    for path in (
        tmp_path / "0",
        inside.parent.parent,
        inside.parent,
        inside,
        inside / "basic_train.tsv",
    ):
        tasks.append(ListOps(data_dir=tmp_path / "none", path=str(path)))
    assert {task.kind for task in tasks} == {"files"}
    assert len({cache_folder(task, tmp_path / "cache")[1] for task in tasks}) == 1


def test_one_changed_byte_changes_the_fingerprint_and_the_cache(tmp_path: Path) -> None:
    file = write_files(tmp_path, ["[MAX 1 2 ]", "[MAX 2 3 ]"]) / "basic_train.tsv"
    before = prepare(ListOps(data_dir=tmp_path), tmp_path / "cache")
    file.write_bytes(file.read_bytes().replace(b"[MAX 2", b"[MAX 1"))
    after = prepare(ListOps(data_dir=tmp_path), tmp_path / "cache")
    assert before.fingerprint != after.fingerprint
    assert before.train.sequence(1).tolist() == encode("[MAX 2 3 ]").tolist()
    assert after.train.sequence(1).tolist() == encode("[MAX 1 3 ]").tolist()


def test_two_folders_must_agree(tmp_path: Path) -> None:
    inner = write_files(tmp_path / NESTED, ["[MAX 1 2 ]"])
    outer = tmp_path / "lra_release" / "listops-1000"
    shutil.copytree(inner, outer)
    assert ListOps(data_dir=tmp_path).source_files()[0].parent == inner
    write_files(outer, ["[MAX 1 3 ]"])
    with pytest.raises(ValueError, match="differ in basic_train.tsv; set task.path") as error:
        ListOps(data_dir=tmp_path).settings()
    assert str(inner) in str(error.value)
    assert str(outer) in str(error.value)
    chosen = ListOps(data_dir=tmp_path, path=str(outer))
    assert chosen.source_files()[0].parent == outer
    write_files(outer, ["[MAX 1 2 ]"])
    (outer / "basic_val.tsv").unlink()
    with pytest.raises(ValueError, match="differ in basic_val.tsv"):
        ListOps(data_dir=tmp_path).settings()


def test_missing_file_is_named(tmp_path: Path) -> None:
    (write_files(tmp_path, ["7"]) / "basic_val.tsv").unlink()
    for source in ("auto", "files"):
        with pytest.raises(ValueError, match=f"{tmp_path} has no basic_val.tsv; expected all of"):
            ListOps(data_dir=tmp_path, source=source).source_files()


def test_nothing_found_names_places_and_ways_out(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="found no basic_train.tsv, basic_val.tsv") as error:
        ListOps(data_dir=tmp_path, source="files").source_files()
    for part in (
        tmp_path / NESTED,
        tmp_path / "lra_release" / "listops-1000",
        tmp_path / "listops-1000",
        tmp_path / "listops",
        "basic_test.tsv",
        "lra_release.gz",
        "task.path",
        "task.source=generated",
    ):
        assert str(part) in str(error.value)
    with pytest.raises(ValueError, match="found no basic_train.tsv"):
        ListOps(data_dir=tmp_path, path=str(tmp_path / "basic_train.tsv")).source_files()


def test_auto_generates_and_says_so(tmp_path: Path) -> None:
    task = ListOps(data_dir=tmp_path)
    assert task.kind == "generated"
    assert task.describe_source() == f"our generator, seed 0 (no basic_train.tsv under {tmp_path})"
    write_files(tmp_path / "listops", ["7"])
    task = ListOps(data_dir=tmp_path)
    assert task.kind == "files"
    assert task.describe_source() == f"the files in {tmp_path / 'listops'}"
    assert ListOps(data_dir=tmp_path, source="generated").kind == "generated"


@pytest.mark.parametrize("name", ["lra_release", "lra_release.gz", "lra_release.tar"])
def test_a_packed_release_is_named(tmp_path: Path, name: str) -> None:
    inside = write_files(tmp_path / "packed" / NESTED, ["[MAX 1 2 ]"])
    archive = tmp_path / "data" / name
    archive.parent.mkdir()
    with tarfile.open(archive, "w:gz" if name.endswith("gz") else "w") as tar:
        tar.add(tmp_path / "packed" / "lra_release", "lra_release")
    for settings in ({}, {"source": "files"}, {"path": str(archive)}):
        with pytest.raises(ValueError, match=f"{archive} is an archive; unpack it") as error:
            ListOps(data_dir=archive.parent, **settings).source_files()
    # The advice works as it stands.
    command = re.search("`(.+)`", str(error.value))
    assert command is not None
    subprocess.run(command[1], shell=True, check=True)
    task = ListOps(data_dir=archive.parent)
    assert task.source_files()[0].read_bytes() == (inside / "basic_train.tsv").read_bytes()


def test_a_path_to_some_other_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ValueError, match=r"task\.path=.*notes.txt: expected a folder"):
        ListOps(data_dir=tmp_path, path=str(tmp_path / "notes.txt")).source_files()


# --- what files may hold ---


GOOD = b"Source\tTarget\r\n( ( ( [MAX 2 ) 9 ) ] )\t9\r\n"


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "empty, expected the header"),
        (b"Source\tTarget\r\n", "has a header but no rows"),
        (b"[MAX 2 9 ]\t9\n[MAX 2 9 ]\t9\n", r"the first line is '\[MAX 2 9 \]\\t9\\n', expected"),
        (b"\xff\xfeS\0o\0u\0", r"the first line is .*not UTF-8"),
        (GOOD + b"[FIRST 3 4 ]\t3\n", r"line 3: unknown token '\[FIRST', expected one of"),
        (GOOD + b"[MAX 34 4 ]\t3\n", "line 3: unknown token '34'"),
        (GOOD + b'"[MAX 3 4 ]"\t4\n', r"""line 3: unknown token '"\[MAX'"""),
        (GOOD + b"[MAX 3 \xff ]\t3\n", r"line 3: unknown token .*xff.*not UTF-8"),
        (GOOD + b"[MAX 3\0 4 ]\t3\n", r"line 3: unknown token '3\\x00' \(a NUL byte\)"),
        (GOOD + b"\0\0\0\0", r"line 3: .*found 0 tabs in .*NUL byte"),
        (GOOD + b"[MAX 3 4 ]\t3\n", "line 3: label 3, but the expression has the value 4"),
        (GOOD + b"[SM 3 [MAX 8 1 ]\t1\n", r"line 3: the expression ends with 1 operator\(s\) not"),
        (GOOD + b"[MAX 3 4 ] ]\t4\n", "line 3: a ']' without an operator"),
        (GOOD + b"[MAX ]\t4\n", r"line 3: \[MAX without arguments"),
        (GOOD + b"[MAX 3 4 ] 4\t4\n", "line 3: expected one expression, found 2"),
        (GOOD + b"\t4\n", "line 3: expected one expression, found 0"),
        (
            GOOD + b"[MAX 3 4 ]",
            r"line 3: expected expression, tab, label, found 0 tabs in '\[MAX 3 4 \]'",
        ),
        (GOOD + b"[MAX 3 4 ]\t", "line 3: label '', expected 0 to 9"),
        (GOOD + b"\r\n" + GOOD[15:], "line 3: expected expression, tab, label, found 0 tabs in ''"),
        (GOOD + b"[MAX 3 4 ]\t4\t4\n", "line 3: expected expression, tab, label, found 2 tabs"),
        (GOOD + b"[MAX 3 4 ]\t10\n", "line 3: label '10', expected 0 to 9"),
        (GOOD + b"[MAX 3 4 ]\t4.0\n", "line 3: label '4.0', expected 0 to 9"),
        (GOOD + b"[MAX 3 4 ]\t4\n" * 2000 + b"[MAX 3 4 ]\t5\n" * 2000, "line 2003: label 5"),
    ],
)
@pytest.mark.parametrize("split", ["train", "test"])
def test_faulty_file_names_file_line_and_fault(
    tmp_path: Path, split: str, content: bytes, fault: str
) -> None:
    file = write_files(tmp_path, ["7"]) / f"basic_{split}.tsv"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=f"^{file}[:,] {fault}"):
        list(ListOps(data_dir=tmp_path).examples(split))


def test_a_line_without_end_is_refused_before_it_fills_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_files(tmp_path, ["7"]) / "basic_train.tsv"
    file.write_bytes(GOOD + b"[MAX 3 4 ]\t4\n" * 700 + b"[MAX " + b"1 " * 30 + b"]\t1\n")
    assert len(list(read_tsv(file))) == 702
    monkeypatch.setattr("lra.tasks.listops_files.MAX_LINE_BYTES", 64)
    with pytest.raises(ValueError, match=f"^{file}, line 703: more than 64 bytes"):
        list(read_tsv(file))


def test_a_fault_is_the_same_with_several_processes(tmp_path: Path) -> None:
    file = tmp_path / "basic_train.tsv"
    file.write_bytes(GOOD + b"[MAX 3 4 ]\t4\n" * 900 + b"[MAX 3 4 ]\t5\n" * 2000)
    with pytest.raises(ValueError, match=f"^{file}, line 903: label 5, but"):
        list(read_tsv(file, num_workers=2))


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("last", ["", "end"])
def test_line_ends(tmp_path: Path, end: str, last: str) -> None:
    lines = ["Source\tTarget", "( ( ( [MAX 2 ) 9 ) ] )\t9", "[MIN 2 9 ]\t2"]
    file = tmp_path / "basic_val.tsv"
    file.write_bytes((end.join(lines) + (end if last else "")).encode())
    found = [(" ".join(SYMBOLS[v] for v in values), label) for values, label in read_tsv(file)]
    assert found == [("[MAX 2 9 ]", 9), ("[MIN 2 9 ]", 2)]


def test_round_trip_through_the_released_form(tmp_path: Path, texts: list[str]) -> None:
    write_files(tmp_path, texts[:80], texts[80:90], texts[90:])
    data = prepare(ListOps(data_dir=tmp_path), tmp_path / "cache")
    task = ListOps(data_dir=tmp_path)
    found = [
        task.decode(arrays.sequence(i))
        for arrays in (data.train, data.val, data.test)
        for i in range(len(arrays))
    ]
    assert found == texts
    assert data.train.labels.tolist() == [value_of(tree_of(text)) for text in texts[:80]]
    batch = data.train.batch(np.arange(80))
    assert 0 < int(batch.tokens_BSL.max()) < task.vocab_size


def test_cut_expressions_are_counted_and_strict_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = ["[MAX 2 9 ]", "[SM 1 2 3 4 5 6 7 8 ]", "[SM 1 2 3 4 5 6 7 8 9 0 ]"]
    assert [len(row.split()) for row in rows] == [4, 10, 12]
    write_files(tmp_path, rows)
    data = prepare(ListOps(data_dir=tmp_path, max_length=10), tmp_path / "cache")
    assert data.meta["splits"]["train"]["truncated"] == 1
    assert data.meta["splits"]["train"]["longest_source"] == 12
    assert data.train.lengths.tolist() == [4, 10, 10]
    assert "1 of 3 train examples are longer than task.max_length=10" in capsys.readouterr().err
    with pytest.raises(ValueError, match="1 of 3 train examples are longer .*task.strict=false"):
        prepare(ListOps(data_dir=tmp_path, max_length=10, strict=True), tmp_path / "other")


def test_max_length_is_part_of_the_cache(tmp_path: Path) -> None:
    write_files(tmp_path, ["[SM " + "1 " * 20 + "]"])
    for max_length in (8, 16):
        data = prepare(ListOps(data_dir=tmp_path, max_length=max_length), tmp_path / "cache")
        assert data.train.lengths.max() == max_length


@pytest.mark.parametrize("name", ["tokens", "offsets", "labels"])
def test_truncated_cache_is_named(tmp_path: Path, name: str) -> None:
    write_files(tmp_path, ["[MAX 2 9 ]"] * 5)
    folder = prepare(ListOps(data_dir=tmp_path), tmp_path / "cache").folder
    file = folder / "train" / f"{name}.npy"
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(ValueError, match=f"{file}.*(truncated|damaged).*delete"):
        prepare(ListOps(data_dir=tmp_path), tmp_path / "cache")


@pytest.mark.skipif(not (REFERENCE / NESTED).is_dir(), reason="no reference data beside us")
def test_reference_files_load_and_their_labels_are_true(tmp_path: Path) -> None:
    data = prepare(ListOps(data_dir=REFERENCE, strict=True), tmp_path)
    sizes = [len(part) for part in (data.train, data.val, data.test)]
    assert sizes == [880, 150, 150]
    for part in (data.train, data.val, data.test):
        assert 501 <= part.lengths.min() <= part.lengths.max() <= 1999
    short = ListOps(data_dir=REFERENCE, path=str(REFERENCE / "extra" / "listops-short"))
    assert [len(list(short.examples(split))) for split in SPLITS] == [200, 50, 50]


# --- the synthetic stand-in ---


def test_synthetic_labels_are_the_most_frequent_digit(tmp_path: Path) -> None:
    task = ListOps(data_dir=tmp_path, source="synthetic", num_train=300)
    examples = list(task.examples("train"))
    assert len(examples) == 300
    assert [len(list(task.examples(split))) for split in ("val", "test")] == [200, 200]
    for (values,), label in examples:
        counts = np.bincount(np.frombuffer(values, np.uint8), minlength=15)[:10]
        assert counts.argmax() == label
        evaluate(values)  # still a well-formed expression
    lengths = np.array([len(values) for (values,), _ in examples])
    assert 500 < lengths.min() < 560 < 1700 < lengths.max() < 2000
    assert min(np.bincount([label for _, label in examples], minlength=10)) > 10
    # The trees are the generator's; the true values are not the labels.
    real = [len(values) for values, _ in generate(300, seed=0)]
    assert lengths.tolist() == real
    assert np.mean([evaluate(values) == label for (values,), label in examples]) < 0.9


def test_synthetic_is_learned_by_a_mean_of_embeddings(tmp_path: Path) -> None:
    import torch

    task = ListOps(data_dir=tmp_path, source="synthetic")
    data = prepare(task, tmp_path)
    torch.manual_seed(0)
    embedding = torch.nn.EmbeddingBag(task.vocab_size, 64, mode="mean", padding_idx=0)
    head = torch.nn.Linear(64, 10)
    optimizer = torch.optim.Adam([*embedding.parameters(), *head.parameters()], lr=3e-3)
    rng = np.random.default_rng(0)
    for _ in range(200):
        batch = data.train.batch(rng.integers(0, len(data.train), 32))
        loss = torch.nn.functional.cross_entropy(
            head(embedding(batch.tokens_BSL[:, 0])), batch.labels_B
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    batch = data.test.batch(np.arange(len(data.test)))
    correct = head(embedding(batch.tokens_BSL[:, 0])).argmax(dim=1) == batch.labels_B
    assert correct.float().mean() > 0.95
