"""Tiles of logits -> running sums, fused for the CPU with numba: one read of a tile from the cache.

The sums are those of sums.py. Multiply-adds may be fused, no other floating-point freedom is
taken: NaN and infinity keep their meaning, and equal tiles give equal bits.
"""

import math
import typing
from typing import Any

import numba
import numpy as np
from numba import float32

from lens.lenses.lanes import (
    LANES,
    LOG2_E,
    ROUND,
    SERIES,
    UNDERFLOW_BITS,
    scan_lanes,
    sum_lanes,
    weigh_lanes,
)

NOT_FOUND = 2**62
"""The id of an empty place among the best: it loses every tie."""

_SCALE = float32(LOG2_E)
_FLOOR = float32(UNDERFLOW_BITS)
_ROUND = float32(ROUND)
_LOWEST = float32(-math.inf)


def _kernel(function: Any) -> Any:
    """Compile at the first call, without the GIL; keep the result where a folder can be written.

    numba keeps it beside this file or in the user's cache folder, and knows only this file's own
    date: a change in lanes.py must touch this file too.
    """
    options = {"nogil": True, "error_model": "numpy", "fastmath": {"contract"}}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # neither folder can be written: compiled again in each process
        return numba.njit(**options)(function)


@_kernel
@typing.no_type_check
def _power(bits):
    """2^bits for one number; the arithmetic of `lanes`."""
    if bits < _FLOOR:
        bits = _FLOOR
    whole = (bits + _ROUND) - _ROUND
    rest = bits - whole
    series = float32(SERIES[0])
    series = series * rest + float32(SERIES[1])
    series = series * rest + float32(SERIES[2])
    series = series * rest + float32(SERIES[3])
    series = series * rest + float32(SERIES[4])
    series = series * rest + float32(SERIES[5])
    return series * float32(2.0**whole)


@_kernel
@typing.no_type_check
def _scan(logits, target, top, highest):
    """Counts above two thresholds, and the maximum of each lane (every 16th logit)."""
    groups = logits.shape[0] // LANES
    above_target, above_top = scan_lanes(
        logits.ctypes.data, groups, target, top, highest.ctypes.data
    )
    for v in range(groups * LANES, logits.shape[0]):
        above_target += logits[v] > target
        above_top += logits[v] > top
        highest[v % LANES] = max(highest[v % LANES], logits[v])
    return above_target, above_top


@_kernel
@typing.no_type_check
def _candidates(logits, first, highest, values, ids):
    """Keep the best logits, best first; a tie goes to the lower id.

    Only the lanes are searched whose maximum reaches the worst that is kept.
    """
    last = values.shape[0] - 1
    for lane in range(LANES):
        if not highest[lane] >= values[last]:
            continue
        for v in range(lane, logits.shape[0], LANES):
            logit, token = logits[v], first + v
            if not _before(logit, token, values[last], ids[last]):
                continue
            place = last
            while place > 0 and _before(logit, token, values[place - 1], ids[place - 1]):
                values[place] = values[place - 1]
                ids[place] = ids[place - 1]
                place -= 1
            values[place] = logit
            ids[place] = token


@_kernel
@typing.no_type_check
def _before(logit, token, other_logit, other_token):
    return logit > other_logit or (logit == other_logit and token < other_token)


@_kernel
@typing.no_type_check
def _highest_but(logits, lane, own):
    """The maximum of a lane, one place left out."""
    highest = _LOWEST
    for v in range(lane, logits.shape[0], LANES):
        if v != own and logits[v] > highest:
            highest = logits[v]
    return highest


@_kernel
@typing.no_type_check
def _advance(old, highest):
    """The new reference in bits, a finite one, and by how much older sums shift and shrink."""
    maximum = _LOWEST
    for lane in range(LANES):
        maximum = max(maximum, highest[lane])
    new = max(old, float(float32(maximum * _SCALE)))
    offset = 0.0 if new == -math.inf else new
    shift = 0.0 if old == -math.inf else old - offset
    return new, offset, shift, 1.0 if shift == 0.0 else 2.0**shift


@_kernel
@typing.no_type_check
def _weigh(logits, offset, weights, own):
    """Powers of the logits into `weights`, 0 at the own token; gives their sum."""
    groups = logits.shape[0] // LANES
    total = float(weigh_lanes(logits.ctypes.data, groups, float32(offset), weights.ctypes.data))
    for v in range(groups * LANES, logits.shape[0]):
        weights[v] = _power(float32(logits[v] * _SCALE - float32(offset)))
        total += weights[v]
    if own >= 0:
        weights[own] = 0.0
        total = 0.0
        for v in range(logits.shape[0]):
            total += weights[v]
    return total


@_kernel
@typing.no_type_check
def _sum(logits, final, weights, offset):
    """The five sums of a tile row, see `sum_lanes`."""
    groups = logits.shape[0] // LANES
    sums = sum_lanes(
        logits.ctypes.data, final.ctypes.data, weights.ctypes.data, groups, float32(offset)
    )
    total, moment, squares = float(sums[0]), float(sums[1]), float(sums[2])
    final_cross, lens_cross = float(sums[3]), float(sums[4])
    for v in range(groups * LANES, logits.shape[0]):
        bits = float32(logits[v] * _SCALE - float32(offset))
        if bits < _FLOOR:
            bits = _FLOOR
        power = float(_power(bits))
        difference = float(float32(final[v] - logits[v]))
        total += power
        moment += power * bits
        squares += power * power
        final_cross += weights[v] * difference
        lens_cross += power * difference
    return total, moment, squares, final_cross, lens_cross


@_kernel
@typing.no_type_check
def _cross_of_infinite(logits, final, weights, offset, final_offset, own):
    """The two cross sums where some logits are infinite: a probability of 0 counts nothing."""
    final_cross, lens_cross = 0.0, 0.0
    for v in range(logits.shape[0]):
        if v == own:
            continue
        difference = final[v] - logits[v]
        if not final[v] * LOG2_E - final_offset < UNDERFLOW_BITS:
            final_cross += weights[v] * difference
        bits = logits[v] * LOG2_E - offset
        if not bits < UNDERFLOW_BITS:
            lens_cross += _power(float32(bits)) * difference
    return final_cross, lens_cross


@_kernel
@typing.no_type_check
def _final_row(first, logits, own, highest, weights, sums, top_value, top_id):
    """Take in the model's own row: its weights for this tile, and how its older sums shrank."""
    _scan(logits, _LOWEST, _LOWEST, highest)
    _candidates(logits, first, highest, top_value, top_id)
    if own >= 0:
        highest[own % LANES] = _highest_but(logits, own % LANES, own)
        sums[2] = logits[own]
    new, offset, _, shrink = _advance(sums[0], highest)
    sums[1] = sums[1] * shrink + _weigh(logits, offset, weights, own)
    sums[0] = new
    return offset, shrink


@_kernel
@typing.no_type_check
def _lens_row(logits, final, weights, highest, own, final_offset, final_shrink, sums):
    """Take in one row of the lens; the own token's place, if it is here, is overwritten."""
    if own >= 0:
        highest[own % LANES] = _highest_but(logits, own % LANES, own)
        sums[6] = logits[own]
    new, offset, shift, shrink = _advance(sums[0], highest)
    if own >= 0:
        logits[own] = float32(offset / LOG2_E - 200.0)
    total, moment, squares, cross, reverse = _sum(logits, final, weights, offset)
    if not (math.isfinite(cross) and math.isfinite(reverse)):
        cross, reverse = _cross_of_infinite(logits, final, weights, offset, final_offset, own)
    sums[2] = shrink * (sums[2] + shift * sums[1]) + moment
    sums[1] = shrink * sums[1] + total
    sums[3] = shrink * shrink * sums[3] + squares
    sums[4] = final_shrink * sums[4] + cross
    sums[5] = shrink * sums[5] + reverse
    sums[0] = new


@_kernel
@typing.no_type_check
def reduce_tile(
    first, lens, final, ids, thresholds, sums, final_sums, above, top_values, top_ids,
    final_top_value, final_top_id,
):  # fmt: skip
    """Add one tile, lens [layer, pos, tile] and final [pos, tile], to the sums of a chunk."""
    n_layers, n_positions, width = lens.shape
    weights = np.empty(width, dtype=np.float32)
    highest = np.empty(LANES, dtype=np.float32)
    for p in range(n_positions):
        own = ids[2, p] - first
        if own >= width or own < 0:
            own = -1
        offset, shrink = _final_row(
            first, final[p], own, highest, weights, final_sums[p], final_top_value[p],
            final_top_id[p],
        )  # fmt: skip
        for layer in range(n_layers):
            logits = lens[layer, p]
            target, top = thresholds[0, layer, p], thresholds[1, layer, p]
            over_target, over_top = _scan(logits, target, top, highest)
            above[0, layer, p] += over_target
            above[1, layer, p] += over_top
            for chosen in range(2):
                place = ids[chosen, p] - first
                if 0 <= place < width and logits[place] > thresholds[chosen, layer, p]:
                    above[chosen, layer, p] -= 1
            _candidates(logits, first, highest, top_values[layer, p], top_ids[layer, p])
            _lens_row(logits, final[p], weights, highest, own, offset, shrink, sums[layer, p])


@_kernel
@typing.no_type_check
def best_of_tile(first, logits, top_values, top_ids):
    """Keep the best logits of each row [pos, tile], and their tokens."""
    highest = np.empty(LANES, dtype=np.float32)
    for p in range(logits.shape[0]):
        _scan(logits[p], _LOWEST, _LOWEST, highest)
        _candidates(logits[p], first, highest, top_values[p], top_ids[p])
