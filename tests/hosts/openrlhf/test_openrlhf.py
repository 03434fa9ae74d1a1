"""Claims about OpenRLHF's real trainer with real vLLM engines on a CPU, run through weight_sync's launcher.

Runs in an environment of its own (scripts/requirements/openrlhf.txt). Every served tensor is compared, bit for bit, with
what DeepSpeed itself gathers after each step; the engines' side is read from the live parameters in vLLM's workers.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from remote_site import free_port, remote_site
from training import EXAMPLE, LORA, RATIO, agree, differing, inputs, numbers, published, store, train, versions

pytestmark = [
    pytest.mark.skipif(
        find_spec("openrlhf") is None or find_spec("vllm") is None, reason="OpenRLHF and vLLM are not here"
    ),
    pytest.mark.timeout(1200),
]

ASYNC = ("--train.async_enable", "--train.partial_rollout_enable")


@pytest.mark.parametrize(
    ("case", "ranks", "engines", "options"),
    [
        ("zero3", 2, 2, ("--ds.zero_stage", "3")),
        pytest.param("async", 1, 1, ("--ds.zero_stage", "2", *ASYNC), marks=pytest.mark.full),
        pytest.param("lora", 2, 1, ("--ds.zero_stage", "3", *LORA), marks=pytest.mark.full),
    ],
    ids=["zero3", "async", "lora"],
)
def test_engines_hold_the_trainers_bits_after_every_step(
    tmp_path: Path, case: str, ranks: int, engines: int, options: tuple[str, ...]
) -> None:
    log = train(tmp_path, "--actor.num_gpus_per_node", str(ranks), "--vllm.num_engines", str(engines),
                "--actor.adam.lr", "1e-5" if case == "zero3" else "1e-3", *options,
                uri=f"grpc://127.0.0.1:{free_port()}" if case == "async" else None)  # fmt: skip
    agree(tmp_path / "seen", engines, [1, 2, 3, 4])
    assert numbers(log, "weight_sync/failed") == [0.0] * 3, "a step logs the sync before it"
    gathered = numbers(log, "weight_sync/tensors_gathered")
    assert set(gathered) == ({6.0} if case == "lora" else {0.0})
    assert numbers(log, "weight_sync/engines_behind") == [0.0] * 3
    contract = versions(tmp_path)[4].contract
    assert (contract.engine, contract.engine_version) == ("openrlhf", "0.11.2")
    assert contract.data_parallel == ranks and contract.kernel_versions["deepspeed"]


RESUME = ("--ckpt.load_enable", "--train.num_episodes", "2")


def test_a_resumed_trainer_goes_on_in_its_run_and_learns_from_engines_elsewhere(tmp_path: Path) -> None:
    base = inputs(tmp_path) / "tiny"
    untrained = -math.log(128)  # of a word; anything else would be masked by OpenRLHF's correction
    port = free_port()
    with remote_site(tmp_path / "site", f"grpc://127.0.0.1:{port}", base, likely=untrained) as site:
        uri = f"grpc://0.0.0.0:{port}"
        options = ("--actor.num_gpus_per_node", "1", "--vllm.num_engines", "1", "--ds.zero_stage", "2", *RATIO,
                   "--actor.adam.lr", "1e-4", "--ckpt.save_steps", "4", "--weight_sync.rollout.engines", f"[{site.url}]",
                   "--weight_sync.rollout.max_staleness", "1", "--weight_sync.insecure")  # fmt: skip
        first = train(tmp_path, *options, uri=uri)
        before, asked = versions(tmp_path), len(site.asked)
        assert max(map(abs, numbers(first, "vllm_kl"))) < 1 and numbers(first, "actor_grad_norm")[0] > 0
        assert sorted(before) == [1, 2, 3, 4] and published(tmp_path, "seen", 4, before[4].number)
        assert asked >= 4 * 4 * 2, "steps, prompts of a step, samples of a prompt"
        oldest = numbers(first, "rollout_version_oldest")
        assert oldest == sorted(oldest) and oldest[-1] >= 2, oldest
        assert max(numbers(first, "rollout_staleness")) <= 1
        again = train(tmp_path, *options, *RESUME, seen="resumed", uri=uri)
        assert "resumed at version 4" in again, "the run's head is recognised, nothing is sent twice"
        after = versions(tmp_path)
        assert {step: after[step] for step in before} == before
        assert sorted(after) == list(range(1, 9)) and published(tmp_path, "resumed", 4, after[8].number)
        assert len({entry.run_id for entry in after.values()}) == 1 and after[8].epoch > before[4].epoch
        assert len(site.asked) >= asked + 4 * 4 * 2
        assert max(numbers(again, "rollout_staleness")) <= 1
        newest = numbers(again, "rollout_version_newest")
        assert newest[-1] >= after[6].number, "the server went away and came back, and the site with it"
        serve = [Path(sys.executable).with_name("weight-sync"), "serve", "--store", store(tmp_path), "--listen",
                 f"127.0.0.1:{port}"]  # fmt: skip
        with subprocess.Popen(serve, stdout=subprocess.DEVNULL) as server:  # the trainer has ended, its history stays
            site.reached(after[8].number)
            server.terminate()


@pytest.mark.full
def test_engines_that_start_anew_are_brought_to_the_head_before_they_answer(tmp_path: Path) -> None:
    """Both runs have engines of their own, which boot from the checkpoint that training began with."""
    options = ("--actor.num_gpus_per_node", "1", "--vllm.num_engines", "1", "--ds.zero_stage", "2",
               "--actor.adam.lr", "1e-4", "--ckpt.save_steps", "4")  # fmt: skip
    train(tmp_path, *options)
    train(tmp_path, *options, *RESUME, seen="resumed")
    numbered = versions(tmp_path)
    [anew] = {re.sub(r"-\d+\.safetensors$", "", path.name) for path in (tmp_path / "resumed").glob("engine-*")}
    assert differing(tmp_path / "seen" / "trainer-4.safetensors", tmp_path / "resumed" / f"{anew}-4.safetensors") == []
    agree(tmp_path / "resumed", 1, [numbered[step].number for step in range(5, 9)])


@pytest.mark.full
def test_a_skipped_sync_fails_the_engines_own_check_which_every_other_run_passes(tmp_path: Path) -> None:
    options = ("--actor.num_gpus_per_node", "1", "--vllm.num_engines", "1", "--ds.zero_stage", "2",
               "--actor.adam.lr", "1e-2", *RATIO)  # fmt: skip
    (tmp_path / "on").mkdir()
    (tmp_path / "off").mkdir()
    served = numbers(train(tmp_path / "on", *options), "vllm_kl")
    missed = numbers(train(tmp_path / "off", *options, WEIGHT_SYNC_TEST_SKIP="2"), "vllm_kl")
    assert len(served) == len(missed) == 4
    assert max(map(abs, served)) < 0.01, served
    assert max(map(abs, missed)) > 5 * max(map(abs, served)), (served, missed)


def test_every_hook_point_is_where_the_adapter_expects_it() -> None:
    environment: dict[str, Any] = {**os.environ, "PYTHONPATH": str(EXAMPLE / "stubs"), "DS_ACCELERATOR": "cpu"}
    done = subprocess.run([Path(sys.executable).with_name("weight-sync"), "doctor", "openrlhf"], env=environment,
                          capture_output=True, text=True, timeout=300)  # fmt: skip
    assert done.returncode == 0 and "OFF" not in done.stdout, done.stdout + done.stderr[-2000:]
