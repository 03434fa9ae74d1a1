"""The few machine instructions that Numba does not offer, and how kernels are compiled.

Owns `kernel` (one way to compile), bit counts, unaligned loads and the comparisons of 64 elements at once. Owns no format.

Kernels release the GIL and never use Numba's own threads: a process that forks after those have started dies. The
vector types below are plain LLVM IR, so they run on any target; on AVX2 and AVX-512 a mask costs a few instructions
per 128 bytes, which keeps the diff bound by memory instead of by mispredicted branches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

__all__ = [
    "count_upto16",
    "ctz",
    "eq_mask64",
    "kernel",
    "load64",
    "narrow64",
    "neq_mask64",
    "out_mask64",
    "popcount",
    "prefetch",
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


def _splat64(builder: Any, value: Any) -> Any:
    """64 times the low byte of ``value``."""
    none = ir.Constant(_BYTES64, ir.Undefined)
    first = builder.insert_element(none, builder.trunc(value, ir.IntType(8)), ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, none, ir.Constant(ir.VectorType(ir.IntType(32), 64), [0] * 64))


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
        return builder.bitcast(builder.icmp_unsigned("==", found, _splat64(builder, args[2])), ir.IntType(64))

    return types.uint64(a, types.intp, types.uint64), generate


@intrinsic
def _out_mask64(typing_context: Any, a: Any, start: Any, low: Any, size: Any) -> Any:
    """Bit k is set when ``a[start + k]`` is not in [low, low + size), for k < 64; ``a`` is uint8, size at most 255. The
    caller owns the bounds.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        found = builder.load(_pointer64(context, builder, signature.args[0], args[0], args[1]), align=1)
        above = builder.sub(found, _splat64(builder, args[2]))  # wraps below ``low``
        return builder.bitcast(builder.icmp_unsigned(">=", above, _splat64(builder, args[3])), ir.IntType(64))

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


@intrinsic
def _prefetch(typing_context: Any, array: Any, at: Any) -> Any:
    """Has the cache line of ``array[at]`` fetched, to be written to. The caller owns the bounds."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word, byte = ir.IntType(32), ir.IntType(8).as_pointer()
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        fetch = builder.module.declare_intrinsic("llvm.prefetch", (byte,), kind)
        write, keep, is_data = (ir.Constant(word, n) for n in (1, 3, 1))
        builder.call(fetch, [builder.bitcast(builder.gep(data, [args[1]]), byte), write, keep, is_data])
        return context.get_dummy_value()

    return types.void(array, types.uint64), generate


@intrinsic
def _count_upto16(typing_context: Any, a: Any, start: Any, value: Any) -> Any:
    """How many of the 16 int16 from ``a[start]`` on are at most ``value``. The caller owns the bounds."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        item, lane = ir.IntType(16), ir.IntType(32)
        vector = ir.VectorType(item, 16)
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        found = builder.load(builder.bitcast(builder.gep(data, [args[1]]), vector.as_pointer()), align=2)
        none = ir.Constant(vector, ir.Undefined)
        first = builder.insert_element(none, builder.trunc(args[2], item), ir.Constant(lane, 0))
        limit = builder.shuffle_vector(first, none, ir.Constant(ir.VectorType(lane, 16), [0] * 16))
        mask = builder.bitcast(builder.icmp_signed("<=", found, limit), item)
        return builder.zext(builder.ctpop(mask), ir.IntType(64))

    return types.int64(a, types.intp, types.int64), generate


load64: Any = _load64
count_upto16: Any = _count_upto16
store64: Any = _store64
ctz: Any = _ctz  # what kernels call has another signature than what generates it
neq_mask64: Any = _neq_mask64
eq_mask64: Any = _eq_mask64
out_mask64: Any = _out_mask64
narrow64: Any = _narrow64
popcount: Any = _popcount
prefetch: Any = _prefetch
