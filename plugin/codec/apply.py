"""Changes into storage and out again, with the digest kept up on the way.

Owns scatter, undo and incremental digest over a flat array of elements. Owns no storage and no decision; whoever calls
keeps the old bits that come back: they are the undo log, and writing them again is idempotent.

``place`` is where a box of checkpoint coordinates lies in the flat array: element k of the box's enumeration is
element k of the place's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import uint64

from weight_sync.codec.digest import Digest, digest_box, gain, key_words
from weight_sync.codec.machine import kernel, prefetch
from weight_sync.codec.ordered import add_steps, flip_of, step_to
from weight_sync.errors import LayoutError
from weight_sync.layout.box import Box
from weight_sync.ports import Changes, DensePiece

__all__ = ["apply_changes", "changed_digest", "new_bits_of", "restore_changes", "write_dense"]

_ROUND = 128  # changes per round: their cache lines stay in the first-level cache until they are written to
_AHEAD = 32  # changes: more than the misses that a core keeps in flight, few enough to stay in the first-level cache


@kernel
def _gains(old_bits: Any, new_bits: Any, indices: Any, index0: Any, count: Any, key: Any, words: Any) -> Any:
    """What both lanes gain when the first ``count`` elements change; the loop is plain enough for LLVM to vectorise."""
    lane0 = uint64(0)
    lane1 = uint64(0)
    k0, k1, k2, k3 = key[0], key[1], key[2], key[3]
    if words == 1:
        for i in range(count):
            index = uint64(indices[i]) + uint64(index0)
            gain0, gain1 = gain(index, uint64(old_bits[i]), uint64(new_bits[i]), k0, k1, k2, k3)
            lane0 += gain0
            lane1 += gain1
        return lane0, lane1
    for i in range(count):
        index = (uint64(indices[i]) + uint64(index0)) << uint64(1)
        old, new = uint64(old_bits[i]), uint64(new_bits[i])
        gain0, gain1 = gain(index, old & uint64(0xFFFFFFFF), new & uint64(0xFFFFFFFF), k0, k1, k2, k3)
        more0, more1 = gain(index + uint64(1), old >> uint64(32), new >> uint64(32), k0, k1, k2, k3)
        lane0 += gain0 + more0
        lane1 += gain1 + more1
    return lane0, lane1


@kernel
def _fresh(old: Any, given: Any, relative: Any, flip: Any, low: Any, out: Any) -> None:
    """New bits: the given ones, or those that the given steps lead to."""
    if relative:
        for i in range(len(old)):
            out[i] = step_to(old[i], given[i], flip, low)
    else:
        for i in range(len(old)):
            out[i] = given[i]


@kernel
def _scatter(flat: Any, places: Any, place0: Any, indices: Any, index0: Any, given: Any, relative: Any, flip: Any,
             low: Any, key: Any, words: Any, old_bits: Any) -> Any:  # fmt: skip
    """Rounds of short loops: nearly all the time is cache misses, and the fewer instructions a loop has, the more misses
    the core has under way. Only the first loop misses; the arithmetic in between is vectorised.
    """
    lane0 = uint64(0)
    lane1 = uint64(0)
    many = uint64(len(given))
    first = uint64(place0)
    fresh = np.empty(min(_ROUND, len(given)), old_bits.dtype)
    for start in range(uint64(0), many, uint64(_ROUND)):
        stop = min(start + uint64(_ROUND), many)
        ahead: Any = max(start, min(stop + uint64(_AHEAD), many) - uint64(_AHEAD)) if many > uint64(_AHEAD) else start
        for i in range(start, ahead):
            prefetch(flat, uint64(places[i + uint64(_AHEAD)]) + first)
            old_bits[i] = flat[uint64(places[i]) + first]
        for i in range(ahead, stop):
            old_bits[i] = flat[uint64(places[i]) + first]
        old, some = old_bits[start:stop], given[start:stop]
        _fresh(old, some, relative, flip, low, fresh)
        for i in range(start, stop):
            flat[uint64(places[i]) + first] = fresh[i - start]
        gain0, gain1 = _gains(old, fresh, indices[start:stop], index0, stop - start, key, words)
        lane0 += gain0
        lane1 += gain1
    return lane0, lane1


def _addresses(box: Box, positions: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], int]:
    """Array and offset whose sum is the flat index; runs need no array of their own."""
    if box.is_run:
        return positions, box.offset
    return box.indices(positions), 0


def _low(width: int) -> np.uint64:
    return np.uint64((1 << (8 * width)) - 1)


def apply_changes(changes: Changes, flat: npt.NDArray[Any], place: Box) -> tuple[npt.NDArray[Any], Digest]:
    """Writes the changes into ``flat`` (1-d, unsigned of the element's width, writable).

    Returns the old bits, (n,), and what the digest of the state gains. Raises LayoutError, before it writes, when the
    place does not fit the box or the array.
    """
    given = changes.bits if changes.steps is None else changes.steps
    assert given is not None
    if place.count != changes.coords.count or (place.count and place.last >= len(flat)):
        raise LayoutError("place does not fit", field=changes.spec.name, found=place, expected=changes.coords)
    places, place0 = _addresses(place, changes.positions)
    indices, index0 = _addresses(changes.coords, changes.positions)
    old_bits = np.empty(len(given), given.dtype)
    width = changes.spec.type.width
    lanes = _scatter(flat, places, place0, indices, index0, given, changes.steps is not None,
                     flip_of(changes.spec.type), _low(width), key_words(changes.spec), 2 if width == 8 else 1,
                     old_bits)  # fmt: skip
    return old_bits, Digest(*map(int, lanes))


def restore_changes(changes: Changes, flat: npt.NDArray[Any], place: Box, old_bits: npt.NDArray[Any]) -> Digest:
    """Writes old bits back; returns what the digest of the state gains."""
    back = Changes(changes.spec, changes.coords, changes.positions, None, old_bits)
    return apply_changes(back, flat, place)[1]


def new_bits_of(changes: Changes, old_bits: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The bits that the changes lead to from ``old_bits`` (one per change)."""
    if changes.steps is None:
        assert changes.bits is not None
        return changes.bits
    return add_steps(old_bits, changes.steps, changes.spec.type)


def changed_digest(changes: Changes, old_bits: npt.NDArray[Any]) -> Digest:
    """What the digest of a state gains when the changes are applied to ``old_bits``, without a storage."""
    indices, index0 = _addresses(changes.coords, changes.positions)
    words = 2 if changes.spec.type.width == 8 else 1
    new_bits = new_bits_of(changes, old_bits)
    return Digest(*map(int, _gains(old_bits, new_bits, indices, index0, len(old_bits), key_words(changes.spec), words)))


def write_dense(
    piece: DensePiece, flat: npt.NDArray[Any], place: Box, keep_old: bool = True
) -> tuple[npt.NDArray[Any] | None, Digest]:
    """Writes all elements of a box; returns the old bits (None unless ``keep_old``) and what the digest gains."""
    if place.count != piece.coords.count or len(piece.bits) != piece.coords.count:
        raise LayoutError("place does not fit", field=piece.spec.name, found=place, expected=piece.coords)
    target = place.view(flat)
    old = target.reshape(-1) if target.flags.c_contiguous else target.flatten()
    gained = digest_box(piece.spec, piece.bits, piece.coords) - digest_box(piece.spec, old, piece.coords)
    kept = old.copy() if keep_old else None
    target[...] = piece.bits.reshape(target.shape)
    return kept, gained
