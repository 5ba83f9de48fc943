"""Any vectors of the residual stream, put through a proved readout: what each would predict."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from lens.checkpoint import tokenizing
from lens.checkpoint.layer_numbers import Layer
from lens.checkpoint.states import ResidualStates
from lens.errors import ProvenanceError, SelectionError, ShapeError
from lens.lenses.logit import provenance, readout_of
from lens.lenses.predictions import NO_TOKEN, Provenance
from lens.lenses.projection import project

if TYPE_CHECKING:
    import pandas as pd

    from lens.checkpoint.checkpoint import Checkpoint


@dataclass(frozen=True, kw_only=True, eq=False)
class VectorReadings:
    """What each vector predicts when it is read as a last residual state; numbers in bits.

    Rows keep the order of the vectors, leading axes flattened (`shape` holds them). `layer` says
    which layer they were taken from, None where they are of no layer.
    """

    top_ids: Int[np.ndarray, "row k"]
    top_logprob_bits: Float[np.ndarray, "row k"]
    entropy_bits: Float[np.ndarray, " row"]
    shape: tuple[int, ...]
    layer: Layer | None
    vocabulary: Mapping[int, str]
    provenance: Provenance

    def to_frame(self) -> "pd.DataFrame":
        """A pandas table, one row for each (vector, candidate), best first."""
        import pandas as pd

        n_rows, k = self.top_ids.shape
        ids = self.top_ids.ravel()
        return pd.DataFrame(
            {
                "row": np.repeat(np.arange(n_rows), k),
                "candidate": np.tile(np.arange(k), n_rows),
                "token_id": ids,
                "token": [self.vocabulary.get(int(i), "") for i in ids],
                "logprob_bits": self.top_logprob_bits.ravel(),
            }
        )

    def __repr__(self) -> str:
        lines = [f"VectorReadings({len(self.top_ids)} vectors; {self.provenance.model_id})"]
        for ids, bits in zip(self.top_ids[:10], self.top_logprob_bits[:10], strict=True):
            cells = [
                f"{self.vocabulary.get(int(i), '')!r} {2.0 ** float(b):.3f}"
                for i, b in zip(ids[:5], bits[:5], strict=True)
            ]
            lines.append("  " + ", ".join(cells))
        return "\n".join(lines)


def read_vectors(
    checkpoint: "Checkpoint",
    vectors: Tensor | ResidualStates,
    *,
    layer: Layer | None = None,
    top_k: int = 10,
    lens: str = "output",
) -> VectorReadings:
    """Read vectors [..., d_model] through the checkpoint's proved readout.

    Raises ShapeError for another width, no vector or numbers that are not finite; ProvenanceError
    for states captured from other weights; SelectionError for a layer that is not there.
    """
    if isinstance(vectors, ResidualStates):
        vectors = _of_same_model(checkpoint, vectors, layer)
    if layer is not None and not 0 <= layer <= checkpoint.n_layers:
        raise SelectionError(f"There is no layer {layer}; layers are 0 to {checkpoint.n_layers}.")
    rows = _as_rows(checkpoint, vectors)
    readout = readout_of(checkpoint, lens)
    # A replay reads them as the positions of a prompt, which cannot be longer than the context.
    most = checkpoint.n_ctx if readout.kind == "replay" else None
    parts = []
    for part in rows.split(most or len(rows)):
        none = torch.full((len(part),), NO_TOKEN)
        parts.append(
            project(
                readout,
                part[None],
                final_states=part,
                input_ids=none,
                target_ids=none,
                top_k=top_k,
            )
        )
    top_ids = np.concatenate([part.top_ids[0] for part in parts])
    return VectorReadings(
        top_ids=top_ids,
        top_logprob_bits=np.concatenate([part.top_logprob_bits[0] for part in parts]),
        entropy_bits=np.concatenate([part.entropy_bits[0] for part in parts]),
        shape=tuple(vectors.shape[:-1]),
        layer=layer,
        vocabulary=tokenizing.token_text(checkpoint.tokenizer, sorted({*top_ids.ravel().tolist()})),
        provenance=provenance(checkpoint, lens),
    )


def _of_same_model(
    checkpoint: "Checkpoint", states: ResidualStates, layer: Layer | None
) -> Float[Tensor, "*rows d_model"]:
    if states.model_hash != checkpoint.model_hash:
        raise ProvenanceError(
            f"These states come from {states.model_id} (weights {states.model_hash[:12]}); this "
            f"checkpoint is {checkpoint.origin.model_id} ({checkpoint.model_hash[:12]}). Read them "
            "with the model that they were captured from, or pass the bare tensor."
        )
    return states.states if layer is None else states.at(layer)


def _as_rows(checkpoint: "Checkpoint", vectors: Tensor) -> Float[Tensor, "row d_model"]:
    if vectors.ndim < 1 or vectors.shape[-1] != checkpoint.d_model:
        raise ShapeError(
            f"The vectors have shape {tuple(vectors.shape)}; expected [..., {checkpoint.d_model}], "
            f"the width of this model's residual stream."
        )
    rows = vectors.detach().reshape(-1, checkpoint.d_model)
    if not len(rows):
        raise ShapeError("There is no vector to read: the array is empty.")
    cast = rows.to(device=checkpoint.device, dtype=checkpoint.dtype)
    if not bool(torch.isfinite(cast).all()):
        why = "" if not bool(torch.isfinite(rows).all()) else f" as {checkpoint.dtype}"
        raise ShapeError(f"The vectors hold NaN or inf{why}; a reading of them would mean nothing.")
    return cast
