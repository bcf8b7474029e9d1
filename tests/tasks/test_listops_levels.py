"""Following the outer levels of an expression: by hand, whole, cut, and as the rules of a task."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lra.tasks import listops_levels
from lra.tasks.batches import TokenArrays
from lra.tasks.listops import ListOps
from lra.tasks.listops_files import encode, evaluate
from lra.tasks.listops_generator import MAX, MED, MIN, SM, Limits, draw_block
from lra.tasks.listops_levels import answers, count_values, follow, ladder, num_open


def nothing(depth: int, operator: int) -> np.ndarray:
    raise AssertionError("all levels are followed")


def values(text: str) -> list[int]:
    return encode(text).tolist()


def asked_for(text: str, level: int) -> tuple[list[int], list[tuple[int, int]]]:
    """Value if what is not followed is 5, and what was asked for."""
    asked = []

    def unknown(depth: int, operator: int) -> np.ndarray:
        asked.append((depth, operator))
        return np.array([5, 6])

    return follow(values(text), level, 2, unknown).tolist(), asked


@pytest.mark.parametrize(
    ("text", "level", "value", "asked"),
    [
        ("[MAX 4 [MIN 2 9 ] 1 ]", 1, [5, 6], [(2, MIN)]),
        ("[MAX 4 [MIN 2 9 ] 1 ]", 2, [4, 4], []),
        ("[SM 4 [MED 2 [MAX 1 1 ] ] [MIN 7 [SM 1 2 ] 8 ] 3 ]", 1, [7, 9], [(2, MED), (2, MIN)]),
        ("[SM 4 [MED 2 [MAX 1 1 ] ] [MIN 7 [SM 1 2 ] 8 ] 3 ]", 2, [5, 7], [(3, MAX), (3, SM)]),
        ("[SM 4 [MED 2 [MAX 1 1 ] ] [MIN 7 [SM 1 2 ] 8 ] 3 ]", 3, [1, 1], []),
        ("[MED 1 [SM 2 ] 8 9 ]", 1, [6, 7], [(2, SM)]),
        ("[MIN 8 ] ", 0, [5, 6], [(1, MIN)]),
        ("7", 3, [7, 7], []),
        # Cut: an operator has what is left to it, none counts as not followed.
        ("[SM 4 [MAX 2", 2, [6, 6], []),
        ("[SM 4 [MAX", 2, [9, 0], [(2, MAX)]),
        ("[SM 4 [MAX 2 [MIN", 1, [9, 0], [(2, MAX)]),
    ],
)
def test_what_is_not_followed_is_asked_for(
    text: str, level: int, value: list[int], asked: list[tuple[int, int]]
) -> None:
    assert asked_for(text, level) == (value, asked)


def test_all_levels_give_the_value_of_an_expression() -> None:
    block = draw_block(Limits(10, 200), seed=3, number=0)
    depths: list[int] = []
    start, deepest = 0, 0
    for length, label in zip(block.lengths[:200], block.labels, strict=False):
        expression = list(block.tokens[start : start + length])
        start += length
        depths.clear()
        found = follow(expression, 99, 1, nothing, lambda depth, *_: depths.append(depth))
        assert found.tolist() == [label] == [evaluate(bytes(expression))]
        assert depths[-1] == 1 and num_open(expression) == 0
        deepest = max(deepest, *depths)
    assert deepest > listops_levels.NUM_LEVELS


def split(*texts: str, max_length: int = 99) -> TokenArrays:
    return TokenArrays.of([(encode(text),) for text in texts], 1, max_length)


def test_values_are_counted_by_depth_and_operator_in_whole_expressions() -> None:
    counts = count_values(split("[MAX 4 [MIN 2 9 ] [MIN 3 ] ]", "[MIN 2 2 ]", "[MAX 8 [MIN 1"))
    assert counts[1, MAX - MIN].tolist() == [1, 1, 1, 1, 2, 1, 1, 1, 1, 1]
    assert counts[1, 0].tolist() == [1, 1, 2, 1, 1, 1, 1, 1, 1, 1]
    assert counts[2, 0].tolist() == [1, 1, 2, 2, 1, 1, 1, 1, 1, 1]
    assert counts.sum() == counts.size + 4


def test_the_answer_is_what_most_draws_come_to(monkeypatch: pytest.MonkeyPatch) -> None:
    # Of depth 2, MIN is 0 or 9, thrice as often 9.
    train = split(*["[MAX 1 [MIN 9 9 ] ]"] * 30, *["[MAX 1 [MIN 0 9 ] ]"] * 10)
    counts = count_values(train)
    seen = split("[SM 2 [MIN 3 3 ] ]", "[MIN 2 [MIN 4 8 ] ]", "[SM 1 [MIN 1 ] [MIN 1 ] ]")
    # The last: 9 + 9 + 1 of 9 in 16, 1 + 9 of 6, 1 of 1.
    assert answers(counts, 1, seen).tolist() == [1, 2, 9]
    assert answers(counts, 2, seen).tolist() == [5, 2, 3]
    again = answers(counts, 1, seen)
    monkeypatch.setattr(listops_levels, "SEED", 1)
    assert answers(counts, 1, seen).tolist() == again.tolist()


def test_each_level_is_a_rule_and_the_stand_in_has_none(tmp_path: Path) -> None:
    train = split("[MAX 4 [MIN 2 9 ] ]")
    rules = ladder(train)
    assert [rule.name for rule in rules] == [f"level_{n}" for n in (1, 2, 3, 4, 5)]
    assert rules[1].answers(train).tolist() == [4]
    assert len({rule.description for rule in rules}) == len(rules)
    for source, count in (("generated", 5), ("synthetic", 0)):
        task = ListOps(data_dir=tmp_path, source=source)
        assert len(task.ladder(train)) == count
