"""Runs of OpenRLHF's real trainer on a CPU, through weight_sync's launcher, and what is found in their folders.

Owns the command line, its witnesses' files and the reading of both. Owns no claim.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from weight_sync import Replica
from weight_sync.config import load
from weight_sync.proto.v1 import manifest_pb2
from weight_sync.registry import open_transport
from weight_sync.testing import MemoryEngine

HERE = Path(__file__).resolve().parent
EXAMPLE = HERE.parents[2] / "examples" / "openrlhf"
LORA = ("--ds.lora.rank", "8", "--ds.lora.alpha", "16", "--ds.lora.target_modules", "q_proj", "v_proj", "down_proj")
RATIO = ("--algo.advantage.is_correction_level", "token")


def inputs(folder: Path) -> Path:
    """The folder with a tiny model, its prompts and a reward; the model is in folder/tiny."""
    if not (folder / "tiny").exists():
        subprocess.run([sys.executable, EXAMPLE / "tiny.py", folder, "tied"], check=True, timeout=300)
    return folder


def train(folder: Path, *options: str, seen: str = "seen", uri: str | None = None, **environment: str) -> str:
    """What the run printed; the folder gets witnesses of trainer and engines. ``uri``: of the run, a folder by default."""
    inputs(folder)
    out = folder / seen
    out.mkdir(exist_ok=True)
    watched = {"WEIGHT_SYNC_TEST_OUT": str(out), "WEIGHT_SYNC_HOOK": "witness.apply", "PYTHONPATH": str(HERE)}
    done = subprocess.run(
        [sys.executable, EXAMPLE / "train.py", folder, "--weight_sync.uri", uri or (folder / "run").as_uri(),
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


def store(folder: Path) -> str:
    """Where the run is: in the folder itself, or where OpenRLHF keeps its checkpoints when the trainer serves it."""
    return str(folder / "run" if (folder / "run").exists() else folder / "ckpt" / "weight_sync")


def versions(folder: Path) -> dict[int, manifest_pb2.VersionManifest]:
    """By the trainer's step."""
    end = open_transport(load({"uri": store(folder)})).replica_end(None)
    kinds = (manifest_pb2.ENTRY_KIND_ANCHOR, manifest_pb2.ENTRY_KIND_PATCH)
    found = {entry.step: entry for entry in end.entries() if entry.kind in kinds and entry.HasField("step")}
    end.close()
    return found


def served(folder: Path, number: int) -> dict[str, Any]:
    """What a replica that joins now would serve: bits of 2-byte elements by name."""
    engine = MemoryEngine({})
    with Replica.open(store(folder), engine) as replica:
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
