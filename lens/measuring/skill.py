"""A lens' quality on one scale: 1 is the model's own prediction, 0 the best context-free guess."""

import numpy as np
from jaxtyping import Float, Int

from lens.measuring.columns import MARGINAL_UNIT

FLOOR = -1.0
"""Skill has no lower bound: in an area it counts as no less than this."""


def skill(
    lens_total: Float[np.ndarray, "*sets layer"], guess_total: np.ndarray | float
) -> Float[np.ndarray, "*sets layer"]:
    """1 - (sum of the lens' divergences) / (sum of the guess' divergences); NaN without a guess.

    >>> skill(np.array([4.0, 1.0, 0.0]), 2.0)
    array([-1. ,  0.5,  1. ])
    """
    guess = np.asarray(guess_total, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(guess > 0, 1.0 - lens_total / guess, np.nan)


def area(skills: Float[np.ndarray, "*sets layer"]) -> np.ndarray:
    """Mean clipped skill over relative depth from layer 1 to the last (trapezoid).

    >>> float(area(np.array([-9.0, 0.0, 1.0])))
    0.5
    """
    clipped = np.maximum(skills[..., 1:], FLOOR)
    if clipped.shape[-1] == 1:
        return np.asarray(clipped[..., 0])
    middles = (clipped[..., 1:] + clipped[..., :-1]) / 2
    return np.asarray(middles.mean(axis=-1))


def marginal_bias_bits(
    marginals: Int[np.ndarray, "row d_vocab"],
) -> Float[np.ndarray, " layer"]:
    """KL(mean p || mean q) of each layer; the last row is the sum of p, in units of 2^-50.

    A lens' sum that rounds to 0 counts as half a unit, which can only lower the result. Source:
    Belrose et al. 2023.
    """
    counts = np.maximum(marginals.astype(np.float64), 0.5) * MARGINAL_UNIT
    shares = counts / counts.sum(axis=-1, keepdims=True)
    p = shares[-1]
    return (p * (np.log2(p) - np.log2(shares[:-1]))).sum(axis=-1)
