"""A tiny Qwen2, a word tokenizer, 16 prompts and a reward: ``python tiny.py FOLDER [tied]``. Also the reward's module."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

__all__ = ["make", "reward_func"]

_WORDS = "what is the sum of one two three four five six seven eight nine ten plus minus answer yes no a b c d"


def make(folder: Path, tied: bool = False) -> None:
    """vLLM's CPU attention wants a head of at least 32."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    vocabulary = {word: index for index, word in enumerate(["<pad>", "<eos>", "<unk>", *_WORDS.split()])}
    vocabulary |= {f"w{index}": index for index in range(len(vocabulary), 128)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=128, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=tied, eos_token_id=1, pad_token_id=0,
        bos_token_id=None, dtype="bfloat16",
    )  # fmt: skip
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "tiny")
    tokenizer.save_pretrained(folder / "tiny")
    numbers = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    rows = [{"input": f"what is the sum of {numbers[i // 8]} plus {numbers[i % 8]}", "label": "x"} for i in range(16)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def reward_func(queries: list[str], prompts: Any, labels: Any, **_: Any) -> dict[str, Any]:
    """By the length of the text: enough for gradients."""
    import torch

    scores = torch.tensor([len(text) % 7 / 7 for text in queries])
    return {"rewards": scores, "scores": scores, "extra_logs": {}}


if __name__ == "__main__":
    make(Path(sys.argv[1]), "tied" in sys.argv[2:])
