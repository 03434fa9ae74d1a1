"""Tiny random checkpoints that real engines load, and what an optimizer step of sorts makes of them.

Owns the files. Owns no engine.
"""

from __future__ import annotations

import json
import shutil
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "max_position_embeddings": 1024,
    "initializer_range": 0.08,
    "eos_token_id": 2,
    "bos_token_id": 0,
    "pad_token_id": 0,
}
VOCABULARY = 500  # no multiple of 64: the engine pads it


def tokenizer(folder: Path) -> None:
    """A byte-level BPE trained on a few files of the standard library."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:20]
    inner.train([str(file) for file in files], trainer)
    assert inner.get_vocab_size() == VOCABULARY
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = "{% for m in messages %}<|im_start|>{{m['content']}}<|im_end|>{% endfor %}"
    fast.save_pretrained(folder)


def make(folder: Path, kind: str, seed: int = 0) -> Path:
    """A bf16 checkpoint: qwen3, llama-tied (its head is tied, and saved nowhere) or qwen3moe."""
    import transformers

    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCABULARY, **SIZES}
    if kind == "qwen3":
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(tie_word_embeddings=False, **sizes))
    elif kind == "llama-tied":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(tie_word_embeddings=True, **sizes))
    else:
        config = transformers.Qwen3MoeConfig(
            tie_word_embeddings=False, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64,
            decoder_sparse_step=1, norm_topk_prob=True, **sizes,
        )  # fmt: skip
        model = transformers.Qwen3MoeForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer(folder)
    return folder


def stepped(source: Path, target: Path, seed: int, density: float = 0.02, special: bool = False) -> Path:
    """The checkpoint after a step that changed ``density`` of each tensor's bits; ``special``: a NaN and a -0.0 too."""
    target.mkdir(parents=True)
    dice = np.random.default_rng(seed)
    tensors = load_file(source / "model.safetensors")
    for name, tensor in sorted(tensors.items()):
        bits = tensor.view(torch.int16).numpy().reshape(-1)
        at = dice.choice(len(bits), max(1, int(density * len(bits))), replace=False)
        steps = dice.integers(1, 4, len(at)).astype(np.int16) * dice.choice([-1, 1], len(at)).astype(np.int16)
        near_zero = (bits[at] & 0x7FFF) < 4  # of the padding token, say: a step down would end among the NaNs
        bits[at] += np.where(near_zero, np.abs(steps), steps)
        if special and "embed_tokens" in name:
            bits[-1], bits[-2] = 0x7FC1, np.int16(-0x8000)  # of the last token of the vocabulary, which no prompt has
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, target)
    return target


def widths(folder: Path) -> dict[str, Any]:
    """The model's configuration."""
    return dict(json.loads((folder / "config.json").read_text()))
