"""Keeps the weights of vLLM's CPU linears unpacked, so that versions are written into them in place.

Owns the choice, ``--additional-config '{"weight_sync": {"in_place": true}}'``, and the one function of vLLM that it
replaces. Without it, vLLM packs them for its own kernels: then versions are reloaded from host copies, which takes
longer inside the fence. Unpacked weights cost some speed of the forward pass.
"""

from __future__ import annotations

from typing import Any

__all__ = ["install"]


def _chosen() -> bool:
    from vllm import config

    current = getattr(config, "get_current_vllm_config_or_none", config.get_current_vllm_config)()
    options = getattr(current, "additional_config", None)
    block = options.get("weight_sync") if isinstance(options, dict) else None
    return isinstance(block, dict) and block.get("in_place") is True


def install() -> None:
    """Replaces `dispatch_cpu_unquantized_gemm`, which linears and embeddings look up when they are loaded."""
    import torch
    from vllm.model_executor.layers import utils

    original = utils.dispatch_cpu_unquantized_gemm
    if hasattr(original, "weight_sync"):
        return

    def dispatch(layer: Any, remove_weight: bool) -> None:
        # verl processes weights again after each load, where vLLM has no configuration: what was left alone stays so
        if getattr(layer, "cpu_linear", None) is torch.nn.functional.linear or _chosen():
            layer.cpu_linear = torch.nn.functional.linear
        else:
            original(layer, remove_weight)

    dispatch.weight_sync = True  # type: ignore[attr-defined]
    utils.dispatch_cpu_unquantized_gemm = dispatch
