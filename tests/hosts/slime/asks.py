"""slime's own rollout code with prompts answered by engines elsewhere: ``asks.py FOLDER BLOCK`` (JSON), in a process of slime's.

Calls the rollout function as slime's rollout manager does, for a batch and for an evaluation. Owns the arguments, a
tokenizer, a reward and a filter of this test.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import slime_env

DROPPED: list[int] = []


async def reward(args: Namespace, sample: Any, **_: Any) -> int:
    """slime's custom_rm_path."""
    return sample.tokens[-1] % 2


def keep(args: Namespace, group: list[Any], **_: Any) -> bool:
    """slime's dynamic_sampling_filter_path: drops the first group."""
    if not DROPPED:
        DROPPED.append(group[0].index)
        return False
    return True


def prompts(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{k}": k for k in range(64)}
    inner = Tokenizer(models.WordLevel(words, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="w0", pad_token="w1", eos_token="w2").save_pretrained(
        folder
    )
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    rows = [{"input": f"w{k} w{k + 1}", "label": "x"} for k in range(10, 22)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def arguments(folder: Path, block: dict[str, Any]) -> Namespace:
    """As slime's parser and its YAML leave them, as far as its rollout code reads them."""
    return Namespace(
        weight_sync=block, rollout_function_path="weight_sync.adapters.trainers.slime.generate_rollout",
        hf_checkpoint=str(folder), prompt_data=str(folder / "prompts.jsonl"), input_key="input", label_key="label",
        metadata_key="metadata", tool_key=None, multimodal_keys=None, apply_chat_template=False,
        apply_chat_template_kwargs={}, rollout_max_prompt_len=None, rollout_seed=1, rollout_shuffle=False,
        rollout_global_dataset=True, dump_details=None, buffer_filter_path=None, n_samples_per_prompt=2,
        rollout_batch_size=3, over_sampling_batch_size=2, rollout_temperature=1.0, rollout_top_p=1.0, rollout_top_k=-1,
        rollout_max_response_len=4, rollout_stop=None, rollout_stop_token_ids=None, rollout_skip_special_tokens=True,
        sglang_dp_size=None, sglang_server_concurrency=512, rollout_num_gpus=0, rollout_num_gpus_per_engine=1,
        partial_rollout=False, mask_offpolicy_in_partial_rollout=False, custom_generate_function_path=None,
        group_rm=False, custom_rm_path="__main__.reward", rm_type=None, ci_test=False, use_rollout_routing_replay=False,
        dynamic_sampling_filter_path="__main__.keep", rollout_sample_filter_path=None, rollout_sample_hook_path=None,
        rollout_all_samples_process_path=None, eval_max_prompt_len=None, eval_reward_key=None, reward_key=None,
    )  # fmt: skip


def main(folder: Path, block: dict[str, Any]) -> None:
    slime_env.prepare()
    from slime.rollout.base_types import call_rollout_fn
    from slime.rollout.data_source import RolloutDataSourceWithBuffer
    from slime.utils.eval_config import EvalDatasetConfig
    from slime.utils.misc import load_function

    prompts(folder)
    args = arguments(folder, block)
    source = RolloutDataSourceWithBuffer(args)
    function = load_function(args.rollout_function_path)
    made = call_rollout_fn(function, args, 0, source, evaluation=False)
    samples = [
        {"versions": s.weight_versions, "spans": s.metadata["weight_sync"]["spans"], "length": s.response_length,
         "likely": s.rollout_log_probs, "mask": s.loss_mask, "status": s.status.value, "reward": s.reward,
         "response": s.response} for group in made.samples for s in group
    ]  # fmt: skip
    slime_env.say(type=type(made).__name__, groups=[len(group) for group in made.samples], samples=samples,
                  metrics=made.metrics, dropped=len(DROPPED))  # fmt: skip
    (folder / "eval.jsonl").write_text("".join((folder / "prompts.jsonl").read_text().splitlines(True)[:3]))
    args.eval_datasets = [EvalDatasetConfig(
        name="e", path=str(folder / "eval.jsonl"), input_key="input", label_key="label", temperature=1.0, top_p=1.0, top_k=-1,
        n_samples_per_eval_prompt=1, max_response_len=4,
    )]  # fmt: skip
    found = call_rollout_fn(function, args, 0, source, evaluation=True)
    slime_env.say(type=type(found).__name__, versions=[s.weight_versions for s in found.data["e"]["samples"]])


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
