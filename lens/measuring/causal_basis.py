"""Directions that a lens depends on most, one after the other, each at right angles to all before.

The influence of a direction v is the mean KL(lens(h) || lens(h - v v^T (h - mean h))). Source:
Belrose et al. 2023, arXiv:2303.08112, causal basis extraction.
"""

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from lens.lenses.differentiable import prepared, pulled_back
from lens.lenses.divergence import FinalRows, divergence

if TYPE_CHECKING:
    from lens.checkpoint.checkpoint import Checkpoint
    from lens.checkpoint.readout import Unembedding


def ablated(
    states: Float[Tensor, "*rows d_model"],
    direction: Float[Tensor, " d_model"],
    mean: Float[Tensor, " d_model"],
) -> Float[Tensor, "*rows d_model"]:
    """States without what distinguishes them along a direction of length 1.

    >>> ablated(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 0.0]), torch.zeros(2))
    tensor([[0., 4.]])
    """
    return states - ((states - mean) @ direction)[..., None] * direction


class LensInfluence:
    """How far ablating a direction moves the logit lens' reading of these states."""

    def __init__(
        self,
        checkpoint: "Checkpoint",
        unembedding: "Unembedding",
        states: Float[Tensor, "pos d_model"],
    ):
        self.checkpoint, self.unembedding = checkpoint, unembedding
        self.states, self.mean = states.float(), states.float().mean(0)
        self.before = FinalRows(unembedding, prepared(checkpoint, states).detach())

    def bits(self, direction: Float[Tensor, " d_model"]) -> float:
        """The influence of one direction."""
        rows = prepared(self.checkpoint, ablated(self.states, direction, self.mean)).detach()
        found = divergence(self.unembedding, rows[None], self.before, with_pull=False)
        return float(found.kl_bits.mean())

    def basis(self, count: int, *, max_steps: int = 10) -> Float[Tensor, "direction d_model"]:
        """Orthonormal directions of ever less influence, each found by L-BFGS."""
        found = torch.zeros(0, len(self.mean), dtype=torch.float32, device=self.states.device)
        for _ in range(count):
            found = torch.cat([found, self._strongest(found, max_steps)[None]])
        return found

    def _strongest(self, before: Float[Tensor, "direction d_model"], max_steps: int) -> Tensor:
        centred = self.states - self.mean
        centred = centred - (centred @ before.T) @ before
        # The direction of most variance that is left.
        leaf = torch.linalg.svd(centred, full_matrices=False)[2][0].clone().requires_grad_()
        optimiser = torch.optim.LBFGS(
            [leaf], max_iter=max_steps, line_search_fn="strong_wolfe", tolerance_change=0
        )

        def unit() -> Tensor:
            free = leaf - before.T @ (before @ leaf)
            return free / free.norm()

        def loss() -> Tensor:
            with torch.enable_grad():
                moved = ablated(self.states, unit(), self.mean)
                rows = prepared(self.checkpoint, moved)
            now = divergence(self.unembedding, rows.detach()[None], self.before)
            pull = -now.pull[0] / len(self.states)
            leaf.grad = pulled_back(rows, [leaf], pull)[0]
            return -now.kl_bits.mean()

        optimiser.step(loss)  # type: ignore[arg-type]
        return unit().detach()
