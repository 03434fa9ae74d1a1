"""Counting within classes, 64 elements at a time: the walks of frames with one lane, for both directions.

Owns whole blocks of 256 elements. Owns no lanes, no tails of regions and no comparison (codec/classcount.py,
classfind.py), and none of the format: whatever the window, the numbers are those of the scalar walks.

A block is narrowed to one byte per element, its class. The few neighbouring classes that most elements belong to, the
*window*, are counted by table look-ups of 32 bytes, four classes at a time. So an element without a change costs a small
part of an instruction, and a change a look at its block. Elements outside the window are listed and counted one by one.

Blocks are taken a *shelf* at a time: first what needs no branch, for all of them, then what depends on the data. So a
mispredicted branch throws away little, and while the shelf is counted the next one is fetched.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import int32, int64, intp, uint32, uint64

from weight_sync.codec.classrule import CLASSES, NEVER
from weight_sync.codec.machine import (
    count4,
    ctz,
    eq_mask64,
    fetch256,
    kernel,
    narrow64,
    nth_bit,
    out_mask64,
    popcount,
    settle16,
)

__all__ = ["BLOCK", "SHELF", "count_blocks", "find_blocks", "scratch", "window"]

BLOCK = 1 << 8
_WORDS = BLOCK // 64
_WIDEST = 16  # classes in a window
_QUADS = _WIDEST // 4
SHELF = 16 * BLOCK  # elements at a time, which stay in the first-level cache; a call costs as much as 100 of them
_ORDERED = 4 * BLOCK  # elements of a shelf when finding, which keeps the numbers of its changes in that cache as well
_SAMPLES = 32  # words looked at to choose it
_BUMP = 600  # one class more in the window costs about what bumping every 600th element costs


@kernel
def scratch() -> Any:
    """For a shelf: the class of each element; per block its counts of the window's classes, as `count4` packs them, and
    the row of `settle16` before each block and behind the last; the elements outside the window.
    """
    blocks = SHELF // BLOCK
    return (
        np.empty(SHELF, np.uint8),
        np.zeros(blocks * _QUADS, np.uint64),
        np.zeros((blocks + 1) * _WIDEST, np.int32),
        np.empty(SHELF + 1, np.uint32),
    )


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
    for n in range(4, _WIDEST + 1, 4):  # `count4` counts four at a time
        for lo in range(CLASSES - n + 1):
            cost = (every - before[lo + n] + before[lo]) * _BUMP + n * every
            if cost < price:
                low, size, price = lo, n, cost
    return low, size


@kernel
def _prepare(rule: Any, old: Any, start: Any, stop: Any, lo: Any, n: Any, classes: Any, totals: Any) -> None:
    """Fills the scratch for the whole blocks [start, stop), at most a shelf. No branch here depends on the data.

    Asks for the next shelf meanwhile, or memory and core would wait for each other in turn.
    """
    for k in range(0, stop - start, 64):
        narrow64(rule, old, start + k, classes, k)
    for k in range(0, stop - start, BLOCK):
        fetch256(old, stop + k)
        for q in range(n // 4):
            totals[uint64(k // BLOCK * _QUADS + q)] = count4(classes, k, uint64(lo + 4 * q))


@kernel
def _list_rare(classes: Any, stop: Any, lo: Any, n: Any, rare: Any) -> Any:
    """Lists place and class of the elements before ``stop`` outside the window; returns how many.

    One entry is written whether there is one or not, since whether a word has any cannot be foreseen.
    """
    m = uint64(0)
    for start in range(0, stop, 64):
        mask = out_mask64(classes, start, lo, n)
        while True:
            o = uint64(start) + ctz(mask | (uint64(1) << uint64(63)))
            rare[m] = (o << uint64(8)) | uint64(classes[o])
            m += uint64(mask != uint64(0))
            mask &= mask - uint64(1)
            if mask == uint64(0):
                break
    return m


@kernel
def _before(classes: Any, o: Any, c: Any) -> Any:
    """Elements of class ``c`` before element ``o`` in its block; without a branch."""
    first = o & ~uint64(BLOCK - 1)
    word, bit = (o - first) >> uint64(6), o & uint64(63)
    found = uint64(0)
    for w in range(_WORDS):
        mask = eq_mask64(classes, intp(first) + 64 * w, c)
        full, part = uint64(uint64(w) < word), uint64(uint64(w) == word)
        found += popcount(mask & ((uint64(0) - full) | ((part << bit) - part)))
    return found


@kernel
def count_blocks(
    rule: Any,
    old: Any,
    new: Any,
    start: Any,
    stop: Any,
    base: Any,
    positions: Any,
    at: Any,
    end: Any,
    lo: Any,
    n: Any,
    room: Any,
    since: Any,
    keys: Any,
    gaps: Any,
) -> None:
    """Whole blocks [start, stop), at most a shelf, whose changes are entries [at, end).

    ``new`` is what is compared next, if anything: its next shelf is asked for as the one of ``old`` is.
    """
    classes, totals, rows, rare = room
    _prepare(rule, old, start, stop, lo, n, classes, totals)
    for j in range(_WIDEST):
        rows[j] = 0
    for block in range((stop - start) // BLOCK):  # a row holds minus the elements seen so far
        fetch256(new, stop + block * BLOCK)
        settle16(rows, block * _WIDEST, totals, block * _QUADS)
    for i in range(at, end):
        o = uint64(int64(positions[i]) - base - start)
        c = uint64(classes[o])
        j = c - uint64(lo)
        keys[i] = c
        if j < uint64(n):
            seen = _before(classes, o, c) - uint64(rows[(o // uint64(BLOCK)) * uint64(_WIDEST) + j])
            gaps[i] = seen + uint64(since[c])
            since[c] = uint64(-1) - seen  # with the shelf's total, added below: what lies behind the change
    for j in range(n):
        since[lo + j] -= rows[(stop - start) // BLOCK * _WIDEST + j]
    many = _list_rare(classes, stop - start, uint64(lo), uint64(n), rare)
    if many == uint64(0):
        return
    i = at
    for k in range(many):
        o, c = uint64(rare[k] >> uint32(8)), uint64(rare[k] & uint32(255))
        where = uint64(base + start) + o
        while i < end and uint64(positions[i]) < where:
            i += 1
        if i < end and uint64(positions[i]) == where:
            gaps[i] = since[c]
            since[c] = 0
        else:
            since[c] += int32(1)


@kernel
def _total(totals: Any, block: Any, j: Any) -> Any:
    """Elements of the window's class number ``j`` in a block."""
    return (totals[block * uint64(_QUADS) + (j >> uint64(2))] >> (uint64(16) * (j & uint64(3)))) & uint64(0xFFFF)


@kernel
def _gap(values: Any, k: Any, tail: Any) -> Any:
    """Elements of a class before its change number ``k``."""
    return uint64(values[k] >> uint32(1)) if k < uint64(tail) else uint64(NEVER)


@kernel
def _mark(
    classes: Any, c: Any, rank: Any, total: Any, head: Any, tail: Any, values: Any, first: Any, number: Any, hits: Any
) -> Any:
    """Sets the bit in ``hits``, and ``number``, of the block's changes in class ``c``, the next of which has ``rank``
    elements of the class before it; returns how many follow the block before the one after.
    """
    n0 = popcount(eq_mask64(classes, first, c))
    n1 = popcount(eq_mask64(classes, first + 64, c)) + n0
    n2 = popcount(eq_mask64(classes, first + 128, c)) + n1
    k = uint64(head[c])
    while rank < total:
        # no branch: which word it is cannot be foreseen
        b0, b1, b2 = uint64(rank >= n0), uint64(rank >= n1), uint64(rank >= n2)
        before = b0 * n0 + b1 * (n1 - n0) + b2 * (n2 - n1)
        start = uint64(first) + ((b0 + b1 + b2) << uint64(6))
        o = nth_bit(eq_mask64(classes, intp(start), c), rank - before)
        number[start + o] = k
        hits[start >> uint64(6)] |= uint64(1) << o
        k += uint64(1)
        rank += uint64(1) + _gap(values, k, tail[c])
    head[c] = k
    return rank - total


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
    """The whole blocks of a region, changes from entry ``out`` on. Returns the next free entry and the elements seen.

    ``positions`` and ``order`` have one entry to spare.
    """
    lo, n = window(rule, old)
    if n == 0:
        return out, 0
    classes, totals, rows, rare = scratch()
    rows[:] = NEVER
    rows[:n] = left[lo : lo + n]
    number = np.empty(_ORDERED, np.uint32)
    hits = np.zeros(_ORDERED // 64, np.uint64)
    seen = len(old) // _ORDERED * _ORDERED
    for shelf in range(0, seen, _ORDERED):
        _prepare(rule, old, shelf, shelf + _ORDERED, lo, n, classes, totals)
        for first in range(0, _ORDERED, BLOCK):
            block = first // BLOCK
            due = settle16(rows, block * _WIDEST, totals, block * _QUADS)
            while due != uint64(0):
                j = ctz(due)
                c, total, row = uint64(lo) + j, _total(totals, uint64(block), j), uint64(_WIDEST * (block + 1)) + j
                rows[row] = _mark(classes, c, uint64(rows[row]) + total, total, head, tail, values, first, number, hits)
                due &= due - uint64(1)
        for j in range(_WIDEST):
            rows[j] = rows[_ORDERED // BLOCK * _WIDEST + j]
        for i in range(_list_rare(classes, _ORDERED, uint64(lo), uint64(n), rare)):
            o, c = uint64(rare[i] >> uint32(8)), uint64(rare[i] & uint32(255))
            left[c] -= int32(1)
            if left[c] < 0:
                k = uint64(head[c])
                number[o] = k
                hits[o >> uint64(6)] |= uint64(1) << (o & uint64(63))
                head[c] = k + uint64(1)
                left[c] = _gap(values, k + uint64(1), tail[c])
        out = _emit(hits, number, base + shelf, positions, order, out)
    left[lo : lo + n] = rows[:n]
    return out, seen


@kernel
def _emit(hits: Any, number: Any, base: Any, positions: Any, order: Any, out: Any) -> Any:
    """Appends the marked changes and clears their marks; returns the next free entry."""
    n = uint64(out)
    for w in range(_ORDERED // 64):
        found = hits[w]
        hits[w] = uint64(0)
        while True:
            o = uint64(64 * w) + ctz(found | (uint64(1) << uint64(63)))
            positions[n] = uint64(base) + o
            order[n] = number[o]
            n += uint64(found != uint64(0))
            found &= found - uint64(1)
            if found == uint64(0):
                break
    return intp(n)
