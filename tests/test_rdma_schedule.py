"""Claims about the RDMA schedule: carried out, it moves every element exactly once and right, in balance, on every rank
the same.

Owns random sides, made of whole layouts, and a schedule carried out in numpy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_cases import random_layout, tables

from weight_sync.errors import LayoutError
from weight_sync.layout import Box, Layout, Placement, StorageSpec
from weight_sync.layout.link import row_major
from weight_sync.tensors import TensorSpec
from weight_sync.transport.rdma.links import Nics
from weight_sync.transport.rdma.runs import RUN, merged, runs
from weight_sync.transport.rdma.schedule import Schedule, plan
from weight_sync.transport.rdma.side import Side
from weight_sync.transport.rdma.writes import decode_writes, encode_writes, hash_of, writes_of

ONE_NIC_EACH = (Nics(1, 1), Nics(1, 1))


def shards(spec: TensorSpec, dim: int, parts: int, storage: str) -> list[tuple[Placement, StorageSpec]]:
    """A tensor split along ``dim``, each shard contiguous in a storage of its own."""
    out = []
    for piece in np.array_split(np.arange(spec.shape[dim]), parts):
        sizes = tuple(len(piece) if d == dim else n for d, n in enumerate(spec.shape))
        whole = row_major(spec.shape)
        coords = Box((int(piece[0]) if len(piece) else 0) * whole.strides[dim], sizes, whole.strides)
        place = row_major(sizes)
        out.append((Placement(spec.name, coords, storage, place), StorageSpec(place.count, spec.dtype)))
    return out


def layout(table: list[TensorSpec], held: list[tuple[Placement, StorageSpec]]) -> Layout:
    return Layout(tuple(table), tuple(p for p, _ in held), {p.storage: s for p, s in held})


def carried_out(schedule: Schedule, sources: Mapping[int, Layout], targets: Mapping[int, Layout]) -> None:
    """Numbers every element of every tensor, runs the schedule, and looks at every element of every destination."""
    value: dict[str, int] = {}
    for spec in schedule.targets.tensors:
        value[spec.name] = 1 + sum(s.elements for s in schedule.targets.tensors[: len(value)])
    filled = {rank: _numbered(found, value) for rank, found in sources.items()}
    empty = {
        rank: {k: np.zeros(s.elements, np.int64) for k, s in found.storages.items()} for rank, found in targets.items()
    }
    counts = {rank: {k: np.zeros_like(a) for k, a in found.items()} for rank, found in empty.items()}
    for rank in sources:
        for write in decode_writes(encode_writes(writes_of(schedule, rank))):
            taken = write.place.view(filled[rank][write.source])
            write.target_place.view(empty[write.rank][write.target])[...] = taken
            write.target_place.view(counts[write.rank][write.target])[...] += 1
    for rank, found in targets.items():
        wanted = _numbered(found, value)
        for key, array in wanted.items():
            np.testing.assert_array_equal(empty[rank][key], array)
            np.testing.assert_array_equal(counts[rank][key], array > 0)


def _numbered(found: Layout, value: Mapping[str, int]) -> dict[str, Any]:
    out = {key: np.zeros(spec.elements, np.int64) for key, spec in found.storages.items()}
    for item in found.placements:
        if item.tensor in value and item.coords.count:
            numbers = value[item.tensor] + np.arange(found.by_name[item.tensor].elements)
            item.place.view(out[item.storage])[...] = item.coords.view(numbers)
    return out


@st.composite
def sides(draw: Any) -> tuple[dict[int, Layout], dict[int, Layout]]:
    """Trainers that hold everything together, in overlapping, replicated and permuted parts; engines that hold any part."""
    table = draw(tables())
    sources = {0: random_layout(draw, table, "a")}
    for rank in range(1, draw(st.integers(1, 4))):
        sources[rank] = random_layout(draw, table, "a", keep=False)
    targets = {rank: random_layout(draw, table, "b", keep=False) for rank in range(draw(st.integers(1, 3)))}
    return sources, targets


@settings(max_examples=120, deadline=None)
@given(sides(), st.sampled_from([1, 6, 1 << 20]))
def test_carried_out_a_schedule_moves_every_element_once_and_right(sides: Any, chunk: int) -> None:
    sources, targets = sides
    schedule = plan(Side.of(sources), Side.of(targets), chunk_bytes=chunk)
    carried_out(schedule, sources, targets)
    assert int(schedule.nbytes.max(initial=0)) <= max(2, chunk)


@settings(max_examples=40, deadline=None)
@given(sides(), st.randoms())
def test_the_schedule_does_not_depend_on_the_order_of_its_input(sides: Any, random: Any) -> None:
    def shuffled(ranks: dict[int, Layout]) -> dict[int, Layout]:
        items = list(ranks.items())
        random.shuffle(items)
        out = {}
        for rank, found in items:
            table, placements = list(found.tensors), list(found.placements)
            random.shuffle(table)
            random.shuffle(placements)
            keys = list(found.storages)
            random.shuffle(keys)
            out[rank] = Layout(tuple(table), tuple(placements), {key: found.storages[key] for key in keys})
        return out

    sources, targets = sides
    first = plan(Side.of(sources), Side.of(targets))
    other = plan(Side.of(shuffled(sources)), Side.of(shuffled(targets)))
    assert first.hash == other.hash
    for rank in sources:
        parts = [hash_of(encode_writes(writes_of(found, rank))) for found in (first, other)]
        assert parts[0] == parts[1]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_link_carries_a_write_more_than_a_link_that_could_have_taken_it(data: Any) -> None:
    sizes = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=12))
    table = [TensorSpec(f"t{i:02}", "U8", (n,)) for i, n in enumerate(sizes)]
    ranks = data.draw(st.integers(1, 6))
    held = {rank: {spec.name for spec in table if data.draw(st.booleans())} for rank in range(ranks)}
    held[0] |= {spec.name for spec in table} - set().union(*held.values())
    sources = {
        rank: layout(table, [(Placement(s.name, Box.run(0, s.elements), s.name, Box.run(0, s.elements)),
                              StorageSpec(s.elements, "U8")) for s in table if s.name in names])
        for rank, names in held.items()
    }  # fmt: skip
    targets = {r: sources[0] if len(sources[0].placements) == len(table) else layout(table, [
        (Placement(s.name, Box.run(0, s.elements), s.name, Box.run(0, s.elements)), StorageSpec(s.elements, "U8"))
        for s in table]) for r in range(data.draw(st.integers(1, 3)))}  # fmt: skip
    nics = (Nics(data.draw(st.sampled_from([1, 2])), 2), Nics(1, 1))
    schedule = plan(Side.of(sources), Side.of(targets), nics=nics, chunk_bytes=16)
    links = nics[0].of(schedule.source_ranks)
    loads = np.bincount(links, schedule.nbytes, 8)
    tensors = schedule.targets.holdings["tensor"][schedule.writes["target"]]
    freedom: dict[int, list[bool]] = {}
    for link, size, tensor in zip(links.tolist(), schedule.nbytes.tolist(), tensors.tolist(), strict=True):
        name = schedule.targets.tensors[tensor].name
        others = {int(nics[0].of(np.array([rank]))[0]) for rank, names in held.items() if name in names}
        if len([1 for names in held.values() if name in names]) > 1:
            freedom.setdefault(link, []).append(all(loads[link] <= loads[other] + size for other in others))
    assert all(any(found) for found in freedom.values())  # the last one that was given to a link, at least


SPECS = [TensorSpec("q", "BF16", (8, 4)), TensorSpec("k", "BF16", (4, 4)), TensorSpec("o", "BF16", (4, 8))]


def fused_engine(parts: int) -> dict[int, Layout]:
    """q and k as rows of one parameter per rank, o by columns: what an engine with TP does."""
    out = {}
    for rank in range(parts):
        q, k = (shards(spec, 0, parts, "qk")[rank][0] for spec in SPECS[:2])
        (o, o_spec) = shards(SPECS[2], 1, parts, "o")[rank]
        k = Placement(k.tensor, k.coords, "qk", Box(q.coords.count + k.place.offset, k.place.sizes, k.place.strides))
        storages = {"qk": StorageSpec(q.coords.count + k.coords.count, "BF16"), "o": o_spec}
        out[rank] = Layout(tuple(SPECS), (q, k, o), storages)
    return out


@pytest.mark.parametrize("trainers", [1, 2, 3])
@pytest.mark.parametrize("engines", [1, 2, 4])
def test_fused_and_column_split_parameters_are_filled(trainers: int, engines: int) -> None:
    sources = {
        rank: layout(SPECS, [shards(spec, 0, trainers, spec.name)[rank] for spec in SPECS]) for rank in range(trainers)
    }
    targets = fused_engine(engines)
    schedule = plan(Side.of(sources), Side.of(targets), nics=ONE_NIC_EACH)
    carried_out(schedule, sources, targets)
    assert schedule.nbytes.sum() == sum(spec.nbytes for spec in SPECS)


def test_replicas_share_the_work() -> None:
    table = [TensorSpec(f"t{i}", "BF16", (64,)) for i in range(6)]
    whole = layout(table, [shards(spec, 0, 1, spec.name)[0] for spec in table])
    schedule = plan(Side.of(dict.fromkeys(range(3), whole)), Side.of({0: whole}), nics=ONE_NIC_EACH)
    assert np.bincount(schedule.source_ranks, schedule.nbytes).tolist() == [256, 256, 256]


def test_meshes_of_one_group_are_equal_or_disjoint() -> None:
    table = [TensorSpec("dense", "BF16", (8,)), *(TensorSpec(f"expert{i}", "BF16", (4,)) for i in range(4))]
    sources = {
        rank: layout(table, [shards(table[0], 0, 4, "dense")[rank], shards(table[1 + rank], 0, 1, "expert")[0]])
        for rank in range(4)
    }
    whole = layout(table, [shards(spec, 0, 1, spec.name)[0] for spec in table])
    schedule = plan(Side.of(sources), Side.of({0: whole}))
    names = [schedule.targets.tensors[t].name for t in schedule.targets.holdings["tensor"][schedule.writes["target"]]]
    groups = dict(zip(names, schedule.writes["group"].tolist(), strict=True))
    assert schedule.groups == 2
    assert groups["dense"] == 0 and {groups[f"expert{i}"] for i in range(4)} == {1}


def test_an_engine_in_another_dtype_gets_converted_bits() -> None:
    spec = TensorSpec("w", "BF16", (4, 6))
    source = layout([spec], [shards(spec, 0, 1, "w")[0]])
    place = row_major((4, 6))
    target = Layout((spec,), (Placement("w", place, "w", place, ("BF16",)),), {"w": StorageSpec(24, "F32")})
    schedule = plan(Side.of({0: source}), Side.of({0: target}))
    (write,) = writes_of(schedule, 0)
    assert write.converts and write.dtypes == ("BF16", "BF16", "F32") and write.nbytes == 96


def test_what_nobody_holds_is_named() -> None:
    table = [TensorSpec("w", "BF16", (4, 6))]
    half, whole = layout(table, [shards(table[0], 0, 2, "w")[0]]), layout(table, [shards(table[0], 0, 1, "w")[0]])
    with pytest.raises(LayoutError, match=r"no trainer rank holds what an engine needs: w; found .*offset=12"):
        plan(Side.of({0: half}), Side.of({0: whole}))
    other = [TensorSpec("w", "BF16", (4, 7))]
    with pytest.raises(LayoutError, match="tensor differs between trainer and engine: w"):
        plan(Side.of({0: whole}), Side.of({0: layout(other, [shards(other[0], 0, 1, "w")[0]])}))
    with pytest.raises(LayoutError, match="ranks list a tensor differently: w"):
        Side.of({0: whole, 1: layout(other, [shards(other[0], 0, 1, "w")[0]])})


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_runs_of_bytes_are_the_boxes(data: Any) -> None:
    sizes = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    grid = np.arange(10**4)
    boxes = []
    for _ in range(2):
        order = data.draw(st.permutations(range(len(sizes))))
        strides, step = [0] * len(sizes), 1
        for d in order:
            strides[d] = step
            step *= sizes[d] + data.draw(st.integers(0, 1))
        boxes.append(Box(data.draw(st.integers(0, 9)), sizes, tuple(strides)))
    width = data.draw(st.sampled_from([1, 2, 4]))
    most = data.draw(st.sampled_from([width, 3 * width, 10**6]))
    found = merged([runs(boxes[0], 1000, boxes[1], 5000, width)], most)
    moved = np.zeros(4 * 10**4, np.int64)
    for source, target, nbytes in found[list(RUN.names or ())].tolist():
        assert nbytes <= most
        at = target - 5000
        assert not moved[at : at + nbytes].any()
        moved[at : at + nbytes] = 1 + np.arange(source - 1000, source - 1000 + nbytes)
    expected = np.zeros_like(moved)
    wanted = boxes[0].view(grid)
    for byte in range(width):
        flat = expected[byte::width][: 10**4]
        boxes[1].view(flat)[...] = 1 + wanted * width + byte
    np.testing.assert_array_equal(moved, expected)
