"""Tiles of logits -> running sums: fused on the CPU where numba is there, in torch elsewhere.

A tile holds the logits of about a thousand tokens for all rows [layer, pos] of a chunk, and those
of the model's own final rows [pos], so that KL(final || lens) needs no stored distribution. Sums
run in float64 across tiles. Both ways keep the sums of sums.py.
"""

import importlib.util
import math

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from lens.lenses.sums import FINAL_TOP, NOT_FOUND, OWN, TARGET, Sums, empty_sums

BLOCK_TOKENS = 64
"""A block of this many tokens is searched for top-k only where its maximum beats the k-th best."""

UNDERFLOW_BITS = -126.0
"""Below this a float32 power of two is denormal: it counts as 0."""

ABSENT = -1e30
"""Stands in a tile where the own token was: no probability, and no infinity."""


def has_numba() -> bool:
    """Whether the fused path is there."""
    return importlib.util.find_spec("numba") is not None


class FusedReduction:
    """The sums of one chunk on the CPU, one read of each tile."""

    def __init__(
        self,
        *,
        top_k: int,
        ids: Int[Tensor, "3 pos"],
        thresholds: Float[Tensor, "2 layer pos"],
    ):
        from lens.lenses import kernels

        self._kernels = kernels
        _, n_layers, n_positions = thresholds.shape
        self.ids = ids.numpy()
        self.thresholds = thresholds.numpy()
        self.lens = empty_sums(n_layers, n_positions, columns=7)
        self.final = empty_sums(n_positions, columns=3)
        self.above = np.zeros(self.thresholds.shape, dtype=np.int64)
        self.top_values = np.full((n_layers, n_positions, top_k), -np.inf, dtype=np.float32)
        self.top_ids = np.full((n_layers, n_positions, top_k), NOT_FOUND, dtype=np.int64)
        self.final_top_value = np.full((n_positions, 1), -np.inf, dtype=np.float32)
        self.final_top_ids = np.full((n_positions, 1), NOT_FOUND, dtype=np.int64)

    def update(
        self, first: int, lens: Float[Tensor, "layer pos tile"], final: Float[Tensor, "pos tile"]
    ) -> None:
        """Take in the logits of the tokens from id `first` on; own tokens are overwritten."""
        self._kernels.reduce_tile(
            first,
            lens.numpy(),
            final.numpy(),
            self.ids,
            self.thresholds,
            self.lens,
            self.final,
            self.above,
            self.top_values,
            self.top_ids,
            self.final_top_value,
            self.final_top_ids,
        )

    def sums(self) -> Sums:
        """What the tiles so far add up to."""
        return Sums(
            scale=self._kernels.LOG2_E,
            lens=self.lens,
            final=self.final,
            ids=self.ids,
            thresholds=self.thresholds,
            above=self.above,
            top_values=self.top_values,
            top_ids=self.top_ids,
            final_top_ids=self.final_top_ids[:, 0],
        )


class TorchReduction:
    """The sums of one chunk on any device."""

    SCALE = 1.0 / math.log(2.0)

    def __init__(
        self,
        *,
        top_k: int,
        ids: Int[Tensor, "3 pos"],
        thresholds: Float[Tensor, "2 layer pos"],
    ):
        device = thresholds.device
        _, n_layers, n_positions = thresholds.shape
        self.ids, self.thresholds = ids, thresholds
        self.lens = torch.from_numpy(empty_sums(n_layers, n_positions, columns=7)).to(device)
        self.final = torch.from_numpy(empty_sums(n_positions, columns=3)).to(device)
        self.above = torch.zeros(thresholds.shape, dtype=torch.int64, device=device)
        self.top_values = torch.full((n_layers, n_positions, top_k), -torch.inf, device=device)
        self.top_ids = torch.full_like(self.top_values, NOT_FOUND, dtype=torch.int64)
        self.final_best = torch.full((n_positions,), -torch.inf, device=device)
        self.final_top_ids = torch.full_like(ids[OWN], NOT_FOUND)

    def update(
        self, first: int, lens: Float[Tensor, "layer pos tile"], final: Float[Tensor, "pos tile"]
    ) -> None:
        """Take in the logits of the tokens from id `first` on; own tokens are overwritten."""
        self._count(first, lens)
        self._candidates(first, lens)
        best = final.amax(-1)
        better = best > self.final_best
        places = torch.where(final == best[:, None], _places(final), NOT_FOUND).amin(-1)
        self.final_top_ids = torch.where(better, places + first, self.final_top_ids)
        self.final_best = torch.where(better, best, self.final_best)
        self._leave_out_own(first, lens, final)
        self._add(lens, final)

    def sums(self) -> Sums:
        """What the tiles so far add up to."""
        return Sums(
            scale=self.SCALE,
            lens=self.lens.cpu().numpy(),
            final=self.final.cpu().numpy(),
            ids=self.ids.cpu().numpy(),
            thresholds=self.thresholds.cpu().numpy(),
            above=self.above.cpu().numpy(),
            top_values=self.top_values.cpu().numpy(),
            top_ids=self.top_ids.cpu().numpy(),
            final_top_ids=self.final_top_ids.cpu().numpy(),
        )

    def _leave_out_own(self, first: int, lens: Tensor, final: Tensor) -> None:
        own = self.ids[OWN] - first
        inside = ((own >= 0) & (own < lens.shape[-1])).nonzero()[:, 0]
        if len(inside):
            columns = own[inside]
            self.final[inside, -1] = final[inside, columns].to(torch.float64)
            self.lens[:, inside, -1] = lens[:, inside, columns].to(torch.float64)
            lens[:, inside, columns] = ABSENT
            final[inside, columns] = ABSENT

    def _add(self, lens: Tensor, final: Tensor) -> None:
        offset, shift, bits, powers = self._powers(self.lens[..., 0], lens)
        final_offset, final_shift, _, weights = self._powers(self.final[..., 0], final)
        shrink, final_shrink = torch.exp2(shift), torch.exp2(final_shift)
        self.final[..., 1] = final_shrink * self.final[..., 1] + weights.sum(-1)
        self.final[..., 0] = final_offset
        difference = final - lens
        _, total, moment, squares, final_cross, lens_cross, _ = self.lens.unbind(-1)
        moment.copy_(shrink * (moment + shift * total) + (powers * bits).sum(-1))
        total.copy_(shrink * total + powers.sum(-1))
        squares.copy_(shrink**2 * squares + powers.square().sum(-1))
        final_cross.copy_(final_shrink * final_cross + _weighted(weights, difference))
        lens_cross.copy_(shrink * lens_cross + _weighted(powers, difference))
        self.lens[..., 0] = offset

    def _powers(self, old: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """New offset, shift of older sums, bits below the offset (clamped), and their powers."""
        highest = logits.amax(-1).to(torch.float64) * self.SCALE
        new = torch.where(highest > ABSENT, torch.maximum(old, highest), old)
        reference = torch.where(new == -torch.inf, 0.0, new)
        shift = torch.where(old == -torch.inf, 0.0, old - reference)
        # The offset is in bits, the maximum in logits: subtracted there, large logits lose nothing.
        below = logits - (reference / self.SCALE).to(torch.float32)[..., None]
        bits = (below * self.SCALE).clamp_(min=UNDERFLOW_BITS)
        powers = torch.exp2(bits).masked_fill_(bits <= UNDERFLOW_BITS, 0.0)
        return new, shift, bits, powers

    def _count(self, first: int, lens: Tensor) -> None:
        width = lens.shape[-1]
        for row in (TARGET, FINAL_TOP):
            threshold, above = self.thresholds[row], self.above[row]
            above += (lens > threshold[..., None]).sum(-1)
            place = self.ids[row] - first
            inside = (place >= 0) & (place < width)
            column = place.clamp(0, width - 1)[None, :, None].expand(lens.shape[0], -1, 1)
            itself = lens.gather(-1, column)[..., 0]
            above -= ((itself > threshold) & inside).to(torch.int64)

    def _candidates(self, first: int, lens: Tensor) -> None:
        """Keep the best logits, best first; a tie goes to the lower id.

        The k best of a tile lie in the k blocks of best maximum, earlier blocks first at a tie.
        """
        top_k, width = self.top_ids.shape[-1], lens.shape[-1]
        padding = -width % BLOCK_TOKENS
        blocks = torch.nn.functional.pad(lens, (0, padding), value=-torch.inf) if padding else lens
        blocks = blocks.unflatten(-1, (-1, BLOCK_TOKENS))
        best = blocks.amax(-1)
        rows = (best >= self.top_values[..., -1:]).any(-1).nonzero(as_tuple=True)
        if not len(rows[0]):
            return
        chosen = best[rows].argsort(dim=-1, descending=True, stable=True)[:, :top_k]
        values = blocks[rows].gather(1, chosen[..., None].expand(-1, -1, BLOCK_TOKENS)).flatten(1)
        ids = chosen[..., None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS, device=lens.device)
        ids = torch.where(ids < width, ids + first, NOT_FOUND).flatten(1)
        values = torch.cat([self.top_values[rows], values], dim=1)
        ids = torch.cat([self.top_ids[rows], ids], dim=1)
        ids, order = ids.sort(dim=1, stable=True)
        values = values.gather(1, order).nan_to_num_(
            nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf
        )
        values, order = values.sort(dim=1, descending=True, stable=True)
        self.top_values[rows] = values[:, :top_k]
        self.top_ids[rows] = ids.gather(1, order)[:, :top_k]


def _places(logits: Tensor) -> Tensor:
    return torch.arange(logits.shape[-1], device=logits.device)


def _weighted(weights: Tensor, difference: Tensor) -> Tensor:
    """Sums of weights times differences over a tile; a weight of 0 counts 0 even against inf."""
    sums = (weights * difference).sum(-1)
    if torch.isfinite(sums).all():
        return sums
    return (weights * torch.where(weights == 0, 0.0, difference)).sum(-1)
