"""Witnesses of what trainer and engines hold after each sync; Ray runs `apply` in every worker process.

Owns what is written down, and syncs that are skipped on purpose. Changes nothing else of OpenRLHF.

    WEIGHT_SYNC_TEST_OUT    folder: trainer-N.safetensors (whole tensors after training N), engine-NAME-V.safetensors
    WEIGHT_SYNC_TEST_SKIP   versions from this number on reach no engine
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

__all__ = ["apply", "dump_engine"]


def apply() -> None:
    """Once per process; with the doubles of the example's CPU recipe."""
    import openrlhf_cpu
    import torch

    openrlhf_cpu.apply()
    if getattr(torch, "_weight_sync_witness", False):
        return
    torch._weight_sync_witness = True  # type: ignore[attr-defined]
    _witness_trainer()
    _witness_engine()


def _witness_trainer() -> None:
    folder = os.environ.get("WEIGHT_SYNC_TEST_OUT")
    from openrlhf.trainer.ray.ppo_actor import ActorPPOTrainer

    original = ActorPPOTrainer.ppo_train

    def ppo_train(self: Any, *args: Any, **options: Any) -> Any:
        status = original(self, *args, **options)
        if folder:
            self.trained = getattr(self, "trained", 0) + 1
            _save_trainer(self.actor.model.module, Path(folder) / f"trainer-{self.trained}.safetensors")
        return status

    ActorPPOTrainer.ppo_train = ppo_train


def _save_trainer(model: Any, path: Path) -> None:
    """Gathers, which is what the adapter never does."""
    import deepspeed
    import torch
    from safetensors.torch import save_file

    if hasattr(model, "peft_config"):
        _save_merged(model, path)
        return
    whole = {}
    for name, param in model.named_parameters():
        with deepspeed.zero.GatheredParameters([param], enabled=hasattr(param, "ds_tensor")):
            whole[name] = param.data.clone()
    if torch.distributed.get_rank() == 0:
        save_file(whole, path)


def _save_merged(model: Any, path: Path) -> None:
    import copy

    import deepspeed
    import torch
    from safetensors.torch import save_file

    with ExitStack() as whole:
        for param in model.parameters():
            whole.enter_context(deepspeed.zero.GatheredParameters([param], enabled=hasattr(param, "ds_tensor")))
        if torch.distributed.get_rank() == 0:
            state = {name: param.detach().clone() for name, param in model.named_parameters()}
            twin = copy.deepcopy(model.peft_config["default"])
            from peft import get_peft_model
            from transformers import AutoModelForCausalLM

            plain = AutoModelForCausalLM.from_config(model.get_base_model().config, dtype=torch.bfloat16)
            wrapped = get_peft_model(plain, twin)
            for name, param in wrapped.named_parameters():
                param.data = state[name]
            merged = wrapped.merge_and_unload()
            whole_state = {name: param.detach().clone() for name, param in merged.named_parameters()}
            assert not any(tensor.isnan().any() for tensor in whole_state.values()), "training has gone wrong"
            save_file(whole_state, path)


def _witness_engine() -> None:
    folder = os.environ.get("WEIGHT_SYNC_TEST_OUT")
    skip = int(os.environ.get("WEIGHT_SYNC_TEST_SKIP", "0"))
    from weight_sync.adapters.trainers.openrlhf.rollout import Rollout  # light: vLLM's workers must not meet numba

    original = Rollout.reach

    async def reach(self: Any, actor: Any, uri: str, run_id: str, version: int) -> Any:
        if skip and version >= skip:
            return {"name": "skipped", "version": None, "error": "", "seconds": 0.0, "copied": 0}
        told = await original(self, actor, uri, run_id, version)
        if folder and not told["error"] and not self.asks_elsewhere:
            path = Path(folder) / f"engine-{told['name']}-{told['version']}.safetensors"
            await actor.llm.collective_rpc(dump_engine, args=(str(path),))
        return told

    Rollout.reach = reach  # type: ignore[method-assign]


def dump_engine(worker: Any, path: str) -> None:
    """In vLLM's worker: this rank's live parameters, under the names of the checkpoint (fused ones taken apart)."""
    from safetensors.torch import save_file

    model = worker.model_runner.get_model()
    config = worker.vllm_config.model_config.hf_config
    ranks = worker.vllm_config.parallel_config.tensor_parallel_size
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads, kv = config.num_attention_heads // ranks, max(1, config.num_key_value_heads // ranks)
    out = {}
    for name, param in model.named_parameters():
        if ".qkv_proj." in name:
            parts = param.data.split([heads * size, kv * size, kv * size])
            out |= {name.replace("qkv_proj", f"{w}_proj"): p.clone() for w, p in zip("qkv", parts, strict=True)}
        elif ".gate_up_proj." in name:
            gate, up = param.data.chunk(2)
            out[name.replace("gate_up_proj", "gate_proj")] = gate.clone()
            out[name.replace("gate_up_proj", "up_proj")] = up.clone()
        else:
            out[name] = (
                param.data[: config.vocab_size].clone() if "embed" in name or "lm_head" in name else param.data.clone()
            )
    save_file(out, path)
