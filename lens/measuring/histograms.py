"""Integer histograms with fixed edges: they add up exactly, in any order.

KL has 2,000 bins, logarithmic from 1e-6 to 1e3 bits: neighbouring edges differ by 1.04 %, and a
bin stands for its geometric middle, so a quantile is within 0.52 % of the value itself.
Confidence has 2,000 bins, even in its logit. A sum of probabilities is kept as an integer too, in
units of 2^-40: each entry is rounded by at most 2^-41.
"""

import numpy as np
from jaxtyping import Float, Int

N_BINS = 2000
KL_EDGES = np.geomspace(1e-6, 1e3, N_BINS - 1)
"""Upper edges of all bins but the last; the first holds everything below 1e-6 bits, 0 too."""

CONFIDENCE_LOGIT_EDGES = np.linspace(-14.0, 24.0, N_BINS - 1)
NO_BIN = -1
"""The place of what is no number: it is left out, and so missing from the count of positions."""

UNIT = 2.0**-40
"""What one step of a probability sum stands for."""

KL_MIDDLES = np.concatenate([[0.0], np.sqrt(KL_EDGES[:-1] * KL_EDGES[1:]), KL_EDGES[-1:]])
KL_BIN_ERROR = float(np.sqrt(KL_EDGES[1] / KL_EDGES[0]) - 1)
"""Largest relative error of a quantile, between the first and the last edge."""


def kl_bins(kl_bits: Float[np.ndarray, "layer pos"]) -> Int[np.ndarray, "layer bin"]:
    """How many positions of each layer fall into each bin: +inf into the last, NaN into none."""
    return _counted(np.searchsorted(KL_EDGES, kl_bits, side="right"), ~np.isnan(kl_bits))


def confidence_place(probability: Float[np.ndarray, "layer pos"]) -> Int[np.ndarray, "layer pos"]:
    """The bin of each probability, by its logit; NO_BIN for NaN."""
    with np.errstate(divide="ignore"):
        logit = np.log(probability) - np.log1p(-np.minimum(probability, 1.0))
    found = np.searchsorted(CONFIDENCE_LOGIT_EDGES, logit, side="right")
    return np.where(np.isnan(probability), NO_BIN, found)


def binned(
    places: Int[np.ndarray, "layer pos"], amounts: np.ndarray | None = None
) -> Int[np.ndarray, "layer bin"]:
    """Sums of whole numbers `amounts` [layer, pos] (of ones where None) by bin; NO_BIN has none."""
    return _counted(places, places != NO_BIN, amounts)


def in_units(probability: np.ndarray) -> np.ndarray:
    """Probabilities as whole numbers of UNIT; NaN, which has no bin, as 0."""
    return np.rint(np.nan_to_num(probability).astype(np.float64) / UNIT).astype(np.int64)


def _counted(places: np.ndarray, counts: np.ndarray, amounts: np.ndarray | None = None):
    n_layers = places.shape[0]
    out = np.zeros((n_layers, N_BINS), dtype=np.int64)
    layers = np.broadcast_to(np.arange(n_layers)[:, None], places.shape)
    values = 1 if amounts is None else amounts[counts].astype(np.int64)
    np.add.at(out, (layers[counts], places[counts]), values)
    return out


def quantile(counts: Int[np.ndarray, "layer bin"], share: float) -> Float[np.ndarray, " layer"]:
    """The KL below which `share` of the positions lie, in bits; NaN for an empty histogram."""
    totals = counts.sum(axis=-1)
    reached = counts.cumsum(axis=-1) >= np.maximum(share * totals, 1e-9)[:, None]
    return np.where(totals > 0, KL_MIDDLES[reached.argmax(axis=-1)], np.nan)


def trimmed_mean(
    counts: Int[np.ndarray, "layer bin"], cut: float = 0.05
) -> Float[np.ndarray, " layer"]:
    """The mean KL without the lowest and the highest `cut` of the positions, in bits."""
    totals = counts.sum(axis=-1, keepdims=True)
    upper = counts.cumsum(axis=-1)
    low, high = cut * totals, (1 - cut) * totals
    kept = np.clip(np.minimum(upper, high) - np.maximum(upper - counts, low), 0, None)
    with np.errstate(invalid="ignore", divide="ignore"):
        return (kept * KL_MIDDLES).sum(axis=-1) / kept.sum(axis=-1)
