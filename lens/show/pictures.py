"""A figure as PNG, SVG or PDF, through kaleido and the Chromium of this machine."""

import os
from types import ModuleType

import plotly.graph_objects as go

from lens.errors import ExportError, MissingPackageError

KALEIDO = 'pip install "tied-lens[images]"'
BROWSER = "apt install chromium (or run kaleido_get_chrome, or set BROWSER_PATH)"
# kaleido would load MathJax from the web, and Chromium call home: the proxy is a closed door.
OFFLINE = {"mathjax": False, "proxy_server": "http://127.0.0.1:9"}
KINDS = ("png", "svg", "pdf")
MOST_PNG_PX = 16_000
"""Chromium draws no picture wider or higher than 16,384 pixels."""


def picture(figure: go.Figure, kind: str) -> bytes:
    """The bytes of a "png" (twice the figure's size in pixels), "svg" or "pdf".

    Nothing is fetched from the network. Raises MissingPackageError, with the install line, without
    kaleido or without a browser; ExportError where the browser fails.
    """
    kaleido = _kaleido(kind)
    from kaleido import errors

    try:
        drawn = kaleido.calc_fig_sync(
            figure, opts={"format": kind, "scale": _scale(figure, kind)}, kopts=dict(OFFLINE)
        )
    except errors.ChromeNotFoundError as error:
        raise _no_browser(kind) from error
    except (errors.KaleidoError, errors.JavascriptError, RuntimeError, OSError) as error:
        raise ExportError(
            f"The browser did not draw the .{kind}: {type(error).__name__}: {error}. "
            "Or write .html, which needs no browser."
        ) from error
    if not isinstance(drawn, bytes) or not drawn:
        raise ExportError(f"kaleido gave {type(drawn).__name__} where bytes of a .{kind} were due.")
    return drawn


def require_drawable(kind: str) -> None:
    """Raise MissingPackageError where `picture` would lack kaleido or a browser; starts neither.

    To be asked before the work that is to be drawn.
    """
    _kaleido(kind)
    from choreographer.browsers.chromium import Chromium

    if not (os.environ.get("BROWSER_PATH") or Chromium.find_browser(skip_local=False)):
        raise _no_browser(kind)


def _kaleido(kind: str) -> ModuleType:
    try:
        import kaleido
    except ImportError as error:
        raise MissingPackageError(
            f"A .{kind} needs kaleido, which is not installed: {KALEIDO}. "
            "Or write .html, which needs nothing."
        ) from error
    return kaleido


def _no_browser(kind: str) -> MissingPackageError:
    return MissingPackageError(
        f"A .{kind} is drawn by Chromium or Chrome, and none was found: {BROWSER}. "
        "Or write .html, which needs no browser here."
    )


def _scale(figure: go.Figure, kind: str) -> float:
    if kind != "png":
        return 1.0
    size = figure.to_plotly_json()["layout"]
    return min(2.0, MOST_PNG_PX / max(size["width"], size["height"]))
