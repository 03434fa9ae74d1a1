"""The ordered integer line of a dtype: where one ulp is one, and +0.0 and -0.0 are neighbours.

Owns the fold of signed-magnitude codes and steps along it, modulo 2^(8 width). Owns no dtype table.

``flip`` is the one number that kernels need: the mask of magnitude bits for signed-magnitude codes, 0 for codes that
are ordered as they are. All arithmetic wraps, so every step is undone exactly by its negative.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import uint64

from weight_sync.codec.machine import kernel
from weight_sync.dtypes import DType

__all__ = ["add_steps", "flip_of", "step_between", "step_to", "steps_between"]


def flip_of(dtype: DType) -> np.uint64:
    """Magnitude mask of a signed-magnitude dtype, else 0."""
    return np.uint64((1 << (8 * dtype.width - 1)) - 1 if dtype.signed_magnitude else 0)


@kernel
def folded(code: Any, flip: Any) -> Any:
    """Code to ordered line and back; without a branch, for signs of weights are unpredictable."""
    x = uint64(code)
    return x ^ (flip & (uint64(0) - uint64(x > flip)))


@kernel
def step_between(old: Any, new: Any, flip: Any) -> Any:
    """Distance from old to new, to be cut to the element's width by the caller's array."""
    return folded(new, flip) - folded(old, flip)


@kernel
def step_to(old: Any, step: Any, flip: Any, low: Any) -> Any:
    """The code ``step`` away from ``old``; ``low`` is the mask of the element's width."""
    return folded((folded(old, flip) + uint64(step)) & low, flip)


def steps_between(old: npt.NDArray[Any], new: npt.NDArray[Any], dtype: DType) -> npt.NDArray[Any]:
    """Elementwise `step_between` of two arrays of the dtype's uint."""
    out = np.empty_like(old)
    _steps_between(old, new, flip_of(dtype), out)
    return out


def add_steps(old: npt.NDArray[Any], steps: npt.NDArray[Any], dtype: DType) -> npt.NDArray[Any]:
    """Elementwise `step_to` of two arrays of the dtype's uint."""
    low = np.uint64((1 << (8 * dtype.width)) - 1)
    out = np.empty_like(old)
    _add_steps(old, steps, flip_of(dtype), low, out)
    return out


@kernel
def _steps_between(old: Any, new: Any, flip: Any, out: Any) -> None:
    for i in range(len(old)):
        out[i] = step_between(old[i], new[i], flip)


@kernel
def _add_steps(old: Any, steps: Any, flip: Any, low: Any, out: Any) -> None:
    for i in range(len(old)):
        out[i] = step_to(old[i], steps[i], flip, low)
