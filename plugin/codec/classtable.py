"""The tables of a compact frame, packed: which classes changed, how often in each lane, and how their streams are cut.

Owns that packing. Owns no meaning of the tables (codec/compactform.py, codec/classstream.py). A frame of an 8-bit format
uses some 250 classes and, where updates are sparse, has few thousand changes: plain, its tables would be a quarter of it.

Bytes: 32 of a bitmap of the classes; one of the width of counts, 1, 2 or 4; a bitmap of the wide ones, in the order of
classes; one zstd frame of the counts' bytes (plane by plane, lowest first; lane by lane within class by class), then of
class_gaps' low_bits and groups, then of class_steps'.
"""

from __future__ import annotations

import numpy as np

from weight_sync.codec.classrule import CLASSES
from weight_sync.codec.intstream import compress, decompress
from weight_sync.errors import FormatError
from weight_sync.proto.v1 import shard_pb2

__all__ = ["pack_tables", "unpack_tables"]

_MAP = CLASSES // 8


def pack_tables(frame: shard_pb2.Frame) -> None:
    """Moves the tables of a header into ``class_tables``; those of a frame without changes are nothing already."""
    if not frame.class_ids:
        return
    ids = np.zeros(CLASSES, np.uint8)
    ids[np.frombuffer(frame.class_ids, np.uint8)] = 1
    counts = np.array(frame.class_counts, "<u4")
    most = int(counts.max(initial=0))
    width = 1 if most < 1 << 8 else 2 if most < 1 << 16 else 4
    planes = counts.view(np.uint8).reshape(-1, 4).T[:width]
    gaps, steps = frame.class_gaps, frame.class_steps
    body = planes.tobytes() + gaps.low_bits + gaps.groups + steps.low_bits + steps.groups
    wide = np.frombuffer(frame.class_wide, np.uint8)
    frame.class_tables = b"".join((
        np.packbits(ids, bitorder="little").tobytes(), bytes([width]), np.packbits(wide, bitorder="little").tobytes(),
        compress(np.frombuffer(body, np.uint8)),
    ))  # fmt: skip
    for name in ("class_ids", "class_counts", "class_wide"):
        frame.ClearField(name)
    for part in (gaps, steps):
        part.ClearField("low_bits")
        part.ClearField("groups")


def unpack_tables(frame: shard_pb2.Frame) -> shard_pb2.Frame:
    """The header with its tables in place; as it is when they are not packed. Raises FormatError."""
    data = memoryview(frame.class_tables)
    if not len(data):
        return frame
    ids = np.flatnonzero(np.unpackbits(np.frombuffer(data[:_MAP], np.uint8), bitorder="little"))
    n, start = len(ids), _MAP + 1 + -(-len(ids) // 8)
    if not n or len(data) < start or data[_MAP] not in (1, 2, 4) or frame.lanes not in (1, 4):
        raise FormatError("tables of classes are malformed", field="class_tables", found=f"{len(data)} bytes")
    width, cells = data[_MAP], n * frame.lanes
    wide = np.unpackbits(np.frombuffer(data[_MAP + 1 : start], np.uint8), count=n, bitorder="little")
    m = int(wide.sum())
    body = decompress(data[start:], cells * width + 2 * n + 2 * m, "class_tables")
    planes = np.zeros((4, cells), np.uint8)
    planes[:width] = body[: cells * width].reshape(width, cells)
    out = shard_pb2.Frame()
    out.CopyFrom(frame)
    out.class_ids, out.class_wide = bytes(ids.tolist()), wide.tobytes()
    out.class_counts.extend(np.ascontiguousarray(planes.T).view("<u4").ravel().tolist())
    rest = body[cells * width :].tobytes()
    out.class_gaps.low_bits, out.class_gaps.groups = rest[:n], rest[n : 2 * n]
    if m:
        out.class_steps.low_bits, out.class_steps.groups = rest[2 * n : 2 * n + m], rest[2 * n + m :]
    return out
