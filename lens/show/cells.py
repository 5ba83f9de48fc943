"""What each cell of the map says: its short text, its hover, its colour, its outline."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from lens.errors import SelectionError
from lens.lenses.predictions import NO_TOKEN, LayerPredictions
from lens.show.labels import for_plotly, id_label, labels

Numbers = Callable[[LayerPredictions], Float[np.ndarray, "layer pos"]]

# One hue from light to dark: ordered by lightness alone, so it reads the same for colour-blind
# eyes and in grey. Dark is always "sure" or "close to the final answer".
LIGHT_TO_DARK = [
    "#f7fbff",
    "#deebf7",
    "#c6dbef",
    "#9ecae1",
    "#6baed6",
    "#4292c6",
    "#2171b5",
    "#08519c",
    "#08306b",
]

INK, WHITE = "#1a1a1a", "#ffffff"
INK_LUMINANCE = 0.0103


@dataclass(frozen=True, kw_only=True)
class Colour:
    """How one quantity becomes a colour: its numbers, its scale's title and its range.

    `ticks` says that the numbers are `spaced`, so that the scale needs the ticks of `decades`.
    """

    title: str
    numbers: Numbers
    low_is_dark: bool
    top: Callable[[LayerPredictions, Float[np.ndarray, "layer pos"]], float]
    ticks: bool = False

    @property
    def scale(self) -> list[str]:
        """Colours from the lowest number to the highest."""
        return LIGHT_TO_DARK[::-1] if self.low_is_dark else list(LIGHT_TO_DARK)


def spaced(values: np.ndarray) -> np.ndarray:
    """log10(1 + value): decades of equal width that still hold 0.

    A tied model's embedding row can be 700 bits from the final distribution and the last row is
    0: on a linear scale everything between them is one colour.
    """
    return np.asarray(np.log10(1.0 + values.astype(np.float64)))


def decades(top: float) -> tuple[list[float], list[str]]:
    """Where ticks stand on a scale of `spaced` numbers that ends at `top`, and what they say."""
    marks = [mark for mark in (0, 1, 10, 100, 1000, 10_000, 100_000) if np.log10(1 + mark) <= top]
    return [float(np.log10(1 + mark)) for mark in marks], [f"{mark:,}" for mark in marks]


def _largest(_: LayerPredictions, numbers: Float[np.ndarray, "layer pos"]) -> float:
    finite = numbers[np.isfinite(numbers)]
    return max(float(finite.max()), 1e-9) if finite.size else 1.0


COLOURS: dict[str, Colour] = {
    "probability": Colour(
        title="probability<br>of the top-1<br> ",
        numbers=lambda p: np.exp2(p.top_logprob_bits[:, :, 0]),
        low_is_dark=False,
        top=lambda p, numbers: 1.0,
    ),
    "entropy": Colour(
        title="entropy<br>(bits)<br> ",
        numbers=lambda p: p.entropy_bits,
        low_is_dark=True,
        top=lambda p, numbers: float(np.log2(max(p.provenance.d_vocab, 2))),
    ),
    "kl": Colour(
        title="KL(final ‖ layer)<br>(bits)<br> ",
        numbers=lambda p: spaced(p.kl_bits),
        low_is_dark=True,
        top=_largest,
        ticks=True,
    ),
    "rank": Colour(
        title="rank of the<br>final top-1<br>(0 = first)<br> ",
        numbers=lambda p: spaced(p.final_top_rank),
        low_is_dark=True,
        top=lambda p, numbers: float(np.log10(max(p.provenance.d_vocab, 2))),
        ticks=True,
    ),
}


def dark_cells(shade: Float[np.ndarray, "layer pos"]) -> Bool[np.ndarray, "layer pos"]:
    """Where white ink reads better than dark ink, `shade` running from 0 (light) to 1 (dark).

    By the contrast ratio of WCAG 2; plotly's own choice leaves grey on mid-blue.
    """
    steps = np.linspace(0, 1, len(LIGHT_TO_DARK))
    channels = np.array([[int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in LIGHT_TO_DARK]) / 255
    mixed = np.stack([np.interp(shade, steps, channel) for channel in channels.T], axis=-1)
    linear = np.where(mixed <= 0.04045, mixed / 12.92, ((mixed + 0.055) / 1.055) ** 2.4)
    luminance = linear @ np.array([0.2126, 0.7152, 0.0722])
    return np.asarray(1.05 / (luminance + 0.05) > (luminance + 0.05) / (INK_LUMINANCE + 0.05))


def colour_named(name: str) -> Colour:
    """The colour of that name. Raises SelectionError, listing those that there are."""
    if name not in COLOURS:
        raise SelectionError(f"No colour {name!r}; heatmap knows: {', '.join(COLOURS)}.")
    return COLOURS[name]


def cell_texts(predictions: LayerPredictions, *, max_chars: int) -> list[list[str]]:
    """[layer][pos]: the top-1 label, cut to the cell's width, escaped for plotly."""
    short = {
        token: for_plotly(text)
        for token, text in labels(predictions.vocabulary, max_chars=max_chars).items()
    }
    return [[id_label(token, short) for token in row] for row in predictions.top_ids[:, :, 0]]


def hover_template(predictions: LayerPredictions) -> str:
    """The wording of a hover; what differs from cell to cell comes from `hover_parts`."""
    k = predictions.top_ids.shape[-1]
    last = predictions.provenance.n_layers
    lines = [
        f"<b>%{{customdata[0]}}</b> · layer %{{customdata[1]}} of {last}",
        *(f"{i + 1}. %{{customdata[{i + 2}]}}" for i in range(k)),
        f"entropy %{{customdata[{k + 2}]}} bits",
        f"KL(final ‖ layer) %{{customdata[{k + 3}]}} bits",
        f"final top-1 %{{customdata[{k + 4}]}}",
        f"{_target_word(predictions)} %{{customdata[{k + 5}]}}",
        f"self-copy mass %{{customdata[{k + 6}]}}",
    ]
    return "<br>".join(lines) + "<extra></extra>"


def hover_parts(predictions: LayerPredictions) -> list[list[list[str]]]:
    """[layer][pos][part]: the strings that `hover_template` names, escaped for plotly.

    Only what differs from cell to cell is stored, not the whole hover.
    """
    long = {
        token: for_plotly(text)
        for token, text in labels(predictions.vocabulary, max_chars=40).items()
    }
    places = [
        f"{id_label(predictions.input_ids[position], long)} at position {position}"
        for position in predictions.positions.tolist()
    ]
    best = _scores(
        predictions.final_top_ids,
        predictions.final_top_logprob_bits,
        predictions.final_top_rank,
        long,
        absent="none",
    )
    target = _scores(
        predictions.target_ids,
        predictions.target_logprob_bits,
        predictions.target_rank,
        long,
        absent="none" if predictions.provenance.target == "same" else "none: the prompt ends here",
    )
    top = _candidates(predictions, long)
    entropy, kl = predictions.entropy_bits.tolist(), predictions.kl_bits.tolist()
    mass = predictions.self_copy_mass.tolist()
    return [
        [
            [
                place,
                layer,
                *top[row][column],
                _number(entropy[row][column]),
                _number(kl[row][column]),
                best[row][column],
                target[row][column],
                _percent(mass[row][column]),
            ]
            for column, place in enumerate(places)
        ]
        for row, layer in enumerate(predictions.layer_names)
    ]


def runs(marked: Bool[np.ndarray, "layer pos"]) -> Int[np.ndarray, "run 3"]:
    """Column, first and last row of each unbroken run of marked cells in a column, as rows.

    >>> runs(np.array([[True, False], [True, True]])).tolist()
    [[0, 0, 1], [1, 1, 1]]
    """
    edge = np.zeros((1, marked.shape[1]), dtype=np.int8)
    steps = np.diff(np.concatenate([edge, marked.astype(np.int8), edge]), axis=0).T
    starts, ends = np.argwhere(steps == 1), np.argwhere(steps == -1)
    return np.stack([starts[:, 0], starts[:, 1], ends[:, 1] - 1], axis=1)


def outlines(
    marked: Bool[np.ndarray, "layer pos"],
) -> tuple[list[float | None], list[float | None]]:
    """Closed frames around the marked cells, as x and y of a single broken line.

    Marked cells that stand on each other share one frame. A line is drawn for every frame at
    every move of the map, and one for each cell of a long prompt makes the map stick.
    """
    x: list[float | None] = []
    y: list[float | None] = []
    for column, first, last in runs(marked).tolist():
        left, right = column - 0.46, column + 0.46
        low, high = first - 0.44, last + 0.44
        x += [left, right, right, left, left, None]
        y += [low, low, high, high, low, None]
    return x, y


def _candidates(predictions: LayerPredictions, shown: dict[int, str]) -> list[list[list[str]]]:
    """[layer][pos][k]: each of the top-k with its probability."""
    shares = np.exp2(predictions.top_logprob_bits.astype(np.float64)).tolist()
    ids = predictions.top_ids.tolist()
    return [
        [
            [f"{id_label(t, shown)} {_percent(s)}" for t, s in zip(*cell, strict=True)]
            for cell in zip(*row, strict=True)
        ]
        for row in zip(ids, shares, strict=True)
    ]


def _scores(
    ids: Int[np.ndarray, " pos"],
    logprob_bits: Float[np.ndarray, "layer pos"],
    ranks: Int[np.ndarray, "layer pos"],
    shown: dict[int, str],
    *,
    absent: str,
) -> list[list[str]]:
    """[layer][pos]: the column's token, its probability in the layer, its rank."""
    names = [None if token == NO_TOKEN else id_label(token, shown) for token in ids.tolist()]
    shares = np.exp2(logprob_bits.astype(np.float64)).tolist()
    return [
        [
            absent if name is None else f"{name} {_percent(share)}, rank {rank:,}"
            for name, share, rank in zip(names, *row, strict=True)
        ]
        for row in zip(shares, ranks.tolist(), strict=True)
    ]


def _target_word(predictions: LayerPredictions) -> str:
    return "token here" if predictions.provenance.target == "same" else "next token"


def _percent(share: float) -> str:
    return "–" if math.isnan(share) else f"{100 * share:.3g} %"


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.3g}"
