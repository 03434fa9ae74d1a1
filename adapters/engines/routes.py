"""Where boxes of checkpoint coordinates lie in an engine's memories, and changes cut to fit there.

Owns slots (a placement in elements of the served dtype), the route from any box to slots, and re-enumerating positions.
Owns no bits and no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weight_sync.errors import LayoutError
from weight_sync.layout.box import Box
from weight_sync.layout.link import normal
from weight_sync.layout.meet import meet
from weight_sync.layout.placement import Layout, Placement
from weight_sync.ports import Changes, DensePiece
from weight_sync.tensors import TensorSpec

__all__ = ["Routes", "Slot", "cut_changes", "cut_piece", "positions_in", "slots_of"]


@dataclass(frozen=True, slots=True)
class Slot:
    """One box of one tensor in one storage.

    Attributes:
        coords: in the tensor.
        place: in the storage, in elements of the served dtype, of the same sizes.
        alias: another slot lies in the same memory (a tied tensor that the checkpoint lists twice): never written,
            only checked.
    """

    spec: TensorSpec
    coords: Box
    storage: str
    place: Box
    alias: bool = False


def slots_of(layout: Layout, addresses: Mapping[str, int]) -> list[Slot]:
    """The slots of a layout; ``addresses`` tells storages that are one memory.

    A storage of twice the width may hold BF16 as the upper halves of F32: a model can compute in fp32 with exactly the
    served weights. Raises LayoutError on any other cast, which bits could not be scattered through.
    """
    slots, seen = [], set()
    for name, placements in sorted(layout.by_tensor.items()):
        for item in placements:
            place = _served_place(layout, item)
            memory = (addresses[item.storage], place)
            slots.append(Slot(layout.by_name[name], item.coords, item.storage, place, memory in seen))
            seen.add(memory)
    return slots


def _served_place(layout: Layout, item: Placement) -> Box:
    if not item.casts:
        return item.place
    held = layout.storages[item.storage].dtype
    if (held, item.casts) != ("F32", ("BF16",)):
        raise LayoutError(
            "the engine computes in a dtype that cannot hold the served bits in place",
            field=item.tensor,
            found=held,
            expected=layout.by_name[item.tensor].dtype,
            do="load the model in the checkpoint's dtype, or BF16 as float32",
        )
    place = item.place  # little-endian: the upper half is the second one
    return Box(2 * place.offset + 1, place.sizes, tuple(2 * stride for stride in place.strides))


class Routes:
    """From a box of a tensor to the slots that hold it; remembers, because versions repeat the same boxes."""

    def __init__(self, slots: list[Slot]) -> None:
        self._by_tensor: dict[str, list[Slot]] = {}
        for slot in slots:
            self._by_tensor.setdefault(slot.spec.name, []).append(slot)
        self._known: dict[tuple[str, Box], tuple[Slot, ...]] = {}

    def find(self, name: str, box: Box) -> tuple[Slot, ...]:
        """The parts of ``box`` that are held, each as a slot of its own; () when none is."""
        key = (name, box)
        if key not in self._known:
            self._known[key] = tuple(self._cut(name, box))
        return self._known[key]

    def _cut(self, name: str, box: Box) -> Iterator[Slot]:
        held = self._by_tensor.get(name, [])
        links = [normal((slot.coords, slot.place)) for slot in held]
        for i, _, (coords, place) in meet(links, [normal((box,))]):
            slot = held[i]
            yield Slot(slot.spec, coords, slot.storage, place, slot.alias)


def positions_in(box: Box, indices: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
    """Which of the flat indices lie in a box of ascending coordinates, and their positions in its enumeration."""
    rest = indices - box.offset
    inside = rest >= 0
    position = np.zeros_like(rest)
    for size, stride in zip(box.sizes, box.strides, strict=True):
        digit, rest = np.divmod(rest, stride)
        inside &= digit < size
        position = position * size + digit
    inside &= rest == 0
    return inside, position[inside]


def cut_changes(changes: Changes, coords: Box) -> Changes:
    """The changes that lie in ``coords``, which is a part of ``changes.coords``."""
    if normal((changes.coords,)) == normal((coords,)):
        return changes
    inside, positions = positions_in(coords, changes.coords.indices(changes.positions))
    steps = None if changes.steps is None else changes.steps[inside]
    bits = None if changes.bits is None else changes.bits[inside]
    return Changes(changes.spec, coords, positions.astype(np.uint32), steps, bits)


def cut_piece(piece: DensePiece, coords: Box) -> DensePiece:
    """The elements that lie in ``coords``, which is a part of ``piece.coords``."""
    if normal((piece.coords,)) == normal((coords,)):
        return piece
    if piece.coords.is_run:
        inner = Box(coords.offset - piece.coords.offset, coords.sizes, coords.strides)
        return DensePiece(piece.spec, coords, inner.view(piece.bits).reshape(-1))
    _, positions = positions_in(piece.coords, coords.indices(np.arange(coords.count)))
    return DensePiece(piece.spec, coords, piece.bits[positions])
