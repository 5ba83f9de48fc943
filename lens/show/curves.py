"""Profiles and comparisons as curves over relative depth, with their intervals."""

from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from lens.measuring.comparison import Comparison
from lens.measuring.profile import LensProfile
from lens.measuring.statistics import Interval
from lens.show.labels import for_plotly

FONT = "'Noto Sans', 'DejaVu Sans', 'Segoe UI', Arial, sans-serif"
INK, FAINT, GRID_COLOUR = "#1b2733", "#5f6b76", "#e6e9ec"
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
"""Okabe and Ito's colours, told apart by colour-blind readers; lines differ in dash as well."""

DASHES = ("solid", "dash", "dot", "dashdot")


def profile_curves(*profiles: LensProfile, title: str | None = None) -> go.Figure:
    """KL, skill and self-copy by relative depth, one line for each profile, 95 % intervals shaded.

    The title states the first profile's finding unless `title` is given. Depth 0 is the embedding,
    1 the output. Example: `profile_curves(profile).write_image("curves.svg")`.
    """
    figure = _panels(("KL(final ‖ lens), bits", "skill", "probability of the input token"))
    for number, profile in enumerate(profiles):
        depth = np.arange(profile.n_layers + 1) / profile.n_layers
        name = _name(profile)
        several = profile.n_readable > 1
        kl = profile.interval("kl_bits") if several else None
        _line(figure, 1, number, name, depth, profile.mean("kl_bits"), kl)
        _line(figure, 2, number, name, depth, np.maximum(profile.skill, -1.0), None)
        copy = profile.interval("self_copy_mass") if several else None
        _line(figure, 3, number, name, depth, profile.mean("self_copy_mass"), copy)
    figure.update_yaxes(range=[-1.05, 1.05], row=1, col=2)
    figure.update_yaxes(range=[-0.02, 1.02], row=1, col=3)
    first = profiles[0]
    return titled(
        figure,
        profile_finding(first) if title is None else title,
        f"{first.n_positions:,} positions of {len(first.documents)} documents of "
        f"{first.provenance.corpus_name} ({first.provenance.n_sources} sources); shaded: 95 % "
        "interval over documents; skill below -1 is drawn at -1",
    )


def comparison_curves(comparison: Comparison, *, title: str | None = None) -> go.Figure:
    """Signed differences by relative depth, second less first, with pointwise and joint bands."""
    names = list(comparison.differences)
    figure = _panels(tuple(f"d{name}, {comparison.unit}" for name in names))
    for number, name in enumerate(names, 1):
        found = comparison.differences[name]
        _line(figure, number, 0, f"d{name}", comparison.depth, found.estimate, found)
        for edge in (found.band_low, found.band_high):
            figure.add_scatter(
                x=comparison.depth,
                y=edge,
                mode="lines",
                line={"color": PALETTE[0], "width": 1, "dash": "dot"},
                hoverinfo="skip",
                showlegend=False,
                row=1,
                col=number,
            )
        figure.add_hline(y=0, line={"color": FAINT, "width": 1}, row=1, col=number)  # type: ignore[arg-type]
    return titled(
        figure,
        comparison_finding(comparison) if title is None else title,
        f"{comparison.headline.n_documents} documents; shaded: 95 % interval at each depth; "
        "dotted: 95 % band over all depths at once. Two checkpoints differ in more than the tie",
    )


def profile_finding(profile: LensProfile) -> str:
    """One sentence: from which layer on the lens reads better than a context-free guess."""
    model = profile.provenance.reading.model_id
    if not profile.provenance.baseline_hash:
        layer = int(profile.depth_shares()[:-1].cumsum().searchsorted(0.5))
        return f"{model}: half of the predictions are final by layer {layer} of {profile.n_layers}"
    useful = profile.skill > 0
    stays = np.logical_and.accumulate(useful[::-1])[::-1]
    lens = f"{model}: the {profile.provenance.reading.lens} lens"
    if not stays.any():
        return f"{lens} does not beat a context-free guess at the output"
    layer = int(stays.argmax())
    return f"{lens} beats a context-free guess from layer {layer} of {profile.n_layers} on"


def comparison_finding(comparison: Comparison) -> str:
    """One sentence: the headline difference with its interval."""
    found, what = comparison.headline, comparison.headline_of
    return (
        f"{comparison.second.name} less {comparison.first.name}: mean d{what} "
        f"{found.estimate[0]:+.2f} {comparison.unit} "
        f"[{found.low[0]:+.2f}, {found.high[0]:+.2f}]"
    )


def _name(profile: LensProfile) -> str:
    return f"{profile.provenance.reading.model_id}, {profile.provenance.reading.lens} lens"


def _panels(headings: tuple[str, ...]) -> go.Figure:
    figure = make_subplots(1, len(headings), horizontal_spacing=0.08)
    figure.update_layout(template=go.layout.Template(), width=360 * len(headings) + 60, height=420)
    for column, heading in enumerate(headings, 1):
        shared: dict[str, Any] = {"showgrid": True, "gridcolor": GRID_COLOUR, "zeroline": False}
        figure.update_xaxes(title_text="relative depth", range=[0, 1], row=1, col=column, **shared)
        figure.update_yaxes(title_text=heading, row=1, col=column, **shared)
    return figure


def _line(
    figure: go.Figure,
    column: int,
    number: int,
    name: str,
    depth: np.ndarray,
    values: np.ndarray,
    interval: Interval | None,
) -> None:
    colour = PALETTE[number % len(PALETTE)]
    if interval is not None:
        figure.add_scatter(
            x=np.concatenate([depth, depth[::-1]]),
            y=np.concatenate([interval.high, interval.low[::-1]]),
            fill="toself",
            fillcolor=colour,
            opacity=0.18,
            line={"width": 0},
            hoverinfo="skip",
            showlegend=False,
            row=1,
            col=column,
        )
    figure.add_scatter(
        x=depth,
        y=values,
        name=for_plotly(name),
        mode="lines+markers",
        marker={"size": 4},
        line={"color": colour, "width": 2, "dash": DASHES[number % len(DASHES)]},
        legendgroup=name,
        showlegend=column == 1,
        row=1,
        col=column,
    )


def titled(figure: go.Figure, title: str, subtitle: str) -> go.Figure:
    """Words, fonts and colours that all curves have; plotly's own template stays out of it."""
    figure.update_layout(
        font={"family": FONT, "size": 12, "color": INK},
        plot_bgcolor="#ffffff",
        paper_bgcolor="#ffffff",
        title={
            "text": f"<b>{for_plotly(title)}</b>",
            "font": {"size": 15},
            "subtitle": {"text": for_plotly(subtitle), "font": {"size": 11, "color": FAINT}},
            "x": 0.01,
            "xanchor": "left",
        },
        margin={"t": 90, "b": 90, "l": 60, "r": 20},
        legend={"orientation": "h", "y": -0.26},
    )
    return figure
