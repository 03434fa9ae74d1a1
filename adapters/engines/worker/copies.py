"""Host copies of checkpoint tensors that the engine holds in a form that cannot be written in place.

Owns which tensors need one, the copies, and their storages. Owns no reload (the host does) and no digest (the store
does). A copy has the tensor's full size, of which only what this rank holds is ever touched: the rest takes no memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from weight_sync.adapters.engines.memory import memory_of
from weight_sync.checkpoint import Checkpoint
from weight_sync.dtypes import dtype_of
from weight_sync.layout.box import Box
from weight_sync.layout.placement import Layout, Placement, StorageSpec, merge

__all__ = ["PREFIX", "Copies", "owner_of", "spread"]

PREFIX = "weight_sync.copy/"
"""Storage keys of copies; no module has a name with a slash."""


def owner_of(parameter: str) -> str:
    """The path of the module that a parameter belongs to."""
    return parameter.rpartition(".")[0]


def spread(layout: Layout, packed: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """All modules that have to be reloaded, and all tensors that need a copy, each with the reason.

    A module is reloaded as a whole, so all tensors that land in it need a copy; a tensor that also lands in another
    module takes that one along. ``packed``: the modules to start from.
    """
    modules, tensors = dict(packed), dict[str, str]()
    grown = True
    while grown:
        before = len(modules) + len(tensors)
        for item in layout.placements:
            reason = modules.get(owner_of(item.storage)) or tensors.get(item.tensor)
            if reason is not None:
                modules.setdefault(owner_of(item.storage), reason)
                tensors.setdefault(item.tensor, reason)
        grown = len(modules) + len(tensors) > before
    return modules, tensors


@dataclass
class Copies:
    """The copies of one rank.

    Attributes:
        flats: 1-d tensors of the checkpoint's dtype by name of the tensor.
        known: False while their bits are not known to be what the engine computes with.
    """

    flats: dict[str, torch.Tensor] = field(default_factory=dict)
    known: bool = True

    def storages(self) -> dict[str, torch.Tensor]:
        """By storage key."""
        return {PREFIX + name: flat for name, flat in self.flats.items()}

    def redirect(self, layout: Layout, names: Iterable[str], whole: Iterable[str] = ()) -> Layout:
        """The layout with these tensors in copies instead of in the engine's storages; ``whole`` ones in all elements.

        Copies that are not there yet are made, empty.
        """
        wanted, entire = frozenset(names), frozenset(whole)
        placements = [item for item in layout.placements if item.tensor not in wanted | entire]
        storages = dict(layout.storages)
        for name in sorted(wanted | entire):
            spec = layout.by_name[name]
            if name not in self.flats:
                self.flats[name] = torch.empty(spec.elements, dtype=dtype_of(spec.dtype).torch)
            storages[PREFIX + name] = StorageSpec(spec.elements, spec.dtype)
            held = (Box.run(0, spec.elements),) if name in entire else layout.coverage(name)
            placements += [Placement(name, box, PREFIX + name, box) for box in held]
        return merge(layout.tensors, placements, storages)

    def fill(self, layout: Layout, checkpoint: Checkpoint | None) -> None:
        """The checkpoint's bits into the copies that the layout places; without one they stay unknown."""
        if checkpoint is None:
            self.known = self.known and not self.flats
            return
        for item in layout.placements:
            name = item.storage.removeprefix(PREFIX)
            if name == item.storage:
                continue
            bits = checkpoint.bits(name)
            memory_of(self.flats[name], bits.dtype.itemsize).write(item.place, np.asarray(item.coords.view(bits)))

    def tensors(self, layout: Layout, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Copies in their checkpoint shapes, for the engine's loader; valid where this rank holds them."""
        for name in names:
            yield name, self.flats[name].view(layout.by_name[name].shape)
