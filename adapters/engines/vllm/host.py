"""One vLLM worker as the core sees it: its model, its loader, what it packs, and its own layer-wise reload.

Owns what vLLM does to weights after it has loaded them. Owns no version and no bits. Imported inside a worker only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import layerwise

from weight_sync.adapters.engines.worker.hub import local_checkpoint
from weight_sync.adapters.engines.worker.twin import PlainModel
from weight_sync.contract import process_contract
from weight_sync.contract.facts import distribution_version
from weight_sync.errors import EngineError

__all__ = ["VllmHost"]

_NO_WEIGHTS = ("dummy",)  # load formats that read no checkpoint
_PLAIN_EXPERTS = "TRITON"  # in the name of backends whose kernel reads the experts as they were loaded


class VllmHost:
    """Implements ``weight_sync.adapters.engines.worker.rank.Host``."""

    def __init__(self, worker: Any) -> None:
        self._worker, self._plain = worker, PlainModel()
        self._config: Any = worker.vllm_config
        self.rank = int(worker.rank)
        self.world_size = int(self._config.parallel_config.world_size)
        if self._config.parallel_config.data_parallel_size > 1:
            raise EngineError("data-parallel replicas behind one vLLM server", field="data_parallel_size",
                              found=self._config.parallel_config.data_parallel_size, expected=1,
                              do="start one server per replica, each with a sidecar of its own")  # fmt: skip

    def model(self) -> torch.nn.Module:
        """The model that serves, without the layers that ``--enable-lora`` put around its own."""
        return self._plain.of(self._worker.model_runner.get_model())

    def load(self, model: torch.nn.Module, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """By the model's own ``load_weights``."""
        loader: Any = model
        with set_current_vllm_config(self._config):
            loader.load_weights(tensors)

    def originals(self, module: torch.nn.Module) -> Mapping[str, torch.Tensor]:
        """What vLLM remembers of a module for its reload: parameters on meta, with their loaders."""
        info = layerwise.LAYERWISE_INFO.get(module)
        if info is None:
            return {}
        from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

        out = {}
        for name, remembered in info.restore_metadata[0].items():
            meta = remembered.data.to("meta", copy=True)
            meta.__class__, meta.__dict__ = remembered.__class__, dict(remembered.__dict__)
            now = module._parameters.get(name)
            if now is None or (now.shape, now.dtype) != (meta.shape, meta.dtype) or not _has_loader(now, remembered):
                out[name] = restore_layer_refs(meta, module)
        return out

    def packed(self, module: torch.nn.Module) -> str:
        """Why the module computes with something else than its parameters; "" when it does not."""
        linear = getattr(module, "cpu_linear", None)
        if linear is not None and linear is not torch.nn.functional.linear:
            return "its CPU kernel holds a packed copy"
        if id(module) in self._absorbed():
            return "attention holds matrices derived from it"
        method: Any = getattr(module, "quant_method", None)
        if not isinstance(method, QuantizeMethodBase):
            return ""
        if not type(method).__name__.startswith("Unquantized"):
            return f"it is quantised ({type(method).__name__})"
        if getattr(method, "cpu_fused_moe", None) is not None:
            return "its experts are laid out for a CPU kernel"
        if getattr(method, "moe_kernel", None) is not None:
            backend = getattr(method, "unquantized_backend", None)
            if _PLAIN_EXPERTS not in str(getattr(backend, "name", backend)).upper():
                return f"its experts are laid out for the kernel ({getattr(backend, 'name', backend)})"
        return ""

    def _absorbed(self) -> set[int]:
        """Projections that latent attention has multiplied into matrices of its own."""
        return {
            id(inner)
            for module in self.model().modules()
            if (inner := getattr(module, "kv_b_proj", None)) is not None
            and any(k.startswith("W_U") for k in vars(module))
        }

    def reload(self, modules: Iterable[torch.nn.Module], tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """vLLM's layer-wise reload of these modules; their kernels' memory stays where it is."""
        chosen = list(modules)
        model = self.model()
        shared = {id(p) for module in chosen for p in module.parameters(recurse=False)}
        tied = [
            m for m in model.modules() if m not in chosen and any(id(p) in shared for p in m.parameters(recurse=False))
        ]
        absorbing = [m for m in model.modules() if getattr(m, "kv_b_proj", None) in chosen]
        for module in chosen:
            method: Any = getattr(module, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None  # else vLLM takes the reload for a copy into its kernel and does not pack
        part = _Part([*chosen, *absorbing])
        with set_current_vllm_config(self._config), torch.no_grad():
            layerwise.initialize_layerwise_reload(part)
            for module in chosen:
                if _is_quantised_on_cpu(module):
                    layerwise.LAYERWISE_INFO[module].kernel_tensors = None  # what is loaded stays where it is
            try:
                self.load(model, tensors)
            finally:
                layerwise.finalize_layerwise_reload(part, self._config.model_config)
            for module in tied:  # the tensor is loaded; what such a module made of it is not
                method = getattr(module, "quant_method", None)
                if isinstance(method, QuantizeMethodBase):
                    method.process_weights_after_loading(module)

    def checkpoint(self) -> Path | None:
        """The folder that vLLM loaded; None when it loaded none."""
        if str(self._config.load_config.load_format) in _NO_WEIGHTS:
            return None
        return local_checkpoint(self._config.model_config.model, self._config.model_config.revision)

    def facts(self) -> dict[str, str]:
        """How this process computes, by the names of the contract's fields; what is not in force is not claimed.

        Batch invariance is a switch that only GPUs heed; while it is in force, equal requests get equal bits.
        """
        import vllm
        from vllm import envs
        from vllm.platforms import current_platform

        model, parallel = self._config.model_config, self._config.parallel_config
        invariant = bool(getattr(envs, "VLLM_BATCH_INVARIANT", False)) and not current_platform.is_cpu()
        process = process_contract()
        backends = {
            str(getattr(name, "__name__", name))
            for module in self.model().modules()
            if (name := getattr(module, "attn_backend", None)) is not None
        }
        return {
            "engine_version": str(getattr(vllm, "__version__", "")),
            **{f"kernel_versions.{name}": text for name, text in process.kernel_versions.items()},
            **{f"kernel_versions.{name}": distribution_version(name) for name in ("flashinfer-python", "triton")},
            "torch": str(torch.__version__),
            "dtype": str(model.dtype).removeprefix("torch."),
            "served_format": str(model.quantization or ""),
            "model_revision": str(model.revision or ""),
            "batch_invariant": str(invariant).lower(),
            "deterministic": str(invariant or process.deterministic).lower(),
            "data_parallel": str(parallel.data_parallel_size),
            "sampling.logprobs_mode": str(getattr(model, "logprobs_mode", "")),
            **{f"sampling.{name}": str(value) for name, value in model.get_diff_sampling_param().items()},
            "router_replay": _routed(self._config),
            "tensor_parallel": str(parallel.tensor_parallel_size),
            "pipeline_parallel": str(parallel.pipeline_parallel_size),
            "expert_parallel": str(parallel.tensor_parallel_size if parallel.enable_expert_parallel else 1),
            "attention_backend": ",".join(sorted(backends)),
        }


def _is_quantised_on_cpu(module: torch.nn.Module) -> bool:
    """oneDNN's handle keeps the address of the scales that it was made with. vLLM's reload copies those back into the old
    ones and frees them, and answers become NaN; nothing on a CPU needs the old addresses.
    """
    from vllm.platforms import current_platform

    method: Any = getattr(module, "quant_method", None)
    quantised = isinstance(method, QuantizeMethodBase) and not type(method).__name__.startswith("Unquantized")
    return quantised and bool(current_platform.is_cpu())


def _has_loader(now: torch.Tensor, remembered: torch.Tensor) -> bool:
    """Quantised layers replace parameters by plain ones of the same shape once they are loaded."""
    return hasattr(now, "weight_loader") or not hasattr(remembered, "weight_loader")


def _routed(config: Any) -> str:
    """Whether answers carry which experts each token went to; "" where vLLM has no such thing."""
    parts: list[Any] = [getattr(config, name, None) for name in ("aux_output_config", "model_config")]
    found = [part.enable_return_routed_experts for part in parts if hasattr(part, "enable_return_routed_experts")]
    return str(any(found)).lower() if found else ""


class _Part:
    """Some modules of a model, for functions of vLLM that walk over all of them."""

    def __init__(self, modules: list[torch.nn.Module]) -> None:
        self._modules = modules

    def modules(self) -> Iterator[torch.nn.Module]:
        """The chosen ones."""
        return iter(self._modules)
