"""Where numbers stand on an axis: even or logarithmic, and the ticks that read well there."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

Spacing = Literal["even", "decades"]

_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_DECADE_MARKS = (0.0, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0)
_LEAST_GAP = 0.08
"""Two ticks stand at least this share of the axis apart."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """An axis: numbers from `low` to `high`, as places from 0 to 1, and its ticks.

    "decades" spaces by log10(1 + |x|), sign kept: it holds 0 and 700 bits at once.
    """

    low: float
    high: float
    spacing: Spacing
    ticks: tuple[float, ...]

    def place(self, value: float) -> float:
        """Where the value stands, 0 at `low` and 1 at `high`; outside of that it is cut off."""
        turn = _TURNS[self.spacing]
        begin, end = turn(self.low), turn(self.high)
        return min(1.0, max(0.0, (turn(value) - begin) / (end - begin)))


def scale_of(
    low: float, high: float, *, spacing: Spacing = "even", whole: bool = False, n_ticks: int = 5
) -> Scale:
    """The scale that holds `low` to `high`; where they are equal, a little room around them.

    `whole` gives ticks at whole numbers alone, as layers have them.

    >>> scale_of(0.0, 30.0, whole=True).ticks
    (0.0, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0)
    """
    if not (math.isfinite(low) and math.isfinite(high)):
        low, high = 0.0, 1.0
    if high <= low:
        low, high = low - 0.5, high + 0.5
    # Within 1 of 0 the logarithm is all but even, and its marks would be 0 alone.
    if spacing == "decades" and max(abs(low), abs(high)) > 1.0:
        return Scale(low=low, high=high, spacing=spacing, ticks=_decade_ticks(low, high))
    step = _step((high - low) / n_ticks)
    step = max(1.0, float(round(step))) if whole else step
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    ticks = tuple(round(i * step, 10) for i in range(first, last + 1))
    return Scale(low=low, high=high, spacing="even", ticks=ticks)


def tick_text(value: float) -> str:
    """The value with as few digits as it needs.

    >>> tick_text(0.25), tick_text(-2.0), tick_text(1000.0)
    ('0.25', '-2', '1,000')
    """
    return f"{value:,.0f}" if value == int(value) else f"{value:g}"


def _step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(s * power for s in _STEPS if s * power >= rough * (1 - 1e-9))


def _decade_ticks(low: float, high: float) -> tuple[float, ...]:
    """The marks with the roundest first, each far enough from those that stand already."""
    marks = sorted({*_DECADE_MARKS, *(-m for m in _DECADE_MARKS)}, key=_roundness)
    empty = Scale(low=low, high=high, spacing="decades", ticks=())
    kept: list[float] = []
    for mark in marks:
        inside = low <= mark <= high
        if inside and all(abs(empty.place(mark) - empty.place(k)) >= _LEAST_GAP for k in kept):
            kept.append(mark)
    return tuple(sorted(kept))


def _roundness(mark: float) -> tuple[int, float]:
    whole_power = mark == 0 or math.log10(abs(mark)).is_integer()
    return (0 if mark == 0 else 1 if whole_power else 2, abs(mark))


_TURNS: dict[Spacing, Callable[[float], float]] = {
    "even": lambda value: value,
    "decades": lambda value: float(np.sign(value) * np.log10(1 + abs(value))),
}
