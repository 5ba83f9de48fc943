"""The strip beside the map: one number per layer that says how far to trust the row."""

import warnings
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float

from lens.lenses.predictions import LayerPredictions
from lens.show.cells import spaced

AGREEMENT = "#D55E00"
SELF_COPY = "#7B3294"
DIVERGENCE = "#4D4D4D"


@dataclass(frozen=True, kw_only=True)
class LayerMeans:
    """Means over positions, one for each layer read. NaN where no position has the number."""

    kl_bits: Float[np.ndarray, " layer"]
    self_copy_mass: Float[np.ndarray, " layer"]
    agreement: Float[np.ndarray, " layer"]
    n_positions: int
    left_out_first: bool

    @property
    def over(self) -> str:
        """Which positions the means are taken over, for a caption."""
        plural = "s" if self.n_positions != 1 else ""
        rest = ", position 0 left out" if self.left_out_first else ""
        return f"{self.n_positions} position{plural}{rest}"


def layer_means(predictions: LayerPredictions) -> LayerMeans:
    """Mean KL (bits), self-copy mass and top-1 agreement (0 to 1) of each layer.

    Position 0 is left out where there are others: many models give it a state of its own (an
    attention sink) whose norm and readings are unlike all the rest.
    """
    kept = predictions.positions != 0
    left_out = bool(kept.any() and not kept.all())
    if not left_out:
        kept = np.ones_like(kept)
    return LayerMeans(
        kl_bits=_mean(predictions.kl_bits[:, kept]),
        self_copy_mass=_mean(predictions.self_copy_mass[:, kept]),
        agreement=_mean(predictions.agreement[:, kept].astype(np.float64)),
        n_positions=int(kept.sum()),
        left_out_first=left_out,
    )


def strip_traces(means: LayerMeans, rows: list[str]) -> list[go.Scatter]:
    """Three curves with layers up: KL on x2 (`spaced`), self-copy mass and agreement on x3.

    `rows` are the layers' names, in the order of the map's rows.
    """
    curves = (
        ("x2", means.kl_bits, DIVERGENCE, "diamond", "mean KL(final ‖ layer) %{text} bits"),
        ("x3", means.self_copy_mass, SELF_COPY, "square", "mean self-copy mass %{text}"),
        ("x3", means.agreement, AGREEMENT, "circle", "top-1 agreement %{text}"),
    )
    return [
        go.Scatter(
            x=_drawable(spaced(values) if axis == "x2" else values),
            text=[f"{value:.3g}" for value in values.tolist()],
            y=np.arange(len(rows)),
            xaxis=axis,
            yaxis="y",
            mode="lines+markers",
            line={"color": colour, "width": 1.5},
            marker={"color": colour, "size": 5, "symbol": symbol},
            customdata=rows,
            hovertemplate=f"layer %{{customdata}}: {text}<br>over {means.over}<extra></extra>",
            showlegend=False,
            cliponaxis=False,
        )
        for axis, values, colour, symbol, text in curves
    ]


def _mean(values: Float[np.ndarray, "layer pos"]) -> Float[np.ndarray, " layer"]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a row of NaN alone has no mean: NaN
        return np.asarray(np.nanmean(values.astype(np.float64), axis=1))


def _drawable(values: Float[np.ndarray, " layer"]) -> list[float | None]:
    return [float(value) if np.isfinite(value) else None for value in values]
