"""Claims about what hosts share to have prompts answered by engines elsewhere; real hosts are in tests/hosts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_rollout_client import Engine

from weight_sync.adapters.trainers.modes import AGENT_LOOPS, remote_loops
from weight_sync.adapters.trainers.remote import open_client, sampling_of, shared_client, versions_of
from weight_sync.blocks import Rollout
from weight_sync.config import load
from weight_sync.errors import ConfigError
from weight_sync.proto.v1 import trajectory_pb2


def block(**keys: Any) -> Rollout:
    return load({"uri": "/x", "rollout": {"engines": ["http://a:1"], **keys}}).rollout


def test_the_client_is_what_the_block_says_and_one_per_block_in_a_process(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    told = block(engines=["http://a:1", "http://b:1"], flavour="vllm", max_staleness=0, per_engine=3, request_s=1,
                 deadline_s=2, token_file=str(tmp_path / "token"), model="m")  # fmt: skip
    client = open_client(told, lambda: 4)
    assert (client.concurrency, client.per_engine, client.request_s, client.deadline_s) == (6, 3, 1.0, 2.0)
    assert (client.token, client.model, client.wanted.max_staleness, client.newest("any")) == ("secret", "m", 0, 4)
    assert shared_client(block()) is shared_client(block()) is not shared_client(block(per_engine=1))


@pytest.mark.parametrize(("keys", "words"), [
    ({"engines": []}, "weight_sync.rollout.engines"), ({"flavour": "vlm"}, "completions, vllm, sglang"),
    ({"token_file": "/nowhere"}, "token_file"),
])  # fmt: skip
def test_a_block_that_nobody_can_be_asked_by_says_why(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        open_client(block(**keys))


@given(st.sampled_from(["completions", "vllm", "sglang"]), st.dictionaries(
    st.sampled_from(["max_new_tokens", "min_tokens", "temperature", "top_k", "no_stop_trim", "logprobs", "n", "seed"]),
    st.one_of(st.none(), st.integers(0, 9))))  # fmt: skip
def test_sampling_keeps_what_is_given_under_the_apis_own_names(flavour: str, given: dict[str, Any]) -> None:
    found = sampling_of(flavour, given)
    renamed = {"max_new_tokens": "max_tokens"}
    if flavour == "sglang":
        renamed |= {"min_tokens": "min_new_tokens", "seed": "sampling_seed"}
    dropped = {"logprobs", "n"} | (set() if flavour == "sglang" else {"no_stop_trim"})
    wanted = {renamed.get(k, k): v for k, v in given.items() if v is not None and k not in dropped}
    assert found == wanted


def test_versions_are_plain_values_with_the_oldest_and_the_newest() -> None:
    spans = [trajectory_pb2.VersionSpan(number=n, begin=n, end=n + 1) for n in (0, 1, 2)]
    told = versions_of(trajectory_pb2.Trajectory(run_id="r", spans=spans, engine_id="e"))
    assert told == {"run_id": "r", "oldest": 0, "newest": 2, "spans": [[0, 0, 1], [1, 1, 2], [2, 2, 3]], "engine": "e"}


def job(engines: list[str], default: str, path: str | None) -> Any:
    agent = {"default_agent_loop": default, "agent_loop_config_path": path}
    return SimpleNamespace(
        weight_sync=SimpleNamespace(rollout=SimpleNamespace(engines=engines)),
        actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(agent=agent)),
    )


@pytest.mark.parametrize(("engines", "default", "path", "loop", "words"), [
    ([], "single_turn_agent", None, None, ""), (["a"], "single_turn_agent", None, "weight_sync", ""),
    (["a"], "tool_agent", None, "weight_sync_tools", ""), (["a"], "weight_sync", None, "weight_sync", ""),
    (["a"], "mine", None, None, "'mine'"), (["a"], "tool_agent", "/own.yaml", None, "agent_loop_config_path is set"),
    (["a"], "weight_sync_tools", "/own.yaml", None, ""),
])  # fmt: skip
def test_a_job_of_verl_with_engines_elsewhere_takes_our_loops(
    engines: list[str], default: str, path: str | None, loop: str | None, words: str
) -> None:
    changes, reason = remote_loops(job(engines, default, path))
    assert changes.get("default_agent_loop") == loop
    assert words in reason and bool(reason) == bool(words)
    if loop is not None:
        text = Path(changes["agent_loop_config_path"]).read_text()
        assert all(f"name: {name}\n" in text for name in AGENT_LOOPS.values())


# --- OpenRLHF's executors ---


class Tokenizer:
    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return " ".join(map(str, tokens))


class TwoTurns:
    """An executor that asks twice, as OpenRLHF's multi-turn one does."""

    async def execute(
        self, prompt: list[int], sampling_params: Any, hf_tokenizer: Any, llm_engine: Any
    ) -> dict[str, Any]:
        first = (await llm_engine.generate(prompt, sampling_params)).outputs[0]
        second = (await llm_engine.generate([*prompt, *first.token_ids], sampling_params)).outputs[0]
        likely = [step[token].logprob for step, token in zip(second.logprobs, second.token_ids, strict=True)]
        return {"tokens": second.token_ids, "text": second.text, "likely": likely, "extra_logs": {"mine": 1.0}}


def test_an_executor_of_openrlhf_gets_answers_from_elsewhere_and_their_versions_into_its_logs() -> None:
    from weight_sync.adapters.trainers.openrlhf.remote import NoEngine, RemoteExecutor

    engine = Engine().ready()
    try:
        engine.set(reset=5)
        executor = RemoteExecutor(TwoTurns(), block(engines=[engine.url], deadline_s=30), lambda: 7)
        sampling = SimpleNamespace(temperature=0.5, max_tokens=3, stop=[], skip_special_tokens=False, logprobs=1)

        async def both() -> list[dict[str, Any]]:
            try:
                return await asyncio.gather(*(
                    executor.execute(prompt=[k], sampling_params=sampling, hf_tokenizer=Tokenizer(), llm_engine=None)
                    for k in (3, 4)
                ))  # fmt: skip
            finally:
                await executor.client.aclose()

        responses = asyncio.run(both())
        bodies = [asked["body"] for asked in engine.set()]
        assert NoEngine(executor.client).output_processor.get_num_unfinished_requests() == 0
    finally:
        engine.close()
    logs = {"mine": 1.0, "rollout_version_oldest": 5.0, "rollout_version_newest": 5.0, "rollout_staleness": 2.0}
    for k, response in zip((3, 4), responses, strict=True):
        assert response == {"tokens": [5, k, 7], "text": f"5 {k} 7", "likely": [-0.25, -0.5, -1.0], "extra_logs": logs}
    assert all(body["temperature"] == 0.5 and body["max_tokens"] == 3 and "stop" not in body for body in bodies)
    assert sorted(body["prompt"] for body in bodies) == [[3], [3, 5, 3, 7], [4], [4, 5, 4, 7]]
