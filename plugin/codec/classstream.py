"""Lists that are cut by class: each class its own low bits, classes with like symbols one Huffman table.

Owns the grouping. Owns no meaning of the numbers (codec/compactform.py) and no bit packing (codec/intstream.py).

A table costs some 30 bytes and coding with the average of two distributions costs their divergence, so neighbouring
classes are merged while that shortens the whole: rare classes share, frequent ones stay apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from weight_sync.codec import intstream
from weight_sync.codec.intstream import join_bits
from weight_sync.codec.machine import kernel
from weight_sync.codec.stepform import Cursor
from weight_sync.errors import FormatError
from weight_sync.proto.v1 import shard_pb2

__all__ = ["decode_classes", "encode_classes"]

_FEW = 512  # numbers below are symbols nearly as they are
_TABLE_BITS = 8.0 * 45  # a Huffman table, the zstd frame around it and its entry in the header


@kernel
def _entropy_bits(histogram: Any) -> Any:
    total = 0.0
    bits = 0.0
    for count in histogram:
        if count > 0:
            total += count
            bits -= count * np.log2(count)
    return bits + total * np.log2(total) if total > 0 else 0.0


@kernel
def _histogram(symbols: Any) -> Any:
    out = np.zeros(256, np.int64)
    for symbol in symbols:
        out[symbol] += 1
    return out


def _groups(histograms: list[npt.NDArray[np.int64]]) -> list[int]:
    """Group number per class, ascending from 0: neighbours in order of scale merged while it pays."""
    order = sorted(range(len(histograms)), key=lambda i: _mean(histograms[i]))
    members = [[i] for i in order]
    tables = [histograms[i] for i in order]
    costs = [_entropy_bits(table) for table in tables]
    joint = [_entropy_bits(a + b) for a, b in pairwise(tables)]
    while joint:
        gains = [_TABLE_BITS + costs[i] + costs[i + 1] - cost for i, cost in enumerate(joint)]
        best = int(np.argmax(gains))
        if gains[best] <= 0:
            break
        tables[best : best + 2] = [tables[best] + tables[best + 1]]
        members[best : best + 2] = [members[best] + members[best + 1]]
        costs[best : best + 2] = [joint.pop(best)]
        for i in (best - 1, best):  # the neighbours of what was merged
            if 0 <= i < len(joint):
                joint[i] = _entropy_bits(tables[i] + tables[i + 1])
    groups = [0] * len(histograms)
    for number, group in enumerate(sorted(members, key=min)):
        for i in group:
            groups[i] = number
    return groups


def _mean(histogram: npt.NDArray[np.int64]) -> float:
    return float((histogram * np.arange(len(histogram))).sum()) / max(1, int(histogram.sum()))


def encode_classes(runs: Sequence[npt.NDArray[Any]], spread: bool = True) -> tuple[shard_pb2.ClassStreams, list[bytes]]:
    """Header and bytes of one list per class; every list is non-empty.

    ``spread`` says that numbers are spread out like gaps, so that their low bits cannot be compressed; of few different
    numbers, like steps of packed codes, low bits are coded, too.
    """
    low_bits = [intstream.choose_low_bits(run) if spread or run.max() >= _FEW else 0 for run in runs]
    symbols: list[npt.NDArray[np.uint8]] = []
    for run, k in zip(runs, low_bits, strict=True):
        symbols.append(np.empty(len(run), np.uint8))
        intstream.symbols_of(run, k, symbols[-1])
    groups = _groups([_histogram(some) for some in symbols])
    header = shard_pb2.ClassStreams(low_bits=bytes(low_bits), groups=bytes(groups))
    parts: list[bytes] = []
    for group in range(max(groups, default=-1) + 1):
        members = [i for i, g in enumerate(groups) if g == group]
        low = np.zeros(sum(intstream.room_for(len(runs[i]), low_bits[i]) for i in members), np.uint8)
        bit = 0
        for i in members:
            bit = int(intstream.split_bits(runs[i], low_bits[i], symbols[i], low, bit))
        packed, pco = intstream.pack_symbols(np.concatenate([symbols[i] for i in members]), small=True)
        bits = low[: (bit + 7) // 8].tobytes()
        header.streams.add(
            count=sum(len(runs[i]) for i in members), symbols_size=len(packed), bits_size=len(bits), pco=pco
        )
        parts += [packed, bits]
    return header, parts


@kernel
def _join_classes(symbols: Any, low: Any, end: Any, members: Any, low_bits: Any, starts: Any, out: Any) -> Any:
    """The lists of one group, each to its place; whether its bits name numbers."""
    at = bit = 0
    for i in members:
        count = starts[i + 1] - starts[i]
        bit = join_bits(symbols[at : at + count], low, bit, end, low_bits[i], out[starts[i] : starts[i + 1]])
        if bit < 0:
            return False
        at += count
    return True


def decode_classes(
    header: shard_pb2.ClassStreams, cursor: Cursor, counts: Sequence[int], dtype: Any, what: str
) -> npt.NDArray[Any]:
    """The lists of all classes, one after the other, each as long as ``counts`` says. Raises FormatError when the header
    does not fit.
    """
    low_bits, groups = (np.frombuffer(table, np.uint8) for table in (header.low_bits, header.groups))
    if not len(low_bits) == len(groups) == len(counts) or (groups >= len(header.streams)).any():
        raise FormatError("tables of classes disagree", field=what, found=len(groups), expected=len(counts))
    if low_bits.max(initial=0) > 56:
        raise FormatError(
            "more raw bits than a number has", field=what, found=int(low_bits.max()), expected="at most 56"
        )
    starts = np.cumsum([0, *counts])
    out = np.empty(starts[-1], dtype)
    for group, stream in enumerate(header.streams):
        members = np.flatnonzero(groups == group)
        count = int((starts[members + 1] - starts[members]).sum())
        if stream.count != count:
            raise FormatError("stream of classes has another count", field=what, found=stream.count, expected=count)
        symbols = intstream.unpack_symbols(stream, cursor.take(stream.symbols_size), what)
        low = intstream.spare_bytes(cursor.take(stream.bits_size))
        if not _join_classes(symbols, low, 8 * stream.bits_size, members, low_bits, starts, out):
            raise FormatError("bits end too early or name no number", field=what, do="fetch it again")
    return out
