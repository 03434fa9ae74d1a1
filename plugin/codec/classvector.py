"""Counting within classes, 64 elements at a time: the walks of frames with one lane, for both directions.

Owns whole blocks of 1024 elements. Owns no lanes, no tails of regions and no comparison (codec/classcount.py,
classfind.py), and none of the format: whatever the window, the numbers are those of the scalar walks.

A block is narrowed to one byte per element, its class. The few neighbouring classes that most elements belong to, the
*window*, are counted by comparing 64 bytes at once: a table says how many elements of a class lie before each word of
64. Elements outside the window are bumped one by one. So a change costs a look-up, and an element without one a few
vector instructions per 64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import int16, int32, int64, uint32, uint64

from weight_sync.codec.classrule import CLASSES, NEVER
from weight_sync.codec.machine import count_upto16, ctz, eq_mask64, kernel, narrow64, out_mask64, popcount

__all__ = ["BLOCK", "count_blocks", "find_blocks", "scratch", "window"]

BLOCK = 1 << 10
_WORDS = BLOCK // 64
_WIDEST = 16  # classes in a window
_SAMPLES = 32  # words looked at to choose it
_BUMP = 300  # one class more in the window costs about what bumping every 300th element costs


@kernel
def scratch() -> Any:
    """A block's class per element, and per class of the window its elements before each word and in all."""
    return np.empty(BLOCK, np.uint8), np.empty((_WIDEST, _WORDS + 1), np.int16)


@kernel
def window(rule: Any, old: Any) -> Any:
    """(lowest class, number of classes), by a sample; the number is 0 when the scalar walk is the better one."""
    if len(old) < BLOCK:
        return 0, 0
    word = np.empty(64, np.uint8)
    before = np.zeros(CLASSES + 1, np.int64)  # elements of lower classes
    apart = (len(old) - 64) // (_SAMPLES - 1)
    for k in range(_SAMPLES):
        narrow64(rule, old, k * apart, word, 0)
        for c in word:
            before[int64(c) + 1] += 1
    for k in range(CLASSES):
        before[k + 1] += before[k]
    every = before[CLASSES]
    low, size, price = 0, 0, (every // 2) * _BUMP
    for n in range(1, _WIDEST + 1):
        for lo in range(CLASSES - n + 1):
            cost = (every - before[lo + n] + before[lo]) * _BUMP + n * every
            if cost < price:
                low, size, price = lo, n, cost
    return low, size


@kernel
def _prepare(rule: Any, old: Any, start: Any, lo: Any, n: Any, classes: Any, table: Any) -> None:
    """Fills the scratch for the block at ``start``."""
    for k in range(0, BLOCK, 64):
        narrow64(rule, old, start + k, classes, k)
    for j in range(n):
        total = int16(0)
        for w in range(_WORDS):
            table[j, w] = total
            total += int16(popcount(eq_mask64(classes, w * 64, uint64(lo + j))))
        table[j, _WORDS] = total


@kernel
def _bump(classes: Any, first: Any, mask: Any, since: Any) -> None:
    while mask != uint64(0):
        since[classes[uint64(first) + ctz(mask)]] += int32(1)
        mask &= mask - uint64(1)


@kernel
def count_blocks(
    rule: Any,
    old: Any,
    start: Any,
    stop: Any,
    base: Any,
    positions: Any,
    at: Any,
    end: Any,
    lo: Any,
    n: Any,
    classes: Any,
    table: Any,
    since: Any,
    keys: Any,
    gaps: Any,
) -> Any:
    """Whole blocks [start, stop); changes are entries [at, end). Returns the first entry behind the blocks."""
    low, size = uint64(lo), uint64(n)
    for first in range(start, stop, BLOCK):
        _prepare(rule, old, first, lo, n, classes, table)
        word = 0  # of the elements outside the window all before this word are counted, and of it all but ``rare``
        rare = out_mask64(classes, 0, low, size)
        while at < end:
            o = int64(positions[at]) - base - first
            if o >= BLOCK:
                break
            c = int64(classes[o])
            keys[at] = c
            w = o >> 6
            below = (uint64(1) << uint64(o & 63)) - uint64(1)
            if lo <= c < lo + n:
                before = int64(table[c - lo, w]) + int64(popcount(eq_mask64(classes, w * 64, uint64(c)) & below))
                gaps[at] = since[c] + before
                since[c] = -before - 1  # the block's total, added below, then leaves what lies behind the change
            else:
                while word < w:
                    _bump(classes, word * 64, rare, since)
                    word += 1
                    rare = out_mask64(classes, word * 64, low, size)
                _bump(classes, word * 64, rare & below, since)
                rare &= ~below
                rare &= rare - uint64(1)
                gaps[at] = since[c]
                since[c] = 0
            at += 1
        _bump(classes, word * 64, rare, since)
        for w in range(word + 1, _WORDS):
            _bump(classes, w * 64, out_mask64(classes, w * 64, low, size), since)
        for j in range(n):
            since[lo + j] += table[j, _WORDS]
    return at


@kernel
def _nth_bit(mask: Any, rank: Any) -> Any:
    """Place of the set bit with ``rank`` set bits below it: counts by bytes all at once, then looks into one of them.

    Method: Vigna, "Broadword implementation of rank/select queries" (2008), with three halvings instead of his table.
    """
    ones, tops = uint64(0x0101010101010101), uint64(0x8080808080808080)
    sums = mask - ((mask >> uint64(1)) & uint64(0x5555555555555555))
    sums = (sums & uint64(0x3333333333333333)) + ((sums >> uint64(2)) & uint64(0x3333333333333333))
    sums = ((sums + (sums >> uint64(4))) & uint64(0x0F0F0F0F0F0F0F0F)) * ones  # set bits up to and with each byte
    place = popcount((((rank * ones) | tops) - sums) & tops) << uint64(3)  # bytes that end before it
    rank -= ((sums << uint64(8)) >> place) & uint64(0xFF)
    mask >>= place
    for half in (4, 2, 1):
        below = popcount(mask & ((uint64(1) << uint64(half)) - uint64(1)))
        upper = uint64(rank >= below)
        rank -= below * upper
        mask >>= uint64(half) * upper
        place += uint64(half) * upper
    return place


@kernel
def _gap(values: Any, k: Any, tail: Any) -> Any:
    """Elements of a class before its change number ``k``."""
    return int64(values[k] >> uint32(1)) if k < tail else int64(NEVER)


@kernel
def _mark_window(
    classes: Any,
    table: Any,
    lo: Any,
    n: Any,
    left: Any,
    head: Any,
    tail: Any,
    values: Any,
    number: Any,
    hits: Any,
) -> None:
    """Sets the bit in ``hits``, and ``number``, of a block's changes in classes of the window."""
    for j in range(n):
        c = lo + j
        total = int64(table[j, _WORDS])
        rank = int64(left[c])
        while rank < total:
            w = count_upto16(table[j], 0, rank) - 1
            o = _nth_bit(eq_mask64(classes, w * 64, uint64(c)), uint64(rank - table[j, w]))
            k = head[c]
            number[uint64(w * 64) + o] = k
            hits[w] |= uint64(1) << o
            head[c] = k + 1
            rank += 1 + _gap(values, k + 1, tail[c])
        left[c] = rank - total


@kernel
def find_blocks(
    rule: Any,
    old: Any,
    base: Any,
    left: Any,
    head: Any,
    tail: Any,
    values: Any,
    positions: Any,
    order: Any,
    out: Any,
) -> Any:
    """The whole blocks of a region, changes from entry ``out`` on. Returns the next free entry and the elements seen."""
    lo, n = window(rule, old)
    if n == 0:
        return out, 0
    classes, table = scratch()
    number = np.empty(BLOCK, np.int64)
    hits = np.zeros(_WORDS, np.uint64)
    seen = len(old) // BLOCK * BLOCK
    for first in range(0, seen, BLOCK):
        _prepare(rule, old, first, lo, n, classes, table)
        _mark_window(classes, table, lo, n, left, head, tail, values, number, hits)
        for w in range(_WORDS):
            rare = out_mask64(classes, w * 64, uint64(lo), uint64(n))
            while rare != uint64(0):
                o = uint64(w * 64) + ctz(rare)
                c = int64(classes[o])
                left[c] -= int32(1)
                if left[c] < 0:
                    k = head[c]
                    number[o] = k
                    hits[w] |= rare & (~rare + uint64(1))
                    head[c] = k + 1
                    left[c] = _gap(values, k + 1, tail[c])
                rare &= rare - uint64(1)
            found = hits[w]
            hits[w] = uint64(0)
            while found != uint64(0):
                o = uint64(w * 64) + ctz(found)
                positions[out] = uint64(base + first) + o
                order[out] = number[o]
                out += 1
                found &= found - uint64(1)
    return out, seen
