"""A tiny Qwen2 with a byte vocabulary and a toy task: ``python tiny.py FOLDER`` makes FOLDER/tiny and FOLDER/train.parquet.

Owns the inputs of the example and of the tests. Also the toy reward, which verl loads from this file.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """The share of digits in the answer."""
    return sum(letter.isdigit() for letter in solution_str) / max(1, len(solution_str))


def make(folder: Path) -> None:
    """Writes model, tokenizer and 16 prompts."""
    import torch
    from datasets import Dataset
    from tokenizers import Tokenizer, decoders, models
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

    words = ["<pad>", "<eos>", "<unk>", *sorted(ByteLevel.alphabet())]
    made = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], unk_token="<unk>"))
    made.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}\\n{% endfor %}"
    config = Qwen2Config(
        vocab_size=320, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=512, tie_word_embeddings=True, pad_token_id=0, eos_token_id=1,
        bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder / "tiny")
    tokenizer.save_pretrained(folder / "tiny")
    rows = [
        {"data_source": "toy", "prompt": [{"role": "user", "content": f"{i}+1="}], "ability": "math",
         "reward_model": {"style": "rule", "ground_truth": str(i + 1)}, "extra_info": {"index": i, "split": "train"}}
        for i in range(16)
    ]  # fmt: skip
    Dataset.from_list(rows).to_parquet(str(folder / "train.parquet"))


if __name__ == "__main__":
    make(Path(sys.argv[1]))
