"""Intervals over documents, bands over layers, and tests between arms.

Documents are drawn, not positions: what stands in one document is alike. An interval over
documents is about these checkpoints on such texts, and says nothing about other checkpoints.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

import numpy as np
from jaxtyping import Float, Num

from lens.errors import SelectionError

N_RESAMPLES = 10_000
MARGIN = 0.05
"""Two skills nearer than this are equivalent."""

MAX_SIGN_FLIP = 20
Verdict = Literal["better", "worse", "equivalent", "undecided"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Interval:
    """An estimate, its pointwise interval, and a band that holds for all entries at once."""

    estimate: Float[np.ndarray, " entry"]
    low: Float[np.ndarray, " entry"]
    high: Float[np.ndarray, " entry"]
    band_low: Float[np.ndarray, " entry"]
    band_high: Float[np.ndarray, " entry"]
    level: float
    n_documents: int
    replicates: Float[np.ndarray, "resample entry"]


def bootstrap(
    sums: Float[np.ndarray, "doc column"],
    statistic: Callable[[np.ndarray], np.ndarray],
    *,
    counts: Num[np.ndarray, " doc"] | None = None,
    level: float = 0.95,
    n_resamples: int = N_RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Cluster bootstrap: `statistic` maps sums [..., column] over drawn documents to entries.

    Documents whose `counts` are 0 give nothing to draw and are left out. Two models that share
    their documents are compared by putting their columns side by side, so that both see the same
    draws. Raises SelectionError for fewer than two documents.
    """
    if counts is not None:
        sums = sums[counts > 0]
    n = len(sums)
    if n < 2:
        raise SelectionError(
            f"An interval over documents needs two of them that give a position; there are {n}."
        )
    estimate = statistic(sums.sum(axis=0))
    generator = np.random.default_rng(seed)
    parts = []
    # Some resamples at a time: the weights are [resample, doc].
    at_once = max(1, min(n_resamples, 4_000_000 // n))
    for first in range(0, n_resamples, at_once):
        count = min(at_once, n_resamples - first)
        weights = generator.multinomial(n, np.full(n, 1 / n), size=count).astype(np.float64)
        parts.append(statistic(weights @ sums))
    replicates = np.concatenate(parts)
    low, high = np.quantile(replicates, [(1 - level) / 2, (1 + level) / 2], axis=0)
    reach = _max_t(replicates, estimate, level)
    return Interval(
        estimate=estimate,
        low=low,
        high=high,
        band_low=estimate - reach,
        band_high=estimate + reach,
        level=level,
        n_documents=n,
        replicates=replicates,
    )


def mean_interval(
    sums: Float[np.ndarray, "doc layer"],
    counts: np.ndarray,
    *,
    level: float = 0.95,
    n_resamples: int = N_RESAMPLES,
    seed: int = 0,
) -> Interval:
    """The interval of sums over counts, by layer; documents that count nothing are left out."""
    stacked = np.concatenate([sums, counts[:, None].astype(np.float64)], axis=1)
    return bootstrap(
        stacked, _mean_of, counts=counts, level=level, n_resamples=n_resamples, seed=seed
    )


def _mean_of(totals: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore", divide="ignore"):
        return totals[..., :-1] / totals[..., -1:]


def _max_t(replicates: np.ndarray, estimate: np.ndarray, level: float) -> np.ndarray:
    """Half-widths of a simultaneous band: the quantile of the largest |t| over the entries."""
    spread = replicates.std(axis=0)
    moving = spread > 0
    if not moving.any():
        return np.zeros_like(spread)
    t = np.abs(replicates[:, moving] - estimate[moving]) / spread[moving]
    return np.quantile(t.max(axis=1), level) * spread


def sign_flip(differences: Float[np.ndarray, " pair"]) -> float:
    """The exact two-sided p of paired differences under flips of their signs.

    Never below 2 / 2^n: five pairs give 0.0625 at best, eight 0.0078. Raises SelectionError for
    none or more than 20 pairs.

    >>> sign_flip(np.array([1.0, 2.0, 3.0, 4.0, 5.0]))
    0.0625
    """
    n = len(differences)
    if not 1 <= n <= MAX_SIGN_FLIP:
        raise SelectionError(f"Sign-flip takes 1 to {MAX_SIGN_FLIP} pairs; there are {n}.")
    signs = np.array(list(product((1.0, -1.0), repeat=n)))
    means = signs @ differences
    # The observed flip itself must count, whatever rounding does to it.
    slack = 1e-12 * np.abs(differences).sum()
    return float((np.abs(means) >= abs(means[0]) - slack).mean())


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values, in the given order.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, highest = [0.0] * len(p_values), 0.0
    for place, i in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - place) * p_values[i]))
        adjusted[i] = highest
    return adjusted


def verdict(
    replicates: Float[np.ndarray, " resample"], *, margin: float = MARGIN, higher_is: str = "better"
) -> Verdict:
    """Equivalence by two one-sided tests, else the sign where the 95 % interval leaves 0 out.

    "equivalent" where the 90 % interval of the difference lies inside +-`margin`: also where it
    leaves 0 out, because such a difference is too small to matter. `higher_is` names what a
    positive difference means.
    """
    low, high = np.quantile(replicates, [0.05, 0.95])
    if -margin < low and high < margin:
        return "equivalent"
    low, high = np.quantile(replicates, [0.025, 0.975])
    opposite: dict[str, Verdict] = {"better": "worse", "worse": "better"}
    if low > 0:
        return "better" if higher_is == "better" else "worse"
    if high < 0:
        return opposite[higher_is]
    return "undecided"
