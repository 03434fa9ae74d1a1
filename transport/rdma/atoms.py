"""How two patterns of parts meet: the writes of one tensor, for all tensors that are split in the same way.

Owns the geometry of a schedule: cells that the same sources hold, pieces of destination parts, chunks. Owns no ranks
and no balance (schedule.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from weight_sync.errors import LayoutError
from weight_sync.layout.box import Box
from weight_sync.layout.link import Link, compact, normal
from weight_sync.layout.meet import meet, minus
from weight_sync.tensors import TensorSpec
from weight_sync.transport.rdma.side import Part, width_of

__all__ = ["Atom", "atoms"]


@dataclass(frozen=True)
class Atom:
    """One write, wherever source and destination lie.

    Attributes:
        target: index of the destination's part.
        sources: indices of the source's parts that hold these elements, each with a place of its own.
        coords: in the tensor.
        place: relative to the destination's base.
        places: relative to each source's base.
        nbytes: that are written.
    """

    target: int
    sources: tuple[int, ...]
    coords: Box
    place: Box
    places: tuple[Box, ...]
    nbytes: int


def atoms(
    spec: TensorSpec, sources: Sequence[tuple[int, Part]], targets: Sequence[tuple[int, Part]], chunk_bytes: int
) -> list[Atom]:
    """The writes that fill every target part exactly once.

    Args:
        sources: (index, part) of those that any source holds; they may overlap.
        targets: of those that any destination holds; each is filled on its own.
        chunk_bytes: no write is larger, unless one element is.

    Raises LayoutError when no source holds some element.
    """
    cells = _cells([part for _, part in sources])
    found = []
    for index, target in targets:
        width = width_of(spec, target)
        most = max(1, chunk_bytes // width)
        left = [normal(link) for link in target.links]
        filled = 0
        for keys, holders in cells:
            links: list[Link] = [link for _, _, link in meet(left, keys)]
            for holder in holders:
                links = [link for _, _, link in meet(links, sources[holder][1].links)]
            for link in compact(links):
                filled += link[0].count
                for coords, place, *places in _chunks(link, most):
                    ids = tuple(sources[holder][0] for holder in holders)
                    found.append(Atom(index, ids, coords, place, tuple(places), coords.count * width))
        if filled != target.elements:
            raise _hole(spec, target, cells)
    return found


def _cells(parts: Sequence[Part]) -> list[tuple[list[Link], list[int]]]:
    """Disjoint sets of coordinates, each with all parts that hold it."""
    cells: list[tuple[list[Link], list[int]]] = []
    for index, part in enumerate(parts):
        rest: list[Link] = [(link[0],) for link in part.links]
        refined: list[tuple[list[Link], list[int]]] = []
        for keys, holders in cells:
            if rest and keys == rest:
                refined.append((keys, [*holders, index]))
                rest = []
                continue
            common = [link for _, _, link in meet(keys, rest)]
            if not common:
                refined.append((keys, holders))
                continue
            refined.append((common, [*holders, index]))
            alone = _without(keys, common)
            if alone:
                refined.append((alone, holders))
            rest = _without(rest, common)
        if rest:
            refined.append((rest, [index]))
        cells = refined
    return cells


def _without(keys: list[Link], common: list[Link]) -> list[Link]:
    for (hole,) in common:
        keys = minus(keys, hole)
    return keys


def _chunks(link: Link, most: int) -> Iterator[Link]:
    """A link in parts of at most ``most`` elements, cut along its outer dimensions."""
    if link[0].count <= most:
        yield link
        return
    size, inner = link[0].sizes[0], link[0].count // link[0].sizes[0]
    if inner >= most:
        for i in range(size):
            yield from _chunks(normal(_rows(link, i, 1)), most)
        return
    count = -(-link[0].count // most)  # even chunks, no small rest
    step = min(most // inner, -(-size // count))
    for first in range(0, size, step):
        yield normal(_rows(link, first, min(step, size - first)))


def _rows(link: Link, first: int, count: int) -> Link:
    return tuple(Box(b.offset + first * b.strides[0], (count, *b.sizes[1:]), b.strides) for b in link)


def _hole(spec: TensorSpec, target: Part, cells: Sequence[tuple[list[Link], list[int]]]) -> LayoutError:
    left: list[Link] = [(link[0],) for link in target.links]
    for keys, _ in cells:
        left = _without(left, keys)
    boxes = [box for (box,) in compact(left)]
    return LayoutError("no trainer rank holds what an engine needs", field=spec.name, found=boxes[:3],
                       expected="every element on some rank", do="publish from every rank that holds weights")  # fmt: skip
