"""Finding the changes of a compact frame again, from the old elements and the gaps within their classes.

Owns the walk back by elements. Owns no counting (codec/classcount.py, which explains tiles and lanes), no whole blocks
of frames with one lane (codec/classvector.py) and no bytes (codec/compactform.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import int32, int64, uint32, uint64

from weight_sync.codec.classcount import QUARTER, TILE
from weight_sync.codec.classrule import NEVER, class_rule, constants
from weight_sync.codec.classvector import find_blocks
from weight_sync.codec.machine import kernel
from weight_sync.dtypes import DType

__all__ = ["find_changes"]


@kernel
def _hit(
    lane: Any, c: Any, at: Any, left: Any, head: Any, tail: Any, values: Any, positions: Any, order: Any, ends: Any
) -> None:
    """Emits the change at ``at`` and counts down to the next one of its class."""
    k = head[lane, c]
    n = ends[lane]
    positions[n] = at
    order[n] = k
    ends[lane] = n + 1
    head[lane, c] = k + 1
    left[lane, c] = values[k + 1] >> uint32(1) if k + 1 < tail[lane, c] else NEVER


@kernel
def _find1(
    rule: Any,
    old: Any,
    start: Any,
    base: Any,
    lane: Any,
    left: Any,
    head: Any,
    tail: Any,
    values: Any,
    positions: Any,
    order: Any,
    ends: Any,
) -> None:
    shift, mask = constants(rule)
    for i in range(start, len(old)):
        c = (uint64(old[i]) >> shift) & mask
        r = left[lane, c] - int32(1)
        left[lane, c] = r
        if r < 0:
            _hit(lane, c, base + i, left, head, tail, values, positions, order, ends)


@kernel
def _find4(
    rule: Any,
    old: Any,
    start: Any,
    base: Any,
    left: Any,
    head: Any,
    tail: Any,
    values: Any,
    positions: Any,
    order: Any,
    ends: Any,
) -> None:
    shift, mask = constants(rule)
    l0, l1, l2, l3 = left[0], left[1], left[2], left[3]
    x0, x1 = old[start : start + QUARTER], old[start + QUARTER : start + 2 * QUARTER]
    x2, x3 = old[start + 2 * QUARTER : start + 3 * QUARTER], old[start + 3 * QUARTER : start + TILE]
    i = uint64(0)  # unsigned, as all subscripts here: Numba then leaves out its handling of negative ones
    end = uint64(QUARTER)
    while True:
        c0 = c1 = c2 = c3 = uint64(0)
        r0 = r1 = r2 = r3 = int32(0)
        while i < end:
            c0 = (uint64(x0[i]) >> shift) & mask
            r0 = l0[c0] - int32(1)
            l0[c0] = r0
            c1 = (uint64(x1[i]) >> shift) & mask
            r1 = l1[c1] - int32(1)
            l1[c1] = r1
            c2 = (uint64(x2[i]) >> shift) & mask
            r2 = l2[c2] - int32(1)
            l2[c2] = r2
            c3 = (uint64(x3[i]) >> shift) & mask
            r3 = l3[c3] - int32(1)
            l3[c3] = r3
            if (r0 | r1 | r2 | r3) < 0:  # one branch for four elements
                break
            i += uint64(1)
        if i == end:
            return
        at = base + start + int64(i)
        if r0 < 0:
            _hit(0, c0, at, left, head, tail, values, positions, order, ends)
        if r1 < 0:
            _hit(1, c1, at + QUARTER, left, head, tail, values, positions, order, ends)
        if r2 < 0:
            _hit(2, c2, at + 2 * QUARTER, left, head, tail, values, positions, order, ends)
        if r3 < 0:
            _hit(3, c3, at + 3 * QUARTER, left, head, tail, values, positions, order, ends)
        i += uint64(1)


@kernel
def _find(
    rule: Any,
    old: Any,
    base: Any,
    left: Any,
    head: Any,
    tail: Any,
    values: Any,
    lane_positions: Any,
    lane_order: Any,
    room: Any,
    ends: Any,
    positions: Any,
    order: Any,
    n: Any,
) -> Any:
    """One region; after each tile the lanes' finds are lined up, which makes positions ascend."""
    lanes = len(left)
    i = 0
    if lanes == 1:
        n, i = find_blocks(rule, old, base, left[0], head[0], tail[0], values, positions, order, n)
    while True:
        whole = lanes == 4 and i + TILE <= len(old)
        for lane in range(lanes):
            ends[lane] = room[lane]
        if whole:
            _find4(rule, old, i, base, left, head, tail, values, lane_positions, lane_order, ends)
        else:
            _find1(rule, old, i, base, lanes - 1, left, head, tail, values, lane_positions, lane_order, ends)
        for lane in range(lanes):
            for k in range(room[lane], ends[lane]):
                positions[n] = lane_positions[k]
                order[n] = lane_order[k]
                n += 1
        if not whole:
            return n
        i += TILE


def find_changes(
    dtype: DType,
    old: Sequence[npt.NDArray[Any]],
    head: npt.NDArray[np.int64],
    tail: npt.NDArray[np.int64],
    values: npt.NDArray[np.uint32],
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """Positions, ascending, and the number of each change in the order of classes.

    Args:
        old: per region all its elements before the change.
        head, tail: (lanes, CLASSES) first and last + 1 entry of each counter's list; ``head`` is moved to ``tail``
            when the old elements are the right ones.
        values: (changes,) 2 * gap + sign, class by class.
    """
    if not dtype.class_bits and len(head) == 1:  # one class: its gaps are the gaps of positions
        at = np.cumsum((values >> 1).astype(np.int64) + 1) - 1
        if not len(at) or at[-1] < sum(map(len, old)):
            head[:] = tail
        return at.astype(np.uint32), np.arange(len(values), dtype=np.uint32)
    left = np.full(head.shape, NEVER, np.int32)
    live = head < tail
    left[live] = (values[head[live]] >> 1).astype(np.int32)
    counts = (tail - head).sum(axis=1)
    room = np.cumsum(counts) - counts
    lane_positions = np.empty(len(values), np.uint32)
    lane_order = np.empty(len(values), np.uint32)
    positions = np.empty(len(values) + 1, np.uint32)
    order = np.empty(len(values) + 1, np.uint32)
    n = base = 0
    for region in old:
        n = int(
            _find(
                class_rule(dtype),
                region,
                base,
                left,
                head,
                tail,
                values,
                lane_positions,
                lane_order,
                room,
                room.copy(),
                positions,
                order,
                n,
            )
        )
        base += len(region)
    return positions[:-1], order[:-1]
