"""The step form: absolute positions and steps of one frame, as bytes and back.

Owns the numbers of the form: ``2 * gap + (step < 0)`` per change, and the list of steps larger than one. Owns no
frames (codec/frame.py) and no entropy stage (codec/intstream.py). The compact form shares the large steps.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import intp, uint32, uint64

from weight_sync.codec import intstream
from weight_sync.codec.machine import kernel
from weight_sync.dtypes import DType
from weight_sync.errors import FormatError
from weight_sync.proto.v1 import shard_pb2

__all__ = ["Cursor", "decode_large", "decode_step", "encode_large", "encode_step", "half_of"]


class Cursor:
    """Cuts a frame's payload into its parts, in order. Raises FormatError when it ends too early."""

    def __init__(self, payload: memoryview) -> None:
        self._rest = payload

    def take(self, size: int) -> memoryview:
        """The next ``size`` bytes."""
        if size > len(self._rest):
            raise FormatError("frame is shorter than its streams", field="size", found=len(self._rest), expected=size)
        part, self._rest = self._rest[:size], self._rest[size:]
        return part

    def finish(self) -> None:
        """Raises FormatError when bytes are left."""
        if len(self._rest):
            raise FormatError("frame is longer than its streams", field="size", found=len(self._rest), expected=0)


def half_of(dtype: DType) -> np.uint64:
    """2^(bits - 1): steps from here up are negative."""
    return np.uint64(1 << (8 * dtype.width - 1))


@kernel
def _gaps(positions: Any, steps: Any, half: Any, out: Any) -> None:
    due = uint32(0)  # the position that a gap of 0 means
    for i in range(len(positions)):
        p = uint32(positions[i])
        out[i] = ((p - due) << uint32(1)) | uint32(uint64(steps[i]) >= half)
        due = p + uint32(1)


@kernel
def _positions(values: Any, sign_bits: Any, positions: Any, elements: Any) -> Any:
    due = uint64(0)
    for i in range(len(values)):
        p = due + (uint64(values[i]) >> uint64(sign_bits))
        positions[i] = p
        due = p + uint64(1)
    return due <= uint64(elements)  # positions ascend, so the last one tells; sums of 2^32 numbers of 32 bits fit


@kernel
def _large(steps: Any, half: Any, gaps: Any, sizes: Any) -> Any:
    n = 0
    due = 0
    full = uint64(half) + (uint64(half) - uint64(1))  # the mask of the width
    for i in range(len(steps)):
        s = uint64(steps[i])
        size = (uint64(0) - s) & full if s >= half else s
        found = intp(size != uint64(1))
        gaps[n] = i - due  # written each time and kept when it counts: one step in ten is large, at random
        sizes[n] = size - uint64(2)
        due += (i + 1 - due) * found
        n += found
    return n


@kernel
def _apply_large(gaps: Any, sizes: Any, half: Any, out: Any) -> Any:
    """``out`` holds 1 everywhere and receives the larger sizes."""
    at = uint64(0)
    for i in range(len(gaps)):
        at += uint64(gaps[i])
        if at >= uint64(len(out)) or sizes[i] > uint64(half) - uint64(2):
            return False
        out[at] = sizes[i] + uint64(2)
        at += uint64(1)
    return True


@kernel
def put_signs(values: Any, sizes: Any) -> None:
    """Negates the sizes whose value is odd, modulo the width."""
    for i in range(len(values)):
        minus = uint64(0) - (uint64(values[i]) & uint64(1))  # no branch: signs are unpredictable
        sizes[i] = (uint64(sizes[i]) ^ minus) - minus


def encode_large(frame: shard_pb2.Frame, steps: npt.NDArray[Any], dtype: DType) -> list[bytes]:
    """Adds the large steps to the header; returns their bytes. ``steps`` in the form's own order of changes."""
    gaps = np.empty(len(steps) + 1, np.uint32)
    sizes = np.empty(len(steps) + 1, np.uint64)
    count = int(_large(steps, half_of(dtype), gaps, sizes))
    if not count:
        return []
    large_gaps, parts = intstream.encode(gaps[:count])
    large_steps, more = intstream.encode(sizes[:count])
    frame.large_gaps.CopyFrom(large_gaps)
    frame.large_steps.CopyFrom(large_steps)
    return parts + more


def decode_large(
    frame: shard_pb2.Frame, cursor: Cursor, values: npt.NDArray[np.uint32], dtype: DType
) -> npt.NDArray[Any]:
    """Steps of the listed changes, unsigned of the width; ``values`` carry the signs in their lowest bit."""
    steps = np.ones(len(values), dtype.uint)
    if frame.HasField("large_gaps"):
        if not frame.large_gaps.count == frame.large_steps.count <= len(values):
            raise FormatError("counts of large steps disagree", field="large_steps", found=frame.large_steps.count)
        gaps = intstream.decode(
            frame.large_gaps, cursor.take(intstream.stream_size(frame.large_gaps)), np.uint32, "large_gaps"
        )
        sizes = intstream.decode(
            frame.large_steps, cursor.take(intstream.stream_size(frame.large_steps)), np.uint64, "large_steps"
        )
        if not _apply_large(gaps, sizes, half_of(dtype), steps):
            raise FormatError("a large step lies outside its frame or dtype", field="large_steps", do="fetch it again")
    put_signs(values, steps)
    return steps


def encode_step(
    frame: shard_pb2.Frame, positions: npt.NDArray[np.uint32], steps: npt.NDArray[Any], dtype: DType
) -> list[bytes]:
    """Fills the header; returns the payload's parts."""
    values = np.empty(len(positions), np.uint32)
    _gaps(positions, steps, half_of(dtype), values)
    gaps, parts = intstream.encode(values)
    frame.gaps.CopyFrom(gaps)
    return parts + encode_large(frame, steps, dtype)


def decode_step(
    frame: shard_pb2.Frame, payload: memoryview, dtype: DType
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[Any]]:
    """Positions, ascending in frame coordinates, and steps. Raises FormatError."""
    cursor = Cursor(payload)
    values = decode_gaps(frame, cursor)
    steps = decode_large(frame, cursor, values, dtype)
    cursor.finish()
    return positions_of(values, 1, frame), steps


def decode_gaps(frame: shard_pb2.Frame, cursor: Cursor) -> npt.NDArray[np.uint32]:
    """The list ``gaps`` of STEP and ABSOLUTE frames."""
    if frame.gaps.count != frame.changes:
        raise FormatError("counts disagree", field="gaps.count", found=frame.gaps.count, expected=frame.changes)
    return intstream.decode(frame.gaps, cursor.take(intstream.stream_size(frame.gaps)), np.uint32, "gaps")


def positions_of(values: npt.NDArray[np.uint32], sign_bits: int, frame: shard_pb2.Frame) -> npt.NDArray[np.uint32]:
    """Running positions of gaps above ``sign_bits`` low bits. Raises FormatError when one leaves the frame."""
    positions = np.empty(len(values), np.uint32)
    if not _positions(values, sign_bits, positions, frame.elements):
        raise FormatError(
            "a position leaves its frame", field="gaps", expected=f"< {frame.elements}", do="fetch it again"
        )
    return positions


def encode_absolute(frame: shard_pb2.Frame, positions: npt.NDArray[np.uint32], bits: npt.NDArray[Any]) -> list[bytes]:
    """The absolute form: gaps, then the new elements' bytes. ``bits``: (changes,) unsigned of the width."""
    values = np.empty(len(positions), np.uint32)
    _gaps(positions, np.zeros(len(positions), np.uint8), np.uint64(1), values)
    gaps, parts = intstream.encode(values >> np.uint32(1))
    frame.gaps.CopyFrom(gaps)
    raw = np.ascontiguousarray(bits).view(np.uint8)
    packed = intstream.compress(raw)
    new_bits = packed if len(packed) < len(raw) else raw.tobytes()
    frame.new_bits_size = len(new_bits)
    return [*parts, new_bits]


def decode_absolute(
    frame: shard_pb2.Frame, payload: memoryview, dtype: DType
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[Any]]:
    """Positions and new bits. Raises FormatError."""
    cursor = Cursor(payload)
    values = decode_gaps(frame, cursor)
    data = cursor.take(frame.new_bits_size)
    cursor.finish()
    size = frame.changes * dtype.width
    raw = np.frombuffer(data, np.uint8) if len(data) == size else intstream.decompress(data, size, "new_bits")
    return positions_of(values, 0, frame), raw.view(dtype.uint)
