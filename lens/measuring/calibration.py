"""Are the lens' probabilities right? Against what came next, and against the model's own.

Source: Guo et al. 2017 (expected calibration error); bins of equal mass.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from lens.measuring.histograms import UNIT

N_EQUAL_BINS = 15
GAPS = ("ece", "gap_to_final")


@dataclass(frozen=True, kw_only=True, eq=False)
class Calibration:
    """Per layer, in bins of about equal mass, lowest confidence first; NaN where a bin is empty.

    `confidence` is the mean probability of the lens' top-1, `accuracy` how often that was the
    target, `final` the mean probability that the model itself gives it. `ece` is the mean
    |confidence - accuracy| weighted by bin, `gap_to_final` the same against `final`.
    """

    confidence: Float[np.ndarray, "layer bin"]
    accuracy: Float[np.ndarray, "layer bin"]
    final: Float[np.ndarray, "layer bin"]
    count: Int[np.ndarray, "layer bin"]
    ece: Float[np.ndarray, " layer"]
    gap_to_final: Float[np.ndarray, " layer"]


def calibration(
    count: Int[np.ndarray, "layer bin"],
    scored: Int[np.ndarray, "layer bin"],
    correct: Int[np.ndarray, "layer bin"],
    confidence_units: Int[np.ndarray, "layer bin"],
    scored_units: Int[np.ndarray, "layer bin"],
    final_units: Int[np.ndarray, "layer bin"],
) -> Calibration:
    """Put fine bins together into 15 of equal mass; a fine bin is never divided.

    `count` are all positions, `scored` those that have a target (with their confidence sums).
    """
    places = _equal_mass(count)

    def together(fine: np.ndarray) -> np.ndarray:
        out = np.zeros((len(fine), N_EQUAL_BINS), dtype=np.int64)
        rows = np.broadcast_to(np.arange(len(fine))[:, None], fine.shape)
        np.add.at(out, (rows, places), fine)
        return out

    n, n_scored = together(count), together(scored)
    with np.errstate(invalid="ignore", divide="ignore"):
        confidence = together(confidence_units) * UNIT / n
        final = together(final_units) * UNIT / n
        scored_confidence = together(scored_units) * UNIT / n_scored
        accuracy = together(correct) / n_scored
        ece = np.nansum(np.abs(scored_confidence - accuracy) * n_scored, axis=-1)
        gap = np.nansum(np.abs(confidence - final) * n, axis=-1)
        return Calibration(
            confidence=confidence,
            accuracy=accuracy,
            final=final,
            count=n,
            ece=ece / n_scored.sum(axis=-1),
            gap_to_final=gap / n.sum(axis=-1),
        )


def _equal_mass(count: Int[np.ndarray, "layer bin"]) -> Int[np.ndarray, "layer bin"]:
    """The equal-mass bin of each fine bin: by where its middle stands in the whole."""
    middle = count.cumsum(axis=-1) - count / 2
    totals = np.maximum(count.sum(axis=-1, keepdims=True), 1)
    return np.minimum((middle / totals * N_EQUAL_BINS).astype(np.int64), N_EQUAL_BINS - 1)
