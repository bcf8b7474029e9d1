"""Rules that need no sequence model: counted or fitted on train, measured on whole val and test.

Label rules answer with the commonest label of a key. Classifiers see an example as a bag of tokens
or as a picture. All read a chunk of examples at a time, so that memory does not grow with the data,
and nothing but SEED is drawn from, so that two calls give the same hits.

Shapes: N examples of a split or chunk, S sequences per example, M = N * S sequences, T tokens of a
chunk end to end, K different keys, C classes, F features.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lra.console import counting
from lra.results.floors import Data, Floor, Floors, Score
from lra.results.records import pack_correct
from lra.tasks.batches import TokenArrays
from lra.tasks.cache import Dataset
from lra.tasks.task import SPLITS, Task

FIRST_TOKEN = {"listops": "outermost operator"}  # what the first token is, in a task's own words
NUM_BANDS = 32  # of lengths, equally full in train

SEED = 0
CHUNK_VALUES = 1 << 19  # tokens, or features if these are more, of a chunk
TRAIN_TOKENS = 1 << 28  # that a classifier sees in all its passes over train ...
MAX_PASSES = 20  # ... of which it makes 1 to so many
PENALTIES = (1e-3, 1e-4, 1e-5, 1e-6)  # L2; of equally good ones on val the largest is taken
GRAM_SIZES = (1, 2, 3)
BUCKET_BITS = 18  # n-grams are hashed to 2 ** BUCKET_BITS features
GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2 ** 64 / golden ratio: multiplying by it spreads codes
BLOCK = 8  # side in pixels


def unavailable() -> str:
    """Why no classifier can be fitted, and what to do; empty if they can."""
    try:
        import sklearn  # noqa: F401
    except ImportError:
        return "linear classifiers skipped: scikit-learn is missing; pip install -e '.[floors]'"
    return ""


def measure(task: Task, dataset: Dataset) -> Floors:
    """Every rule on a prepared task, whole splits, and the task's own ladder.

    Rules with a key that never varies are left out, and linear classifiers where scikit-learn is
    missing.

    Raises:
        ValueError: the task is limited to a part of its data.
    """
    sizes = {split: len(getattr(dataset, split)) for split in SPLITS}
    for split, size in sizes.items():
        if size != dataset.meta["splits"][split]["num_examples"]:
            raise ValueError(
                f"task.limit_{split}={size}: floors are those of whole splits; drop it"
            )
    floors = [*label_rules(task, dataset), nearest_mean(task, dataset)]
    if not unavailable():
        floors += [linear(view, task, dataset) for view in views(task)]
    data = Data(dataset.meta["source"], task.data_kind(sizes), dataset.fingerprint, sizes)
    splits = (dataset.val, dataset.test)
    ladder = [
        Floor(rule.name, rule.description, *(score(rule.answers(part), part) for part in splits))
        for rule in task.ladder(dataset.train)
    ]
    return Floors(task.name, data, floors, ladder)


# Label rules.


def label_rules(task: Task, dataset: Dataset) -> Iterator[Floor]:
    """The commonest label of all, and of what is seen of the first token, the last, the length."""
    first = FIRST_TOKEN.get(task.name, "first token")
    edges = np.unique(
        np.quantile(
            dataset.train.lengths_NS, np.arange(1, NUM_BANDS) / NUM_BANDS, method="lower"
        )
    )  # fmt: skip
    rules: tuple[tuple[str, str, Callable[[TokenArrays], np.ndarray]], ...] = (
        ("commonest_label", "", lambda arrays: np.zeros((len(arrays), 1), int)),
        ("first_token", f" of the {first}", first_tokens),
        ("last_token", " of the last token", last_tokens),
        ("length", f" of the length (at most {NUM_BANDS} bands)",
         lambda arrays: np.searchsorted(edges, arrays.lengths_NS)),
    )  # fmt: skip
    splits = (dataset.val, dataset.test)
    for name, of, keys in rules:
        train_NS, *others = (keys(arrays) for arrays in (dataset.train, *splits))
        if name == "commonest_label" or (train_NS != train_NS[0]).any():
            answers = commonest(train_NS, dataset.train.labels, others)
            yield Floor(name, f"the commonest label{of}", *map(score, answers, splits))


def first_tokens(arrays: TokenArrays) -> np.ndarray:
    """The first raw value of every sequence, -1 where there is none. [N, S]"""
    return _tokens_at(arrays, arrays.starts_NS)


def last_tokens(arrays: TokenArrays) -> np.ndarray:
    """The last raw value of every sequence, -1 where there is none. [N, S]"""
    return _tokens_at(arrays, arrays.starts_NS + arrays.lengths_NS - 1)


def _tokens_at(arrays: TokenArrays, places_NS: np.ndarray) -> np.ndarray:
    empty_NS = arrays.lengths_NS == 0
    values_NS = np.full(empty_NS.shape, -1)
    values_NS[~empty_NS] = arrays.tokens[places_NS[~empty_NS]]
    return values_NS


def commonest(
    train_NS: np.ndarray, labels_N: np.ndarray, others: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """For each row of `others` the commonest label of the train rows that equal it.

    Of equally common labels the smallest; for a row that train does not have, the commonest of all.
    """
    keys_KS, index_N = np.unique(train_NS, axis=0, return_inverse=True)
    counts_KC = np.zeros((len(keys_KS), int(labels_N.max()) + 1), np.int64)
    np.add.at(counts_KC, (index_N.ravel(), labels_N), 1)
    answer = dict(zip(map(tuple, keys_KS.tolist()), counts_KC.argmax(axis=1), strict=True))
    overall = counts_KC.sum(axis=0).argmax()
    return [
        np.array([answer.get(tuple(row), overall) for row in rows_NS.tolist()])
        for rows_NS in others
    ]


def score(answer_N: np.ndarray, arrays: TokenArrays) -> Score:
    """How often and where a rule's answers are right."""
    correct_N = answer_N == arrays.labels
    return Score(float(correct_N.mean()), len(correct_N), pack_correct(correct_N))


# What classifiers see.


@dataclass(frozen=True)
class View:
    """Examples as features: of a chunk [N, F], dense, or sparse with rows of norm 1."""

    name: str
    description: str
    features: Callable[[TokenArrays], Any]
    is_sparse: bool = False


def views(task: Task) -> list[View]:
    """All that fit a task: bags of tokens, and pixels or pairs where it has these."""
    values, found = task.num_values, []
    found.append(View("linear_counts", "token counts", lambda chunk: counts(chunk, values)))
    found.append(
        View("linear_ngrams", "hashed n-grams of 1 to 3 tokens",
             lambda chunk: hashed_grams(chunk, values, GRAM_SIZES), is_sparse=True)
    )  # fmt: skip
    if task.picture_size:
        height, width = task.picture_size
        found.append(View("linear_pixels", "pixels", lambda chunk: pixels(chunk, height * width)))
        found.append(
            View("linear_blocks", f"means of {BLOCK} x {BLOCK} pixels",
                 lambda chunk: block_sums(chunk, height, width))
        )  # fmt: skip
    if task.num_sequences == 2:
        found.append(
            View("similarity", "the overlap of the two bags and the ratio of lengths",
                 lambda chunk: similarities(chunk, values))
        )  # fmt: skip
    return found


def chunks(arrays: TokenArrays, order_N: np.ndarray, task: Task) -> Iterator[TokenArrays]:
    """Examples in this order, CHUNK_VALUES tokens or dense features (if more) at a time."""
    height, width = task.picture_size or (0, 0)
    num_features = task.num_sequences * max(task.num_values, height * width)
    values_N = np.maximum(arrays.lengths_NS[order_N].sum(axis=1), num_features)
    cuts = np.flatnonzero(np.diff(np.cumsum(values_N) // CHUNK_VALUES)) + 1
    for rows in np.split(order_N, cuts):
        yield arrays.subset(rows)


def end_to_end(chunk: TokenArrays) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, the sequence (0 to M - 1) of each, and how many are left in it from there. [T]"""
    lengths_M, starts_M = chunk.lengths_NS.ravel(), chunk.starts_NS.ravel()
    ends_M = np.cumsum(lengths_M)
    place_T = np.arange(lengths_M.sum())
    tokens_T = chunk.tokens[place_T + np.repeat(starts_M - (ends_M - lengths_M), lengths_M)]
    sequence_T = np.repeat(np.arange(len(lengths_M)), lengths_M)
    return tokens_T.astype(np.int64), sequence_T, ends_M[sequence_T] - place_T


def counts(chunk: TokenArrays, num_values: int) -> np.ndarray:
    """How often each sequence has each value, the sequences of an example side by side."""
    tokens_T, sequence_T, _ = end_to_end(chunk)
    shape = chunk.lengths_NS.size * num_values
    found = np.bincount(sequence_T * num_values + tokens_T, minlength=shape)
    return found.reshape(len(chunk), -1).astype(np.float32)


def hashed_grams(chunk: TokenArrays, num_values: int, sizes: Sequence[int]) -> Any:
    """Square roots of the shares that n-grams of these sizes have in an example's, as CSR.

    Rows have norm 1, or 0 without any n-gram. Each sequence of an example has n-grams of its own.
    """
    from scipy.sparse import csr_matrix

    tokens_T, sequence_T, left_T = end_to_end(chunk)
    example_T = sequence_T // chunk.num_sequences
    # Digits to the base num_values + 1, none of them 0, so that n-grams of all sizes differ.
    code_T = sequence_T % chunk.num_sequences + 1
    keys = [np.zeros(0, np.int64)]
    for size in range(1, max(sizes) + 1):
        ahead_T = np.append(tokens_T[size - 1 :], np.zeros(size - 1, np.int64))[: len(tokens_T)]
        code_T = code_T * (num_values + 1) + ahead_T + 1
        if size in sizes:
            whole = left_T >= size
            bucket = (code_T[whole].astype(np.uint64) * GOLDEN) >> np.uint64(64 - BUCKET_BITS)
            keys.append((example_T[whole] << BUCKET_BITS) | bucket.astype(np.int64))
    sorted_keys = np.sort(np.concatenate(keys))
    first = np.flatnonzero(np.diff(sorted_keys, prepend=-1))  # of equal ones
    times = np.diff(first, append=len(sorted_keys))
    row, column = np.divmod(sorted_keys[first], 1 << BUCKET_BITS)
    total_N = np.bincount(row, times, minlength=len(chunk))
    ends = np.cumsum(np.bincount(row, minlength=len(chunk)))
    values = np.sqrt(times / total_N[row]).astype(np.float32)
    shape = (len(chunk), 1 << BUCKET_BITS)
    return csr_matrix((values, column.astype(np.int32), np.append(0, ends)), shape=shape)


def pixels(chunk: TokenArrays, size: int) -> np.ndarray:
    """The first `size` values of every sequence, 0 behind its end."""
    tokens_T, sequence_T, left_T = end_to_end(chunk)
    place_T = chunk.lengths_NS.ravel()[sequence_T] - left_T
    seen = place_T < size
    found = np.zeros((chunk.lengths_NS.size, size), np.float32)
    found[sequence_T[seen], place_T[seen]] = tokens_T[seen]
    return found.reshape(len(chunk), -1)


def block_sums(chunk: TokenArrays, height: int, width: int) -> np.ndarray:
    """Sums over blocks of a picture; smaller ones at its lower and right rim."""
    picture = pixels(chunk, height * width).reshape(-1, height, width)
    rows = np.add.reduceat(picture, np.arange(0, height, BLOCK), axis=1)
    return np.add.reduceat(rows, np.arange(0, width, BLOCK), axis=2).reshape(len(chunk), -1)


def similarities(chunk: TokenArrays, num_values: int) -> np.ndarray:
    """Of two sequences: how much their n-grams overlap, size by size, and the ratio of lengths.

    The overlap is the cosine of the square roots of counts (Bhattacharyya's coefficient).
    """
    single = copy.copy(chunk)  # every sequence as an example of its own
    single.num_sequences = 1
    single.starts_NS = chunk.starts_NS.reshape(-1, 1)
    single.lengths_NS = chunk.lengths_NS.reshape(-1, 1)
    single.labels = np.repeat(chunk.labels, 2)
    found = []
    for size in GRAM_SIZES:
        grams = hashed_grams(single, num_values, (size,))
        found.append(np.asarray(grams[0::2].multiply(grams[1::2]).sum(axis=1)).ravel())
    shorter_N, longer_N = np.sort(chunk.lengths_NS, axis=1).T + 1
    return np.stack([*found, shorter_N / longer_N], axis=1).astype(np.float32)


# Classifiers.


def nearest_mean(task: Task, dataset: Dataset) -> Floor:
    """The class whose mean is nearest, of pixels where there are any, else of token counts."""
    by_name = {view.name: view for view in views(task)}
    view = by_name["linear_pixels" if task.picture_size else "linear_counts"]
    view, means_CF = standardized(view, task, dataset.train)

    def answer(chunk: TokenArrays) -> np.ndarray:
        # Of |x - mean| ** 2 the part in which classes differ.
        distances_NC = (means_CF**2).sum(axis=1) - 2 * view.features(chunk) @ means_CF.T
        return np.nanargmin(distances_NC, axis=1)

    scores = [score(answers(answer, task, part), part) for part in (dataset.val, dataset.test)]
    return Floor("nearest_mean", f"the nearest class mean of {view.description}", *scores)


def linear(view: View, task: Task, dataset: Dataset) -> Floor:
    """Logistic regression, one class against the rest, by stochastic gradient descent.

    One classifier for each of PENALTIES sees the same chunks; the best on val is taken.
    """
    from sklearn.linear_model import SGDClassifier

    train = dataset.train
    if not view.is_sparse:
        view, _ = standardized(view, task, train)
    num_passes = TRAIN_TOKENS // max(1, int(train.lengths_NS.sum()))
    num_passes = max(1, min(num_passes, MAX_PASSES))
    classifiers = [
        SGDClassifier(loss="log_loss", alpha=penalty, shuffle=False) for penalty in PENALTIES
    ]
    classes_C = np.arange(task.num_classes)
    for chunk in shuffled(view, task, train, num_passes):
        features_NF = view.features(chunk)
        for classifier in classifiers:
            classifier.partial_fit(features_NF, chunk.labels, classes_C)

    def answer(chunk: TokenArrays) -> np.ndarray:
        features_NF = view.features(chunk)
        return np.stack([classifier.predict(features_NF) for classifier in classifiers])

    splits = (dataset.val, dataset.test)
    val, test = ([score(answer_N, part) for answer_N in answers(answer, task, part)]
                 for part in splits)  # fmt: skip
    best = max(range(len(PENALTIES)), key=lambda i: val[i].accuracy)
    tried = ", ".join(f"{penalty:g}" for penalty in PENALTIES)
    return Floor(
        view.name,
        f"a linear classifier of {view.description} (logistic, L2 penalty {PENALTIES[best]:g}, the "
        f"best on validation of {tried})",
        val[best],
        test[best],
    )


def standardized(view: View, task: Task, train: TokenArrays) -> tuple[View, np.ndarray]:
    """The view with features of mean 0 and one deviation over train, and the mean of each class.

    Rows have norm 1 in the square mean, so that the same penalties suit all views. What is constant
    becomes 0; the mean of a class that train does not have is NaN.
    """
    sum_CF: Any = 0.0
    square_F: Any = 0.0
    for chunk in shuffled(view, task, train):
        features_NF = view.features(chunk).astype(np.float64)
        sum_CF = sum_CF + np.eye(task.num_classes)[chunk.labels].T @ features_NF
        square_F = square_F + (features_NF**2).sum(axis=0)
    mean_F, square_F = sum_CF.sum(axis=0) / len(train), square_F / len(train)
    deviation_F = np.sqrt(np.maximum(square_F - mean_F**2, 0))
    varies_F = deviation_F > 1e-6 * np.sqrt(square_F)  # not the rounding of a difference
    scale_F = varies_F / np.where(varies_F, deviation_F, 1) / np.sqrt(max(1, varies_F.sum()))
    number_C = np.bincount(train.labels, minlength=task.num_classes)
    with np.errstate(invalid="ignore"):
        means_CF = sum_CF / number_C[:, None]

    def features(chunk: TokenArrays) -> np.ndarray:
        return ((view.features(chunk) - mean_F) * scale_F).astype(np.float32)

    return replace(view, features=features), (means_CF - mean_F) * scale_F


def shuffled(
    view: View, task: Task, train: TokenArrays, num_passes: int = 1
) -> Iterator[TokenArrays]:
    """Chunks of so many passes over train, each in an order of its own; tells how far it is."""
    draws, done = np.random.default_rng(SEED), 0
    with counting(f"{task.name}, {view.description}", num_passes * len(train)) as show:
        for _ in range(num_passes):
            for chunk in chunks(train, draws.permutation(len(train)), task):
                yield chunk
                done += len(chunk)
                show(done)


def answers(
    answer: Callable[[TokenArrays], np.ndarray], task: Task, arrays: TokenArrays
) -> np.ndarray:
    """What `answer` gives for all examples, a chunk at a time. [..., N]"""
    return np.concatenate(
        [answer(chunk) for chunk in chunks(arrays, np.arange(len(arrays)), task)], axis=-1
    )
