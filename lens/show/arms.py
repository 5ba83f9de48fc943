"""Arms of a study by layer: the mean over seeds, each seed's own line behind it."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float
from plotly.subplots import make_subplots

from lens.errors import SelectionError
from lens.show.curves import DASHES, FAINT, GRID_COLOUR, PALETTE, titled
from lens.show.labels import for_plotly


@dataclass(frozen=True, kw_only=True, eq=False)
class Panel:
    """One quantity: for each arm its values by seed and layer, layers from 0."""

    heading: str
    arms: Mapping[str, Float[np.ndarray, "seed layer"]]
    logarithmic: bool = False


def arm_curves(*panels: Panel, title: str, subtitle: str) -> go.Figure:
    """The panels side by side; thick lines are means over seeds, thin ones the seeds.

    A logarithmic panel leaves out what is 0: a lens at the last layer. Raises SelectionError
    without a panel.
    """
    if not panels:
        raise SelectionError("There is no panel to draw; expected at least one.")
    figure = make_subplots(1, len(panels), horizontal_spacing=0.07)
    names = list(dict.fromkeys(name for panel in panels for name in panel.arms))
    for column, panel in enumerate(panels, 1):
        for name, values in panel.arms.items():
            number = names.index(name)
            colour, dash = PALETTE[number % len(PALETTE)], DASHES[number % len(DASHES)]
            shown = np.where(values > 0, values, np.nan) if panel.logarithmic else values
            layers = np.arange(values.shape[1])
            for seed in shown:
                figure.add_scatter(
                    x=layers,
                    y=seed,
                    mode="lines",
                    line={"color": colour, "width": 0.7},
                    opacity=0.5,
                    hoverinfo="skip",
                    showlegend=False,
                    row=1,
                    col=column,
                )
            figure.add_scatter(
                x=layers,
                y=shown.mean(axis=0),
                name=for_plotly(name),
                mode="lines+markers",
                marker={"size": 5},
                line={"color": colour, "width": 2.4, "dash": dash},
                legendgroup=name,
                showlegend=name not in {n for p in panels[: column - 1] for n in p.arms},
                row=1,
                col=column,
            )
        grid = {"showgrid": True, "gridcolor": GRID_COLOUR, "zeroline": not panel.logarithmic}
        figure.update_xaxes(title_text="layer", dtick=1, row=1, col=column, **grid)
        figure.update_yaxes(
            title_text=panel.heading,
            type="log" if panel.logarithmic else "linear",
            zerolinecolor=FAINT,
            row=1,
            col=column,
            **grid,
        )
    figure.update_layout(template=go.layout.Template(), width=360 * len(panels) + 60, height=420)
    return titled(figure, title, subtitle)
