"""The axes of a heatmap: tokens above, targets below, layers up, the strip's own scales."""

from typing import Any

import numpy as np

from lens.lenses.predictions import NO_TOKEN, LayerPredictions
from lens.show.cells import INK, decades, spaced
from lens.show.frame import BAR_PX, LEFT_PX, Frame
from lens.show.labels import for_plotly, id_label, labels
from lens.show.strip import AGREEMENT, DIVERGENCE, SELF_COPY, LayerMeans

FAINT, PAPER = "#5f6b76", "#ffffff"
FONT = "'Noto Sans', 'DejaVu Sans', 'Segoe UI', Arial, sans-serif"


def layout(predictions: LayerPredictions, means: LayerMeans, frame: Frame) -> dict[str, Any]:
    """Everything of a plotly layout that is not a trace: sizes, words, axes, marks."""
    rows = predictions.layer_names
    marks = ["↺ " if ruled else "" for ruled in predictions.ruled_by_self_copy]
    return {
        "width": frame.width,
        "height": frame.height,
        "margin": {
            "l": LEFT_PX,
            "r": BAR_PX,
            "t": frame.top,
            "b": frame.height - frame.top - frame.row * frame.n_rows,
        },
        "font": {"family": FONT, "size": 12, "color": INK},
        "paper_bgcolor": PAPER,
        "plot_bgcolor": PAPER,
        "hoverlabel": {"align": "left", "font": {"family": FONT, "size": 12}},
        "hovermode": "closest",
        "dragmode": "pan",
        "modebar": {
            "remove": ["zoom2d", "zoomIn2d", "zoomOut2d", "autoScale2d", "select2d", "lasso2d"]
        },
        "title": {
            "text": f"<b>{frame.title}</b>" if frame.title else "",
            "font": {"size": 15},
            "subtitle": {
                "text": frame.source,
                "font": {"size": 11, "color": FAINT},
            },
            "x": 14 / frame.width,
            "xanchor": "left",
            "y": 1 - 32 / frame.height,
            "yanchor": "bottom",
        },
        "shapes": _row_marks(predictions),
        "annotations": _captions(frame),
        "yaxis": {
            "title": {"text": _layer_title(rows), "standoff": 6},
            "tickvals": list(range(len(rows))),
            "ticktext": [mark + row for mark, row in zip(marks, rows, strict=True)],
            "range": [-0.5, len(rows) - 0.5],
            "fixedrange": True,
            "showgrid": False,
            "zeroline": False,
            "ticks": "",
            "ticklabelstandoff": 9,
        },
        **_token_axes(predictions, frame),
        **_strip_axes(means, frame),
    }


def _layer_title(rows: tuple[str, ...]) -> str:
    if any("." in row for row in rows):
        return "layer (l.5: between attention and MLP of block l)"
    return "layer (state after that many blocks)"


def _token_axes(predictions: LayerPredictions, frame: Frame) -> dict[str, Any]:
    """The token read, above each column; below it the token that the cells are scored against."""
    count = len(predictions.positions)
    short = labels(predictions.vocabulary, max_chars=frame.chars)
    here = [
        f'<span style="font-size:9px;color:{FAINT}">{position}</span><br>'
        f"<b>{for_plotly(id_label(int(predictions.input_ids[position]), short))}</b>"
        for position in predictions.positions.tolist()
    ]
    following = [
        "" if token == NO_TOKEN else for_plotly(id_label(token, short))
        for token in predictions.target_ids.tolist()
    ]
    shared = {
        "tickvals": list(range(count)),
        "range": [frame.first - 0.5, frame.first + frame.visible - 0.5],
        "minallowed": -0.5,
        "maxallowed": count - 0.5,
        "domain": frame.domain(0),
        "showgrid": False,
        "zeroline": False,
        "ticks": "",
        "tickangle": 0,
        "tickfont": {"size": 10.5},
        "anchor": "y",
    }
    same = predictions.provenance.target == "same"
    below = "token here: the target" if same else "next token in the prompt: the target"
    above = "position and token read; the cells below are predicted from it"
    return {
        "xaxis": {
            **shared,
            "ticktext": here,
            "side": "top",
            "title": {"text": above, "font": {"size": 11, "color": FAINT}, "standoff": 4},
        },
        "xaxis4": {
            **shared,
            "ticktext": following,
            "side": "bottom",
            "overlaying": "x",
            "matches": "x",
            "title": {"text": below, "font": {"size": 11, "color": FAINT}, "standoff": 4},
        },
    }


def _strip_axes(means: LayerMeans, frame: Frame) -> dict[str, Any]:
    finite = means.kl_bits[np.isfinite(means.kl_bits)]
    most = max(float(spaced(finite).max()), 0.4) if finite.size else 1.0
    places, names = decades(most)
    shared = {
        "anchor": "y",
        "side": "bottom",
        "fixedrange": True,
        "zeroline": False,
        "gridcolor": "#e6e9ec",
        "tickfont": {"size": 10},
        "showline": True,
        "linecolor": "#c8ced3",
    }
    share = (
        f'<span style="color:{SELF_COPY}">■ self-copy mass</span><br>'
        f'<span style="color:{AGREEMENT}">● top-1 agreement</span>'
    )
    divergence = f'<span style="color:{DIVERGENCE}">◆ mean KL (bits)</span>'
    return {
        "xaxis2": {
            **shared,
            "domain": frame.domain(1),
            "range": [-0.05 * most, 1.06 * most],
            "tickvals": places,
            "ticktext": names,
            "title": {"text": divergence, "font": {"size": 10}, "standoff": 4},
        },
        "xaxis3": {
            **shared,
            "domain": frame.domain(2),
            "range": [-0.05, 1.05],
            "tickvals": [0, 0.5, 1],
            "title": {"text": share, "font": {"size": 10}, "standoff": 4},
        },
    }


def _row_marks(predictions: LayerPredictions) -> list[dict[str, Any]]:
    """A bar at the left edge of each row that self-copy rules."""
    return [
        {
            "type": "rect",
            "name": "ruled by self-copy",
            "xref": "paper",
            "yref": "y",
            "xsizemode": "pixel",
            "xanchor": 0,
            "x0": -6,
            "x1": -1,
            "y0": row - 0.5,
            "y1": row + 0.5,
            "fillcolor": SELF_COPY,
            "line": {"width": 0},
        }
        for row in np.flatnonzero(predictions.ruled_by_self_copy).tolist()
    ]


def _captions(frame: Frame) -> list[dict[str, Any]]:
    return [
        {
            "text": frame.caption,
            "xref": "paper",
            "yref": "paper",
            "x": 0,
            "y": 0,
            "xshift": -LEFT_PX + 14,
            "yshift": -54,
            "xanchor": "left",
            "yanchor": "top",
            "align": "left",
            "showarrow": False,
            "font": {"size": 11, "color": FAINT},
        }
    ]
