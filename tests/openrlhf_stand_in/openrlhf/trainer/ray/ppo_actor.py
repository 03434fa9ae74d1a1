"""Stand-in for OpenRLHF's policy actor: a model on one rank whose "training" adds a little noise."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
import torch
from safetensors.torch import load_file, save_file


class Policy(torch.nn.Module):
    """Tensors by their names in the checkpoint."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        for name, tensor in load_file(Path(folder) / "model.safetensors").items():
            *outer, last = name.split(".")
            owner: Any = self
            for part in outer:
                if not hasattr(owner, part):
                    owner.add_module(part, torch.nn.Module())
                owner = getattr(owner, part)
            owner.register_parameter(last, torch.nn.Parameter(tensor, requires_grad=False))


class ActorPPOTrainer:
    def __init__(self, strategy: Any, model: Policy, vllm_engines: Any) -> None:
        assert vllm_engines is None, "a process group with the engines would be made"
        assert strategy.args.vllm.sync_backend != "nccl", "vLLM would be imported in the trainer"
        self.actor = SimpleNamespace(model=SimpleNamespace(module=model))
        self.vllm_engines = vllm_engines

    def ppo_train(self, kl_ctl: float) -> dict[str, float]:
        for _, tensor in self.actor.model.module.named_parameters():
            tensor.data += (torch.rand(tensor.shape) < 0.2).to(tensor.dtype) * 0.125
        return {"policy_loss": 0.5}


@ray.remote(num_gpus=1)
class PolicyModelActor:
    def init_model_from_pretrained(
        self, strategy: Any, pretrain: str, max_steps: Any = None, vllm_engines: Any = None
    ) -> None:
        self.strategy, self.vllm_engines = strategy, vllm_engines
        saved = Path(strategy.args.ckpt.path) / "_actor"
        self.checkpoint_states: dict[str, Any] = {}
        model = Policy(str(saved if saved.exists() else pretrain))
        if saved.exists():
            self.checkpoint_states = {"global_step": int((saved / "step").read_text())}
        self.trainer = ActorPPOTrainer(strategy, model, vllm_engines)

    def fit(self, kl_ctl: float = 0) -> dict[str, float]:
        return self.trainer.ppo_train(kl_ctl)

    def broadcast_to_vllm(self) -> None:
        raise AssertionError("OpenRLHF's own sync ran")

    def get_checkpoint_states(self) -> dict[str, Any]:
        return self.checkpoint_states

    def save_checkpoint(self, step: int) -> None:
        saved = Path(self.strategy.args.ckpt.path) / "_actor"
        saved.mkdir(parents=True, exist_ok=True)
        named = dict(self.trainer.actor.model.module.named_parameters())
        save_file({name: tensor.detach() for name, tensor in named.items()}, saved / "model.safetensors")
        (saved / "step").write_text(str(step))

    def weights(self) -> dict[str, Any]:
        named = self.trainer.actor.model.module.named_parameters()
        return {name: tensor.float().tolist() for name, tensor in named}
