"""Cases of the layout tests: every element spelled out, random boxes and layouts. Owns no test."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from weight_sync.layout import (
    Box,
    Layout,
    Placement,
    StorageSpec,
    take,
)
from weight_sync.layout.link import Link, normal, row_major
from weight_sync.layout.trace import spec_of
from weight_sync.tensors import TensorSpec


def columns(link: Link) -> list[tuple[int, ...]]:
    positions = np.arange(link[0].count)
    return list(zip(*(box.indices(positions).tolist() for box in link), strict=True))


def spelled(links: Any) -> Counter[tuple[int, ...]]:
    return Counter(row for link in links for row in columns(link))


def elements(layout: Layout) -> dict[str, dict[int, tuple[str, int]]]:
    """tensor -> coordinate -> (storage, index); fails where a coordinate comes twice."""
    out: dict[str, dict[int, tuple[str, int]]] = {}
    for item in layout.placements:
        known = out.setdefault(item.tensor, {})
        for at, place in columns((item.coords, item.place)):
            assert at not in known
            known[at] = (item.storage, place)
    return out


def table_of(tensors: dict[str, torch.Tensor]) -> list[TensorSpec]:
    return [spec_of(name, tensor) for name, tensor in sorted(tensors.items())]


def rebuilt(layout: Layout, storages: dict[str, torch.Tensor], into: dict[str, torch.Tensor]) -> None:
    for item in layout.placements:
        flat = into[item.tensor].view(-1)
        flat.as_strided(item.coords.sizes, item.coords.strides, item.coords.offset).copy_(
            take(item, storages[item.storage])
        )


def blank(table: list[TensorSpec]) -> dict[str, torch.Tensor]:
    return {spec.name: torch.full(spec.shape, 77, dtype=spec.type.torch) for spec in table}


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@st.composite
def boxes(draw: Any, most: int = 3, zeros: bool = False) -> Box:
    """Boxes with non-negative strides, nested or overlapping, with or without common place values."""
    sizes = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=most)))
    stride = st.sampled_from([1, 2, 4, 8, 16, 32, 3, 6, 12]) | st.integers(0 if zeros else 1, 40)
    return Box(draw(st.integers(0, 60)), sizes, tuple(draw(stride) for _ in sizes))


@st.composite
def injective(draw: Any) -> Box:
    """Boxes without repeated elements; strides grow by random factors, so place values often agree."""
    sizes, strides, step = [], [], draw(st.sampled_from([1, 1, 1, 2, 3]))
    for _ in range(draw(st.integers(1, 3))):
        sizes.append(draw(st.integers(1, 5)))
        strides.append(step)
        step *= sizes[-1] * draw(st.sampled_from([1, 1, 2])) + draw(st.sampled_from([0, 0, 0, 1]))
    order = draw(st.permutations(range(len(sizes))))
    return Box(draw(st.integers(0, 60)), tuple(sizes[d] for d in order), tuple(strides[d] for d in order))


def with_payload(draw: Any, key: Box) -> Link:
    strides = tuple(draw(st.integers(0, 9)) for _ in key.sizes)
    return normal((key, Box(draw(st.integers(0, 50)), key.sizes, strides)))


def random_layout(draw: Any, table: list[TensorSpec], storage: str, keep: bool = True) -> Layout:
    """A layout over ``table`` whose storages hold parts of the tensors in a shuffled, partly transposed order."""
    placements, storages = [], {}
    for spec in table:
        key = f"{storage}{spec.name}"
        storages[key] = StorageSpec(spec.elements, spec.dtype)
        grid = torch.arange(spec.elements).view(spec.shape)
        dim = draw(st.integers(0, grid.dim() - 1))
        parts = list(grid.split(draw(st.integers(1, grid.shape[dim])), dim))
        at = 0
        for part in draw(st.permutations(parts)):
            part = part.permute(draw(st.permutations(range(grid.dim()))))
            if keep or draw(st.booleans()):
                coords = Box(int(part.storage_offset()), tuple(part.shape), tuple(part.stride()))
                local = row_major(part.shape)
                coords, place = normal((coords, Box(at, local.sizes, local.strides)))
                placements.append(Placement(spec.name, coords, key, place))
            at += part.numel()
    return Layout(tuple(table), tuple(placements), storages)


@st.composite
def tables(draw: Any) -> list[TensorSpec]:
    shapes = draw(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=3))
    return [TensorSpec(f"t{i}", "BF16", tuple(shape)) for i, shape in enumerate(shapes)]
