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

ROOM = 64  # entries that may be added to a full buffer at most
_SHELF = 4096  # elements that are compared at a time, and stay in the first-level cache


class ChangeBuffer:
    """Positions and steps of the changes found so far in one frame; reused from frame to frame.

    Attributes:
        positions: (capacity + 65,) uint32, frame coordinates.
        steps: (capacity + 65,) unsigned of the element's width.
        old_bits: (capacity + 65,) the elements before the change; the kernel holds them anyway.
        count: entries in use.
    """

    def __init__(self, dtype: DType, capacity: int) -> None:
        self.dtype = dtype
        self.capacity = capacity
        self.positions = np.empty(capacity + ROOM + 1, np.uint32)  # one that may be written to without a change
        self.steps = np.empty(capacity + ROOM + 1, dtype.uint)
        self.old_bits = np.empty(capacity + ROOM + 1, dtype.uint)
        self.count = 0

    @property
    def full(self) -> bool:
        """No further 64 elements are looked at."""
        return self.count >= self.capacity

    def view(self) -> tuple[npt.NDArray[np.uint32], npt.NDArray[Any]]:
        """Positions and steps in use, not copied."""
        return self.positions[: self.count], self.steps[: self.count]


@kernel
def compare(
    old: Any, new: Any, start: Any, stop: Any, base: Any, flip: Any, positions: Any, steps: Any, old_bits: Any, n: Any
) -> Any:
    """Appends the changes of [start, stop) from entry ``n`` on; returns the next free entry, which may be written to.

    Positions first: one is written per 64 elements whether there is a change or not, since that cannot be foreseen.
    """
    at = uint64(n)
    i = start
    while i + 64 <= stop:
        mask = neq_mask64(old, new, i)
        while True:
            positions[at] = uint64(base + i) + ctz(mask | (uint64(1) << uint64(63)))
            at += uint64(mask != uint64(0))
            mask &= mask - uint64(1)
            if mask == uint64(0):
                break
        i += 64
    while i < stop:
        positions[at] = base + i
        at += uint64(old[i] != new[i])
        i += 1
    for k in range(uint64(n), at):
        e = uint64(positions[k]) - uint64(base)
        steps[k] = step_between(old[e], new[e], flip)
        old_bits[k] = old[e]
    return intp(at)


@kernel
def _diff(
    old: Any, new: Any, base: Any, flip: Any, positions: Any, steps: Any, old_bits: Any, count: Any, limit: Any
) -> Any:
    n = intp(count)
    i = 0
    while i < len(old) and n < limit:
        most = min(_SHELF, (limit - n + ROOM - 1) // ROOM * ROOM)  # they may all have changed
        stop = min(i + most, len(old))
        n = compare(old, new, i, stop, base, flip, positions, steps, old_bits, n)
        i = stop
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
