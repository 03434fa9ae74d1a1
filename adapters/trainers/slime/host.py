"""What one training rank of slime publishes.

Owns where the weights are at a sync: in the model, or, when slime has moved the trainer off the GPU, in its own backup.
Owns no layout (megatron.py) and no publishing (weight_sync.adapters.trainers.base).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from weight_sync.adapters.trainers.base import SHARD, TrainerHost
from weight_sync.adapters.trainers.slime.megatron import GATHERED, Conversion, split_paths
from weight_sync.checkpoint import Checkpoint
from weight_sync.config import Config
from weight_sync.contract.facts import distribution_version
from weight_sync.errors import ConfigError, InputError, UntraceableError
from weight_sync.layout.placement import Layout
from weight_sync.ports import Group
from weight_sync.served import HeldTensors
from weight_sync.tensors import TensorSpec

if TYPE_CHECKING:
    import torch

__all__ = ["SlimeHost"]

_SIZES = {
    "tensor_parallel": "tensor_model_parallel_size", "pipeline_parallel": "pipeline_model_parallel_size",
    "expert_parallel": "expert_model_parallel_size", "data_parallel": "data_parallel_size",
}  # fmt: skip


class SlimeHost(TrainerHost):
    """One rank.

    Args:
        conversion: slime's way to checkpoint tensors.
        backup: slime's copy of the weights on the host, by its names; None when the model holds them at every sync.
    """

    host = "slime"

    def __init__(
        self, config: Config, group: Group, conversion: Conversion,
        backup: Callable[[], Mapping[str, torch.Tensor]] | None = None,
    ) -> None:  # fmt: skip
        if conversion.quantization is not None and config.scheme is None and not config.views:
            config = config.replace(scheme="cast")  # slime quantises itself: what it makes goes out as it is
        super().__init__(config, group)
        if config.base is None:
            raise ConfigError("no checkpoint to check names against", field="weight_sync.base",
                              do="set it to the folder of the checkpoint that engines boot from")  # fmt: skip
        self._table = Checkpoint(config.base).table
        self._conversion, self._backup = conversion, backup
        self._learnt: tuple[object, Layout, set[str], bool] | None = None

    def execution(self) -> dict[str, Any]:
        """Of Megatron, by slime's arguments, which are what it was built with."""
        args = self._conversion.args
        sizes = {field: getattr(args, name, None) for field, name in _SIZES.items()}
        libraries = {name: distribution_version(name) for name in ("megatron-core", "transformer-engine")}
        attention = getattr(args, "attention_backend", None)
        return {
            **sizes, "engine_version": distribution_version("slime"),
            "compute_dtype": str(getattr(args, "params_dtype", "") or "").removeprefix("torch."),
            "attention_backend": str(getattr(attention, "name", attention or "")),
            "deterministic": getattr(args, "deterministic_mode", None),
            "router_replay": getattr(args, "use_rollout_routing_replay", None),
            "kernel_versions": {name: version for name, version in libraries.items() if version},
        }  # fmt: skip

    def source(self) -> HeldTensors:
        """This rank's parameters, and what has to be gathered."""
        own = self._conversion.parameters()
        found, local, gathers = self._learn(own)
        if self._backup is not None:
            kept = self._backup()
            own = {name: kept[name] for name in own}
        held: dict[str, torch.Tensor] = dict(own)
        if gathers:
            if self._backup is not None:
                raise InputError("weights that slime computes cannot be gathered from an offloaded trainer",
                                 field="offload_train", do="train without --offload-train")  # fmt: skip
            known = local | self._conversion.copies(self._table)
            for name, tensor in self._conversion.gather(lambda name: name not in known).items():
                held[GATHERED + name] = tensor
                self.paths.setdefault(name, "gathered: slime makes it")

        def learn(table: Sequence[TensorSpec]) -> Layout:
            return self._conversion.layout(held, found, local, table)

        return HeldTensors(held, learn)

    def _learn(self, own: Mapping[str, Any]) -> tuple[Layout, set[str], bool]:
        """Once, and again when parameters change their names, shapes or dtypes."""
        seen = tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in own.items())
        if self._learnt is None or self._learnt[0] != seen:
            try:
                found, refused = self._conversion.learn()
            except UntraceableError as error:
                self.log.warning("slime's conversion cannot be learnt, every tensor is gathered: %s", error)
                found, refused = (
                    Layout((), ()),
                    {spec.name: "slime's conversion cannot be learnt" for spec in self._table},
                )
            quantises = self._conversion.quantization is not None
            local, gathered = split_paths(found, refused, self._table, quantises)
            self.paths = dict.fromkeys(local, SHARD) | {name: f"gathered: {why}" for name, why in gathered.items()}
            self._learnt = (seen, found, local, bool(gathered) or quantises)
        return self._learnt[1:]
