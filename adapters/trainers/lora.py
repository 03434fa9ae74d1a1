"""Models that peft has wrapped: which tensors are adapters, what they adapt, the sum of both, and the adapter alone.

Owns peft's names and its merge. Owns no gathering: whoever calls has made the parameters whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from weight_sync.adapting import AdapterSource
from weight_sync.errors import TensorError
from weight_sync.layout.storage import in_memory

__all__ = [
    "Adapted", "adapted", "adapter_config", "adapter_source", "adapter_tensors", "is_adapter", "merged", "without_adapter",
]  # fmt: skip

_BASE = ".base_layer."
_ADAPTERS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")


@dataclass(frozen=True)
class Adapted:
    """A layer of peft's: the layer it stands for, and adapters to it."""

    name: str
    layer: Any

    def parameters(self) -> list[Any]:
        """Everything that `merged` reads."""
        return list(self.layer.parameters())


def adapted(model: torch.nn.Module) -> tuple[torch.nn.Module, dict[str, Adapted]]:
    """The model inside of peft's wrapper, and what is adapted of it, by the name that its weight had before.

    A model that is not wrapped comes back as it is, with nothing adapted.
    """
    wrapped: Any = model
    if not hasattr(wrapped, "peft_config"):
        return model, {}
    inner: torch.nn.Module = wrapped.get_base_model()
    return inner, {
        f"{name}.weight": Adapted(name, module)
        for name, module in inner.named_modules()
        if hasattr(module, "base_layer") and hasattr(module, "get_delta_weight")
    }


def is_adapter(name: str) -> bool:
    """Whether an in-memory name is that of an adapter's weight."""
    return any(part in _ADAPTERS for part in name.split("."))


def without_adapter(named: Mapping[str, torch.Tensor], adapters: Mapping[str, Adapted]) -> dict[str, torch.Tensor]:
    """In-memory tensors under the names that they had before peft; adapters are left out.

    Raises TensorError for weights that peft trains in another way than by adapters to a layer's weight.
    """
    out: dict[str, torch.Tensor] = {}
    for name, tensor in named.items():
        parts = name.split(".")
        if adapters and is_adapter(name):
            continue
        if adapters and ("modules_to_save" in parts or "original_module" in parts):
            raise TensorError("peft trains a copy of this module", field=name, found="modules_to_save",
                              expected="adapters to layers only", do="leave modules_to_save out")  # fmt: skip
        plain = name.replace(_BASE, ".") if adapters else name
        if plain != name and plain.endswith(".weight") and plain not in adapters:
            raise TensorError("peft adapts this weight in an unknown way", field=name, do="use LoRA")
        out[plain] = tensor
    return out


def merged(adapter: Adapted) -> torch.Tensor:
    """What the layer computes with: its weight and the active adapters to it, as peft itself merges them."""
    layer = adapter.layer
    total: torch.Tensor = layer.get_base_layer().weight.detach()
    for name in layer.active_adapters:
        if getattr(layer, "use_dora", {}).get(name):
            raise TensorError("DoRA cannot be merged here", field=adapter.name, do="train plain LoRA")
        if name in layer.lora_A or name in getattr(layer, "lora_embedding_A", {}):
            total = (total + layer.get_delta_weight(name).detach()).to(total.dtype)  # rounded once, as peft does
    return total


def adapter_tensors(model: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The adapter as peft saves it: ``state`` has the wrapped model's adapter parameters, whole, by their names there."""
    from peft import get_peft_model_state_dict

    found: dict[str, torch.Tensor] = get_peft_model_state_dict(model, state_dict=dict(state))
    return found


def adapter_config(model: torch.nn.Module) -> str:
    """``adapter_config.json`` of the active adapter, as peft's ``save_pretrained`` writes it."""
    wrapped: Any = model
    found = {**wrapped.peft_config[wrapped.active_adapter].to_dict(), "inference_mode": True}
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in found.items()}
    return json.dumps(plain, default=str, indent=2, sort_keys=True)


def adapter_source(model: torch.nn.Module) -> AdapterSource:
    """The active adapter of a model that peft has wrapped, from where its parameters lie (sharded ones, too)."""
    state = {name: tensor for name, tensor in in_memory(model).items() if is_adapter(name)}
    return AdapterSource(adapter_tensors(model, state), adapter_config(model))
