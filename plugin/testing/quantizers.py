"""The conformance suite for quantisers: what the core relies on, shown on a base of their scheme.

Owns `check_quantizer`. Owns no scheme and no base: whoever tests brings a checkpoint quantised by the format's own tools
and the weights that it was made from.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from weight_sync.config import View
from weight_sync.layout.box import Box
from weight_sync.layout.placement import Layout, Placement, StorageSpec
from weight_sync.projection import Plan, Projection
from weight_sync.quantize import scheme_of
from weight_sync.quantize.extrema import Ranges, merge_ranges
from weight_sync.served import ServedPiece, ServedView, bits_of

if TYPE_CHECKING:
    import torch

__all__ = ["check_quantizer"]


def check_quantizer(base: str | os.PathLike[str], weights: Mapping[str, torch.Tensor], cut: int = 3) -> None:
    """Raises AssertionError, with the tensor's name, when one of these does not hold.

    - The base's config.json names a scheme that is registered, and the quantiser finds weights in the base.
    - What it makes of ``weights`` (the 16-bit checkpoint that the base was quantised from) is the base, bit for bit.
    - So it is when each weight is cut by rows among ``cut`` ranks, in the middle of blocks, too.
    """
    plan = scheme_of(View(name="conformance", base=os.fspath(base), scheme=None))[2]
    assert plan is not None and plan.weights, "the base's config.json names no quantiser"
    missing = [spec.name for spec in plan.source if spec.name not in weights]
    assert not missing, f"weights that the base was made from are missing: {missing[:5]}"
    flat = {spec.name: weights[spec.name].detach().to(spec.type.torch).contiguous().reshape(-1) for spec in plan.source}
    for ranks in (1, cut):
        found = _made(plan, flat, ranks)
        for spec in plan.base.table:
            same = np.array_equal(found[spec.name], plan.base.bits(spec.name))
            assert same, f"{spec.name} is not what the base holds, made by {ranks} ranks"


def _made(plan: Plan, flat: Mapping[str, torch.Tensor], ranks: int) -> dict[str, npt.NDArray[np.generic]]:
    """All served tensors, put together from what each rank makes of its rows."""
    parts = [Projection.of(plan, _rows_of(plan, rank, ranks)) for rank in range(ranks)]
    ranges = Ranges(merge_ranges([part.ranges(flat) for part in parts]))
    found = {spec.name: np.zeros(spec.elements, spec.type.uint) for spec in plan.base.table}
    for rank, part in enumerate(parts):
        made = part.storages(flat, ranges, 1)
        for piece in part.view(rank == 0).pieces:
            bits = piece.placement.place.view(bits_of(made[piece.placement.storage].cpu()))
            piece.coords.view(found[piece.spec.name])[...] = bits
    return found


def _rows_of(plan: Plan, rank: int, ranks: int) -> ServedView:
    """The rows of each tensor that a rank holds, over all matrices of a stack."""
    placements: list[Placement] = []
    for spec in plan.source:
        cols = spec.shape[-1] if len(spec.shape) > 1 else max(1, spec.elements)
        rows = spec.elements // cols
        first, last = rows * rank // ranks, rows * (rank + 1) // ranks
        if last > first:
            box = Box.run(first * cols, (last - first) * cols)
            placements.append(Placement(spec.name, box, spec.name, box))
    storages = {spec.name: StorageSpec(spec.elements, spec.dtype) for spec in plan.source}
    layout = Layout(plan.source, tuple(placements), storages)
    pieces = [ServedPiece(layout.by_name[item.tensor], item) for item in placements]
    return ServedView(plan.source, tuple(pieces), layout)
