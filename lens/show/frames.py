"""A result as a long table: one row for each (layer, position), units in the columns' names."""

import numpy as np
import pandas as pd

from lens.lenses.predictions import NO_TOKEN, LayerPredictions

# Column of the table -> field of the result. All hold one number for each (layer, position).
PER_CELL = {
    "entropy_bits": "entropy_bits",
    "kl_bits": "kl_bits",
    "target_logprob_bits": "target_logprob_bits",
    "target_rank": "target_rank",
    "final_top_logprob_bits": "final_top_logprob_bits",
    "final_top_rank": "final_top_rank",
    "self_copy_mass": "self_copy_mass",
}


def predictions_to_frame(predictions: LayerPredictions) -> pd.DataFrame:
    """One row for each (layer, position), layers outermost, as pandas columns.

    `layer`, `position`; `input_id`, `target_id`, `final_top_id` with their texts beside them
    (`input_token`, ...); `top_1_id`, `top_1_token`, `top_1_logprob_bits`, then `top_2_...`;
    entropy, KL(final ‖ layer), log-probabilities in bits; ranks (0 = first); `self_copy_mass`
    (0 to 1); `padding_mass` where there are vocabulary rows of no token;
    `set_NAME_logprob_bits` for each target set. No token is id -1 and text "". Texts are as the
    tokenizer gives them; what UTF-8 cannot hold is written \\\\udce2.

    Example: `predictions.to_frame().query("layer == 12")`.
    """
    n_layers, n_positions, k = predictions.top_ids.shape

    def along(values: np.ndarray) -> np.ndarray:
        return np.tile(values, n_layers)

    columns: dict[str, object] = {
        "layer": np.repeat(predictions.layers, n_positions),
        "position": along(predictions.positions),
    }
    for name, ids in (
        ("input", predictions.input_ids[predictions.positions]),
        ("target", predictions.target_ids),
        ("final_top", predictions.final_top_ids),
    ):
        columns[f"{name}_id"] = along(ids)
        columns[f"{name}_token"] = _texts(predictions, along(ids))
    for rank in range(k):
        ids = predictions.top_ids[:, :, rank].reshape(-1)
        columns[f"top_{rank + 1}_id"] = ids
        columns[f"top_{rank + 1}_token"] = _texts(predictions, ids)
        columns[f"top_{rank + 1}_logprob_bits"] = predictions.top_logprob_bits[:, :, rank].reshape(
            -1
        )
    for column, field in PER_CELL.items():
        columns[column] = getattr(predictions, field).reshape(-1)
    if predictions.padding_mass is not None:
        columns["padding_mass"] = predictions.padding_mass.reshape(-1)
    if predictions.set_logprob_bits is not None:
        for name, values in zip(
            set_columns(predictions.set_names), predictions.set_logprob_bits, strict=True
        ):
            columns[name] = values.reshape(-1)
    return pd.DataFrame(columns)


def set_columns(names: tuple[str, ...]) -> list[str]:
    """The column of each target set; numbered where two names would be written alike."""
    written = [writable(name) for name in names]
    return [
        f"set_{name}_logprob_bits" if written.count(name) == 1 else f"set_{name}_{i}_logprob_bits"
        for i, name in enumerate(written)
    ]


def writable(text: str) -> str:
    """The text with what UTF-8 cannot hold (lone surrogates, from broken bytes) spelled out."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _texts(predictions: LayerPredictions, ids: np.ndarray) -> list[str]:
    known = {token: writable(text) for token, text in predictions.vocabulary.items()}
    known[NO_TOKEN] = ""
    return [known.get(token, f"[id {token}]") for token in ids.tolist()]
