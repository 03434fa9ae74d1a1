"""Who publishes what: every element of the table by exactly one rank.

Owns the summary that ranks exchange, the election among replicas, the check that owned coverage equals the table
exactly once, and the words for holes and overlaps: pure functions. Owns no exchange (layout/agree.py).

A set of coordinates is summed up by its *mark*, the sum of G^index over its elements modulo the prime P = 2^127 - 1.
A mark of a box takes a few powers whatever its size, does not depend on how a set is cut into boxes, and the marks of
disjoint sets add up: owned coverage is exact when counts and marks of the owners add up to those of the whole tensor.
Sets that differ have equal marks only by an accident of odds 2^-80; boxes are exchanged only to word an error.
"""

from __future__ import annotations

import hashlib
import struct
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations_with_replacement

import numpy as np

from weight_sync.errors import FormatError, LayoutError
from weight_sync.layout.box import Box
from weight_sync.layout.link import Link, compact, normal
from weight_sync.layout.meet import meet, minus
from weight_sync.layout.placement import Layout
from weight_sync.tensors import TensorSpec

__all__ = [
    "Held",
    "Summary",
    "check_exactly_once",
    "decode_boxes",
    "decode_summary",
    "elect",
    "encode_boxes",
    "encode_summary",
    "faults",
    "holes",
    "mark",
    "overlaps",
    "summarise",
    "table_hash",
]

PRIME = 2**127 - 1
GENERATOR = 0x6826A1C4D71A800DE5365B3624FB6
"""The smallest primitive root modulo PRIME from blake2b-120("weight_sync coverage") on."""

_MAGIC = b"WSC1"
_ENTRY = np.dtype([("tensor", "<u4"), ("elements", "<u8"), ("low", "<u8"), ("high", "<u8")])
SHOWN = 20
"""Tensors, and ranges of one tensor, that an error lists at most."""


# --- marks ------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1 << 16)
def _power(exponent: int) -> int:
    return pow(GENERATOR, exponent, PRIME)


@lru_cache(maxsize=1 << 16)
def _series(stride: int, count: int) -> int:
    """Sum of G^(stride * i) for 0 <= i < count."""
    if not stride:
        return count
    ratio = _power(stride)
    return (_power(stride * count) - 1) * pow(ratio - 1, -1, PRIME) % PRIME


def mark(boxes: Iterable[Box]) -> int:
    """The mark of a set of coordinates, an integer in [0, 2^127 - 1). An element that comes twice counts twice."""
    total = 0
    for box in boxes:
        product = _power(box.offset)
        for size, stride in zip(box.sizes, box.strides, strict=True):
            product = product * _series(stride, size) % PRIME
        total += product
    return total % PRIME


def whole(spec: TensorSpec) -> int:
    """The mark of all elements of a tensor."""
    return _series(1, spec.elements)


# --- summaries --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Held:
    """What one rank holds of one tensor: index in the table, number of elements, mark of their coordinates."""

    tensor: int
    elements: int
    mark: int


@dataclass(frozen=True, slots=True)
class Summary:
    """What one rank holds of a table; 28 bytes per tensor on the wire."""

    table: bytes
    held: tuple[Held, ...]


def table_hash(table: Sequence[TensorSpec]) -> bytes:
    """16 bytes that tell tables apart, order included."""
    state = hashlib.blake2b(digest_size=16)
    for spec in table:
        state.update(repr((spec.name, spec.dtype, spec.shape, spec.code_bits)).encode())
    return state.digest()


def summarise(layout: Layout) -> Summary:
    """The summary of one rank's layout."""
    held = []
    for index, spec in enumerate(layout.tensors):
        boxes = [item.coords for item in layout.by_tensor.get(spec.name, ())]
        elements = sum(box.count for box in boxes)
        if elements:
            held.append(Held(index, elements, mark(boxes)))
    return Summary(table_hash(layout.tensors), tuple(held))


def encode_summary(summary: Summary) -> bytes:
    """As bytes: 4 of magic, 16 of the table's hash, then per tensor u32 index, u64 elements, u128 mark."""
    low = (1 << 64) - 1
    rows = [(item.tensor, item.elements, item.mark & low, item.mark >> 64) for item in summary.held]
    return _MAGIC + summary.table + np.array(rows, _ENTRY).tobytes()


def decode_summary(data: bytes) -> Summary:
    """From bytes. Raises FormatError when they are not a summary."""
    if data[:4] != _MAGIC or len(data) < 20 or (len(data) - 20) % _ENTRY.itemsize:
        raise FormatError("not a coverage summary", field="bytes", found=data[:4], expected=_MAGIC)
    rows = np.frombuffer(data, _ENTRY, offset=20).tolist()
    return Summary(data[4:20], tuple(Held(tensor, n, high << 64 | low) for tensor, n, low, high in rows))


def encode_boxes(coverage: Mapping[int, Sequence[Box]]) -> bytes:
    """Boxes by index of the tensor, as little-endian int64: tensor, rank of the box, offset, sizes, strides."""
    words = []
    for tensor, boxes in coverage.items():
        for box in boxes:
            words += [tensor, len(box.sizes), box.offset, *box.sizes, *box.strides]
    return struct.pack(f"<{len(words)}q", *words)


def decode_boxes(data: bytes, table: Sequence[TensorSpec]) -> dict[int, list[Box]]:
    """From bytes. Raises FormatError when they do not describe boxes inside the tensors of ``table``."""
    if len(data) % 8:
        raise FormatError("boxes end inside a number", field="length", found=len(data), expected="a multiple of 8")
    words = struct.unpack(f"<{len(data) // 8}q", data)
    out: dict[int, list[Box]] = defaultdict(list)
    at = 0
    while at < len(words):
        dims = words[at + 1] if at + 2 < len(words) else -1
        end = at + 3 + 2 * dims
        if not 0 <= dims <= 64 or end > len(words) or not 0 <= words[at] < len(table):
            raise FormatError("malformed box", field="word", found=at, expected="tensor, rank, offset, sizes, strides")
        box = Box(words[at + 2], words[at + 3 : at + 3 + dims], words[at + 3 + dims : end])
        elements = table[words[at]].elements
        if min(box.sizes, default=1) < 1 or min(box.strides, default=1) < 1 or box.offset < 0 or box.last >= elements:
            raise FormatError("box leaves its tensor", field=table[words[at]].name, found=box, expected=elements)
        out[words[at]].append(box)
        at = end
    return dict(out)


# --- election ---------------------------------------------------------------------------------------------------------


def elect(table: Sequence[TensorSpec], summaries: Sequence[Summary]) -> list[tuple[int, ...]]:
    """Who publishes: for each rank and each of its ``held`` in order, the rank that owns that coverage.

    Ranks with the same coverage of a tensor are replicas; a hash of name and coverage picks one of them, so that work
    spreads evenly and every call with the same input agrees. Raises LayoutError when ranks have different tables.
    """
    expected = table_hash(table)
    for rank, summary in enumerate(summaries):
        if summary.table != expected:
            raise LayoutError(
                f"rank {rank} has another table of tensors",
                field="table",
                found=summary.table.hex(),
                expected=expected.hex(),
                do="start every rank from the same base checkpoint",
            )
    replicas: dict[Held, list[int]] = defaultdict(list)
    for rank, summary in enumerate(summaries):
        for held in summary.held:
            if held.tensor >= len(table):
                raise FormatError("summary leaves the table", field="tensor", found=held.tensor, expected=len(table))
            replicas[held].append(rank)
    owner = {held: ranks[_spread(table[held.tensor].name, held) % len(ranks)] for held, ranks in replicas.items()}
    return [tuple(owner[held] for held in summary.held) for summary in summaries]


def _spread(name: str, held: Held) -> int:
    key = name.encode() + held.mark.to_bytes(16, "little")
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")


def check_exactly_once(table: Sequence[TensorSpec], summaries: Sequence[Summary]) -> tuple[int, ...]:
    """Indices of the tensors that the owners do not cover exactly once; ``()`` when all is well."""
    counts, marks = [0] * len(table), [0] * len(table)
    for held in {held for summary in summaries for held in summary.held}:
        counts[held.tensor] += held.elements
        marks[held.tensor] += held.mark
    return tuple(
        index
        for index, spec in enumerate(table)
        if counts[index] != spec.elements or marks[index] % PRIME != whole(spec)
    )


# --- words for what is wrong ------------------------------------------------------------------------------------------


def holes(elements: int, boxes: Iterable[Box]) -> list[Box]:
    """The coordinates in [0, elements) that no box covers."""
    left: list[Link] = [(Box.run(0, elements),)] if elements else []
    for box in boxes:
        left = minus(left, *normal((box,)))
    return [box for (box,) in compact(left)]


def overlaps(coverage: Mapping[int, Sequence[Box]]) -> list[tuple[int, int, Box]]:
    """Pairs of ranks and the coordinates that both hold, from what each rank holds of one tensor.

    A rank is its own pair where two of its boxes overlap.
    """
    links = {rank: [normal((box,)) for box in coverage[rank]] for rank in sorted(coverage)}
    out = []
    for first, second in combinations_with_replacement(links, 2):
        pairs = meet(links[first], links[second])
        common = compact(link for i, j, link in pairs if first != second or i < j)
        out += [(first, second, box) for (box,) in common]
    return out


def faults(
    table: Sequence[TensorSpec], owned: Sequence[Mapping[int, Sequence[Box]]], indices: Iterable[int] | None = None
) -> list[str]:
    """One line per hole and overlap of the owned coverage (per rank, boxes by index of the tensor).

    ``indices`` are the tensors to look at; None is all of them.
    """
    lines = []
    for index in range(len(table)) if indices is None else indices:
        spec = table[index]
        mine = {rank: held[index] for rank, held in enumerate(owned) if held.get(index)}
        gaps = holes(spec.elements, (box for boxes in mine.values() for box in boxes))
        lines += [f"{spec.name!r}: nobody holds {_words(box)}" for box in gaps[:SHOWN]]
        for first, second, box in overlaps(mine)[:SHOWN]:
            who = f"ranks {first} and {second} both hold" if first != second else f"rank {first} holds twice"
            lines.append(f"{spec.name!r}: {who} {_words(box)}")
    return lines


def _words(box: Box) -> str:
    if box.is_run:
        return f"[{box.offset}, {box.offset + box.count})"
    return f"{box.count} elements from {box.offset} on (sizes {box.sizes}, strides {box.strides})"
