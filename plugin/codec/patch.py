"""One rank's patch: its pieces against their base, as encoded frames and what the manifest has to know.

Owns the plan of frames, the walk of diff and encode over threads, and the sums per tensor. Owns no base, no model and
no sending: both sides of the comparison come in as functions that read part of a piece.

Work is cut into frames of at most FRAME_ELEMENTS; a frame that fills up with changes is closed early and the rest goes
on in the next, so memory per thread is bounded whatever the density.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from weight_sync.codec.apply import changed_digest, new_bits_of
from weight_sync.codec.classcount import TILE, ClassCounter, lanes_for
from weight_sync.codec.diff import ChangeBuffer, diff_run
from weight_sync.codec.digest import Digest
from weight_sync.codec.frame import FRAME_CHANGES, FRAME_ELEMENTS, EncodedFrame, FrameBox, encode_frame, split
from weight_sync.codec.threads import ordered_map
from weight_sync.errors import TensorError
from weight_sync.layout.box import Box
from weight_sync.ports import Changes
from weight_sync.proto.v1 import common_pb2
from weight_sync.tensors import TensorSpec

__all__ = ["DiffPiece", "Patch", "TensorSum", "encode_patch", "nonfinite", "plan_frames"]

READ = 4 << 20  # elements read from the new side at a time: bounds copies where a cast or a gather is needed


@dataclass(frozen=True)
class DiffPiece:
    """One box of one tensor, before and after.

    Attributes:
        old: (count,) unsigned, contiguous.
        read: elements [start, stop) after the change, unsigned, contiguous; called from several threads.
        diff: optional own way to compare (on a device): appends to a buffer from ``start`` on, returns elements seen.
    """

    spec: TensorSpec
    coords: Box
    old: Callable[[], npt.NDArray[Any]]
    read: Callable[[int, int], npt.NDArray[Any]]
    diff: Callable[[int, int, int, ChangeBuffer], int] | None = None


@dataclass
class TensorSum:
    """What a patch does to one tensor."""

    changed: int = 0
    digest: Digest = field(default_factory=Digest)


@dataclass
class Patch:
    """One rank's part of a version.

    Attributes:
        frames: per form.
        sums: per tensor that changed.
        elements, changed: totals of this rank.
    """

    frames: dict[int, list[EncodedFrame]]
    sums: dict[str, TensorSum]
    elements: int = 0
    changed: int = 0

    @property
    def nbytes(self) -> int:
        """Payload bytes of all forms."""
        return sum(frame.header.size for frames in self.frames.values() for frame in frames)


@dataclass(frozen=True)
class _Span:
    """Elements [start, stop) of a piece."""

    piece: DiffPiece
    start: int
    stop: int


def plan_frames(pieces: Iterable[DiffPiece]) -> Iterator[list[_Span]]:
    """Spans of one dtype that share a frame; runs are cut where a frame is full, strided boxes come small enough."""
    batch: list[_Span] = []
    room = 0
    for piece in _boxed(pieces):
        at = 0
        room = room if batch else _room(piece)
        while at < piece.coords.count:
            take = min(room, piece.coords.count - at)
            cut = take < piece.coords.count - at and not piece.coords.is_run
            if batch and (not room or cut or batch[0].piece.spec.dtype != piece.spec.dtype):
                yield batch
                batch, room = [], _room(piece)
                continue
            batch.append(_Span(piece, at, at + take))
            at += take
            room -= take
    if batch:
        yield batch


def _room(piece: DiffPiece) -> int:
    """Elements of a frame. Those of one byte have the largest tables of classes, so there are twice as many to bear them."""
    return FRAME_ELEMENTS * (2 if piece.spec.type.width == 1 else 1)


def _boxed(pieces: Iterable[DiffPiece]) -> Iterator[DiffPiece]:
    """Strided boxes cut along their outer dimensions until even if all of one changed a frame would hold it.

    Part of a run is a run, but part of a strided box's enumeration is no box, so it cannot be cut when a frame fills.
    """
    for piece in pieces:
        box = piece.coords
        if box.is_run or box.count <= FRAME_CHANGES:
            yield piece
            continue
        inner = box.count // box.sizes[0]
        rows = max(1, FRAME_CHANGES // inner)
        for first in range(0, box.sizes[0], rows):
            count = min(rows, box.sizes[0] - first)
            offset = box.offset + first * box.strides[0]
            part = Box(offset, (count, *box.sizes[1:]), box.strides)
            if count == 1:
                part = Box(offset, box.sizes[1:], box.strides[1:])
            yield from _boxed([_part_of(piece, part, first * inner)])


def _part_of(piece: DiffPiece, box: Box, start: int) -> DiffPiece:
    """Elements from ``start`` of the piece's enumeration on, which are ``box``."""
    old, read, diff = piece.old, piece.read, piece.diff
    return DiffPiece(
        piece.spec,
        box,
        lambda: old()[start : start + box.count],
        lambda a, b: read(start + a, start + b),
        None if diff is None else lambda a, b, base, out: diff(start + a, start + b, base, out),
    )


def encode_patch(pieces: Sequence[DiffPiece], forms: Sequence[common_pb2.Form], threads: int,
                 refuse_nonfinite: bool = False) -> Patch:  # fmt: skip
    """Diffs and encodes all pieces.

    Args:
        forms: STEP, COMPACT or both.
        refuse_nonfinite: raise TensorError when a changed element became NaN or infinity.
    """
    patch = Patch({form: [] for form in forms}, defaultdict(TensorSum))

    def work(spans: list[_Span]) -> list[tuple[dict[int, EncodedFrame], list[tuple[str, int, Digest]]]]:
        return list(_encode_spans(spans, forms, refuse_nonfinite))

    for results in ordered_map(work, plan_frames(pieces), threads):
        for frames, sums in results:
            for form, frame in frames.items():
                patch.frames[form].append(frame)
            for name, changed, digest in sums:
                patch.sums[name].changed += changed
                patch.sums[name].digest += digest
                patch.changed += changed
    patch.elements = sum(piece.coords.count for piece in pieces)
    return patch


_Result = tuple[dict[int, EncodedFrame], list[tuple[str, int, Digest]]]


def _encode_spans(spans: list[_Span], forms: Sequence[common_pb2.Form], refuse_nonfinite: bool) -> Iterator[_Result]:
    """One frame, or several when the changes do not fit one."""
    dtype, elements = spans[0].piece.spec.type, sum(span.stop - span.start for span in spans)
    out = ChangeBuffer(dtype, min(FRAME_CHANGES, elements))
    fused = dtype.class_bits > 0 and all(span.piece.diff is None for span in spans)
    counter = None
    if common_pb2.FORM_COMPACT in forms and fused:
        out = ChangeBuffer(dtype, max(min(FRAME_CHANGES, elements), min(TILE, elements)))
        counter = ClassCounter(dtype, lanes_for(dtype, elements), out.capacity)
    used: list[_Span] = []
    base = 0
    for span in spans:
        at = span.start
        while at < span.stop:
            whole = not span.piece.coords.is_run and out.count + span.stop - at > out.capacity
            seen = 0 if out.full or whole else _diff_span(span.piece, at, span.stop, base, out, counter)
            if not seen:  # the frame is full
                yield _close(used, out, forms, refuse_nonfinite, counter)
                used, base, out.count = [], 0, 0
                continue
            used.append(_Span(span.piece, at, at + seen))
            at += seen
            base += seen
    yield _close(used, out, forms, refuse_nonfinite, counter)


def _diff_span(
    piece: DiffPiece, start: int, stop: int, base: int, out: ChangeBuffer, counter: ClassCounter | None
) -> int:
    """Appends the changes of [start, stop); returns how many elements were looked at, all unless the buffer is full."""
    if piece.diff is not None:
        return piece.diff(start, stop, base, out)
    diff = diff_run if counter is None else counter.diff_run
    old = piece.old()
    at = start
    while at < stop:
        end = min(at + READ, stop)
        seen = diff(old[at:end], piece.read(at, end), base + at - start, out)
        at += seen
        if at < end:
            break
    return at - start


def _close(
    used: list[_Span], out: ChangeBuffer, forms: Sequence[common_pb2.Form], refuse_nonfinite: bool,
    counter: ClassCounter | None,
) -> _Result:  # fmt: skip
    """The frame of what is in the buffer, in all forms, and the sums per tensor."""
    positions, steps = out.view()
    if not len(positions):
        if counter is not None:
            counter.reset()
        return {}, []
    boxes = [FrameBox(span.piece.spec, _box_of(span)) for span in used]
    compact = common_pb2.FORM_COMPACT in forms and counter is None
    old = [span.piece.old()[span.start : span.stop] for span in used] if compact else None
    frames: dict[int, EncodedFrame] = {
        int(form): encode_frame(form, boxes, positions, steps, old, counter) for form in forms
    }
    if counter is not None:
        counter.reset()
    sums: list[tuple[str, int, Digest]] = []
    at = 0
    for item in split(boxes, positions, steps):  # in the order of positions, as the old bits are
        old_bits = out.old_bits[at : at + len(item.positions)]
        at += len(old_bits)
        if refuse_nonfinite:
            _check_finite(item, old_bits)
        sums.append((item.spec.name, len(old_bits), changed_digest(item, old_bits)))
    return frames, sums


def _box_of(span: _Span) -> Box:
    coords = span.piece.coords
    if span.start == 0 and span.stop == coords.count:
        return coords
    assert coords.is_run, "a strided box is never cut here"
    return Box.run(coords.offset + span.start, span.stop - span.start)


def _check_finite(item: Changes, old_bits: npt.NDArray[Any]) -> None:
    bad = nonfinite(item.spec, new_bits_of(item, old_bits))
    if bad.any():
        first = int(np.flatnonzero(bad)[0])
        raise TensorError(
            "tensor holds NaN or infinity", field=item.spec.name,
            found=f"{int(bad.sum())} of {len(bad)} changed elements, the first at index "
            f"{int(item.coords.indices(item.positions[first : first + 1])[0])}",
            do="repair the step, or publish without refuse_nonfinite",
        )  # fmt: skip


def nonfinite(spec: TensorSpec, bits: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """True where the bits are NaN or infinity of the spec's dtype; False everywhere for dtypes without them."""
    masks = {"F64": 0x7FF << 52, "F32": 0xFF << 23, "F16": 0x1F << 10, "BF16": 0xFF << 7, "F8_E5M2": 0x1F << 2}
    if spec.dtype == "F8_E4M3":
        return np.asarray((bits & 0x7F) == 0x7F)
    mask = masks.get(spec.dtype)
    if mask is None:
        return np.zeros(len(bits), np.bool_)
    return np.asarray((bits & bits.dtype.type(mask)) == mask)
