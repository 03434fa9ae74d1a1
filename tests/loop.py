"""What the end-to-end tests share: a small model whose state at each step is known, and processes that can be killed.

States are functions of the step alone, so that every process, restarted or not, can tell what bits should be where.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from weight_sync import Publisher, Replica
from weight_sync.codec.digest import state_digest
from weight_sync.config import Config
from weight_sync.served import bits_of
from weight_sync.tensors import TensorSpec
from weight_sync.testing import MemoryEngine
from weight_sync.transport.file import FileReplicaEnd, FileTransport

SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "model.embed.weight": ((64, 24), torch.bfloat16),
    "model.layers.0.mlp/../☃": ((40, 17), torch.float16),
    "lm_head": ((129,), torch.float32),
    "norm": ((24,), torch.bfloat16),
    "steps": ((3,), torch.int64),
    "flags": ((9,), torch.bool),
    "scalar": ((), torch.bfloat16),
    "empty": ((0, 5), torch.bfloat16),
}


@cache
def _base() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {
        name: torch.randn(shape, generator=generator).mul(0.02).to(dtype) for name, (shape, dtype) in SHAPES.items()
    }


def model(step: int) -> dict[str, torch.Tensor]:
    """The state after ``step`` steps; a new copy. About every twentieth element changes at each step."""
    tensors = {name: tensor.clone() for name, tensor in _base().items()}
    for k in range(1, step + 1):
        random = np.random.default_rng(k)
        for tensor in tensors.values():
            if tensor.numel():
                bits = bits_of(tensor)
                at = random.integers(0, len(bits), max(1, len(bits) // 20))
                bits[at] ^= 1 if tensor.dtype == torch.bool else random.integers(1, 4, len(at)).astype(bits.dtype)
    return tensors


def entries(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[TensorSpec, Any]]:
    """Specs and bits by name; not copied when they are contiguous."""
    return MemoryEngine({name: tensor.contiguous() for name, tensor in tensors.items()}).table


def digest_of(tensors: Mapping[str, torch.Tensor]) -> str:
    return state_digest(entries(tensors).values()).hex()


def holding(tensors: Mapping[str, torch.Tensor]) -> MemoryEngine:
    """An engine with a copy of the tensors, which knows what it holds."""
    held = MemoryEngine({name: tensor.clone() for name, tensor in tensors.items()})
    held.audit()
    return held


def same_bits(engine: MemoryEngine, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether the engine holds exactly these tensors."""
    expected = entries(tensors)
    return engine.table.keys() == expected.keys() and all(
        engine.table[name][0] == spec and np.array_equal(engine.table[name][1], bits)
        for name, (spec, bits) in expected.items()
    )


def checkpoint(folder: Path, step: int = 0) -> Path:
    """The state after ``step`` as a checkpoint folder."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(model(step), folder / "model.safetensors")
    return folder


def engine(step: int = 0, **keys: Any) -> MemoryEngine:
    """An engine that has booted from the state after ``step``."""
    return MemoryEngine(model(step), **keys)


def config(folder: Path, **keys: Any) -> Config:
    """Of a store in a folder, impatient; full states by count only, for patches of so small a model are mostly heads."""
    return Config(
        **{"uri": str(folder / "store"), "poll_s": 0.02, "timeout_s": 60, "threads": 1, "anchor_share": 0, **keys}
    )


def reader(keys: Config, run_id: str | None = None) -> FileReplicaEnd:
    return FileTransport(keys).replica_end(run_id)


def versions(keys: Config) -> list[int]:
    """Numbers of all versions in the log, which is checked on the way."""
    return [entry.number for entry in reader(keys).entries() if entry.kind in (1, 2)]


def follow_fresh(keys: Config, **engine_keys: Any) -> tuple[MemoryEngine, int]:
    """What a late joiner that holds nothing ends with."""
    joined = MemoryEngine({}, **engine_keys)
    with Replica.open(keys, joined, replica_id="fresh") as replica:
        return joined, replica.sync(timeout=0).version


# --- processes ---------------------------------------------------------------------------------------------------------


context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["loop_warm"])


def _start_server() -> None:
    """Starts the process that children are forked from; it looks for what it preloads in PYTHONPATH only."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *([before] if before else [])])
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before


class Child:
    """A process of its own that runs ``target(*args)``; lines that it says survive its death."""

    def __init__(self, folder: Path, target: Callable[..., None], *args: Any, crash_at: str = "") -> None:
        self.said = folder / f"said-{len(list(folder.glob('said-*')))}"
        self.said.touch()
        _start_server()
        self._process = context.Process(target=_run, args=(target, str(self.said), crash_at, args))
        self._process.start()

    def lines(self) -> list[str]:
        return self.said.read_text().splitlines()

    def kill(self) -> None:
        """Ends it, even when it is stopped."""
        self._process.kill()
        self._process.join()

    def wait(self, timeout: float = 120) -> int:
        """Its exit code; negative for a signal."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
            raise AssertionError(f"child did not end; it said {self.lines()}")
        return self._process.exitcode


def _run(target: Callable[..., None], said: str, crash_at: str, args: tuple[Any, ...]) -> None:
    os.environ["WEIGHT_SYNC_CRASH_AT"] = crash_at
    torch.set_num_threads(1)
    with open(said, "a", buffering=1) as file:
        target(lambda line: print(line, file=file, flush=True), *args)


def killed(folder: Path, target: Callable[..., None], *args: Any, crash_at: str) -> list[str]:
    """Runs a child that must die by SIGKILL at ``crash_at``; the lines it said."""
    child = Child(folder, target, *args, crash_at=crash_at)
    assert child.wait() == -signal.SIGKILL, child.lines()
    return child.lines()


def publish_steps(say: Callable[[str], None], keys: Config, first: int, last: int) -> None:
    """A trainer that publishes steps first..last and says each version once it has returned."""
    with Publisher.open(keys) as publisher:
        for step in range(first, last + 1):
            report = publisher.publish(model(step), step=step)
            assert report is not None
            say(f"{report.version} {report.digest}")
