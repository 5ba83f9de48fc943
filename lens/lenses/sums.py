"""What one pass over the vocabulary leaves of each row, and the numbers that follow from it.

A row's own input token x is left out of every sum during the pass and added here: so log(1 - q(x))
and the copy split stay exact where q(x) rounds to 1. With t = z * scale - offset, the sums over
v != x are of 2^t, 2^t t, 4^t, 2^t (zf - z) and w (zf - z), w = 2^(zf * scale - final offset).
"""

import math
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float, Int

NATS_TO_BITS = 1.0 / math.log(2.0)

NOT_FOUND = 2**62
"""The id of an empty place among the best: it loses every tie."""

TARGET, FINAL_TOP, OWN = 0, 1, 2
"""Rows of `ids`: the target, the final top-1 and the own input token."""

OFFSET, TOTAL, MOMENT, SQUARES, FINAL_CROSS, LENS_CROSS, OWN_LOGIT = range(7)
"""Columns of `lens`; the first two and, third, the own logit are also those of `final`."""

Cells = Float[np.ndarray, "layer pos"]


def empty_sums(*cells: int, columns: int) -> np.ndarray:
    """Sums over no tokens: an offset of -inf, zeros, and no own logit (NaN)."""
    sums = np.zeros((*cells, columns))
    sums[..., OFFSET] = -np.inf
    sums[..., -1] = np.nan
    return sums


@dataclass(frozen=True, eq=False)
class Sums:
    """The sums of one chunk after the last tile; `scale` is the bits per unit of logit.

    `thresholds` are the logits of `ids[:2]`, `above` how many other tokens beat them.
    """

    scale: float
    lens: Float[np.ndarray, "layer pos 7"]
    final: Float[np.ndarray, "pos 3"]
    ids: Int[np.ndarray, "3 pos"]
    thresholds: Float[np.ndarray, "2 layer pos"]
    above: Int[np.ndarray, "2 layer pos"]
    top_values: Float[np.ndarray, "layer pos k"]
    top_ids: Int[np.ndarray, "layer pos k"]
    final_top_ids: Int[np.ndarray, " pos"]

    def in_bits(self, is_final: Bool[np.ndarray, "layer pos"]) -> dict[str, np.ndarray]:
        """Every number of a Projection for these cells, sets apart.

        `is_final` marks cells that are the final row itself: their divergence is 0.
        """
        with np.errstate(divide="ignore", invalid="ignore", over="ignore", under="ignore"):
            rest = _Distributions(self.lens, self.final, self.scale)
            whole = rest.with_own(self.lens[..., OWN_LOGIT], self.final[..., 2])
            return self._numbers(whole, rest, is_final)

    def following(self, ids: Int[np.ndarray, "3 pos"]) -> "Sums":
        """The same sums, for followed tokens that are all in the top-k."""
        return replace(self, ids=ids)

    def _numbers(
        self, whole: "_Distributions", rest: "_Distributions", is_final: np.ndarray
    ) -> dict[str, np.ndarray]:
        readable = np.isfinite(whole.lse_bits)
        comparable = readable & np.isfinite(whole.final_lse_bits)
        has_own = readable & (self.ids[OWN] >= 0)
        own_bits = self.lens[..., OWN_LOGIT] * self.scale - whole.lse_bits
        numbers = {
            "entropy_bits": _where(readable, whole.entropy_bits),
            "lse_bits": _where(readable, whole.lse_bits),
            "collision_mass": _where(readable, whole.squares / whole.total**2),
            "kl_bits": _where(comparable, np.where(is_final, 0.0, whole.kl_bits)),
            "reverse_kl_bits": _where(comparable, np.where(is_final, 0.0, whole.reverse_kl_bits)),
            "self_copy_mass": _where(has_own, np.exp2(own_bits)),
            "rest_lse_bits": _where(has_own, rest.lse_bits),
            "copy_kl_bits": _where(
                has_own & comparable, np.where(is_final, 0.0, self._copy_kl(whole, rest))
            ),
            "top_logprob_bits": _where(
                readable[..., None], self.top_values * self.scale - whole.lse_bits[..., None]
            ),
            "top_ids": np.where(readable[..., None], self.top_ids, -1),
            "final_top_ids": np.where(np.isfinite(whole.final_lse_bits), self.final_top_ids, -1),
        }
        for row, name in ((TARGET, "target"), (FINAL_TOP, "final_top")):
            logits, ranks = self._logit_and_rank(row)
            known = readable & (self.ids[row] >= 0)
            numbers[f"{name}_logprob_bits"] = _where(known, logits * self.scale - whole.lse_bits)
            numbers[f"{name}_rank"] = np.where(known, ranks, -1)
        return numbers

    def _logit_and_rank(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Logit and rank of a followed token; among the top-k, as the same product has them."""
        hit = self.top_ids == self.ids[row][None, :, None]
        listed = hit.any(-1)
        place = hit.argmax(-1)[..., None]
        value = np.take_along_axis(self.top_values, place, -1)
        ranks = np.where(listed, (self.top_values > value).sum(-1), self.above[row])
        logits = np.where(listed, value[..., 0], self.thresholds[row])
        return logits.astype(np.float64), ranks

    def _copy_kl(self, whole: "_Distributions", rest: "_Distributions") -> np.ndarray:
        """The part of KL that is about repeating the own token, yes or no."""
        p = self.final[..., 2] * self.scale - whole.final_lse_bits
        q = self.lens[..., OWN_LOGIT] * self.scale - whole.lse_bits
        p_rest = rest.final_lse_bits - whole.final_lse_bits
        q_rest = rest.lse_bits - whole.lse_bits
        repeated = np.where(np.exp2(p) == 0, 0.0, np.exp2(p) * (p - q))
        other = np.where(np.exp2(p_rest) == 0, 0.0, np.exp2(p_rest) * (p_rest - q_rest))
        return _not_negative(repeated + other, p - q)


class _Distributions:
    """Lens and final sums side by side, and what follows from them."""

    def __init__(self, lens: np.ndarray, final: np.ndarray, scale: float):
        self.scale = scale
        self.offset, self.total, self.moment = (lens[..., i] for i in (OFFSET, TOTAL, MOMENT))
        self.squares, self.final_cross = lens[..., SQUARES], lens[..., FINAL_CROSS]
        self.lens_cross = lens[..., LENS_CROSS]
        self.final_offset, self.final_total = final[..., OFFSET], final[..., TOTAL]

    def with_own(self, own: np.ndarray, final_own: np.ndarray) -> "_Distributions":
        """The same with the own token's logits added; NaN where there is none."""
        lens = np.stack([self.offset, self.total, self.moment, self.squares], -1)
        lens = np.concatenate([lens, np.zeros((*own.shape, 2))], -1)
        final = np.stack([self.final_offset, self.final_total], -1)
        offset, shift, power, bits = _joined(self.offset, own * self.scale)
        final_offset, final_shift, final_power, _ = _joined(
            self.final_offset, final_own * self.scale
        )
        # Where nothing was there yet, what stands for nothing (2^UNDERFLOW_BITS) is dropped.
        shrink = np.where(self.offset == -np.inf, 0.0, np.exp2(shift))
        final_shrink = np.where(self.final_offset == -np.inf, 0.0, np.exp2(final_shift))
        difference = final_own - own
        lens[..., OFFSET] = offset
        lens[..., TOTAL] = shrink * self.total + power
        lens[..., MOMENT] = shrink * (self.moment + shift * self.total) + power * bits
        lens[..., SQUARES] = shrink**2 * self.squares + power**2
        lens[..., FINAL_CROSS] = final_shrink * self.final_cross + np.where(
            final_power == 0, 0.0, final_power * difference
        )
        lens[..., LENS_CROSS] = shrink * self.lens_cross + np.where(
            power == 0, 0.0, power * difference
        )
        final[..., OFFSET] = final_offset
        final[..., TOTAL] = final_shrink * self.final_total + final_power
        return _Distributions(lens, final, self.scale)

    @property
    def lse_bits(self) -> np.ndarray:
        return self.offset + np.log2(self.total)

    @property
    def final_lse_bits(self) -> np.ndarray:
        return self.final_offset + np.log2(self.final_total)

    @property
    def entropy_bits(self) -> np.ndarray:
        return np.maximum(np.log2(self.total) - self.moment / self.total, 0.0)

    @property
    def kl_bits(self) -> np.ndarray:
        mean = self.final_cross / self.final_total * self.scale
        return _not_negative(mean - self.final_lse_bits + self.lse_bits, mean)

    @property
    def reverse_kl_bits(self) -> np.ndarray:
        mean = -self.lens_cross / self.total * self.scale
        return _not_negative(mean - self.lse_bits + self.final_lse_bits, mean)


def _joined(
    offset: np.ndarray, bits: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """A token of `bits` joins sums at `offset`: new offset, their shift, its power and place."""
    present = ~np.isnan(bits)
    new = np.where(present, np.maximum(offset, bits), offset)
    reference = np.where(new == -np.inf, 0.0, new)
    shift = np.where(offset == -np.inf, 0.0, offset - reference)
    power = np.where(present, np.exp2(bits - reference), 0.0)
    place = np.where(power > 0, bits - reference, 0.0)
    return reference, shift, power, place


def _where(mask: np.ndarray, values: np.ndarray) -> np.ndarray:
    return np.where(mask, values, np.nan)


def _not_negative(divergence: np.ndarray, mean_difference: np.ndarray) -> np.ndarray:
    """Raise to 0 what is below it by rounding alone.

    The float32 sums carry a relative error of a few dozen roundings (2^-24 each) on terms as
    large as the mean difference of the logits; anything further below 0 stays as it is, seen.
    """
    bound = 64 * 2.0**-24 * (1 + np.abs(mean_difference))
    return np.where((divergence < 0) & (divergence >= -bound), 0.0, divergence)
