"""Counting gaps within classes of the old element, forwards (encoding) and backwards (finding the changes again).

Owns the lanes, the counters and the walks. Owns no order of changes and no bytes (codec/compactform.py).

A counter that is bumped for nearly every element waits for its own last store. So a region is walked in *tiles* of
16 Ki elements, each cut into four *lanes* with counters of their own, in step: four independent chains fill the
pipeline, and a tile stays in the cache between the comparison and the count. What is left of a region after its last
whole tile belongs to the last lane. Counters run on from tile to tile and from region to region. Small frames have one
lane.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import int32, int64, intp, uint32, uint64

from weight_sync.codec.diff import ChangeBuffer
from weight_sync.codec.machine import ctz, kernel, neq_mask64
from weight_sync.codec.ordered import flip_of, step_between
from weight_sync.dtypes import DType

__all__ = ["CLASSES", "NEVER", "TILE", "ClassCounter", "count_known", "find_changes", "lanes_for"]

CLASSES = 256
NEVER = (1 << 31) - 1  # more than a frame has elements
TILE = 1 << 14
_QUARTER = TILE // 4
_MANY_ELEMENTS = 1 << 20  # below, one lane: the table of counts would cost more than the time is worth


def lanes_for(elements: int) -> int:
    """Lanes of a frame of about so many elements."""
    return 4 if elements >= _MANY_ELEMENTS else 1


class ClassCounter:
    """Class and gap of the changes of one frame, in their order of position.

    Attributes:
        lanes: 1 or 4.
        keys: (capacity,) uint16: class * lanes + lane of each change.
        gaps: (capacity,) uint32: elements of the class in the lane since its last change.
    """

    def __init__(self, dtype: DType, lanes: int, capacity: int) -> None:
        self.dtype = dtype
        self.lanes = lanes
        self.keys = np.empty(capacity, np.uint16)
        self.gaps = np.empty(capacity, np.uint32)
        self._since = np.zeros((lanes, CLASSES), np.int32)

    def reset(self) -> None:
        """Begins the next frame."""
        self._since[:] = 0

    def diff_run(self, old: npt.NDArray[Any], new: npt.NDArray[Any], base: int, out: ChangeBuffer) -> int:
        """`diff.diff_run` that counts on the way; ends on a whole tile unless it reaches the end.

        A region may come in several calls; all but the last then have a multiple of TILE elements.
        """
        scan, _ = _walkers(*_class_rule(self.dtype))
        count, seen = scan(old, new, base, flip_of(self.dtype), out.positions, out.steps, out.count, len(self.keys),
                           self.lanes, self._since, self.keys, self.gaps)  # fmt: skip
        out.count = int(count)
        return int(seen)


def count_known(
    dtype: DType, lanes: int, positions: npt.NDArray[np.uint32], old: Sequence[npt.NDArray[Any]]
) -> ClassCounter:
    """The counts of changes that are known already; ``old``: per region all its elements before the change."""
    counter = ClassCounter(dtype, lanes, len(positions))
    _, walk = _walkers(*_class_rule(dtype))
    base = 0
    for region in old:
        start, stop = np.searchsorted(positions, [base, base + len(region)])
        walk(region, base, positions, start, stop, lanes, counter._since, counter.keys, counter.gaps)
        base += len(region)
    return counter


def _class_rule(dtype: DType) -> tuple[int, int]:
    return dtype.class_shift, (1 << dtype.class_bits) - 1


@kernel
def _compare(
    old: Any, new: Any, start: Any, stop: Any, base: Any, flip: Any, positions: Any, steps: Any, n: Any
) -> Any:
    """Appends the changes of [start, stop) from entry ``n`` on; returns the next free entry."""
    i = start
    while i + 64 <= stop:
        mask = neq_mask64(old, new, i)
        while mask != uint64(0):
            e = i + intp(ctz(mask))
            positions[n] = base + e
            steps[n] = step_between(old[e], new[e], flip)
            n += 1
            mask &= mask - uint64(1)
        i += 64
    while i < stop:
        if old[i] != new[i]:
            positions[n] = base + i
            steps[n] = step_between(old[i], new[i], flip)
            n += 1
        i += 1
    return n


@lru_cache(maxsize=16)
def _walkers(shift: int, mask: int) -> tuple[Any, Any]:
    """``scan`` compares and counts, ``walk`` counts changes that are known.

    Made per class rule: as constants, shift and mask cost half of what they cost as arguments.
    """
    SHIFT, MASK = np.uint64(shift), np.uint64(mask)

    @kernel
    def walk1(old: Any, start: Any, stop: Any, base: Any, positions: Any, at: Any, end: Any, lane: Any, lanes: Any,
              since: Any, keys: Any, gaps: Any) -> None:  # fmt: skip
        """Elements [start, stop) by one lane; their changes are entries [at, end)."""
        s = since[lane]
        i = start
        while True:
            due = int64(positions[at]) - base if at < end else stop
            for k in range(i, due):
                s[(uint64(old[k]) >> SHIFT) & MASK] += 1
            if due == stop:
                return
            c = (uint64(old[due]) >> SHIFT) & MASK
            keys[at] = c * uint64(lanes) + uint64(lane)
            gaps[at] = s[c]
            s[c] = 0
            at += 1
            i = due + 1

    @kernel
    def walk4(
        old: Any, start: Any, base: Any, positions: Any, at: Any, end: Any, since: Any, keys: Any, gaps: Any
    ) -> None:
        """One whole tile by four lanes; its changes are entries [at, end)."""
        s0, s1, s2, s3 = since[0], since[1], since[2], since[3]
        x0, x1 = old[start : start + _QUARTER], old[start + _QUARTER : start + 2 * _QUARTER]
        x2, x3 = old[start + 2 * _QUARTER : start + 3 * _QUARTER], old[start + 3 * _QUARTER : start + TILE]
        heads = np.empty(4, np.int64)
        tails = np.empty(4, np.int64)
        due = np.empty(4, np.int64)  # 4 * (where the lane changes next) + lane: the minimum needs no branch
        for lane in range(4):
            first = base + start + lane * _QUARTER
            heads[lane] = at
            while at < end and int64(positions[at]) < first + _QUARTER:
                at += 1
            tails[lane] = at
            due[lane] = 4 * _QUARTER + lane
            if heads[lane] < at:
                due[lane] = 4 * (int64(positions[heads[lane]]) - first) + lane
        i = 0
        while True:
            soonest = min(min(due[0], due[1]), min(due[2], due[3]))
            stop = soonest >> 2
            for k in range(i, stop):
                s0[(uint64(x0[k]) >> SHIFT) & MASK] += 1
                s1[(uint64(x1[k]) >> SHIFT) & MASK] += 1
                s2[(uint64(x2[k]) >> SHIFT) & MASK] += 1
                s3[(uint64(x3[k]) >> SHIFT) & MASK] += 1
            if stop == _QUARTER:
                return
            # the lane with a change reads its counter and clears it to -1, so that the next round's bump makes it 0
            lane = soonest & 3
            c = (uint64(old[start + lane * _QUARTER + stop]) >> SHIFT) & MASK
            n = heads[lane]
            keys[n] = c * uint64(4) + uint64(lane)
            gaps[n] = since[lane, c]
            since[lane, c] = -1
            heads[lane] = n + 1
            due[lane] = 4 * _QUARTER + lane
            if n + 1 < tails[lane]:
                due[lane] = 4 * (int64(positions[n + 1]) - base - start - lane * _QUARTER) + lane
            i = stop

    @kernel
    def walk(
        old: Any, base: Any, positions: Any, at: Any, end: Any, lanes: Any, since: Any, keys: Any, gaps: Any
    ) -> None:
        i = 0
        while lanes == 4 and i + TILE <= len(old):
            stop = at
            while stop < end and int64(positions[stop]) < base + i + TILE:
                stop += 1
            walk4(old, i, base, positions, at, stop, since, keys, gaps)
            at = stop
            i += TILE
        walk1(old, i, len(old), base, positions, at, end, lanes - 1, lanes, since, keys, gaps)

    @kernel
    def scan(old: Any, new: Any, base: Any, flip: Any, positions: Any, steps: Any, n: Any, limit: Any, lanes: Any,
             since: Any, keys: Any, gaps: Any) -> Any:  # fmt: skip
        i = 0
        while i < len(old):
            stop = min(i + TILE, len(old))
            if n + stop - i > limit:
                return n, i
            end = _compare(old, new, i, stop, base, flip, positions, steps, n)
            if lanes == 4 and stop - i == TILE:
                walk4(old, i, base, positions, n, end, since, keys, gaps)
            else:
                walk1(old, i, stop, base, positions, n, end, lanes - 1, lanes, since, keys, gaps)
            n = end
            i = stop
        return n, i

    return scan, walk


@kernel
def _hit(lane: Any, c: Any, at: Any, left: Any, head: Any, tail: Any, values: Any, positions: Any, order: Any,
         ends: Any) -> None:  # fmt: skip
    """Emits the change at ``at`` and counts down to the next one of its class."""
    k = head[lane, c]
    n = ends[lane]
    positions[n] = at
    order[n] = k
    ends[lane] = n + 1
    head[lane, c] = k + 1
    left[lane, c] = values[k + 1] >> uint32(1) if k + 1 < tail[lane, c] else NEVER


@lru_cache(maxsize=16)
def _finder(shift: int, mask: int) -> Any:
    """Finds the changes again: counters run down, an element whose counter drops below 0 has changed."""
    SHIFT, MASK = np.uint64(shift), np.uint64(mask)

    @kernel
    def find1(old: Any, start: Any, base: Any, lane: Any, left: Any, head: Any, tail: Any, values: Any, positions: Any,
              order: Any, ends: Any) -> None:  # fmt: skip
        for i in range(start, len(old)):
            c = (uint64(old[i]) >> SHIFT) & MASK
            r = left[lane, c] - int32(1)
            left[lane, c] = r
            if r < 0:
                _hit(lane, c, base + i, left, head, tail, values, positions, order, ends)

    @kernel
    def find4(old: Any, start: Any, base: Any, left: Any, head: Any, tail: Any, values: Any, positions: Any,
              order: Any, ends: Any) -> None:  # fmt: skip
        l0, l1, l2, l3 = left[0], left[1], left[2], left[3]
        x0, x1 = old[start : start + _QUARTER], old[start + _QUARTER : start + 2 * _QUARTER]
        x2, x3 = old[start + 2 * _QUARTER : start + 3 * _QUARTER], old[start + 3 * _QUARTER : start + TILE]
        i = uint64(0)  # unsigned, as all subscripts here: Numba then leaves out its handling of negative ones
        end = uint64(_QUARTER)
        while True:
            c0 = c1 = c2 = c3 = uint64(0)
            r0 = r1 = r2 = r3 = int32(0)
            while i < end:
                c0 = (uint64(x0[i]) >> SHIFT) & MASK
                r0 = l0[c0] - int32(1)
                l0[c0] = r0
                c1 = (uint64(x1[i]) >> SHIFT) & MASK
                r1 = l1[c1] - int32(1)
                l1[c1] = r1
                c2 = (uint64(x2[i]) >> SHIFT) & MASK
                r2 = l2[c2] - int32(1)
                l2[c2] = r2
                c3 = (uint64(x3[i]) >> SHIFT) & MASK
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
                _hit(1, c1, at + _QUARTER, left, head, tail, values, positions, order, ends)
            if r2 < 0:
                _hit(2, c2, at + 2 * _QUARTER, left, head, tail, values, positions, order, ends)
            if r3 < 0:
                _hit(3, c3, at + 3 * _QUARTER, left, head, tail, values, positions, order, ends)
            i += uint64(1)

    @kernel
    def find(old: Any, base: Any, left: Any, head: Any, tail: Any, values: Any, lane_positions: Any, lane_order: Any,
             room: Any, ends: Any, positions: Any, order: Any, n: Any) -> Any:  # fmt: skip
        """One region; after each tile the lanes' finds are lined up, which makes positions ascend."""
        lanes = len(left)
        i = 0
        while True:
            whole = lanes == 4 and i + TILE <= len(old)
            for lane in range(lanes):
                ends[lane] = room[lane]
            if whole:
                find4(old, i, base, left, head, tail, values, lane_positions, lane_order, ends)
            else:
                find1(old, i, base, lanes - 1, left, head, tail, values, lane_positions, lane_order, ends)
            for lane in range(lanes):
                for k in range(room[lane], ends[lane]):
                    positions[n] = lane_positions[k]
                    order[n] = lane_order[k]
                    n += 1
            if not whole:
                return n
            i += TILE

    return find


def find_changes(
    dtype: DType,
    old: Sequence[npt.NDArray[Any]],
    head: npt.NDArray[np.int64],
    tail: npt.NDArray[np.int64],
    values: npt.NDArray[np.uint32],
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
    """Positions, ascending, and the number of each change in the order of classes.

    Args:
        old: per region all its elements before the change.
        head, tail: (lanes, CLASSES) first and last + 1 entry of each counter's list; ``head`` is moved to ``tail``
            when the old elements are the right ones.
        values: (changes,) 2 * gap + sign, class by class.
    """
    find = _finder(*_class_rule(dtype))
    left = np.full(head.shape, NEVER, np.int32)
    live = head < tail
    left[live] = (values[head[live]] >> 1).astype(np.int32)
    counts = (tail - head).sum(axis=1)
    room = np.cumsum(counts) - counts
    lane_positions = np.empty(len(values), np.uint32)
    lane_order = np.empty(len(values), np.int64)
    positions = np.empty(len(values), np.uint32)
    order = np.empty(len(values), np.int64)
    n = base = 0
    for region in old:
        n = int(find(region, base, left, head, tail, values, lane_positions, lane_order, room, room.copy(), positions,
                     order, n))  # fmt: skip
        base += len(region)
    return positions, order
