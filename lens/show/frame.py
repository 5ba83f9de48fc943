"""Sizes of a heatmap in pixels, and the words around it, wrapped to fit."""

import textwrap
from dataclasses import dataclass

import numpy as np

from lens.lenses.predictions import LayerPredictions
from lens.show.finding import source_line
from lens.show.labels import for_plotly, id_label, labels
from lens.show.strip import LayerMeans

CHAR_PX = 6.7  # mean advance of an 11 px sans-serif character
NARROWEST_PX = 52
LEFT_PX, STRIP_PX, GAP_PX, BAR_PX = 70, 92, 16, 104
AROUND_PX = LEFT_PX + BAR_PX + 2 * (GAP_PX + STRIP_PX)


@dataclass(frozen=True, kw_only=True)
class Frame:
    """Sizes in pixels, and how many columns are in view at once."""

    column: int
    row: int
    visible: int
    first: int
    n_rows: int
    n_columns: int
    hover_lines: int
    top: int
    bottom: int
    title: str
    source: str
    caption: str

    def height_between(self, top: int, bottom: int) -> int:
        """Height with these margins, at least that of a hover: plotly drops one that is higher."""
        return max(top + self.row * self.n_rows + bottom, 16 * self.hover_lines + 40)

    @property
    def width(self) -> int:
        """The whole figure's width."""
        return AROUND_PX + self.column * self.visible

    @property
    def height(self) -> int:
        """The whole figure's height."""
        return self.height_between(self.top, self.bottom)

    @property
    def chars(self) -> int:
        """How many characters fit a cell."""
        return max(4, int((self.column - 8) / CHAR_PX))

    @property
    def plot(self) -> int:
        """Width between the margins, which plotly's fractions refer to."""
        return self.width - LEFT_PX - BAR_PX

    def domain(self, panel: int) -> list[float]:
        """Where the map (0), the KL strip (1) and the share strip (2) stand, as fractions."""
        if panel == 0:
            return [0.0, self.column * self.visible / self.plot]
        left = self.column * self.visible + panel * GAP_PX + (panel - 1) * STRIP_PX
        return [left / self.plot, (left + STRIP_PX) / self.plot]


def measured(
    predictions: LayerPredictions, means: LayerMeans, *, title: str, max_width_px: int | None
) -> Frame:
    """Sizes for a result; as many columns in view as `max_width_px` holds, None for all."""
    n_rows, n_columns = predictions.top_ids.shape[:2]
    shown = labels(predictions.vocabulary, max_chars=10)
    lengths = [len(id_label(token, shown)) for token in predictions.top_ids[:, :, 0].flat]
    usual = float(np.percentile(lengths, 85)) if lengths else 4
    column = int(np.clip(CHAR_PX * usual + 12, NARROWEST_PX, 84))
    room = n_columns * column if max_width_px is None else max_width_px - AROUND_PX
    fitting = room // max(n_columns, 1)
    if fitting >= NARROWEST_PX:  # rather narrower columns than some out of view
        column = min(column, fitting)
    visible = max(1, min(n_columns, room // column))
    # The finding of a causal prompt is about its end.
    first = 0 if predictions.provenance.target == "same" else n_columns - visible
    width = AROUND_PX + column * visible
    words = explained(predictions, means)
    if visible < n_columns:
        end = "first" if first == 0 else "last"
        words += f" The {end} {visible} of {n_columns} positions are in view: drag for the rest."
    heading = _wrapped(title, (width - 40) / 8.6)
    source = _wrapped(source_line(predictions), (width - 40) / 6.1)
    caption = _wrapped(words, (width - 28) / 6.1)
    return Frame(
        column=column,
        row=24 if n_rows <= 20 else 20 if n_rows <= 40 else 17,
        visible=visible,
        first=max(first, 0),
        n_rows=n_rows,
        n_columns=n_columns,
        hover_lines=predictions.top_ids.shape[-1] + 6,
        top=82 + 20 * len(heading) + 14 * len(source),
        bottom=66 + 15 * len(caption),
        title="<br>".join(heading),
        source="<br>".join(source),
        caption="<br>".join(caption),
    )


def explained(predictions: LayerPredictions, means: LayerMeans) -> str:
    """What the marks of the figure mean, as plain text."""
    parts = ["Framed: the top-1 is the model's own final top-1."]
    if predictions.ruled_by_self_copy.any():
        parts.append(
            "↺ rows: more than half of the cells repeat the token they stand under (self-copy); "
            "they show the embedding's geometry, not a prediction."
        )
    parts.append(f"Strip: means over {means.over}.")
    return " ".join(parts)


def _wrapped(text: str, chars: float) -> list[str]:
    return [for_plotly(line) for line in textwrap.wrap(text, max(24, int(chars)))]
