"""The compact form: gaps counted within classes of the old element. A third smaller; needs every old bit of the frame.

Owns the class counters and the order of changes. Owns no entropy stage and no large steps (codec/stepform.py).

How likely an element is to change depends on its ulp, hence on its exponent. Counting gaps only over elements of the
same class makes each list nearly geometric with its own mean. Order of changes: class, lane, position.

A counter that is bumped for nearly every element waits for its own last store. So each region is cut into *lanes* of
equal length with counters of their own, walked in step: four independent chains fill the pipeline. The last lane
takes the remainder. Counters run on from region to region.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import int32, int64, uint32, uint64

from weight_sync.codec import classstream
from weight_sync.codec.machine import kernel
from weight_sync.codec.stepform import Cursor, decode_large, encode_large, half_of, put_signs
from weight_sync.dtypes import DType
from weight_sync.errors import FormatError, WrongBaseError
from weight_sync.proto.v1 import shard_pb2

__all__ = ["class_counts", "decode_compact", "encode_compact"]

_CLASSES = 256
_NEVER = (1 << 31) - 1  # more than a frame has elements
_MANY_ELEMENTS = 1 << 20  # below, one lane: the table of counts would cost more than the time is worth
_UNIT_SHARE = 0.75  # a class with fewer steps of one is coded step by step


def _class_rule(dtype: DType) -> tuple[int, int]:
    return dtype.class_shift, (1 << dtype.class_bits) - 1


@lru_cache(maxsize=16)
def _walkers(shift: int, mask: int) -> tuple[Any, Any]:
    """Kernels that count classes while they encode: over four lanes in step, and over one.

    Made per class rule: as constants, shift and mask cost half of what they cost as arguments.
    """
    SHIFT, MASK = np.uint64(shift), np.uint64(mask)

    @kernel
    def walk1(old: Any, at: Any, end: Any, positions: Any, base: Any, lane: Any, lanes: Any, since: Any,
              keys: Any, gaps: Any) -> None:  # fmt: skip
        i = 0
        while True:
            stop = int64(positions[at]) - base if at < end else len(old)
            for k in range(i, stop):
                since[lane, (uint64(old[k]) >> SHIFT) & MASK] += 1
            if stop == len(old):
                return
            c = (uint64(old[stop]) >> SHIFT) & MASK
            keys[at] = c * uint64(lanes) + uint64(lane)
            gaps[at] = since[lane, c]
            since[lane, c] = 0
            at += 1
            i = stop + 1

    @kernel
    def walk4(old: Any, q: Any, at: Any, end: Any, positions: Any, base: Any, since: Any, keys: Any, gaps: Any) -> None:
        s0, s1, s2, s3 = since[0], since[1], since[2], since[3]
        x0, x1, x2, x3 = old[:q], old[q : 2 * q], old[2 * q : 3 * q], old[3 * q : 4 * q]
        due = np.empty(4, np.int64)  # 4 * (where the lane changes next) + lane: the minimum needs no branch
        for lane in range(4):
            due[lane] = 4 * q + lane
            if at[lane] < end[lane]:
                due[lane] = 4 * (int64(positions[at[lane]]) - base - lane * q) + lane
        i = 0
        while True:
            first = min(min(due[0], due[1]), min(due[2], due[3]))
            stop = first >> 2
            for k in range(i, stop):
                s0[(uint64(x0[k]) >> SHIFT) & MASK] += 1
                s1[(uint64(x1[k]) >> SHIFT) & MASK] += 1
                s2[(uint64(x2[k]) >> SHIFT) & MASK] += 1
                s3[(uint64(x3[k]) >> SHIFT) & MASK] += 1
            if stop == q:
                return
            # the lane with a change reads its counter and clears it to -1, so that the next round's bump makes it 0
            lane = first & 3
            c = (uint64(old[lane * q + stop]) >> SHIFT) & MASK
            n = at[lane]
            keys[n] = c * uint64(4) + uint64(lane)
            gaps[n] = since[lane, c]
            since[lane, c] = -1
            at[lane] = n + 1
            due[lane] = 4 * q + lane
            if n + 1 < end[lane]:
                due[lane] = 4 * (int64(positions[n + 1]) - base - lane * q) + lane
            i = stop

    return walk1, walk4


@kernel
def _order(keys: Any, gaps: Any, steps: Any, half: Any, counts: Any, values: Any, sorted_steps: Any) -> None:
    """Stable counting sort by key; ``counts`` (classes * lanes + 1) becomes the start of each key."""
    for i in range(len(keys)):
        counts[keys[i] + 1] += 1
    for k in range(1, len(counts)):
        counts[k] += counts[k - 1]
    for i in range(len(keys)):
        to = counts[keys[i]]
        values[to] = (uint32(gaps[i]) << uint32(1)) | uint32(uint64(steps[i]) >= half)
        sorted_steps[to] = steps[i]
        counts[keys[i]] = to + 1


def encode_compact(
    frame: shard_pb2.Frame,
    positions: npt.NDArray[np.uint32],
    steps: npt.NDArray[Any],
    dtype: DType,
    old: Sequence[npt.NDArray[Any]],
) -> list[bytes]:
    """Fills the header; returns the payload's parts.

    Args:
        positions, steps: as for the step form.
        old: per region, in order, (count,) unsigned of the width: the elements before the change.
    """
    lanes = 4 if frame.elements >= _MANY_ELEMENTS else 1
    walk1, walk4 = _walkers(*_class_rule(dtype))
    since = np.zeros((lanes, _CLASSES), np.int32)
    keys = np.empty(len(positions), np.uint16)
    gaps = np.empty(len(positions), np.uint32)
    base = 0
    for region in old:
        q = len(region) // lanes
        cuts = np.searchsorted(positions, [base + lane * q for lane in range(lanes)] + [base + len(region)])
        at, end = cuts[:-1].copy(), cuts[1:].copy()
        first = 0
        if lanes == 4:
            first = 4 * q
            walk4(region, q, at, end, positions, base, since, keys, gaps)
        walk1(region[first:], int(at[-1]), int(end[-1]), positions, base + first, lanes - 1, lanes, since, keys, gaps)
        base += len(region)
    starts = np.zeros(_CLASSES * lanes + 1, np.int64)
    values = np.empty(len(positions), np.uint32)
    sorted_steps = np.empty(len(positions), dtype.uint)
    _order(keys, gaps, steps, half_of(dtype), starts, values, sorted_steps)
    counts = np.diff(starts[:-1], prepend=0).reshape(_CLASSES, lanes)
    used = np.flatnonzero(counts.sum(axis=1))
    frame.lanes = lanes
    frame.class_ids = bytes(used.tolist())
    frame.class_counts.extend(counts[used].ravel().tolist())
    ends = np.cumsum(counts[used].sum(axis=1))
    header, parts = classstream.encode_classes(np.split(values, ends)[:-1])
    frame.class_gaps.CopyFrom(header)
    return parts + _encode_steps(frame, np.split(sorted_steps, ends)[:-1], dtype)


def _encode_steps(frame: shard_pb2.Frame, runs: list[npt.NDArray[Any]], dtype: DType) -> list[bytes]:
    """Steps of classes that nearly always move by one go into the list of large steps, the others class by class."""
    one, minus_one = 1, (1 << (8 * dtype.width)) - 1
    units = [np.count_nonzero((run == one) | (run == minus_one)) for run in runs]
    wide = [bool(unit < _UNIT_SHARE * len(run)) for unit, run in zip(units, runs, strict=True)]
    frame.class_wide = bytes(wide)
    narrow = [run for run, is_wide in zip(runs, wide, strict=True) if not is_wide]
    parts = encode_large(frame, np.concatenate(narrow), dtype) if narrow else []
    sizes = [_sizes(run, half_of(dtype)) for run, is_wide in zip(runs, wide, strict=True) if is_wide]
    header, more = classstream.encode_classes(sizes)
    if sizes:
        frame.class_steps.CopyFrom(header)
    return parts + more


def _sizes(steps: npt.NDArray[Any], half: np.uint64) -> npt.NDArray[np.uint64]:
    """|step| - 1 of each."""
    wide = steps.astype(np.uint64)
    full = half + (half - np.uint64(1))
    return np.where(wide >= half, (~wide + np.uint64(1)) & full, wide) - np.uint64(1)


def class_counts(frame: shard_pb2.Frame) -> npt.NDArray[np.int64]:
    """(classes that changed, lanes). Raises FormatError when the tables of the header disagree."""
    n = len(frame.class_ids)
    lanes = frame.lanes
    ok = lanes in (1, 4) and len(frame.class_wide) == n and len(frame.class_counts) == n * lanes
    if not ok or sum(frame.class_counts) != frame.changes:
        raise FormatError("tables of classes disagree", field="class_counts", found=len(frame.class_counts))
    if sorted(set(frame.class_ids)) != list(frame.class_ids):
        raise FormatError("class ids are not ascending", field="class_ids", found=bytes(frame.class_ids))
    return np.array(frame.class_counts, np.int64).reshape(n, lanes)


def _decode_steps(
    frame: shard_pb2.Frame, cursor: Cursor, runs: list[npt.NDArray[np.uint32]], dtype: DType
) -> npt.NDArray[Any]:
    """Steps of all changes in the order of classes; ``runs`` carry the signs."""
    wide = [flag != 0 for flag in frame.class_wide]
    narrow = [run for run, is_wide in zip(runs, wide, strict=True) if not is_wide]
    few = decode_large(frame, cursor, np.concatenate(narrow) if narrow else np.empty(0, np.uint32), dtype)
    counts = [len(run) for run, is_wide in zip(runs, wide, strict=True) if is_wide]
    many = classstream.decode_classes(frame.class_steps, cursor, counts, np.uint64, "class_steps")
    out: list[npt.NDArray[Any]] = []
    at = 0
    rest = iter(many)
    for run, is_wide in zip(runs, wide, strict=True):
        if not is_wide:
            out.append(few[at : at + len(run)])
            at += len(run)
            continue
        sizes = next(rest)
        if len(sizes) and sizes.max() >= half_of(dtype):
            raise FormatError("a step leaves its dtype", field="class_steps", found=int(sizes.max()))
        steps = (sizes + np.uint64(1)).astype(dtype.uint)
        put_signs(run, steps)
        out.append(steps)
    return np.concatenate(out) if out else np.empty(0, dtype.uint)


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
    left[lane, c] = values[k + 1] >> uint32(1) if k + 1 < tail[lane, c] else _NEVER


@lru_cache(maxsize=16)
def _finders(shift: int, mask: int) -> tuple[Any, Any]:
    """Kernels that find the changes again: counters run down, an element whose counter drops below 0 has changed."""
    SHIFT, MASK = np.uint64(shift), np.uint64(mask)

    @kernel
    def find1(old: Any, base: Any, lane: Any, left: Any, head: Any, tail: Any, values: Any, positions: Any,
              order: Any, ends: Any) -> None:  # fmt: skip
        for i in range(len(old)):
            c = (uint64(old[i]) >> SHIFT) & MASK
            r = left[lane, c] - int32(1)
            left[lane, c] = r
            if r < 0:
                _hit(lane, c, base + i, left, head, tail, values, positions, order, ends)

    @kernel
    def find4(old: Any, q: Any, base: Any, left: Any, head: Any, tail: Any, values: Any, positions: Any,
              order: Any, ends: Any) -> None:  # fmt: skip
        l0, l1, l2, l3 = left[0], left[1], left[2], left[3]
        x0, x1, x2, x3 = old[:q], old[q : 2 * q], old[2 * q : 3 * q], old[3 * q : 4 * q]
        i = uint64(0)  # unsigned, as all subscripts here: Numba then leaves out its handling of negative ones
        end = uint64(q)
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
            at = base + int64(i)
            if r0 < 0:
                _hit(0, c0, at, left, head, tail, values, positions, order, ends)
            if r1 < 0:
                _hit(1, c1, at + q, left, head, tail, values, positions, order, ends)
            if r2 < 0:
                _hit(2, c2, at + 2 * q, left, head, tail, values, positions, order, ends)
            if r3 < 0:
                _hit(3, c3, at + 3 * q, left, head, tail, values, positions, order, ends)
            i += uint64(1)

    return find1, find4


@kernel
def _gather(order: Any, steps: Any, out: Any) -> None:
    for i in range(len(order)):
        out[i] = steps[order[i]]


def decode_compact(
    frame: shard_pb2.Frame, payload: memoryview, dtype: DType, old: Sequence[npt.NDArray[Any]]
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[Any]]:
    """Positions, ascending, and steps.

    Args:
        old: per region, in order, (count,) unsigned of the width: the elements before the change.

    Raises FormatError on malformed bytes and WrongBaseError when the old elements cannot be those it was made from.
    """
    cursor = Cursor(payload)
    counts = class_counts(frame)
    totals = counts.sum(axis=1).tolist()
    runs = classstream.decode_classes(frame.class_gaps, cursor, totals, np.uint32, "class_gaps")
    class_order_steps = _decode_steps(frame, cursor, runs, dtype)
    cursor.finish()
    values = np.concatenate(runs) if runs else np.empty(0, np.uint32)
    lanes = frame.lanes
    head = np.zeros((lanes, _CLASSES), np.int64)
    tail = np.zeros((lanes, _CLASSES), np.int64)
    ends = np.cumsum(counts.ravel()).reshape(counts.shape)
    ids = np.frombuffer(frame.class_ids, np.uint8)
    tail[:, ids] = ends.T
    head[:, ids] = (ends - counts).T
    left = np.full((lanes, _CLASSES), _NEVER, np.int32)
    live = head < tail
    left[live] = (values[head[live]] >> 1).astype(np.int32)
    positions = np.empty(frame.changes, np.uint32)
    order = np.empty(frame.changes, np.int64)
    _find(frame, dtype, old, (left, head, tail, values), positions, order)
    if not (head == tail).all():
        raise WrongBaseError("old elements do not fit the frame", field="class counts", do="rebuild from an anchor")
    steps = np.empty(frame.changes, dtype.uint)
    _gather(order, class_order_steps, steps)
    return positions, steps


def _find(frame: shard_pb2.Frame, dtype: DType, old: Sequence[npt.NDArray[Any]], state: tuple[Any, Any, Any, Any],
          positions: npt.NDArray[np.uint32], order: npt.NDArray[np.int64]) -> None:  # fmt: skip
    """Walks all regions; fills positions, ascending, and the number of each change in the order of changes."""
    left, head, tail, values = state
    lanes = frame.lanes
    find1, find4 = _finders(*_class_rule(dtype))
    room = np.concatenate([[0], np.cumsum((tail - head).sum(axis=1))])
    lane_positions = np.empty(frame.changes, np.uint32)
    lane_order = np.empty(frame.changes, np.int64)
    n = base = 0
    for region in old:
        first = 0
        ends = room[:lanes].copy()
        if lanes == 4:
            q = len(region) // 4
            first = 4 * q
            find4(region, q, base, left, head, tail, values, lane_positions, lane_order, ends)
        find1(region[first:], base + first, lanes - 1, left, head, tail, values, lane_positions, lane_order, ends)
        for lane in range(lanes):
            got = int(ends[lane] - room[lane])
            positions[n : n + got] = lane_positions[room[lane] : ends[lane]]
            order[n : n + got] = lane_order[room[lane] : ends[lane]]
            n += got
        base += len(region)
