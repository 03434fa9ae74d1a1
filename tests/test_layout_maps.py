"""Boxes and maps made of them, against every element spelled out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_cases import (
    boxes,
    columns,
    elements,
    injective,
    random_layout,
    spelled,
    tables,
    with_payload,
)

from weight_sync.errors import LayoutError
from weight_sync.layout import (
    Box,
    Layout,
    Placement,
    StorageSpec,
    compose,
    intersect,
)
from weight_sync.layout.link import compact, from_indices, is_nested, normal
from weight_sync.layout.meet import meet, minus
from weight_sync.tensors import TensorSpec


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_maps_meet_exactly_where_their_keys_share_elements(data: Any) -> None:
    left = [with_payload(data.draw, data.draw(injective()))]
    right = [with_payload(data.draw, data.draw(boxes(zeros=True))) for _ in range(data.draw(st.integers(0, 3)))]
    expected = Counter(
        (a[0], a[1], b[1], j)
        for j, other in enumerate(right)
        for a in columns(left[0])
        for b in columns(other)
        if a[0] == b[0]
    )
    found = Counter((*row, j) for _, j, link in meet(left, right) for row in columns(link))
    assert found == expected


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_a_difference_leaves_exactly_the_other_elements(data: Any) -> None:
    link = with_payload(data.draw, data.draw(injective()))
    (hole,) = normal((data.draw(boxes()),))
    gone = {row[0] for row in columns((hole,))}
    assert spelled(minus([link], hole)) == Counter(row for row in columns(link) if row[0] not in gone)


@given(st.lists(st.tuples(injective(), st.integers(0, 3), st.integers(0, 50)), min_size=1, max_size=8))
@settings(max_examples=150, deadline=None)
def test_compaction_keeps_every_element(parts: Any) -> None:
    links = [(key, Box(at, key.sizes, tuple(step * s for s in key.strides))) for key, step, at in parts]
    found = compact(links)
    assert spelled(found) == spelled(links)
    assert len(found) <= len(links)


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 200)), max_size=60, unique_by=lambda row: row[0]))
@settings(max_examples=150, deadline=None)
def test_elements_one_by_one_become_boxes_of_the_same_elements(rows: list[tuple[int, int]]) -> None:
    table = np.array(rows, np.int64).reshape(-1, 2)
    found = from_indices([table[:, 0], table[:, 1]])
    assert spelled(found) == Counter(rows)
    assert all(is_nested(link[0]) for link in found)


@pytest.mark.parametrize(
    ("permute", "most"),
    [
        (lambda t: t.view(4, 2, 8, 32).transpose(1, 2), 1),  # rope: halves to pairs
        (lambda t: t.t(), 1),
        (lambda t: t.view(4, 4, 4, 32)[:, :2], 1),  # the queries of an interleaved qkv
        (lambda t: torch.cat([t.view(2, 32, 32)[1], t.view(2, 32, 32)[0]]), 2),
        (lambda t: t[5:63, 3:], 1),
    ],
)
def test_permutations_of_hosts_take_few_boxes(permute: Callable[[torch.Tensor], torch.Tensor], most: int) -> None:
    numbers = permute(torch.arange(64 * 32).view(64, 32)).reshape(-1).numpy()
    found = from_indices([np.arange(len(numbers)), numbers])
    assert len(found) <= most
    assert spelled(found) == Counter(enumerate(numbers.tolist()))


def test_pieces_of_different_lengths_that_continue_each_other_become_one() -> None:
    runs = [(Box.run(0, 60), Box.run(100, 60)), (Box(60, (3, 64), (64, 1)), Box(160, (3, 64), (64, 1)))]
    assert compact(runs) == [(Box.run(0, 252), Box.run(100, 252))]


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_the_intersection_of_two_layouts_equals_brute_force(data: Any) -> None:
    table = data.draw(tables())
    left, right = random_layout(data.draw, table, "l", keep=False), random_layout(data.draw, table, "r", keep=False)
    mine, theirs = elements(left), elements(right)
    expected = Counter(
        (name, at, *mine[name][at], *theirs[name][at])
        for name in mine.keys() & theirs
        for at in mine[name].keys() & theirs[name]
    )
    found = Counter(
        (m.tensor, at, m.left_storage, a, m.right_storage, b)
        for m in intersect(left, right)
        for at, a, b in columns((m.coords, m.left, m.right))
    )
    assert found == expected


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_composed_maps_lead_where_one_leads_after_the_other(data: Any) -> None:
    table = data.draw(tables())
    outer = random_layout(data.draw, table, "m", keep=False)
    memory = [TensorSpec(key, storage.dtype, (storage.elements,)) for key, storage in outer.storages.items()]
    inner = random_layout(data.draw, memory, "s", keep=False)
    first, second = elements(inner), elements(outer)
    expected = {
        (name, at): first[key][place]
        for name, known in second.items()
        for at, (key, place) in known.items()
        if place in first.get(key, {})
    }
    found = {
        (name, at): source for name, known in elements(compose(inner, outer)).items() for at, source in known.items()
    }
    assert found == expected


@given(st.data())
@settings(max_examples=50, deadline=None)
def test_restricting_and_clipping_keep_exactly_what_was_named(data: Any) -> None:
    table = data.draw(tables())
    layout = random_layout(data.draw, table, "s")
    name = table[0].name
    (region,) = normal((data.draw(injective()),))
    inside = {row[0] for row in columns((region,))}
    clipped = elements(layout.clip({name: [region]}))
    assert clipped.get(name, {}) == {at: source for at, source in elements(layout)[name].items() if at in inside}
    assert set(clipped) <= {name}
    assert elements(layout.restrict({name})) == {name: elements(layout)[name]}


def test_a_placement_outside_of_its_tensor_or_storage_is_refused() -> None:
    table, storages = (TensorSpec("t", "BF16", (4,)),), {"s": StorageSpec(4, "BF16")}
    for coords, place in (
        (Box.run(2, 3), Box.run(0, 3)),
        (Box.run(0, 3), Box.run(2, 3)),
        (Box.run(0, 3), Box.run(0, 2)),
    ):
        with pytest.raises(LayoutError):
            Layout(table, (Placement("t", coords, "s", place),), storages)
    with pytest.raises(LayoutError, match="unknown"):
        Layout(table, (Placement("other", Box.run(0, 1), "s", Box.run(0, 1)),), storages)
    with pytest.raises(LayoutError, match="twice"):
        Layout((*table, *table), (), {})
