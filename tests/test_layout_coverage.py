"""Who publishes what: marks, election, holes and overlaps, agreement of ranks."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_cases import (
    columns,
    injective,
    random_layout,
    tables,
)

from weight_sync.errors import FormatError, LayoutError
from weight_sync.layout import (
    Box,
    Layout,
    Placement,
    StorageSpec,
    agree_on_owners,
    learn_named,
)
from weight_sync.layout import coverage as cov
from weight_sync.layout.link import compact
from weight_sync.tensors import TensorSpec


def test_the_generator_of_marks_is_a_primitive_root() -> None:
    factors = (2, 3, 7, 19, 43, 73, 127, 337, 5419, 92737, 649657, 77158673929)
    order = cov.PRIME - 1
    for factor in factors:
        while order % factor == 0:
            order //= factor
        assert pow(cov.GENERATOR, (cov.PRIME - 1) // factor, cov.PRIME) != 1
    assert order == 1


@given(st.lists(injective(), max_size=4))
@settings(deadline=None)
def test_a_mark_depends_on_the_elements_alone(parts: list[Box]) -> None:
    one_by_one = [Box.run(row[0], 1) for box in parts for row in columns((box,))]
    assert cov.mark(parts) == cov.mark(one_by_one)
    assert cov.mark(parts) == cov.mark([link[0] for link in compact((box,) for box in parts)])


@st.composite
def shardings(draw: Any) -> tuple[list[TensorSpec], list[Layout]]:
    """A table spread over ranks, tensor by tensor, some shards held by several ranks."""
    table = draw(tables())
    world = draw(st.integers(1, 4))
    placements: list[list[Placement]] = [[] for _ in range(world)]
    for spec in table:
        for item in random_layout(draw, [spec], "s").placements:
            holder = draw(st.integers(0, world - 1))
            placements[holder].append(item)
    for rank in range(world):  # a replica holds all that another rank holds of a tensor
        if draw(st.booleans()):
            other, spec = draw(st.integers(0, world - 1)), draw(st.sampled_from(table))
            copied = [item for item in placements[other] if item.tensor == spec.name]
            if not any(item.tensor == spec.name for item in placements[rank]):
                placements[rank] += copied
    storages = {f"s{spec.name}": StorageSpec(spec.elements, spec.dtype) for spec in table}
    return table, [Layout(tuple(table), tuple(items), storages) for items in placements]


def owned_boxes(table: list[TensorSpec], layouts: list[Layout], owners: list[tuple[int, ...]]) -> list[dict[int, Any]]:
    summaries = [cov.summarise(layout) for layout in layouts]
    return [
        {
            h.tensor: layouts[r].coverage(table[h.tensor].name)
            for h, owner in zip(s.held, owners[r], strict=True)
            if owner == r
        }
        for r, s in enumerate(summaries)
    ]


@given(shardings())
@settings(max_examples=150, deadline=None)
def test_any_sharding_with_replicas_is_owned_exactly_once(case: tuple[list[TensorSpec], list[Layout]]) -> None:
    table, layouts = case
    summaries = [cov.decode_summary(cov.encode_summary(cov.summarise(layout))) for layout in layouts]
    assert cov.check_exactly_once(table, summaries) == ()
    owned = owned_boxes(table, layouts, cov.elect(table, summaries))
    assert cov.faults(table, owned) == []
    for index, spec in enumerate(table):
        seen = Counter(row[0] for held in owned for box in held.get(index, ()) for row in columns((box,)))
        assert seen == Counter(range(spec.elements))


@given(shardings(), st.data())
@settings(max_examples=150, deadline=None)
def test_a_hole_or_an_overlap_is_found_and_named(case: tuple[list[TensorSpec], list[Layout]], data: Any) -> None:
    table, layouts = case
    spec = data.draw(st.sampled_from(table))
    element = data.draw(st.integers(0, spec.elements - 1))
    hole = data.draw(st.booleans())
    if hole:
        rest = {name: [Box.run(0, spec.elements)] for name, spec in ((s.name, s) for s in table)}
        rest[spec.name] = [Box.run(0, element), Box.run(element + 1, spec.elements - element - 1)]
        layouts = [layout.clip(rest) for layout in layouts]
    else:  # one more rank holds one element; that is a replica only where another rank holds just that element
        if any(columns((box,)) == [(element,)] for layout in layouts for box in layout.coverage(spec.name)):
            return
        extra = Placement(spec.name, Box.run(element, 1), f"s{spec.name}", Box.run(0, 1))
        layouts = [*layouts, Layout(tuple(table), (extra,), layouts[0].storages)]
    summaries = [cov.summarise(layout) for layout in layouts]
    assert cov.check_exactly_once(table, summaries) == (table.index(spec),)
    lines = cov.faults(table, owned_boxes(table, layouts, cov.elect(table, summaries)))
    assert len(lines) == 1
    assert repr(spec.name) in lines[0]
    assert f"[{element}, {element + 1})" in lines[0]
    assert ("nobody" in lines[0]) == hole


def test_replicas_share_the_work() -> None:
    table = [TensorSpec(f"layer.{i}.norm", "BF16", (64,)) for i in range(400)]
    tensors = {spec.name: torch.zeros(64, dtype=torch.bfloat16) for spec in table}
    summary = cov.summarise(learn_named(tensors, table))
    owners = cov.elect(table, [summary] * 4)
    assert owners[0] == owners[1] == owners[2] == owners[3]
    assert min(Counter(owners[0])[rank] for rank in range(4)) > 60


@given(st.dictionaries(st.integers(0, 2), st.lists(injective(), min_size=1, max_size=3)))
def test_exchanged_boxes_survive_the_bytes(coverage: dict[int, list[Box]]) -> None:
    table = [TensorSpec(f"t{i}", "U8", (100_000,)) for i in range(3)]
    assert cov.decode_boxes(cov.encode_boxes(coverage), table) == coverage


@given(st.binary(max_size=80) | st.lists(st.integers(-2, 5), max_size=9).map(lambda w: np.array(w, "<i8").tobytes()))
def test_garbage_from_a_rank_is_a_format_error_or_valid(data: bytes) -> None:
    table = [TensorSpec("t", "U8", (4,))]
    with contextlib.suppress(FormatError):  # what is no error has to be sound
        assert cov.decode_boxes(data, table).keys() <= {0}
    with pytest.raises(FormatError):
        cov.decode_summary(data[:23])


class Threads:
    """A group of threads of this process."""

    def __init__(self, size: int) -> None:
        self.size, self.barrier = size, threading.Barrier(size)
        self.parts: list[bytes] = [b""] * size
        self.word: bytes | None = None


class Member:
    def __init__(self, threads: Threads, rank: int) -> None:
        self.threads, self.rank, self.size = threads, rank, threads.size

    def gather(self, data: bytes) -> list[bytes]:
        self.threads.parts[self.rank] = data
        self.threads.barrier.wait(30)
        out = list(self.threads.parts) if self.rank == 0 else []
        self.threads.barrier.wait(30)
        return out

    def broadcast(self, data: bytes | None) -> bytes:
        if self.rank == 0:
            self.threads.word = data
        self.threads.barrier.wait(30)
        out = self.threads.word
        self.threads.barrier.wait(30)
        assert out is not None
        return out


def settle(layouts: list[Any]) -> list[Any]:
    """What each of the ranks returns or raises."""
    threads, out = Threads(len(layouts)), [None] * len(layouts)

    def run(rank: int) -> None:
        try:
            out[rank] = agree_on_owners(Member(threads, rank), layouts[rank])  # type: ignore[call-overload]
        except Exception as error:
            out[rank] = error  # type: ignore[call-overload]

    running = [threading.Thread(target=run, args=(rank,)) for rank in range(len(layouts))]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(60)
    return out


@given(shardings())
@settings(max_examples=30, deadline=None)
def test_ranks_agree_who_publishes_what(case: tuple[list[TensorSpec], list[Layout]]) -> None:
    table, layouts = case
    found = settle(layouts)
    once = Counter(
        (name, row[0])
        for rank, ownership in enumerate(found)
        for name in ownership.owned
        for box in layouts[rank].coverage(name)
        for row in columns((box,))
    )
    assert once == Counter((spec.name, at) for spec in table for at in range(spec.elements))
    for rank, ownership in enumerate(found):
        assert {name for name, owner in ownership.owners.items() if owner == rank} == set(ownership.owned)
        assert set(ownership.owners) == set(layouts[rank].by_tensor)


def test_every_rank_raises_when_coverage_a_table_or_one_rank_is_wrong() -> None:
    spec = TensorSpec("t", "BF16", (8,))
    whole = {"s": StorageSpec(8, "BF16")}
    halves = [Layout((spec,), (Placement("t", Box.run(at, 5), "s", Box.run(0, 5)),), whole) for at in (0, 3)]
    for error in settle(halves):
        assert isinstance(error, LayoutError)
        assert "ranks 0 and 1 both hold [3, 5)" in str(error)
    other = Layout((TensorSpec("t", "F32", (8,)),), (), {})
    for error in settle([halves[0], other]):
        assert isinstance(error, LayoutError)
        assert "rank 1 has another table" in str(error)
    own = LayoutError("cannot learn")
    first, second = settle([halves[0], own])
    assert second is own
    assert isinstance(first, LayoutError)
    assert "rank 1: cannot learn" in str(first)
