"""What this process computes with, as far as torch tells: libraries, the processor, switches in force.

Owns the reading. Owns nothing of a model and nothing of a host or an engine: adapters add what they know.
"""

from __future__ import annotations

from importlib import metadata
from typing import Any

from weight_sync.proto.v1 import contract_pb2

__all__ = ["computes_in", "distribution_version", "model_facts", "process_contract"]


def process_contract(model: Any = None, **known: Any) -> contract_pb2.ExecutionContract:
    """A contract of this process, without an id.

    Args:
        model: a torch module (of transformers), asked for its dtype and its attention.
        known: fields that the caller knows, over what is found here; ``kernel_versions`` are added to those found.
    """
    import torch

    kernels = {"torch": str(torch.__version__), "cpu": _processor()}
    if torch.cuda.is_available():
        kernels |= {"cuda": str(torch.version.cuda), "gpu": torch.cuda.get_device_name()}
    fields: dict[str, Any] = {"deterministic": torch.are_deterministic_algorithms_enabled()}
    if model is not None:
        fields |= model_facts(model)
    kernels |= {name: version for name, version in known.pop("kernel_versions", {}).items() if version}
    return contract_pb2.ExecutionContract(**{**fields, **known, "kernel_versions": kernels})


def model_facts(model: Any) -> dict[str, Any]:
    """``compute_dtype``, ``attention_backend`` and ``model_revision``, as far as the module tells them."""
    config = getattr(model, "config", None)
    out = {
        "compute_dtype": computes_in(model),
        "attention_backend": getattr(config, "_attn_implementation", None),
        "model_revision": getattr(config, "_commit_hash", None),
    }
    return {name: str(value) for name, value in out.items() if value}


def computes_in(module: Any) -> str:
    """The dtype that a module's products are computed in: FSDP2's ``param_dtype`` where it casts, else its parameters';
    "" for a module without any.
    """
    state = getattr(module, "_get_fsdp_state", None)
    group = getattr(state(), "_fsdp_param_group", None) if callable(state) else None
    cast = getattr(getattr(group, "mp_policy", None), "param_dtype", None)
    parameter = next(iter(module.parameters()), None)
    dtype = cast if cast is not None else None if parameter is None else parameter.dtype
    return "" if dtype is None else str(dtype).removeprefix("torch.")


def distribution_version(name: str) -> str:
    """Of an installed distribution; "" when it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _processor() -> str:
    """What torch and oneDNN choose their CPU kernels by."""
    import torch

    asked: Any = torch.cpu
    extra = [
        word
        for word in ("avx512_bf16", "amx_tile")
        if callable(ask := getattr(asked, f"_is_{word}_supported", None)) and ask()
    ]
    return "+".join([torch.backends.cpu.get_cpu_capability(), *extra])
