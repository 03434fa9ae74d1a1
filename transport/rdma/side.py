"""One side of a transfer in columns: which rank holds which part of which tensor, and where.

Owns the canonical form of many ranks' layouts. Owns no comparison of two sides (schedule.py) and no memory addresses.

Layers and experts repeat: a *part* (boxes in a tensor and their places relative to a base) is kept once, and a rank's
*holding* of a tensor is five numbers. A side is built rank by rank, so that no more than one rank's layout is in memory
as objects, and does not depend on the order in which ranks, tensors or placements are added.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from weight_sync.dtypes import dtype_of
from weight_sync.errors import LayoutError
from weight_sync.layout.box import Box
from weight_sync.layout.link import Link, compact, normal
from weight_sync.layout.placement import Layout, Placement, StorageSpec
from weight_sync.tensors import TensorSpec

__all__ = ["HOLDING", "Part", "Side", "SideBuilder"]

HOLDING = np.dtype([("tensor", "<i4"), ("part", "<i4"), ("rank", "<i4"), ("storage", "<i4"), ("base", "<i8")])
"""One holding: index of the tensor, of the part, rank, index of the storage, element of the storage that is the base."""


@dataclass(frozen=True)
class Part:
    """What a rank holds of one tensor in one storage.

    Attributes:
        links: (coordinates, place relative to the holding's base), ascending, normal form.
        dtype: of the storage; "" when it holds the tensor's own bits.
    """

    links: tuple[Link, ...]
    dtype: str = ""

    @cached_property
    def key(self) -> Any:
        """Orders parts, whatever order they were found in."""
        return self.dtype, tuple((a.offset, a.sizes, a.strides, b.offset, b.strides) for a, b in self.links)

    @cached_property
    def elements(self) -> int:
        """Number of elements."""
        return sum(link[0].count for link in self.links)


@dataclass(frozen=True)
class Side:
    """All ranks of the trainer, or of an engine.

    Attributes:
        tensors: that any rank holds, sorted by name.
        parts: sorted.
        storages: (rank, key, spec), sorted by rank and key.
        holdings: (n,) of `HOLDING`, sorted by all of its columns in order.
    """

    tensors: tuple[TensorSpec, ...]
    parts: tuple[Part, ...]
    storages: tuple[tuple[int, str, StorageSpec], ...]
    holdings: npt.NDArray[Any]

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that hold anything, ascending."""
        return tuple(np.unique(self.holdings["rank"]).tolist())

    @cached_property
    def starts(self) -> npt.NDArray[np.int64]:
        """(tensors + 1,): holdings of tensor t are [starts[t], starts[t + 1])."""
        return np.searchsorted(self.holdings["tensor"], np.arange(len(self.tensors) + 1))

    @classmethod
    def of(cls, layouts: Mapping[int, Layout]) -> Side:
        """From whole layouts by rank."""
        builder = SideBuilder()
        for rank, layout in layouts.items():
            builder.add(rank, layout.tensors, layout.placements, layout.storages)
        return builder.finish()


class SideBuilder:
    """Makes a `Side` of one rank after the other."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._specs: list[TensorSpec] = []
        self._parts: dict[Any, int] = {}
        self._list: list[Part] = []
        self._raw: dict[Any, tuple[int, int]] = {}  # a single placement as it comes -> part, base minus place.offset
        self._storages: list[tuple[int, str, StorageSpec]] = []
        self._rows: list[npt.NDArray[Any]] = []

    def add(
        self,
        rank: int,
        tensors: Iterable[TensorSpec],
        placements: Sequence[Placement],
        storages: Mapping[str, StorageSpec],
    ) -> None:
        """One rank; once per rank. Raises LayoutError when ranks list a tensor differently."""
        known = {spec.name: spec for spec in tensors}
        keys = {key: len(self._storages) + i for i, key in enumerate(storages)}
        self._storages += [(rank, key, spec) for key, spec in storages.items()]
        groups: dict[tuple[str, str, tuple[str, ...]], list[Placement]] = defaultdict(list)
        for item in placements:
            if item.coords.count:
                groups[item.tensor, item.storage, item.casts].append(item)
        rows = np.empty(len(groups), HOLDING)
        for k, ((name, storage, casts), items) in enumerate(groups.items()):
            index = self._names.get(name)
            if index is None:
                index = self._names[name] = len(self._specs)
                self._specs.append(known[name])
            elif self._specs[index] is not known[name] and self._specs[index] != known[name]:
                raise LayoutError("ranks list a tensor differently", field=name, found=known[name],
                                  expected=self._specs[index], do="start every rank from the same checkpoint")  # fmt: skip
            part, base = self._part(items, storages[storage].dtype if casts else "")
            rows[k] = (index, part, rank, keys[storage], base)
        self._rows.append(rows)

    def _part(self, items: Sequence[Placement], dtype: str) -> tuple[int, int]:
        if len(items) > 1:
            return self._intern([(item.coords, item.place) for item in items], dtype)
        coords, place = items[0].coords, items[0].place
        raw = (coords.offset, coords.sizes, coords.strides, place.strides, dtype)
        found = self._raw.get(raw)
        if found is None:
            part, base = self._intern([(coords, place)], dtype)
            found = self._raw[raw] = (part, base - place.offset)
        return found[0], found[1] + place.offset

    def _intern(self, links: Sequence[Link], dtype: str) -> tuple[int, int]:
        fewer = compact(links) if len(links) > 1 else [normal(links[0])]
        base = min(place.offset for _, place in fewer)
        part = Part(tuple((a, Box(b.offset - base, b.sizes, b.strides)) for a, b in fewer), dtype)
        index = self._parts.get(part.key)
        if index is None:
            index = self._parts[part.key] = len(self._list)
            self._list.append(part)
        return index, base

    def finish(self) -> Side:
        """The side, in its canonical order."""
        holdings = np.concatenate(self._rows) if self._rows else np.empty(0, HOLDING)
        names = sorted(range(len(self._specs)), key=lambda i: self._specs[i].name)
        parts = sorted(range(len(self._list)), key=lambda i: self._list[i].key)
        storages = sorted(range(len(self._storages)), key=lambda i: self._storages[i][:2])
        for column, order in (("tensor", names), ("part", parts), ("storage", storages)):
            place = np.empty(len(order), np.int32)
            place[order] = np.arange(len(order), dtype=np.int32)
            holdings[column] = place[holdings[column]]
        columns = [holdings[name] for name in reversed(HOLDING.names or ())]
        return Side(
            tuple(self._specs[i] for i in names), tuple(self._list[i] for i in parts),
            tuple(self._storages[i] for i in storages), holdings[np.lexsort(columns)],
        )  # fmt: skip


def width_of(spec: TensorSpec, part: Part) -> int:
    """Bytes per element of the storage that holds ``part``."""
    return dtype_of(part.dtype).width if part.dtype else spec.type.width
