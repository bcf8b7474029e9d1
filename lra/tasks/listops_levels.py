"""ListOps from outside: what an expression is worth to one who follows its outer levels only.

Level 1 is the outermost operator, its digits, and which operators stand among its arguments; level
2 has the same of those operators, and so on. What an operator below is worth is drawn as often as
training expressions have it for that kind at that depth, and the answer is what most draws come to.

Legend: A arguments, K draws; the outermost operator has depth 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from lra.console import counting
from lra.tasks.batches import TokenArrays
from lra.tasks.listops_generator import CLOSE, MAX, MIN, SM
from lra.tasks.task import Rule

NUM_LEVELS = 5
NUM_COUNTED = 5_000  # training expressions, the first ones; each has some 160 operators
NUM_DRAWS = 1_000
SEED = 0


def ladder(train: TokenArrays) -> list[Rule]:
    """A rule for each number of levels that are followed, 1 to NUM_LEVELS."""
    counts = count_values(train)
    rules = []
    for level in range(1, NUM_LEVELS + 1):
        title = f"the outer {level} levels" if level > 1 else "the outer level"
        what = "operators and digits there, the kinds of operators below"
        answer = partial(answers, counts, level)
        rules.append(Rule(f"level_{level}", f"{title} ({what})", answer))
    return rules


def count_values(train: TokenArrays) -> np.ndarray:
    """How often operators have each value in train, plus 1. [depth, operator - MIN, value]

    Expressions that were cut are left out: their last operators have lost arguments.
    """
    counts = np.ones((NUM_LEVELS + 2, CLOSE - MIN, 10), np.int64)
    size = min(len(train), NUM_COUNTED)

    def note(depth: int, operator: int, value_K: np.ndarray) -> None:
        if depth < len(counts):
            counts[depth, operator - MIN, value_K[0]] += 1

    def unknown(depth: int, operator: int) -> np.ndarray:
        raise AssertionError("every operator of a whole expression has arguments")

    with counting("listops, values of operators", size) as show:
        for i in range(size):
            values = train.sequence(i).tolist()
            if not num_open(values):
                follow(values, len(values), 1, unknown, note)
            show(i + 1)
    return counts


def answers(counts: np.ndarray, level: int, arrays: TokenArrays) -> np.ndarray:
    """The commonest value of each expression when its outer levels are followed. [N]

    Args:
        counts: by `count_values`.
        level: how many, at most NUM_LEVELS.
        arrays: checked when they were read, so that every expression is well-formed or cut.
    """
    draws = np.random.default_rng([SEED, level])
    up_to = counts.cumsum(axis=-1) / counts.sum(axis=-1, keepdims=True)

    def unknown(depth: int, operator: int) -> np.ndarray:
        shares = up_to[depth, operator - MIN]
        return shares.searchsorted(draws.random(NUM_DRAWS), side="right")

    found_N = np.zeros(len(arrays), np.int64)
    with counting(f"listops, level {level}", len(arrays)) as show:
        for i in range(len(arrays)):
            value_K = follow(arrays.sequence(i).tolist(), level, NUM_DRAWS, unknown)
            found_N[i] = np.bincount(value_K).argmax()
            show(i + 1)
    return found_N


def num_open(values: Sequence[int]) -> int:
    """How many operators of an expression are not closed: more than 0 where it was cut."""
    return sum(MIN <= value < CLOSE for value in values) - values.count(CLOSE)


def follow(
    values: Sequence[int],
    level: int,
    num_draws: int,
    unknown: Callable[[int, int], np.ndarray],
    note: Callable[[int, int, np.ndarray], None] = lambda depth, operator, value_K: None,
) -> np.ndarray:
    """Value of an expression whose outer levels are followed. [K]

    Args:
        values: raw values of a well-formed expression, which may have been cut at its end; an
            operator that was cut has the arguments that were left to it.
        level: operators deeper than that are not followed.
        num_draws: K.
        unknown: draws [K] of what these are worth, and one without any argument left, given its
            depth and which it is.
        note: is told depth, operator and value [K] of each operator that is followed.
    """
    digits_10K = np.arange(10)[:, None].repeat(num_draws, axis=1)
    opened: list[tuple[int, list[np.ndarray]]] = []  # operators, and arguments read before each
    args: list[np.ndarray] = []  # of the innermost one
    num_below = 0  # open operators that are not followed
    for value in [*values, *[CLOSE] * num_open(values)]:
        opens, closes = MIN <= value < CLOSE, value == CLOSE
        if num_below:
            num_below += opens - closes
        elif opens and len(opened) == level:
            args.append(unknown(level + 1, value))
            num_below = 1
        elif opens:
            opened.append((value, args))
            args = []
        elif closes:
            depth = len(opened)
            operator, outer = opened.pop()
            value_K = result(operator, np.array(args)) if args else unknown(depth, operator)
            note(depth, operator, value_K)
            args = [*outer, value_K]
        else:
            args.append(digits_10K[value])
    return args[0]


def result(operator: int, args_AK: np.ndarray) -> np.ndarray:
    """What an operator makes of its arguments; a median between two is rounded down. [K]"""
    if operator == MIN:
        return args_AK.min(axis=0)
    if operator == MAX:
        return args_AK.max(axis=0)
    if operator == SM:
        return args_AK.sum(axis=0) % 10
    ordered_AK, count = np.sort(args_AK, axis=0), len(args_AK)
    return (ordered_AK[(count - 1) // 2] + ordered_AK[count // 2]) // 2
