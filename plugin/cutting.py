"""Changes and dense pieces cut to boxes: what one holder of a part of a tensor needs of what was published.

Owns the cut, in checkpoint coordinates. Owns no storage (adapters/engines/routes.py) and no fetch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from weight_sync.errors import InputError, LayoutError
from weight_sync.layout.box import Box, Regions
from weight_sync.layout.link import normal
from weight_sync.layout.meet import meet
from weight_sync.ports import Changes, DensePiece
from weight_sync.proto.v1 import common_pb2
from weight_sync.tensors import TensorSpec

__all__ = ["cut_changes", "cut_piece", "cut_to", "positions_in", "regions_from", "regions_to"]


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


def cut_to(
    regions: Regions, changes: Iterable[Changes], whole: Iterable[DensePiece]
) -> tuple[list[Changes], list[DensePiece]]:
    """What of these lies in the regions; parts without any change are left out."""
    cut = [cut_changes(item, box) for item in changes for box in _common(regions, item.spec.name, item.coords)]
    pieces = [cut_piece(piece, box) for piece in whole for box in _common(regions, piece.spec.name, piece.coords)]
    return [item for item in cut if len(item.positions)], pieces


def _common(regions: Regions, name: str, box: Box) -> Iterator[Box]:
    links = [normal((wanted,)) for wanted in regions.get(name, ())]
    for _, _, (coords,) in meet(links, [normal((box,))]):
        yield coords


def regions_to(regions: Regions, table: Sequence[TensorSpec]) -> Iterator[common_pb2.Region]:
    """As messages, in the order of a table of tensors. Raises InputError for a tensor that is not in it."""
    numbers = {spec.name: k for k, spec in enumerate(table)}
    for name, boxes in regions.items():
        if name not in numbers:
            raise InputError("no such tensor in the version", field="regions", found=name)
        for box in boxes:
            yield box.to_region(numbers[name], table[numbers[name]].elements)


def regions_from(messages: Iterable[common_pb2.Region], table: Sequence[TensorSpec]) -> Regions:
    """From messages. Raises InputError for a tensor that is not there and a box that leaves its tensor."""
    found: dict[str, list[Box]] = {}
    for message in messages:
        if message.tensor >= len(table):
            raise InputError("no such tensor in the version", field="regions.tensor", found=message.tensor,
                             expected=f"below {len(table)}")  # fmt: skip
        spec = table[message.tensor]
        try:
            found.setdefault(spec.name, []).append(Box.from_region(message, spec.elements))
        except LayoutError as error:
            raise InputError(error.what, field=f"regions, {spec.name}", found=error.found,
                             expected=error.expected) from error  # fmt: skip
    return found
