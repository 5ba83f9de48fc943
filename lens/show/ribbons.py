"""Rows of cells, one for each layer: what holds there, what does not, what is undecided."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lens.show.labels import for_html

State = Literal["yes", "no", "undecided", "absent"]

WIDTH = 960.0
LABEL, RIGHT, TOP, CELL_HEIGHT, GAP, BOTTOM = 244.0, 4.0, 4.0, 26.0, 7.0, 34.0
_LEAST_FOR_TEXT = 19.0
"""Narrower cells hold no number."""

HATCH = (
    '<svg width="0" height="0" class="defs" aria-hidden="true"><defs>'
    '<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><path class="hatch" d="M0 0V6"/></pattern></defs></svg>'
)
"""The hatching of what is undecided: once in each page that holds ribbons."""


@dataclass(frozen=True, kw_only=True)
class Ribbon:
    """One row: its name, and for each layer a state, a short number and the words of a hover."""

    name: str
    states: tuple[State, ...]
    texts: tuple[str, ...]
    hints: tuple[str, ...]
    tone: Literal["good", "bad"] = "good"


def ribbons(rows: Sequence[Ribbon], *, alt: str) -> str:
    """The rows as one <svg>, layer 0 on the left; `yes` is filled, `undecided` hatched.

    Colours come from the page's style sheet: good ones for what one hopes for, bad ones for what
    explains a failure. A page needs HATCH once.
    """
    n_layers = max(len(row.states) for row in rows)
    cell = (WIDTH - LABEL - RIGHT) / n_layers
    floor = TOP + len(rows) * (CELL_HEIGHT + GAP)
    parts = [
        f'<svg class="ribbons" viewBox="0 0 {WIDTH:g} {floor + BOTTOM:g}" role="img" '
        f'aria-label="{for_html(alt)}">'
    ]
    for number, row in enumerate(rows):
        y = TOP + number * (CELL_HEIGHT + GAP)
        parts.append(
            f'<text class="rowname" x="{LABEL - 10:g}" y="{y + CELL_HEIGHT / 2 + 4:g}" '
            f'text-anchor="end">{for_html(row.name)}</text>'
        )
        for layer, (state, text, hint) in enumerate(
            zip(row.states, row.texts, row.hints, strict=True)
        ):
            parts.append(_cell(row, LABEL + layer * cell, y, cell, state, text, hint))
    every = next(step for step in (1, 2, 5, 10, 20, 50, 100) if cell * step >= 22)
    for layer in range(0, n_layers, every):
        x = LABEL + (layer + 0.5) * cell
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{floor + 8:g}" text-anchor="middle">{layer}</text>'
        )
    parts.append(
        f'<text class="axis" x="{(LABEL + WIDTH - RIGHT) / 2:g}" y="{floor + 25:g}" '
        'text-anchor="middle">layer (state after that many blocks)</text></svg>'
    )
    return "".join(parts)


def ribbon_key(tone: Literal["good", "bad"], words: dict[State, str]) -> str:
    """What the fillings mean."""
    items = "".join(
        '<span><svg class="key" viewBox="0 0 18 12">'
        f"{_rect(tone, 0.5, 0.5, 17.0, 11.0, state)}</svg>{for_html(text)}</span>"
        for state, text in words.items()
    )
    return f'<div class="legend">{items}</div>'


def _cell(row: Ribbon, x: float, y: float, width: float, state: State, text: str, hint: str) -> str:
    inside = _rect(row.tone, x + 0.75, y, width - 1.5, CELL_HEIGHT, state)
    if text and width >= _LEAST_FOR_TEXT:
        size = 10 if width >= 24 else 9
        inside += (
            f'<text class="cellnumber {row.tone}-{state}" x="{x + width / 2:.1f}" '
            f'y="{y + CELL_HEIGHT / 2 + 3.5:.1f}" font-size="{size}" text-anchor="middle">'
            f"{for_html(text)}</text>"
        )
    return f"<g><title>{for_html(hint)}</title>{inside}</g>"


def _rect(tone: str, x: float, y: float, width: float, height: float, state: State) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 1.0):.1f}" height="{height:g}" rx="2"'
    base = f'<rect class="{tone} {state}" {place}/>'
    return base + (f'<rect fill="url(#hatch)" {place}/>' if state == "undecided" else "")
