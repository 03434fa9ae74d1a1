"""The few machine instructions that Numba does not offer, and how kernels are compiled.

Owns `kernel` (one way to compile), count-trailing-zeros, unaligned loads and the 64-wide comparison mask. Owns no
format.

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

__all__ = ["ctz", "kernel", "load64", "neq_mask64"]


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
def _neq_mask64(typing_context: Any, a: Any, b: Any, start: Any) -> Any:
    """Bit k is set when ``a[start + k] != b[start + k]``, for k < 64. The caller owns the bounds."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        item = context.get_data_type(signature.args[0].dtype)
        vector = ir.VectorType(item, 64).as_pointer()
        loaded = []
        for which in (0, 1):
            array = context.make_array(signature.args[which])(context, builder, args[which])
            pointer = builder.bitcast(builder.gep(array.data, [args[2]]), vector)
            loaded.append(builder.load(pointer, align=item.width // 8))
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


load64: Any = _load64
ctz: Any = _ctz  # what kernels call has another signature than what generates it
neq_mask64: Any = _neq_mask64
