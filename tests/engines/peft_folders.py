"""LoRA adapters for tiny checkpoints, as PEFT saves them, without PEFT: engines' environments have none.

Owns the files. Owns no engine.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make(folder: Path, base: Path, seed: int, rank: int = 8, dtype: torch.dtype = torch.bfloat16) -> Path:
    """A random adapter to every linear layer but the head."""
    folder.mkdir(parents=True)
    dice = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in sorted(load_file(base / "model.safetensors").items()):
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in TARGETS:
            outputs, inputs = weight.shape
            for factor, shape in (("lora_A", (rank, inputs)), ("lora_B", (outputs, rank))):
                values = 0.2 * torch.randn(shape, generator=dice)
                tensors[f"base_model.model.{module}.{factor}.weight"] = values.to(dtype)
    assert tensors
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 16, "lora_dropout": 0.0,
              "target_modules": list(TARGETS), "bias": "none", "base_model_name_or_path": str(base),
              "inference_mode": True}  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2))
    return folder


def stepped(source: Path, target: Path, seed: int, share: float = 0.05) -> Path:
    """The adapter after a step that changed some of its elements."""
    target.mkdir(parents=True)
    dice = torch.Generator().manual_seed(seed)
    tensors = load_file(source / "adapter_model.safetensors")
    for tensor in tensors.values():
        chosen = torch.rand(tensor.shape, generator=dice) < share
        tensor[chosen] += 0.3 * torch.randn(tensor.shape, generator=dice).to(tensor.dtype)[chosen]
    save_file(tensors, target / "adapter_model.safetensors", metadata={"format": "pt"})
    (target / "adapter_config.json").write_text((source / "adapter_config.json").read_text())
    return target
