"""Stores with versions of tiny models, and who drives a server along them.

Owns no claim and no server.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import models
from safetensors.torch import load_file
from servers import Server

import weight_sync
from weight_sync.adapters.engines.vllm.engine import VllmEngine
from weight_sync.config import Config, load

HERE = Path(__file__).resolve().parent


@dataclass
class Run:
    """A store with versions of one model, each also as a whole checkpoint; version 0 is the base."""

    store: Path
    checkpoints: list[Path] = field(default_factory=list)

    def config(self, **keys: Any) -> Config:
        values = {"uri": str(self.store), "threads": 2, "timeout_s": 120, "fence_s": 60, "lease_ttl_s": 60}
        return load({**values, "cache_dir": str(self.store.parent / "cache"), **keys})


def publish(folder: Path, kind: str, steps: int) -> Run:
    """Versions 1 to ``steps`` by the real publisher; the last one holds a NaN and a negative zero."""
    run = Run(folder / "store", [models.make(folder / "v0", kind)])
    with weight_sync.Publisher.open(str(run.store), base=str(run.checkpoints[0])) as publisher:
        for number in range(1, steps + 1):
            path = models.stepped(
                run.checkpoints[-1], folder / f"v{number}", number, special=number == steps and kind != "llama-tied"
            )
            assert publisher.publish(load_file(path / "model.safetensors")).version == number
            run.checkpoints.append(path)
    return run


def follow_apart(run: Run, server: Server, version: int, *keys: str, **variables: str) -> subprocess.Popen[str]:
    """A driver in a process of its own, that may die anywhere."""
    command = [sys.executable, str(HERE / "driver.py"), str(run.store), server.url, str(version), *keys]
    return subprocess.Popen(command, env={**os.environ, **variables}, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, cwd=run.store.parent)  # fmt: skip


def engine_of(run: Run, server: Server, **keys: Any) -> VllmEngine:
    return VllmEngine(server.url, run.config(**keys))
