"""Spearman's rank correlation, ties sharing their mean rank."""

import numpy as np
from jaxtyping import Float


def ranks(values: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """Ranks from 0; equal values share the mean of their places.

    >>> ranks(np.array([3.0, 1.0, 3.0]))
    array([1.5, 0. , 1.5])
    """
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts + 1) / 2)[inverse]


def correlation(x: Float[np.ndarray, " n"], y: Float[np.ndarray, " n"]) -> float:
    """Pearson's correlation, NaN where one of them does not vary."""
    x, y = x - x.mean(), y - y.mean()
    scale = float(np.sqrt((x * x).sum() * (y * y).sum()))
    return float((x * y).sum()) / scale if scale > 0 else float("nan")


def rank_correlation(x: Float[np.ndarray, " n"], y: Float[np.ndarray, " n"]) -> float:
    """Spearman's correlation, NaN where one of them does not vary."""
    return correlation(ranks(x), ranks(y))
