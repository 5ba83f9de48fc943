"""Bars that are divided: one for each layer, a segment for each part of a whole."""

from collections.abc import Sequence
from dataclasses import dataclass

from lens.show.labels import for_html
from lens.show.scales import scale_of, tick_text

WIDTH = 960.0
LABEL, RIGHT, TOP, BAR_HEIGHT, GAP, BOTTOM = 120.0, 24.0, 4.0, 24.0, 10.0, 38.0


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One bar: its name, and its parts in order, each a size and the words of a hover."""

    name: str
    sizes: tuple[float, ...]
    hints: tuple[str, ...]


def bars(rows: Sequence[Bar], *, x_title: str, alt: str) -> str:
    """The bars as one <svg>; parts below 0 have no room, and only their hints tell of them.

    Part i has the style `part pi`, the last one is the rest.
    """
    longest = max(sum(max(size, 0.0) for size in row.sizes) for row in rows)
    scale = scale_of(0.0, longest)
    floor = TOP + len(rows) * (BAR_HEIGHT + GAP)
    wide = WIDTH - LABEL - RIGHT
    parts = [
        f'<svg class="bars" viewBox="0 0 {WIDTH} {floor + BOTTOM}" role="img" '
        f'aria-label="{for_html(alt)}">'
    ]
    for tick in scale.ticks:
        x = LABEL + scale.place(tick) * wide
        parts.append(
            f'<path class="rule" d="M{x:.1f} {TOP}V{floor}"/><text class="tick" x="{x:.1f}" '
            f'y="{floor + 13}" text-anchor="middle">{tick_text(tick)}</text>'
        )
    for number, row in enumerate(rows):
        y = TOP + number * (BAR_HEIGHT + GAP)
        parts.append(
            f'<text class="rowname" x="{LABEL - 10}" y="{y + BAR_HEIGHT / 2 + 4}" '
            f'text-anchor="end">{for_html(row.name)}</text>'
        )
        begin = 0.0
        for part, (size, hint) in enumerate(zip(row.sizes, row.hints, strict=True)):
            if size <= 0:
                continue
            x, end = (LABEL + scale.place(v) * wide for v in (begin, begin + size))
            parts.append(
                f'<g><title>{for_html(hint)}</title><rect class="part p{part}" x="{x:.1f}" '
                f'y="{y}" width="{max(end - x, 0.5):.1f}" height="{BAR_HEIGHT}"/></g>'
            )
            begin += size
    parts.append(
        f'<text class="axis" x="{LABEL + wide / 2}" y="{floor + 31}" text-anchor="middle">'
        f"{for_html(x_title)}</text></svg>"
    )
    return "".join(parts)


def bar_key(names: Sequence[str]) -> str:
    """What the parts are."""
    items = "".join(
        f'<span><svg class="key" viewBox="0 0 18 12"><rect class="part p{part}" width="18" '
        f'height="12" rx="2"/></svg>{for_html(name)}</span>'
        for part, name in enumerate(names)
    )
    return f'<div class="legend">{items}</div>'
