"""The order of a residual state's axes, and which of its rows are the prompt's."""

from dataclasses import dataclass

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from lens.errors import CaptureError, UnsupportedArchitectureError


class MoreRowsError(CaptureError):
    """The blocks carry more rows than the prompt has positions, and did not when it was loaded."""


# Axes by the sizes that stand in a state's shape: b for batch, p for pos, - for any other.
_PLAIN: dict[tuple[str, ...], str] = {
    ("b", "p", "-"): "batch pos d",
    ("p", "b", "-"): "pos batch d",
    ("b", "-", "p"): "batch d pos",
    ("b", "p", "-", "-"): "batch pos stream d",
    ("-", "b", "p", "-"): "stream batch pos d",
}


@dataclass(frozen=True)
class Layout:
    """Order of a state's axes in the model, e.g. "batch pos d" or "batch pos stream d".

    `before` counts rows that the model puts before the prompt's (CPM-Ant's 32 learned ones);
    `padded` is True where it adds rows behind them, as many as a block of positions needs.
    """

    axes: str
    n_streams: int = 1
    before: int = 0
    padded: bool = False

    def canonical(self, state: Tensor, *, length: int | None) -> Float[Tensor, "batch pos d_model"]:
        """The prompt's states [batch, length, d_model]; several streams lie side by side.

        `length` None stands for all rows, where the model adds none. Raises MoreRowsError where
        the model carries more rows than the prompt has positions, CaptureError where fewer.
        """
        whole = rearrange(state, f"{self.axes} -> batch pos {self._width}", **self._streams())
        rows = whole.shape[1] - self.before
        if length is None:
            length = rows
        if rows < length or (rows > length and not self.padded):
            kind = MoreRowsError if rows > length else CaptureError
            raise kind(
                f"The blocks carry {whole.shape[1]} positions for a prompt of {length}; expected "
                f"{self.before + length}, as when the model was loaded. At this length it pads or "
                "merges positions (chunked attention): pass a shorter prompt, or one whose length "
                "is a multiple of the model's chunk."
            )
        return whole[:, self.before : self.before + length]

    def native(self, state: Float[Tensor, "batch pos d_model"], canvas: Tensor | None) -> Tensor:
        """The state in the model's own order; rows that are not the prompt's come from `canvas`.

        `canvas` is a state of the model's own shape; a layout without extra rows needs none.
        """
        if self.before or self.padded:
            assert canvas is not None
            whole = rearrange(canvas, f"{self.axes} -> batch pos {self._width}", **self._streams())
            whole = whole.clone()
            whole[:, self.before : self.before + state.shape[1]] = state.to(whole)
            state = whole
        turned = rearrange(state, f"batch pos {self._width} -> {self.axes}", **self._streams())
        return turned.contiguous()

    @property
    def adds_rows(self) -> bool:
        """True where the model carries rows that are not the prompt's."""
        return self.before > 0 or self.padded

    def __str__(self) -> str:
        parts = [self.axes]
        if self.n_streams > 1:
            parts.append(f"{self.n_streams} streams, read side by side")
        if self.before:
            parts.append(f"{self.before} rows before the prompt left out")
        if self.padded:
            parts.append("padding behind the prompt left out")
        return ", ".join(parts)

    def _streams(self) -> dict[str, int]:
        return {"stream": self.n_streams} if "stream" in self.axes else {}

    @property
    def _width(self) -> str:
        return "(stream d)" if "stream" in self.axes else "d"


def plain_layout(state: Tensor, *, batch: int, pos: int) -> Layout | None:
    """The layout of a state whose axes hold `batch` and `pos` as such, else None."""
    shape = tuple(state.shape)
    for pattern, axes in _PLAIN.items():
        if len(shape) == len(pattern) and all(
            mark == "-" or size == {"b": batch, "p": pos}[mark]
            for mark, size in zip(pattern, shape, strict=True)
        ):
            stream = axes.split().index("stream") if "stream" in axes else None
            return Layout(axes, 1 if stream is None else shape[stream])
    return None


def layouts_of_rows(before: Tensor, after: Tensor, *, batch: int, pos: int) -> tuple[Layout, ...]:
    """Layouts that [batch, rows, d] with rows > pos may have, the likeliest first; proof decides.

    `before` and `after` are the states before block 0 of two prompts that differ in their last
    token alone. Empty where its row cannot be told.
    """
    rows = before.shape[1]
    if before.ndim != 3 or before.shape[0] != batch or rows <= pos or after.shape != before.shape:
        return ()
    moved = torch.nonzero((before != after).any(-1).any(0)).flatten().tolist()
    if len(moved) != 1 or moved[0] < pos - 1:
        return ()
    extra = moved[0] - (pos - 1)
    layouts = [Layout("batch pos d", before=extra, padded=rows > extra + pos)]
    if extra == 0 and rows % pos == 0:
        # ProphetNet: one stream for the prompt and one for each token that it looks ahead.
        layouts.append(Layout("batch (stream pos) d", rows // pos))
    return tuple(layouts)


def unknown_layout(container: str, shape: tuple[int, ...], *, batch: int, pos: int) -> Exception:
    """The error that names the missing layout."""
    return UnsupportedArchitectureError(
        f"The blocks of {container} carry a state of shape {shape} for ids of shape "
        f"{(batch, pos)}. Missing step: the layout. Expected one row for each token, with at most "
        "one axis of streams, rows in front or padding behind: no row of these states can be said "
        "to belong to one token."
    )
