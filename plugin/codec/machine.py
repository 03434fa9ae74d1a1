"""The few machine instructions that Numba does not offer, and how kernels are compiled.

Owns `kernel` (one way to compile), bit counts, unaligned loads, prefetches, and the comparisons and counts of 64 and 256
elements at once. Owns no format.

Kernels release the GIL and never use Numba's own threads: a process that forks after those have started dies. The
vector types below are plain LLVM IR, so they run on any target; on AVX2 and AVX-512 a mask costs a few instructions
per 128 bytes, which keeps the diff bound by memory instead of by mispredicted branches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba import types, uint64
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = [
    "BLOCK",
    "SLOT",
    "before256",
    "bit_length",
    "ctz",
    "eq_mask64",
    "fetch256",
    "high_mask64",
    "inlined",
    "kernel",
    "load64",
    "neq_mask64",
    "nth_bit",
    "popcount",
    "prefetch",
    "slots256",
    "store64",
]


BLOCK = 256  # elements that are counted at once
SLOT = 0x70  # of the lowest of 16 classes
_BYTES64 = ir.VectorType(ir.IntType(8), 64)


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles lazily per argument types, caches on disk, releases the GIL. Scalars of kernels are typed Any: they are
    Python's, NumPy's and Numba's integers in turn.
    """
    return numba.njit(nogil=True, cache=True, boundscheck=False)(function)


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """Part of a kernel: its body is put where it is called, which spares a call that counts references to its arrays."""
    return numba.njit(nogil=True, boundscheck=False, inline="always")(function)


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


def _pointer(context: Any, builder: Any, kind: Any, array: Any, at: Any, count: int) -> Any:
    """To ``count`` neighbours from ``array[at]`` on, as one vector."""
    data = context.make_array(kind)(context, builder, array).data
    vector = ir.VectorType(context.get_data_type(kind.dtype), count)
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
def _eq_mask64(typing_context: Any, a: Any, start: Any, value: Any) -> Any:
    """Bit k is set when ``a[start + k] == value``, for k < 64; ``a`` is uint8. The caller owns the bounds."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        found = builder.load(_pointer(context, builder, signature.args[0], args[0], args[1], 64), align=1)
        return builder.bitcast(builder.icmp_unsigned("==", found, _splat(builder, args[2], _BYTES64)), ir.IntType(64))

    return types.uint64(a, types.intp, types.uint64), generate


@intrinsic
def _high_mask64(typing_context: Any, a: Any, start: Any) -> Any:
    """Bit k is set when ``a[start + k] >= 0x80``, for k < 64; ``a`` is uint8. The caller owns the bounds."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        found = builder.load(_pointer(context, builder, signature.args[0], args[0], args[1], 64), align=1)
        return builder.bitcast(builder.icmp_signed("<", found, ir.Constant(_BYTES64, [0] * 64)), ir.IntType(64))

    return types.uint64(a, types.intp), generate


@intrinsic
def _neq_mask64(typing_context: Any, a: Any, b: Any, start: Any) -> Any:
    """Bit k is set when ``a[start + k] != b[start + k]``, for k < 64. The caller owns the bounds."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        align = context.get_data_type(signature.args[0].dtype).width // 8
        loaded = []
        for which in (0, 1):
            pointer = _pointer(context, builder, signature.args[which], args[which], args[2], 64)
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
def _slots256(
    typing_context: Any, rule: Any, source: Any, start: Any, low: Any, slots: Any, at: Any, rows: Any, row: Any
) -> Any:
    """The slots of 256 elements, and how many there are of each.

    An element's class is ``(source[start + k] >> shift) & mask``; the rule is two tuples, whose lengths are the shift
    and the bits of the mask. Its slot, ``slots[at + k]`` (uint8), is ``SLOT + class - low`` for the 16 classes from
    ``low`` on and 0x80 or more for all others. ``rows`` (uint16) has a row of 16 numbers, one per class: row number
    ``row + 1`` becomes row number ``row`` plus what was counted. Returns 1 when a class is none of the 16, else 0.
    The caller owns the bounds.
    """
    shift, bits = (len(part) for part in rule)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        item = context.get_data_type(signature.args[1].dtype)
        wide, first = ir.VectorType(item, 64), _splat(builder, args[3], _BYTES64)
        kind = ir.FunctionType(_BYTES64, [_BYTES64, _BYTES64])
        saturate = cgutils.get_or_insert_function(builder.module, kind, "llvm.uadd.sat.v64i8")
        parts = []
        for k in range(0, BLOCK, 64):
            here, there = (builder.add(args[i], ir.Constant(args[i].type, k)) for i in (2, 5))
            pointer = _pointer(context, builder, signature.args[1], args[1], here, 64)
            codes = builder.lshr(builder.load(pointer, align=item.width // 8), ir.Constant(wide, [shift] * 64))
            found = builder.and_(codes, ir.Constant(wide, [(1 << bits) - 1] * 64))
            if item.width > 8:
                found = builder.trunc(found, _BYTES64)
            found = builder.call(saturate, [builder.sub(found, first), ir.Constant(_BYTES64, [SLOT] * 64)])
            builder.store(found, _pointer(context, builder, signature.args[4], args[4], there, 64), align=1)
            parts += _halves(builder, found, 32)
        counted = (_looked_up if "+avx2" in context.codegen().magic_tuple()[2] else _compared)(builder, parts)
        before = _pointer(context, builder, signature.args[6], args[6], builder.shl(args[7], _word(4)), 16)
        after = builder.gep(before, [_word(1)])
        builder.store(builder.add(builder.load(before, align=2), counted), after, align=2)
        every = parts[0]
        for part in parts[1:]:
            every = builder.or_(every, part)
        outside = builder.bitcast(builder.icmp_signed("<", every, ir.Constant(every.type, [0] * 32)), ir.IntType(32))
        return builder.zext(builder.icmp_unsigned("!=", outside, ir.Constant(outside.type, 0)), ir.IntType(64))

    return types.uint64(rule, source, types.intp, types.uint64, slots, types.intp, rows, types.intp), generate


def _looked_up(builder: Any, parts: Any) -> Any:
    """How often each of 16 slots is found: one look-up of 32 bytes counts four of them, in quarters of a byte, which
    hold three; sums of all parts take halves, and those of all lanes 16 bits.
    """
    byte, word = parts[0].type, ir.VectorType(ir.IntType(64), 4)
    kind = ir.FunctionType(byte, [byte, byte])
    look_up = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx2.pshuf.b")
    kind = ir.FunctionType(word, [byte, byte])
    add_up = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx2.psad.bw")

    def field(vector: Any, shift: int, mask: int) -> Any:
        lower = builder.lshr(builder.bitcast(vector, word), ir.Constant(word, [shift] * 4)) if shift else vector
        return builder.and_(builder.bitcast(lower, byte), ir.Constant(byte, [mask] * 32))

    def total(vectors: Any) -> Any:
        return functools.reduce(builder.add, vectors)

    quads = []
    for first in range(0, 16, 4):
        table = [0] * 16  # a look-up goes by the lower half of a byte, and gives 0 from 0x80 on
        table[first : first + 4] = [1, 4, 16, 64]
        found = [builder.call(look_up, [ir.Constant(byte, table * 2), part]) for part in parts]
        threes = [total(found[i : i + 3]) for i in range(0, len(found), 3)]
        even, odd = (total([field(three, shift, 0x33) for three in threes]) for shift in (0, 2))
        packed = ir.Constant(word, [0] * 4)
        for k, (sums, shift) in enumerate(((even, 0), (odd, 0), (even, 4), (odd, 4))):
            lanes = builder.call(add_up, [field(sums, shift, 0x0F), ir.Constant(byte, [0] * 32)])
            packed = builder.or_(packed, builder.shl(lanes, ir.Constant(word, [16 * k] * 4)))
        quads.append(packed)
    low, high = (_added(builder, a, b, [0, 4, 2, 6], [1, 5, 3, 7]) for a, b in (quads[:2], quads[2:]))
    return builder.bitcast(_added(builder, low, high, [0, 1, 4, 5], [2, 3, 6, 7]), ir.VectorType(ir.IntType(16), 16))


def _added(builder: Any, a: Any, b: Any, some: Any, others: Any) -> Any:
    """The lanes of both vectors in one order plus those in another."""
    return builder.add(*(builder.shuffle_vector(a, b, _lanes(order)) for order in (some, others)))


def _compared(builder: Any, parts: Any) -> Any:
    """The same with what every machine has."""
    byte = parts[0].type
    out = ir.Constant(ir.VectorType(ir.IntType(16), 16), ir.Undefined)
    for number in range(16):
        counts = ir.Constant(byte, [0] * 32)
        for part in parts:
            found = builder.icmp_unsigned("==", part, ir.Constant(byte, [SLOT + number] * 32))
            counts = builder.sub(counts, builder.sext(found, byte))
        total = _sum32(builder, counts)
        out = builder.insert_element(out, total, ir.Constant(ir.IntType(32), number))
    return out


def _sum32(builder: Any, counts: Any) -> Any:
    """Of 32 bytes, as 16 bits."""
    short = ir.VectorType(ir.IntType(16), 32)
    kind = ir.FunctionType(ir.IntType(16), [short])
    add_up = cgutils.get_or_insert_function(builder.module, kind, "llvm.vector.reduce.add.v32i16")
    return builder.call(add_up, [builder.zext(counts, short)])


def _halves(builder: Any, vector: Any, half: int) -> Any:
    """The lower and the upper ``half`` lanes."""
    return [builder.shuffle_vector(vector, vector, _lanes(range(first, first + half))) for first in (0, half)]


def _word(value: int) -> Any:
    return ir.Constant(ir.IntType(64), value)


@intrinsic
def _before256(typing_context: Any, slots: Any, start: Any, end: Any, slot: Any) -> Any:
    """How many of the first ``end`` < 256 of ``slots`` (uint8) from ``start`` on are ``slot``. The caller owns the
    bounds.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = ir.VectorType(ir.IntType(8), 32)
        end, slot = (_splat(builder, args[i], vector) for i in (2, 3))
        counts = ir.Constant(vector, [0] * 32)
        for k in range(0, BLOCK, 32):
            at = builder.add(args[1], ir.Constant(args[1].type, k))
            found = builder.load(_pointer(context, builder, signature.args[0], args[0], at, 32), align=1)
            same = builder.icmp_unsigned("==", found, slot)
            early = builder.icmp_unsigned("<", ir.Constant(vector, list(range(k, k + 32))), end)
            counts = builder.sub(counts, builder.sext(builder.and_(same, early), vector))
        return builder.zext(_sum32(builder, counts), ir.IntType(64))

    return types.uint64(slots, types.intp, types.uint64, types.uint64), generate


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
before256: Any = _before256
bit_length: Any = _bit_length
fetch256: Any = _fetch256
high_mask64: Any = _high_mask64
nth_bit: Any = _nth_bit
slots256: Any = _slots256
store64: Any = _store64
ctz: Any = _ctz  # what kernels call has another signature than what generates it
neq_mask64: Any = _neq_mask64
eq_mask64: Any = _eq_mask64
popcount: Any = _popcount
prefetch: Any = _prefetch
