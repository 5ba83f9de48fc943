"""The inner loops of kernels.py in sixteen float32 lanes, written as LLVM vectors.

LLVM's own loop vectoriser keeps to eight lanes on processors that have sixteen, which costs a
third of the time of a reduction. Vectors that are written out are split where a processor has
shorter ones. Addresses come from `array.ctypes.data`; counts are whole groups of sixteen.

Exponentials are powers of two: t = z * LOG2_E - offset, in bits, and 2^t = 2^n * 2^r with
a polynomial for 2^r, r in [-1/2, 1/2], to 1.7e-7 relative (exact at r = 0).
"""

import typing

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
LOG2_E = float(np.float32(1.44269504))
"""The float32 factor that turns logits into bits; what follows must use this same number."""

UNDERFLOW_BITS = -62.0
"""A power below this counts as 0, and -inf is clamped to it.

2^-62 of a million tokens is no part of a float32 sum; squares of less would be denormal, and each
denormal costs a processor a hundred cycles.
"""

ROUND = 12582912.0
"""1.5 * 2^23: adding it to a small float32 rounds it to an integer, held in the low bits."""

SERIES = (0.00132647273, 0.00967151299, 0.0555073358, 0.240222424, 0.693147004, 1.0)
"""2^r, highest power first."""

_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_VECTOR, _INTEGERS = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)


@typing.no_type_check
def _splat(builder, scalar):
    empty = ir.Constant(_VECTOR, ir.Undefined)
    one = builder.insert_element(empty, scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(one, empty, ir.Constant(_INTEGERS, [0] * LANES))


@typing.no_type_check
def _constant(value):
    return ir.Constant(_VECTOR, [value] * LANES)


@typing.no_type_check
def _whole(value):
    return ir.Constant(_INTEGERS, [value] * LANES)


@typing.no_type_check
def _load(builder, address, group):
    place = builder.add(address, builder.mul(group, ir.Constant(_I64, 4 * LANES)))
    return builder.load(builder.inttoptr(place, _VECTOR.as_pointer()), align=4)


@typing.no_type_check
def _store(builder, vector, address, group):
    place = builder.add(address, builder.mul(group, ir.Constant(_I64, 4 * LANES)))
    builder.store(vector, builder.inttoptr(place, _VECTOR.as_pointer()), align=4)


@typing.no_type_check
def _prefetch(builder, address, group):
    """Ask for a line of the cache ahead of its use: rows do not follow each other in memory."""
    place = builder.add(address, builder.mul(group, ir.Constant(_I64, 4 * LANES)))
    pointer = builder.inttoptr(place, ir.IntType(8).as_pointer())
    kind = ir.FunctionType(ir.VoidType(), [pointer.type, _I32, _I32, _I32])
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    to_read, to_keep, data = (ir.Constant(_I32, i) for i in (0, 3, 1))
    builder.call(prefetch, [pointer, to_read, to_keep, data])


@typing.no_type_check
def _multiply_add(builder, a, b, c):
    kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
    fused = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fmuladd.v{LANES}f32")
    return builder.call(fused, [a, b, c])


@typing.no_type_check
def _folded(builder, vector, join):
    """Join the lanes in a fixed order: halves with halves."""
    while vector.type.count > 1:
        half = vector.type.count // 2
        places = ir.VectorType(_I32, half)
        low = ir.Constant(places, list(range(half)))
        high = ir.Constant(places, list(range(half, 2 * half)))
        vector = join(
            builder.shuffle_vector(vector, vector, low),
            builder.shuffle_vector(vector, vector, high),
        )
    return builder.extract_element(vector, ir.Constant(_I32, 0))


@typing.no_type_check
def _total(builder, vector):
    return _folded(builder, vector, builder.fadd if vector.type.element == _F32 else builder.add)


@typing.no_type_check
def _bits_below(builder, logits, offset):
    """t = z * LOG2_E - offset, not under UNDERFLOW_BITS; NaN stays NaN."""
    bits = _multiply_add(builder, logits, _constant(LOG2_E), offset)
    floor = _constant(UNDERFLOW_BITS)
    return builder.select(builder.fcmp_ordered("<", bits, floor), floor, bits)


@typing.no_type_check
def _power(builder, bits):
    shifted = builder.fadd(bits, _constant(ROUND))
    rest = builder.fsub(bits, builder.fsub(shifted, _constant(ROUND)))
    series = _constant(SERIES[0])
    for coefficient in SERIES[1:]:
        series = _multiply_add(builder, series, rest, _constant(coefficient))
    # ROUND's own bits vanish in the shift: what is left is n in the exponent field.
    exponent = builder.shl(builder.bitcast(shifted, _INTEGERS), _whole(23))
    return builder.bitcast(builder.add(builder.bitcast(series, _INTEGERS), exponent), _VECTOR)


@typing.no_type_check
def _loop(builder, count, starts, body):
    """Run body(group, carried) -> carried for each group of lanes; gives the last carried."""
    before = builder.basic_block
    head = builder.append_basic_block("lanes.head")
    inside = builder.append_basic_block("lanes.body")
    after = builder.append_basic_block("lanes.after")
    builder.branch(head)
    builder.position_at_end(head)
    group = builder.phi(_I64)
    group.add_incoming(ir.Constant(_I64, 0), before)
    carried = [builder.phi(start.type) for start in starts]
    for phi, start in zip(carried, starts, strict=True):
        phi.add_incoming(start, before)
    builder.cbranch(builder.icmp_signed("<", group, count), inside, after)
    builder.position_at_end(inside)
    results = body(group, carried)
    group.add_incoming(builder.add(group, ir.Constant(_I64, 1)), builder.basic_block)
    for phi, result in zip(carried, results, strict=True):
        phi.add_incoming(result, builder.basic_block)
    builder.branch(head)
    builder.position_at_end(after)
    return carried


@intrinsic
@typing.no_type_check
def scan_lanes(typingctx, logits, groups, target, top, highest, ahead):
    """How many logits are above `target` and above `top`; each lane's maximum into `highest`.

    A NaN is no maximum, and above nothing. `ahead` is the row that comes next.
    """
    signature = types.UniTuple(types.int32, 2)(
        types.int64, types.int64, types.float32, types.float32, types.int64, types.int64
    )

    def generate(context, builder, signature, arguments):
        logits, groups, target, top, highest, ahead = arguments
        target, top = _splat(builder, target), _splat(builder, top)
        none = _whole(0)

        def body(group, carried):
            values = _load(builder, logits, group)
            _prefetch(builder, ahead, group)
            maxima, above_target, above_top = carried
            maxima = builder.select(builder.fcmp_ordered("<", maxima, values), values, maxima)
            over = builder.fcmp_ordered(">", values, target)
            above_target = builder.sub(above_target, builder.sext(over, _INTEGERS))
            over = builder.fcmp_ordered(">", values, top)
            above_top = builder.sub(above_top, builder.sext(over, _INTEGERS))
            return maxima, above_target, above_top

        starts = (_constant(float("-inf")), none, none)
        maxima, above_target, above_top = _loop(builder, groups, starts, body)
        _store(builder, maxima, highest, ir.Constant(_I64, 0))
        counts = [_total(builder, above_target), _total(builder, above_top)]
        return context.make_tuple(builder, signature.return_type, counts)

    return signature, generate


@intrinsic
@typing.no_type_check
def maximum_of_lanes(typingctx, highest):
    """The greatest of sixteen numbers."""
    signature = types.float32(types.int64)

    def generate(context, builder, signature, arguments):
        vector = _load(builder, arguments[0], ir.Constant(_I64, 0))

        def greater(low, high):
            return builder.select(builder.fcmp_ordered("<", low, high), high, low)

        return _folded(builder, vector, greater)

    return signature, generate


@intrinsic
@typing.no_type_check
def weigh_lanes(typingctx, logits, groups, offset, weights):
    """Write 2^t of each logit to `weights`; gives the sum."""
    signature = types.float32(types.int64, types.int64, types.float32, types.int64)

    def generate(context, builder, signature, arguments):
        logits, groups, offset, weights = arguments
        offset = _splat(builder, builder.fneg(offset))

        def body(group, carried):
            bits = _bits_below(builder, _load(builder, logits, group), offset)
            power = _power(builder, bits)
            _store(builder, power, weights, group)
            return (builder.fadd(carried[0], power),)

        return _total(builder, _loop(builder, groups, (_constant(0.0),), body)[0])

    return signature, generate


@intrinsic
@typing.no_type_check
def sum_lanes(typingctx, logits, final, weights, groups, offset):
    """Sums of 2^t, 2^t t, 4^t, w (zf - z) and 2^t (zf - z)."""
    signature = types.UniTuple(types.float32, 5)(
        types.int64, types.int64, types.int64, types.int64, types.float32
    )

    def generate(context, builder, signature, arguments):
        logits, final, weights, groups, offset = arguments
        offset = _splat(builder, builder.fneg(offset))

        def body(group, carried):
            values = _load(builder, logits, group)
            bits = _bits_below(builder, values, offset)
            power = _power(builder, bits)
            difference = builder.fsub(_load(builder, final, group), values)
            return (
                builder.fadd(carried[0], power),
                _multiply_add(builder, power, bits, carried[1]),
                _multiply_add(builder, power, power, carried[2]),
                _multiply_add(builder, _load(builder, weights, group), difference, carried[3]),
                _multiply_add(builder, power, difference, carried[4]),
            )

        sums = _loop(builder, groups, [_constant(0.0)] * 5, body)
        totals = [_total(builder, vector) for vector in sums]
        return context.make_tuple(builder, signature.return_type, totals)

    return signature, generate
