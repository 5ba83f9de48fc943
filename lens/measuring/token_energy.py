"""Token energy: how far a state's direction lies among the tokens' rows, by layer.

With u_i a row as the readout sees it, behind the norm's gain and of length 1, and G the mean of
u_i u_i^T: E = sqrt(h^T G h) / (|h| |G|). 1 for rows that point everywhere alike; more where the
state lies where the rows lie. Source: Wendler et al. 2024, arXiv:2402.10588.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from lens.checkpoint.plain_torch import in_plain_torch
from lens.errors import UnsupportedArchitectureError
from lens.linear import blocks
from lens.measuring.frozen_norm import FrozenNorm, frozen_norm
from lens.measuring.sampled_states import read_directly
from lens.measuring.statistics import Interval, mean_interval

if TYPE_CHECKING:
    import pandas as pd

    from lens.checkpoint.checkpoint import Checkpoint


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenEnergy:
    """Mean energy by layer with its interval over documents, of W_U and of W_E (None: no fit)."""

    model_id: str
    layers: Int[np.ndarray, " layer"]
    of_unembedding: Interval
    of_embedding: Interval | None
    n_positions: int

    def to_frame(self) -> "pd.DataFrame":
        """A row for each layer."""
        import pandas as pd

        columns: dict[str, Any] = {"layer": self.layers}
        for name, found in (("w_u", self.of_unembedding), ("w_e", self.of_embedding)):
            if found is not None:
                columns |= {f"energy_{name}": found.estimate}
                columns |= {
                    f"energy_{name}_low_95": found.low,
                    f"energy_{name}_high_95": found.high,
                }
        return pd.DataFrame(columns)


@in_plain_torch
def token_energy(
    model: "Checkpoint",
    corpus: Any = "sample",
    *,
    positions: int = 1024,
    max_documents: int = 64,
    window_tokens: int | None = None,
    seed: int = 0,
) -> TokenEnergy:
    """The energy of states among the rows of W_U and of W_E, at about `positions` positions.

    They are drawn by `seed` from windows (of `window_tokens`) of at most `max_documents` documents.

    Raises UnsupportedArchitectureError where the readout is no norm (of one length and a gain)
    before W_U, and as `lens.measure` does.

    >>> lens.token_energy(model, corpus).to_frame()  # doctest: +SKIP
    """
    readout, sample = read_directly(
        model,
        corpus,
        "Token energy",
        positions=positions,
        max_documents=max_documents,
        window_tokens=window_tokens,
        seed=seed,
    )
    norm = frozen_norm(readout.preparation, sample.final[0])
    if norm is None:
        raise UnsupportedArchitectureError(
            f"The readout {readout.describe()} is more than a norm before W_U, so the rows of W_U "
            "have no direction in the residual stream. Missing step: token energy."
        )
    w_u, w_e = readout.unembedding.weight.detach(), model.W_E.detach()
    grams = [mean_outer(w_u, norm)]
    if w_e.shape[1] == w_u.shape[1]:
        grams.append(grams[0] if model.tie.is_tied else mean_outer(w_e, norm))
    documents, of_row = np.unique(sample.documents, return_inverse=True)
    counts = np.bincount(of_row).astype(np.float64)
    found = []
    for gram in grams:
        sums = np.zeros((len(documents), len(sample.states)))
        for column, states in enumerate(sample.states.values()):
            values = energy(states, gram, norm).cpu().numpy()
            sums[:, column] = np.bincount(of_row, values, minlength=len(documents))
        found.append(mean_interval(sums, counts))
    return TokenEnergy(
        model_id=model.origin.model_id,
        layers=np.arange(model.n_layers + 1),
        of_unembedding=found[0],
        of_embedding=found[1] if len(found) > 1 else None,
        n_positions=len(sample),
    )


def mean_outer(
    matrix: Float[Tensor, "row d_model"], norm: FrozenNorm
) -> Float[Tensor, "d_model d_model"]:
    """The mean of u u^T over rows u, each behind the norm's gain and of length 1; float64."""
    total = torch.zeros(matrix.shape[1], matrix.shape[1], dtype=torch.float64, device=matrix.device)
    for rows in blocks(matrix.shape[0]):
        u = matrix[rows].double() * norm.gain.to(matrix.device)
        u = u - norm.share * u.mean(-1, keepdim=True)
        u = u / u.norm(dim=-1, keepdim=True).clamp_min(1e-300)
        total += u.T @ u
    return total / matrix.shape[0]


def energy(
    states: Float[Tensor, "pos d_model"],
    gram: Float[Tensor, "d_model d_model"],
    norm: FrozenNorm,
) -> Float[Tensor, " pos"]:
    """sqrt(h^T G h) / (|h| |G|) of each state, centred where the norm centres."""
    h = states.double()
    h = h - norm.share * h.mean(-1, keepdim=True)
    h = h / h.norm(dim=-1, keepdim=True).clamp_min(1e-300)
    gram = gram.to(h.device)
    along = torch.einsum("pd,de,pe->p", h, gram, h).clamp_min(0).sqrt()
    return along / torch.linalg.matrix_norm(gram)
