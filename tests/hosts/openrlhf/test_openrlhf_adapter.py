"""Claims about OpenRLHF's real trainer that publishes its LoRA adapter alone, to a real vLLM elsewhere.

Runs in an environment of its own (scripts/requirements/openrlhf.txt).
"""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from servers import Server
from sidecars import Sidecar
from training import LORA, RATIO, inputs, numbers, store, train, versions

pytestmark = [
    pytest.mark.skipif(
        find_spec("openrlhf") is None or find_spec("vllm") is None, reason="OpenRLHF and vLLM are not here"
    ),
    pytest.mark.timeout(1500),
    pytest.mark.full,
]

NAME = "tutor"


def weight_sync(*words: object) -> None:
    command = [str(Path(sys.executable).with_name("weight-sync")), *map(str, words)]
    subprocess.run(command, check=True, timeout=300, stdout=subprocess.DEVNULL)


def merged(base: Path, run: str, number: int, out: Path) -> dict[str, Any]:
    """A version of the adapter, merged into its base by PEFT."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    weight_sync("materialize", run, "--version", number, "--out", out)
    model = AutoModelForCausalLM.from_pretrained(base, dtype="bfloat16")
    return dict(PeftModel.from_pretrained(model, out).merge_and_unload().named_parameters())


def test_the_adapter_alone_is_served_elsewhere_and_passes_the_trainers_own_check(tmp_path: Path) -> None:
    """vllm_kl compares the logprobs of each answer with the trainer's: both have the same adapter, unmerged.

    One rank: on gloo, DeepSpeed's forward pass does not wait for all parts of small parameters that two ranks share, and a
    busy machine then trains on what is not there yet.
    """
    import torch
    from safetensors.torch import load_file

    base = inputs(tmp_path) / "tiny"
    weight_sync("publish", base, "--to", tmp_path / "base")
    served = ("--enable-lora", "--max-lora-rank", "8", "--max-model-len", "128")
    follows = ("--adapter", f"{NAME}={tmp_path / 'run'}", "--set", f"cache_dir={tmp_path / 'cache'}")
    with (
        TemporaryDirectory() as sockets,
        Server(base, tmp_path / "site", *served, VLLM_ALLOW_RUNTIME_LORA_UPDATING="1",
               WEIGHT_SYNC_RUNTIME_DIR=sockets) as server,
        Sidecar(tmp_path / "base", server.ready(), *follows, WEIGHT_SYNC_RUNTIME_DIR=sockets) as sidecar,
    ):  # fmt: skip
        sidecar.ready(0)
        log = train(
            tmp_path, *LORA, *RATIO, "--actor.num_gpus_per_node", "1", "--vllm.num_engines", "1", "--ds.zero_stage",
            "3", "--actor.adam.lr", "1e-2", "--weight_sync.lora", "adapter", "--weight_sync.rollout.model", NAME,
            "--weight_sync.rollout.engines", f"[http://127.0.0.1:{sidecar.port}]", "--weight_sync.rollout.max_staleness",
            "0",
        )  # fmt: skip
        assert sidecar.status["adapters"][NAME]["errors"] == 0, sidecar.status
    numbered = versions(tmp_path)
    assert sorted(numbered) == [0, 1, 2, 3, 4], "what training starts from, and each step"
    assert numbers(log, "weight_sync/failed") == [0.0] * 3
    assert numbers(log, "rollout_version_newest") == numbers(log, "rollout_version_oldest") == [0.0, 1.0, 2.0, 3.0]
    assert max(map(abs, numbers(log, "vllm_kl"))) < 0.01, numbers(log, "vllm_kl")
    for step in range(1, 5):
        held = merged(base, store(tmp_path), numbered[step].number, tmp_path / f"a{step}")
        trained = load_file(tmp_path / "seen" / f"trainer-{step}.safetensors")
        assert all(torch.equal(tensor, held[name].detach()) for name, tensor in trained.items()), step
