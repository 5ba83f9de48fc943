"""Curves over layers as a static SVG: no script, colours by style sheet, light, dark or print."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from jaxtyping import Float

from lens.measuring.statistics import Interval
from lens.show.labels import for_html
from lens.show.scales import Scale, Spacing, scale_of, tick_text

WIDTH, HEIGHT = 460, 270
LEFT, RIGHT, TOP, BOTTOM = 48, 12, 12, 40
DASHES = ("", "6 3", "2 3", "8 3 2 3")


@dataclass(frozen=True, kw_only=True, eq=False)
class Line:
    """One curve: its name, its places, its values, and what is drawn around it.

    `low` to `high` is shaded, `band_low` to `band_high` drawn dotted. `hue` 0 to 3 picks the
    colour; the dash goes with it unless `dash` is given, so that no curve is told by colour alone.
    """

    name: str
    x: Float[np.ndarray, " entry"]
    y: Float[np.ndarray, " entry"]
    low: Float[np.ndarray, " entry"] | None = None
    high: Float[np.ndarray, " entry"] | None = None
    band_low: Float[np.ndarray, " entry"] | None = None
    band_high: Float[np.ndarray, " entry"] | None = None
    hue: int = 0
    dash: int | None = None
    dots: bool = True

    @property
    def dashes(self) -> str:
        """The pattern of its stroke."""
        return DASHES[(self.hue if self.dash is None else self.dash) % len(DASHES)]


def interval_line(name: str, x: np.ndarray, found: Interval, *, hue: int = 0) -> Line:
    """The curve of an estimate with its pointwise interval shaded."""
    return Line(name=name, x=x, y=found.estimate, low=found.low, high=found.high, hue=hue)


def chart(
    lines: Sequence[Line],
    *,
    x_title: str,
    y_title: str,
    spacing: Spacing = "even",
    y_range: tuple[float | None, float | None] = (None, None),
    level: float | None = None,
    level_name: str = "",
    from_x: int | float | None = None,
    whole_x: bool = True,
    alt: str = "",
) -> str:
    """The curves as one <svg>; a number of `y_range` fixes that end of the axis.

    `level` draws a line across (a threshold), `from_x` shades all that stands right of it.
    Hovering a dot tells its numbers.
    """
    x_scale = scale_of(
        min(float(line.x.min()) for line in lines),
        max(float(line.x.max()) for line in lines),
        whole=whole_x,
        n_ticks=8 if whole_x else 5,
    )
    y_scale = _y_scale(lines, spacing, y_range, level)
    frame = _Frame(x_scale, y_scale)
    parts = [
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{for_html(alt or y_title)}">',
        _trusted(frame, from_x),
        _grid(frame, x_title, y_title),
        _level(frame, level, level_name),
        *(_area(frame, line) for line in lines),
        *(_curve(frame, line) for line in lines),
        "</svg>",
    ]
    return "".join(parts)


def legend(lines: Sequence[Line]) -> str:
    """The names of the curves beside samples of their strokes."""
    items = "".join(
        f'<span><svg class="key" viewBox="0 0 26 10"><path class="line c{line.hue}" '
        f'stroke-dasharray="{line.dashes}" d="M1 5H25"/></svg>{for_html(line.name)}</span>'
        for line in lines
    )
    return f'<div class="legend">{items}</div>'


@dataclass(frozen=True)
class _Frame:
    """From numbers to places on the drawing."""

    x: Scale
    y: Scale

    def at(self, x: float, y: float) -> tuple[float, float]:
        return self.across(x), self.down(y)

    def across(self, x: float) -> float:
        return LEFT + self.x.place(x) * (WIDTH - LEFT - RIGHT)

    def down(self, y: float) -> float:
        return HEIGHT - BOTTOM - self.y.place(y) * (HEIGHT - TOP - BOTTOM)


def _y_scale(
    lines: Sequence[Line],
    spacing: Spacing,
    y_range: tuple[float | None, float | None],
    level: float | None,
) -> Scale:
    arrays = [a for line in lines for a in (line.y, line.low, line.high) if a is not None]
    arrays += [b for line in lines for b in (line.band_low, line.band_high) if b is not None]
    every = np.concatenate([*arrays, np.array([] if level is None else [level])])
    every = every[np.isfinite(every)]
    low, high = (float(every.min()), float(every.max())) if len(every) else (0.0, 1.0)
    room = 0.05 * (high - low)
    # What is never negative gets no room below 0.
    lowest = max(low - room, 0.0) if low >= 0 else low - room
    low = lowest if y_range[0] is None else y_range[0]
    high = high + room if y_range[1] is None else y_range[1]
    return scale_of(low, high, spacing=spacing)


def _grid(frame: _Frame, x_title: str, y_title: str) -> str:
    right, floor = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = []
    for tick in frame.y.ticks:
        y = frame.down(tick)
        zero = ' class="zero"' if tick == 0 else ' class="rule"'
        parts.append(f'<path{zero} d="M{LEFT} {y:.1f}H{right}"/>')
        parts.append(
            f'<text class="tick" x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">'
            f"{tick_text(tick)}</text>"
        )
    for tick in frame.x.ticks:
        x = frame.across(tick)
        parts.append(f'<path class="rule" d="M{x:.1f} {floor}v4"/>')
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{floor + 16}" text-anchor="middle">'
            f"{tick_text(tick)}</text>"
        )
    middle = (TOP + floor) / 2
    parts.append(
        f'<text class="axis" x="{(LEFT + right) / 2}" y="{HEIGHT - 6}" text-anchor="middle">'
        f"{for_html(x_title)}</text>"
        f'<text class="axis" transform="translate(11 {middle}) rotate(-90)" text-anchor="middle">'
        f"{for_html(y_title)}</text>"
    )
    return "".join(parts)


def _trusted(frame: _Frame, from_x: int | float | None) -> str:
    if from_x is None:
        return ""
    x = frame.across(float(from_x))
    return (
        f'<rect class="trusted" x="{x:.1f}" y="{TOP}" width="{max(WIDTH - RIGHT - x, 2):.1f}" '
        f'height="{HEIGHT - TOP - BOTTOM}"/>'
    )


def _level(frame: _Frame, level: float | None, name: str) -> str:
    if level is None:
        return ""
    y = frame.down(level)
    return (
        f'<path class="level" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>'
        f'<text class="levelname" x="{LEFT + 4}" y="{y - 4:.1f}">{for_html(name)}</text>'
    )


def _area(frame: _Frame, line: Line) -> str:
    parts = []
    if line.low is not None and line.high is not None:
        for run in _runs(np.isfinite(line.low) & np.isfinite(line.high)):
            there = [frame.at(line.x[i], line.high[i]) for i in run]
            back = [frame.at(line.x[i], line.low[i]) for i in reversed(run)]
            parts.append(f'<path class="area c{line.hue}" d="{_path(there + back)}Z"/>')
    for edge in (line.band_low, line.band_high):
        if edge is not None:
            for run in _runs(np.isfinite(edge)):
                points = _path([frame.at(line.x[i], edge[i]) for i in run])
                parts.append(f'<path class="band c{line.hue}" d="{points}"/>')
    return "".join(parts)


def _curve(frame: _Frame, line: Line) -> str:
    parts = []
    for run in _runs(np.isfinite(line.y)):
        points = [frame.at(line.x[i], line.y[i]) for i in run]
        parts.append(
            f'<path class="line c{line.hue}" stroke-dasharray="{line.dashes}" d="{_path(points)}"/>'
        )
        if line.dots:
            for i, (x, y) in zip(run, points, strict=True):
                parts.append(
                    f'<circle class="dot c{line.hue}" cx="{x:.1f}" cy="{y:.1f}" r="2.3">'
                    f"<title>{for_html(_told(line, i))}</title></circle>"
                )
    return "".join(parts)


def _told(line: Line, i: int) -> str:
    text = f"{line.name}, at {tick_text(round(float(line.x[i]), 3))}: {line.y[i]:.4g}"
    if line.low is not None and line.high is not None:
        text += f" [{line.low[i]:.4g}, {line.high[i]:.4g}]"
    return text


def _runs(kept: np.ndarray) -> list[list[int]]:
    """Neighbouring places that are kept, together."""
    places = enumerate(kept.tolist())
    return [[i for i, _ in group] for good, group in groupby(places, lambda p: p[1]) if good]


def _path(points: list[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
