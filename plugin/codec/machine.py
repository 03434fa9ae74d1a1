"""The few machine instructions that Numba does not offer, and how kernels are compiled.

Owns `kernel` (one way to compile), bit counts, unaligned loads, prefetches, and the comparisons and counts of 64 and 256
elements at once. Owns no format.

Kernels release the GIL and never use Numba's own threads: a process that forks after those have started dies. The
vector types below are plain LLVM IR, so they run on any target; on AVX2 and AVX-512 a mask costs a few instructions
per 128 bytes, which keeps the diff bound by memory instead of by mispredicted branches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba import types, uint64
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = [
    "bit_length",
    "count4",
    "ctz",
    "eq_mask64",
    "fetch256",
    "kernel",
    "load64",
    "narrow64",
    "neq_mask64",
    "nth_bit",
    "out_mask64",
    "popcount",
    "prefetch",
    "settle16",
    "store64",
]


_BYTES64 = ir.VectorType(ir.IntType(8), 64)


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles lazily per argument types, caches on disk, releases the GIL. Scalars of kernels are typed Any: they are
    Python's, NumPy's and Numba's integers in turn.
    """
    return numba.njit(nogil=True, cache=True, boundscheck=False)(function)


@intrinsic
def _ctz(typing_context: Any, value: Any) -> Any:
    """Trailing zeros of a uint64; undefined for 0."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], context.get_constant(types.boolean, 1))

    return types.uint64(types.uint64), generate


@intrinsic
def _bit_length(typing_context: Any, value: Any) -> Any:
    """Bits of a uint64 up to the highest set one; 0 for 0."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.sub(ir.Constant(args[0].type, 64), builder.ctlz(args[0], context.get_constant(types.boolean, 0)))

    return types.uint64(types.uint64), generate


@intrinsic
def _nth_bit(typing_context: Any, mask: Any, rank: Any) -> Any:
    """Place of the set bit of ``mask`` with ``rank`` set bits below it; undefined when there is none."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(64)
        if "+bmi2" in context.codegen().magic_tuple()[2]:
            kind = ir.FunctionType(word, [word, word])
            deposit = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.bmi.pdep.64")
            one = builder.call(deposit, [builder.shl(ir.Constant(word, 1), args[1]), args[0]])
            return builder.cttz(one, context.get_constant(types.boolean, 1))
        return context.compile_internal(builder, _select, signature, args)

    return types.uint64(types.uint64, types.uint64), generate


def _select(mask: Any, rank: Any) -> Any:
    """Counts by bytes all at once, then looks into one of them.

    Method: Vigna, "Broadword implementation of rank/select queries" (2008), with three halvings instead of his table.
    """
    ones, tops = uint64(0x0101010101010101), uint64(0x8080808080808080)
    sums = mask - ((mask >> uint64(1)) & uint64(0x5555555555555555))
    sums = (sums & uint64(0x3333333333333333)) + ((sums >> uint64(2)) & uint64(0x3333333333333333))
    sums = ((sums + (sums >> uint64(4))) & uint64(0x0F0F0F0F0F0F0F0F)) * ones  # set bits up to and with each byte
    place = popcount((((rank * ones) | tops) - sums) & tops) << uint64(3)  # bytes that end before it
    rank -= ((sums << uint64(8)) >> place) & uint64(0xFF)
    mask >>= place
    for half in (4, 2, 1):
        below = popcount(mask & ((uint64(1) << uint64(half)) - uint64(1)))
        upper = uint64(rank >= below)
        rank -= below * upper
        mask >>= uint64(half) * upper
        place += uint64(half) * upper
    return place


@intrinsic
def _popcount(typing_context: Any, value: Any) -> Any:
    """Set bits of a uint64."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.uint64(types.uint64), generate


def _pointer64(context: Any, builder: Any, kind: Any, array: Any, at: Any) -> Any:
    """To the 64 neighbours from ``array[at]`` on, as one vector."""
    data = context.make_array(kind)(context, builder, array).data
    vector = ir.VectorType(context.get_data_type(kind.dtype), 64)
    return builder.bitcast(builder.gep(data, [at]), vector.as_pointer())


def _lanes(numbers: Any) -> Any:
    """Numbers of lanes, as shuffles take them."""
    return ir.Constant(ir.VectorType(ir.IntType(32), len(numbers)), list(numbers))


def _splat(builder: Any, value: Any, vector: Any) -> Any:
    """The low byte of ``value`` in every lane."""
    none = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(none, builder.trunc(value, ir.IntType(8)), ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, none, _lanes([0] * vector.count))


@intrinsic
def _narrow64(typing_context: Any, rule: Any, source: Any, start: Any, out: Any, at: Any) -> Any:
    """``out[at + k] = (source[start + k] >> shift) & mask`` for k < 64; ``out`` is uint8. The rule is two tuples, whose
    lengths are the shift and the bits of the mask. The caller owns the bounds.
    """
    shift, bits = (len(part) for part in rule)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        item = context.get_data_type(signature.args[1].dtype)
        wide = ir.VectorType(item, 64)
        pointer = _pointer64(context, builder, signature.args[1], args[1], args[2])
        codes = builder.lshr(builder.load(pointer, align=item.width // 8), ir.Constant(wide, [shift] * 64))
        classes = builder.and_(codes, ir.Constant(wide, [(1 << bits) - 1] * 64))
        if item.width > 8:
            classes = builder.trunc(classes, _BYTES64)
        builder.store(classes, _pointer64(context, builder, signature.args[3], args[3], args[4]), align=1)
        return context.get_dummy_value()

    return types.void(rule, source, types.intp, out, types.intp), generate


@intrinsic
def _eq_mask64(typing_context: Any, a: Any, start: Any, value: Any) -> Any:
    """Bit k is set when ``a[start + k] == value``, for k < 64; ``a`` is uint8. The caller owns the bounds."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        found = builder.load(_pointer64(context, builder, signature.args[0], args[0], args[1]), align=1)
        return builder.bitcast(builder.icmp_unsigned("==", found, _splat(builder, args[2], _BYTES64)), ir.IntType(64))

    return types.uint64(a, types.intp, types.uint64), generate


@intrinsic
def _out_mask64(typing_context: Any, a: Any, start: Any, low: Any, size: Any) -> Any:
    """Bit k is set when ``a[start + k]`` is not in [low, low + size), for k < 64; ``a`` is uint8, size at most 255. The
    caller owns the bounds.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        found = builder.load(_pointer64(context, builder, signature.args[0], args[0], args[1]), align=1)
        above = builder.sub(found, _splat(builder, args[2], _BYTES64))  # wraps below ``low``
        return builder.bitcast(builder.icmp_unsigned(">=", above, _splat(builder, args[3], _BYTES64)), ir.IntType(64))

    return types.uint64(a, types.intp, types.uint64, types.uint64), generate


@intrinsic
def _neq_mask64(typing_context: Any, a: Any, b: Any, start: Any) -> Any:
    """Bit k is set when ``a[start + k] != b[start + k]``, for k < 64. The caller owns the bounds."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        align = context.get_data_type(signature.args[0].dtype).width // 8
        loaded = []
        for which in (0, 1):
            pointer = _pointer64(context, builder, signature.args[which], args[which], args[2])
            loaded.append(builder.load(pointer, align=align))
        return builder.bitcast(builder.icmp_unsigned("!=", *loaded), ir.IntType(64))

    return types.uint64(a, b, types.intp), generate


@intrinsic
def _load64(typing_context: Any, data: Any, at: Any) -> Any:
    """The eight bytes from ``data[at]`` (uint8) on as a little-endian uint64, whatever their alignment. The caller owns
    the bounds.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        pointer = builder.bitcast(builder.gep(array.data, [args[1]]), ir.IntType(64).as_pointer())
        return builder.load(pointer, align=1)

    return types.uint64(data, types.uint64), generate


@intrinsic
def _store64(typing_context: Any, data: Any, at: Any, value: Any) -> Any:
    """The inverse of `_load64`: writes ``value`` (uint64) to the eight bytes from ``data[at]`` on."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        pointer = builder.bitcast(builder.gep(array.data, [args[1]]), ir.IntType(64).as_pointer())
        builder.store(args[2], pointer, align=1)
        return context.get_dummy_value()

    return types.void(data, types.uint64, types.uint64), generate


def _fetch(context: Any, builder: Any, kind: Any, args: Any, offsets: Any, write: int) -> None:
    """Prefetches ``array[at + offset]`` for each offset; ``args``: array and at."""
    word, byte = ir.IntType(32), ir.IntType(8).as_pointer()
    data = context.make_array(kind)(context, builder, args[0]).data
    shape = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
    fetch = builder.module.declare_intrinsic("llvm.prefetch", (byte,), shape)
    flags = [ir.Constant(word, n) for n in (write, 3, 1)]
    for offset in offsets:
        at = builder.add(args[1], ir.Constant(args[1].type, offset))
        builder.call(fetch, [builder.bitcast(builder.gep(data, [at]), byte), *flags])


@intrinsic
def _prefetch(typing_context: Any, array: Any, at: Any) -> Any:
    """Has the cache line of ``array[at]`` fetched, to be written to."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _fetch(context, builder, signature.args[0], args, (0,), 1)
        return context.get_dummy_value()

    return types.void(array, types.uint64), generate


@intrinsic
def _count4(typing_context: Any, a: Any, start: Any, value: Any) -> Any:
    """How many of the 256 of ``a`` (uint8) from ``start`` on equal ``value``, and how many each of the next three
    numbers modulo 256: four counts of 16 bits, lowest first. The caller owns the bounds.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        size = 32 if "+avx2" in context.codegen().magic_tuple()[2] else 16
        vector = ir.VectorType(ir.IntType(8), size)
        first = _splat(builder, args[2], vector)
        parts = []
        for offset in range(0, 256, size):
            data = context.make_array(signature.args[0])(context, builder, args[0]).data
            at = builder.gep(data, [builder.add(args[1], ir.Constant(args[1].type, offset))])
            found = builder.load(builder.bitcast(at, vector.as_pointer()), align=1)
            parts.append(builder.sub(found, first))
        return (_count4_looked_up if size == 32 else _count4_compared)(builder, parts)

    return types.uint64(a, types.intp, types.uint64), generate


def _count4_looked_up(builder: Any, parts: Any) -> Any:
    """One look-up of 32 bytes counts two numbers, in halves of a byte."""
    byte, word = parts[0].type, ir.VectorType(ir.IntType(64), 4)
    kind = ir.FunctionType(byte, [byte, byte])
    look_up = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx2.pshuf.b")
    add_up = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(word, [byte, byte]), "llvm.x86.avx2.psad.bw"
    )
    saturate = cgutils.get_or_insert_function(builder.module, kind, "llvm.uadd.sat.v32i8")
    # 0 to 3 become the last four entries of a table, all others have the top bit, whose entry is 0
    keys = [builder.call(saturate, [part, ir.Constant(byte, [0x7C] * 32)]) for part in parts]
    low = ir.Constant(byte, [15] * 32)
    packed = ir.Constant(word, [0] * 4)
    for pair in (0, 1):
        table = [0] * 12 + ([1, 16, 0, 0] if pair == 0 else [0, 0, 1, 16])
        sums = ir.Constant(byte, [0] * 32)
        for key in keys:
            sums = builder.add(sums, builder.call(look_up, [ir.Constant(byte, table * 2), key]))
        upper = builder.bitcast(builder.lshr(builder.bitcast(sums, word), ir.Constant(word, [4] * 4)), byte)
        for half, counts in enumerate((sums, upper)):
            lanes = builder.call(add_up, [builder.and_(counts, low), ir.Constant(byte, [0] * 32)])
            packed = builder.or_(packed, builder.shl(lanes, ir.Constant(word, [32 * pair + 16 * half] * 4)))
    for half in (2, 1):
        packed = builder.add(*_halves(builder, packed, half))
    return builder.extract_element(packed, ir.Constant(ir.IntType(32), 0))


def _count4_compared(builder: Any, parts: Any) -> Any:
    """The same with what every machine has."""
    byte, word = parts[0].type, ir.IntType(64)
    packed = ir.Constant(word, 0)
    for number in range(4):
        counts = ir.Constant(byte, [0] * 16)
        for part in parts:
            found = builder.icmp_unsigned("==", part, ir.Constant(byte, [number] * 16))
            counts = builder.sub(counts, builder.sext(found, byte))
        eight, even = (
            builder.bitcast(builder.add(*_halves(builder, counts, 8)), word),
            ir.Constant(word, 0x00FF00FF00FF00FF),
        )
        four = builder.add(builder.and_(eight, even), builder.and_(builder.lshr(eight, ir.Constant(word, 8)), even))
        total = builder.lshr(builder.mul(four, ir.Constant(word, 0x0001000100010001)), ir.Constant(word, 48))
        packed = builder.or_(packed, builder.shl(total, ir.Constant(word, 16 * number)))
    return packed


def _halves(builder: Any, vector: Any, half: int) -> Any:
    """The lower and the upper ``half`` lanes."""
    return (builder.shuffle_vector(vector, vector, _lanes(range(first, first + half))) for first in (0, half))


@intrinsic
def _settle16(typing_context: Any, rows: Any, at: Any, counts: Any, start: Any) -> Any:
    """The next row of 16 int32, from ``rows[at + 16]`` on, is the one from ``rows[at]`` on minus the 16 counts of 16
    bits in the four words from ``counts[start]`` on. Bit k of what is returned is set when its number k is negative.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector, short = (ir.VectorType(ir.IntType(bits), 16) for bits in (32, 16))
        row, words = (context.make_array(signature.args[i])(context, builder, args[i]).data for i in (0, 2))
        here, there = (
            builder.bitcast(builder.gep(row, [builder.add(args[1], ir.Constant(args[1].type, n))]), vector.as_pointer())
            for n in (0, 16)
        )
        less = builder.load(builder.bitcast(builder.gep(words, [args[3]]), short.as_pointer()), align=8)
        rest = builder.sub(builder.load(here, align=4), builder.zext(less, vector))
        builder.store(rest, there, align=4)
        below = builder.icmp_signed("<", rest, ir.Constant(vector, [0] * 16))
        return builder.zext(builder.bitcast(below, ir.IntType(16)), ir.IntType(64))

    return types.uint64(rows, types.intp, counts, types.intp), generate


@intrinsic
def _fetch256(typing_context: Any, array: Any, start: Any) -> Any:
    """Has the cache lines of the 256 elements from ``array[start]`` on fetched, to be read; they may lie behind its end."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _fetch(
            context,
            builder,
            signature.args[0],
            args,
            range(0, 256, 512 // context.get_data_type(signature.args[0].dtype).width),
            0,
        )
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


load64: Any = _load64
bit_length: Any = _bit_length
count4: Any = _count4
settle16: Any = _settle16
fetch256: Any = _fetch256
nth_bit: Any = _nth_bit
store64: Any = _store64
ctz: Any = _ctz  # what kernels call has another signature than what generates it
neq_mask64: Any = _neq_mask64
eq_mask64: Any = _eq_mask64
out_mask64: Any = _out_mask64
narrow64: Any = _narrow64
popcount: Any = _popcount
prefetch: Any = _prefetch
