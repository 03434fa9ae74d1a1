"""Projection: what a rank publishes of a quantised view, made from what it holds of the 16-bit weights.

Owns which part of which codes and scales a rank makes, and making them when they are read: one rectangle of one weight
at a time, so that no second model lies in memory. Owns no arithmetic (quantize/) and no learning (served.py).

A rank makes the codes of its own elements and the scales of the blocks that begin there. Of blocks that shards cut, the
ranks exchange extrema, never weights.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from weight_sync.checkpoint import Checkpoint
from weight_sync.errors import LayoutError, TensorError
from weight_sync.layout.box import Box
from weight_sync.layout.link import normal, row_major
from weight_sync.layout.placement import Layout, Placement, StorageSpec
from weight_sync.ports import Group, Quantizer
from weight_sync.proto.v1 import report_pb2
from weight_sync.quantize.extrema import Ranges, block_extrema, block_keys, merge_ranges
from weight_sync.quantize.weights import Output, QuantizedWeight, Rect, cut
from weight_sync.served import ServedPiece, ServedView, learn_view, read_torch
from weight_sync.tensors import TensorSpec, sorted_table

if TYPE_CHECKING:
    import torch

    from weight_sync.served import Named

__all__ = ["Plan", "Projection", "learn_projected"]

_MADE = 4  # rectangles whose codes are kept, beside those that threads are reading
_CONSTANT = "\0constant\0"


@dataclass(frozen=True)
class Plan:
    """How a view's table comes from the trainer's.

    Attributes:
        quantizer: of the scheme.
        base: the checkpoint that names the tensors; constants are its.
        weights: that are quantised.
        constants: tensors that no trainer holds, as the base has them.
        source: the trainer's tensors, sorted by name.
    """

    quantizer: Quantizer
    base: Checkpoint
    weights: tuple[QuantizedWeight, ...]
    constants: frozenset[str]
    source: tuple[TensorSpec, ...]

    @classmethod
    def of(cls, quantizer: Quantizer, base: Checkpoint) -> Plan:
        """Raises TensorError when codes and scales of the base do not fit each other, or a scale is none."""
        table = {spec.name: spec for spec in base.table}
        weights = tuple(quantizer.weights(table))
        made: set[str] = set()
        for weight in weights:
            weight.check()
            made |= {output.spec.name for output in weight.outputs}
            for output in weight.outputs:
                if not output.codes:
                    check_scale(weight, output, _tensor(base, output.spec))
        constants = frozenset(quantizer.constants(table)) - made
        left = [spec for spec in base.table if spec.name not in made and spec.name not in constants]
        return cls(quantizer, base, weights, constants, sorted_table([*left, *(w.source for w in weights)]))


def _tensor(base: Checkpoint, spec: TensorSpec) -> torch.Tensor:
    """A small tensor of the base, copied, flat."""
    import torch

    return torch.from_numpy(np.array(base.bits(spec.name)).view(np.uint8)).view(spec.type.torch)


def check_scale(weight: QuantizedWeight, output: Output, scale: torch.Tensor) -> None:
    """Raises TensorError when one is 0, infinite or NaN; an exponent (U8, E8M0) has no 0 and no infinity."""
    import torch

    if scale.dtype in (torch.uint8, torch.float8_e8m0fnu):
        bad = scale.view(torch.uint8) == 0xFF
    elif scale.dtype.is_floating_point:
        wide = scale.to(torch.float32)
        bad = ~torch.isfinite(wide) | (wide == 0)
    else:
        return  # zero points
    if bad.any():
        first = int(bad.reshape(-1).nonzero()[0])
        found = float(scale.reshape(-1)[first : first + 1].to(torch.float32)) if scale.dtype != torch.uint8 else 0xFF
        raise TensorError("a scale is 0, infinite or NaN", field=output.spec.name,
                          found=f"{found} in {int(bad.sum())} of {bad.numel()} scales of {weight.source.name}",
                          do="repair the step, or quantise the base again")  # fmt: skip


@dataclass(frozen=True)
class _Job:
    """One rectangle of one weight, which is elements [start, ...) of a piece of the source."""

    number: int
    weight: int
    rect: Rect
    piece: ServedPiece
    start: int

    def key(self, role: str) -> str:
        """Of the storage that holds what is made of it."""
        return f"\0{role}\0{self.number}"


@dataclass(frozen=True)
class Projection:
    """This rank's part.

    Attributes:
        plan: of the view.
        source: what this rank owns of the trainer's tensors.
        jobs: all rectangles of quantised weights in it.
    """

    plan: Plan
    source: ServedView
    jobs: tuple[_Job, ...] = field(repr=False)

    @classmethod
    def of(cls, plan: Plan, source: ServedView) -> Projection:
        """Cuts the pieces into rectangles. Raises LayoutError where a shard cannot be quantised on its own."""
        numbers = {weight.source.name: k for k, weight in enumerate(plan.weights)}
        jobs: list[_Job] = []
        for piece in source.pieces:
            k = numbers.get(piece.spec.name)
            if k is not None:
                for start, rect in cut(plan.weights[k], piece.coords):
                    jobs.append(_Job(len(jobs), k, rect, piece, start))
        return cls(plan, source, tuple(jobs))

    def view(self, with_constants: bool) -> ServedView:
        """The served view: its pieces are read from `storages`."""
        specs = {spec.name: spec for spec in self.plan.base.table}
        plain = set(self.plan.base.table)
        placements = [piece.placement for piece in self.source.pieces if piece.spec in plain]
        storages: dict[str, StorageSpec] = {p.storage: self.source.layout.storages[p.storage] for p in placements}
        for job in self.jobs:
            weight = self.plan.weights[job.weight]
            for output in weight.outputs:
                grid = weight.grid(output.cell)
                box = grid.box(grid.begun(job.rect))
                if box.count:
                    coords, place = normal((box, row_major(box.sizes)))
                    placements.append(Placement(output.spec.name, coords, job.key(output.role), place))
                    storages[job.key(output.role)] = StorageSpec(box.count, output.spec.dtype)
        for name in self.plan.constants if with_constants else ():
            whole = Box.run(0, specs[name].elements)
            placements.append(Placement(name, whole, _CONSTANT + name, whole))
            storages[_CONSTANT + name] = StorageSpec(specs[name].elements, specs[name].dtype)
        layout = Layout(self.plan.base.table, tuple(placements), storages)
        pieces = [
            ServedPiece(specs[name], item) for name in sorted(layout.by_tensor) for item in layout.by_tensor[name]
        ]
        return ServedView(layout.tensors, tuple(p for p in pieces if p.coords.count), layout, self.source.fingerprint,
                          self)  # fmt: skip

    # --- blocks that shards cut ---

    def ranges(self, storages: Mapping[str, torch.Tensor]) -> report_pb2.BlockRanges:
        """Extrema of what this rank has of blocks that it has in part."""
        parts: list[report_pb2.BlockRanges] = []
        for job in self.jobs:
            weight = self.plan.weights[job.weight]
            levels = [k for k, block in enumerate(weight.levels) if weight.grid(block).splits(job.rect)]
            if not levels:
                continue
            values = self._values(job, storages)
            for level in levels:
                low, high = block_extrema(values, (job.rect.top, job.rect.left), weight.levels[level])
                part = report_pb2.BlockRanges(low=low.float().flatten().tolist(), high=high.float().flatten().tolist())
                part.key.extend(_keys(weight, job, level).flatten().tolist())
                parts.append(part)
        return merge_ranges(parts)

    def _values(self, job: _Job, storages: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """(rows, columns) in the 16-bit dtype: the bf16 view of what the trainer holds."""
        down, across = job.rect.shape
        storage = storages[job.piece.placement.storage]
        return read_torch(job.piece, storage, job.start, job.start + down * across).reshape(down, across)

    # --- making ---

    def sources(self, storages: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """By the keys of the view's storages what they are made from: tells on which device they will be."""
        import torch

        found = dict(storages)
        for job in self.jobs:
            for output in self.plan.weights[job.weight].outputs:
                found[job.key(output.role)] = storages[job.piece.placement.storage]
        return found | {_CONSTANT + name: torch.empty(0) for name in self.plan.constants}

    def storages(
        self, storages: Mapping[str, torch.Tensor], ranges: Ranges, threads: int
    ) -> Mapping[str, torch.Tensor]:
        """What the pieces of `view` read from; codes and scales are made when they are asked for."""
        return _Made(self, storages, ranges, threads + _MADE)

    def make(self, job: _Job, storages: Mapping[str, torch.Tensor], ranges: Ranges) -> dict[str, torch.Tensor]:
        """Codes and scales of one rectangle, flat, by role. Raises TensorError on NaN, infinity, or a scale that is none."""
        weight = self.plan.weights[job.weight]
        values = self._values(job, storages)
        extrema = []
        for level, block in enumerate(weight.levels):
            low, high = block_extrema(values, (job.rect.top, job.rect.left), block)
            if weight.grid(block).splits(job.rect):
                low, high = low.clone(), high.clone()
                ranges.fill(_keys(weight, job, level), low, high)
            extrema.append((low, high))
        if not all(bool(part.isfinite().all()) for pair in extrema for part in pair):
            raise TensorError("tensor holds NaN or infinity", field=weight.source.name,
                              expected="finite numbers in a quantised weight", do="repair the step")  # fmt: skip
        padded, (top, left) = _padded(weight, job.rect, values)
        found = self.plan.quantizer.project(weight, padded, extrema)
        out: dict[str, torch.Tensor] = {}
        for output in weight.outputs:
            grid = weight.grid(output.cell)
            mine, seen = grid.begun(job.rect), grid.touched(Rect(0, job.rect.top - top, job.rect.bottom,
                                                                 job.rect.left - left, job.rect.right))  # fmt: skip
            whole = found[output.role]
            if whole.dtype != output.spec.type.torch:
                whole = whole.view(output.spec.type.torch)
            rows = slice(mine.top - seen.top, mine.bottom - seen.top)
            part = whole[rows, mine.left - seen.left : mine.right - seen.left]
            if not output.codes:
                check_scale(weight, output, part)
            out[output.role] = part.contiguous().reshape(-1)
        return out


def _keys(weight: QuantizedWeight, job: _Job, level: int) -> npt.NDArray[Any]:
    """(blocks down, blocks across) of those that the rectangle touches."""
    grid = weight.grid(weight.levels[level])
    box = grid.box(grid.touched(job.rect))
    return block_keys(job.weight, level, box.indices(np.arange(box.count))).reshape(box.sizes)


def _padded(weight: QuantizedWeight, rect: Rect, values: torch.Tensor) -> tuple[torch.Tensor, tuple[int, int]]:
    """The values with zeros around them up to whole blocks of the smallest level, and how many above and to the left.

    Nothing is added along a dimension in which a block is as long as the matrix.
    """
    import torch

    rows, cols = weight.source.shape[-2:]
    height, width = weight.levels[-1]
    top = rect.top % height if height < rows else 0
    left = rect.left % width if width < cols else 0
    bottom = -rect.bottom % height if height < rows else 0
    right = -rect.right % width if width < cols else 0
    if not (top or left or bottom or right):
        return values, (0, 0)
    return torch.nn.functional.pad(values, (left, right, top, bottom)), (top, left)


class _Made(Mapping[str, "torch.Tensor"]):
    """Storages that are made when they are read. The large part of a rectangle, its codes, is soon forgotten."""

    def __init__(self, owner: Projection, real: Mapping[str, torch.Tensor], ranges: Ranges, kept: int) -> None:
        self._owner, self._real, self._ranges, self._kept = owner, real, ranges, kept
        self._small: dict[str, torch.Tensor] = {}
        self._large: OrderedDict[str, torch.Tensor] = OrderedDict()
        self._lock = threading.Lock()

    def __getitem__(self, key: str) -> torch.Tensor:
        if not key.startswith("\0"):
            return self._real[key]
        if key.startswith(_CONSTANT):
            base = self._owner.plan.base
            return _tensor(base, base.spec(key.removeprefix(_CONSTANT)))
        with self._lock:
            found = self._small.get(key)
            if found is None and (found := self._large.get(key)) is not None:
                self._large.move_to_end(key)
        return self._make(key) if found is None else found

    def _make(self, key: str) -> torch.Tensor:
        job = self._owner.jobs[int(key.rpartition("\0")[2])]
        made = self._owner.make(job, self._real, self._ranges)
        codes = {output.role for output in self._owner.plan.weights[job.weight].outputs if output.codes}
        with self._lock:
            for role, tensor in made.items():
                (self._large if role in codes else self._small)[job.key(role)] = tensor
            while len(self._large) > self._kept:
                self._large.popitem(last=False)
        return made[key.split("\0")[1]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._real)

    def __len__(self) -> int:
        return len(self._real)


def learn_projected(named: Named, plan: Plan, group: Group) -> ServedView:
    """Learns what this rank publishes of a quantised view; a collective call.

    Raises LayoutError or TensorError when the trainer's tensors are not those that the base was quantised from, on every
    rank when one of them fails.
    """
    source = learn_view(named, plan.source, group, True)
    _check_names(source.table, plan.source)
    return Projection.of(plan, source).view(group.rank == 0)


def _check_names(found: Sequence[TensorSpec], expected: Sequence[TensorSpec]) -> None:
    if tuple(found) == tuple(expected):
        return
    here, there = {s.name: s for s in found}, {s.name: s for s in expected}
    odd = sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))
    raise LayoutError(
        "the trainer's tensors are not those that the base was quantised from", field=odd[0],
        found=here.get(odd[0]), expected=there.get(odd[0]),
        do=f"publish the tensors of the unquantised checkpoint ({len(odd)} differ: {', '.join(odd[:5])}), or set "
           "scheme: cast when the trainer quantises them itself",
    )  # fmt: skip
