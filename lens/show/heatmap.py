"""The heatmap of a prompt: layers up, tokens along, each cell what the layer predicts there."""

import json
from typing import Any

import numpy as np
import plotly.graph_objects as go

from lens.lenses.predictions import LayerPredictions
from lens.show.axes import FONT, layout
from lens.show.cells import (
    INK,
    WHITE,
    Colour,
    cell_texts,
    colour_named,
    dark_cells,
    decades,
    hover_parts,
    hover_template,
    outlines,
)
from lens.show.finding import finding
from lens.show.frame import Frame, measured
from lens.show.strip import AGREEMENT, layer_means, strip_traces
from lens.show.table import prediction_table

CONFIG: dict[str, Any] = {"displaylogo": False, "doubleClick": "reset", "typesetMath": False}


def heatmap(
    predictions: LayerPredictions,
    *,
    colour: str = "probability",
    title: str | None = None,
    max_width_px: int | None = 1400,
) -> go.Figure:
    """Draw what each layer predicts at each position, as a plotly figure.

    Rows are layers, 0 (the embedding) at the bottom; columns are positions, headed by the token
    that stands there, and the cells under it hold what is predicted FROM it. The cell's text is
    the top-1; its outline says that this is the model's own final top-1; hovering gives the
    top-k with probabilities, entropy and KL in bits, ranks, self-copy mass. `colour` is
    "probability" (of the top-1), "entropy" (bits), "kl" (final against layer, bits) or "rank" (of
    the final top-1, 0 = first; logarithmic); dark is always sure or close. The strip on the right
    has mean KL (bits), self-copy mass and top-1 agreement by layer; rows that mostly repeat their
    input are marked ↺. `title` replaces the finding. A prompt wider than `max_width_px` shows its
    last columns (a masked model's its first) and is dragged sideways; None draws it whole.

    Raises SelectionError for a colour that does not exist. Nothing of plotly's global state is
    read or changed: your default template stays yours, and does not touch this figure.

    Example: `heatmap(predictions, colour="kl").write_image("kl.png")`.
    Source: nostalgebraist, "interpreting GPT: the logit lens" (2020).
    """
    chosen = colour_named(colour)
    words = finding(predictions) if title is None else title
    means = layer_means(predictions)
    frame = measured(predictions, means, title=words, max_width_px=max_width_px)
    figure = go.Figure(layout={"template": go.layout.Template()})
    figure.add_traces(_map(predictions, chosen, frame))
    figure.add_trace(_outlines(predictions))
    figure.add_traces(strip_traces(means, list(predictions.layer_names)))
    return figure.update_layout(layout(predictions, means, frame))


def notebook_bundle(predictions: LayerPredictions) -> dict[str, Any]:
    """What Jupyter shows for a result: the live figure, and a table for where there is none.

    The figure goes under plotly's own media type, which JupyterLab, Notebook 7 and VS Code draw
    with the plotly.js that they already hold; the table is plain HTML, for nbconvert, GitHub and
    untrusted notebooks. Neither needs the network, and no copy of plotly.js is stored.
    """
    figure = json.loads(str(heatmap(predictions, max_width_px=1100).to_json()))
    return {
        "application/vnd.plotly.v1+json": {**figure, "config": CONFIG},
        "text/html": prediction_table(predictions),
        "text/plain": repr(predictions),
    }


def _map(predictions: LayerPredictions, colour: Colour, frame: Frame) -> list[go.Heatmap]:
    """The map with dark ink on its light cells, and a clear sheet with white ink for the others."""
    numbers = np.asarray(colour.numbers(predictions), dtype=np.float32)
    top = colour.top(predictions, numbers)
    numbers = np.where(np.isfinite(numbers), numbers, np.float32(top))
    shade = np.clip(numbers / top, 0, 1)
    dark = dark_cells(1 - shade if colour.low_is_dark else shade)
    texts = cell_texts(predictions, max_chars=frame.chars)
    gap = 0 if numbers.size > 4000 else 1  # without gaps the browser paints one pixel per cell
    shared: dict[str, Any] = {
        "x": np.arange(numbers.shape[1]),
        "y": np.arange(numbers.shape[0]),
        "texttemplate": "%{text}",
        "xgap": gap,
        "ygap": gap,
    }
    cells = go.Heatmap(
        **shared,
        z=numbers,
        zmin=0,
        zmax=top,
        colorscale=colour.scale,
        colorbar=_colour_bar(colour, top, frame),
        text=_where(~dark, texts),
        textfont={"size": 11, "family": FONT, "color": INK},
        customdata=hover_parts(predictions),
        hovertemplate=hover_template(predictions),
    )
    sheet = go.Heatmap(
        **shared,
        z=np.zeros(numbers.shape, dtype=np.int8),
        colorscale=[[0, "rgba(0,0,0,0)"], [1, "rgba(0,0,0,0)"]],
        showscale=False,
        hoverinfo="skip",
        text=_where(dark, texts),
        textfont={"size": 11, "family": FONT, "color": WHITE},
    )
    return [cells, sheet]


def _where(kept: np.ndarray, texts: list[list[str]]) -> list[list[str]]:
    pairs = zip(kept.tolist(), texts, strict=True)
    return [[t if k else "" for k, t in zip(row, line, strict=True)] for row, line in pairs]


def _colour_bar(colour: Colour, top: float, frame: Frame) -> dict[str, Any]:
    bar: dict[str, Any] = {
        "title": {"text": colour.title, "font": {"size": 11}},
        "thickness": 12,
        "len": min(1.0, 220 / (frame.row * frame.n_rows)),
        "lenmode": "fraction",
        "y": 1.0,
        "yanchor": "top",
        "x": 1.0 + 14 / frame.plot,
        "tickfont": {"size": 10},
        "outlinewidth": 0,
    }
    if colour.ticks:
        bar["tickvals"], bar["ticktext"] = decades(top)
    return bar


def _outlines(predictions: LayerPredictions) -> go.Scatter:
    x, y = outlines(predictions.agreement)
    return go.Scatter(
        x=x or [None],
        y=y or [None],
        name="equals the final top-1",
        xaxis="x4",
        yaxis="y",
        mode="lines",
        line={"color": AGREEMENT, "width": 1.8, "simplify": False},
        connectgaps=False,
        hoverinfo="skip",
        showlegend=False,
    )
