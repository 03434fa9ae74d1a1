"""What the profile unified costs: tokens per CPU-second of the embedded engine against native, in one run.

Owns the measurement. Rounds of both alternate and the best of each counts; CPU time, so that a busy machine does not
change the answer: with one thread it is the time that passes. Also tells how far native logprobs of decoding are from
those of a full forward pass, which under unified are equal.

usage: python benchmarks/unified.py [--model DIR] [--threads N] [--batch 1,8] [--json]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from weight_sync import Publisher, Replica
from weight_sync.adapters.engines.transformers import TransformersEngine

SIZES: dict[str, Any] = {
    "vocab_size": 8192, "hidden_size": 576, "num_hidden_layers": 6, "num_attention_heads": 9, "num_key_value_heads": 3,
    "head_dim": 64, "intermediate_size": 1536, "max_position_embeddings": 2048, "initializer_range": 0.05,
}  # fmt: skip
PROMPT, NEW = 96, 16


def make(folder: Path) -> Path:
    """A random bf16 checkpoint with six layers of the shape of SmolLM2-135M."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(tie_word_embeddings=True, **SIZES))
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def engine_of(path: Path, profile: str) -> TransformersEngine:
    """Of one profile."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    return TransformersEngine(model, path, engine_id=profile, profile=profile)


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """CPU-seconds, and what came of it."""
    begun = time.process_time()
    out = work()
    return time.process_time() - begun, out


def measure(engines: dict[str, TransformersEngine], batch: int, rounds: int) -> dict[str, Any]:
    """One batch size: sampling ``NEW`` tokens after ``PROMPT``, and scoring the whole."""
    dice = torch.Generator().manual_seed(1)
    vocabulary = next(iter(engines.values())).model.config.vocab_size
    prompts = torch.randint(5, vocabulary, (batch, PROMPT), generator=dice).tolist()
    best: dict[str, dict[str, float]] = {name: {"first": 9e9, "decode": 9e9, "score": 9e9} for name in engines}
    gaps: dict[str, float] = {}
    for _ in range(rounds):
        for name, engine in engines.items():
            first, _answers = timed(lambda e=engine: e.generate(prompts, max_new_tokens=1, seed=0))  # type: ignore[misc]
            whole, answers = timed(lambda e=engine: e.generate(prompts, max_new_tokens=NEW, seed=0))  # type: ignore[misc]
            rows = [[*a.prompt, *a.tokens] for a in answers]
            score, found = timed(lambda e=engine, r=rows: e.score(r))  # type: ignore[misc]
            spent = {"first": first, "decode": whole - first, "score": score}
            best[name] = {key: min(value, spent[key]) for key, value in best[name].items()}
            told = torch.tensor([a.logprobs for a in answers])
            gaps[name] = float((torch.stack([row[-NEW:] for row in found]) - told).abs().mean())
    row: dict[str, Any] = {"batch": batch}
    for name, spent in best.items():
        row[name] = {
            "prefill_tokens_per_cpu_s": batch * PROMPT / spent["first"],
            "decode_tokens_per_cpu_s": batch * (NEW - 1) / spent["decode"],
            "score_tokens_per_cpu_s": batch * (PROMPT + NEW) / spent["score"],
            "decode_against_score_mean_abs": gaps[name],
        }
    for key in ("prefill", "decode", "score"):
        row[f"{key}_cost"] = row["native"][f"{key}_tokens_per_cpu_s"] / row["unified"][f"{key}_tokens_per_cpu_s"]
    return row


def main() -> None:
    """Prints a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="checkpoint folder; default: six random layers of SmolLM2's shape")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", default="1,8", help="batch sizes")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    with tempfile.TemporaryDirectory() as folder:
        path = given.model or make(Path(folder) / "model")
        store = str(Path(folder) / "store")
        engines = {profile: engine_of(path, profile) for profile in ("native", "unified")}
        with Publisher.open(store, base=path):
            for name, engine in engines.items():
                with Replica.open(store, engine, replica_id=name) as replica:
                    replica.sync()
            rows = [measure(engines, int(batch), given.rounds) for batch in given.batch.split(",")]
    found = {"model": str(given.model or "six random layers"), "threads": given.threads, "prompt": PROMPT, "new": NEW,
             "rows": rows}  # fmt: skip
    if given.json:
        print(json.dumps(found))
        return
    for row in rows:
        for key in ("prefill", "decode", "score"):
            native, unified = (row[name][f"{key}_tokens_per_cpu_s"] for name in ("native", "unified"))
            print(f"batch {row['batch']:3} {key:8} native {native:8.0f} tokens per CPU-second, unified {unified:8.0f}, "
                  f"cost {row[f'{key}_cost']:.2f}x")  # fmt: skip
        print(f"batch {row['batch']:3} decode against score, mean |difference|: native "
              f"{row['native']['decode_against_score_mean_abs']:.2e}, unified "
              f"{row['unified']['decode_against_score_mean_abs']:.2e}")  # fmt: skip


if __name__ == "__main__":
    main()
