"""What verl's actor publishes.

Owns the choice between the two ways to its weights, and the second one: verl's generator of full tensors, each kept by
one rank. Owns no publishing (weight_sync.adapters.trainers.base).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from weight_sync.adapters.trainers.base import SHARD, TrainerHost
from weight_sync.checkpoint import Checkpoint
from weight_sync.config import Config
from weight_sync.contract.facts import computes_in, distribution_version
from weight_sync.errors import ConfigError, TensorError
from weight_sync.layout.learn import learn_named
from weight_sync.ports import Group
from weight_sync.served import HeldTensors
from weight_sync.tensors import TensorSpec

if TYPE_CHECKING:
    import torch

    from weight_sync.served import Source

__all__ = ["VerlHost", "why_not_shards"]

_NEVER = (".base_layer.", "lora_")


def why_not_shards(engine: Any) -> str:
    """Why the training engine's weights cannot be published from where they lie; "" when they can."""
    module = getattr(engine, "module", None)
    if module is None or isinstance(module, list | tuple):
        return f"{type(engine).__name__} has no module of its own"
    if hasattr(getattr(module, "_fsdp_wrapped_module", module), "peft_config"):
        return "LoRA is merged by verl while it gathers"
    if getattr(engine, "_qat_enabled", False):
        return "verl quantises while it gathers"
    if any(type(part).__name__ == "FullyShardedDataParallel" for part in module.modules()):
        return "FSDP1 hides its shards; set actor.strategy=fsdp2"
    return ""


class VerlHost(TrainerHost):
    """One actor rank.

    Attributes:
        engine: verl's training engine; None where it could not be reached.
        weights: the generator that verl handed over for this sync.
    """

    host = "verl"

    def __init__(self, config: Config, group: Group) -> None:
        super().__init__(config, group)
        if config.base is None:
            raise ConfigError("no checkpoint to check names against", field="weight_sync.base",
                              do="set it to the folder of the checkpoint that rollouts boot from")  # fmt: skip
        self._table = {spec.name: spec for spec in Checkpoint(config.base).table}
        self.engine: Any = None
        self.weights: Iterable[tuple[str, torch.Tensor]] = ()

    def execution(self) -> dict[str, Any]:
        """Of verl's training engine, once it is bound."""
        module = getattr(self.engine, "module", None)
        model = None if isinstance(module, list | tuple) else module
        return {
            "model": model, "engine_version": distribution_version("verl"), "data_parallel": self._group.size,
            "compute_dtype": "" if model is None else computes_in(model),
        }  # fmt: skip

    def source(self) -> Source:
        """The FSDP2 module, or this rank's share of the full tensors."""
        reason = "the training engine was not reached" if self.engine is None else why_not_shards(self.engine)
        if not reason:
            self.paths = dict.fromkeys(self._table, SHARD)
            module: Source = self.engine.module
            return module
        return self._gathered(reason)

    def _gathered(self, reason: str) -> HeldTensors:
        """Every rank iterates, since gathering is collective; each keeps every k-th tensor, on the host, as served."""
        kept: dict[str, torch.Tensor] = {}
        tied = _tied(self.engine)
        for index, (name, tensor) in enumerate(self.weights):
            if any(part in name for part in _NEVER):
                raise TensorError("adapter weights are not served weights", field=name,
                                  do="set actor_rollout_ref.model.lora.merge=true")  # fmt: skip
            spec = self._table.get(name)
            if (spec is None and name in tied) or index % self._group.size != self._group.rank:
                continue
            self.paths[name] = f"gathered: {reason}"
            kept[name] = _as_served(tensor, spec)
        return HeldTensors(kept, lambda table: learn_named(kept, table, partial=self._group.size > 1))


def _as_served(tensor: torch.Tensor, spec: TensorSpec | None) -> torch.Tensor:
    """A copy of its own on the host; float tensors in the dtype of the table."""
    import torch

    wanted = tensor.dtype
    if spec is not None and tensor.is_floating_point() and spec.type.torch.is_floating_point:
        wanted = spec.type.torch
    return torch.empty(tensor.shape, dtype=wanted).copy_(tensor.detach())


def _tied(engine: Any) -> set[str]:
    """Names that the model declares to be copies of others; verl yields them, too."""
    module = getattr(engine, "module", None)
    module = getattr(module, "_fsdp_wrapped_module", module)
    declared = getattr(module, "all_tied_weights_keys", None) or getattr(module, "_tied_weights_keys", None) or ()
    return set(declared)
