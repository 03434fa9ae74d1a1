"""What changed: positions and steps between two states of the same elements, by bits.

Owns the comparison on CPU and on any torch device. Owns no frames, no bytes, and no snapshot. Values are never
compared: -0.0, NaN payloads and integers are bits like any other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from numba import intp, uint64

from weight_sync.codec.machine import ctz, kernel, neq_mask64
from weight_sync.codec.ordered import flip_of, step_between, steps_between
from weight_sync.dtypes import DType

if TYPE_CHECKING:
    import torch

__all__ = ["ChangeBuffer", "diff_run", "diff_torch"]

ROOM = 64  # entries that one mask may add at most


class ChangeBuffer:
    """Positions and steps of the changes found so far in one frame; reused from frame to frame.

    Attributes:
        positions: (capacity + 64,) uint32, frame coordinates.
        steps: (capacity + 64,) unsigned of the element's width.
        old_bits: (capacity + 64,) the elements before the change; the kernel holds them anyway.
        count: entries in use.
    """

    def __init__(self, dtype: DType, capacity: int) -> None:
        self.dtype = dtype
        self.capacity = capacity
        self.positions = np.empty(capacity + ROOM, np.uint32)
        self.steps = np.empty(capacity + ROOM, dtype.uint)
        self.old_bits = np.empty(capacity + ROOM, dtype.uint)
        self.count = 0

    @property
    def full(self) -> bool:
        """No further mask of 64 fits."""
        return self.count >= self.capacity

    def view(self) -> tuple[npt.NDArray[np.uint32], npt.NDArray[Any]]:
        """Positions and steps in use, not copied."""
        return self.positions[: self.count], self.steps[: self.count]


@kernel
def _diff(
    old: Any, new: Any, base: Any, flip: Any, positions: Any, steps: Any, old_bits: Any, count: Any, limit: Any
) -> Any:
    n = intp(count)
    whole = len(old) // 64 * 64
    i = 0
    while i < whole:
        mask = neq_mask64(old, new, i)
        while mask != uint64(0):
            e = i + intp(ctz(mask))
            positions[n] = base + e
            steps[n] = step_between(old[e], new[e], flip)
            old_bits[n] = old[e]
            n += 1
            mask &= mask - uint64(1)
        i += 64
        if n >= limit:
            return n, i
    while i < len(old):
        if old[i] != new[i]:
            positions[n] = base + i
            steps[n] = step_between(old[i], new[i], flip)
            old_bits[n] = old[i]
            n += 1
        i += 1
    return n, i


def diff_run(old: npt.NDArray[Any], new: npt.NDArray[Any], base: int, out: ChangeBuffer) -> int:
    """Appends the changes of a run of elements to ``out``; returns how many elements were looked at.

    Fewer than ``len(old)`` only when the buffer became full; the rest belongs to the next frame.

    Args:
        old, new: (n,) unsigned of the element's width, contiguous; neither is copied.
        base: frame coordinate of element 0.
    """
    count, seen = _diff(
        old, new, base, flip_of(out.dtype), out.positions, out.steps, out.old_bits, out.count, out.capacity
    )
    out.count = int(count)
    return int(seen)


def diff_torch(old: torch.Tensor, new: torch.Tensor, base: int, out: ChangeBuffer, chunk: int = 1 << 22) -> int:
    """`diff_run` with torch operations on the tensors' own device; only changed elements leave it.

    Args:
        old, new: (n,) 1-d contiguous tensors of one dtype on one device.
        chunk: elements per round, which bounds the memory of masks and indices.
    """
    import torch

    signed = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[out.dtype.width]
    a, b = old.view(signed), new.view(signed)
    seen = 0
    while seen < a.numel():
        take = min(chunk, a.numel() - seen)
        found = torch.nonzero(a[seen : seen + take] != b[seen : seen + take]).squeeze(1)
        room = out.capacity - out.count
        if found.numel() > room:  # the frame ends after the change that fills it
            found = found[:room]
            take = int(found[-1]) + 1 if room else 0
        at = found + seen
        before, after = (t[at].cpu().numpy().view(out.dtype.uint) for t in (a, b))
        end = out.count + len(before)
        out.positions[out.count : end] = (at.cpu().numpy() + base).astype(np.uint32)
        out.steps[out.count : end] = steps_between(before, after, out.dtype)
        out.old_bits[out.count : end] = before
        out.count = end
        seen += take
        if out.full:
            break
    return seen
