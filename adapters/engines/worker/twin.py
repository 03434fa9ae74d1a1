"""The layout of one rank of an engine, learnt by the engine's own loader.

Owns the twin (the model's tree with tensors that hold no data) and what its loader does to it: which element of the
checkpoint lands where in which parameter. Owns no weight: the model that serves is never touched, so learning may go on
while it serves. Fused, sliced, padded and per-expert parameters need no table: the loader knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from weight_sync.dtypes import dtype_of, dtype_of_torch
from weight_sync.errors import UntraceableError, WeightSyncError
from weight_sync.layout.box import Box
from weight_sync.layout.placement import Layout, Placement, StorageSpec, merge
from weight_sync.layout.trace import Piece, Tracer
from weight_sync.tensors import TensorSpec

__all__ = [
    "Load",
    "Originals",
    "PlainModel",
    "learn_loader",
    "meta_twin",
    "named_tensors",
    "same_shape",
    "without_lora",
]

Load = Callable[[torch.nn.Module, Iterator[tuple[str, torch.Tensor]]], object]
"""Feeds checkpoint tensors to a model's own loader."""

Originals = Callable[[torch.nn.Module], Mapping[str, torch.Tensor]]
"""The parameters of one module as they were when it was loaded, on meta, where the engine has changed them since."""


def meta_twin(model: torch.nn.Module, originals: Originals) -> torch.nn.Module:
    """A copy of the model's tree whose parameters and buffers are on meta; everything else is shared.

    Parameters keep class and attributes, which is where engines keep their loaders. Tied ones stay tied.
    """
    modules: dict[int, torch.nn.Module] = {}
    tensors: dict[int, torch.Tensor] = {}

    def twin_of(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in tensors:
            meta = tensor.data.to("meta") if not tensor.is_meta else tensor
            meta.__class__ = tensor.__class__
            meta.__dict__ = dict(tensor.__dict__)
            tensors[id(tensor)] = meta
        return tensors[id(tensor)]

    def copy(module: torch.nn.Module) -> torch.nn.Module:
        if id(module) in modules:
            return modules[id(module)]
        new = modules[id(module)] = object.__new__(type(module))
        new.__dict__ = dict(module.__dict__)
        held = {**module._parameters, **originals(module)}
        new._parameters = {k: None if v is None else twin_of(v) for k, v in held.items()}  # type: ignore[misc]
        new._buffers = {k: None if v is None else twin_of(v) for k, v in module._buffers.items()}
        new._modules = {k: None if v is None else copy(v) for k, v in module._modules.items()}
        return new

    return copy(model)


def without_lora(model: torch.nn.Module) -> torch.nn.Module:
    """The model's tree with each layer that adapts another one replaced by that one, which holds the base's weights.

    Only containers on the way are copied, and share their attributes with the model: parameters are the model's own.
    """
    seen: dict[int, torch.nn.Module] = {}

    def plain(module: torch.nn.Module) -> torch.nn.Module:
        if id(module) in seen:
            return seen[id(module)]
        inner = getattr(module, "base_layer", None)
        if isinstance(inner, torch.nn.Module) and type(module).__name__.endswith("WithLoRA"):
            seen[id(module)] = found = plain(inner)
            return found
        children = {name: None if child is None else plain(child) for name, child in module._modules.items()}
        found = module
        if any(children[name] is not child for name, child in module._modules.items()):
            found = object.__new__(type(module))
            found.__dict__ = {**module.__dict__, "_modules": children}
        seen[id(module)] = found
        return found

    return plain(model)


class PlainModel:
    """`without_lora` of one model, the same object as long as the model's tree is the same."""

    def __init__(self) -> None:
        self._seen: list[torch.nn.Module] = []
        self._found: torch.nn.Module | None = None

    def of(self, model: torch.nn.Module) -> torch.nn.Module:
        """Of the model as it is now."""
        seen = list(model.modules())
        if self._found is None or list(map(id, seen)) != list(map(id, self._seen)):
            self._seen, self._found = seen, without_lora(model)
        return self._found


def named_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name, tied ones once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def learn_loader(load: Load, twin: torch.nn.Module, table: Sequence[TensorSpec]) -> Layout:
    """What this rank's loader makes of a checkpoint with this table.

    The storages are the flat storages of the twin's parameters and buffers, by name. Tensors of the table that the
    loader skips have no placement. Casts that the loader makes are in the placements. Raises UntraceableError when the
    loader looks at values, does arithmetic, or does not take the table.
    """
    tracer = Tracer()

    def feed() -> Iterator[tuple[str, torch.Tensor]]:
        for spec in table:
            yield spec.name, tracer.source(spec.name, spec.shape, dtype_of(spec.dtype).torch)

    try:
        with tracer, torch.no_grad():
            load(twin, feed())
    except WeightSyncError:
        raise
    except Exception as error:  # whatever a loader raises on tensors that it does not know
        raise UntraceableError("the engine's loader does not take the checkpoint's tensors",
                               field=type(error).__name__, found=str(error)[:2000],
                               do="start the engine from the run's base checkpoint") from error  # fmt: skip
    specs = {spec.name: spec for spec in table}
    placements: list[Placement] = []
    storages: dict[str, StorageSpec] = {}
    for key, tensor in named_tensors(twin).items():
        box = Box(0, tuple(tensor.shape), tuple(tensor.stride()))
        if not box.count:
            continue
        pieces = tracer.read(tensor, box)
        if pieces:
            storages[key] = StorageSpec(box.last + 1, dtype_of_torch(tensor.dtype).name)
            placements += [_placement(key, specs[piece.source], piece) for piece in pieces]
    return merge(tuple(table), placements, storages)


def _placement(key: str, spec: TensorSpec, piece: Piece) -> Placement:
    """A piece goes from the checkpoint to the parameter; a placement tells the way back."""
    return Placement(piece.source, piece.place, key, piece.at, (spec.dtype,) if piece.casts else ())


def same_shape(twin: torch.Tensor, real: torch.Tensor | None) -> bool:
    """Whether what was loaded into ``twin`` can lie in ``real`` element by element."""
    return (
        real is not None
        and not real.is_meta
        and (tuple(real.shape), real.dtype, tuple(real.stride()))
        == (tuple(twin.shape), twin.dtype, tuple(twin.stride()))
    )
