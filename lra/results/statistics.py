"""Means over seeds, intervals, and the comparison of two models. Fractions in, fractions out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Z_95 = 1.959963984540054  # two-sided 95 % point of the normal distribution
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)  # Student's t, 1-10


def mean_std(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and sample deviation (n - 1 in the denominator; None for a single value)."""
    n = len(values)
    mean = math.fsum(values) / n
    square = math.fsum((v - mean) ** 2 for v in values)
    return mean, math.sqrt(square / (n - 1)) if n > 1 else None


def wilson(accuracy: float, num_examples: int) -> tuple[float, float]:
    """Wilson's 95 % interval of one run's accuracy: the noise of a finite test set only."""
    n, z = num_examples, Z_95
    center = accuracy + z * z / (2 * n)
    half = z * math.sqrt(accuracy * (1 - accuracy) / n + z * z / (4 * n * n))
    low, high = (center - half) / (1 + z * z / n), (center + half) / (1 + z * z / n)
    return max(0.0, low), min(1.0, high)  # not beyond by rounding


@dataclass(frozen=True)
class Comparison:
    """Accuracy of A minus accuracy of B, with 95 % intervals."""

    difference: float
    over_examples: tuple[float, float]  # other test examples, the same trained models
    over_seeds: tuple[float, float] | None  # other seeds, the same test examples; None for one seed
    per_seed: tuple[float, ...]

    @property
    def clear(self) -> bool:
        """Whether every interval there is leaves out 0."""
        intervals = [self.over_examples] + ([self.over_seeds] if self.over_seeds else [])
        return all(low > 0 or high < 0 for low, high in intervals)


def compare(a_SN: np.ndarray, b_SN: np.ndarray) -> Comparison:
    """Compare two models on the same seeds and test examples, pair by pair.

    Args:
        a_SN, b_SN: whether each example was right; S seeds, N examples, in the same order.

    Over examples: normal interval of the mean of N differences, each averaged over seeds. Over
    seeds: Student's t interval of the mean of S differences.
    """
    if a_SN.shape != b_SN.shape or a_SN.ndim != 2 or a_SN.size == 0:
        raise ValueError(f"compare: shapes {a_SN.shape} and {b_SN.shape} must be equal, not empty")
    delta_SN = a_SN.astype(float) - b_SN.astype(float)
    num_seeds, n = delta_SN.shape
    delta_N, delta_S = delta_SN.mean(axis=0), delta_SN.mean(axis=1)
    mean = float(delta_N.mean())
    half = Z_95 * float(delta_N.std(ddof=1)) / math.sqrt(n) if n > 1 else math.inf
    over_seeds = None
    if num_seeds > 1:
        half_s = t_95(num_seeds - 1) * float(delta_S.std(ddof=1)) / math.sqrt(num_seeds)
        over_seeds = (mean - half_s, mean + half_s)
    return Comparison(mean, (mean - half, mean + half), over_seeds, tuple(delta_S.tolist()))


def t_95(degrees: int) -> float:
    """Two-sided 95 % point of Student's t distribution."""
    if degrees <= len(T_95):
        return T_95[degrees - 1]
    # Expansion in 1 / degrees, Abramowitz and Stegun 26.7.5; off by less than 0.001 from here on.
    z, v = Z_95, degrees
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / v ** (i + 1) for i, term in enumerate(terms))


def sign_test(more: int, less: int) -> tuple[float, float]:
    """z and the exact two-sided p of two counts that chance makes alike."""
    n = more + less
    if n == 0:
        return 0.0, 1.0
    log_p = [math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) - n * math.log(2)
             for k in range(min(more, less) + 1)]  # fmt: skip
    return (more - less) / math.sqrt(n), min(1.0, 2 * math.fsum(map(math.exp, log_p)))
