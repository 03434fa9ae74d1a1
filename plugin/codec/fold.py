"""Fold: many consecutive patches into one, without weights.

Owns the merge of changes. Owns no frames and no store. Steps add up modulo the width and zeros drop out, so a fold of
step changes leads from the first parent to the last version exactly. Absolute changes take the last bits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from weight_sync.codec.frame import FRAME_ELEMENTS
from weight_sync.codec.machine import kernel
from weight_sync.codec.ordered import add_steps
from weight_sync.errors import LineageError
from weight_sync.layout.box import Box
from weight_sync.ports import Changes
from weight_sync.tensors import TensorSpec

__all__ = ["blocks", "fold_changes", "on_dense"]


@kernel
def _merge(p: Any, a: Any, q: Any, b: Any, positions: Any, given: Any, add: bool) -> Any:
    i = j = n = 0
    while i < len(p) or j < len(q):
        if j == len(q) or (i < len(p) and p[i] < q[j]):
            positions[n] = p[i]
            given[n] = a[i]
            n += 1
            i += 1
        elif i == len(p) or q[j] < p[i]:
            positions[n] = q[j]
            given[n] = b[j]
            n += 1
            j += 1
        else:
            positions[n] = p[i]
            given[n] = a[i] + b[j] if add else b[j]
            if not add or given[n] != 0:
                n += 1
            i += 1
            j += 1
    return n


def _join(first: Changes, second: Changes) -> Changes:
    """Two changes of one box, in order."""
    room = len(first.positions) + len(second.positions)
    positions = np.empty(room, np.uint32)
    relative = first.steps is not None
    a, b = (first.steps, second.steps) if relative else (first.bits, second.bits)
    assert a is not None and b is not None
    given = np.empty(room, a.dtype)
    n = int(_merge(first.positions, a, second.positions, b, positions, given, relative))
    some, more = positions[:n].copy(), given[:n].copy()
    return Changes(first.spec, first.coords, some, more if relative else None, None if relative else more)


def blocks(spec: TensorSpec) -> list[Box]:
    """The tensor as runs of at most one frame: boxes that every cut of it can be brought to."""
    return [Box.run(at, min(FRAME_ELEMENTS, spec.elements - at)) for at in range(0, spec.elements, FRAME_ELEMENTS)]


def _to_blocks(items: Iterable[Changes]) -> list[Changes]:
    """The same changes of one tensor, filed under its blocks."""
    found = [item for item in items if len(item.positions)]
    if not found:
        return []
    spec, relative = found[0].spec, found[0].steps is not None
    indices = np.concatenate([item.coords.indices(item.positions) for item in found])
    given: npt.NDArray[Any] = np.concatenate([item.steps if relative else item.bits for item in found])
    order = np.argsort(indices, kind="stable")
    indices, given = indices[order], given[order]
    if len(indices) > 1 and (np.diff(indices) == 0).any():
        raise LineageError("a version changes one element twice", field=spec.name, do="verify the store")
    out: list[Changes] = []
    for box in blocks(spec):
        start, stop = np.searchsorted(indices, [box.offset, box.offset + box.count])
        if start < stop:
            at = (indices[start:stop] - box.offset).astype(np.uint32)
            some = given[start:stop]
            out.append(Changes(spec, box, at, some if relative else None, None if relative else some))
    return out


def fold_changes(versions: Sequence[Sequence[Changes]]) -> list[Changes]:
    """One list of changes that does what all of them do one after the other.

    Args:
        versions: per version, oldest first, its changes; boxes of one tensor do not overlap within a version.

    Raises LineageError when forms are mixed or a tensor changes its shape on the way (those travel whole).
    """
    if len(versions) == 1:
        return list(versions[0])
    by_tensor: dict[str, list[list[Changes]]] = defaultdict(lambda: [[] for _ in versions])
    for number, version in enumerate(versions):
        for item in version:
            by_tensor[item.spec.name][number].append(item)
    out: list[Changes] = []
    for name in sorted(by_tensor):
        out.extend(_fold_tensor(name, by_tensor[name]))
    return out


def _fold_tensor(name: str, versions: list[list[Changes]]) -> list[Changes]:
    items = [item for version in versions for item in version]
    if len({item.spec for item in items}) != 1 or len({item.steps is None for item in items}) != 1:
        raise LineageError(
            "tensor changes shape or form between the versions", field=name, do="fold up to that version"
        )
    cuts = [{item.coords for item in version} for version in versions if version]
    if any(a != b and any(_cross(x, y) for x in a - b for y in b - a) for a, b in pairwise(cuts)):
        versions = [_to_blocks(version) for version in versions]
    folded: dict[Box, Changes] = {}
    for version in versions:
        for item in version:
            before = folded.get(item.coords)
            folded[item.coords] = item if before is None else _join(before, item)
    return [item for item in sorted(folded.values(), key=lambda c: c.coords.offset) if len(item.positions)]


def _cross(a: Box, b: Box) -> bool:
    """Two different boxes may share elements; boxes are compared by their spans, which errs on the safe side."""
    return bool(a.count and b.count and a.offset <= b.last and b.offset <= a.last)


def on_dense(bits: npt.NDArray[Any], coords: Box, changes: Iterable[Changes]) -> npt.NDArray[Any]:
    """Dense bits of ``coords`` (a run of one tensor) with later changes of the same tensor applied to a copy."""
    out = bits.copy()
    for item in changes:
        at = item.coords.indices(item.positions) - coords.offset
        inside = (at >= 0) & (at < len(out))
        at = at[inside]
        if item.steps is None:
            assert item.bits is not None
            out[at] = item.bits[inside]
        else:
            out[at] = add_steps(out[at], item.steps[inside], item.spec.type)
    return out
