"""Rules without a sequence model, on made-up tasks whose answer is known for each rule."""

from __future__ import annotations

import sys
import tracemalloc
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from lra.results import rules
from lra.results.floors import Floor, save
from lra.tasks.batches import TokenArrays
from lra.tasks.cache import Dataset, prepare
from lra.tasks.task import Example, Task
from tests.toy import Toy

needs_sklearn = pytest.mark.skipif(bool(rules.unavailable()), reason="scikit-learn is missing")
Draw = Callable[[np.random.Generator], tuple[list[Any], int]]  # sequences and a label
SIZES = {"train": 400, "val": 100, "test": 200}


@dataclass(kw_only=True)
class MadeUp(Toy):
    """Whatever `draw` gives."""

    draw: Draw

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"draw": self.draw.__name__}

    def examples(self, split: str) -> Iterator[Example]:
        draws = np.random.default_rng([len(split), 11])
        for _ in range(self.sizes[split]):
            sequences, label = self.draw(draws)
            yield Example(tuple(np.array(s, np.uint8) for s in sequences), label)


@dataclass(kw_only=True)
class Picture(MadeUp):
    num_values: ClassVar[int] = 256
    picture_size = (16, 24)


@dataclass(kw_only=True)
class Pair(MadeUp):
    num_sequences: ClassVar[int] = 2


@dataclass(kw_only=True)
class ThreeClasses(MadeUp):
    num_classes: ClassVar[int] = 3


def made_up(
    folder: Path, draw: Draw, kind: type[MadeUp] = MadeUp, **knobs: Any
) -> tuple[Task, Dataset]:
    knobs = {"max_length": 400, "sizes": SIZES} | knobs
    task = kind(data_dir=folder, draw=draw, **knobs)
    return task, prepare(task, folder / "cache")


def found(task: Task, data: Dataset, *names: str) -> dict[str, float]:
    """Test accuracy of these classifiers and of all rules that need no package, by name."""
    floors = [*rules.label_rules(task, data), rules.nearest_mean(task, data)]
    floors += [rules.linear(v, task, data) for v in rules.views(task) if v.name in names]
    return {floor.name: floor.test.accuracy for floor in floors}


def last_decides(draws: np.random.Generator) -> tuple[list[Any], int]:
    tokens = draws.integers(0, 10, draws.integers(5, 30))
    return [tokens], int(tokens[-1] > 4)


def length_decides(draws: np.random.Generator) -> tuple[list[Any], int]:
    length = draws.integers(1, 20)
    return [draws.integers(0, 10, length)], int(length % 2)


def parity_decides(draws: np.random.Generator) -> tuple[list[Any], int]:
    number = draws.integers(0, 10)
    return [draws.permutation([3] * number + [4] * (20 - number))], int(number % 2)


def commoner_decides(draws: np.random.Generator) -> tuple[list[Any], int]:
    threes = draws.integers(0, 12)
    threes += threes > 5
    tokens = [3] * threes + [4] * (12 - threes) + [*draws.choice([0, 1, 2, 5], 20)]
    return [draws.permutation(tokens)], int(threes > 6)


def bigram_decides(draws: np.random.Generator) -> tuple[list[Any], int]:
    """The same bag in all: 1 2 or 2 1, somewhere."""
    label = int(draws.integers(2))
    tokens, place = draws.permutation([0, 3, 4, 5] * 5), draws.integers(1, 19)
    return [np.insert(tokens, place, [1, 2] if label else [2, 1])], label


def block_decides(draws: np.random.Generator) -> tuple[list[Any], int]:
    """The brightness of one block of noise, made up for by another."""
    label = int(draws.integers(2))
    picture = draws.integers(0, 200, (16, 24))
    picture[8:, 8:16] += 55 * label
    picture[8:, 16:] += 55 * (1 - label)
    return [picture.ravel()], label


def equal_bags_decide(draws: np.random.Generator) -> tuple[list[Any], int]:
    label = int(draws.integers(2))
    first = draws.integers(0, 10, draws.integers(20, 40))
    second = draws.permutation(first) if label else draws.integers(0, 10, len(first))
    return [first, second], label


def often_empty(draws: np.random.Generator) -> tuple[list[Any], int]:
    label = int(draws.integers(2))
    return [[1 + label] * draws.integers(3) for _ in "ab"], label


def test_label_rules_find_what_they_look_at(tmp_path: Path) -> None:
    last = {f.name: f for f in rules.label_rules(*made_up(tmp_path, last_decides))}
    assert list(last) == ["commonest_label", "first_token", "last_token", "length"]
    assert last["last_token"].test.accuracy == last["last_token"].val.accuracy == 1
    assert max(last[n].test.accuracy for n in ("commonest_label", "first_token", "length")) < 0.65
    length = {f.name: f for f in rules.label_rules(*made_up(tmp_path, length_decides))}
    assert length["length"].test.accuracy == 1
    assert length["last_token"].test.accuracy < 0.65
    # All bags of the same length, and one last token: rules that cannot tell are left out.
    same = made_up(
        tmp_path, lambda draws: ([[*draws.integers(0, 9, 3), 9]], int(draws.integers(2)))
    )
    assert [f.name for f in rules.label_rules(*same)] == ["commonest_label", "first_token"]


@needs_sklearn
def test_counts_tell_which_token_is_commoner_but_not_a_parity(tmp_path: Path) -> None:
    commoner = found(*made_up(tmp_path, commoner_decides), "linear_counts", "linear_ngrams")
    assert min(commoner[n] for n in ("linear_counts", "linear_ngrams", "nearest_mean")) > 0.97
    assert max(commoner[n] for n in ("first_token", "last_token")) < 0.85
    parity = found(*made_up(tmp_path, parity_decides), "linear_counts")
    assert max(parity[n] for n in ("linear_counts", "nearest_mean")) < 0.7


@needs_sklearn
def test_n_grams_tell_an_order_that_counts_do_not_have(tmp_path: Path) -> None:
    accuracy = found(*made_up(tmp_path, bigram_decides), "linear_counts", "linear_ngrams")
    assert accuracy["linear_ngrams"] > 0.97
    assert max(accuracy[n] for n in ("linear_counts", "nearest_mean")) < 0.65


@needs_sklearn
def test_pictures_are_read_by_pixel_and_by_block(tmp_path: Path) -> None:
    task, data = made_up(tmp_path, block_decides, Picture)
    accuracy = found(task, data, "linear_counts", "linear_pixels", "linear_blocks")
    assert "similarity" not in {view.name for view in rules.views(task)}
    assert min(accuracy[n] for n in ("linear_pixels", "linear_blocks", "nearest_mean")) > 0.97
    assert accuracy["linear_counts"] < 0.65


@needs_sklearn
def test_pairs_are_told_by_how_alike_their_bags_are(tmp_path: Path) -> None:
    accuracy = found(*made_up(tmp_path, equal_bags_decide, Pair), "linear_counts", "similarity")
    assert accuracy["similarity"] > 0.97
    assert max(accuracy[n] for n in ("linear_counts", "nearest_mean", "length")) < 0.65


@needs_sklearn
@pytest.mark.parametrize("kind", [MadeUp, Pair])
def test_sequences_may_be_empty(tmp_path: Path, kind: type[MadeUp]) -> None:
    def draw(draws: np.random.Generator) -> tuple[list[Any], int]:
        sequences, label = often_empty(draws)
        return sequences[: kind.num_sequences], label

    task, data = made_up(tmp_path, draw, kind)
    assert (data.train.lengths == 0).any() and (data.test.lengths == 0).any()
    with warnings.catch_warnings(action="error"):
        floors = rules.measure(task, data).floors
    assert {f.name for f in floors} >= {"last_token", "nearest_mean", "linear_ngrams"}
    # Right on all that are not empty, and on some of these.
    seen = data.test.lengths > 0
    ngrams = next(f for f in floors if f.name == "linear_ngrams")
    assert ngrams.test.correct_N[seen].all() and ngrams.test.accuracy < 1


@needs_sklearn
def test_a_class_may_be_missing_from_train(tmp_path: Path) -> None:
    task, data = made_up(tmp_path, commoner_decides, ThreeClasses)
    with warnings.catch_warnings(action="error"):
        accuracy = found(task, data, "linear_counts")
    assert min(accuracy["linear_counts"], accuracy["nearest_mean"]) > 0.97


@needs_sklearn
def test_two_calls_give_the_same_and_the_penalty_is_the_best_on_val(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, data = made_up(tmp_path, commoner_decides, sizes={"train": 40, "val": 20, "test": 20})
    once = rules.measure(task, data)
    assert rules.measure(task, data) == once
    names = [floor.name for floor in once.floors]
    assert names[-3:] == ["nearest_mean", "linear_counts", "linear_ngrams"]

    def alone(penalty: float) -> Floor:
        monkeypatch.setattr(rules, "PENALTIES", (penalty,))
        return rules.linear(rules.views(task)[1], task, data)

    by_penalty = {penalty: alone(penalty) for penalty in rules.PENALTIES}
    best = max(floor.val.accuracy for floor in by_penalty.values())
    chosen = next(p for p, floor in by_penalty.items() if floor.val.accuracy == best)
    assert (
        f"L2 penalty {chosen:g}, the best on validation of 0.001, " in once.floors[-1].description
    )
    assert once.floors[-1].val == by_penalty[chosen].val
    assert once.floors[-1].test == by_penalty[chosen].test
    assert once.floors[-1].title == "a linear classifier of hashed n-grams of 1 to 3 tokens"


@needs_sklearn
def test_n_grams_are_those_of_each_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    examples = [[bytes([1, 2, 1, 2, 1]), bytes([1, 2])], [b"", b""], [b"", bytes([0])]]
    chunk = TokenArrays.of(examples, 2, 9)
    grams = rules.hashed_grams(chunk, 3, (1, 2, 3)).toarray()
    for row, example in zip(grams, examples, strict=True):
        bag = Counter((s, sequence[i : i + n]) for s, sequence in enumerate(example)
                      for n in (1, 2, 3) for i in range(len(sequence) - n + 1))  # fmt: skip
        shares = sorted(times / bag.total() for times in bag.values())
        np.testing.assert_allclose(np.sort(row[row > 0] ** 2), shares, rtol=1e-6)
    # The same bigram has the same bucket wherever it stands.
    whole = TokenArrays.of([[bytes([5, 6, 9])], [bytes([7, 5, 6])]], 1, 9)
    a, b = rules.hashed_grams(whole, 10, (2,)).toarray() > 0
    assert (a & b).sum() == 1 and (a | b).sum() == 3
    counts = rules.counts(chunk, 3)
    assert counts.tolist() == [[0, 3, 2, 0, 1, 1], [0] * 6, [0, 0, 0, 1, 0, 0]]
    overlap = rules.similarities(TokenArrays.of([[b"\1\2\2", b"\2\1\2"], [b"", b""]], 2, 9), 3)
    np.testing.assert_allclose(overlap, [[1, 0.5, 0, 1], [0, 0, 0, 1]], rtol=1e-6)


def test_pictures_have_blocks_up_to_their_rim_and_end_in_zeros() -> None:
    picture = np.arange(10 * 9).reshape(10, 9).astype(np.uint8)
    chunk = TokenArrays.of([[picture.tobytes()], [picture.tobytes()[:12]]], 1, 90)
    pixels = rules.pixels(chunk, 90)
    assert (pixels[0] == picture.ravel()).all()
    assert pixels[1, :12].tolist() == list(range(12)) and not pixels[1, 12:].any()
    blocks = [picture[:8, :8], picture[:8, 8:], picture[8:, :8], picture[8:, 8:]]
    assert rules.block_sums(chunk, 10, 9)[0].tolist() == [block.sum() for block in blocks]


@needs_sklearn
def test_memory_is_that_of_a_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "CHUNK_VALUES", 2000)
    peaks = []
    for number in (400, 1600):
        task, data = made_up(tmp_path / str(number), last_decides, sizes=SIZES | {"train": number})
        view = rules.views(task)[1]
        tracemalloc.start()
        seen = 0
        for chunk in rules.shuffled(view, task, data.train):
            assert chunk.lengths_NS.sum() <= 2000 + data.train.lengths.max()
            seen += view.features(chunk).shape[0]
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert seen == number
    assert peaks[1] < 1.3 * peaks[0]


def test_without_scikit_learn_the_others_are_measured_and_no_rule_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, data = made_up(tmp_path, last_decides)
    whole = None if rules.unavailable() else rules.measure(task, data)
    for module in [m for m in sys.modules if m.split(".")[0] == "sklearn"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    assert rules.unavailable().endswith("pip install -e '.[floors]'")
    few = rules.measure(task, data)
    names = ["commonest_label", "first_token", "last_token", "length", "nearest_mean"]
    assert [floor.name for floor in few.floors] == names
    if whole:
        save(whole, tmp_path)
        with pytest.raises(ValueError, match="rules that were not measured now .linear_counts, "):
            save(few, tmp_path)
