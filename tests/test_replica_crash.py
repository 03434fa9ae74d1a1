"""Claims about a replica that is killed: its engine's memory outlives it, torn or not, and never serves in doubt.

Owns processes whose engine keeps its bits in mapped files, killed with SIGKILL at every step of a move and in the
middle of the writes themselves.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from loop import SHAPES, Child, checkpoint, config, killed, model, reader

from weight_sync import Publisher, Replica
from weight_sync.codec.apply import apply_changes
from weight_sync.config import Config
from weight_sync.ports import Update
from weight_sync.testing import MemoryEngine, memory_engine


def mapped(folder: Path, step: int = 0) -> dict[str, torch.Tensor]:
    """The model in files, which are made with the state after ``step`` unless they are there."""
    folder.mkdir(exist_ok=True)
    out: dict[str, torch.Tensor] = {}
    for k, (name, (shape, dtype)) in enumerate(SHAPES.items()):
        file = folder / f"{k}.bin"
        tensor = model(step)[name]
        if not tensor.numel():
            out[name] = tensor
            continue
        if not file.exists():
            file.write_bytes(bytes(tensor.reshape(-1).view(torch.uint8).numpy()))
        out[name] = torch.from_numpy(np.memmap(file, np.uint8, "r+")).view(dtype).reshape(shape)
    return out


class Watched(MemoryEngine):
    """Says whether admission is open while a version is staged."""

    say: Callable[[str], None]

    def stage(self, update: Update) -> None:
        self.say(f"staged {update.target.number} admits {self.admits}")
        super().stage(update)


def follow(say: Callable[[str], None], keys: Config, folder: Path, *exact: int | None) -> None:
    engine = Watched(mapped(folder))
    engine.say = say
    with Replica.open(keys, engine, replica_id="r") as replica:
        for number in exact:
            report = replica.sync(exact=number, timeout=0)
            say(f"serves {engine.serve()[0]} {report.path}")


def follow_and_die_writing(say: Callable[[str], None], keys: Config, folder: Path, after: int) -> None:
    """Dies inside a commit, after so many tensors."""
    left = [after]

    def dying(*args: object) -> object:
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        return apply_changes(*args)  # type: ignore[arg-type]

    memory_engine.apply_changes = dying  # type: ignore[assignment]
    follow(say, keys, folder, 2)


@pytest.fixture
def keys(tmp_path: Path) -> Config:
    keys = config(tmp_path, base=str(checkpoint(tmp_path / "base")))
    with Publisher.open(keys) as publisher:
        for step in (1, 2, 3):
            publisher.publish(model(step), step=step)
    return keys


def check_goes_on(tmp_path: Path, keys: Config, staged: str, path: str) -> None:
    """A new replica on the same memory ends with the newest version, bit for bit."""
    child = Child(tmp_path, follow, keys, tmp_path / "memory", None)
    assert child.wait() == 0, child.lines()
    assert child.lines() == [staged, f"serves 3 {path}"]
    held, expected = mapped(tmp_path / "memory"), model(3)
    for name, tensor in expected.items():
        assert torch.equal(held[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name
    message = next(m for m in FileEnd(keys).acknowledgements() if m.replica_id == "r")
    assert message.version.number == 3 and message.error == ""


def FileEnd(keys: Config) -> Publisher:
    return Publisher.open(keys.replace(base=None))


@pytest.mark.parametrize(
    ("step", "held"),
    [("replica:staged", 1), ("replica:paused", 1), ("replica:committed", 2), ("replica:verified", 2)],
)
def test_a_replica_killed_at_any_step_recognises_what_it_holds(
    tmp_path: Path, keys: Config, step: str, held: int
) -> None:
    said = killed(tmp_path, follow, keys, tmp_path / "memory", 1, 2, crash_at=f"{step}#2")
    assert said == ["staged 1 admits True", "serves 1 1 patch from version 0", "staged 2 admits True"]
    path = "1 patch" if held == 2 else f"{3 - held} patches"
    check_goes_on(tmp_path, keys, "staged 3 admits True", f"{path} from version {held}")


@pytest.mark.parametrize("after", [1, 3])
def test_a_replica_killed_while_it_writes_rebuilds_and_does_not_serve_before(
    tmp_path: Path, keys: Config, after: int
) -> None:
    child = Child(tmp_path, follow_and_die_writing, keys, tmp_path / "memory", after)
    assert child.wait() == -signal.SIGKILL
    assert child.lines() == ["staged 2 admits True"]
    digest = memory_digest(tmp_path / "memory")
    assert digest not in {entry.views[0].digest.SerializeToString() for entry in reader(keys).entries() if entry.views}
    check_goes_on(tmp_path, keys, "staged 3 admits False", "anchor 0 and 3 patches")


def memory_digest(folder: Path) -> bytes:
    return MemoryEngine(mapped(folder)).audit().to_proto().SerializeToString()


def test_a_replica_killed_while_it_rebuilds_rebuilds_again(tmp_path: Path, keys: Config) -> None:
    mapped(tmp_path / "memory", step=9)  # of no version
    killed(tmp_path, follow, keys, tmp_path / "memory", None, crash_at="replica:paused")
    assert Child(tmp_path, follow_and_die_writing, keys, tmp_path / "memory", 1).wait() == -signal.SIGKILL
    check_goes_on(tmp_path, keys, "staged 3 admits False", "anchor 0 and 3 patches")
