"""Layout: which element of which storage is which element of the checkpoint.

Owns Placement, Layout and what can be said about them without data: composition, intersection, restriction. Owns no
way to learn one (layout/learn.py), no ranks (layout/coverage.py) and no bits. Imports no torch.

The same type describes every map between names and flat memories: the shard map (in-memory tensors of a host <->
local storage), the name map (checkpoint <-> in-memory tensors) and what they compose to (checkpoint <-> local storage).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from weight_sync.errors import LayoutError
from weight_sync.layout.box import Box
from weight_sync.layout.link import Link, compact, normal
from weight_sync.layout.meet import meet
from weight_sync.tensors import TensorSpec

__all__ = ["Layout", "Match", "Placement", "StorageSpec", "compose", "intersect", "merge"]


@dataclass(frozen=True, slots=True)
class Placement:
    """Element k of ``coords`` is element k of ``place``.

    Attributes:
        tensor: name of a tensor of the table.
        coords: box of flat element indices of the tensor; each element once, ascending.
        storage: key of a flat storage, for example a parameter's name.
        place: box of element indices of the storage, of the same sizes. A stride may be 0: one element of the storage
            is several elements of the tensor. No stride is negative.
        casts: safetensors dtypes that the elements are cast to, one after the other, on the way from the storage to
            the tensor; ``()`` when the bits are the same.
    """

    tensor: str
    coords: Box
    storage: str
    place: Box
    casts: tuple[str, ...] = ()

    @property
    def link(self) -> Link:
        """``(coords, place)`` in normal form."""
        return normal((self.coords, self.place))


@dataclass(frozen=True, slots=True)
class StorageSpec:
    """What a layout was learnt against.

    Attributes:
        elements: length of the flat storage; those that no placement names are never read.
        dtype: safetensors spelling.
    """

    elements: int
    dtype: str


@dataclass(frozen=True)
class Layout:
    """A map between a table of tensors and the storages of one process.

    Attributes:
        tensors: specs of the table; a tensor may have no placement here (it is another rank's).
        placements: in any order. A tensor's placements of one process do not overlap.
        storages: by key; holds every storage that a placement names.
    """

    tensors: tuple[TensorSpec, ...]
    placements: tuple[Placement, ...]
    storages: Mapping[str, StorageSpec] = field(default_factory=dict)

    def __post_init__(self) -> None:
        specs = self.by_name
        if len(specs) != len(self.tensors):
            names = [spec.name for spec in self.tensors]
            twice = next(name for name in names if names.count(name) > 1)
            raise LayoutError("tensor is in the table twice", field="name", found=twice)
        for item in self.placements:
            spec, storage = specs.get(item.tensor), self.storages.get(item.storage)
            if spec is None or storage is None:
                raise LayoutError(
                    "placement of an unknown tensor or storage", field="placement", found=(item.tensor, item.storage)
                )
            if item.coords.sizes != item.place.sizes:
                raise LayoutError(
                    f"placement of {item.tensor!r} has two shapes",
                    field="place",
                    found=item.place.sizes,
                    expected=item.coords.sizes,
                )
            _check_inside(item.coords, spec.elements, f"tensor {item.tensor!r}")
            _check_inside(item.place, storage.elements, f"storage {item.storage!r}")

    @cached_property
    def by_name(self) -> dict[str, TensorSpec]:
        """The specs by name."""
        return {spec.name: spec for spec in self.tensors}

    @cached_property
    def by_tensor(self) -> dict[str, tuple[Placement, ...]]:
        """The placements of each tensor that has any, ascending by coordinate."""
        groups: dict[str, list[Placement]] = defaultdict(list)
        for item in self.placements:
            groups[item.tensor].append(item)
        return {name: tuple(sorted(items, key=lambda item: item.coords.offset)) for name, items in groups.items()}

    def coverage(self, name: str) -> tuple[Box, ...]:
        """The coordinates of one tensor that this process holds; empty when it holds none."""
        return tuple(box for (box,) in compact([(item.coords,) for item in self.by_tensor.get(name, ())]))

    def restrict(self, names: Collection[str]) -> Layout:
        """Without the placements of other tensors; the table stays, so that indices into it stay valid."""
        wanted = frozenset(names)
        return self._with([item for item in self.placements if item.tensor in wanted])

    def clip(self, regions: Mapping[str, Sequence[Box]]) -> Layout:
        """Without what lies outside of ``regions`` (disjoint boxes by tensor); a tensor not in it loses everything."""
        out = []
        for name, items in self.by_tensor.items():
            wanted = [normal((box,)) for box in regions.get(name, ())]
            for _, i, (coords, place) in meet(wanted, [item.link for item in items]):
                out.append(_placement(name, items[i].storage, (coords, place), items[i].casts))
        return self._with(out)

    def _with(self, placements: Sequence[Placement]) -> Layout:
        used = {item.storage for item in placements}
        return Layout(
            self.tensors, tuple(placements), {key: spec for key, spec in self.storages.items() if key in used}
        )


def _check_inside(box: Box, elements: int, what: str) -> None:
    if box.offset < 0 or (box.count and (box.last >= elements or min(box.strides, default=0) < 0)):
        raise LayoutError(f"box leaves {what}", field="box", found=box, expected=f"indices in [0, {elements})")


def _placement(tensor: str, storage: str, link: Link, casts: tuple[str, ...]) -> Placement:
    coords, place = normal(link)
    return Placement(tensor, coords, storage, place, casts)


def _compacted(placements: Sequence[Placement]) -> Iterator[Placement]:
    """One tensor's placements in as few boxes as they need."""
    if len(placements) < 2:
        yield from placements
        return
    groups: dict[tuple[str, str, tuple[str, ...]], list[Link]] = defaultdict(list)
    for item in placements:
        groups[item.tensor, item.storage, item.casts].append((item.coords, item.place))
    for (tensor, storage, casts), links in groups.items():
        for coords, place in compact(links):
            yield Placement(tensor, coords, storage, place, casts)


def merge(
    tensors: Sequence[TensorSpec], placements: Sequence[Placement], storages: Mapping[str, StorageSpec]
) -> Layout:
    """A Layout of placements that come piece by piece, in as few boxes as they need."""
    groups: dict[str, list[Placement]] = defaultdict(list)
    for item in placements:
        if item.coords.count:
            groups[item.tensor].append(item)
    fewer = [item for items in groups.values() for item in _compacted(items)]
    used = {item.storage for item in fewer}
    return Layout(tuple(tensors), tuple(fewer), {key: storages[key] for key in storages if key in used})


def compose(inner: Layout, outer: Layout) -> Layout:
    """Storage -> checkpoint, from storage -> in-memory (``inner``) and in-memory -> checkpoint (``outer``).

    ``inner.tensors`` are what ``outer`` calls storages. Elements that ``inner`` does not hold are left out; casts add
    up. Raises LayoutError when the two do not speak of the same in-memory tensors.
    """
    uses: dict[str, list[Placement]] = defaultdict(list)
    for item in outer.placements:
        uses[item.storage].append(item)
    out = []
    for memory, wanted in uses.items():
        spec, storage = inner.by_name.get(memory), outer.storages[memory]
        if spec is None or (spec.elements, spec.dtype) != (storage.elements, storage.dtype):
            raise LayoutError(
                f"in-memory tensor {memory!r} differs between two layouts",
                field="storage",
                found=None if spec is None else (spec.elements, spec.dtype),
                expected=(storage.elements, storage.dtype),
                do="learn both from the same model",
            )
        held = inner.by_tensor.get(memory, ())
        left = [item.link for item in held]
        right = [normal((item.place, item.coords)) for item in wanted]
        for i, j, (_, place, coords) in meet(left, right):
            casts = held[i].casts + wanted[j].casts
            out.append(_placement(wanted[j].tensor, held[i].storage, (coords, place), casts))
    return merge(outer.tensors, out, inner.storages)


@dataclass(frozen=True, slots=True)
class Match:
    """One piece that two processes hold, in the coordinates of the checkpoint and in both storages (equal sizes)."""

    tensor: str
    coords: Box
    left_storage: str
    left: Box
    right_storage: str
    right: Box


def intersect(left: Layout, right: Layout) -> list[Match]:
    """The elements that both hold, tensor by tensor: what one process could write straight into the other's memory.

    Casts are the reader's business: ``left`` and ``right`` keep their own. Raises LayoutError when the two list a
    tensor with another dtype or shape.
    """
    out = []
    for name, mine in left.by_tensor.items():
        theirs = right.by_tensor.get(name)
        if theirs is None:
            continue
        if left.by_name[name] != right.by_name[name]:
            raise LayoutError(
                "tensor differs between two layouts",
                field=name,
                found=right.by_name[name],
                expected=left.by_name[name],
            )
        found: dict[tuple[str, str], list[Link]] = defaultdict(list)
        for i, j, link in meet([item.link for item in mine], [item.link for item in theirs]):
            found[mine[i].storage, theirs[j].storage].append(link)
        for (one, other), links in found.items():
            out += [Match(name, coords, one, a, other, b) for coords, a, b in compact(links)]
    return out
