"""Counting gaps within classes of the old element: the encoding half of the compact form.

Owns the lanes, the counters and the walk by elements. Owns no order of changes and no bytes (codec/compactform.py), and
not the way back (codec/classfind.py).

A region is walked in *tiles* of 16 Ki elements, which stay in the cache between the comparison and the count.
Counters run on from tile to tile and from region to region. Frames have one lane, and are counted block by block with
vector instructions (codec/classvector.py) as long as few classes hold most elements.

Elements of one byte have too many classes for that, and a counter that is bumped for nearly every element waits for its
own last store. So their large frames cut each tile into four *lanes* with counters of their own, in step: four
independent chains fill the pipeline. What is left of a region after its last whole tile belongs to the last lane.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import int64, uint64

from weight_sync.codec.classrule import CLASSES, class_rule, constants
from weight_sync.codec.classvector import BLOCK, CUT, count_blocks, scan_blocks, window
from weight_sync.codec.diff import ChangeBuffer, compare
from weight_sync.codec.machine import kernel
from weight_sync.codec.ordered import flip_of
from weight_sync.dtypes import DType

__all__ = ["QUARTER", "TILE", "ClassCounter", "count_known", "lanes_for"]

TILE = 1 << 14
QUARTER = TILE // 4
_MANY_ELEMENTS = 1 << 20  # below, one lane: the table of counts would cost more than the time is worth


def lanes_for(dtype: DType, elements: int) -> int:
    """Lanes of a frame of about so many elements."""
    return 4 if dtype.width == 1 and dtype.class_bits and elements >= _MANY_ELEMENTS else 1


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
        count, seen = _scan(
            class_rule(self.dtype),
            old,
            new,
            base,
            flip_of(self.dtype),
            out.positions,
            out.steps,
            out.old_bits,
            out.count,
            len(self.keys),
            self.lanes,
            self._since,
            self.keys,
            self.gaps,
        )
        out.count = int(count)
        return int(seen)


def count_known(
    dtype: DType, lanes: int, positions: npt.NDArray[np.uint32], old: Sequence[npt.NDArray[Any]]
) -> ClassCounter:
    """The counts of changes that are known already; ``old``: per region all its elements before the change."""
    counter = ClassCounter(dtype, lanes, len(positions))
    if not dtype.class_bits and lanes == 1:  # one class: its gaps are the gaps of positions
        counter.keys[:] = 0
        counter.gaps[:] = np.diff(positions.astype(np.int64), prepend=-1) - 1
        return counter
    base = 0
    for region in old:
        start, stop = np.searchsorted(positions, [base, base + len(region)])
        _count(
            class_rule(dtype), region, base, positions, start, stop, lanes, counter._since, counter.keys, counter.gaps
        )
        base += len(region)
    return counter


@kernel
def _walk1(
    rule: Any,
    old: Any,
    start: Any,
    stop: Any,
    base: Any,
    positions: Any,
    at: Any,
    end: Any,
    lane: Any,
    lanes: Any,
    since: Any,
    keys: Any,
    gaps: Any,
) -> None:
    """Elements [start, stop) by one lane; their changes are entries [at, end)."""
    shift, mask = constants(rule)
    s = since[lane]
    i = start
    while True:
        due = int64(positions[at]) - base if at < end else stop
        for k in range(i, due):
            s[(uint64(old[k]) >> shift) & mask] += 1
        if due == stop:
            return
        c = (uint64(old[due]) >> shift) & mask
        keys[at] = c * uint64(lanes) + uint64(lane)
        gaps[at] = s[c]
        s[c] = 0
        at += 1
        i = due + 1


@kernel
def _walk4(
    rule: Any, old: Any, start: Any, base: Any, positions: Any, at: Any, end: Any, since: Any, keys: Any, gaps: Any
) -> None:
    """One whole tile by four lanes; its changes are entries [at, end)."""
    shift, mask = constants(rule)
    s0, s1, s2, s3 = since[0], since[1], since[2], since[3]
    x0, x1 = old[start : start + QUARTER], old[start + QUARTER : start + 2 * QUARTER]
    x2, x3 = old[start + 2 * QUARTER : start + 3 * QUARTER], old[start + 3 * QUARTER : start + TILE]
    heads = np.empty(4, np.int64)
    tails = np.empty(4, np.int64)
    due = np.empty(4, np.int64)  # 4 * (where the lane changes next) + lane: the minimum needs no branch
    for lane in range(4):
        first = base + start + lane * QUARTER
        heads[lane] = at
        while at < end and int64(positions[at]) < first + QUARTER:
            at += 1
        tails[lane] = at
        due[lane] = 4 * QUARTER + lane
        if heads[lane] < at:
            due[lane] = 4 * (int64(positions[heads[lane]]) - first) + lane
    i = 0
    while True:
        soonest = min(min(due[0], due[1]), min(due[2], due[3]))
        stop = soonest >> 2
        for k in range(i, stop):
            s0[(uint64(x0[k]) >> shift) & mask] += 1
            s1[(uint64(x1[k]) >> shift) & mask] += 1
            s2[(uint64(x2[k]) >> shift) & mask] += 1
            s3[(uint64(x3[k]) >> shift) & mask] += 1
        if stop == QUARTER:
            return
        # the lane with a change reads its counter and clears it to -1, so that the next round's bump makes it 0
        lane = soonest & 3
        c = (uint64(old[start + lane * QUARTER + stop]) >> shift) & mask
        n = heads[lane]
        keys[n] = c * uint64(4) + uint64(lane)
        gaps[n] = since[lane, c]
        since[lane, c] = -1
        heads[lane] = n + 1
        due[lane] = 4 * QUARTER + lane
        if n + 1 < tails[lane]:
            due[lane] = 4 * (int64(positions[n + 1]) - base - start - lane * QUARTER) + lane
        i = stop


@kernel
def _walk(rule: Any, old: Any, start: Any, stop: Any, base: Any, positions: Any, at: Any, end: Any, lanes: Any,
          since: Any, keys: Any, gaps: Any) -> None:  # fmt: skip
    """Elements [start, stop), at most a tile; their changes are entries [at, end)."""
    if lanes == 4 and stop - start == TILE:
        _walk4(rule, old, start, base, positions, at, end, since, keys, gaps)
    else:
        _walk1(rule, old, start, stop, base, positions, at, end, lanes - 1, lanes, since, keys, gaps)


@kernel
def _count(
    rule: Any, old: Any, base: Any, positions: Any, at: Any, end: Any, lanes: Any, since: Any, keys: Any, gaps: Any
) -> None:
    """One region."""
    i = 0
    low, pays = window(rule, old)
    if lanes == 1 and pays:
        at = count_blocks(rule, old, base, positions, at, end, low, since[0], keys, gaps)
        i = len(old) // BLOCK * BLOCK
    while i < len(old):
        until = min(i + TILE, len(old))
        stop = at
        while stop < end and int64(positions[stop]) < base + until:
            stop += 1
        _walk(rule, old, i, until, base, positions, at, stop, lanes, since, keys, gaps)
        at = stop
        i = until


@kernel
def _scan(rule: Any, old: Any, new: Any, base: Any, flip: Any, positions: Any, steps: Any, old_bits: Any, n: Any,
          limit: Any, lanes: Any, since: Any, keys: Any, gaps: Any) -> Any:  # fmt: skip
    i = 0
    low, pays = window(rule, old)
    if lanes == 1 and pays:
        n, i = scan_blocks(rule, old, new, base, flip, positions, steps, old_bits, n, limit, low, since[0], keys, gaps)
    apart = CUT if lanes == 1 else TILE
    while i < len(old):
        stop = min(i + apart, len(old))
        if n + stop - i > limit:
            return n, i
        end = compare(old, new, i, stop, base, flip, positions, steps, old_bits, n)
        _walk(rule, old, i, stop, base, positions, n, end, lanes, since, keys, gaps)
        n = end
        i = stop
    return n, i
