"""This process's weights as flat storages, and the shard map that says which part of each tensor they hold.

Owns what a plain tensor and a DTensor look like: local part, storage range, shard map. Owns no names of checkpoints
(layout/learn.py). Copies no weight.

The storage of a tensor is the range of memory from its first to its last element, seen as one dimension; a tensor that
is a strided view of something larger leaves holes in it. Padding of a sharded tensor is outside of it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, TypeGuard

import torch

from weight_sync.dtypes import dtype_of, dtype_of_torch
from weight_sync.errors import LayoutError
from weight_sync.layout.box import Box
from weight_sync.layout.link import Link, normal, row_major
from weight_sync.layout.placement import Layout, Placement, StorageSpec
from weight_sync.layout.trace import Tracer, spec_of

__all__ = ["check_storages", "flat_storage", "in_memory", "local_storages", "local_tensor", "shard_map", "take"]


def in_memory(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by their name in the model; tied ones under each of their names.

    A model sharded by FSDP2 shows its shards, whatever state its last forward pass left it in.
    """
    state = model.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}


def local_storages(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The flat storages that a layout of ``model`` speaks of, by name: 1-d views of what is in place now.

    Hosts may move weights between steps: call it at every step, keep nothing of it.
    """
    return {name: flat_storage(tensor) for name, tensor in in_memory(model).items()}


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this process holds, detached; shares memory."""
    return (tensor.to_local() if _is_dtensor(tensor) else tensor).detach()


def flat_storage(tensor: torch.Tensor) -> torch.Tensor:
    """1-d view of the memory from the first to the last local element of ``tensor``; of length 0 when there is none."""
    local = local_tensor(tensor)
    return local.as_strided((_span(local),), (1,), local.storage_offset())


def check_storages(layout: Layout, storages: Mapping[str, torch.Tensor]) -> None:
    """Raises LayoutError unless each storage of ``layout`` is there with the size and dtype it was learnt with."""
    for key, expected in layout.storages.items():
        tensor = storages.get(key)
        found = None if tensor is None else StorageSpec(tensor.numel(), dtype_of_torch(tensor.dtype).name)
        if found != expected:
            raise LayoutError(
                "storage is not what the layout was learnt from",
                field=key,
                found=found,
                expected=expected,
                do="learn the layout again",
            )


def take(placement: Placement, storage: torch.Tensor) -> torch.Tensor:
    """The elements of a placement, shape ``placement.coords.sizes``, in the dtype of the tensor.

    A view of ``storage`` (1-d) when nothing is cast, else a copy.
    """
    place = placement.place
    out = storage.as_strided(place.sizes, place.strides, storage.storage_offset() + place.offset)
    for name in placement.casts:
        out = out.to(dtype_of(name).torch)
    return out


def shard_map(named: Mapping[str, torch.Tensor]) -> Layout:
    """Which elements of each in-memory tensor this process's storages hold.

    Tensors of the layout are the whole in-memory tensors, storages are those of ``flat_storage``, under the same names.
    Raises LayoutError on a DTensor that waits for a reduction or that splits in an unknown way.
    """
    tensors, placements, storages = [], [], {}
    known: dict[Any, list[Link]] = {}
    for name, tensor in named.items():
        spec, local = spec_of(name, tensor), local_tensor(tensor)
        tensors.append(spec)
        storages[name] = StorageSpec(_span(local), spec.dtype)
        if not local.numel():
            continue
        if _is_dtensor(tensor):
            split = (tensor.shape, tensor.placements, tensor.device_mesh, local.shape, local.stride())
            if split not in known:
                known[split] = _pieces(name, tensor, local)
            links = known[split]
        else:
            links = [normal((row_major(local.shape), _box(local)))]
        placements += [Placement(name, coords, name, place) for coords, place in links]
    return Layout(tuple(tensors), tuple(placements), storages)


def _box(local: torch.Tensor) -> Box:
    """The elements of a local tensor in its flat storage."""
    return Box(0, tuple(local.shape), tuple(local.stride()))


def _span(local: torch.Tensor) -> int:
    return _box(local).last + 1 if local.numel() else 0


def _is_dtensor(tensor: torch.Tensor) -> TypeGuard[Any]:
    # a DTensor exists only where its module has been imported
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _pieces(name: str, tensor: Any, local: torch.Tensor) -> list[Link]:
    """(whole tensor, storage) of a DTensor, by pushing a meta tensor through its placements' own way to split."""
    tracer = Tracer()
    part = tracer.source(name, tensor.shape, tensor.dtype)
    mesh = tensor.device_mesh
    with tracer:
        for dim, placement in enumerate(tensor.placements):
            if placement.is_partial():
                raise LayoutError(
                    f"tensor {name!r} waits for a reduction",
                    field="placements",
                    found=str(tensor.placements),
                    expected="shards and replicas",
                    do="redistribute it before publishing",
                )
            if not placement.is_replicate():
                chunks, _ = placement._split_tensor(part, mesh.size(dim), with_padding=False, contiguous=False)
                part = chunks[mesh.get_local_rank(dim)]
    if part.shape != local.shape:
        raise LayoutError(
            f"tensor {name!r} is not split as its placements say",
            field="local shape",
            found=tuple(local.shape),
            expected=tuple(part.shape),
            do=f"a shard map for {tensor.placements} is missing",
        )
    return [normal((piece.place, piece.at)) for piece in tracer.read(part, _box(local))]
