"""slime's rollout function for engines elsewhere; ``--rollout-function-path`` names it.

Owns which groups are asked for until a batch is full, and the answer in slime's sample. Owns no prompt, reward, filter or
sample hook (slime's own code does them, through its ``--custom-generate-function-path``) and no request
(weight_sync.adapters.rollout).

slime's own rollout function ends with a call to the router of its engines, which a fleet elsewhere has none of; what it
does before that is in functions that are used here.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from weight_sync.adapters.rollout import Prompt
from weight_sync.adapters.trainers.block import read_block
from weight_sync.adapters.trainers.remote import sampling_of, shared_client, versions_of
from weight_sync.blocks import Rollout
from weight_sync.errors import ConfigError, InputError

if TYPE_CHECKING:
    from weight_sync.proto.v1 import trajectory_pb2

__all__ = ["GENERATE", "answered", "asking", "roll_out", "rollout_block"]

GENERATE = "weight_sync.adapters.trainers.slime.generate"


def roll_out(args: Namespace, rollout_id: int, data_source: Any, evaluation: bool) -> Any:
    """A batch, or an evaluation, as slime's own rollout function returns it. Raises as the client does.

    Args:
        args: slime's.
        rollout_id: of this rollout.
        data_source: slime's source of prompts.
    """
    host = _host()
    own = asking(args)
    loop = importlib.import_module(f"{host}.utils.async_utils")
    if evaluation:
        return loop.run(_part(host, "sglang_rollout").eval_rollout(own, rollout_id))[0]
    return loop.run(_train(host, own, data_source))


def asking(args: Namespace) -> Namespace:
    """slime's arguments with which its own code asks engines elsewhere. Raises ConfigError."""
    block = rollout_block(args)
    if getattr(args, "partial_rollout", False):
        raise ConfigError("engines elsewhere give whole answers", field="partial_rollout", found=True, expected=False,
                          do="leave --partial-rollout out: an engine elsewhere goes on across a version")  # fmt: skip
    path = getattr(args, "custom_generate_function_path", None) or GENERATE  # the user's own may call ours
    # slime lets so many samples be in flight as its engines take; it has none here
    return Namespace(**{**vars(args), "custom_generate_function_path": path, "rollout_num_engines": len(block.engines),
                        "sglang_server_concurrency": block.per_engine})  # fmt: skip


def rollout_block(args: Namespace) -> Rollout:
    """The block of slime's arguments. Raises ConfigError when it names no engine."""
    block = read_block(getattr(args, "weight_sync", None)).rollout
    if not block.engines:
        raise ConfigError("no engine to ask", field="weight_sync.rollout.engines", found="none",
                          expected="addresses of sidecars", do="list them in the weight_sync block")  # fmt: skip
    return block


async def _train(host: str, args: Namespace, data_source: Any) -> Any:
    """Groups until the batch is full; what is still asked for then is dropped, as slime drops it."""
    rollout, filters = _part(host, "sglang_rollout"), _part(host, "filter_hub.base_types")
    state, metrics = rollout.GenerateState(args), filters.MetricGatherer()
    path, wanted = args.dynamic_sampling_filter_path, args.rollout_batch_size
    keeps = None if path is None else importlib.import_module(f"{host}.utils.misc").load_function(path)
    kept: list[Any] = []
    running: set[asyncio.Task[Any]] = set()
    try:
        while len(kept) < wanted:
            while len(kept) + len(running) < wanted:
                for group in data_source.get_samples(args.over_sampling_batch_size):
                    asked = rollout.generate_and_rm_group(args, group, sampling_params=state.sampling_params.copy())
                    running.add(asyncio.create_task(asked))
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                group = task.result()
                found = filters.call_dynamic_filter(keeps, args, group)
                remaining = len(kept) + len(running) + 1
                if filters.should_drop_dynamic_filter_output(
                    found, remaining_batch_size=remaining, target_data_size=wanted
                ):
                    metrics.on_dynamic_filter_drop(reason=found.reason)
                elif len(kept) < wanted:
                    kept.append(group)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    kept.sort(key=lambda group: _flat(group)[0].index)
    if args.rollout_sample_filter_path is not None:
        importlib.import_module(f"{host}.utils.misc").load_function(args.rollout_sample_filter_path)(args, kept)
    base = importlib.import_module(f"{host}.rollout.base_types")
    return base.RolloutFnTrainOutput(samples=kept, metrics={**metrics.collect(), **_counted(args, kept)})


def _flat(group: Any) -> list[Any]:
    """The samples of a group, in which one execution may have made several."""
    return [sample for item in group for sample in (item if isinstance(item, list) else [item])]


def _counted(args: Namespace, groups: Sequence[Any]) -> dict[str, float]:
    """For slime's log of a rollout."""
    client = shared_client(rollout_block(args))
    kept = [sample.metadata["weight_sync"] for group in groups for sample in _flat(group)
            if "weight_sync" in (sample.metadata or {})]  # fmt: skip
    if not kept:
        return {}  # a generate function of the user's own says nothing
    newest, oldest = client.newest(kept[0]["run_id"]), min(item["oldest"] for item in kept)
    return {"rollout/weight_sync/version_oldest": float(oldest),
            "rollout/weight_sync/version_newest": float(max(item["newest"] for item in kept)),
            "rollout/weight_sync/staleness_max": float(max(0, (oldest if newest is None else newest) - oldest)),
            "rollout/weight_sync/too_stale": float(client.counts["too_stale"])}  # fmt: skip


async def answered(args: Namespace, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """slime's custom generate function: one sample, answered by an engine elsewhere. Raises InputError, DeadlineError."""
    host, block = _host(), rollout_block(args)
    if any(value is not None for value in (sample.multimodal_inputs or {}).values()):
        raise InputError("engines elsewhere are asked by token ids alone", field="multimodal_inputs", found="given",
                         do="train vision models with engines of slime's own")  # fmt: skip
    state = _part(host, "sglang_rollout").GenerateState(args)
    prompt = list(sample.tokens) or state.tokenizer.encode(sample.prompt, add_special_tokens=False)
    found = await shared_client(block).ask(Prompt(prompt, sampling=sampling_of(block.flavour, sampling_params)))
    sample.tokens = list(prompt)
    text = state.tokenizer.decode(list(found.output_token_ids), skip_special_tokens=False)
    sample.append_response_tokens(
        args, tokens=list(found.output_token_ids), log_probs=list(found.output_logprobs), text=text,
        meta_info={"finish_reason": {"type": found.finish_reason}},
    )  # fmt: skip
    sample.weight_versions += _in_order(found)
    sample.metadata = {**(sample.metadata or {}), "weight_sync": versions_of(found)}
    return sample


def _in_order(found: trajectory_pb2.Trajectory) -> list[str]:
    """As slime keeps them: the label of each version that sampled some of the answer."""
    return [str(span.number) for span in found.spans]


def _host() -> str:
    """slime or miles, whichever calls. Raises ConfigError."""
    for name in ("slime", "miles"):
        if name in sys.modules:
            return name
    raise ConfigError("neither slime nor miles calls this", field="rollout_function_path",
                      do="run it as slime's --rollout-function-path")  # fmt: skip


def _part(host: str, name: str) -> Any:
    return importlib.import_module(f"{host}.rollout.{name}")
