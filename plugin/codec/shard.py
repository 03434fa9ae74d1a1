"""Shards: safetensors containers that any tool can open, with an index of ours inside.

Owns the container: names of our tensors, the head that a reader fetches first, checks of untrusted headers. Owns no
store and no frames' insides.

A shard begins with the safetensors header and the shard index (a protobuf message kept as a U8 tensor), so one range
read of ``head_size`` bytes tells where everything else lies. Frames are U8 tensors; a dense piece that is a whole
tensor has that tensor's own name, dtype and shape, so an anchor opens like a checkpoint.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from google.protobuf.message import DecodeError

from weight_sync.codec.frame import EncodedFrame, hash16
from weight_sync.errors import FormatError, InputError
from weight_sync.layout.box import Box
from weight_sync.ports import DensePiece, ShardBytes
from weight_sync.proto.v1 import common_pb2, shard_pb2
from weight_sync.tensors import RESERVED_PREFIX, TensorSpec

__all__ = ["FORMAT", "ShardHead", "build_shard", "parse_head"]

FORMAT = 1
_INDEX = RESERVED_PREFIX + "index"
_FRAME = RESERVED_PREFIX + "frame."
_PIECE = RESERVED_PREFIX + "piece."
_MAX_HEADER = 100 << 20  # of the safetensors format


@dataclass(frozen=True)
class ShardHead:
    """What the first ``head_size`` bytes tell.

    Attributes:
        index: of the shard.
        specs: its table of tensors, checked.
        frame_spans, piece_spans: (offset, length) in the object, per frame and piece of the index.
        boxes: per piece, its box.
    """

    index: shard_pb2.ShardIndex
    specs: tuple[TensorSpec, ...]
    frame_spans: tuple[tuple[int, int], ...]
    piece_spans: tuple[tuple[int, int], ...]
    boxes: tuple[Box, ...] = field(default=())


def build_shard(
    label: str,
    identity: shard_pb2.ShardIndex,
    frames: Sequence[EncodedFrame] = (),
    pieces: Sequence[DensePiece] = (),
) -> ShardBytes:
    """A shard of frames, of pieces, or both; nothing is copied but the head.

    Args:
        identity: run_id, number, rank, view and form; the rest is filled in here.
    """
    index = shard_pb2.ShardIndex()
    index.CopyFrom(identity)
    index.format = FORMAT
    numbers: dict[TensorSpec, int] = {}

    def number(spec: TensorSpec) -> int:
        if spec not in numbers:
            numbers[spec] = len(numbers)
            index.tensors.append(spec.to_proto())
        return numbers[spec]

    entries: list[tuple[str, str, Sequence[int], int]] = []
    body: list[bytes | memoryview] = []
    for k, frame in enumerate(frames):
        header = index.frames.add()
        header.CopyFrom(frame.header)
        header.regions.extend(b.coords.to_region(number(b.spec), b.spec.elements) for b in frame.boxes)
        entries.append((f"{_FRAME}{k}", "U8", (header.size,), header.size))
        body.extend(part for part in frame.payload if part)
    ordered = sorted(pieces, key=lambda piece: -piece.spec.type.width)  # keeps wider elements aligned
    for k, piece in enumerate(ordered):
        data = np.ascontiguousarray(piece.bits).view(np.uint8).data
        key, dtype, shape = _entry_of(piece, k)
        region = piece.coords.to_region(number(piece.spec), piece.spec.elements)
        index.pieces.add(key=key, region=region, blake3=hash16([data]))
        entries.append((key, dtype, shape, len(data)))
        body.append(data)
    return ShardBytes(label, index.rank, index.form, _head(index, entries), tuple(body))


def _entry_of(piece: DensePiece, k: int) -> tuple[str, str, Sequence[int]]:
    spec = piece.spec
    whole = piece.coords.is_run and piece.coords.offset == 0 and piece.coords.count == spec.elements
    if whole and not spec.name.startswith(RESERVED_PREFIX):
        return spec.name, spec.dtype, spec.shape
    if spec.type.bits == 8 * spec.type.width:
        return f"{_PIECE}{k}", spec.dtype, (piece.coords.count,)
    return f"{_PIECE}{k}", "U8", (piece.coords.count,)


def _head(index: shard_pb2.ShardIndex, entries: Sequence[tuple[str, str, Sequence[int], int]]) -> bytes:
    raw = index.SerializeToString(deterministic=True)
    padded = raw + b"\0" * (-len(raw) % 8)  # keeps what follows aligned
    table: dict[str, object] = {
        "__metadata__": {"weight_sync": str(FORMAT), "index_size": str(len(raw))},
        _INDEX: {"dtype": "U8", "shape": [len(padded)], "data_offsets": [0, len(padded)]},
    }
    at = len(padded)
    for key, dtype, shape, size in entries:
        assert key not in table, f"tensor {key!r} twice in a shard"
        table[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + padded


def parse_head(head: bytes | memoryview, size: int) -> ShardHead:
    """Reads a head. ``size`` is that of the whole object. Raises FormatError on anything that does not fit."""
    head = memoryview(head)
    table, data_start = _parse_header(head, size)
    spans = {key: _span(key, entry, data_start, size) for key, entry in table.items() if key != "__metadata__"}
    raw = _index_bytes(head, table, spans)
    index = shard_pb2.ShardIndex()
    try:
        index.ParseFromString(raw)
    except DecodeError as error:
        raise FormatError("index is not a ShardIndex", field=_INDEX, found=str(error), do="fetch it again") from error
    if index.format != FORMAT:
        raise FormatError("shard of another format", field="format", found=index.format, expected=FORMAT,
                          do="install a weight_sync that reads it")  # fmt: skip
    try:
        specs = tuple(TensorSpec.from_proto(spec) for spec in index.tensors)
        boxes = tuple(_piece_box(piece, specs) for piece in index.pieces)
    except InputError as error:
        raise FormatError("index describes no possible tensor", field=_INDEX, found=str(error)) from error
    frames = tuple(_find(spans, f"{_FRAME}{k}", frame.size) for k, frame in enumerate(index.frames))
    pieces = tuple(
        _find(spans, piece.key, box.count * specs[piece.region.tensor].type.width)
        for piece, box in zip(index.pieces, boxes, strict=True)
    )
    return ShardHead(index, specs, frames, pieces, boxes)


def _piece_box(piece: shard_pb2.Piece, specs: Sequence[TensorSpec]) -> Box:
    if piece.region.tensor >= len(specs):
        raise FormatError("piece names no tensor", field="tensor", found=piece.region.tensor, expected=len(specs))
    return Box.from_region(piece.region, specs[piece.region.tensor].elements)


def _parse_header(head: memoryview, size: int) -> tuple[dict[str, dict[str, object]], int]:
    if len(head) < 8:
        raise FormatError("shard is shorter than its first word", field="head", found=len(head), expected="8 or more")
    (length,) = struct.unpack("<Q", head[:8])
    if length > min(_MAX_HEADER, size - 8) or 8 + length > len(head):
        raise FormatError(
            "header leaves the head", field="header length", found=length, expected=f"at most {len(head) - 8}"
        )
    try:
        table = json.loads(bytes(head[8 : 8 + length]))
    except ValueError as error:
        raise FormatError("header is not JSON", field="header", found=str(error), do="fetch it again") from error
    if not isinstance(table, dict) or not all(isinstance(entry, dict) for entry in table.values()):
        raise FormatError("header is not a table of tensors", field="header", found=type(table).__name__)
    return table, 8 + length


def _span(key: str, entry: dict[str, object], data_start: int, size: int) -> tuple[int, int]:
    offsets = entry.get("data_offsets")
    if not (isinstance(offsets, list) and len(offsets) == 2 and all(isinstance(x, int) for x in offsets)):
        raise FormatError("tensor without offsets", field=key, found=offsets, expected="[begin, end]")
    begin, end = offsets
    if not 0 <= begin <= end <= size - data_start:
        raise FormatError("tensor leaves its object", field=key, found=offsets, expected=f"within {size - data_start}")
    return data_start + begin, end - begin


def _index_bytes(head: memoryview, table: dict[str, dict[str, object]], spans: dict[str, tuple[int, int]]) -> bytes:
    metadata = table.get("__metadata__", {})
    length = metadata.get("index_size")
    if _INDEX not in spans or not (isinstance(length, str) and length.isdecimal() and len(length) < 12):
        raise FormatError("not a weight_sync shard", field=_INDEX, found=length, expected="a shard index")
    start, room = spans[_INDEX]
    if int(length) > room or start + room > len(head):
        raise FormatError("index leaves the head", field="index_size", found=length, expected=f"at most {room}")
    return bytes(head[start : start + int(length)])


def _find(spans: dict[str, tuple[int, int]], key: str, size: int) -> tuple[int, int]:
    span = spans.get(key)
    if span is None or span[1] != size:
        raise FormatError("index and header disagree", field=key, found=span, expected=f"{size} bytes")
    return span


def identity(run_id: str, number: int, rank: int, view: str, form: common_pb2.Form) -> shard_pb2.ShardIndex:
    """The part of an index that tells one shard from another."""
    return shard_pb2.ShardIndex(run_id=run_id, number=number, rank=rank, view=view, form=form)
