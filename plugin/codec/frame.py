"""Frames: changes of a list of boxes of one dtype, as a header and bytes that decode on their own.

Owns the limits, the split of a frame into its boxes and the choice of the form's coder. Owns no container
(codec/shard.py) and no comparison (codec/diff.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from weight_sync.codec.classcount import ClassCounter, count_known, lanes_for
from weight_sync.codec.compactform import decode_compact, encode_compact
from weight_sync.codec.stepform import decode_absolute, decode_step, encode_absolute, encode_step
from weight_sync.dtypes import DType
from weight_sync.errors import CorruptionError, FormatError, LayoutError
from weight_sync.layout.box import Box
from weight_sync.ports import Changes
from weight_sync.proto.v1 import common_pb2, shard_pb2
from weight_sync.tensors import TensorSpec

__all__ = [
    "FRAME_CHANGES",
    "FRAME_ELEMENTS",
    "MAX_CHANGES",
    "MAX_ELEMENTS",
    "EncodedFrame",
    "FrameBox",
    "decode_frame",
    "encode_changes",
    "encode_frame",
    "hash16",
    "split",
]

MAX_ELEMENTS = 64 << 20  # of the format: positions and gaps fit 27 bits with the sign
MAX_CHANGES = 4 << 20  # of the format: bounds what a reader allocates
FRAME_ELEMENTS = 32 << 20  # what this writer makes: enough for small tables, few enough to share among threads
FRAME_CHANGES = 1 << 20  # what this writer makes: some 40 MB of work space per thread


@dataclass(frozen=True)
class FrameBox:
    """One box of one tensor as part of a frame."""

    spec: TensorSpec
    coords: Box


@dataclass(frozen=True)
class EncodedFrame:
    """Header, whose regions still lack their tensor numbers, boxes and payload."""

    header: shard_pb2.Frame
    boxes: tuple[FrameBox, ...]
    payload: tuple[bytes, ...]

    def changes(self) -> list[Changes]:
        """What a reader of this STEP frame will find, by decoding it."""
        payload = memoryview(b"".join(self.payload))
        return split(self.boxes, *decode_step(self.header, payload, self.boxes[0].spec.type))


def hash16(parts: Iterable[bytes | memoryview]) -> bytes:
    """First 16 bytes of BLAKE3."""
    hasher = blake3()
    for part in parts:
        hasher.update(part)
    return hasher.digest(length=16)


def encode_frame(
    form: common_pb2.Form,
    boxes: Sequence[FrameBox],
    positions: npt.NDArray[np.uint32],
    given: npt.NDArray[Any],
    old: Sequence[npt.NDArray[Any]] | None = None,
    counted: ClassCounter | None = None,
) -> EncodedFrame:
    """One frame.

    Args:
        form: STEP, COMPACT or ABSOLUTE.
        boxes: of one dtype, at most MAX_ELEMENTS together.
        positions: (n,) ascending, in frame coordinates, n at most MAX_CHANGES.
        given: (n,) steps, or new bits for ABSOLUTE; unsigned of the element's width.
        old: for COMPACT, per box all its elements before the change.
        counted: for COMPACT, classes and gaps that were counted while comparing; ``old`` is not needed then.
    """
    dtype = boxes[0].spec.type
    elements = sum(box.coords.count for box in boxes)
    assert elements <= MAX_ELEMENTS and len(positions) <= MAX_CHANGES, (elements, len(positions))
    header = shard_pb2.Frame(elements=elements, changes=len(positions))
    if form == common_pb2.FORM_STEP:
        parts = encode_step(header, positions, given, dtype)
    elif form == common_pb2.FORM_ABSOLUTE:
        parts = encode_absolute(header, positions, given)
    else:
        assert form == common_pb2.FORM_COMPACT
        if counted is None:
            assert old is not None
            counted = count_known(dtype, lanes_for(dtype, elements), positions, old)
        parts = encode_compact(header, given, dtype, counted)
    header.size = sum(map(len, parts))
    header.blake3 = hash16(parts)
    return EncodedFrame(header, tuple(boxes), tuple(parts))


def decode_frame(
    form: common_pb2.Form,
    header: shard_pb2.Frame,
    payload: memoryview,
    specs: Sequence[TensorSpec],
    old: Callable[[FrameBox], npt.NDArray[Any]] | None = None,
) -> list[Changes]:
    """The changes per box, boxes without any left out.

    Args:
        specs: the shard's table of tensors.
        old: for COMPACT: all elements of a box before the change, (count,) contiguous.

    Raises CorruptionError when the hash differs, FormatError when the bytes make no sense, WrongBaseError when a
    compact frame was made from other elements. Allocates in proportion to the payload and the announced changes.
    """
    if len(payload) != header.size or hash16([payload]) != header.blake3:
        raise CorruptionError("frame differs from its hash", field="blake3",
                              found=f"{hash16([payload]).hex()} of {len(payload)} bytes",
                              expected=f"{header.blake3.hex()} of {header.size} bytes", do="fetch it again")  # fmt: skip
    boxes, dtype = frame_boxes(header, specs)
    if form == common_pb2.FORM_STEP:
        positions, given = decode_step(header, payload, dtype)
    elif form == common_pb2.FORM_ABSOLUTE:
        positions, given = decode_absolute(header, payload, dtype)
    elif form == common_pb2.FORM_COMPACT:
        assert old is not None, "a compact frame needs the old elements"
        positions, given = decode_compact(header, payload, dtype, [old(box) for box in boxes])
    else:
        raise FormatError("frame of an unknown form", field="form", found=form, expected="STEP, COMPACT or ABSOLUTE")
    return split(boxes, positions, given, absolute=form == common_pb2.FORM_ABSOLUTE)


def frame_boxes(header: shard_pb2.Frame, specs: Sequence[TensorSpec]) -> tuple[list[FrameBox], DType]:
    """Boxes and dtype of a frame. Raises FormatError when counts, tensors or dtypes do not fit."""
    if header.elements > MAX_ELEMENTS or header.changes > min(MAX_CHANGES, header.elements):
        raise FormatError("frame is larger than the format allows", field="changes", found=header.changes,
                          expected=f"at most {min(MAX_CHANGES, header.elements)}")  # fmt: skip
    boxes: list[FrameBox] = []
    for region in header.regions:
        if region.tensor >= len(specs):
            raise FormatError("region names no tensor", field="tensor", found=region.tensor, expected=f"< {len(specs)}")
        spec = specs[region.tensor]
        try:
            boxes.append(FrameBox(spec, Box.from_region(region, spec.elements)))
        except LayoutError as error:
            raise FormatError("region does not fit its tensor", field=spec.name, found=str(error)) from error
    if not boxes or sum(box.coords.count for box in boxes) != header.elements:
        raise FormatError("regions do not add up", field="elements", found=header.elements)
    if len({box.spec.dtype for box in boxes}) != 1:
        raise FormatError("frame mixes dtypes", field="regions", found=sorted({box.spec.dtype for box in boxes}))
    return boxes, boxes[0].spec.type


def split(
    boxes: Sequence[FrameBox], positions: npt.NDArray[np.uint32], given: npt.NDArray[Any], absolute: bool = False
) -> list[Changes]:
    """Frame coordinates to boxes; boxes without changes are left out."""
    bases = np.concatenate([[0], np.cumsum([box.coords.count for box in boxes])])
    cuts = np.searchsorted(positions, bases.astype(np.uint32))  # of one dtype, or the positions would be copied
    out: list[Changes] = []
    for box, base, start, stop in zip(boxes, bases, cuts, cuts[1:], strict=False):
        if start == stop:
            continue
        at = positions[start:stop] - np.uint32(base) if base else positions[start:stop]
        some = given[start:stop]
        out.append(Changes(box.spec, box.coords, at, None if absolute else some, some if absolute else None))
    return out


def encode_changes(changes: Iterable[Changes], form: common_pb2.Form = common_pb2.FORM_STEP) -> Iterator[EncodedFrame]:
    """Frames of changes that are already known (a fold): neighbours of one dtype share a frame. STEP or ABSOLUTE."""
    batch: list[Changes] = []
    elements = count = 0
    for item in (part for whole in changes for part in _cut(whole)):
        full = elements + item.coords.count > FRAME_ELEMENTS or count + len(item.positions) > FRAME_CHANGES
        if batch and (full or item.spec.dtype != batch[0].spec.dtype):
            yield _join(batch, form)
            batch, elements, count = [], 0, 0
        batch.append(item)
        elements += item.coords.count
        count += len(item.positions)
    if batch:
        yield _join(batch, form)


def _cut(item: Changes) -> Iterator[Changes]:
    """A run that gathered more changes than a frame takes, as several runs; strided boxes are never that large."""
    if len(item.positions) <= FRAME_CHANGES:
        yield item
        return
    assert item.coords.is_run, item.coords
    for start in range(0, len(item.positions), FRAME_CHANGES):
        stop = min(start + FRAME_CHANGES, len(item.positions))
        first = int(item.positions[start]) if start else 0
        end = int(item.positions[stop]) if stop < len(item.positions) else item.coords.count
        yield Changes(item.spec, Box.run(item.coords.offset + first, end - first),
                      item.positions[start:stop] - np.uint32(first),
                      None if item.steps is None else item.steps[start:stop],
                      None if item.bits is None else item.bits[start:stop])  # fmt: skip


def _join(batch: list[Changes], form: common_pb2.Form) -> EncodedFrame:
    bases = np.cumsum([0] + [item.coords.count for item in batch])
    positions = np.concatenate([i.positions + np.uint32(base) for i, base in zip(batch, bases, strict=False)])
    given = [item.bits if form == common_pb2.FORM_ABSOLUTE else item.steps for item in batch]
    assert all(part is not None for part in given)
    boxes = [FrameBox(item.spec, item.coords) for item in batch]
    return encode_frame(form, boxes, positions, np.concatenate(given))  # type: ignore[arg-type]
