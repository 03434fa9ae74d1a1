"""Stand-in for OpenRLHF's program: its parser under ``__main__``, its order of calls, one line of JSON per step.

``--break_at N --store FOLDER`` puts a file in the place of a folder while sync N runs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace

import ray

from openrlhf.trainer.ray.ppo_actor import PolicyModelActor
from openrlhf.trainer.ray.vllm_engine import create_vllm_engines


def train(args: SimpleNamespace) -> None:
    engines = create_vllm_engines(args.vllm.num_engines, args.actor.model_name_or_path)
    actor = PolicyModelActor.options(num_gpus=1).remote()
    strategy = SimpleNamespace(args=args)
    ray.get(actor.init_model_from_pretrained.remote(strategy, args.actor.model_name_or_path, args.steps, engines))
    step = ray.get(actor.get_checkpoint_states.remote()).get("global_step", 0)
    if step:  # as PPOTrainer.fit does on resume
        ray.get(actor.broadcast_to_vllm.remote())
        tell(step, {}, actor, engines)
    for _ in range(args.steps):
        status = ray.get(actor.fit.remote(kl_ctl=0.0))
        store = Path(args.store) if step + 1 == args.break_at else None
        if store is not None:
            away = store.rename(store.with_name("away"))
            store.write_text("")
        ray.get(actor.broadcast_to_vllm.remote())
        if store is not None:
            store.unlink()
            away.rename(store)
        step += 1
        tell(step, status, actor, engines)
    ray.get(actor.save_checkpoint.remote(step))


def tell(step: int, status: dict[str, float], actor: object, engines: list[object]) -> None:
    states = ray.get([engine.state.remote() for engine in engines])  # type: ignore[attr-defined]
    weights = ray.get(actor.weights.remote())  # type: ignore[attr-defined]
    print(json.dumps({"step": step, "status": status, "trainer": weights, "engines": states}), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--vllm.sync_backend", type=str, default="nccl")
    parser.add_argument("--vllm.num_engines", type=int, default=1)
    parser.add_argument("--actor.model_name_or_path", type=str)
    parser.add_argument("--ds.tensor_parallel_size", type=int, default=1)
    parser.add_argument("--ckpt.path", type=str)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--break_at", type=int, default=0)
    parser.add_argument("--store", type=str, default="")
    flat = parser.parse_args()
    nested = SimpleNamespace()
    for key, value in vars(flat).items():
        *outer, last = key.split(".")
        owner = nested
        for part in outer:
            if not hasattr(owner, part):
                setattr(owner, part, SimpleNamespace())
            owner = getattr(owner, part)
        setattr(owner, last, value)
    train(nested)
