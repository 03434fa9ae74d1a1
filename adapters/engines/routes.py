"""Where boxes of checkpoint coordinates lie in an engine's memories.

Owns slots (a placement in elements of the served dtype) and the route from any box to slots. Owns no cut (weight_sync.cutting),
no bits and no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from weight_sync.errors import LayoutError
from weight_sync.layout.box import Box
from weight_sync.layout.link import normal
from weight_sync.layout.meet import meet
from weight_sync.layout.placement import Layout, Placement
from weight_sync.tensors import TensorSpec

__all__ = ["Routes", "Slot", "slots_of"]


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
