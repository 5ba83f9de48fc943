"""What one prompt's layers predict: numbers, token ids and where they come from."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Int

from lens.checkpoint.layer_numbers import Layer, layer_name
from lens.errors import SelectionError

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

NO_TOKEN = -1
"""Stands where there is no token: the target of a last position, its rank, a mask's self."""


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Where a result comes from; two results are comparable only where these agree.

    `model_hash` is a digest of the weights that the reading depends on, `versions` the library
    versions, `readout` is "direct" or "replay", `lens` is "output" (through W_U) or "input"
    (through W_E), `tie` the verdict read from the tensors, `target` says which token a position
    is scored against: "next" (causal) or "same" (masked).
    """

    model_id: str
    revision: str | None
    model_class: str
    model_hash: str
    tie: str
    lens: str
    readout: str
    target: str
    dtype: str
    n_layers: int
    d_model: int
    d_vocab: int
    layer_convention: str
    versions: Mapping[str, str]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerPredictions:
    """What each layer predicts at each position of one prompt.

    Layer l is the state after l blocks; l + 0.5 the one between attention and MLP of block l. Rows
    are `layers`, columns `positions` (indices into `input_ids`). The column of a position holds the
    prediction made FROM it. Numbers are bits, and `kl_bits` is KL(final || layer). Where a position
    has no target (the last one of a causal prompt), `target_ids` is -1, `target_logprob_bits` NaN
    and `target_rank` -1. A rank counts tokens with a strictly higher logit: 0 is the best.
    `self_copy_mass` is the probability given to the position's own input token (NaN where it has
    none), `padding_mass` that given to vocabulary rows of no token, None where there are no such
    rows. `vocabulary` maps every id that occurs to its text, for showing only: results are keyed by
    id.
    """

    input_ids: Int[np.ndarray, " prompt"]
    positions: Int[np.ndarray, " pos"]
    layers: Int[np.ndarray, " layer"] | Float[np.ndarray, " layer"]
    top_ids: Int[np.ndarray, "layer pos k"]
    top_logprob_bits: Float[np.ndarray, "layer pos k"]
    entropy_bits: Float[np.ndarray, "layer pos"]
    kl_bits: Float[np.ndarray, "layer pos"]
    target_ids: Int[np.ndarray, " pos"]
    target_logprob_bits: Float[np.ndarray, "layer pos"]
    target_rank: Int[np.ndarray, "layer pos"]
    final_top_ids: Int[np.ndarray, " pos"]
    final_top_logprob_bits: Float[np.ndarray, "layer pos"]
    final_top_rank: Int[np.ndarray, "layer pos"]
    self_copy_mass: Float[np.ndarray, "layer pos"]
    vocabulary: Mapping[int, str]
    provenance: Provenance
    set_names: tuple[str, ...] = ()
    set_ids: tuple[tuple[int, ...], ...] = ()
    set_logprob_bits: Float[np.ndarray, "set layer pos"] | None = None
    padding_mass: Float[np.ndarray, "layer pos"] | None = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LayerPredictions):
            return NotImplemented
        return all(
            _same(getattr(self, field.name), getattr(other, field.name))
            for field in dataclasses.fields(self)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        source = self.provenance
        return (
            f"LayerPredictions({len(self.layers)} layers x {len(self.positions)} positions of "
            f"{len(self.input_ids)} tokens, top {self.top_ids.shape[-1]}; {source.model_id}, "
            f"{source.lens} lens, {source.readout} readout, {source.tie}{self._padding_words()})"
        )

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Each row as axes and tables show it: "3", "3.5"."""
        return tuple(layer_name(layer) for layer in self.layers.tolist())

    @property
    def tokens(self) -> tuple[str, ...]:
        """The text of each input token, for showing; two ids can share one text."""
        return tuple(self.vocabulary.get(int(i), f"[id {int(i)}]") for i in self.input_ids)

    @property
    def agreement(self) -> np.ndarray:
        """Bool [layer, pos]: the layer's top-1 is the model's own final top-1."""
        return self.top_ids[:, :, 0] == self.final_top_ids[None, :]

    @property
    def copies_input(self) -> np.ndarray:
        """Bool [layer, pos]: the layer's top-1 is the token that stands at the position."""
        return self.top_ids[:, :, 0] == self.input_ids[self.positions][None, :]

    @property
    def ruled_by_self_copy(self) -> np.ndarray:
        """Bool [layer]: more than half of the layer's positions predict their own input token.

        Such a row shows the embedding's geometry, not a prediction of what comes next. Never
        true for a masked model, whose target IS the token at the position.
        """
        if self.provenance.target == "same" or self.copies_input.size == 0:
            return np.zeros(len(self.layers), dtype=bool)
        return self.copies_input.mean(axis=1) > 0.5

    def set_probability(self, name: str) -> np.ndarray:
        """Float [layer, pos]: the probability (0 to 1) of the named target set; SelectionError."""
        return np.exp2(self._set_row(name))

    def logit_difference(self, name: str, other: str) -> np.ndarray:
        """Float [layer, pos]: log2 of the odds of one target set against another, in bits.

        For two sets of one token each this is the difference of their logits over ln 2: the
        normaliser cancels. Raises SelectionError for a set that is not there.
        """
        return self._set_row(name) - self._set_row(other)

    def select(
        self, *, layers: Sequence[Layer] | None = None, positions: list[int] | None = None
    ) -> "LayerPredictions":
        """A new result with only these layers (by number) and positions (indices into the prompt).

        Raises SelectionError where one was not read.
        """
        rows = _places(self.layers, layers, "layer")
        columns = _places(self.positions, positions, "position")
        changes: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in ("layers",):
                changes[field.name] = value[rows]
            elif field.name in ("positions", "target_ids", "final_top_ids"):
                changes[field.name] = value[columns]
            elif field.name == "set_logprob_bits":
                changes[field.name] = None if value is None else value[:, rows][:, :, columns]
            elif isinstance(value, np.ndarray) and field.name != "input_ids":
                changes[field.name] = value[rows][:, columns]
        return dataclasses.replace(self, **changes)

    def to_frame(self) -> "pd.DataFrame":
        """A pandas table, one row for each (layer, position); numbers in bits, ids beside texts."""
        from lens.show.export import predictions_to_frame

        frame = predictions_to_frame(self)
        # float32 shows its rounding when it is printed: 20.440001 for 20.44.
        narrow = frame.select_dtypes("float32").columns
        return frame.astype(dict.fromkeys(narrow, "float64"))

    def heatmap(self, **options: Any) -> "go.Figure":
        """A plotly figure, layers up and tokens along; options as in `lens.heatmap`."""
        from lens.show.heatmap import heatmap

        return heatmap(self, **options)

    def save(self, path: str | Path) -> Path:
        """Write .json, .csv or .parquet (read back equal), or .html, .png, .svg, .pdf.

        Raises ExportError; an existing file stays as it was if writing fails.
        """
        from lens.show.export import export

        return export(self, path)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        from lens.show.heatmap import notebook_bundle

        return notebook_bundle(self)

    def _padding_words(self) -> str:
        if self.padding_mass is None or not self.padding_mass.size:
            return ""
        return f"; up to {100 * float(np.nanmax(self.padding_mass)):.2g} % on rows of no token"

    def _set_row(self, name: str) -> np.ndarray:
        if self.set_logprob_bits is None or name not in self.set_names:
            known = ", ".join(self.set_names) or "none"
            raise SelectionError(
                f"No target set {name!r}; this result holds: {known}. "
                'Pass targets={"name": [" token"]} to logit_lens.'
            )
        return self.set_logprob_bits[self.set_names.index(name)]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        if not (isinstance(a, np.ndarray) and isinstance(b, np.ndarray)):
            return False
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        return bool(np.array_equal(a, b, equal_nan=a.dtype.kind == "f"))
    return bool(a == b)


def _places(held: np.ndarray, wanted: Sequence[Layer] | None, what: str) -> np.ndarray:
    if wanted is None:
        return np.arange(len(held))
    at = {value: place for place, value in enumerate(held.tolist())}
    missing = [value for value in wanted if value not in at]
    if missing:
        raise SelectionError(f"This result holds no {what} {missing}; it holds {held.tolist()}.")
    return np.array([at[value] for value in wanted], dtype=np.int64)
