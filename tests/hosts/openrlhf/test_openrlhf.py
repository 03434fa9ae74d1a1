"""Claims about OpenRLHF's real trainer with real vLLM engines on a CPU, run through weight_sync's launcher.

Runs in an environment of its own (scripts/requirements/openrlhf.txt). Every served tensor is compared, bit for bit, with
what DeepSpeed itself gathers after each step; the engines' side is read from the live parameters in vLLM's workers.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

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


def train(folder: Path, *options: str, **environment: str) -> str:
    """What the run printed; the folder gets witnesses of trainer and engines."""
    if not (folder / "tiny").exists():
        subprocess.run([sys.executable, EXAMPLE / "tiny.py", folder, "tied"], check=True, timeout=300)
    out = folder / "seen"
    out.mkdir(exist_ok=True)
    watched = {"WEIGHT_SYNC_TEST_OUT": str(out), "WEIGHT_SYNC_HOOK": "witness.apply", "PYTHONPATH": str(HERE)}
    done = subprocess.run(
        [sys.executable, EXAMPLE / "train.py", folder, "--weight_sync.uri", (folder / "run").as_uri(),
         "--weight_sync.threads", "1", *options],
        cwd=folder, env={**os.environ, **watched, **environment},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1000,
    )  # fmt: skip
    (folder / "log").write_text(done.stdout)
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


def agree(folder: Path, engines: int, steps: int) -> None:
    """Every engine held the trainer's bits after every step."""
    out = folder / "seen"
    names = {re.sub(r"-\d+\.safetensors$", "", path.name) for path in out.glob("engine-*.safetensors")}
    assert len(names) == engines
    for step in range(1, steps + 1):
        for name in names:
            assert differing(out / f"trainer-{step}.safetensors", out / f"{name}-{step}.safetensors") == []


def numbers(log: str, key: str) -> list[float]:
    """A metric as OpenRLHF logged it, step by step."""
    lines = [line for line in log.splitlines() if "Global step" in line]
    return [
        float(found.group(1)) for line in lines if (found := re.search(rf"'{re.escape(key)}': (-?[\d.e+-]+)", line))
    ]


@pytest.mark.full
@pytest.mark.parametrize(
    ("case", "ranks", "engines", "options"),
    [
        ("zero3", 2, 2, ("--ds.zero_stage", "3")),
        ("async", 1, 1, ("--ds.zero_stage", "2", *ASYNC)),
        ("lora", 2, 1, ("--ds.zero_stage", "3", *LORA)),
    ],
)
def test_engines_hold_the_trainers_bits_after_every_step(
    tmp_path: Path, case: str, ranks: int, engines: int, options: tuple[str, ...]
) -> None:
    log = train(tmp_path, "--actor.num_gpus_per_node", str(ranks), "--vllm.num_engines", str(engines),
                "--actor.adam.lr", "1e-5" if case == "zero3" else "1e-3", *options)  # fmt: skip
    agree(tmp_path, engines, 4)
    assert numbers(log, "weight_sync/failed") == [0.0] * 3, "a step logs the sync before it"
    gathered = numbers(log, "weight_sync/tensors_gathered")
    assert set(gathered) == ({6.0} if case == "lora" else {0.0})
    assert numbers(log, "weight_sync/engines_behind") == [0.0] * 3


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
