"""Two arms of the study, seed by seed: signed effects, with the seeds' own spread and a test."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from lens.errors import SelectionError
from lens.measuring.statistics import sign_flip
from lens.study.arms import PAIR

T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093,
)  # fmt: skip
"""Student's t for a two-sided 95 % interval, by degrees of freedom from 1."""

Row = Mapping[str, Any]

CONTRASTS = {
    "constraint": (PAIR[1], PAIR[0]),
    "initialisation": ("untied-own", "untied-copy"),
}
"""Effect: (arm, less this arm)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Effect:
    """One arm less another, paired by seed; entries are layers, or one number.

    `low` and `high` are Student's 95 % interval over seeds, `spread` the seeds' standard
    deviation, `p` the exact two-sided sign-flip of each entry (at best 2 / 2^n).
    """

    arm: str
    less: str
    quantity: str
    seeds: tuple[int, ...]
    differences: Float[np.ndarray, "seed entry"]
    p: Float[np.ndarray, " entry"]

    @property
    def mean(self) -> Float[np.ndarray, " entry"]:
        """The mean difference over seeds."""
        return self.differences.mean(axis=0)

    @property
    def spread(self) -> Float[np.ndarray, " entry"]:
        """Standard deviation of the difference over seeds; NaN for one seed."""
        n = len(self.seeds)
        return self.differences.std(axis=0, ddof=1) if n > 1 else np.full_like(self.mean, np.nan)

    @property
    def half_width(self) -> Float[np.ndarray, " entry"]:
        """Half of the 95 % interval; NaN for one seed."""
        n = len(self.seeds)
        return student_t(n - 1) * self.spread / math.sqrt(n)


def student_t(freedom: int) -> float:
    """Student's t of a two-sided 95 % interval; NaN without a degree of freedom."""
    return T_975[min(freedom, len(T_975)) - 1] if freedom > 0 else math.nan


QUANTITIES: dict[str, Callable[[Row], Any]] = {
    "reading loss G": lambda b: b["reading_loss"],
    "not there yet R": lambda b: b["not_there_yet"],
    "KL": lambda b: b["kl"],
    "median KL": lambda b: b["median_kl"],
    "usefulness X": lambda b: b["usefulness"],
    "self-copy rate": lambda b: b["copy_rate"],
    "copy term": lambda b: b["copy_bits"],
    "rest term": lambda b: b["rest_bits"],
    "marginal bias": lambda b: b["marginal_bias"],
    "skill": lambda b: b["skill"],
    "top-1 agreement": lambda b: b["agreement"],
    "mean dG": lambda b: [float(np.mean(b["reading_loss"][1:-1]))],
    "middle dG": lambda b: [float(np.mean(_middle(b["reading_loss"])))],
    "last dG": lambda b: [float(b["reading_loss"][-2])],
    "mean dR": lambda b: [float(np.mean(b["not_there_yet"][1:-1]))],
    "skill area": lambda b: [b["skill_area"]],
    "mean depth": lambda b: [b["mean_depth"]],
    "held-out loss": lambda b: [b["loss_bits"]],
}
"""What a branch's row gives; "mean" is over the layers 1 to n_layers - 1: the primary outcome.

"last" is of the last layer below the output; "middle" is over the layers from a quarter to three
quarters of the depth, which models of different depths have in common.
"""


def _middle(by_layer: Sequence[float]) -> Sequence[float]:
    n_layers = len(by_layer) - 1
    return by_layer[math.ceil(n_layers / 4) : 3 * n_layers // 4 + 1]


def effect(rows: Sequence[Row], arm: str, less: str, quantity: str, *, branch: int = -1) -> Effect:
    """The difference of two arms at one branch over the seeds that both have.

    Raises SelectionError where no seed has both, or the quantity is not known.
    """
    if quantity not in QUANTITIES:
        raise SelectionError(f"There is no {quantity!r}; there are {', '.join(QUANTITIES)}.")
    of = QUANTITIES[quantity]
    one, other = _by_seed(rows, arm), _by_seed(rows, less)
    seeds = tuple(sorted(set(one) & set(other)))
    if not seeds:
        raise SelectionError(
            f"No seed has both {arm!r} and {less!r}: found {sorted(one)} and {sorted(other)}."
        )
    _require_alike([one[s] for s in seeds] + [other[s] for s in seeds])
    differences = np.array(
        [
            np.subtract(of(one[s]["branches"][branch]), of(other[s]["branches"][branch]))
            for s in seeds
        ]
    )
    return Effect(
        arm=arm,
        less=less,
        quantity=quantity,
        seeds=seeds,
        differences=differences,
        p=np.array([sign_flip(column) for column in differences.T]),
    )


def at_equal_loss(
    rows: Sequence[Row], arm: str, less: str, quantity: str, *, n_points: int = 5
) -> tuple[Float[np.ndarray, " point"], Float[np.ndarray, "seed point entry"]]:
    """Differences where both arms have the same held-out loss, between their branches.

    Each branch has decayed, so that the loss is not the rate's; it is over all held-out documents.
    Branches are those that were measured on as many documents as most were, the same ones. Between
    two of them the quantity is taken to be linear in the loss; losses are evenly spaced in what all
    runs have passed.
    """
    one, other = _by_seed(rows, arm), _by_seed(rows, less)
    seeds = sorted(set(one) & set(other))
    _require_alike([side[s] for s in seeds for side in (one, other)])
    counts = Counter(
        b.get("n_documents") for side in (one, other) for s in seeds for b in side[s]["branches"]
    )
    kept = counts.most_common(1)[0][0] if counts else None
    one, other = (
        {s: [b for b in side[s]["branches"] if b.get("n_documents") == kept] for s in seeds}
        for side in (one, other)
    )
    losses = [[b["loss_bits"] for b in side[s]] for s in seeds for side in (one, other)]
    if not seeds or max(min(found) for found in losses) >= min(max(found) for found in losses):
        raise SelectionError(f"The runs of {arm!r} and {less!r} share no range of held-out loss.")
    points = np.linspace(min(max(f) for f in losses), max(min(f) for f in losses), n_points)
    found = np.array(
        [_at(one[s], quantity, points) - _at(other[s], quantity, points) for s in seeds]
    )
    return points, found


def _at(branches: Sequence[Row], quantity: str, points: np.ndarray) -> np.ndarray:
    losses = np.array([b["loss_bits"] for b in branches])
    values = np.array([QUANTITIES[quantity](b) for b in branches])
    order = np.argsort(losses)
    columns = [np.interp(points, losses[order], column) for column in values[order].T]
    return np.stack(columns, axis=1)


def _by_seed(rows: Sequence[Row], arm: str) -> dict[int, Row]:
    return {row["seed"]: row for row in rows if row["arm"]["name"] == arm}


def _require_alike(rows: Sequence[Row]) -> None:
    for key in ("texts", "options", "recipe"):
        if any(row[key] != rows[0][key] for row in rows):
            raise SelectionError(
                f"The runs differ in {key}, so that their difference is not the arms'."
            )
