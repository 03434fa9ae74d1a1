"""The compact form: gaps counted within classes of the old element. A third smaller; needs every old bit of the frame.

Owns the order of changes and the headers. Owns no counting (codec/classcount.py, classfind.py), no entropy stage
(codec/classstream.py) and no large steps (codec/stepform.py).

How likely an element is to change depends on its ulp, hence on its exponent. Counting gaps only over elements of the
same class makes each list nearly geometric with its own mean. Order of changes: class, lane, position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import uint32, uint64

from weight_sync.codec import classstream
from weight_sync.codec.classcount import ClassCounter
from weight_sync.codec.classfind import find_changes
from weight_sync.codec.classrule import CLASSES, NEVER
from weight_sync.codec.classtable import pack_tables, unpack_tables
from weight_sync.codec.machine import kernel
from weight_sync.codec.stepform import Cursor, decode_large, encode_large, half_of
from weight_sync.dtypes import DType
from weight_sync.errors import FormatError, WrongBaseError
from weight_sync.proto.v1 import shard_pb2

__all__ = ["class_counts", "decode_compact", "encode_compact"]

_UNIT_SHARE = 0.75  # a class with fewer steps of one is coded step by step
_ONE_WAY = 0.4  # so is one whose share of rises and that of falls are further apart


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


def encode_compact(frame: shard_pb2.Frame, steps: npt.NDArray[Any], dtype: DType, counted: ClassCounter) -> list[bytes]:
    """Fills the header; returns the payload's parts.

    Args:
        steps: of the changes, in the order of positions.
        counted: their classes and gaps.
    """
    lanes, keys, gaps = counted.lanes, counted.keys[: len(steps)], counted.gaps[: len(steps)]
    starts = np.zeros(CLASSES * lanes + 1, np.int64)
    values = np.empty(len(steps), np.uint32)
    sorted_steps = np.empty(len(steps), dtype.uint)
    _order(keys, gaps, steps, half_of(dtype), starts, values, sorted_steps)
    counts = np.diff(starts[:-1], prepend=0).reshape(CLASSES, lanes)
    used = np.flatnonzero(counts.sum(axis=1))
    frame.lanes = lanes
    frame.class_ids = bytes(used.tolist())
    frame.class_counts.extend(counts[used].ravel().tolist())
    ends = np.cumsum(counts[used].sum(axis=1))
    runs, steps_of = np.split(values, ends)[:-1], np.split(sorted_steps, ends)[:-1]
    wide = [_is_wide(run, some) for run, some in zip(runs, steps_of, strict=True)]
    frame.class_wide = bytes(wide)
    header, parts = classstream.encode_classes(
        [run >> np.uint32(1) if is_wide else run for run, is_wide in zip(runs, wide, strict=True)]
    )
    frame.class_gaps.CopyFrom(header)
    parts += _encode_steps(frame, steps_of, wide, dtype)
    pack_tables(frame)
    return parts


def _is_wide(run: npt.NDArray[np.uint32], steps: npt.NDArray[Any]) -> bool:
    """Whether a class's steps are coded one by one: few are of size one, or most go one way."""
    minus_one = (1 << (8 * steps.itemsize)) - 1
    units = np.count_nonzero((steps == 1) | (steps == minus_one))
    minus = np.count_nonzero(run & np.uint32(1))
    return bool(units < _UNIT_SHARE * len(run) or abs(2 * minus - len(run)) > _ONE_WAY * len(run))


def _encode_steps(frame: shard_pb2.Frame, runs: list[npt.NDArray[Any]], wide: list[bool], dtype: DType) -> list[bytes]:
    """Steps of classes that nearly always move by one go into the list of large steps, the others class by class."""
    narrow = [run for run, is_wide in zip(runs, wide, strict=True) if not is_wide]
    parts = encode_large(frame, np.concatenate(narrow), dtype) if narrow else []
    sizes = [_sizes(run, half_of(dtype)) for run, is_wide in zip(runs, wide, strict=True) if is_wide]
    header, more = classstream.encode_classes(sizes, spread=False)
    if sizes:
        frame.class_steps.CopyFrom(header)
    return parts + more


def _sizes(steps: npt.NDArray[Any], half: np.uint64) -> npt.NDArray[np.uint64]:
    """2 (|step| - 1) + (step < 0) of each; the one step whose size is ``half`` counts as negative."""
    wide = steps.astype(np.uint64)
    full = half + (half - np.uint64(1))
    size = np.where(wide >= half, (~wide + np.uint64(1)) & full, wide) - np.uint64(1)
    return (size << np.uint64(1)) | (wide >= half)


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


@kernel
def _merge_steps(wide: Any, counts: Any, values: Any, few: Any, sizes: Any, half: Any, out: Any) -> Any:
    """Steps class by class, those of wide classes from their sizes; ``values`` receive the signs of wide ones. Returns
    how many changes were done before one that makes no sense.
    """
    n = narrow = done = 0
    for i in range(len(counts)):
        for _ in range(counts[i]):
            if not wide[i]:
                out[n] = few[narrow]
                narrow += 1
            else:
                size = uint64(sizes[done])
                if size >> uint64(1) >= half or values[n] > NEVER:
                    return n
                minus = size & uint64(1)
                values[n] = (values[n] << uint32(1)) | uint32(minus)
                out[n] = (((size >> uint64(1)) + uint64(1)) ^ (uint64(0) - minus)) + minus
                done += 1
            n += 1
    return n


def _decode_steps(
    frame: shard_pb2.Frame, cursor: Cursor, counts: npt.NDArray[np.int64], values: npt.NDArray[np.uint32], dtype: DType
) -> npt.NDArray[Any]:
    """Steps of all changes in the order of classes. ``values`` carry the signs of narrow classes and receive those of wide
    ones; ``counts``: changes per class.
    """
    wide = np.frombuffer(frame.class_wide, np.uint8) != 0
    few = decode_large(frame, cursor, values[np.repeat(~wide, counts)], dtype)
    sizes = classstream.decode_classes(frame.class_steps, cursor, counts[wide].tolist(), np.uint64, "class_steps")
    out = np.empty(len(values), dtype.uint)
    done = int(_merge_steps(wide, counts, values, few, sizes, half_of(dtype), out))
    if done < len(values):
        raise FormatError(
            "a step or a gap leaves its dtype or frame", field="class_steps", found=done, do="fetch it again"
        )
    return out


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
    frame = unpack_tables(frame)
    counts = class_counts(frame)
    totals = counts.sum(axis=1)
    values = classstream.decode_classes(frame.class_gaps, cursor, totals.tolist(), np.uint32, "class_gaps")
    class_order_steps = _decode_steps(frame, cursor, totals, values, dtype)
    cursor.finish()
    lanes = frame.lanes
    head = np.zeros((lanes, CLASSES), np.int64)
    tail = np.zeros((lanes, CLASSES), np.int64)
    ends = np.cumsum(counts.ravel()).reshape(counts.shape)
    ids = np.frombuffer(frame.class_ids, np.uint8)
    tail[:, ids] = ends.T
    head[:, ids] = (ends - counts).T
    positions, order = find_changes(dtype, old, head, tail, values)
    if not (head == tail).all():
        raise WrongBaseError("old elements do not fit the frame", field="class counts", do="rebuild from an anchor")
    steps = np.empty(frame.changes, dtype.uint)
    _gather(order, class_order_steps, steps)
    return positions, steps
