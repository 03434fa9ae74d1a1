"""Loads modules anew whose kernels want other memory than the checkpoint's: quantised, packed, or cast.

Owns the parameters as they were before SGLang processed them, and the way there and back. Owns no choice of modules and
no tensor of a version. SGLang's own reload takes only what some of its methods can restore; here the loaded parameters
are put back for the time of a load, as at a start, and what the kernels had in hand keeps its memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

__all__ = ["originals", "reload", "remember"]

_Kept = dict[str, tuple[torch.Tensor, "weakref.ref[torch.Tensor]"]]
_loaded: weakref.WeakKeyDictionary[torch.nn.Module, _Kept] = weakref.WeakKeyDictionary()


def remember(model: torch.nn.Module) -> None:
    """Keeps what each parameter looks like, without data, before SGLang processes it; the first time only."""
    for module in model.modules():
        if module not in _loaded:
            own = module._parameters.items()
            _loaded[module] = {name: (_meta(item), weakref.ref(item)) for name, item in own if item is not None}


def _meta(parameter: torch.Tensor) -> torch.Tensor:
    """On meta; class and attributes are where loaders are kept."""
    meta = parameter.data.to("meta", copy=True)
    meta.__class__, meta.__dict__ = parameter.__class__, dict(parameter.__dict__)
    return meta


def originals(module: torch.nn.Module) -> Mapping[str, torch.Tensor]:
    """On meta, the parameters that the engine has replaced since they were loaded."""
    return {
        name: meta
        for name, (meta, before) in _loaded.get(module, {}).items()
        if before() is not module._parameters.get(name) or _form(meta) != _form(module._parameters[name])
    }


def _form(tensor: torch.Tensor | None) -> object:
    return None if tensor is None else (tensor.shape, tensor.dtype, tensor.stride())


def reload(modules: Iterable[torch.nn.Module], load: Callable[[], object], device: torch.device) -> None:
    """Gives the modules their loaded parameters back, loads, and lets SGLang process them again.

    Tensors of the same form keep the memory that they had before: kernels and captured graphs point there.
    """
    chosen = list(modules)
    with torch.inference_mode(False), torch.no_grad():
        before = [[dict(place) for place in _places(module)] for module in chosen]
        for module in chosen:
            for name, meta in originals(module).items():
                empty = torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype, device=device)
                fresh: Any = torch.nn.Parameter(empty, requires_grad=False)
                fresh.__class__, fresh.__dict__ = meta.__class__, dict(meta.__dict__)
                module._parameters[name] = fresh
        load()
        for module, then in zip(chosen, before, strict=True):
            method: Any = getattr(module, "quant_method", None)
            if hasattr(method, "process_weights_after_loading"):
                method.process_weights_after_loading(module)
            for now, old in zip(_places(module), then, strict=True):
                _keep_memory(now, old)


def _places(module: torch.nn.Module) -> tuple[dict[str, Any], ...]:
    return module._parameters, module._buffers, module.__dict__


def _keep_memory(now: dict[str, Any], old: Mapping[str, Any]) -> None:
    for name, new in list(now.items()):
        had = old.get(name)
        if isinstance(new, torch.Tensor) and isinstance(had, torch.Tensor) and new is not had:
            if _form(new) != _form(had) or new.device != had.device:
                continue
            had.data.copy_(new.data)
            now[name] = had
