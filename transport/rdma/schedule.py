"""The static schedule: which trainer rank writes what into which engine rank's memory.

Owns the choice among equal sources, mesh groups, and the hash by which ranks know that they mean the same schedule.
Pure: the same layouts give the same schedule on every rank, in whatever order they are given. Owns no geometry
(atoms.py), no addresses (lower.py) and no wire.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from weight_sync.errors import LayoutError
from weight_sync.tensors import TensorSpec
from weight_sync.transport.rdma.atoms import Atom, atoms
from weight_sync.transport.rdma.balance import assign
from weight_sync.transport.rdma.links import Nics
from weight_sync.transport.rdma.side import Side

__all__ = ["CHUNK_BYTES", "WRITE", "Schedule", "plan"]

CHUNK_BYTES = 8 << 20
"""Default size of the largest write: small enough to balance and to bound staging, large enough to fill a link."""

WRITE = np.dtype([("group", "<i2"), ("atom", "<i4"), ("source", "<i4"), ("target", "<i4"), ("choice", "<i2")])
"""One write: mesh group, index of the atom, holdings of source and destination, which of the atom's sources."""


@dataclass(frozen=True)
class Schedule:
    """Writes in columns.

    Attributes:
        sources, targets: the two sides.
        atoms: geometry, shared by tensors that are split alike.
        writes: (n,) of `WRITE`, by group and destination.
        groups: mesh groups: meshes of one group are equal or disjoint, so they run beside each other; a barrier belongs
            between groups.
    """

    sources: Side
    targets: Side
    atoms: tuple[Atom, ...]
    writes: npt.NDArray[Any]
    groups: int
    nics: tuple[Nics, Nics]
    chunk_bytes: int = CHUNK_BYTES

    @cached_property
    def nbytes(self) -> npt.NDArray[np.int64]:
        """(writes,): bytes of each write."""
        table = np.array([atom.nbytes for atom in self.atoms] or [0], np.int64)
        found: npt.NDArray[np.int64] = table[self.writes["atom"]]
        return found

    @cached_property
    def source_ranks(self) -> npt.NDArray[np.int32]:
        """(writes,): the rank that writes."""
        return np.asarray(self.sources.holdings["rank"][self.writes["source"]], np.int32)

    @cached_property
    def target_ranks(self) -> npt.NDArray[np.int32]:
        """(writes,): the rank that is written to."""
        return np.asarray(self.targets.holdings["rank"][self.writes["target"]], np.int32)

    @cached_property
    def hash(self) -> bytes:
        """16 bytes over everything that decides what is written where."""
        state = hashlib.blake2b(digest_size=16)
        for side in (self.sources, self.targets):
            for spec in side.tensors:
                state.update(repr((spec.name, spec.dtype, spec.shape)).encode())
            state.update(repr([part.key for part in side.parts]).encode())
            state.update(repr([(rank, key, s.elements, s.dtype) for rank, key, s in side.storages]).encode())
            state.update(np.ascontiguousarray(side.holdings).tobytes())
        state.update(repr(self.atoms).encode())
        state.update(np.ascontiguousarray(self.writes).tobytes())
        return state.digest()


def plan(
    sources: Side,
    targets: Side,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    nics: tuple[Nics, Nics] = (Nics(), Nics()),
) -> Schedule:
    """Fills every element of every destination exactly once.

    Args:
        chunk_bytes: of the largest write. The load of a NIC that had a choice exceeds that of no alternative by more.
        nics: of the sources and of the destinations.

    Raises LayoutError when the sides list a tensor differently, or no source holds some element.
    """
    same = _matched(sources.tensors, targets.tensors)
    built = _Building(sources, targets, chunk_bytes)
    for (mine, theirs), tensors in _alike(sources, targets, same).items():
        built.add(mine, theirs, tensors, same)
    writes = built.finish()
    loads = np.array([atom.nbytes for atom in built.atoms] or [0], np.int64)
    chosen = assign(
        loads[writes.atom], writes.first, writes.count, writes.pool, writes.pool_choice,
        sources.holdings["rank"], targets.holdings["rank"][writes.target], nics,
    )  # fmt: skip
    meshes = _mesh_groups(sources)
    rows = np.empty(len(writes.atom), WRITE)
    rows["atom"], rows["target"] = writes.atom, writes.target
    rows["source"], rows["choice"] = writes.pool[chosen], writes.pool_choice[chosen]
    rows["group"] = meshes[sources.holdings["tensor"][rows["source"]]]
    rows = rows[_order(rows, sources, targets)]
    groups = int(meshes.max()) + 1 if len(meshes) else 0
    return Schedule(sources, targets, tuple(built.atoms), rows, groups, nics, chunk_bytes)


def _matched(mine: Sequence[TensorSpec], theirs: Sequence[TensorSpec]) -> npt.NDArray[np.int64]:
    """(targets' tensors,): index of the same tensor among the sources'."""
    known = {spec.name: i for i, spec in enumerate(mine)}
    out = np.empty(len(theirs), np.int64)
    for k, spec in enumerate(theirs):
        index = known.get(spec.name)
        if index is None or mine[index] != spec:
            raise LayoutError(
                "an engine needs a tensor that the trainer does not have" if index is None
                else "tensor differs between trainer and engine",
                field=spec.name, found=spec, expected=None if index is None else mine[index],
                do="start the engine from the run's base checkpoint",
            )  # fmt: skip
        out[k] = index
    return out


def _patterns(side: Side) -> list[tuple[int, ...]]:
    """Per tensor, the parts that its ranks hold, ascending."""
    pairs = np.unique(side.holdings[["tensor", "part"]])
    starts = np.searchsorted(pairs["tensor"], np.arange(len(side.tensors) + 1)).tolist()
    parts = pairs["part"].tolist()
    return [tuple(parts[a:b]) for a, b in pairwise(starts)]


_Pattern = tuple[tuple[int, ...], tuple[int, ...]]


def _alike(sources: Side, targets: Side, same: npt.NDArray[np.int64]) -> dict[Any, npt.NDArray[np.int64]]:
    """Targets' tensors by (pattern of the sources and class, pattern of the targets)."""
    mine, theirs = _patterns(sources), _patterns(targets)
    groups: dict[Any, list[int]] = {}
    for k, (spec, pattern) in enumerate(zip(targets.tensors, theirs, strict=True)):
        kind = (spec.dtype, spec.shape)
        groups.setdefault(((kind, mine[int(same[k])]), pattern), []).append(k)
    return {key: np.array(found, np.int64) for key, found in groups.items()}


@dataclass
class _Writes:
    """Writes whose source has not been chosen: candidates of write k are pool[first[k] : first[k] + count[k]]."""

    atom: npt.NDArray[np.int32]
    target: npt.NDArray[np.int32]
    first: npt.NDArray[np.int64]
    count: npt.NDArray[np.int64]
    pool: npt.NDArray[np.int32]
    pool_choice: npt.NDArray[np.int16]


@dataclass
class _Building:
    sources: Side
    targets: Side
    chunk_bytes: int
    atoms: list[Atom] = field(default_factory=list)
    _rows: list[tuple[npt.NDArray[Any], ...]] = field(default_factory=list)
    _pools: list[tuple[npt.NDArray[Any], npt.NDArray[Any]]] = field(default_factory=list)
    _pooled: int = 0

    def add(self, mine: Any, theirs: Any, tensors: npt.NDArray[np.int64], same: npt.NDArray[np.int64]) -> None:
        """All tensors of one kind: the geometry once, its ranks in columns."""
        spec = self.targets.tensors[int(tensors[0])]
        sources = [(p, self.sources.parts[p]) for p in mine[1]]
        found = atoms(spec, sources, [(p, self.targets.parts[p]) for p in theirs], self.chunk_bytes)
        held = _by_part(self.targets, tensors)
        offered = _by_part(self.sources, same[tensors])
        pools: dict[tuple[int, ...], tuple[npt.NDArray[Any], npt.NDArray[Any]]] = {}
        for atom in found:
            if atom.sources not in pools:
                pools[atom.sources] = self._pool(offered, atom.sources, len(tensors))
            first, count = pools[atom.sources]
            where, which = held[atom.target]
            number = np.full(len(where), len(self.atoms), np.int32)
            self._rows.append((number, where.astype(np.int32), first[which], count[which]))
            self.atoms.append(atom)

    def _pool(self, offered: Mapping[int, Any], parts: tuple[int, ...], tensors: int) -> tuple[Any, Any]:
        """Per tensor, first and number of the holdings of any of these parts."""
        holdings = np.concatenate([offered[p][0] for p in parts])
        which = np.concatenate([offered[p][1] for p in parts])
        choice = np.repeat(np.arange(len(parts), dtype=np.int16), [len(offered[p][0]) for p in parts])
        order = np.lexsort((holdings, which))
        counts = np.bincount(which, minlength=tensors).astype(np.int64)
        firsts = self._pooled + np.concatenate(([0], np.cumsum(counts)[:-1]))
        self._pools.append((holdings[order].astype(np.int32), choice[order]))
        self._pooled += len(holdings)
        return firsts, counts

    def finish(self) -> _Writes:
        if not self._rows:
            none = np.empty(0, np.int32)
            return _Writes(none, none, none.astype(np.int64), none.astype(np.int64), none, none.astype(np.int16))
        columns = [np.concatenate(column) for column in zip(*self._rows, strict=True)]
        pool, choice = (np.concatenate(column) for column in zip(*self._pools, strict=True))
        return _Writes(columns[0], columns[1], columns[2], columns[3], pool, choice)


def _by_part(side: Side, tensors: npt.NDArray[np.int64]) -> dict[int, tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
    """Holdings of some tensors by part: their indices, and the position of each one's tensor in ``tensors``."""
    counts = side.starts[tensors + 1] - side.starts[tensors]
    which = np.repeat(np.arange(len(tensors)), counts)
    offsets = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
    where = side.starts[tensors][which] + offsets
    parts = side.holdings["part"][where]
    order = np.argsort(parts, kind="stable")
    found, firsts = np.unique(parts[order], return_index=True)
    pieces = np.split(order, firsts[1:])
    return {int(p): (where[piece], which[piece]) for p, piece in zip(found, pieces, strict=True)}


def _mesh_groups(side: Side) -> npt.NDArray[np.int16]:
    """Per tensor its mesh group: the ranks that hold any of it are a mesh; in a group meshes are equal or disjoint.

    Largest meshes first, each into the first group that it fits.
    """
    ranks = side.holdings["rank"]
    meshes: dict[bytes, int] = {}
    of_tensor = np.empty(len(side.tensors), np.int64)
    for k, (a, b) in enumerate(pairwise(side.starts.tolist())):
        of_tensor[k] = meshes.setdefault(np.unique(ranks[a:b]).tobytes(), len(meshes))
    members = [np.frombuffer(key, ranks.dtype) for key in meshes]
    used: list[npt.NDArray[np.bool_]] = []
    group = np.zeros(len(members), np.int16)
    top = int(ranks.max()) + 1 if len(ranks) else 0
    for index in sorted(range(len(members)), key=lambda i: (-len(members[i]), members[i].tolist())):
        number = next((i for i, taken in enumerate(used) if not taken[members[index]].any()), len(used))
        if number == len(used):
            used.append(np.zeros(top, bool))
        used[number][members[index]] = True
        group[index] = number
    return group[of_tensor]


def _order(rows: npt.NDArray[Any], sources: Side, targets: Side) -> npt.NDArray[np.int64]:
    """By group, source, and destinations in turn, each source beginning with another one."""
    if not len(rows):
        return np.empty(0, np.int64)
    source = sources.holdings["rank"][rows["source"]].astype(np.int64)
    target = np.searchsorted(np.array(targets.ranks), targets.holdings["rank"][rows["target"]])
    turn = (target - np.searchsorted(np.array(sources.ranks), source)) % len(targets.ranks)
    # target holdings are in order of tensors, atoms in order of coordinates: a total order, so ties leave no freedom
    return np.lexsort((rows["choice"], rows["atom"], rows["target"], turn, source, rows["group"]))
