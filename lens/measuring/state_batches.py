"""The states that a lens is fitted on, step by step: each step's are known from seed and number."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from lens.checkpoint.readout import DirectReadout
from lens.lenses.state_divergence import StateRows
from lens.measuring.collect import batches
from lens.measuring.passes import place_in_pass
from lens.measuring.windows import Window, Windows

if TYPE_CHECKING:
    from lens.checkpoint.checkpoint import Checkpoint

FEWEST_WINDOWS = 4
"""A step sees at least this many windows, so that it does not follow one text alone."""

_POSITIONS, _WINDOWS = 1, 2


class StateBatches:
    """Endless batches of about `positions` positions each, every window once in each pass.

    Step k's batch depends on nothing but the seed and k, so that a stopped run can go on.
    """

    def __init__(
        self, checkpoint: "Checkpoint", windows: Sequence[Window], *, positions: int, seed: int
    ):
        self.checkpoint, self.windows = checkpoint, windows
        self.positions, self.seed = positions, seed
        readable = float(np.mean([w.n_read - 1 for w in windows]))
        needed = -(-positions // max(1, round(readable)))
        few = FEWEST_WINDOWS if isinstance(checkpoint.readout, DirectReadout) else 1
        self.per_step = min(max(few, needed), len(windows))

    def at(self, step: int) -> list[StateRows]:
        """The batch of this step, counted from 1."""
        first = (step - 1) * self.per_step
        chosen = [self.windows[self._place(i)] for i in range(first, first + self.per_step)]
        generator = np.random.default_rng([self.seed, _POSITIONS, step])
        return rows_of(self.checkpoint, chosen, positions=self.positions, generator=generator)

    def _place(self, number: int) -> int:
        return place_in_pass(number, len(self.windows), self.seed, _WINDOWS)


def rows_of(
    checkpoint: "Checkpoint",
    windows: Sequence[Window],
    *,
    positions: int | None,
    generator: np.random.Generator,
) -> list[StateRows]:
    """States of windows, position 0 and what is not read left out.

    Through a direct readout all of them together, at most `positions` of them, drawn; through a
    replay window by window, whole.
    """
    parts = []
    for batch in batches(checkpoint, sorted(windows, key=lambda w: len(w.ids))):
        at = np.concatenate([np.arange(len(w.ids)) for w in batch.windows])
        last = np.concatenate([np.full(len(w.ids), w.n_read) for w in batch.windows])
        read = torch.from_numpy((at > 0) & (at < last)).to(batch.states.device)
        inputs = batch.inputs if len(batch.windows) == 1 else None
        parts.append(StateRows(states=batch.states.float(), read=read, inputs=inputs))
    if not isinstance(checkpoint.readout, DirectReadout):
        return parts
    states = torch.cat([part.states[:, part.read] for part in parts], dim=1)
    if positions is not None and states.shape[1] > positions:
        drawn = np.sort(generator.choice(states.shape[1], positions, replace=False))
        states = states[:, torch.from_numpy(drawn)]
    read = torch.ones(states.shape[1], dtype=torch.bool, device=states.device)
    return [StateRows(states=states, read=read)]


def read_states(
    checkpoint: "Checkpoint", windows: Windows
) -> Iterator[Float[Tensor, "layer pos d_model"]]:
    """The states of every position that is read, position 0 left out, document by document."""
    generator = np.random.default_rng(0)
    for document in windows.by_document:
        for part in rows_of(checkpoint, document, positions=None, generator=generator):
            yield part.states[:, part.read]
