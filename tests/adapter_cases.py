"""What the tests of adapters share: a tiny base, adapters that peft itself makes and saves, and steps of training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
TARGETS = ("q_proj", "v_proj", "down_proj")


def base_model(seed: int = 0, dtype: torch.dtype = torch.bfloat16, **sizes: Any) -> Any:
    """A random Llama."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(tie_word_embeddings=False, **{**SIZES, **sizes})
    return transformers.LlamaForCausalLM(config).to(dtype)


def save_base(folder: Path, seed: int = 0, **sizes: Any) -> Path:
    """Its checkpoint."""
    base_model(seed, **sizes).save_pretrained(folder)
    return folder


def load_base(folder: Path) -> Any:
    """As engines load it."""
    import transformers

    return transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


def adapted(folder: Path, seed: int = 1, **options: Any) -> Any:
    """The base, wrapped by peft with a random adapter."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    given = {"r": 4, "lora_alpha": 8, "target_modules": list(TARGETS), "task_type": "CAUSAL_LM", **options}
    model = get_peft_model(load_base(folder), LoraConfig(**given))
    step(model, seed, share=1.0)
    return model


def step(model: Any, seed: int, share: float = 0.2) -> Any:
    """Changes some of the adapter's elements."""
    dice = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                chosen = torch.rand(parameter.shape, generator=dice) < share
                parameter[chosen] += 0.05 * torch.randn(parameter.shape, generator=dice).to(parameter.dtype)[chosen]
    return model


def merged(base: Path, adapter: Path) -> dict[str, torch.Tensor]:
    """What peft makes of a base and an adapter's folder."""
    from peft import PeftModel

    model = PeftModel.from_pretrained(load_base(base), str(adapter)).merge_and_unload()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}
