"""How early the prediction is made: the first layer from which it stays."""

from itertools import pairwise

import numpy as np
from jaxtyping import Bool, Float, Int

from lens.errors import SelectionError

SETTLED_BITS = (0.1, 0.5, 1.0)
"""A position has settled at layer l if KL(final || lens) stays at or below this from l on."""

KINDS = ("top-1", *(f"{bits:g} bit" for bits in SETTLED_BITS))
ENTROPY_EDGES = (0.5, 1.0, 2.0, 4.0, 6.0)
"""Bins of the model's own entropy, in bits: a sure prediction is reached earlier than a vague one,
so models are compared within a bin."""

N_ENTROPY_BINS = len(ENTROPY_EDGES) + 1
ENTROPY_NAMES = (
    f"below {ENTROPY_EDGES[0]:g}",
    *(f"{low:g} to {high:g}" for low, high in pairwise(ENTROPY_EDGES)),
    f"{ENTROPY_EDGES[-1]:g} and more",
)


def settled(reached: Bool[np.ndarray, "layer pos"]) -> Int[np.ndarray, " pos"]:
    """The first layer from which `reached` stays true to the end; the number of layers if none.

    >>> settled(np.array([[True], [False], [True], [True]]))
    array([2])
    """
    stays = np.logical_and.accumulate(reached[::-1], axis=0)[::-1]
    return np.where(stays.any(axis=0), stays.argmax(axis=0), len(reached))


def depth_counts(
    agreement: Bool[np.ndarray, "layer pos"],
    kl_bits: Float[np.ndarray, "layer pos"],
    final_entropy_bits: Float[np.ndarray, " pos"],
) -> Int[np.ndarray, "kind entropy depth"]:
    """How many positions settle at each depth, by kind and by the final distribution's entropy.

    The last depth, `layer`, holds the positions that do not settle even at the output.
    """
    n_layers = len(agreement)
    out = np.zeros((len(KINDS), N_ENTROPY_BINS, n_layers + 1), dtype=np.int64)
    entropy = np.searchsorted(ENTROPY_EDGES, final_entropy_bits, side="right")
    reached = [agreement, *(kl_bits <= bits for bits in SETTLED_BITS)]
    for kind, layers in enumerate(reached):
        np.add.at(out[kind], (entropy, settled(layers)), 1)
    return out


def of_kind(
    depths: Int[np.ndarray, "doc kind entropy depth"], kind: str
) -> Int[np.ndarray, "doc entropy depth"]:
    """The counts of one of KINDS. Raises SelectionError for another."""
    if kind not in KINDS:
        raise SelectionError(f"There is no depth {kind!r}; there are {', '.join(KINDS)}.")
    return depths[:, KINDS.index(kind)]


def depth_sums(counts: Int[np.ndarray, "doc entropy depth"]) -> Float[np.ndarray, "doc column"]:
    """By bin of entropy the sum of depths over n_layers, then how many positions settle."""
    settled = counts[..., :-1].astype(np.float64)
    relative = np.arange(settled.shape[-1]) / max(settled.shape[-1] - 1, 1)
    return np.concatenate([settled @ relative, settled.sum(axis=-1)], axis=1)


def mean_depths(sums: Float[np.ndarray, "*sets column"]) -> Float[np.ndarray, "*sets entropy"]:
    """The mean depth in each bin of entropy, from `depth_sums`; NaN where no position settles."""
    total, count = np.split(sums, 2, axis=-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return total / count
