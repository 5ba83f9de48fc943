"""Tiles of logits -> running sums, in torch: the path of every device, and of CPUs without numba.

A tile holds the logits of a few hundred tokens for all rows [layer, pos] of a chunk, and those of
the model's own final rows [pos], so that KL(final || lens) needs no stored distribution. Sums run
in float64 across tiles.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

BLOCK_TOKENS = 64
"""A block of this many tokens is searched for top-k only where its maximum beats the k-th best."""

UNDERFLOW_NATS = -104.0
"""Below this a float32 exponential is 0: clamping there changes no sum, and makes -inf safe."""


class TorchReduction:
    """Running top-k, log-sum-exp, entropy, cross terms and counts over the tiles of one chunk.

    `ids` [chosen, pos] are tokens whose rank is counted, with their logits `thresholds`
    [chosen, layer, pos]; -1 counts nothing. The last of `ids` is the position's own token, left
    out of `rest_nats`.
    """

    def __init__(
        self,
        *,
        n_layers: int,
        n_positions: int,
        top_k: int,
        ids: Int[Tensor, "chosen pos"],
        thresholds: Float[Tensor, "chosen layer pos"],
    ):
        device = thresholds.device
        shape = (n_layers, n_positions)
        self.ids = ids
        self.thresholds = thresholds
        self.lens = _Normaliser(shape, device)
        self.final = _Normaliser((n_positions,), device)
        self.final_cross = torch.zeros(shape, dtype=torch.float64, device=device)
        self.lens_cross = torch.zeros(shape, dtype=torch.float64, device=device)
        self.squares = torch.zeros(shape, dtype=torch.float64, device=device)
        self.rest = _Normaliser(shape, device)
        self.final_best = torch.full((n_positions,), -torch.inf, device=device)
        self.final_top_ids = torch.full((n_positions,), -1, dtype=torch.int64, device=device)
        self.above = torch.zeros(thresholds.shape, dtype=torch.int64, device=device)
        self.top_values = torch.full((*shape, top_k), -torch.inf, device=device)
        self.top_ids = torch.full((*shape, top_k), -1, dtype=torch.int64, device=device)

    def update(
        self, first: int, lens: Float[Tensor, "layer pos tile"], final: Float[Tensor, "pos tile"]
    ) -> None:
        """Take in the logits of the tokens from id `first` on."""
        self._count(first, lens)
        self._candidates(first, lens)
        best, place = final.max(-1)
        better = best > self.final_best
        self.final_best = torch.where(better, best, self.final_best)
        self.final_top_ids = torch.where(better, place + first, self.final_top_ids)
        weights, final_shrink = self.final.update(final)
        exponentials, shrink = self.lens.update(lens)
        difference = final - lens
        self.final_cross.mul_(final_shrink).add_(_weighted(weights, difference))
        self.lens_cross.mul_(shrink).sub_(_weighted(exponentials, difference))
        self.squares.mul_(shrink**2).add_(exponentials.square().sum(-1))
        self._leave_out_own(first, lens)

    def _leave_out_own(self, first: int, lens: Tensor) -> None:
        own = self.ids[-1] - first
        inside = ((own >= 0) & (own < lens.shape[-1])).nonzero()[:, 0]
        if len(inside):
            lens = lens.clone()
            lens[:, inside, own[inside]] = -torch.inf
        self.rest.update(lens)

    def _count(self, first: int, lens: Tensor) -> None:
        width = lens.shape[-1]
        for chosen, threshold, above in zip(self.ids, self.thresholds, self.above, strict=True):
            above += (lens > threshold[..., None]).sum(-1)
            place = chosen - first
            inside = (place >= 0) & (place < width)
            column = place.clamp(0, width - 1)[None, :, None].expand(lens.shape[0], -1, 1)
            own = lens.gather(-1, column)[..., 0]
            above -= ((own > threshold) & inside).to(torch.int64)

    def _candidates(self, first: int, lens: Tensor) -> None:
        top_k = self.top_ids.shape[-1]
        width = lens.shape[-1]
        padding = -width % BLOCK_TOKENS
        blocks = torch.nn.functional.pad(lens, (0, padding), value=-torch.inf) if padding else lens
        blocks = blocks.unflatten(-1, (-1, BLOCK_TOKENS))
        best = blocks.amax(-1)
        # -inf must still fill an empty place, so that k ids are always distinct tokens.
        worst, vacant = self.top_values[..., -1], self.top_ids[..., -1] < 0
        rows = ((best > worst[..., None]).any(-1) | vacant).nonzero(as_tuple=True)
        if not len(rows[0]):
            return
        # The k best elements lie in the k blocks of best maximum, earlier blocks first at a tie.
        chosen = best[rows].argsort(dim=-1, descending=True, stable=True)[:, :top_k]
        chosen = chosen.sort(dim=-1).values
        values = blocks[rows].gather(1, chosen[..., None].expand(-1, -1, BLOCK_TOKENS)).flatten(1)
        places = chosen[..., None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS, device=lens.device)
        ids = places.flatten(1)
        values = values.masked_fill(ids >= width, -torch.inf)
        ids = torch.where(ids < width, ids + first, torch.iinfo(torch.int64).max)
        values = torch.cat([self.top_values[rows], values], dim=1)
        ids = torch.cat([self.top_ids[rows], ids], dim=1)
        # Vacant places (-1) sort last, real -inf logits before them and before padding.
        ids = torch.where(ids < 0, torch.iinfo(torch.int64).max, ids)
        real = ids != torch.iinfo(torch.int64).max
        order = _best_first(values, real)[:, :top_k]
        ids = ids.gather(1, order)
        self.top_values[rows] = values.gather(1, order)
        self.top_ids[rows] = torch.where(real.gather(1, order), ids, -1)


class _Normaliser:
    """A running maximum m, sum e^(x-m) and sum e^(x-m) (x-m)."""

    def __init__(self, shape: tuple[int, ...], device: torch.device):
        self.maximum = torch.full(shape, -torch.inf, dtype=torch.float64, device=device)
        self.total = torch.zeros(shape, dtype=torch.float64, device=device)
        self.moment = torch.zeros(shape, dtype=torch.float64, device=device)

    def update(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Take in a tile; gives its exponentials, and by what factor older sums shrank."""
        maximum = torch.maximum(self.maximum, logits.amax(-1).to(torch.float64))
        reference = torch.where(maximum == -torch.inf, 0.0, maximum)
        shift = torch.where(self.maximum == -torch.inf, 0.0, self.maximum - reference)
        shrink = torch.exp(shift)
        below = (logits - reference.to(torch.float32)[..., None]).clamp_(min=UNDERFLOW_NATS)
        exponentials = torch.exp(below)
        # At the clamp the exponential is denormal, not 0; it stands for -inf as well.
        exponentials.masked_fill_(below <= UNDERFLOW_NATS, 0.0)
        self.moment = shrink * (self.moment + shift * self.total)
        self.moment += (exponentials * below).sum(-1)
        self.total = shrink * self.total + exponentials.sum(-1)
        self.maximum = maximum
        return exponentials, shrink

    @property
    def lse_nats(self) -> Tensor:
        """The log-sum-exp of all logits so far."""
        return torch.log(self.total) + self.maximum

    @property
    def entropy_nats(self) -> Tensor:
        """The entropy of the softmax of all logits so far."""
        return torch.log(self.total) - self.moment / self.total


def _weighted(weights: Tensor, difference: Tensor) -> Tensor:
    """Sums of weights times differences over a tile; a weight of 0 counts 0 even against inf."""
    sums = (weights * difference).sum(-1)
    if torch.isfinite(sums).all():
        return sums
    weights = weights.expand_as(difference)
    return (weights * torch.where(weights == 0, 0.0, difference)).sum(-1)


def _best_first(values: Tensor, real: Tensor) -> Tensor:
    """An order by value, falling; among equals the given order, with unreal entries last.

    NaN is not better than anything: it stands after -inf.
    """
    order = torch.where(real, 0, 1).argsort(dim=-1, stable=True)
    ranked = torch.nan_to_num(values, nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    ranked = ranked.gather(1, order)
    return order.gather(1, ranked.argsort(dim=-1, descending=True, stable=True))
