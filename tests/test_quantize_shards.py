"""Claims about quantising what a rank holds: whatever the shards, ranks together make what the whole weight gives.

Owns no claim about versions (test_quantize.py).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mirror_cases import assert_holds, history_of
from quantize_cases import CASES, LINEAR, masters, plain

from weight_sync.checkpoint import Checkpoint
from weight_sync.config import View
from weight_sync.errors import LayoutError
from weight_sync.layout.box import Box
from weight_sync.layout.placement import Layout, Placement, StorageSpec
from weight_sync.mirror import materialize
from weight_sync.projection import Plan, Projection
from weight_sync.publisher import Publisher
from weight_sync.quantize import scheme_of
from weight_sync.quantize.extrema import Ranges, merge_ranges
from weight_sync.served import HeldTensors, ServedPiece, ServedView, bits_of
from weight_sync.tensors import TensorSpec

SHAPES = {name: tuple(tensor.shape) for name, tensor in plain(0).items()}


def plan_of(case: str, folder: Path) -> Plan:
    base = CASES[case].write_base(folder)
    plan = scheme_of(View(name="v", base=str(base)))[2]
    assert plan is not None
    return plan


def view_of_rank(plan: Plan, boxes: dict[str, list[Box]]) -> ServedView:
    """A rank that holds these boxes of whole tensors in memory; it owns them all."""
    specs = {spec.name: spec for spec in plan.source}
    placements = tuple(Placement(n, box, n, box) for n, some in sorted(boxes.items()) for box in some)
    storages = {n: StorageSpec(specs[n].elements, specs[n].dtype) for n in boxes}
    pieces = tuple(ServedPiece(specs[p.tensor], p) for p in placements)
    return ServedView(plan.source, pieces, Layout(plan.source, placements, storages))


def made_by_ranks(plan: Plan, ranks: list[dict[str, list[Box]]], step: int) -> dict[str, bytes]:
    """All served tensors of a step, put together from what each rank makes."""
    storages = {name: tensor.reshape(-1) for name, tensor in plain(step).items()}
    parts = [Projection.of(plan, view_of_rank(plan, boxes)) for boxes in ranks]
    ranges = Ranges(merge_ranges([part.ranges(storages) for part in parts]))
    found = {spec.name: np.zeros(spec.elements, spec.type.uint) for spec in plan.base.table}
    seen = {spec.name: np.zeros(spec.elements, np.int64) for spec in plan.base.table}
    for rank, part in enumerate(parts):
        made = part.storages(storages, ranges, 1)
        for piece in part.view(rank == 0).pieces:
            whole = piece.placement.place.view(bits_of(made[piece.placement.storage]))
            piece.coords.view(found[piece.spec.name])[...] = whole
            piece.coords.view(seen[piece.spec.name])[...] += 1
    assert all((count == 1).all() for count in seen.values()), "every element is made once"
    return {name: array.tobytes() for name, array in found.items()}


@cache
def expected(case: str, step: int) -> dict[str, bytes]:
    return {n: t.contiguous().view(torch.uint8).numpy().tobytes() for n, t in CASES[case].checkpoint(step).items()}


def whole(name: str) -> list[Box]:
    return [Box.run(0, int(np.prod(SHAPES[name])))]


def cut_rows(name: str, cuts: list[int]) -> list[list[Box]]:
    rows, cols = SHAPES[name]
    edges = sorted({0, rows, *(cut % rows for cut in cuts)})
    return [[Box.run(a * cols, (b - a) * cols)] for a, b in pairwise(edges)]


def cut_columns(name: str, cuts: list[int]) -> list[list[Box]]:
    rows, cols = SHAPES[name]
    edges = sorted({0, cols, *(cut * 32 % cols for cut in cuts)})
    return [[Box(a, (rows, b - a), (cols, 1))] for a, b in pairwise(edges)]


def cut_flat(name: str, cuts: list[int], unit: int) -> list[list[Box]]:
    size = int(np.prod(SHAPES[name]))
    edges = sorted({0, size, *(cut * unit % size for cut in cuts)})
    return [[Box.run(a, b - a)] for a, b in pairwise(edges)]


def dealt(parts: dict[str, list[list[Box]]], ranks: int) -> list[dict[str, list[Box]]]:
    """Boxes dealt to ranks in turn."""
    out: list[dict[str, list[Box]]] = [{} for _ in range(ranks)]
    for name, some in parts.items():
        for k, boxes in enumerate(some):
            out[k % ranks].setdefault(name, []).extend(boxes)
    return out


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Plan]:
    root = tmp_path_factory.mktemp("bases")
    return {case: plan_of(case, root / case) for case in ("fp8-block", "ct-fp8-tensor", "ct-fp8-channel", "int4-group",
                                                         "nvfp4", "mxfp4")}  # fmt: skip


@pytest.mark.parametrize("case", ["fp8-block", "ct-fp8-tensor", "ct-fp8-channel", "int4-group", "nvfp4", "mxfp4"])
@given(how=st.sampled_from(["rows", "columns", "flat"]), cuts=st.lists(st.integers(1, 1 << 16), max_size=4),
       ranks=st.integers(1, 3))  # fmt: skip
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_shards_make_what_whole_weights_give(
    plans: dict[str, Plan], case: str, how: str, cuts: list[int], ranks: int
) -> None:
    unit = 1 if case.startswith(("fp8", "ct-fp8")) else 8
    cutters = {"rows": cut_rows, "columns": cut_columns, "flat": lambda n, c: cut_flat(n, c, unit)}
    parts = {name: cutters[how](name, cuts) if name in LINEAR else [whole(name)] for name in SHAPES}
    assert made_by_ranks(plans[case], dealt(parts, ranks), 3) == expected(case, 3)


def test_aligned_row_shards_exchange_nothing(plans: dict[str, Plan]) -> None:
    storages = {name: tensor.reshape(-1) for name, tensor in plain(1).items()}
    boxes = {LINEAR[0]: [Box.run(128 * 128, 128 * 128)]}
    assert not Projection.of(plans["fp8-block"], view_of_rank(plans["fp8-block"], boxes)).ranges(storages).key
    boxes = {LINEAR[0]: [Box.run(100 * 128, 128 * 128)]}
    cut = Projection.of(plans["fp8-block"], view_of_rank(plans["fp8-block"], boxes)).ranges(storages)
    assert len(cut.key) == 2, "both blocks are cut"


def test_a_shard_that_ends_inside_packed_codes_or_holds_single_columns_is_refused(plans: dict[str, Plan]) -> None:
    plan = plans["int4-group"]
    with pytest.raises(LayoutError, match="inside packed codes"):
        Projection.of(plan, view_of_rank(plan, {LINEAR[0]: [Box.run(0, 12)]}))
    with pytest.raises(LayoutError, match="single columns"):
        Projection.of(plan, view_of_rank(plan, {LINEAR[0]: [Box(0, (256, 64), (128, 2))]}))


def test_a_base_names_its_source_tensors(plans: dict[str, Plan]) -> None:
    for plan in plans.values():
        assert {spec.name: spec.shape for spec in plan.source} == SHAPES
        assert isinstance(plan.base, Checkpoint)


class ThreadGroup:
    """Ranks that are threads of this process."""

    def __init__(self, rank: int, size: int, shared: dict[str, Any]) -> None:
        self.rank, self.size, self._shared = rank, size, shared

    def gather(self, data: bytes) -> list[bytes]:
        self._shared[f"part {self.rank}"] = data
        self._meet()
        parts = [self._shared[f"part {rank}"] for rank in range(self.size)]
        self._meet()
        return parts if self.rank == 0 else []

    def broadcast(self, data: bytes | None) -> bytes:
        if self.rank == 0:
            self._shared["all"] = data
        self._meet()
        found: bytes = self._shared["all"]
        self._meet()
        return found

    def _meet(self) -> None:
        self._shared["barrier"].wait(timeout=100)


def held_rows(step: int, rank: int, at: int) -> HeldTensors:
    """fp32 masters of one of two ranks: rows below ``at`` of each weight, or the others; rank 0 has all that is small."""
    tensors, boxes = {}, {}
    for name, tensor in masters(step).items():
        if name in LINEAR:
            part, first = (tensor[:at], 0) if rank == 0 else (tensor[at:], at * tensor.shape[1])
        elif rank == 0:
            part, first = tensor, 0
        else:
            continue
        tensors[name] = part.contiguous()
        boxes[name] = Box.run(first, part.numel())

    def learn(table: Sequence[TensorSpec]) -> Layout:
        specs = {spec.name: spec for spec in table}
        casts = {name: (specs[name].dtype,) if specs[name].dtype == "BF16" else () for name in tensors}
        placements = [Placement(n, box, n, Box.run(0, box.count), casts[n]) for n, box in boxes.items()]
        storages = {n: StorageSpec(t.numel(), "F32" if t.is_floating_point() else "I64") for n, t in tensors.items()}
        return Layout(tuple(table), tuple(placements), storages)

    return HeldTensors(tensors, learn)


@pytest.mark.parametrize("case", ["fp8-block", "ct-fp8-tensor"])
def test_two_ranks_publish_shards_that_cut_blocks(case: str, tmp_path: Path) -> None:
    base, store = CASES[case].write_base(tmp_path / "base"), tmp_path / "run"
    shared: dict[str, Any] = {"barrier": threading.Barrier(2)}

    def rank(number: int) -> list[int]:
        group = ThreadGroup(number, 2, shared)
        with Publisher.open(str(store), base=str(base), group=group, threads=1) as publisher:
            return [publisher.publish(held_rows(step, number, 100), step).version for step in (1, 2)]  # type: ignore[union-attr]

    with ThreadPoolExecutor(2) as pool:
        numbers = list(pool.map(rank, range(2)))
    assert numbers[0] == numbers[1]
    for step, number in zip((1, 2), numbers[0], strict=True):
        materialize(history_of(store, base), number, tmp_path / f"v{step}")
        assert_holds(tmp_path / f"v{step}", CASES[case].checkpoint(step))
