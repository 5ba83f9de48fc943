"""A profile as one Parquet file: a row for each document, and for each (fold, layer) histogram."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from lens.errors import ExportError, ResultFileError
from lens.files import is_file, written_whole
from lens.lenses.predictions import Provenance
from lens.measuring.columns import BINS, COUNTS, FINAL_SUMS, SAMPLED, SUMS, TAUS
from lens.measuring.depth import KINDS, N_ENTROPY_BINS
from lens.measuring.histograms import N_BINS
from lens.measuring.profile import N_FOLDS, LensProfile, ProfileProvenance

FORMAT = "lens-profile-1"


def write_profile(profile: LensProfile, path: str | Path) -> Path:
    """Write a profile as .parquet; the file appears whole. Raises ExportError."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    target = Path(path)
    if target.suffix.lower() != ".parquet":
        raise ExportError(f"A profile is saved as .parquet; {target.name!r} is not one.")
    rows = [*_documents(profile), *_histograms(profile)]
    meta = {"format": FORMAT, "provenance": asdict(profile.provenance), "rows": len(rows)}
    schema = _schema().with_metadata({b"lens": json.dumps(meta, default=dict).encode("utf-8")})
    table = pa.Table.from_pylist(rows, schema=schema)
    with written_whole(target) as partial:
        pq.write_table(table, partial, compression="zstd", write_page_checksum=True)
    return target


def read_profile(path: str | Path) -> LensProfile:
    """Read what `LensProfile.save` wrote, equal bit for bit. Raises ResultFileError."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    source = Path(path)
    if not is_file(source):
        raise ResultFileError(f"No file at {source}; expected a profile (.parquet).")
    try:
        table = pq.read_table(source, page_checksum_verification=True)
        meta = json.loads((table.schema.metadata or {}).get(b"lens", b"{}"))
        found = meta.get("format")
        if found == FORMAT:
            return _from_rows(meta, table.to_pylist())
    except (pa.ArrowException, OSError) as error:
        raise ResultFileError(f"{source} cannot be read as Parquet: {error}") from error
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ResultFileError(
            f"{source} is damaged: {type(error).__name__}: {error}. Measure it again."
        ) from error
    raise ResultFileError(
        f"{source.name} has format {found!r}; expected {FORMAT!r}, as written by LensProfile.save."
    )


def _from_rows(meta: dict[str, Any], rows: list[dict[str, Any]]) -> LensProfile:
    for row in rows:
        # Before it was counted apart, every position was taken for one of a known token.
        row.setdefault("count_n_known", row["count_n"])
    expected = meta.get("rows", len(rows))
    if len(rows) != expected:
        raise ValueError(f"{len(rows)} rows, where {expected} were written")
    return _profile(
        _provenance(meta["provenance"]),
        [row for row in rows if row["kind"] == "document"],
        [row for row in rows if row["kind"] != "document"],
    )


def _schema() -> Any:
    import pyarrow as pa

    sums = [(f"sum_{name}", pa.list_(pa.float64())) for name in (*SUMS, *SAMPLED)]
    return pa.schema(
        [
            ("kind", pa.dictionary(pa.int8(), pa.string())),
            ("document", pa.int64()),
            ("id", pa.string()),
            ("source", pa.string()),
            *((f"count_{name}", pa.int64()) for name in COUNTS),
            *((f"final_{name}", pa.float64()) for name in FINAL_SUMS),
            *sums,
            ("tau_kl_bits", pa.list_(pa.float64())),
            ("depths", pa.list_(pa.int64())),
            ("fold", pa.int16()),
            ("layer", pa.int16()),
            ("bins", pa.list_(pa.int32())),
            ("values", pa.list_(pa.int64())),
        ]
    )


def _documents(profile: LensProfile) -> Iterator[dict[str, Any]]:
    for row, document in enumerate(profile.documents.tolist()):
        yield {
            "kind": "document",
            "document": document,
            "id": profile.ids[row],
            "source": profile.sources[row],
            **{f"count_{name}": int(v[row]) for name, v in profile.counts.items()},
            **{f"final_{name}": float(v[row]) for name, v in profile.final_sums.items()},
            **{f"sum_{name}": v[row] for name, v in profile.sums.items()},
            "tau_kl_bits": profile.tau_kl_bits[row].ravel(),
            "depths": profile.depths[row].ravel(),
        }


def _histograms(profile: LensProfile) -> Iterator[dict[str, Any]]:
    """The bins that hold something."""
    for kind, counts in {"kl": profile.kl_bins, **profile.confidence}.items():
        for fold, layer in np.argwhere(counts.any(axis=-1)).tolist():
            bins = np.flatnonzero(counts[fold, layer])
            values = counts[fold, layer, bins]
            yield {"kind": kind, "fold": fold, "layer": layer, "bins": bins, "values": values}
    for fold, rows in profile.marginals.items():
        for layer, values in enumerate(rows):
            yield {"kind": "marginals", "fold": fold, "layer": layer, "values": values}


def _profile(
    source: ProfileProvenance, documents: list[dict[str, Any]], others: list[dict[str, Any]]
) -> LensProfile:
    n_layers = source.reading.n_layers + 1
    held = {kind: np.zeros((N_FOLDS, n_layers, N_BINS), dtype=np.int64) for kind in ("kl", *BINS)}
    marginals: dict[int, list[Any]] = {}
    for row in others:
        if row["kind"] == "marginals":
            marginals.setdefault(row["fold"], []).append(row["values"])
        else:
            held[row["kind"]][row["fold"], row["layer"], row["bins"]] = row["values"]

    def column(name: str, dtype: Any, *shape: int) -> np.ndarray:
        values = np.array([row[name] for row in documents], dtype=dtype)
        return values.reshape(len(documents), *shape)

    return LensProfile(
        provenance=source,
        documents=column("document", np.int64),
        ids=tuple(row["id"] for row in documents),
        sources=tuple(row["source"] for row in documents),
        counts={name: column(f"count_{name}", np.int64) for name in COUNTS},
        final_sums={name: column(f"final_{name}", np.float64) for name in FINAL_SUMS},
        sums={n: column(f"sum_{n}", np.float64, n_layers) for n in (*SUMS, *SAMPLED)},
        tau_kl_bits=column("tau_kl_bits", np.float64, n_layers, len(TAUS)),
        depths=column("depths", np.int64, len(KINDS), N_ENTROPY_BINS, n_layers + 1),
        kl_bins=held.pop("kl"),
        confidence=held,
        marginals={fold: np.array(rows, dtype=np.int64) for fold, rows in marginals.items()},
    )


def _provenance(held: dict[str, Any]) -> ProfileProvenance:
    reading = dict(held["reading"])
    reading["notes"] = tuple(reading["notes"])
    return ProfileProvenance(**{**held, "reading": Provenance(**reading)})
