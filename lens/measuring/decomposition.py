"""How much of a lens' KL is temperature, frequency, shift, scale, rotation; what is not there."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Int

from lens.errors import ExportError, ResultFileError, SelectionError
from lens.files import written_whole
from lens.lenses.predictions import Provenance
from lens.measuring.correction import ORDERS
from lens.measuring.statistics import Interval, bootstrap

if TYPE_CHECKING:
    import pandas as pd

FORMAT = "lens-decomposition-1"
READOUT_FIRST = "readout first"
_ARRAYS = (
    "layers",
    "documents",
    "counts",
    "sums",
    "fit_kl_bits",
    "fit_loss_bits",
    "temperatures",
)


@dataclass(frozen=True, kw_only=True)
class GapProvenance:
    """What was decomposed, and what it was fitted on: other documents, so many positions."""

    reading: Provenance
    corpus_name: str
    corpus_hash: str
    fitted_on: str
    fitted_on_hash: str
    n_fit_positions: int
    n_check_positions: int
    window_tokens: int
    options: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class Decomposition:
    """KL(final || lens) on held-out documents, with more and more allowed in between; in bits.

    `sums` are KL summed over the `counts` positions of each document, for every order of ORDERS,
    layer and rung: rung 0 is the logit lens, rung i has the first i terms of the order free.
    `fit_kl_bits` is the mean on the rows that were fitted, `fit_loss_bits` with the prior of the
    bias: this one never rises along an order, KL on held-out documents may.
    """

    provenance: GapProvenance
    layers: Int[np.ndarray, " layer"]
    documents: Int[np.ndarray, " doc"]
    counts: Int[np.ndarray, " doc"]
    sums: Float[np.ndarray, "order layer rung doc"]
    fit_kl_bits: Float[np.ndarray, "order layer rung"]
    fit_loss_bits: Float[np.ndarray, "order layer rung"]
    temperatures: Float[np.ndarray, "order layer rung"]

    def __repr__(self) -> str:
        p = self.provenance
        return (
            f"Decomposition({p.reading.model_id}, layers {', '.join(map(str, self.layers))}: "
            f"{self.counts.sum():,} positions of {len(self.documents)} documents of "
            f"{p.corpus_name}; fitted on {p.n_fit_positions:,} positions of {p.fitted_on})"
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Decomposition):
            return NotImplemented
        return self.provenance == other.provenance and all(
            np.array_equal(getattr(self, name), getattr(other, name)) for name in _ARRAYS
        )

    __hash__ = None  # type: ignore[assignment]

    def kl_bits(self, order: str = READOUT_FIRST) -> Float[np.ndarray, "layer rung"]:
        """Mean KL on held-out documents, from the logit lens to all terms free."""
        return self.sums[self._place(order)].sum(axis=-1) / self.counts.sum()

    def drops(self, layer: int, order: str = READOUT_FIRST, *, level: float = 0.95) -> Interval:
        """By how much each term of an order lowers KL, in the order's own sequence; bits.

        Negative where the term that was fitted elsewhere did harm here.
        """
        return self._interval(self._rungs(layer, order), _drops, level)

    def kl_interval(
        self, layer: int, order: str = READOUT_FIRST, *, level: float = 0.95
    ) -> Interval:
        """`kl_bits` of one layer with its interval over documents."""
        return self._interval(self._rungs(layer, order), lambda kl: kl, level)

    @property
    def logit_lens(self) -> Interval:
        """KL of the logit lens, by layer."""
        return self._interval(self.sums[0, :, 0].T, lambda kl: kl, 0.95)

    @property
    def basis_mismatch(self) -> Interval:
        """What an affine map wins beyond temperature, bias and shift, by layer; bits."""
        own = self.sums[self._place(READOUT_FIRST)]
        columns = np.concatenate([own[:, 3], own[:, -1]]).T
        return self._interval(columns, _first_less_second, 0.95)

    @property
    def not_linearly_there(self) -> Interval:
        """KL with all terms free, by layer: what no affine map of the state brings out; bits.

        An upper bound: with more rows to fit on it can only fall.
        """
        own = self.sums[self._place(READOUT_FIRST)]
        return self._interval(own[:, -1].T, lambda kl: kl, 0.95)

    def to_frame(self) -> "pd.DataFrame":
        """A row for each order, layer and rung: KL and drop in bits with their 95 % intervals."""
        import pandas as pd

        several = len(self.documents) > 1
        rows = []
        for number, (order, terms) in enumerate(ORDERS.items()):
            means = self.kl_bits(order)
            for place, layer in enumerate(self.layers.tolist()):
                kl = self.kl_interval(layer, order) if several else None
                drop = self.drops(layer, order) if several else None
                for rung, term in enumerate(("logit lens", *terms)):
                    row: dict[str, Any] = {"order": order, "layer": layer, "rung": rung}
                    row |= {"freed": term, "kl_bits": means[place, rung]}
                    if kl is not None:
                        row |= {"kl_low_95": kl.low[rung], "kl_high_95": kl.high[rung]}
                    row["drop_bits"] = means[place, rung - 1] - means[place, rung] if rung else 0.0
                    if drop is not None:
                        row["drop_low_95"] = drop.low[rung - 1] if rung else 0.0
                        row["drop_high_95"] = drop.high[rung - 1] if rung else 0.0
                    row["share_of_logit_lens"] = row["drop_bits"] / means[place, 0]
                    row["fit_kl_bits"] = self.fit_kl_bits[number, place, rung]
                    row["temperature"] = self.temperatures[number, place, rung]
                    rows.append(row)
        return pd.DataFrame(rows)

    def save(self, path: str | Path) -> Path:
        """Write .json (`lens.read_decomposition` reads it back equal) or .csv; or ExportError."""
        target = Path(path)
        if target.suffix.lower() not in (".json", ".csv"):
            raise ExportError(
                f"A decomposition is saved as .json or .csv; {target.name!r} is neither."
            )
        with written_whole(target) as partial:
            if target.suffix.lower() == ".csv":
                self.to_frame().to_csv(partial, index=False)
            else:
                held = {name: getattr(self, name).tolist() for name in _ARRAYS}
                meta = {"format": FORMAT, "unit": "bits", "orders": ORDERS}
                meta |= {"provenance": asdict(self.provenance)}
                partial.write_text(json.dumps(meta | held, default=dict), encoding="utf-8")
        return target

    def _place(self, order: str) -> int:
        if order not in ORDERS:
            raise SelectionError(f"There is no order {order!r}; there are {', '.join(ORDERS)}.")
        return list(ORDERS).index(order)

    def _rungs(self, layer: int, order: str) -> Float[np.ndarray, "doc rung"]:
        if layer not in self.layers:
            raise SelectionError(
                f"Layer {layer} was not decomposed; these were: "
                f"{', '.join(map(str, self.layers.tolist()))}."
            )
        place = self.layers.tolist().index(layer)
        return self.sums[self._place(order), place].T

    def _interval(
        self, sums: Float[np.ndarray, "doc entry"], of_means: Any, level: float
    ) -> Interval:
        stacked = np.concatenate([sums, self.counts[:, None].astype(np.float64)], axis=1)
        return bootstrap(stacked, lambda s: of_means(s[..., :-1] / s[..., -1:]), level=level)


def read_decomposition(path: str | Path) -> Decomposition:
    """Read what `Decomposition.save` wrote as .json, equal to it. Raises ResultFileError."""
    source = Path(path)
    try:
        held = json.loads(source.read_text("utf-8"))
        if held["format"] != FORMAT:
            raise ValueError(f"format {held['format']!r}, expected {FORMAT!r}")
        if {k: tuple(v) for k, v in held["orders"].items()} != ORDERS:
            raise ValueError("it has other orders of terms")
        given = held["provenance"]
        reading = Provenance(**{**given["reading"], "notes": tuple(given["reading"]["notes"])})
        whole = ("layers", "documents", "counts")
        arrays = {n: np.array(held[n], np.int64 if n in whole else np.float64) for n in _ARRAYS}
        source_of = GapProvenance(**{**given, "reading": reading})
        return Decomposition(provenance=source_of, **arrays)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ResultFileError(
            f"{source} cannot be read as a decomposition ({type(error).__name__}: {error})."
        ) from error


def _drops(kl: Float[np.ndarray, "*sets rung"]) -> Float[np.ndarray, "*sets term"]:
    return kl[..., :-1] - kl[..., 1:]


def _first_less_second(kl: np.ndarray) -> np.ndarray:
    half = kl.shape[-1] // 2
    return kl[..., :half] - kl[..., half:]
