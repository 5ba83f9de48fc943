"""What a result's file says besides its table of numbers, as JSON that reads back equal."""

import dataclasses
import json
from typing import Any

import numpy as np

from lens.errors import ResultFileError
from lens.lenses.predictions import LayerPredictions, Provenance

FORMAT = "lens.LayerPredictions"
VERSION = 1

_ARRAYS = tuple(
    field.name
    for field in dataclasses.fields(LayerPredictions)
    if field.name not in ("vocabulary", "provenance", "set_names", "set_ids")
)
# Not per (layer, position): they stand in the header, so that no table repeats or loses them.
_IN_HEADER = ("input_ids", "positions", "layers", "target_ids", "final_top_ids")
# Absent in some results, and then None.
_OPTIONAL = ("set_logprob_bits", "padding_mass")
_SURROGATE = "utf8_surrogatepass"


def header(predictions: LayerPredictions) -> dict[str, Any]:
    """Everything that a table of (layer, position) does not hold: shapes, dtypes, ids, texts."""
    held = {name: getattr(predictions, name) for name in _ARRAYS}
    return {
        "format": FORMAT,
        "version": VERSION,
        "units": "logprob, entropy and KL in bits; ranks from 0; probabilities from 0 to 1",
        "provenance": _out(dataclasses.asdict(predictions.provenance)),
        "dtypes": {name: None if a is None else a.dtype.str for name, a in held.items()},
        "shape": list(predictions.top_ids.shape),
        **{name: held[name].tolist() for name in _IN_HEADER},
        "set_names": _out(list(predictions.set_names)),
        "set_ids": [list(ids) for ids in predictions.set_ids],
        "vocabulary": [[token, _out(text)] for token, text in predictions.vocabulary.items()],
    }


def numbers(predictions: LayerPredictions) -> dict[str, np.ndarray]:
    """The arrays that `header` does not hold, by field name."""
    held = {name: getattr(predictions, name) for name in _ARRAYS}
    return {name: a for name, a in held.items() if a is not None and name not in _IN_HEADER}


def rebuilt(head: dict[str, Any], arrays: dict[str, Any]) -> LayerPredictions:
    """A result from a header and its arrays, each cast to the dtype that it had.

    Raises KeyError, TypeError or ValueError where something is missing or has another shape.
    """
    n_layers, n_positions, k = head["shape"]
    cell = (n_layers, n_positions)
    shapes = {
        "input_ids": (len(head["input_ids"]),),
        "positions": (n_positions,),
        "layers": (n_layers,),
        "top_ids": (*cell, k),
        "top_logprob_bits": (*cell, k),
        "target_ids": (n_positions,),
        "final_top_ids": (n_positions,),
        "set_logprob_bits": (len(head["set_names"]), *cell),
    }
    given = {**arrays, **{name: head[name] for name in _IN_HEADER}}
    fields: dict[str, Any] = {}
    for name in _ARRAYS:
        kind = head["dtypes"].get(name) if name in _OPTIONAL else head["dtypes"][name]
        if kind is None and name in _OPTIONAL:
            fields[name] = None
            continue
        array = np.asarray(given[name], dtype=np.dtype(kind))
        fields[name] = array.reshape(shapes.get(name, cell))
    source = decoded(head["provenance"])
    source["notes"] = tuple(source["notes"])
    return LayerPredictions(
        **fields,
        vocabulary={int(token): decoded(text) for token, text in head["vocabulary"]},
        provenance=Provenance(**source),
        set_names=tuple(decoded(head["set_names"])),
        set_ids=tuple(tuple(int(token) for token in ids) for ids in head["set_ids"]),
    )


def checked(head: Any, path: object) -> dict[str, Any]:
    """The header, if this version of `lens` can read it; ResultFileError with the reason if not."""
    if not isinstance(head, dict) or "format" not in head:
        raise ResultFileError(
            f"{path} is not a result of lens: it has no format field. "
            "Expected a file that LayerPredictions.save wrote."
        )
    if head["format"] != FORMAT:
        raise ResultFileError(
            f"{path} holds {head['format']!r}; read_predictions reads {FORMAT!r}."
        )
    version = head.get("version")
    if not isinstance(version, int) or version > VERSION:
        raise ResultFileError(
            f"{path} is of format version {version!r}; this lens reads up to {VERSION}. "
            "Upgrade: pip install --upgrade tied-lens"
        )
    return head


def one_line(head: dict[str, Any]) -> str:
    """The header as JSON in one line of ASCII."""
    return json.dumps(head, allow_nan=False)


def _out(value: Any) -> Any:
    """A copy that JSON gives back unchanged; text with surrogates goes as its bytes.

    JSON itself would join two lone surrogates to one character.
    """
    if isinstance(value, str):
        if value.isascii() or not any("\ud800" <= character <= "\udfff" for character in value):
            return value
        return {_SURROGATE: value.encode("utf-8", "surrogatepass").hex()}
    if isinstance(value, dict):
        return {key: _out(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_out(inner) for inner in value]
    return value


def decoded(value: Any) -> Any:
    """What `header` encoded, with its surrogates."""
    if isinstance(value, dict):
        if set(value) == {_SURROGATE}:
            return bytes.fromhex(value[_SURROGATE]).decode("utf-8", "surrogatepass")
        return {key: decoded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [decoded(inner) for inner in value]
    return value
