"""What a heatmap shows, in one sentence, and what it was made from, in one line."""

import numpy as np
from jaxtyping import Int

from lens.lenses.predictions import LayerPredictions
from lens.show.labels import id_label, labels

_MATRIX = {"output": "output lens (W_U)", "input": "input lens (W_E)"}


def settling_rows(predictions: LayerPredictions) -> Int[np.ndarray, " pos"]:
    """For each position the first row from which on every row's top-1 is the final top-1.

    The length of `layers` where the last row does not agree. Rows are places in `layers`, not
    layer numbers.
    """
    agree = predictions.agreement
    return np.asarray(len(agree) - np.cumprod(agree[::-1], axis=0).sum(axis=0), dtype=np.int64)


def finding(predictions: LayerPredictions) -> str:
    """One sentence for the title: from which layer on the model's own answer is read.

    For a causal prompt the answer is the final top-1 at the last position; for a masked one only
    the share of positions is told. Plain text, labels made visible, nothing escaped.
    """
    rows = settling_rows(predictions)
    if rows.size == 0 or len(predictions.layers) == 0:
        return "Nothing was read: no layer or no position"
    if predictions.provenance.target == "same":
        sentence = _of_all(predictions, rows)
        return sentence[0].upper() + sentence[1:]
    first = _of_last(predictions, int(rows[-1]))
    return first if len(rows) == 1 else f"{first}; {_of_all(predictions, rows)}"


def source_line(predictions: LayerPredictions) -> str:
    """Model, lens, tie verdict and readout, as plain text."""
    source = predictions.provenance
    revision = f" @ {source.revision}" if source.revision else ""
    lens = _MATRIX.get(source.lens, f"{source.lens} lens")
    return f"{source.model_id}{revision} · {lens} · {source.tie} · {source.readout} readout"


def _of_last(predictions: LayerPredictions, row: int) -> str:
    shown = labels(predictions.vocabulary, max_chars=24)
    answer = id_label(predictions.final_top_ids[-1], shown)
    n_layers = predictions.provenance.n_layers
    if row == len(predictions.layers):
        last = predictions.layer_names[-1]
        return f"The model's answer {answer} is not top-1 at layer {last}, the last one read"
    layer = predictions.layer_names[row]
    return f"The model's answer {answer} is top-1 from layer {layer} of {n_layers} on"


def _of_all(predictions: LayerPredictions, rows: Int[np.ndarray, " pos"]) -> str:
    count, read = len(rows), len(predictions.layers)
    settled = int((rows < read).sum())
    if settled * 2 < count:
        return f"{settled} of {count} positions end on the model's final top-1"
    half = np.sort(rows)[(count + 1) // 2 - 1]
    return (
        f"half of the {count} positions hold the model's final top-1 "
        f"from layer {predictions.layer_names[half]} on"
    )
