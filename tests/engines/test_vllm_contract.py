"""Claims about a real vLLM beside a trainer on transformers: its contract, and how far its numbers are from the trainer's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers
from runs import Run, engine_of, publish
from servers import TEXT, Server

import weight_sync
from weight_sync.adapters.engines.scoring import VersionScorer
from weight_sync.adapters.engines.transformers import TransformersEngine
from weight_sync.contract import Cause, MismatchMonitor, contract_id, decide, terms_of
from weight_sync.contract.terms import Action
from weight_sync.proto.v1 import contract_pb2, trajectory_pb2

IN_PLACE = ("--additional-config", '{"weight_sync": {"in_place": true}}')
LAST = 2
pytestmark = pytest.mark.timeout(2400)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return publish(tmp_path_factory.mktemp("qwen3"), "qwen3", LAST)


@pytest.fixture(scope="module")
def server(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(run.checkpoints[0], tmp_path_factory.mktemp("server"), *IN_PLACE) as started:
        yield started.ready()


@pytest.fixture(scope="module")
def contract(run: Run, server: Server) -> contract_pb2.ExecutionContract:
    engine = engine_of(run, server)
    found = engine.describe().contract
    engine.close()
    return found


def test_its_contract_says_what_it_runs_with(contract: contract_pb2.ExecutionContract) -> None:
    assert (contract.engine, contract.compute_dtype, contract.served_format) == ("vllm", "bfloat16", "bfloat16")
    assert (contract.tensor_parallel, contract.pipeline_parallel, contract.data_parallel) == (1, 1, 1)
    assert contract.attention_backend and contract.engine_version and contract.kernel_versions["torch"]
    assert contract.sampling["logprobs_mode"] == "raw_logprobs"
    assert contract.HasField("batch_invariant") and not contract.batch_invariant
    assert contract.id == contract_id(contract)
    assert decide(terms_of("deterministic", "strict", {}, None), contract).action is Action.REFUSE


@pytest.mark.full
def test_the_profile_reaches_vllm_and_is_not_claimed_where_it_does_nothing(tmp_path: Path) -> None:
    code = (
        "from vllm.plugins import load_general_plugins; load_general_plugins(); from vllm import envs; "
        "print(envs.VLLM_BATCH_INVARIANT)"
    )
    for profile, expected in (("native", "False"), ("deterministic", "True")):
        found = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "WEIGHT_SYNC_PROFILE": profile}, text=True,
            stdout=subprocess.PIPE, timeout=600, check=True, cwd=tmp_path,
        )  # fmt: skip
        assert found.stdout.split()[-1] == expected


def test_native_numbers_are_near_the_trainers_and_a_version_behind_is_told(
    run: Run, server: Server, contract: contract_pb2.ExecutionContract
) -> None:
    base = run.checkpoints[0]
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype="bfloat16")
    keys = run.config()
    engine = engine_of(run, server)
    with (
        weight_sync.Replica.open(keys, engine, replica_id="vllm") as rollout,
        weight_sync.Replica.open(keys, TransformersEngine(model, base), replica_id="trainer") as trainer,
    ):
        rollout.sync(exact=1)
        asked = [server.post("/tokenize", {"model": "tiny", "prompt": TEXT[: 40 * k]})["tokens"] for k in (1, 2, 3)]
        batch = [_trajectory(prompt, server.generate(prompt, 24), 1, contract.id) for prompt in asked]
        score = VersionScorer(trainer)
        monitor = MismatchMonitor(bound=0.05)
        report = monitor.observe(batch, score(1, batch), 1, score)
        (finding,) = report.findings
        assert finding.cause is Cause.AGREES and finding.own is not None
        print(f"transformers against vLLM: mean {finding.own.mean:.4f}, max {finding.own.max:.4f}")
        assert 0 < finding.own.mean < 0.05
        stated = monitor.observe(batch, score(LAST, batch), LAST, score).findings[0]
        assert stated.cause is Cause.STALE and stated.own is not None and stated.own.mean < stated.total.mean
    engine.close()


def _trajectory(prompt: list[int], answer: dict[str, Any], version: int, contract: str) -> trajectory_pb2.Trajectory:
    tokens = list(answer["token_ids"])
    return trajectory_pb2.Trajectory(
        id=f"t{len(prompt)}-{version}", run_id="r", engine_id="vllm", contract_id=contract, prompt_token_ids=prompt,
        output_token_ids=tokens, output_logprobs=[item["logprob"] for item in answer["logprobs"]["content"]],
        spans=[trajectory_pb2.VersionSpan(number=version, begin=0, end=len(tokens))],
    )  # fmt: skip
