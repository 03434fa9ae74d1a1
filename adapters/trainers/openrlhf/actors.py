"""OpenRLHF's two actors with our methods in them.

Owns what is overridden. Owns no work: methods hand over to host.py and rollout.py, which are imported where they run.

Ray ships classes that are made inside a function by value, so the replacement in the driver reaches the workers; what
such methods refer to must be importable there, which everything of weight_sync is.
"""

from __future__ import annotations

from typing import Any

__all__ = ["policy_actor", "rollout_actor"]

EXTENSION = "weight_sync.adapters.engines.vllm.extension.WorkerExtension"
IN_PLACE = {"weight_sync": {"in_place": True}}
"""On CPUs, linears stay unpacked and are written in place; elsewhere it says nothing."""


def policy_actor(base: Any, block: dict[str, Any], lora: str) -> Any:
    """A subclass of OpenRLHF's policy actor that publishes at its sync point, on every rank."""

    class PolicyModelActor(base):  # type: ignore[misc]
        def init_model_from_pretrained(
            self, strategy: Any, pretrain: str, max_steps: int | None = None, vllm_engines: Any = None
        ) -> None:
            from weight_sync.adapters.trainers.openrlhf.host import make_host

            # neither "nccl", which imports vLLM here, nor engines: no group with the engines is made
            strategy.args.vllm.sync_backend = "weight_sync"
            base.init_model_from_pretrained(self, strategy, pretrain, max_steps, None)
            self.vllm_engines = self.trainer.vllm_engines = vllm_engines
            self.weight_sync = make_host(self, block, lora, pretrain)

        def broadcast_to_vllm(self) -> None:
            self.weight_sync.broadcast()

        def fit(self, *args: Any, **kwargs: Any) -> Any:
            # what fit returns is what OpenRLHF logs with the step: the sync before it shows there
            status = base.fit(self, *args, **kwargs)
            return {**(status or {}), **self.weight_sync.metrics}

    return PolicyModelActor


def rollout_actor(base: Any, block: dict[str, Any], lora: str) -> Any:
    """A subclass of OpenRLHF's rollout actor whose engine can be brought to a version."""

    class RolloutRayActor(base):  # type: ignore[misc]
        async def __init__(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[misc]  # Ray awaits it
            from weight_sync.adapters.trainers.openrlhf.rollout import Rollout, switch_engine

            switch_engine(block)
            self.weight_sync = Rollout(block, lora, kwargs)
            if self.weight_sync.asks_elsewhere:
                self.weight_sync.replace_engine(self, kwargs)
                return
            kwargs["worker_extension_cls"] = EXTENSION
            kwargs["additional_config"] = {**(kwargs.get("additional_config") or {}), **IN_PLACE}
            await base.__init__(self, *args, **kwargs)

        async def weight_sync_reach(self, uri: str, run_id: str, version: int) -> dict[str, Any]:
            return await self.weight_sync.reach(self, uri, run_id, version)

    return RolloutRayActor
