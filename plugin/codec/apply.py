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

from weight_sync.codec.digest import Digest, digest_box, key_words, mix
from weight_sync.codec.machine import kernel
from weight_sync.codec.ordered import add_steps, flip_of, step_to
from weight_sync.errors import LayoutError
from weight_sync.layout.box import Box
from weight_sync.ports import Changes, DensePiece

__all__ = ["apply_changes", "changed_digest", "new_bits_of", "restore_changes", "write_dense"]


@kernel
def _mix_element(index: Any, bits: Any, key: Any, words: Any) -> Any:
    if words == 1:
        return mix(index, bits, key)
    first0, first1 = mix(uint64(2) * uint64(index), uint64(bits) & uint64(0xFFFFFFFF), key)
    second0, second1 = mix(uint64(2) * uint64(index) + uint64(1), uint64(bits) >> uint64(32), key)
    return first0 + second0, first1 + second1


@kernel
def _scatter(flat: Any, places: Any, place0: Any, indices: Any, index0: Any, given: Any, relative: bool, flip: Any,
             low: Any, key: Any, words: Any, old_bits: Any) -> Any:  # fmt: skip
    lane0 = uint64(0)
    lane1 = uint64(0)
    for i in range(len(given)):
        at = uint64(places[i]) + uint64(place0)
        index = uint64(indices[i]) + uint64(index0)
        old = uint64(flat[at])
        new = step_to(old, given[i], flip, low) if relative else uint64(given[i])
        old_bits[i] = old
        flat[at] = new
        a0, a1 = _mix_element(index, old, key, words)
        b0, b1 = _mix_element(index, new, key, words)
        lane0 += b0 - a0
        lane1 += b1 - a1
    return lane0, lane1


@kernel
def _delta(old_bits: Any, indices: Any, index0: Any, new_bits: Any, key: Any, words: Any) -> Any:
    lane0 = uint64(0)
    lane1 = uint64(0)
    for i in range(len(old_bits)):
        index = uint64(indices[i]) + uint64(index0)
        a0, a1 = _mix_element(index, uint64(old_bits[i]), key, words)
        b0, b1 = _mix_element(index, uint64(new_bits[i]), key, words)
        lane0 += b0 - a0
        lane1 += b1 - a1
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
    return Digest(*map(int, _delta(old_bits, indices, index0, new_bits, key_words(changes.spec), words)))


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
