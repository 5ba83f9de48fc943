"""Tiles of logits -> running sums, in torch alone: other devices, and CPUs without numba.

Each operation is one pass over a tile, so there are as few as can be. On a CPU a pass over a whole
tile runs from the memory beside the core: there the passes run block by block of rows that the
cache holds, and what is small is done once a tile, as every call costs as much as a row.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from lens.lenses.best import BLOCK_TOKENS, Best, block_count, block_maxima
from lens.lenses.sums import (
    FINAL_CROSS,
    FINAL_TOP,
    LENS_CROSS,
    MOMENT,
    OFFSET,
    OWN,
    OWN_LOGIT,
    TARGET,
    TOTAL,
    Sums,
    empty_sums,
)

CACHED_LOGITS = 2**17
"""Logits of a block of rows on a CPU: 512 KiB, beside two buffers of that size."""

ABSENT = -1e30
"""Stands in a tile where the own token was while maxima are sought."""

UNDERFLOW_BITS = -62.0
"""A power of two below this counts as 0, even against an infinity.

2^-62 of a million tokens is no part of a float32 sum; squares of less would be denormal, and each
denormal costs a processor a hundred cycles.
"""

SUMS = slice(TOTAL, LENS_CROSS + 1)
"""What is summed over tokens."""


class TorchReduction:
    """The sums of one chunk on any device."""

    SCALE = float(np.float32(1 / math.log(2)))
    """Bits per unit of logit: a float32, as logits are multiplied by it in float32."""

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
        self.lens = _empty_planes(7, n_layers, n_positions, device=device)
        self.final = _empty_planes(3, n_positions, device=device)
        self.above = torch.zeros(thresholds.shape, dtype=torch.int64, device=device)
        self.best = Best(n_layers * n_positions, top_k, device)
        self.final_best = Best(n_positions, 1, device)
        self._places = ids.cpu().numpy()
        self._scratch: dict[int, Scratch] = {}

    def update(
        self, first: int, lens: Float[Tensor, "layer pos tile"], final: Float[Tensor, "pos tile"]
    ) -> None:
        """Take in the logits of the tokens from id `first` on; own tokens are overwritten."""
        width = lens.shape[-1]
        if width not in self._scratch:
            self._scratch[width] = Scratch(self.thresholds, width)
        scratch = self._scratch[width]
        self._count(first, lens, scratch)
        highest = rearrange(scratch.highest, "l p b -> (l p) b")
        self.best.update(first, rearrange(lens, "l p v -> (l p) v"), highest)
        self.final_best.update(first, final, block_maxima(final))
        own = self._inside(OWN, first, width)
        if len(own[0]):
            self._leave_out(own, lens, final, scratch.highest)
        self._add(own, lens, final, scratch)

    def sums(self) -> Sums:
        """What the tiles so far add up to."""
        n_layers = self.lens.shape[1]
        self.best.settle()
        self.final_best.settle()
        values = rearrange(self.best.values, "(l p) k -> l p k", l=n_layers)
        tokens = rearrange(self.best.tokens, "(l p) k -> l p k", l=n_layers)
        return Sums(
            scale=self.SCALE,
            lens=rearrange(self.lens, "n l p -> l p n").cpu().numpy(),
            final=rearrange(self.final, "n p -> p n").cpu().numpy(),
            ids=self.ids.cpu().numpy(),
            thresholds=self.thresholds.cpu().numpy(),
            above=self.above.cpu().numpy(),
            top_values=values.cpu().numpy(),
            top_ids=tokens.cpu().numpy(),
            final_top_ids=self.final_best.tokens[:, 0].cpu().numpy(),
        )

    def _inside(self, row: int, first: int, width: int) -> tuple[Tensor, Tensor]:
        """Positions whose followed token is in the tile, and its column."""
        columns = self._places[row] - first
        positions = np.flatnonzero((columns >= 0) & (columns < width))
        device = self.ids.device
        return (
            torch.from_numpy(positions).to(device),
            torch.from_numpy(columns[positions]).to(device),
        )

    def _count(self, first: int, lens: Float[Tensor, "layer pos tile"], scratch: "Scratch") -> None:
        """Count the logits above the thresholds, but for the token itself; find block maxima."""
        for block in scratch.blocks:
            logits = lens[block.rows]
            block_maxima(logits, out=block.highest)
            for row in (TARGET, FINAL_TOP):
                # Into floats: a comparison into booleans is four times slower on a CPU.
                torch.gt(logits, block.thresholds[row], out=block.below)
                torch.sum(block.below, -1, out=block.counts[row])
        self.above += scratch.counts.to(torch.int64)
        for row in (TARGET, FINAL_TOP):
            positions, columns = self._inside(row, first, lens.shape[-1])
            if len(positions):
                itself = lens[:, positions, columns] > self.thresholds[row][:, positions]
                self.above[row][:, positions] -= itself.to(torch.int64)

    def _leave_out(
        self, own: tuple[Tensor, Tensor], lens: Tensor, final: Tensor, highest: Tensor
    ) -> None:
        """Keep the own tokens' logits and take them out, also of their blocks' maxima."""
        positions, columns = own
        self.final[-1, positions] = final[positions, columns].to(torch.float64)
        self.lens[OWN_LOGIT, :, positions] = lens[:, positions, columns].to(torch.float64)
        lens[:, positions, columns] = ABSENT
        final[positions, columns] = ABSENT
        blocks = columns // BLOCK_TOKENS
        around = torch.arange(BLOCK_TOKENS, device=columns.device) + blocks[:, None] * BLOCK_TOKENS
        around = around.clamp(max=lens.shape[-1] - 1)
        highest[:, positions, blocks] = lens[:, positions[:, None], around].amax(-1)

    def _add(
        self,
        own: tuple[Tensor, Tensor],
        lens: Float[Tensor, "layer pos tile"],
        final: Float[Tensor, "pos tile"],
        scratch: "Scratch",
    ) -> None:
        """Add the sums of a tile to those before."""
        offset, shift, reference = _advance(self.lens[OFFSET], scratch.highest.amax(-1), self.SCALE)
        final_offset, final_shift, final_reference = _advance(
            self.final[OFFSET], final.amax(-1), self.SCALE
        )
        positions, columns = own
        if len(positions):
            # Low enough to count nothing, and not so low that a product notices.
            low = (reference + 2 * UNDERFLOW_BITS) / self.SCALE
            final_low = (final_reference + 2 * UNDERFLOW_BITS) / self.SCALE
            lens[:, positions, columns] = low[:, positions].to(torch.float32)
            final[positions, columns] = final_low[positions].to(torch.float32)
        final_total, final_moment = self._weigh(final, final_reference, scratch)
        sums = self._sums(lens, reference, scratch)
        total, moment, _, cross, reverse = sums
        apart = final_reference - reference
        torch.sub(final_moment + apart * final_total, cross, out=cross)
        reverse += apart * total - moment
        sums[FINAL_CROSS - TOTAL :] /= self.SCALE
        sound = torch.isfinite(sums.sum(0))
        if not sound.all():
            slow = self._with_infinities(lens, final, reference, final_reference)
            for row, sum_ in zip((moment, cross, reverse), slow, strict=True):
                row.copy_(torch.where(sound, row, sum_))
        shrink, final_shrink = torch.exp2(shift), torch.exp2(final_shift)
        self.lens[MOMENT] += shift * self.lens[TOTAL]
        self.lens[SUMS] *= torch.stack(
            [shrink, shrink, shrink**2, final_shrink.expand_as(shrink), shrink]
        )
        self.lens[SUMS] += sums
        self.lens[OFFSET] = offset
        self.final[TOTAL] = final_shrink * self.final[TOTAL] + final_total
        self.final[OFFSET] = final_offset

    def _weigh(
        self, final: Float[Tensor, "pos tile"], reference: Float[Tensor, " pos"], scratch: "Scratch"
    ) -> tuple[Float[Tensor, " pos"], Float[Tensor, " pos"]]:
        """Powers w = 2^t of the final rows, kept with t; gives the sums of w and w t."""
        below, weights = scratch.final_below, scratch.final_weights
        negative = -reference.to(torch.float32)[:, None]
        torch.add(negative, final, alpha=self.SCALE, out=below)
        torch.exp2(below.clamp(min=UNDERFLOW_BITS), out=weights)
        return weights.sum(-1).to(torch.float64), (weights * below).sum(-1).to(torch.float64)

    def _sums(
        self,
        lens: Float[Tensor, "layer pos tile"],
        reference: Float[Tensor, "layer pos"],
        scratch: "Scratch",
    ) -> Float[Tensor, "5 layer pos"]:
        """With t = z scale - reference and e = 2^t: sums of e, e t, e^2, w t and e tf."""
        scratch.negative.copy_(-reference[..., None])
        for block in scratch.blocks:
            below, powers = block.below, block.powers
            total, moment, squares, cross, reverse = block.sums
            torch.add(block.negative, lens[block.rows], alpha=self.SCALE, out=below)
            _dot(below, block.final_weights, out=cross, spare=powers)
            torch.exp2(below.clamp_(min=UNDERFLOW_BITS), out=powers)
            torch.sum(powers, -1, out=total)
            _dot(below, powers, out=moment, spare=below)
            _dot(powers, block.final_below, out=reverse, spare=below)
            _dot(powers, powers, out=squares, spare=below)
        return scratch.sums.to(torch.float64)

    def _with_infinities(
        self, lens: Tensor, final: Tensor, reference: Tensor, final_reference: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The sums e t, w (zf - z) and e (zf - z) where a probability of 0 meets an infinity."""
        below = lens * self.SCALE - reference[..., None]
        final_below = (final * self.SCALE - final_reference[:, None]).expand_as(below)
        difference = final.to(torch.float64) - lens
        powers, weights = torch.exp2(below), torch.exp2(final_below)
        powers.masked_fill_(below < UNDERFLOW_BITS, 0.0)
        weights = weights.masked_fill(final_below < UNDERFLOW_BITS, 0.0)
        return (
            (powers * torch.where(powers == 0, 0.0, below)).sum(-1),
            (weights * torch.where(weights == 0, 0.0, difference)).sum(-1),
            (powers * torch.where(powers == 0, 0.0, difference)).sum(-1),
        )


class Scratch:
    """What is computed for each tile of one width, in memory that is used again."""

    def __init__(self, thresholds: Float[Tensor, "2 layer pos"], width: int):
        _, n_layers, n_positions = thresholds.shape
        like = {"dtype": torch.float32, "device": thresholds.device}
        self.highest = torch.empty(n_layers, n_positions, block_count(width), **like)
        self.counts = torch.empty(2, n_layers, n_positions, **like)
        self.negative = torch.empty(n_layers, n_positions, 1, **like)
        self.sums = torch.empty(5, n_layers, n_positions, **like)
        self.final_weights = torch.empty(n_positions, width, **like)
        self.final_below = torch.empty(n_positions, width, **like)
        self.blocks = self._blocks(thresholds, width)

    def _blocks(self, thresholds: Float[Tensor, "2 layer pos"], width: int) -> list["Block"]:
        """All rows in one block, but on a CPU as many as its cache holds."""
        _, n_layers, n_positions = thresholds.shape
        on_cpu = thresholds.device.type == "cpu"
        most = max(1, CACHED_LOGITS // width) if on_cpu else n_layers * n_positions
        layers, positions = min(n_layers, max(1, most // n_positions)), min(n_positions, most)
        size = layers * positions * width
        buffers = torch.empty(2, size, dtype=torch.float32, device=thresholds.device)
        blocks = []
        for layer in range(0, n_layers, layers):
            for position in range(0, n_positions, positions):
                rows = slice(layer, layer + layers), slice(position, position + positions)
                shape = (*self.sums[0][rows].shape, width)
                size = math.prod(shape)
                below, powers = (buffer[:size].view(shape) for buffer in buffers)
                blocks.append(
                    Block(
                        rows=rows,
                        thresholds=thresholds[(slice(None), *rows)][..., None],
                        highest=self.highest[rows],
                        counts=self.counts[(slice(None), *rows)],
                        negative=self.negative[rows],
                        sums=self.sums[(slice(None), *rows)],
                        below=below,
                        powers=powers,
                        final_weights=self.final_weights[rows[1]],
                        final_below=self.final_below[rows[1]],
                    )
                )
        return blocks


@dataclass(frozen=True, kw_only=True)
class Block:
    """Rows of a tile that are worked on together, with views of what belongs to them.

    `below` and `powers` are t and 2^t of these rows, overwritten by the next block;
    `final_weights` and `final_below` are w and t of the final rows at their positions.
    """

    rows: tuple[slice, slice]
    thresholds: Float[Tensor, "2 layer pos 1"]
    highest: Float[Tensor, "layer pos block"]
    counts: Float[Tensor, "2 layer pos"]
    negative: Float[Tensor, "layer pos 1"]
    sums: Float[Tensor, "5 layer pos"]
    below: Float[Tensor, "layer pos tile"]
    powers: Float[Tensor, "layer pos tile"]
    final_weights: Float[Tensor, "pos tile"]
    final_below: Float[Tensor, "pos tile"]


def _empty_planes(n_sums: int, *cells: int, device: torch.device) -> Tensor:
    sums = torch.from_numpy(empty_sums(*cells, columns=n_sums)).to(device)
    return rearrange(sums, "... n -> n ...").contiguous()


def _dot(
    a: Float[Tensor, "layer pos tile"],
    b: Float[Tensor, "*layer pos tile"],
    *,
    out: Float[Tensor, "layer pos"],
    spare: Float[Tensor, "layer pos tile"],
) -> None:
    """Sums over the tile of a b, into `out`; `spare` may be overwritten, and may be `a`.

    On a CPU numpy hands each row to one scalar product, which writes nothing else. Torch's own
    batched product is several times slower where it has a row and a vector.
    """
    if a.device.type == "cpu":
        np.vecdot(a.numpy(), b.numpy(), out=out.numpy())
    else:
        torch.sum(torch.mul(a, b, out=spare), -1, out=out)


def _advance(
    old: Tensor, highest: Float[Tensor, "*row"], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The new offset in bits, how far older sums shift, and the offset where it is finite."""
    highest = (highest * scale).to(torch.float64)
    new = torch.where(highest > ABSENT, torch.maximum(old, highest), old)
    reference = torch.where(new == -torch.inf, 0.0, new)
    shift = torch.where(old == -torch.inf, 0.0, old - reference)
    return new, shift, reference
