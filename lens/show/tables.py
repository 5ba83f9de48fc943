"""JSON, CSV and Parquet: how a result is written, and how it is read back equal."""

import csv
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lens.errors import ResultFileError
from lens.lenses.predictions import LayerPredictions
from lens.show.frames import PER_CELL, predictions_to_frame, set_columns
from lens.show.records import checked, decoded, header, numbers, one_line, rebuilt

CSV_MARK = "# lens "
PARQUET_KEY = b"lens"


def write_json(predictions: LayerPredictions, path: Path) -> None:
    """Write header and arrays as one JSON object; NaN is null, infinities are strings."""
    held = {name: _plain(array) for name, array in numbers(predictions).items()}
    text = json.dumps({**header(predictions), "arrays": held}, allow_nan=False, indent=None)
    path.write_text(text + "\n", encoding="utf-8")


def write_csv(predictions: LayerPredictions, path: Path) -> None:
    """Write the long table beneath one comment line that holds the header."""
    frame = predictions_to_frame(predictions)
    text = io.StringIO(newline="")
    text.write(CSV_MARK + one_line(header(predictions)) + "\r\n")
    writer = csv.writer(text)  # its CRLF makes it quote a lone carriage return too
    writer.writerow(frame.columns)
    writer.writerows(zip(*(_cells(frame[name].to_numpy()) for name in frame.columns), strict=True))
    path.write_bytes(text.getvalue().encode("utf-8"))


def write_parquet(predictions: LayerPredictions, path: Path) -> None:
    """Write the long table with the header in the file's metadata."""
    # from_pandas=False: NaN stays NaN, it does not become a null.
    frame = predictions_to_frame(predictions)
    columns = {name: pa.array(frame[name].to_numpy(), from_pandas=False) for name in frame.columns}
    table = pa.table(columns).replace_schema_metadata(
        {PARQUET_KEY: one_line(header(predictions)).encode("ascii")}
    )
    pq.write_table(table, path, compression="zstd", write_page_checksum=True)


_DAMAGE = (
    *(OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError),
    pa.ArrowException,
)


def read_predictions(path: str | Path) -> LayerPredictions:
    """Read back, equal to the last bit, what `LayerPredictions.save` wrote.

    JSON, CSV or Parquet, told apart by content. Raises ResultFileError where the file is absent,
    damaged, of another origin or of a newer format; the message names what was found.

    Example: `lens.read_predictions("run.parquet") == predictions`.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            start = file.read(64)
    except OSError as error:
        raise ResultFileError(f"Cannot read {path}: {error.strerror or error}.") from error
    for mark, reader in _READERS.items():
        if start.startswith(mark):
            try:
                return reader(path)
            except ResultFileError:
                raise
            except _DAMAGE as bad:
                raise ResultFileError(
                    f"{path} is damaged: {type(bad).__name__}: {bad}. Write it again."
                ) from bad
    raise ResultFileError(
        f"{path} begins with {start[:16]!r}; expected JSON ({{), CSV ({CSV_MARK.strip()!r}) or "
        "Parquet (PAR1), as LayerPredictions.save writes them."
    )


def _read_json(path: Path) -> LayerPredictions:
    whole = json.loads(path.read_text(encoding="utf-8"))
    head = checked(whole, path)
    arrays = {name: _restored(values) for name, values in head["arrays"].items()}
    return rebuilt(head, arrays)


def _read_csv(path: Path) -> LayerPredictions:
    with path.open(encoding="utf-8", newline="") as file:
        head = checked(json.loads(file.readline()[len(CSV_MARK) :]), path)
        rows = list(csv.reader(file))
    names, body = rows[0], rows[1:]
    short = [len(row) for row in body if len(row) != len(names)]
    if short:
        raise ValueError(f"a row has {short[0]} cells and the heading {len(names)}")
    columns = list(zip(*body, strict=True)) if body else [()] * len(names)
    held = {name: _parsed(name, column) for name, column in zip(names, columns, strict=True)}
    return _from_columns(head, held)


def _read_parquet(path: Path) -> LayerPredictions:
    table = pq.read_table(path, page_checksum_verification=True)
    metadata = table.schema.metadata or {}
    if PARQUET_KEY not in metadata:
        raise ResultFileError(
            f"{path} is a Parquet file of another origin: columns {table.column_names[:8]}, "
            f"no {PARQUET_KEY.decode()!r} in its metadata."
        )
    head = checked(json.loads(metadata[PARQUET_KEY]), path)
    return _from_columns(head, {name: table[name].to_numpy() for name in table.column_names})


_READERS: Mapping[bytes, Callable[[Path], LayerPredictions]] = {
    b"{": _read_json,
    CSV_MARK.encode(): _read_csv,
    b"PAR1": _read_parquet,
}


def _from_columns(head: dict[str, Any], columns: Mapping[str, Any]) -> LayerPredictions:
    n_layers, n_positions, k = head["shape"]
    found = len(columns["layer"])
    if found != n_layers * n_positions:
        raise ValueError(f"{found} rows where {n_layers} x {n_positions} were written")
    arrays: dict[str, Any] = {field: columns[name] for name, field in PER_CELL.items()}
    if head["dtypes"].get("padding_mass") is not None:
        arrays["padding_mass"] = columns["padding_mass"]
    for field, kind in (("top_ids", "id"), ("top_logprob_bits", "logprob_bits")):
        parts = [np.asarray(columns[f"top_{rank + 1}_{kind}"]) for rank in range(k)]
        arrays[field] = np.stack(parts, axis=-1) if parts else np.empty(0)
    if head["dtypes"]["set_logprob_bits"] is not None:
        names = set_columns(tuple(decoded(head["set_names"])))
        parts = [np.asarray(columns[name]) for name in names]
        arrays["set_logprob_bits"] = np.stack(parts) if parts else np.empty(0)
    return rebuilt(head, arrays)


def _plain(array: np.ndarray) -> Any:
    if array.dtype.kind != "f":
        return array.tolist()
    nested = array.astype(np.float64).tolist()
    return nested if np.isfinite(array).all() else _each(nested, _spelled)


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    return [_each(inner, change) for inner in value] if isinstance(value, list) else change(value)


def _spelled(value: float) -> float | str | None:
    if math.isnan(value):
        return None
    return value if math.isfinite(value) else ("inf" if value > 0 else "-inf")


def _restored(value: Any) -> Any:
    return _each(value, lambda v: math.nan if v is None else float(v) if isinstance(v, str) else v)


def _cells(values: np.ndarray) -> list[Any]:
    """What each cell says: a float in digits that give its bits back, NaN empty."""
    if values.dtype.kind == "f":
        return ["" if math.isnan(value) else repr(value) for value in values.tolist()]
    return values.tolist()


def _parsed(name: str, cells: Sequence[str]) -> list[Any]:
    if name.endswith("_token"):
        return list(cells)
    if name == "layer":
        return [float(cell) if "." in cell else int(cell) for cell in cells]
    if name == "position" or name.endswith(("_id", "_rank")):
        return [int(cell) for cell in cells]
    return [float(cell) if cell else math.nan for cell in cells]
