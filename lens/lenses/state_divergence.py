"""KL(final || lens) of states, and its gradient with respect to them, by either readout."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lens.checkpoint.inputs import Inputs
from lens.checkpoint.readout import DirectReadout
from lens.errors import UnsupportedArchitectureError
from lens.lenses.differentiable import in_float32, prepared, pulled_back, replayed
from lens.lenses.divergence import NATS_TO_BITS, FinalRows, divergence

if TYPE_CHECKING:
    from lens.checkpoint.checkpoint import Checkpoint


@dataclass(frozen=True, kw_only=True, eq=False)
class StateRows:
    """States of all layers at some positions; the last layer's are the model's own last states.

    A replay needs whole prompts: then `inputs` are the prompt's own, and `read` marks the
    positions that count.
    """

    states: Float[Tensor, "layer pos d_model"]
    read: Bool[Tensor, " pos"]
    inputs: Inputs | None = None

    @property
    def n_read(self) -> int:
        """How many positions count."""
        return int(self.read.sum())


class StateDivergence:
    """KL(final || what the model's own readout makes of states), one checkpoint's."""

    def __init__(self, checkpoint: "Checkpoint"):
        self.checkpoint = checkpoint
        readout = checkpoint.readout
        self.is_direct = isinstance(readout, DirectReadout)
        if isinstance(readout, DirectReadout):
            self._unembedding = in_float32(readout.unembedding)
        elif readout is not checkpoint.replay:
            raise UnsupportedArchitectureError(
                f"A gradient is taken through a direct readout or the model's own tail; this "
                f"readout is {readout.kind}, passed by hand. Load the model without it."
            )

    def kl_bits(
        self, moved: Float[Tensor, "layer pos d_model"], rows: StateRows
    ) -> Float[Tensor, "layer pos"]:
        """KL of states that a lens moved, at every position of `rows`."""
        return self._kl_and_pull(moved, rows, with_pull=False)[0]

    def kl_and_pull(
        self, moved: Float[Tensor, "layer pos d_model"], rows: StateRows
    ) -> tuple[Float[Tensor, "layer pos"], Float[Tensor, "layer pos d_model"]]:
        """KL in bits, and d (sum of KL over the positions that count) / d moved."""
        return self._kl_and_pull(moved, rows, with_pull=True)

    def _kl_and_pull(
        self, moved: Tensor, rows: StateRows, *, with_pull: bool
    ) -> tuple[Tensor, Tensor]:
        moved = moved.detach().requires_grad_(with_pull)
        if self.is_direct:
            return self._direct(moved, rows, with_pull=with_pull)
        return self._replayed(moved, rows, with_pull=with_pull)

    def _direct(self, moved: Tensor, rows: StateRows, *, with_pull: bool) -> tuple[Tensor, Tensor]:
        final = prepared(self.checkpoint, rows.states[-1]).detach()
        own = prepared(self.checkpoint, moved)
        found = divergence(
            self._unembedding,
            own.detach(),
            FinalRows(self._unembedding, final),
            with_pull=with_pull,
        )
        if not with_pull:
            return found.kl_bits.to(moved.device), torch.zeros_like(moved)
        force = found.pull * rows.read[:, None].to(own.device)
        return found.kl_bits.to(moved.device), pulled_back(own, [moved], force)[0].float()

    def _replayed(
        self, moved: Tensor, rows: StateRows, *, with_pull: bool
    ) -> tuple[Tensor, Tensor]:
        replay, dtype = self.checkpoint.replay, self.checkpoint.dtype
        with torch.no_grad():
            last = rows.states[-1][None].to(dtype)
            log_p = torch.log_softmax(replay.logits(last, rows.inputs)[0].float(), -1)
            p = log_p.exp()
        kls, pulls = [], []
        for state in moved:
            leaf = state.detach().requires_grad_(with_pull)
            with torch.set_grad_enabled(with_pull):
                logits = replayed(replay, leaf[None].to(dtype), rows.inputs)[0]
                log_q = torch.log_softmax(logits.float(), -1)
                kl = torch.where(p == 0, 0.0, p * (log_p - log_q)).sum(-1) * NATS_TO_BITS
            kls.append(kl.detach().to(leaf.device))
            pulls.append(
                pulled_back(kl, [leaf], rows.read.to(kl))[0]
                if with_pull
                else torch.zeros_like(leaf)
            )
        return torch.stack(kls), torch.stack(pulls)
