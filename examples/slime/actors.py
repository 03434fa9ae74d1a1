"""slime's real training actors under Ray, on CPU, publishing to a fleet that slime has no handles of.

``actors.py FOLDER TP,PP,EP,MOE WORLD SYNCS [LOADED]``: FOLDER holds ws.yaml, as a user writes it; with LOADED, the number of
a rollout, training goes on from the checkpoint after it. After each sync the store's head
is compared, bit for bit, with what slime itself would have sent. Owns the run and the comparison.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import ray
import slime_env
import torch
from safetensors.torch import save_file


def stream(actor: Any) -> dict[str, torch.Tensor]:
    """In an actor: what slime's own updater would send."""
    updater = actor.weight_updater
    conversion = updater.weight_sync._conversion if updater.weight_sync else _conversion(updater)
    return {name: tensor.clone() for name, tensor in conversion.gather(lambda name: True).items()}


def _conversion(updater: Any) -> Any:
    from weight_sync.adapters.trainers.slime.megatron import Conversion

    reader = type(updater)._weight_sync_reads
    return Conversion(reader, updater.args, updater.model, updater.model_name, updater.quantization_config)


def facts(actor: Any) -> dict[str, Any]:
    """In an actor: how the last sync went."""
    updater = actor.weight_updater
    paths = updater.weight_sync.paths
    return {"class": type(updater).__name__, "version": updater.weight_version, "metrics": updater.pop_metrics(),
            "gathered": sorted(name for name, path in paths.items() if path != "shard"), "paths": len(paths)}  # fmt: skip


def settled(actor: Any) -> bool:
    """In an actor: waits for the version that goes out behind the next step."""
    return bool(actor.weight_updater.weight_sync.settle())


@ray.remote
class Manager:
    """slime's rollout manager, of a fleet without engines."""

    def get_updatable_engines_and_lock(self) -> tuple[Any, ...]:
        return [], None, 0, [], [], []

    def clear_updatable_num_new_engines(self) -> None: ...

    def set_train_parallel_config(self, config: Any) -> None: ...


def head_of(uri: str) -> dict[str, torch.Tensor]:
    """What a replica that joins now would serve."""
    from weight_sync import Replica
    from weight_sync.testing import MemoryEngine

    engine = MemoryEngine({})
    with Replica.open(uri, engine, poll_s=0.02) as replica:
        replica.sync(timeout=30)
    return {name: torch.from_numpy(bits.copy().view("i2")) for name, (_, bits) in engine.table.items()}


def main(folder: str, topology: str, world: int, syncs: int, loaded: int = -1) -> None:
    """Starts the actors and syncs."""
    tp, pp, ep, moe = map(int, topology.split(","))
    actor_module = slime_env.prepare()
    args = slime_env.arguments(folder, (tp, pp, ep, moe), world, loaded)
    ray.init(
        num_cpus=world + 1, include_dashboard=False, runtime_env={"worker_process_setup_hook": "slime_env.prepare"}
    )
    cls = ray.remote(num_cpus=1)(actor_module.MegatronTrainRayActor)
    actors = [cls.remote(world, rank, None, None) for rank in range(world)]
    ray.get([actor.init.remote(args, "actor") for actor in actors])
    if loaded < 0:
        parts = ray.get([actor.__ray_call__.remote(stream) for actor in actors])
        base = {name: tensor.contiguous() for part in parts for name, tensor in part.items()}
        save_file(base, str(Path(args.hf_checkpoint) / "model.safetensors"))
    manager = Manager.remote()
    ray.get([actor.set_rollout_manager.remote(manager) for actor in actors])
    for step in range(loaded + 1, loaded + 1 + syncs):
        if step > loaded + 1:
            ray.get([actor.train.remote(step - 1, None) for actor in actors])
        ray.get([actor.update_weights.remote() for actor in actors])
        assert all(ray.get([actor.__ray_call__.remote(settled) for actor in actors])), "a version was not committed"
        parts = ray.get([actor.__ray_call__.remote(stream) for actor in actors])
        served = head_of(args.weight_sync["uri"])
        sent = {name: tensor for part in parts for name, tensor in part.items()}
        different = [name for name, tensor in sent.items()
                     if not torch.equal(served[name], tensor.contiguous().view(torch.int16).view(-1))]  # fmt: skip
        told = ray.get([actor.__ray_call__.remote(facts) for actor in actors])
        slime_env.say(step=step, names=sorted(served) == sorted(sent), different=different, ranks=told)
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
