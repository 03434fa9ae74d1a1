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
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from remote_site import remote_site

from weight_sync import Replica
from weight_sync.config import load
from weight_sync.proto.v1 import manifest_pb2
from weight_sync.registry import open_transport
from weight_sync.testing import MemoryEngine

pytestmark = [
    pytest.mark.skipif(
        find_spec("openrlhf") is None or find_spec("vllm") is None, reason="OpenRLHF and vLLM are not here"
    ),
    pytest.mark.timeout(1200),
]

HERE = Path(__file__).resolve().parent
EXAMPLE = HERE.parents[2] / "examples" / "openrlhf"
ASYNC = ("--train.async_enable", "--train.partial_rollout_enable")
LORA = ("--ds.lora.rank", "8", "--ds.lora.alpha", "16", "--ds.lora.target_modules", "q_proj", "v_proj", "down_proj")
RATIO = ("--algo.advantage.is_correction_level", "token")


def inputs(folder: Path) -> Path:
    """The folder with a tiny model, its prompts and a reward; the model is in folder/tiny."""
    if not (folder / "tiny").exists():
        subprocess.run([sys.executable, EXAMPLE / "tiny.py", folder, "tied"], check=True, timeout=300)
    return folder


def train(folder: Path, *options: str, seen: str = "seen", **environment: str) -> str:
    """What the run printed; the folder gets witnesses of trainer and engines."""
    inputs(folder)
    out = folder / seen
    out.mkdir(exist_ok=True)
    watched = {"WEIGHT_SYNC_TEST_OUT": str(out), "WEIGHT_SYNC_HOOK": "witness.apply", "PYTHONPATH": str(HERE)}
    done = subprocess.run(
        [sys.executable, EXAMPLE / "train.py", folder, "--weight_sync.uri", (folder / "run").as_uri(),
         "--weight_sync.threads", "1", *options],
        cwd=folder, env={**os.environ, **watched, **environment},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1000,
    )  # fmt: skip
    (folder / f"log-{seen}").write_text(done.stdout)
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def differing(trainer: Path, engine: Path) -> list[str]:
    """Names of tensors whose bits differ; all of the trainer's must be in the engine."""
    import torch
    from safetensors.torch import load_file

    own, held = load_file(trainer), load_file(engine)
    assert set(own) <= set(held), sorted(set(own) - set(held))
    return [
        name for name, tensor in own.items() if not torch.equal(tensor.view(torch.int16), held[name].view(torch.int16))
    ]


def agree(out: Path, engines: int, versions: Sequence[int]) -> None:
    """Every engine held the trainer's bits after every step, whose versions these are."""
    names = {re.sub(r"-\d+\.safetensors$", "", path.name) for path in out.glob("engine-*.safetensors")}
    assert len(names) == engines
    for step, version in enumerate(versions, start=1):
        for name in names:
            assert differing(out / f"trainer-{step}.safetensors", out / f"{name}-{version}.safetensors") == []


def numbers(log: str, key: str) -> list[float]:
    """A metric as OpenRLHF logged it, step by step."""
    lines = [line for line in log.splitlines() if "Global step" in line]
    return [
        float(found.group(1)) for line in lines if (found := re.search(rf"'{re.escape(key)}': (-?[\d.e+-]+)", line))
    ]


def versions(folder: Path) -> dict[int, manifest_pb2.VersionManifest]:
    """By the trainer's step."""
    end = open_transport(load({"uri": str(folder / "run")})).replica_end(None)
    kinds = (manifest_pb2.ENTRY_KIND_ANCHOR, manifest_pb2.ENTRY_KIND_PATCH)
    found = {entry.step: entry for entry in end.entries() if entry.kind in kinds and entry.HasField("step")}
    end.close()
    return found


def served(folder: Path, number: int) -> dict[str, Any]:
    """What a replica that joins now would serve: bits of 2-byte elements by name."""
    engine = MemoryEngine({})
    with Replica.open(str(folder / "run"), engine) as replica:
        replica.sync(exact=number, timeout=60)
    return {name: bits for name, (_, bits) in engine.table.items()}


def published(folder: Path, seen: str, step: int, number: int) -> bool:
    """Whether a version is what the trainer held after a step of that run."""
    import torch
    from safetensors.torch import load_file

    held = served(folder, number)
    trained = load_file(folder / seen / f"trainer-{step}.safetensors")
    return trained.keys() == held.keys() and all(
        np.array_equal(held[name], tensor.reshape(-1).view(torch.int16).numpy().view("u2"))
        for name, tensor in trained.items()
    )


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
                "--actor.adam.lr", "1e-5" if case == "zero3" else "1e-3", *options)  # fmt: skip
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
    with remote_site(tmp_path / "site", str(tmp_path / "run"), base, likely=untrained) as site:
        options = ("--actor.num_gpus_per_node", "1", "--vllm.num_engines", "1", "--ds.zero_stage", "2", *RATIO,
                   "--actor.adam.lr", "1e-4", "--ckpt.save_steps", "4", "--weight_sync.rollout.engines", f"[{site.url}]",
                   "--weight_sync.rollout.max_staleness", "1")  # fmt: skip
        first = train(tmp_path, *options)
        before, asked = versions(tmp_path), len(site.asked)
        assert max(map(abs, numbers(first, "vllm_kl"))) < 1 and numbers(first, "actor_grad_norm")[0] > 0
        assert sorted(before) == [1, 2, 3, 4] and published(tmp_path, "seen", 4, before[4].number)
        assert asked >= 4 * 4 * 2, "steps, prompts of a step, samples of a prompt"
        oldest = numbers(first, "rollout_version_oldest")
        assert oldest == sorted(oldest) and oldest[-1] >= 2, oldest
        assert max(numbers(first, "rollout_staleness")) <= 1
        again = train(tmp_path, *options, *RESUME, seen="resumed")
        assert "resumed at version 4" in again, "the run's head is recognised, nothing is sent twice"
        after = versions(tmp_path)
        assert {step: after[step] for step in before} == before
        assert sorted(after) == list(range(1, 9)) and published(tmp_path, "resumed", 4, after[8].number)
        assert len({entry.run_id for entry in after.values()}) == 1 and after[8].epoch > before[4].epoch
        assert len(site.asked) >= asked + 4 * 4 * 2
        site.reached(after[8].number)


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
