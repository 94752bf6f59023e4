"""Statistics of a few runs: quantiles of Student's t, the sign test, rank correlation. Pure Python, no scipy."""

from collections.abc import Sequence
from itertools import combinations
from math import comb, cos, nan, pi, sin, sqrt, tan

__all__ = ["kendall_tau", "sign_test", "student_t"]


def student_t(level: float, freedom: int) -> float:
    """The t for which |T| <= t with probability `level`, where T is Student's with `freedom` >= 1 degrees of freedom.

    >>> round(student_t(0.95, 4), 3)
    2.776
    """
    low, high = 0.0, pi / 2  # of atan(t / sqrt(freedom)), in which the probability is a finite sum
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _probability(middle, freedom) < level else (low, middle)
    return sqrt(freedom) * tan(low)


def _probability(angle: float, freedom: int) -> float:
    """P(|T| <= sqrt(freedom) * tan(angle)): Abramowitz and Stegun 26.7.3 (odd) and 26.7.4 (even)."""
    odd = freedom % 2
    term, total = cos(angle) if odd else 1.0, 0.0
    for power in range(2 + odd, freedom + 1, 2):
        total += term
        term *= cos(angle) ** 2 * (power - 1) / power
    return 2 / pi * (angle + sin(angle) * total) if odd else sin(angle) * total


def sign_test(above: int, n: int) -> float:
    """The two-sided p-value of `above` of `n` independent differences being positive, if either sign is as likely.

    >>> sign_test(8, 8)
    0.0078125
    """
    extreme = max(above, n - above)
    return min(1.0, 2 * sum(comb(n, k) for k in range(extreme, n + 1)) / 2**n) if n else nan


def kendall_tau(first: Sequence[float], second: Sequence[float]) -> float:
    """Kendall's tau-b between two lists of numbers, ties accounted for; NaN where either has no order.

    >>> kendall_tau([1, 2, 3, 4], [1, 2, 4, 3])
    0.6666666666666666
    """
    agreement, ordered_first, ordered_second = 0, 0, 0
    for (a, b), (c, d) in combinations(zip(first, second, strict=True), 2):
        sign_first, sign_second = (a > c) - (a < c), (b > d) - (b < d)
        agreement += sign_first * sign_second
        ordered_first += abs(sign_first)
        ordered_second += abs(sign_second)
    return agreement / sqrt(ordered_first * ordered_second) if ordered_first and ordered_second else nan
