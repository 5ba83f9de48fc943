"""Tiles of logits -> running sums, in torch alone: other devices, and CPUs without numba.

Each operation is one pass over a tile, so there are as few as can be, into two buffers that are
used again. Products do the weighted sums.
"""

import math

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from lens.lenses.sums import FINAL_TOP, NOT_FOUND, OWN, TARGET, Sums, empty_sums

BLOCK_TOKENS = 64
"""A block of this many tokens is searched for top-k only where its maximum beats the k-th best."""

ABSENT = -1e30
"""Stands in a tile where the own token was while maxima are sought."""

UNDERFLOW_NATS = -43.0
"""An exponential below this counts as 0, even against an infinity.

e^-43 of a million tokens is no part of a float32 sum; squares of less would be denormal, and each
denormal costs a processor a hundred cycles.
"""


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
        self.best = Best(n_layers * n_positions, top_k, device)
        self.final_best = Best(n_positions, 1, device)
        self._buffers = torch.empty(2, 0, device=device)

    def update(
        self, first: int, lens: Float[Tensor, "layer pos tile"], final: Float[Tensor, "pos tile"]
    ) -> None:
        """Take in the logits of the tokens from id `first` on; own tokens are overwritten."""
        if self._buffers.shape[1] < lens.numel():
            self._buffers = torch.empty(2, lens.numel(), device=lens.device)
        self._count(first, lens)
        self.best.update(first, rearrange(lens, "l p v -> (l p) v"))
        self.final_best.update(first, final)
        self._add(lens, final, self._leave_out_own(first, lens, final))

    def sums(self) -> Sums:
        """What the tiles so far add up to."""
        n_layers = self.lens.shape[0]
        self.best.settle()
        self.final_best.settle()
        values = rearrange(self.best.values, "(l p) k -> l p k", l=n_layers)
        tokens = rearrange(self.best.tokens, "(l p) k -> l p k", l=n_layers)
        return Sums(
            scale=self.SCALE,
            lens=self.lens.cpu().numpy(),
            final=self.final.cpu().numpy(),
            ids=self.ids.cpu().numpy(),
            thresholds=self.thresholds.cpu().numpy(),
            above=self.above.cpu().numpy(),
            top_values=values.cpu().numpy(),
            top_ids=tokens.cpu().numpy(),
            final_top_ids=self.final_best.tokens[:, 0].cpu().numpy(),
        )

    def _buffer(self, number: int, like: Tensor) -> Tensor:
        return self._buffers[number, : like.numel()].view(like.shape)

    def _count(self, first: int, lens: Tensor) -> None:
        width = lens.shape[-1]
        for row in (TARGET, FINAL_TOP):
            # Into floats: a comparison into booleans is three times slower on a CPU.
            over = torch.gt(lens, self.thresholds[row][..., None], out=self._buffer(0, lens))
            place = self.ids[row] - first
            inside = ((place >= 0) & (place < width)).nonzero()[:, 0]
            over[:, inside, place[inside]] = 0.0
            self.above[row] += over.sum(-1).to(torch.int64)

    def _leave_out_own(self, first: int, lens: Tensor, final: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the own tokens' logits and take them out; gives their positions and columns."""
        own = self.ids[OWN] - first
        inside = ((own >= 0) & (own < lens.shape[-1])).nonzero()[:, 0]
        columns = own[inside]
        if len(inside):
            self.final[inside, -1] = final[inside, columns].to(torch.float64)
            self.lens[:, inside, -1] = lens[:, inside, columns].to(torch.float64)
            lens[:, inside, columns] = ABSENT
            final[inside, columns] = ABSENT
        return inside, columns

    def _add(self, lens: Tensor, final: Tensor, absent: tuple[Tensor, Tensor]) -> None:
        """With d = z - offset and e = exp(d): sums of e, e d, e^2, and of w d and e df across."""
        offset, shift, nats = _advance(self.lens[..., 0], lens, self.SCALE)
        final_offset, final_shift, final_nats = _advance(self.final[..., 0], final, self.SCALE)
        inside, columns = absent
        if len(inside):
            # Low enough to count nothing, and not so low that a product notices.
            lens[:, inside, columns] = (nats[:, inside] + 2 * UNDERFLOW_NATS).to(torch.float32)
            final[inside, columns] = (final_nats[inside] + 2 * UNDERFLOW_NATS).to(torch.float32)
        below = torch.sub(lens, nats.to(torch.float32)[..., None], out=self._buffer(0, lens))
        final_below = final - final_nats.to(torch.float32)[:, None]
        weights = torch.exp(final_below.clamp(min=UNDERFLOW_NATS))
        cross = torch.bmm(rearrange(below, "l p v -> p l v"), weights[..., None])[..., 0].T
        powers = torch.exp(below.clamp_(min=UNDERFLOW_NATS), out=self._buffer(1, lens))
        reverse = torch.bmm(rearrange(powers, "l p v -> p l v"), final_below[..., None])[..., 0].T
        # The total is no product: a product adds in one long row, with fifty times the error.
        total, moment = powers.sum(-1), below.mul_(powers).sum(-1)
        squares = powers.mul_(powers).sum(-1)  # vector_norm takes twice as long
        final_sums = torch.stack([weights.sum(-1), (weights * final_below).sum(-1)])
        final_total, final_moment = final_sums.to(torch.float64).unbind(0)
        sums = torch.stack([total, moment, squares, cross, reverse], dim=-1).to(torch.float64)
        apart = final_nats - nats
        sums[..., 3] = final_moment - sums[..., 3] + apart * final_total
        sums[..., 4] += apart * sums[..., 0] - sums[..., 1]
        sound = torch.isfinite(sums.sum(-1))
        if not sound.all():
            slow = _with_infinities(lens, final, nats, final_nats)
            sums[..., [1, 3, 4]] = torch.where(sound[..., None], sums[..., [1, 3, 4]], slow)
        sums[..., 1] *= self.SCALE
        shrink, final_shrink = torch.exp2(shift), torch.exp2(final_shift)
        self.lens[..., 2] += shift * self.lens[..., 1]
        self.lens[..., 1:6] *= torch.stack(
            [shrink, shrink, shrink**2, final_shrink.expand_as(shrink), shrink], dim=-1
        )
        self.lens[..., 1:6] += sums
        self.lens[..., 0] = offset
        self.final[..., 1] = final_shrink * self.final[..., 1] + final_total
        self.final[..., 0] = final_offset


class Best:
    """The k best logits of each row so far, best first; a tie goes to the lower id.

    Candidates are set aside and merged after 1, 2, 4, 8 ... tiles: the later, the fewer there are.
    """

    def __init__(self, n_rows: int, top_k: int, device: torch.device):
        self.values = torch.full((n_rows, top_k), -torch.inf, device=device)
        self.tokens = torch.full((n_rows, top_k), NOT_FOUND, dtype=torch.int64, device=device)
        self._aside: list[tuple[Tensor, Tensor, Tensor]] = []
        self._seen, self._merge_at = 0, 1

    def update(self, first: int, logits: Float[Tensor, "pos tile"]) -> None:
        """Look only into the blocks whose maximum reaches the worst that is kept."""
        width = logits.shape[-1]
        padding = -width % BLOCK_TOKENS
        if padding:
            logits = torch.nn.functional.pad(logits, (0, padding), value=-torch.inf)
        blocks = rearrange(logits, "p (b v) -> p b v", v=BLOCK_TOKENS)
        highest = blocks.amax(-1)
        worst, top_k = self.values[:, -1], self.values.shape[1]
        if first == 0 and highest.shape[1] >= top_k:
            # k blocks hold k logits at least as high as the k-th best of their maxima.
            worst = highest.topk(top_k).values[:, -1]
        rows, block = (highest >= worst[:, None]).nonzero(as_tuple=True)
        values = blocks[rows, block]
        pair, column = (values >= worst[rows, None]).nonzero(as_tuple=True)
        places = block[pair] * BLOCK_TOKENS + column
        if padding:
            real = places < width
            pair, column, places = pair[real], column[real], places[real]
        self._aside.append((rows[pair], values[pair, column], places + first))
        self._seen += 1
        if self._seen == self._merge_at:
            self._merge_at *= 2
            self.settle()

    def settle(self) -> None:
        """Merge what was set aside; before this, values and tokens are of some tiles ago."""
        if not self._aside:
            return
        rows, values, tokens = (torch.cat(parts) for parts in zip(*self._aside, strict=True))
        self._aside.clear()
        if len(rows):
            rows, order = rows.sort(stable=True)
            self._merge(rows, values[order], tokens[order])

    def _merge(self, rows: Tensor, values: Tensor, tokens: Tensor) -> None:
        """Take in single logits, given by rising row and rising token."""
        counts = torch.bincount(rows, minlength=len(self.values))
        touched = counts.nonzero()[:, 0]
        places = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
        shape = (len(self.values), int(counts.max()))
        new_values = torch.full(shape, -torch.inf, device=values.device)
        new_tokens = torch.full(shape, NOT_FOUND, device=values.device)
        new_values[rows, places], new_tokens[rows, places] = values, tokens
        values = torch.cat([self.values[touched], new_values[touched]], dim=1)
        tokens = torch.cat([self.tokens[touched], new_tokens[touched]], dim=1)
        for place in range(self.values.shape[1]):
            best = values.amax(-1, keepdim=True)
            token = torch.where(values == best, tokens, NOT_FOUND).amin(-1, keepdim=True)
            self.values[touched, place], self.tokens[touched, place] = best[:, 0], token[:, 0]
            taken = tokens == token
            values.masked_fill_(taken, -torch.inf)
            tokens.masked_fill_(taken, NOT_FOUND)


def _advance(old: Tensor, logits: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """The new offset in bits, how far older sums shift, and the offset in nats, finite."""
    highest = logits.amax(-1).to(torch.float64) * scale
    new = torch.where(highest > ABSENT, torch.maximum(old, highest), old)
    reference = torch.where(new == -torch.inf, 0.0, new)
    shift = torch.where(old == -torch.inf, 0.0, old - reference)
    return new, shift, reference / scale


def _with_infinities(
    lens: Tensor, final: Tensor, nats: Tensor, final_nats: Tensor
) -> Float[Tensor, "layer pos 3"]:
    """The sums e d, w (zf - z) and e (zf - z) where a probability of 0 meets an infinity."""
    below = lens - nats[..., None]
    final_below = (final - final_nats[:, None]).expand_as(below)
    difference = final.to(torch.float64) - lens
    powers, weights = torch.exp(below), torch.exp(final_below)
    powers.masked_fill_(below < UNDERFLOW_NATS, 0.0)
    weights = weights.masked_fill(final_below < UNDERFLOW_NATS, 0.0)
    sums = (
        (powers * torch.where(powers == 0, 0.0, below)).sum(-1),
        (weights * torch.where(weights == 0, 0.0, difference)).sum(-1),
        (powers * torch.where(powers == 0, 0.0, difference)).sum(-1),
    )
    return torch.stack([each.to(torch.float64) for each in sums], dim=-1)
