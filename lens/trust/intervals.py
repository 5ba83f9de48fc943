"""Intervals of some entries, of entries cut off below, and of what is left to 1."""

from dataclasses import replace

import numpy as np

from lens.measuring.statistics import Interval

_ENTRIES = ("estimate", "low", "high", "band_low", "band_high")


def entries(found: Interval, part: slice) -> Interval:
    """The interval of a part of the entries; its band still holds for all of them at once."""
    kept = {name: getattr(found, name)[part] for name in _ENTRIES}
    return replace(found, **kept, replicates=found.replicates[:, part])


def at_least(found: Interval, floor: float) -> Interval:
    """Every number below `floor` set to it."""
    kept = {name: np.maximum(getattr(found, name), floor) for name in _ENTRIES}
    return replace(found, **kept, replicates=np.maximum(found.replicates, floor))


def complement(found: Interval) -> Interval:
    """The interval of 1 - x."""
    return replace(
        found,
        estimate=1 - found.estimate,
        low=1 - found.high,
        high=1 - found.low,
        band_low=1 - found.band_high,
        band_high=1 - found.band_low,
        replicates=1 - found.replicates,
    )
