"""Responses against a dose: a line for each group, and each seed as a dot behind its mean."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float
from plotly.subplots import make_subplots

from lens.errors import SelectionError, ShapeError
from lens.show.curves import DASHES, FAINT, GRID_COLOUR, PALETTE, titled
from lens.show.labels import for_plotly


@dataclass(frozen=True, kw_only=True, eq=False)
class Response:
    """One group: where its doses are, and what each seed gave there."""

    dose: Float[np.ndarray, " dose"]
    values: Float[np.ndarray, "seed _"]

    def __post_init__(self) -> None:
        if self.values.ndim != 2 or self.values.shape[1] != len(self.dose) or not self.values.size:
            raise ShapeError(
                f"values has shape {self.values.shape}; expected [seed, {len(self.dose)}]."
            )


def response_lines(
    panels: Mapping[str, Mapping[str, Response]],
    *,
    dose: str,
    title: str,
    subtitle: str,
    logarithmic: bool = False,
) -> go.Figure:
    """The panels side by side by heading, each a mapping of groups; lines join means over seeds.

    `logarithmic` is the dose's axis. Raises SelectionError without a panel.
    """
    if not panels:
        raise SelectionError("There is no panel to draw; expected at least one.")
    figure = make_subplots(1, len(panels), horizontal_spacing=0.08)
    names = list(dict.fromkeys(name for groups in panels.values() for name in groups))
    shown: set[str] = set()
    for column, (heading, groups) in enumerate(panels.items(), 1):
        for name, response in groups.items():
            number = names.index(name)
            colour, dash = PALETTE[number % len(PALETTE)], DASHES[number % len(DASHES)]
            for seed in response.values:
                figure.add_scatter(
                    x=response.dose,
                    y=seed,
                    mode="markers",
                    marker={"color": colour, "size": 4, "opacity": 0.45},
                    hoverinfo="skip",
                    showlegend=False,
                    row=1,
                    col=column,
                )
            figure.add_scatter(
                x=response.dose,
                y=response.values.mean(axis=0),
                name=for_plotly(name),
                mode="lines+markers",
                marker={"size": 7, "color": colour},
                line={"color": colour, "width": 2, "dash": dash},
                legendgroup=name,
                showlegend=name not in shown,
                row=1,
                col=column,
            )
            shown.add(name)
        # Ticks at 1, 2 and 5 of each decade.
        scale = {"type": "log", "dtick": "D2"} if logarithmic else {"type": "linear"}
        grid = {"showgrid": True, "gridcolor": GRID_COLOUR, "zerolinecolor": FAINT}
        figure.update_xaxes(title_text=dose, row=1, col=column, **scale, **grid)
        figure.update_yaxes(title_text=heading, row=1, col=column, **grid)
    figure.update_layout(template=go.layout.Template(), width=420 * len(panels) + 60, height=420)
    return titled(figure, title, subtitle)
