"""Two FSDP2 actor ranks and two rollout workers under verl's own CheckpointEngineManager, on CPU.

``ranks.py MODEL URI FIRST SYNCS HISTORY`` trains from step FIRST on, as after a restart from that step's checkpoint, and prints
one line of JSON per sync: what differed, on which path, and how many bytes crossed collectives on ours and on verl's own
way. Owns the run; verl's workers, engine and manager are verl's.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import ray
import torch
from tests.checkpoint_engine.test_utils import MockReplica, MockServerAdapter, TrainingWorkerTest  # of verl's wheel
from torch.utils._python_dispatch import TorchDispatchMode
from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.workers.config import (
    CheckpointEngineConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    RolloutConfig,
)
from verl.workers.engine_workers import TrainingWorkerConfig


class Crossing(TorchDispatchMode):
    """Counts the bytes that this rank hands to collectives."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            flat = [tensor for tensor in torch.utils._pytree.tree_leaves(args) if isinstance(tensor, torch.Tensor)]
            self.bytes += sum(tensor.nbytes for tensor in flat)
        return func(*args, **(kwargs or {}))


class Actor(TrainingWorkerTest):  # type: ignore[misc]
    def __init__(self, config: Any, checkpoint_engine_config: Any) -> None:
        importlib.import_module("weight_sync.adapters.trainers.verl")  # verl's own actor imports it by its name, too
        super().__init__(config, checkpoint_engine_config)
        self.crossed = 0

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> Any:
        self.checkpoint_engine.bind(self.engine)
        weights, _ = self.engine.get_per_tensor_param()
        with Crossing() as crossing:
            metrics = await self.checkpoint_engine.send_weights(weights, global_steps=global_steps)
        self.crossed = crossing.bytes
        return metrics

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def perturb(self, step: int) -> None:
        with torch.no_grad():
            for index, parameter in enumerate(self.engine.module.parameters()):
                local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                if index % 3 == step % 3 and local.numel():
                    local.view(-1)[step % local.numel()].add_(1.0)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def whole(self) -> tuple[dict[str, torch.Tensor], int, int]:
        """verl's own stream, what it costs, and what our last sync cost."""
        with Crossing() as crossing:
            tensors = {name: tensor.clone() for name, tensor in self.engine.get_per_tensor_param()[0]}
        return tensors, crossing.bytes, self.crossed


class Received(MockServerAdapter):  # type: ignore[misc]
    async def update_weights(self, weights: Any, **_: Any) -> None:
        self.received_weights = {name: tensor.clone() async for name, tensor in weights}


class Rollout(CheckpointEngineWorker):  # type: ignore[misc]
    def __init__(self, rollout_config: Any, model_config: Any, *args: Any, **options: Any) -> None:
        super().__init__(rollout_config, model_config, Received(rollout_config, model_config), *args, **options)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def got(self) -> tuple[dict[str, torch.Tensor], bool]:
        return self.server_adapter.received_weights, self.checkpoint_engine._rollout.copy.keeps


class Still(MockReplica):  # type: ignore[misc]
    async def nothing(self, *_: Any, **__: Any) -> None: ...

    abort_all_requests = resume_generation = release_kv_cache = resume_kv_cache = nothing


def start(model: str, block: dict[str, Any], actors: int, rollouts: int) -> tuple[Any, Any, Any]:
    """(actor group, rollout group, manager)."""
    engine = CheckpointEngineConfig(
        backend="weight_sync", update_weights_bucket_megabytes=1,
        custom_backend_module="weight_sync.adapters.trainers.verl", engine_kwargs={"weight_sync": {"config": block}},
    )  # fmt: skip
    hf = HFModelConfig(path=model, use_remove_padding=False, override_config={"attn_implementation": "eager"})
    rollout = RolloutConfig(name="vllm", checkpoint_engine=engine)
    fsdp = FSDPEngineConfig(
        forward_only=False, fsdp_size=actors, strategy="fsdp2", use_torch_compile=False, model_dtype="fp32"
    )
    training = TrainingWorkerConfig(
        model_type="language_model", model_config=hf, engine_config=fsdp, optimizer_config=FSDPOptimizerConfig(lr=1e-3)
    )

    def group(count: int, prefix: str, cls: type, **arguments: Any) -> Any:
        pool = RayResourcePool(process_on_nodes=[count], use_gpu=False, max_colocate_count=10, name_prefix=prefix)
        made = RayClassWithInitArgs(cls=ray.remote(cls), **arguments)
        return RayWorkerGroup(resource_pool=pool, ray_cls_with_init=made, device_name="cpu", use_gpu=False)

    actor = group(actors, "t", Actor, config=training, checkpoint_engine_config=engine)
    actor.reset()
    worker = group(rollouts, "r", Rollout, model_config=hf, rollout_config=rollout)
    replicas = []
    for rank in range(rollouts):
        replica = Still(replica_rank=rank, config=rollout, model_config=hf, gpus_per_node=1)
        asyncio.run(replica.init_hybrid(worker))
        replicas.append(replica)
    return actor, worker, CheckpointEngineManager(config=engine, actor_wg=actor, replicas=replicas)


def main(model: str, uri: str, first: int, syncs: int, history: str) -> None:
    """Syncs and compares, bit for bit."""
    ray.init(num_cpus=64, num_gpus=8, include_dashboard=False)
    block = {"uri": uri, "poll_s": 0.02, "timeout_s": 120, "threads": 1, "anchor_share": 0, "base": model}
    if uri.startswith("grpc"):
        block["store"] = history
    actor, worker, manager = start(model, block, 2, 2)
    for step in range(first):
        actor.perturb(step)
    for step in range(first, first + syncs):
        metrics = manager.update_weights(global_steps=step)
        truth, native, crossed = actor.whole()[0]
        got = worker.got()
        tied = json.loads(Path(model, "config.json").read_text())["tie_word_embeddings"]
        served = {name: tensor.bfloat16() for name, tensor in truth.items() if name != "lm_head.weight" or not tied}
        different = [
            [
                name
                for name in served
                if not torch.equal(received[name].view(torch.int16), served[name].view(torch.int16))
            ]
            for received, _ in got
        ]
        largest = max(tensor.nbytes for tensor in served.values())
        print(json.dumps({
            "step": step, "names": [sorted(received) == sorted(served) for received, _ in got], "different": different,
            "keepers": sum(keeps for _, keeps in got), "tensors": sorted(served), "native_bytes": native,
            "our_bytes": crossed, "largest": largest, "metrics": metrics,
        }), flush=True)  # fmt: skip
        actor.perturb(step)
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
