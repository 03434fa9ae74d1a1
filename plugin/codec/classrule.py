"""Which class an element of a dtype belongs to, as the kernels of the compact form see it.

Owns the rule and its limits. Owns no walk (classcount.py, classvector.py, classfind.py).

A rule reaches the kernels as two tuples whose lengths are the shift and the bits of the mask: lengths are part of a
type, so LLVM sees constants, which cost half of what arguments cost, and Numba's cache on disk knows them apart.
"""

from __future__ import annotations

from typing import Any

from numba import uint64

from weight_sync.codec.machine import kernel
from weight_sync.dtypes import DType

__all__ = ["CLASSES", "NEVER", "class_rule", "constants"]

CLASSES = 256
NEVER = (1 << 31) - 1  # more than a frame has elements


def class_rule(dtype: DType) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The rule of a dtype: class of an element = (bits >> shift) & mask."""
    return (0,) * dtype.class_shift, (0,) * dtype.class_bits


@kernel
def constants(rule: Any) -> Any:
    """(shift, mask), uint64."""
    return uint64(len(rule[0])), (uint64(1) << uint64(len(rule[1]))) - uint64(1)
