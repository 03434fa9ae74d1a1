"""One SGLang scheduler as the core sees it: its model, its loader, what it packs, and how that is loaded anew.

Owns what SGLang does to weights after it has loaded them. Owns no version and no bits. Used inside a scheduler only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from weight_sync.adapters.engines.sglang import reload
from weight_sync.adapters.engines.worker.hub import local_checkpoint
from weight_sync.adapters.engines.worker.twin import PlainModel
from weight_sync.errors import EngineError

__all__ = ["SglangHost"]

_NO_WEIGHTS = ("dummy",)  # load formats that read no checkpoint
_PARAMETERS = "_cached_params_dict"  # in which some models keep their parameters for their next load


class SglangHost:
    """Implements ``weight_sync.adapters.engines.worker.rank.Host``."""

    def __init__(self, scheduler: Any) -> None:
        from sglang.srt.runtime_context import get_parallel

        self._plain = PlainModel()
        self._runner: Any = scheduler.tp_worker.model_runner
        self._parallel: Any = get_parallel()
        self.rank = int(self._parallel.tp_size * self._parallel.pp_rank + self._parallel.tp_rank)
        self.world_size = int(self._parallel.tp_size * self._parallel.pp_size)

    def model(self) -> torch.nn.Module:
        """The model that serves, without the layers that ``--enable-lora`` put around its own; no draft model beside it."""
        plain = self._plain.of(self._runner.model)
        if plain is not self._runner.model:
            plain.__dict__.pop(_PARAMETERS, None)  # under the names that they have inside of LoRA's layers
        return plain

    def settle(self) -> None:
        """Waits for the device, before weights are written and after."""
        if torch.device(self._runner.device).type != "cpu":
            torch.get_device_module(self._runner.device).synchronize()

    def load(self, model: torch.nn.Module, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """By the model's own ``load_weights``."""
        if model is not self.model():
            self._refuse_derived()
            model.__dict__.pop(_PARAMETERS, None)  # those of the model that serves
            model.__dict__["post_load_weights"] = _nothing  # what is computed from values; a reload does it
        loader: Any = type(model)  # an attribute of the model itself would be bound to the one that serves
        loader.load_weights(model, tensors)

    def _refuse_derived(self) -> None:
        """Raises EngineError where SGLang itself takes no new weights, since it could not make up for what it keeps."""
        from sglang.srt.model_executor.model_runner_components import weight_updater
        from sglang.srt.runtime_context import get_model

        tell = getattr(weight_updater, "_unsupported_derived_weight_cache_error", None)
        if tell is not None and (reason := tell(self.model())) is not None:
            raise EngineError("SGLang keeps copies of weights that it does not renew", field="model", found=reason,
                              do="start the server without that option")  # fmt: skip
        if (mode := getattr(get_model(), "weight_cache_mode", "off")) != "off":
            raise EngineError("other servers share this one's weights", field="weight_cache_mode", found=mode,
                              expected="off", do="start the server without the weight cache")  # fmt: skip

    def originals(self, module: torch.nn.Module) -> Mapping[str, torch.Tensor]:
        """As they were before SGLang processed them."""
        return reload.originals(module)

    def packed(self, module: torch.nn.Module) -> str:
        """Why the module computes with something else than its parameters; "" when it does not."""
        if getattr(module, "use_intel_amx_backend", False):
            return "its CPU kernel holds a packed copy"
        if id(module) in self._absorbed():
            return "attention holds matrices derived from it"
        method = getattr(module, "quant_method", None)
        if hasattr(method, "process_weights_after_loading") and not type(method).__name__.startswith("Unquantized"):
            return f"it is quantised ({type(method).__name__})"
        return ""

    def _absorbed(self) -> set[int]:
        """Projections that latent attention has multiplied into matrices of its own."""
        return {
            id(inner)
            for module in self.model().modules()
            if (inner := getattr(module, "kv_b_proj", None)) is not None and getattr(module, "w_kc", None) is not None
        }

    def reload(self, modules: Iterable[torch.nn.Module], tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """These modules as after a start; their kernels' memory stays where it is."""
        reload.reload(modules, lambda: self.load(self.model(), tensors), torch.device(self._runner.device))

    def checkpoint(self) -> Path | None:
        """The folder that SGLang loaded; None when it loaded none."""
        config = self._runner.model_config
        if str(self._runner.load_config.load_format).rpartition(".")[2].lower() in _NO_WEIGHTS:
            return None
        return local_checkpoint(config.model_path, config.revision)

    def facts(self) -> dict[str, str]:
        """Version, dtype, parallel sizes, attention backend."""
        import sglang

        switch = getattr(self._runner.server_args, "enable_deterministic_inference", None)
        deterministic = "" if switch is None else str(bool(switch)).lower()  # its kernels for that are batch-invariant
        return {
            "engine_version": str(sglang.__version__),
            "torch": str(torch.__version__),
            "dtype": str(self._runner.model_config.dtype).removeprefix("torch."),
            "tensor_parallel": str(self._parallel.tp_size),
            "pipeline_parallel": str(self._parallel.pp_size),
            "expert_parallel": str(self._parallel.moe_ep_size),
            "attention_backend": type(self._runner.attn_backend).__name__,
            "batch_invariant": deterministic,
            "deterministic": deterministic,
        }


def _nothing(*args: object, **kwargs: object) -> None:
    """Instead of a step that a twin without data cannot take."""
