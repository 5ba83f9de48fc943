"""Neighbourhood copy: the probability that a lens gives to the tokens next to the one just read."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from lens.checkpoint.plain_torch import in_plain_torch
from lens.checkpoint.readout import DirectReadout
from lens.errors import PromptError
from lens.measuring.neighbours import nearest_rows
from lens.measuring.sampled_states import read_directly
from lens.measuring.statistics import Interval, mean_interval

if TYPE_CHECKING:
    import pandas as pd

    from lens.checkpoint.checkpoint import Checkpoint

NEIGHBOURS = 10
_AT_ONCE_FLOATS = 2**22


@dataclass(frozen=True, kw_only=True, eq=False)
class NeighbourhoodCopy:
    """Mean probabilities by layer: of the token itself, and of its nearest rows of W_E.

    `by_chance` is that of as many tokens drawn at random from those that were read, other than
    the neighbours' own; the last layer is the model itself.
    """

    model_id: str
    itself: Interval
    neighbours: Interval
    by_chance: Interval
    n_neighbours: int
    n_positions: int

    def to_frame(self) -> "pd.DataFrame":
        """A row for each layer."""
        import pandas as pd

        columns: dict[str, Any] = {"layer": np.arange(len(self.itself.estimate))}
        for name in ("itself", "neighbours", "by_chance"):
            found = getattr(self, name)
            columns |= {f"mass_{name}": found.estimate}
            columns |= {f"mass_{name}_low_95": found.low, f"mass_{name}_high_95": found.high}
        return pd.DataFrame(columns)


@in_plain_torch
def neighbourhood_copy(
    model: "Checkpoint",
    corpus: Any = "sample",
    *,
    n_neighbours: int = NEIGHBOURS,
    positions: int = 1024,
    max_documents: int = 64,
    window_tokens: int | None = None,
    seed: int = 0,
) -> NeighbourhoodCopy:
    """How much probability each layer gives to the input token's nearest rows of W_E (cosine).

    A lens that copies meaning and not only the token shows it here. About `positions` positions of
    at most `max_documents` documents are read, drawn by `seed`, in windows of `window_tokens`, with
    `n_neighbours` rows each. Positions of tokens that W_U has no row for are left out. Raises
    UnsupportedArchitectureError without a direct readout, and as `lens.measure` does.

    >>> lens.neighbourhood_copy(model, corpus).neighbours.estimate  # doctest: +SKIP
    """
    readout, sample = read_directly(
        model,
        corpus,
        "The probability of chosen tokens",
        positions=positions,
        max_documents=max_documents,
        window_tokens=window_tokens,
        seed=seed,
    )
    known = np.flatnonzero(sample.input_ids.numpy() < model.d_vocab)
    if not len(known):
        raise PromptError(
            f"None of the {len(sample)} positions holds a token that W_U has a row for: its rows "
            f"end at {model.d_vocab}. Pass other texts."
        )
    sample = sample.select(known)
    own = sample.input_ids
    near = _neighbours(model, own, n_neighbours)
    sets = [own[:, None], near, _others(own, near, seed)]
    documents, of_row = np.unique(sample.documents, return_inverse=True)
    counts = np.bincount(of_row).astype(np.float64)
    sums = np.zeros((3, len(documents), len(sample.states)))
    for column, states in enumerate(sample.states.values()):
        for row, mass in enumerate(masses(readout, states, sets)):
            sums[row, :, column] = np.bincount(of_row, mass.cpu().numpy(), minlength=len(documents))
    itself, neighbours, by_chance = (mean_interval(one, counts) for one in sums)
    return NeighbourhoodCopy(
        model_id=model.origin.model_id,
        itself=itself,
        neighbours=neighbours,
        by_chance=by_chance,
        n_neighbours=near.shape[1],
        n_positions=len(sample),
    )


def masses(
    readout: DirectReadout,
    states: Float[Tensor, "pos d_model"],
    sets: list[Int[Tensor, "pos _"]],
) -> list[Float[Tensor, " pos"]]:
    """The summed probability of each position's own set of tokens; -1 stands for no token."""
    at_once = max(1, _AT_ONCE_FLOATS // readout.d_vocab)
    found: list[list[Tensor]] = [[] for _ in sets]
    for first in range(0, len(states), at_once):
        part = slice(first, first + at_once)
        q = torch.softmax(readout.logits(states[part]).float(), -1)
        for kept, ids in zip(found, sets, strict=True):
            chosen = ids[part].to(q.device)
            mass = q.gather(-1, chosen.clamp(min=0)) * (chosen >= 0)
            kept.append(mass.sum(-1).double())
    return [torch.cat(kept) for kept in found]


def _neighbours(
    model: "Checkpoint", own: Int[Tensor, " pos"], count: int
) -> Int[Tensor, "pos neighbour"]:
    """The nearest other rows of W_E that the unembedding has too."""
    w_e = model.W_E.detach()[: model.d_vocab]
    tokens, place = torch.unique(own, return_inverse=True)
    count = min(count, w_e.shape[0] - 1)
    queries = w_e[tokens.to(w_e.device)].float()
    near = nearest_rows(queries, w_e, k=count, own=tokens.to(w_e.device))
    return near.by_cosine[place]


def _others(
    own: Int[Tensor, " pos"], near: Int[Tensor, "pos neighbour"], seed: int
) -> Int[Tensor, "pos neighbour"]:
    """As many of the tokens that were read, drawn by how often; none of them near or the own."""
    generator = torch.Generator().manual_seed(seed)
    drawn = own[torch.randint(len(own), near.shape, generator=generator)]
    for _ in range(20):
        clash = (drawn == own[:, None]) | (drawn[:, :, None] == near[:, None, :]).any(-1)
        if not bool(clash.any()):
            break
        again = own[torch.randint(len(own), near.shape, generator=generator)]
        drawn = torch.where(clash, again, drawn)
    return drawn
