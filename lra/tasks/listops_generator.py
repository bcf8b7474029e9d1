"""Random ListOps expressions, as the Long Range Arena draws them, whole blocks of trees at a time.

A tree is a node of depth 1; a node above `max_depth` is an operator with probability 1/4, otherwise
a uniform digit; an operator is uniform and takes 2 to `max_args` arguments. Trees outside the
limits of length are dropped, and so are repeated ones.

Legend: a level is all nodes of one depth, in the order in which they stand in the text, so that
the arguments of one operator are neighbours; a tree is addressed by its number in the block.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from lra.tasks.workers import map_in_order

# A value is a symbol's place here: digits are their own value. The order never changes.
SYMBOLS = ("0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "[MIN", "[MAX", "[MED", "[SM", "]")
MIN, MAX, MED, SM, CLOSE = range(10, 15)

GENERATOR_VERSION = 1  # raise it when the output changes; part of the cache's name
TREES_PER_BLOCK = 8192  # drawn from one seed; changing it changes the output
PATIENCE_BLOCKS = 64  # the rate of new expressions is measured over this many blocks
MAX_BLOCKS_AHEAD = 20_000  # give up when that rate means more than this many further blocks
PLANTED_SHARE = 0.5  # of the digits of a synthetic example


class Limits(NamedTuple):
    """What the generator keeps and draws; the original's settings are the defaults."""

    min_tree_length: int = 500  # a kept tree is longer than this
    max_tree_length: int = 2000  # and shorter than this, in tokens without round brackets
    max_depth: int = 10  # nodes at this depth are digits; the root has depth 1
    max_args: int = 10


ORIGINAL = Limits()


class Block(NamedTuple):
    """Kept trees of one block: their tokens end to end, and length and label of each."""

    tokens: bytes
    lengths: list[int]
    labels: list[int]


def generate(
    num_examples: int,
    limits: Limits | None = None,
    *,
    seed: int,
    planted: bool = False,
    num_workers: int = 1,
    show: Callable[[int], None] = lambda done: None,
) -> list[tuple[bytes, int]]:
    """Raw values and label of `num_examples` distinct expressions, the same for any `num_workers`.

    `planted` makes the synthetic stand-in that listops.py describes. `show` is told how many there
    are so far.

    Raises:
        ValueError: there are too few distinct expressions within the limits, or they are too rare.
    """
    limits = limits or Limits()
    rows: dict[bytes, int] = {}  # in the order drawn; the first of equal expressions stays
    jobs = ((limits, seed, number, planted) for number in itertools.count())
    history: deque[int] = deque([0], maxlen=PATIENCE_BLOCKS + 1)
    for block in map_in_order(draw_block, jobs, num_workers):
        start = 0
        for length, label in zip(block.lengths, block.labels, strict=True):
            rows.setdefault(block.tokens[start : start + length], label)
            start += length
        show(min(len(rows), num_examples))
        if len(rows) >= num_examples:
            break
        history.append(len(rows))
        if len(history) > PATIENCE_BLOCKS:
            new = history[-1] - history[0]
            if (num_examples - len(rows)) * PATIENCE_BLOCKS > new * MAX_BLOCKS_AHEAD:
                trees = PATIENCE_BLOCKS * TREES_PER_BLOCK
                raise ValueError(
                    f"task 'listops': found only {len(rows)} of {num_examples} distinct "
                    f"expressions, {new} of them in the last {trees:,} trees drawn, with "
                    f"{_say(limits)}; widen these limits or lower task.num_train, num_val, num_test"
                )
    return list(itertools.islice(rows.items(), num_examples))


class _Level(NamedTuple):
    tokens: np.ndarray  # raw value of each node: a digit or an operator
    trees: np.ndarray  # tree of each node
    num_args: np.ndarray  # of each operator, in order


def draw_block(limits: Limits, seed: int, number: int, planted: bool = False) -> Block:
    """Draw `TREES_PER_BLOCK` trees, seeded by `seed` and `number`; return those within limits."""
    seeds = np.random.SeedSequence(seed, spawn_key=(number,))
    rng = np.random.Generator(np.random.PCG64(seeds))
    trees = np.arange(TREES_PER_BLOCK)
    lengths = np.ones(TREES_PER_BLOCK, np.int64)
    levels: list[_Level] = []
    while len(trees):
        if len(levels) + 1 < limits.max_depth:
            # One draw for type and digit: 10 of 40 outcomes mean an operator, 3 each a digit.
            tokens = rng.integers(0, 40, len(trees), np.uint8)
            is_operator = tokens >= 30
            tokens %= 10
        else:
            tokens = rng.integers(0, 10, len(trees), np.uint8)
            is_operator = np.zeros(len(trees), bool)
        owners = trees[is_operator]
        tokens[is_operator] = rng.integers(MIN, CLOSE, len(owners), np.uint8)
        num_args = rng.integers(2, limits.max_args + 1, len(owners))
        levels.append(_Level(tokens, trees, num_args))
        # An operator adds a bracket and its arguments, each of at least one token.
        lengths += np.bincount(owners, num_args + 1, TREES_PER_BLOCK).astype(np.int64)
        # Stop drawing trees that are too long already; the others' chances stay the same.
        going_on = lengths[owners] < limits.max_tree_length
        trees = np.repeat(owners[going_on], num_args[going_on])
    kept = (limits.min_tree_length < lengths) & (lengths < limits.max_tree_length)
    for i, level in enumerate(levels):
        nodes = kept[level.trees]
        operators = nodes[level.tokens >= 10]
        levels[i] = _Level(level.tokens[nodes], level.trees[nodes], level.num_args[operators])
    tokens, labels = _write_out(levels)
    lengths = lengths[kept]
    if planted:
        labels = _plant(tokens, lengths, rng)
    return Block(tokens.tobytes(), lengths.tolist(), labels.tolist())


def _write_out(levels: list[_Level]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of complete trees, end to end, and the value of each tree."""
    # Bottom up: value and length of every node, from those of the level below.
    values: list[np.ndarray] = [level.tokens.copy() for level in levels]
    lengths: list[np.ndarray] = [np.ones(len(level.tokens), np.int64) for level in levels]
    operators = [np.flatnonzero(level.tokens >= 10) for level in levels]
    first_args = [np.cumsum(level.num_args) - level.num_args for level in levels]
    for i in range(len(levels) - 2, -1, -1):
        if len(operators[i]):
            level, first = levels[i], first_args[i]
            values[i][operators[i]] = _apply(
                level.tokens[operators[i]], values[i + 1], first, level.num_args
            )
            lengths[i][operators[i]] = np.add.reduceat(lengths[i + 1], first) + 2
    # Top down: where each node starts, from the start of its operator.
    starts = np.cumsum(lengths[0]) - lengths[0]
    tokens = np.empty(lengths[0].sum(), np.uint8)
    for i, level in enumerate(levels):
        tokens[starts] = level.tokens
        if not len(operators[i]):
            break
        start = starts[operators[i]]
        tokens[start + lengths[i][operators[i]] - 1] = CLOSE
        before = np.cumsum(lengths[i + 1]) - lengths[i + 1]
        starts = before + np.repeat(start + 1 - before[first_args[i]], level.num_args)
    return tokens, values[0]


def _apply(
    operators: np.ndarray, args: np.ndarray, first: np.ndarray, num_args: np.ndarray
) -> np.ndarray:
    """Value of each operator, whose arguments are `args[first : first + num_args]`."""
    results = np.minimum.reduceat(args, first)
    np.copyto(results, np.maximum.reduceat(args, first), where=operators == MAX)
    sums = np.add.reduceat(args, first, dtype=np.int64) % 10
    np.copyto(results, sums.astype(np.uint8), where=operators == SM)
    medians = np.flatnonzero(operators == MED)
    if len(medians):
        first, num_args = first[medians, None], num_args[medians, None]
        column = np.arange(num_args.max())
        # Rows padded with 10, which sorts behind every digit.
        table = np.where(
            column < num_args, args[np.minimum(first + column, len(args) - 1)], np.uint8(10)
        )
        table.sort(axis=1)
        low = np.take_along_axis(table, (num_args - 1) // 2, axis=1)
        high = np.take_along_axis(table, num_args // 2, axis=1)
        results[medians] = ((low + high) // 2)[:, 0]
    return results


def _plant(tokens: np.ndarray, lengths: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Overwrite half of the digits of each tree with one digit; return the most frequent digits."""
    trees = np.repeat(np.arange(len(lengths)), lengths)
    chosen = (tokens < 10) & (rng.random(len(tokens)) < PLANTED_SHARE)
    tokens[chosen] = rng.integers(0, 10, len(lengths), np.uint8)[trees[chosen]]
    digits = tokens < 10
    counts = np.bincount(trees[digits] * 10 + tokens[digits], minlength=10 * len(lengths))
    return counts.reshape(-1, 10).argmax(axis=1)


def _say(limits: Limits) -> str:
    return ", ".join(f"task.{key}={value}" for key, value in limits._asdict().items())
