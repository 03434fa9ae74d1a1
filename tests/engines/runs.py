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
from weight_sync.adapters.engines.worker.remote import RemoteEngine
from weight_sync.checkpoint import Checkpoint
from weight_sync.config import Config, load
from weight_sync.registry import find

HERE = Path(__file__).resolve().parent


@dataclass
class Run:
    """A store with versions of one model, each also as a whole checkpoint; version 0 is the base."""

    store: Path
    checkpoints: list[Path] = field(default_factory=list)

    def config(self, **keys: Any) -> Config:
        values = {"uri": str(self.store), "threads": 2, "timeout_s": 120, "fence_s": 60, "lease_ttl_s": 60}
        return load({**values, "cache_dir": str(self.store.parent / "cache"), **keys})


class Trainer:
    """Publishes versions of one model as they are asked for. A context manager."""

    def __init__(self, folder: Path, kind: str, seed: int = 0) -> None:
        self._folder = folder
        self.run = Run(folder / "store", [models.make(folder / "v0", kind, seed)])
        self._publisher = weight_sync.Publisher.open(str(self.run.store), base=str(self.run.checkpoints[0]))

    @property
    def head(self) -> int:
        """Number of the newest version."""
        return len(self.run.checkpoints) - 1

    def publish(self, special: bool = False) -> int:
        """The next version; its number. ``special``: with a NaN and a negative zero."""
        number = self.head + 1
        path = models.stepped(self.run.checkpoints[-1], self._folder / f"v{number}", number, special=special)
        self.run.checkpoints.append(path)
        assert self._publisher.publish(load_file(path / "model.safetensors")).version == number
        return number

    def digest(self, number: int) -> str:
        """Of a whole checkpoint."""
        return Checkpoint(self.run.checkpoints[number]).digest().hex()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self._publisher.close()


def publish(folder: Path, kind: str, steps: int, seed: int = 0) -> Run:
    """Versions 1 to ``steps`` by the real publisher; the last one holds a NaN and a negative zero."""
    with Trainer(folder, kind, seed) as trainer:
        for number in range(1, steps + 1):
            trainer.publish(special=number == steps and kind != "llama-tied")
        return trainer.run


def follow_apart(run: Run, server: Server, version: int, *keys: str, **variables: str) -> subprocess.Popen[str]:
    """A driver in a process of its own, that may die anywhere."""
    command = [sys.executable, str(HERE / "driver.py"), server.kind, str(run.store), server.url, str(version), *keys]
    return subprocess.Popen(command, env={**os.environ, **variables}, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, cwd=run.store.parent)  # fmt: skip


def engine_of(run: Run, server: Server, **keys: Any) -> RemoteEngine:
    engine: RemoteEngine = find("engines", server.kind)(server.url, run.config(**keys))
    return engine
