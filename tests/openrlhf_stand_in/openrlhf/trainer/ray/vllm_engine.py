"""Stand-in for OpenRLHF's rollout actor and the function that makes it."""

from __future__ import annotations

from typing import Any

import ray
import vllm

from openrlhf.utils.agent import AgentExecutorBase, SingleTurnAgentExecutor

__all__ = ["RolloutRayActor", "SingleTurnAgentExecutor", "create_vllm_engines"]


def _load_agent_executor(agent_func_path: str) -> AgentExecutorBase:
    raise AssertionError("no test has one")


@ray.remote
class RolloutRayActor:
    async def __init__(self, *args: Any, bundle_indices: Any = None, **kwargs: Any) -> None:
        self.llm = vllm.AsyncLLMEngine(*args, **kwargs)

    async def state(self) -> dict[str, Any]:
        model = self.llm.host.model()
        named = {name: tensor.float().flatten().tolist() for name, tensor in model.named_parameters()}
        return {"weights": named, "resets": self.llm.resets}


def create_vllm_engines(num_engines: int, pretrain: str) -> list[Any]:
    kwargs = {"model": pretrain, "worker_extension_cls": "openrlhf.trainer.ray.vllm_worker_wrap.WorkerWrap"}
    return [RolloutRayActor.options(num_cpus=1).remote(**kwargs) for _ in range(num_engines)]
