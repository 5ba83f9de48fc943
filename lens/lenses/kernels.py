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
    maximum_of_lanes,
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
def _scan(lens, layer, p, target, top, highest):
    """Counts above two thresholds, and the maximum of each lane (every 16th logit)."""
    width = lens.shape[2]
    groups = width // LANES
    ahead = _row(lens, min(layer + 1, lens.shape[0] - 1), p)
    above_target, above_top = scan_lanes(
        _row(lens, layer, p), groups, target, top, highest.ctypes.data, ahead
    )
    for v in range(groups * LANES, width):
        logit = lens[layer, p, v]
        above_target += logit > target
        above_top += logit > top
        if logit > highest[v % LANES]:
            highest[v % LANES] = logit
    return above_target, above_top


@_kernel
@typing.no_type_check
def _row(lens, layer, p):
    """The address of a row: slices would be counted references, which cost more than they do."""
    return lens.ctypes.data + 4 * lens.shape[2] * (layer * lens.shape[1] + p)


@_kernel
@typing.no_type_check
def _candidates(first, lens, layer, p, highest, values, ids):
    """Keep the best logits, best first; a tie goes to the lower id.

    Only the lanes are searched whose maximum reaches the worst that is kept.
    """
    last = values.shape[2] - 1
    for lane in range(LANES):
        if not highest[lane] >= values[layer, p, last]:
            continue
        for v in range(lane, lens.shape[2], LANES):
            logit, token = lens[layer, p, v], first + v
            if not _before(logit, token, values[layer, p, last], ids[layer, p, last]):
                continue
            place = last
            while place > 0 and _before(
                logit, token, values[layer, p, place - 1], ids[layer, p, place - 1]
            ):
                values[layer, p, place] = values[layer, p, place - 1]
                ids[layer, p, place] = ids[layer, p, place - 1]
                place -= 1
            values[layer, p, place] = logit
            ids[layer, p, place] = token


@_kernel
@typing.no_type_check
def _before(logit, token, other_logit, other_token):
    return logit > other_logit or (logit == other_logit and token < other_token)


@_kernel
@typing.no_type_check
def _highest_but(lens, layer, p, own):
    """The maximum of the own token's lane, its place left out."""
    highest = _LOWEST
    for v in range(own % LANES, lens.shape[2], LANES):
        if v != own and lens[layer, p, v] > highest:
            highest = lens[layer, p, v]
    return highest


@_kernel
@typing.no_type_check
def _advance(old, maximum):
    """The new reference in bits, a finite one, and by how much older sums shift and shrink."""
    new = max(old, float(float32(maximum * _SCALE)))
    offset = 0.0 if new == -math.inf else new
    shift = 0.0 if old == -math.inf else old - offset
    return new, offset, shift, 1.0 if shift == 0.0 else 2.0**shift


@_kernel
@typing.no_type_check
def _weigh(lens, layer, p, offset, weights, own):
    """Powers of the logits into `weights`, 0 at the own token; gives their sum."""
    width = lens.shape[2]
    groups = width // LANES
    total = float(weigh_lanes(_row(lens, layer, p), groups, float32(offset), weights.ctypes.data))
    for v in range(groups * LANES, width):
        weights[v] = _power(float32(lens[layer, p, v] * _SCALE - float32(offset)))
        total += weights[v]
    if own >= 0:
        weights[own] = 0.0
        total = 0.0
        for v in range(width):
            total += weights[v]
    return total


@_kernel
@typing.no_type_check
def _sum(lens, layer, p, final, row, weights, offset):
    """The five sums of a row of a tile, see `sum_lanes`."""
    width = lens.shape[2]
    groups = width // LANES
    sums = sum_lanes(
        _row(lens, layer, p), _row(final, row, p), weights.ctypes.data, groups, float32(offset)
    )
    total, moment, squares = float(sums[0]), float(sums[1]), float(sums[2])
    final_cross, lens_cross = float(sums[3]), float(sums[4])
    for v in range(groups * LANES, width):
        bits = float32(lens[layer, p, v] * _SCALE - float32(offset))
        if bits < _FLOOR:
            bits = _FLOOR
        power = float(_power(bits))
        difference = float(float32(final[row, p, v] - lens[layer, p, v]))
        total += power
        moment += power * bits
        squares += power * power
        final_cross += weights[v] * difference
        lens_cross += power * difference
    return total, moment, squares, final_cross, lens_cross


@_kernel
@typing.no_type_check
def _cross_of_infinite(lens, layer, p, final, row, weights, offset, final_offset, own):
    """The two cross sums where some logits are infinite: a probability of 0 counts nothing."""
    final_cross, lens_cross = 0.0, 0.0
    for v in range(lens.shape[2]):
        if v == own:
            continue
        logit, final_logit = lens[layer, p, v], final[row, p, v]
        difference = final_logit - logit
        if not final_logit * LOG2_E - final_offset < UNDERFLOW_BITS:
            final_cross += weights[v] * difference
        bits = logit * LOG2_E - offset
        if not bits < UNDERFLOW_BITS:
            lens_cross += _power(float32(bits)) * difference
    return final_cross, lens_cross


@_kernel
@typing.no_type_check
def _final_row(first, final, row, p, own, highest, weights, sums, top_value, top_id):
    """Take in the model's own row: its weights for this tile, and how its older sums shrank."""
    _scan(final, row, p, _LOWEST, _LOWEST, highest)
    if maximum_of_lanes(highest.ctypes.data) >= top_value[0, p, 0]:
        _candidates_of_one(first, final, row, p, highest, top_value, top_id)
    if own >= 0:
        highest[own % LANES] = _highest_but(final, row, p, own)
        sums[p, 2] = final[row, p, own]
    new, offset, _, shrink = _advance(sums[p, 0], maximum_of_lanes(highest.ctypes.data))
    sums[p, 1] = sums[p, 1] * shrink + _weigh(final, row, p, offset, weights, own)
    sums[p, 0] = new
    return offset, shrink


@_kernel
@typing.no_type_check
def _candidates_of_one(first, final, row, p, highest, top_value, top_id):
    """The best logit of a row alone; a tie goes to the lower id."""
    for v in range(final.shape[2]):
        if _before(final[row, p, v], first + v, top_value[0, p, 0], top_id[0, p, 0]):
            top_value[0, p, 0] = final[row, p, v]
            top_id[0, p, 0] = first + v


@_kernel
@typing.no_type_check
def _lens_row(
    lens, layer, p, final, row, weights, highest, own, final_offset, final_shrink, sums
):  # fmt: skip
    """Take in one row of the lens; the own token's place, if it is here, is overwritten."""
    if own >= 0:
        highest[own % LANES] = _highest_but(lens, layer, p, own)
        sums[layer, p, 6] = lens[layer, p, own]
    maximum = maximum_of_lanes(highest.ctypes.data)
    new, offset, shift, shrink = _advance(sums[layer, p, 0], maximum)
    if own >= 0:
        lens[layer, p, own] = float32(offset / LOG2_E - 200.0)
    total, moment, squares, cross, reverse = _sum(lens, layer, p, final, row, weights, offset)
    if not (math.isfinite(cross) and math.isfinite(reverse)):
        cross, reverse = _cross_of_infinite(
            lens, layer, p, final, row, weights, offset, final_offset, own
        )
    sums[layer, p, 2] = shrink * (sums[layer, p, 2] + shift * sums[layer, p, 1]) + moment
    sums[layer, p, 1] = shrink * sums[layer, p, 1] + total
    sums[layer, p, 3] = shrink * shrink * sums[layer, p, 3] + squares
    sums[layer, p, 4] = final_shrink * sums[layer, p, 4] + cross
    sums[layer, p, 5] = shrink * sums[layer, p, 5] + reverse
    sums[layer, p, 0] = new


@_kernel
@typing.no_type_check
def reduce_tile(
    first, lens, final, row, ids, thresholds, sums, final_sums, above, top_values, top_ids,
    final_top_value, final_top_id,
):  # fmt: skip
    """Add one tile to the sums of a chunk.

    `lens` [layer, pos, tile] are the logits of the lens, `final[row]` those of the model's own
    rows, in an array of the same kind.
    """
    n_layers, n_positions, width = lens.shape
    weights = np.empty(width, dtype=np.float32)
    highest = np.empty(LANES, dtype=np.float32)
    for p in range(n_positions):
        own = ids[2, p] - first
        if own >= width or own < 0:
            own = -1
        offset, shrink = _final_row(
            first, final, row, p, own, highest, weights, final_sums, final_top_value, final_top_id
        )
        for layer in range(n_layers):
            target, top = thresholds[0, layer, p], thresholds[1, layer, p]
            over_target, over_top = _scan(lens, layer, p, target, top, highest)
            above[0, layer, p] += over_target
            above[1, layer, p] += over_top
            for chosen in range(2):
                place = ids[chosen, p] - first
                if 0 <= place < width and lens[layer, p, place] > thresholds[chosen, layer, p]:
                    above[chosen, layer, p] -= 1
            if maximum_of_lanes(highest.ctypes.data) >= top_values[layer, p, -1]:
                _candidates(first, lens, layer, p, highest, top_values, top_ids)
            _lens_row(lens, layer, p, final, row, weights, highest, own, offset, shrink, sums)


@_kernel
@typing.no_type_check
def best_of_tile(first, logits, top_values, top_ids):
    """Keep the best logits of each row [layer, pos, tile], and their tokens."""
    highest = np.empty(LANES, dtype=np.float32)
    for layer in range(logits.shape[0]):
        for p in range(logits.shape[1]):
            _scan(logits, layer, p, _LOWEST, _LOWEST, highest)
            if maximum_of_lanes(highest.ctypes.data) >= top_values[layer, p, -1]:
                _candidates(first, logits, layer, p, highest, top_values, top_ids)
