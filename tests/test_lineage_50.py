"""One long run: fifty versions, followed by replicas that skip, lag, join late and restart, beside collections and
trainers that restart; every step proven by digest, the end bit for bit.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from loop import checkpoint, config, digest_of, engine, model, reader, same_bits

from weight_sync import Publisher, Replica
from weight_sync.codec.digest import Digest
from weight_sync.config import Config
from weight_sync.errors import VersionExpiredError, VersionMissingError
from weight_sync.history import History
from weight_sync.testing import MemoryEngine
from weight_sync.version import EPOCH, EXPIRED

VERSIONS = 50


def state(step: int) -> dict[str, torch.Tensor]:
    """The state after ``step``, with tensors that come and go on the way."""
    tensors = model(step)
    if step >= 12:
        tensors["late"] = model(step)["lm_head"][:77].clone()
    if 20 <= step < 31:
        del tensors["norm"]
    if step >= 40:
        tensors["late"] = tensors["late"].reshape(7, 11)
    return tensors


class Fleet:
    """Replicas of all habits."""

    def __init__(self, keys: Config, random: np.random.Generator) -> None:
        self.keys, self.random = keys, random
        self.members: dict[str, tuple[MemoryEngine, Replica]] = {}
        self.paths: list[str] = []

    def join(self, name: str, held: MemoryEngine) -> None:
        self.members[name] = held, Replica.open(self.keys, held, replica_id=name)

    def restart(self, name: str) -> None:
        """Another process would attach to the same memory like this."""
        held, replica = self.members[name]
        replica.close()
        self.join(name, held)

    def sync(self, name: str, exact: int | None = None) -> None:
        held, replica = self.members[name]
        report = replica.sync(exact=exact, timeout=0)
        expected = state(replica.manifest().step)
        assert held.audit().hex() == report.digest == digest_of(expected)
        assert same_bits(held, expected) and held.serve()[0] == report.version
        self.paths.append(report.path)

    def close(self) -> None:
        for _, replica in self.members.values():
            replica.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_fifty_versions_end_bit_for_bit_for_every_kind_of_follower(tmp_path: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    keys = config(tmp_path, base=str(checkpoint(tmp_path / "base")), anchor_every=9, keep_versions=6)
    fleet = Fleet(keys, random)
    for name in ("eager", "skips", "lags"):
        fleet.join(name, engine(0))
    publisher = Publisher.open(keys)
    for step in range(1, VERSIONS + 1):
        if random.random() < 0.15:
            publisher.close()
            publisher = Publisher.open(keys)
        report = publisher.publish(state(step), step=step)
        assert report is not None and report.digest == digest_of(state(step))
        fleet.sync("eager")
        if random.random() < 0.3:
            fleet.sync("skips")
        if random.random() < 0.05:
            fleet.sync("lags")
        if random.random() < 0.1:
            fleet.restart(str(random.choice(sorted(fleet.members))))
        if random.random() < 0.2:
            publisher.collect()
        if step == 33:
            fleet.join("late", MemoryEngine({}))
    publisher.collect()
    for name in fleet.members:
        fleet.sync(name)
    check_history(keys, fleet, random)
    fleet.close()
    publisher.close()
    assert any("patches from version" in path and not path.startswith("1 ") for path in fleet.paths), (
        "nothing was folded"
    )
    assert any(path.startswith("anchor") for path in fleet.paths), "no full state was used"


def check_history(keys: Config, fleet: Fleet, random: np.random.Generator) -> None:
    """Any two retained versions are joined by an exact fold; older ones are named as collected."""
    history = History(reader(keys), "default")
    numbers = [entry.number for entry in reader(keys).entries() if entry.kind in (1, 2)]
    steps = {number: history.manifest(number).step for number in numbers}
    assert len(numbers) < 25 and steps[numbers[-1]] == VERSIONS
    for _ in range(10):
        have, target = sorted(random.choice(numbers, 2, replace=False))
        held = MemoryEngine(state(steps[have]))
        held.audit()
        update = history.update(int(have), int(target))
        held.stage(update)
        assert held.commit() == update.digest == Digest.from_proto(history.manifest(int(target)).views[0].digest)
        assert same_bits(held, state(steps[target]))
    fleet.sync("skips", exact=numbers[0])
    fleet.sync("skips", exact=numbers[-1])
    gone = [entry.number for entry in reader(keys).entries() if entry.kind == EXPIRED]
    with pytest.raises(VersionExpiredError):
        fleet.members["skips"][1].sync(exact=gone[-1], timeout=0)
    others = [entry.number for entry in reader(keys).entries() if entry.kind == EPOCH]
    with pytest.raises(VersionMissingError, match="EPOCH"):
        fleet.members["skips"][1].sync(exact=others[-1], timeout=0)


def test_a_forked_line_goes_on_beside_its_parent(tmp_path: Path) -> None:
    keys = config(tmp_path, anchor_every=4)
    with Publisher.open(keys) as parent, Publisher.open(keys.replace(run_id=parent.run_id)) as parent:
        for step in range(6):
            parent.publish(model(step), step=step)
        with Publisher.open(keys.replace(fork=True)) as fork:
            for step in range(3, 9):
                fork.publish(model(step), step=step)
                parent.publish(model(step + 10), step=step + 10)
        for run, last in ((parent.run_id, 18), (fork.run_id, 8), (None, 8)):
            held = MemoryEngine({})
            with Replica.open(keys, held, run_id=run) as replica:
                replica.sync(timeout=0)
            assert same_bits(held, model(last))
