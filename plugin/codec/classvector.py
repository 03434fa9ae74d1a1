"""Counting within classes, 256 elements at a time: the walks of frames with one lane, for both directions.

Owns whole blocks of 256 elements. Owns no lanes, no tails of regions and no comparison (codec/classcount.py,
classfind.py), and none of the format: whatever the window, the numbers are those of the scalar walks.

Most elements belong to the 16 neighbouring classes of the *window*. A block is narrowed to one byte per element, its
place in the window, and counted by table look-ups of 32 bytes. So an element without a change costs a small part of an
instruction, and a change a look at its block. Elements outside the window are listed and counted one by one.

Blocks are taken a *shelf* at a time: first what needs no branch, for all of them, then what depends on the data. So a
mispredicted branch throws away little, and while the shelf is counted the next one is fetched.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import int32, int64, intp, uint32, uint64

from weight_sync.codec.classrule import CLASSES, NEVER, constants
from weight_sync.codec.diff import compare
from weight_sync.codec.machine import (
    BLOCK,
    SLOT,
    before256,
    ctz,
    eq_mask64,
    fetch256,
    high_mask64,
    inlined,
    kernel,
    nth_bit,
    popcount,
    prefetch,
    slots256,
)

__all__ = ["BLOCK", "CUT", "count_blocks", "find_blocks", "scan_blocks", "window"]

CUT = 16 * BLOCK  # elements between which a frame may end
_SHELF = 8 * BLOCK  # elements at a time; with those fetched meanwhile they stay in the first-level cache
_SIZE = 16  # classes in the window
_SAMPLES = 32  # words looked at to choose it
_AHEAD = 16  # changes of a class, whose numbers the processor does not fetch by itself
_NOWHERE = 0xFFFF  # more than a shelf has elements


@kernel
def window(rule: Any, old: Any) -> Any:
    """(lowest class, whether the window pays), by a sample; it does not when the scalar walk is the better one."""
    if len(old) < BLOCK:
        return 0, False
    shift, mask = constants(rule)
    before = np.zeros(CLASSES + 1, np.int64)  # elements of lower classes
    apart = (len(old) - 64) // (_SAMPLES - 1)
    for k in range(_SAMPLES):
        for i in range(k * apart, k * apart + 64):
            before[int64((uint64(old[i]) >> shift) & mask) + 1] += 1
    for k in range(CLASSES):
        before[k + 1] += before[k]
    low, most = 0, -1
    for lo in range(CLASSES - _SIZE + 1):
        inside = before[lo + _SIZE] - before[lo]
        if inside > most:
            low, most = lo, inside
    return low, 2 * most > before[CLASSES]


@kernel
def _scratch() -> Any:
    """For a shelf: the slot of each element; per block a row of how many of each class come before it in the shelf, and
    one for the end; the elements outside the window.
    """
    return (
        np.empty(_SHELF, np.uint8),
        np.zeros((_SHELF // BLOCK + 1) * _SIZE, np.uint16),
        np.empty(_SHELF + 1, np.uint32),
    )


@inlined
def _prepare(rule: Any, old: Any, new: Any, start: Any, stop: Any, lo: Any, slots: Any, rows: Any) -> Any:
    """Fills the scratch for the whole blocks [start, stop), at most a shelf. No branch here depends on the data.
    Returns a bit per block, set when it has elements outside the window.

    Asks for the next shelf meanwhile, or memory and core would wait for each other in turn; ``new`` is what else will
    be read of it, if anything.
    """
    outside = uint64(0)
    for block in range((stop - start) // BLOCK):
        found = slots256(rule, old, start + block * BLOCK, uint64(lo), slots, block * BLOCK, rows, block)
        outside |= found << uint64(block)
        fetch256(old, stop + block * BLOCK)
        fetch256(new, stop + block * BLOCK)
    return outside


@kernel
def _list_rare(slots: Any, blocks: Any, rare: Any) -> Any:
    """Lists the places of the elements outside the window, which are in these blocks; returns how many."""
    m = uint64(0)
    while blocks != uint64(0):
        first = ctz(blocks) * uint64(BLOCK)
        blocks &= blocks - uint64(1)
        for start in range(first, first + uint64(BLOCK), uint64(64)):
            mask = high_mask64(slots, intp(start))
            while mask != uint64(0):
                rare[m] = start + ctz(mask)
                m += uint64(1)
                mask &= mask - uint64(1)
    return m


@inlined
def _count_shelf(rule: Any, old: Any, new: Any, start: Any, stop: Any, base: Any, positions: Any, at: Any, end: Any,
                 lo: Any, slots: Any, rows: Any, rare: Any, since: Any, keys: Any, gaps: Any) -> None:  # fmt: skip
    """Whole blocks [start, stop), at most a shelf, whose changes are entries [at, end)."""
    shift, mask = constants(rule)
    outside = _prepare(rule, old, new, start, stop, lo, slots, rows)
    many = _list_rare(slots, outside, rare) if outside != uint64(0) else uint64(0)
    r = uint64(0)
    for i in range(uint64(at), uint64(end)):
        o = uint64(int64(positions[i]) - base - start)
        j = uint64(slots[o]) - uint64(SLOT)
        if j < uint64(_SIZE):
            c = j + uint64(lo)
            first = o & ~uint64(BLOCK - 1)
            seen = before256(slots, intp(first), o - first, j + uint64(SLOT))
            seen += uint64(rows[(first >> uint64(8)) * uint64(_SIZE) + j])
            keys[i] = c
            gaps[i] = seen + uint64(since[c])
            since[c] = uint64(-1) - seen  # with the shelf's total, added below: what lies behind the change
            continue
        while uint64(rare[r]) < o:
            since[(uint64(old[uint64(start) + uint64(rare[r])]) >> shift) & mask] += int32(1)
            r += uint64(1)
        c = (uint64(old[uint64(start) + o]) >> shift) & mask
        keys[i] = c
        gaps[i] = since[c]
        since[c] = 0
        r += uint64(1)
    while r < many:
        since[(uint64(old[uint64(start) + uint64(rare[r])]) >> shift) & mask] += int32(1)
        r += uint64(1)
    last = (stop - start) // BLOCK * _SIZE
    for j in range(_SIZE):
        since[lo + j] += int32(rows[last + j])


@kernel
def scan_blocks(rule: Any, old: Any, new: Any, base: Any, flip: Any, positions: Any, steps: Any, old_bits: Any, n: Any,
                limit: Any, lo: Any, since: Any, keys: Any, gaps: Any) -> Any:  # fmt: skip
    """Compares and counts a run, changes from entry ``n`` on, until a shelf might not fit before ``limit``. Returns the
    next free entry and the elements seen: whole shelves, and whole blocks at the run's end.
    """
    slots, rows, rare = _scratch()
    whole = len(old) // BLOCK * BLOCK
    i = 0
    while i < whole:
        if i % CUT == 0 and n + min(CUT, len(old) - i) > limit:
            break
        stop = min(i + _SHELF, whole)
        end = compare(old, new, i, stop, base, flip, positions, steps, old_bits, n)
        _count_shelf(rule, old, new, i, stop, base, positions, n, end, lo, slots, rows, rare, since, keys, gaps)
        n = end
        i = stop
    return n, i


@kernel
def count_blocks(rule: Any, old: Any, base: Any, positions: Any, at: Any, end: Any, lo: Any, since: Any, keys: Any,
                 gaps: Any) -> Any:  # fmt: skip
    """Counts the whole blocks of a region whose changes are entries [at, end). Returns the first entry behind them."""
    slots, rows, rare = _scratch()
    whole = len(old) // BLOCK * BLOCK
    for i in range(0, whole, _SHELF):
        stop = min(i + _SHELF, whole)
        until = at
        while until < end and int64(positions[until]) < base + stop:
            until += 1
        _count_shelf(rule, old, old, i, stop, base, positions, at, until, lo, slots, rows, rare, since, keys, gaps)
        at = until
    return at


@inlined
def _gap(values: Any, k: Any, tail: Any) -> Any:
    """Elements of a class before its change number ``k``."""
    return uint64(values[k] >> uint32(1)) if k < uint64(tail) else uint64(NEVER)


@inlined
def _list_due(rows: Any, last: Any, lo: Any, left: Any, head: Any, tail: Any, values: Any, due: Any) -> Any:
    """Lists the changes of the window's classes in a shelf, whose totals are in row ``last``; returns how many. An entry
    is the change's number, the number of its class in the window and the elements of the class before it in the shelf.
    """
    m = uint64(0)
    for j in range(uint64(_SIZE)):
        c = uint64(lo) + j
        total = uint64(rows[uint64(last) * uint64(_SIZE) + j])
        rank = uint64(left[c])
        if rank < total:
            k, stop = uint64(head[c]), uint64(tail[c])
            while rank < total:
                due[m] = (k << uint64(32)) | (j << uint64(16)) | rank
                m += uint64(1)
                k += uint64(1)
                prefetch(values, k + uint64(_AHEAD))
                rank += uint64(1) + _gap(values, k, stop)
            head[c] = k
        left[c] = rank - total
    return m


@inlined
def _place(slots: Any, rows: Any, due: Any, many: Any) -> None:
    """Entries of `_list_due` become the change's number and its element in the shelf. No branch: nothing here can be
    foreseen. Two short loops, so that several changes are under way at a time.
    """
    size = uint64(_SIZE)
    for i in range(uint64(many)):
        entry = due[i]
        rank, j = entry & uint64(0xFFFF), (entry >> uint64(16)) & uint64(0xFF)
        block = uint64(0)
        for half in (4, 2, 1):
            block += uint64(half) * uint64(uint64(rows[(block + uint64(half)) * size + j]) <= rank)
        due[i] = (entry | (block << uint64(24))) - uint64(rows[block * size + j])
    for i in range(uint64(many)):
        entry = due[i]
        rank, slot = entry & uint64(0xFFFF), uint64(SLOT) + ((entry >> uint64(16)) & uint64(0xFF))
        first = ((entry >> uint64(24)) & uint64(0xFF)) * uint64(BLOCK)
        n0 = popcount(eq_mask64(slots, intp(first), slot))
        n1 = popcount(eq_mask64(slots, intp(first) + 64, slot)) + n0
        n2 = popcount(eq_mask64(slots, intp(first) + 128, slot)) + n1
        b0, b1, b2 = uint64(rank >= n0), uint64(rank >= n1), uint64(rank >= n2)
        rank -= b0 * n0 + b1 * (n1 - n0) + b2 * (n2 - n1)
        first += (b0 + b1 + b2) << uint64(6)
        due[i] = (entry >> uint64(32) << uint64(32)) | (first + nth_bit(eq_mask64(slots, intp(first), slot), rank))


@inlined
def _mark(entry: Any, hits: Any, number: Any) -> Any:
    """Marks a change at its element; returns the bit of the word of ``hits`` that it is in."""
    o = entry & uint64(0xFFFF)
    number[o] = entry >> uint64(32)
    hits[o >> uint64(6)] |= uint64(1) << (o & uint64(63))
    return uint64(1) << (o >> uint64(6))


@kernel
def find_blocks(rule: Any, old: Any, base: Any, left: Any, head: Any, tail: Any, values: Any, positions: Any,
                order: Any, out: Any) -> Any:  # fmt: skip
    """The whole blocks of a region, changes from entry ``out`` on. Returns the next free entry and the elements seen.

    ``positions`` and ``order`` have one entry to spare.
    """
    lo, pays = window(rule, old)
    if not pays:
        return out, 0
    shift, mask = constants(rule)
    slots, rows, rare = _scratch()
    due = np.empty(_SHELF, np.uint64)
    number = np.empty(_SHELF, np.uint32)
    hits = np.zeros(_SHELF // 64, np.uint64)
    whole = len(old) // BLOCK * BLOCK
    for start in range(0, whole, _SHELF):
        stop = min(start + _SHELF, whole)
        outside = _prepare(rule, old, old, start, stop, lo, slots, rows)
        last = (stop - start) // BLOCK
        many = _list_due(rows, last, lo, left, head, tail, values, due)
        if last < _SHELF // BLOCK:
            rows[last * _SIZE :] = _NOWHERE
        _place(slots, rows, due, many)
        words = uint64(0)
        for i in range(uint64(many)):
            words |= _mark(due[i], hits, number)
        many = _list_rare(slots, outside, rare) if outside != uint64(0) else uint64(0)
        for i in range(many):
            o = uint64(rare[i])
            c = (uint64(old[uint64(start) + o]) >> shift) & mask
            left[c] -= int32(1)
            if left[c] < 0:
                k = uint64(head[c])
                words |= _mark((k << uint64(32)) | o, hits, number)
                head[c] = k + uint64(1)
                left[c] = _gap(values, k + uint64(1), tail[c])
        out = _emit(words, hits, number, base + start, positions, order, out)
    return out, whole


@inlined
def _emit(words: Any, hits: Any, number: Any, base: Any, positions: Any, order: Any, out: Any) -> Any:
    """Appends the marked changes, which are in these words, and clears their marks; returns the next free entry."""
    n = uint64(out)
    while words != uint64(0):
        w = ctz(words)
        found = hits[w]
        o = (w << uint64(6)) + ctz(found)
        found &= found - uint64(1)
        hits[w] = found
        words ^= uint64(found == uint64(0)) << w
        positions[n] = uint64(base) + o
        order[n] = number[o]
        n += uint64(1)
    return intp(n)
