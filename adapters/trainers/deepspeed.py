"""What a DeepSpeed rank holds of a Hugging Face model, for hosts that train with it.

Owns the shard map of ZeRO partitions, and gathering what cannot be published from where it lies. Owns no names (the
library's own reverse conversion gives them, weight_sync.layout.learn decides), no LoRA arithmetic (lora.py) and no host.

ZeRO-3 keeps of each parameter a flat part per rank, in ``ds_tensor``; ZeRO-1 and -2 keep parameters whole on all ranks,
one of which publishes each. Nothing here looks at values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from weight_sync.adapters.trainers.base import SHARD
from weight_sync.adapters.trainers.lora import (
    Adapted,
    adapted,
    adapter_tensors,
    is_adapter,
    merged,
    without_adapter,
)
from weight_sync.errors import LayoutError
from weight_sync.layout.box import Box
from weight_sync.layout.learn import aliases, name_map
from weight_sync.layout.placement import Layout, Placement, StorageSpec, compose
from weight_sync.layout.storage import in_memory, shard_map
from weight_sync.layout.trace import spec_of
from weight_sync.ports import Group
from weight_sync.served import HeldTensors
from weight_sync.tensors import TensorSpec

__all__ = ["gather_adapter", "hold", "why_gathered"]

_SPLIT = "DeepSpeed's tensor parallelism splits layers"
_MERGED = "LoRA is merged into it"


@dataclass(frozen=True)
class _Part:
    """What this rank publishes of one in-memory tensor.

    Attributes:
        whole: shape and dtype of all of it, on meta.
        tensor: None when other ranks publish it.
        start: flat index at which ``tensor``, then 1-d, begins; None when it is all of it.
    """

    whole: torch.Tensor
    tensor: torch.Tensor | None
    start: int | None = None


def why_gathered(tensor: Any, adapter: Adapted | None, tensor_parallel: bool) -> str:
    """Why a tensor cannot be published from where it lies; "" when it can."""
    if adapter is not None:
        return _MERGED
    if tensor_parallel:
        return _SPLIT
    part = getattr(tensor, "ds_tensor", None)
    if part is None:
        return ""
    if getattr(getattr(part, "status", None), "name", "AVAILABLE") != "AVAILABLE":
        return "its partition is swapped out"
    if hasattr(part, "ds_quant_scale"):
        return "its partition is quantised"
    return ""


def hold(model: torch.nn.Module, group: Group, paths: dict[str, str], tensor_parallel: bool = False) -> HeldTensors:
    """This rank's part of a model's weights as they are now.

    Args:
        model: as DeepSpeed trains it, plain or wrapped by peft; adapters are merged into what they adapt.
        paths: gets, when the layout is learnt, how this rank came by each served tensor.
        tensor_parallel: whether DeepSpeed has split layers over ranks.

    A collective call when anything has to be gathered. What is gathered is kept by one rank, on the host.
    """
    inner, adapters = adapted(model)
    named = without_adapter(in_memory(inner), adapters)
    for name in getattr(inner, "_keys_to_ignore_on_save", None) or ():
        named.pop(name, None)
    parts: dict[str, _Part] = {}
    reasons: dict[str, str] = {}
    for index, (name, tensor) in enumerate(named.items()):
        adapter = adapters.get(name)
        reason = why_gathered(tensor, adapter, tensor_parallel)
        if reason:
            reasons[name] = f"gathered: {reason}"
            parts[name] = _gathered(tensor, adapter, inner, tensor_parallel, index % group.size == group.rank)
        else:
            parts[name] = _own(tensor)
    same = aliases({name: getattr(tensor, "ds_tensor", tensor) for name, tensor in named.items()},
                   getattr(inner, "all_tied_weights_keys", None) or {})  # fmt: skip

    def learn(table: Sequence[TensorSpec]) -> Layout:
        names = name_map(inner, {name: part.whole for name, part in parts.items()}, table, same)
        paths.clear()
        paths.update(dict.fromkeys((spec.name for spec in table), SHARD))
        paths.update({item.tensor: reasons[item.storage] for item in names.placements if item.storage in reasons})
        return compose(_shards(parts), names)

    return HeldTensors({name: part.tensor for name, part in parts.items() if part.tensor is not None}, learn)


def _own(tensor: Any) -> _Part:
    """Of a tensor that is published from where it lies."""
    part = getattr(tensor, "ds_tensor", None)
    if part is None:
        return _Part(_meta(tensor.shape, tensor.dtype), tensor)
    import torch.distributed as dist

    whole = _meta(tensor.ds_shape, part.dtype)
    start = dist.get_rank(tensor.ds_process_group) * part.ds_numel
    count = min(part.ds_numel, whole.numel() - start)
    return _Part(whole, part.detach().view(-1)[:count] if count > 0 else None, start)


def _gathered(tensor: Any, adapter: Adapted | None, model: torch.nn.Module, tensor_parallel: bool, keep: bool) -> _Part:
    params = [tensor] if adapter is None else adapter.parameters()
    with _whole(params, model, tensor_parallel):
        whole = _meta(tensor.shape, tensor.dtype)
        if not keep:
            return _Part(whole, None)
        values = tensor.detach() if adapter is None else merged(adapter)
        return _Part(whole, torch.empty(values.shape, dtype=values.dtype).copy_(values))


@contextmanager
def _whole(params: Sequence[Any], model: torch.nn.Module, tensor_parallel: bool) -> Iterator[None]:
    """Parameters are whole on every rank meanwhile, by DeepSpeed's own collectives."""
    if tensor_parallel:
        from deepspeed.module_inject.layers import GatherReplacedLayerParams

        with GatherReplacedLayerParams(list(params), model, enabled=True):
            yield
    elif any(hasattr(param, "ds_tensor") for param in params):
        import deepspeed

        with ExitStack() as whole:
            # one call each: DeepSpeed waits for the last gather of a call only, which on gloo says nothing of the others
            for param in params:
                whole.enter_context(deepspeed.zero.GatheredParameters([param]))
            yield
    else:
        yield


def _shards(parts: Mapping[str, _Part]) -> Layout:
    """In-memory tensors, and which elements of them this rank's storages hold."""
    whole = {name: part.tensor for name, part in parts.items() if part.tensor is not None and part.start is None}
    plain = shard_map(whole)
    placements, storages = list(plain.placements), dict(plain.storages)
    specs = [spec_of(name, part.whole) for name, part in parts.items()]
    for spec in specs:
        part = parts[spec.name]
        if part.tensor is None or part.start is None:
            continue
        count = part.tensor.numel()
        if part.start + count > spec.elements:
            raise LayoutError("a ZeRO partition leaves its parameter", field=spec.name, found=part.start + count,
                              expected=f"at most {spec.elements}", do="use a supported version of DeepSpeed")  # fmt: skip
        placements.append(Placement(spec.name, Box.run(part.start, count), spec.name, Box.run(0, count)))
        storages[spec.name] = StorageSpec(count, spec.dtype)
    return Layout(tuple(specs), tuple(placements), storages)


def _meta(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def gather_adapter(model: torch.nn.Module, paths: dict[str, str]) -> dict[str, torch.Tensor]:
    """The adapter of a model that peft has wrapped, whole on every rank and on the host, by peft's own names.

    Adapters are small: nothing is gained by leaving them split. ``paths`` gets how each came. A collective call.
    """
    params = {name: param for name, param in in_memory(model).items() if is_adapter(name)}
    with _whole(list(params.values()), model, False):
        state = {name: param.detach().to("cpu", copy=True) for name, param in params.items()}
    split = any(hasattr(param, "ds_tensor") for param in params.values())
    found = adapter_tensors(model, state)
    paths.clear()
    paths.update(dict.fromkeys(found, "gathered: adapters are small" if split else SHARD))
    return found
