"""From which layer on a lens can be trusted, for what: proved, refuted or undecided."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from lens.measuring.profile import LensProfile
from lens.measuring.statistics import Interval
from lens.show.ribbons import State
from lens.trust.evidence import confidence_gap, skill_by_layer, usefulness_by_layer
from lens.trust.uses import USES, Use


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """The layer from which on a condition holds at every layer, known only between two bounds.

    It is refuted below `earliest` and shown from `proved` on; `proved` is None where it is shown
    at no layer, not even the last.
    """

    earliest: int
    proved: int | None
    n_layers: int

    @property
    def is_exact(self) -> bool:
        """True where no layer is left undecided."""
        return self.proved == self.earliest

    def __str__(self) -> str:
        last = self.n_layers
        if self.proved is None:
            return "at no layer" if self.earliest > last else "undecided at every layer"
        if self.earliest == last:
            return "only at the output"
        if self.proved == last:
            return f"only at the output ({_layers(self.earliest, last - 1)} undecided)"
        where = "from the embedding on" if self.proved == 0 else f"from layer {self.proved} on"
        if self.is_exact:
            return where
        return f"{where} ({_layers(self.earliest, self.proved - 1)} undecided)"


@dataclass(frozen=True, kw_only=True, eq=False)
class UseVerdict:
    """One use, the numbers that decide it, and the layer from which on it is granted."""

    use: Use
    found: Interval

    def states(self, threshold: float | None = None) -> tuple[State, ...]:
        """At each layer: does the whole band keep the threshold, miss it, or straddle it?"""
        return states_of(
            self.found, self.use.threshold if threshold is None else threshold, self.use.better
        )

    def crossing(self, threshold: float | None = None) -> Crossing:
        """From which layer on, at this threshold."""
        return crossing_of(self.states(threshold))


def verdicts(profile: LensProfile) -> tuple[UseVerdict, ...]:
    """The verdict on every use, from one profile with a context-free guess.

    Raises SelectionError for fewer than two documents.
    """
    return tuple(UseVerdict(use=use, found=EVIDENCE[use.key](profile)) for use in USES)


def states_of(found: Interval, threshold: float, better: str) -> tuple[State, ...]:
    """The band of each entry against a threshold: "yes", "no" or "undecided"."""
    good, bad = (
        (found.band_low >= threshold, found.band_high < threshold)
        if better == "higher"
        else (found.band_high <= threshold, found.band_low > threshold)
    )
    return tuple(
        "absent" if not known else "yes" if g else "no" if b else "undecided"
        for g, b, known in zip(good, bad, np.isfinite(found.estimate), strict=True)
    )


def crossing_of(states: Sequence[State]) -> Crossing:
    """Where `states` turn to "yes" for good."""
    count = len(states)
    refuted = [layer for layer, state in enumerate(states) if state in ("no", "absent")]
    open_ = [layer for layer, state in enumerate(states) if state != "yes"]
    proved = max(open_, default=-1) + 1
    return Crossing(
        earliest=max(refuted, default=-1) + 1,
        proved=proved if proved < count else None,
        n_layers=count - 1,
    )


def runs(layers: Sequence[int]) -> list[tuple[int, int]]:
    """Neighbouring layers put together: (first, last) of each run.

    >>> runs([0, 1, 2, 5])
    [(0, 2), (5, 5)]
    """
    found: list[tuple[int, int]] = []
    for layer in sorted(layers):
        if found and layer == found[-1][1] + 1:
            found[-1] = (found[-1][0], layer)
        else:
            found.append((layer, layer))
    return found


def layers_in_words(layers: Sequence[int]) -> str:
    """The layers as runs, for a sentence.

    >>> layers_in_words([0, 1, 2, 5])
    'layers 0 to 2 and 5'
    """
    parts = [f"{a}" if a == b else f"{a} to {b}" for a, b in runs(layers)]
    word = "layer" if len(layers) == 1 else "layers"
    joined = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    return f"{word} {joined}"


def _layers(first: int, last: int) -> str:
    return layers_in_words(range(first, last + 1))


EVIDENCE: dict[str, Callable[[LensProfile], Interval]] = {
    "context": skill_by_layer,
    "top-1": lambda profile: profile.interval("agreement"),
    "confidence": confidence_gap,
    "text": usefulness_by_layer,
    "distribution": lambda profile: profile.interval("kl_bits"),
}
"""What each use is decided by."""
