"""Claims that hold whatever happens in whatever order: trainers, replicas, stores and engines that fail at random.

Owns a random walk over all that the loop can meet, with the promises checked after every step. What it finds deserves a
test of its own elsewhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from loop import digest_of, model, same_bits

from weight_sync import Publisher, Replica
from weight_sync.codec.digest import Digest, state_digest
from weight_sync.config import Config
from weight_sync.errors import CorruptionError, EngineError, StoreUnavailableError, VersionError, WeightSyncError
from weight_sync.ports import Fate, ShardBytes
from weight_sync.proto.v1 import manifest_pb2
from weight_sync.testing import MemoryEngine
from weight_sync.transport.file import FilePublisherEnd, FileReplicaEnd, FileTransport

_names = itertools.count()
VERBS = ["describe", "audit", "stage", "commit", "rollback", "pause", "resume", "clear_caches", "announce"]
INSIDE = ["commit:half", "commit:torn", "commit:wrong"]


class _Weather:
    """How likely calls of the store fail, and by which."""

    def __init__(self, random: np.random.Generator) -> None:
        self.random, self.bad = random, 0.0

    def strike(self, call: str) -> None:
        if self.bad and self.random.random() < self.bad:
            raise StoreUnavailableError("weather", field=call)


class _ReplicaEnd(FileReplicaEnd):
    weather: _Weather

    def read(self, ref: manifest_pb2.ShardRef, offset: int, length: int) -> memoryview:
        self.weather.strike("read")
        data = super().read(ref, offset, length)
        if self.weather.bad and len(data) and self.weather.random.random() < self.weather.bad:
            hurt = bytearray(data)
            hurt[int(self.weather.random.integers(len(hurt)))] ^= 1 << int(self.weather.random.integers(8))
            return memoryview(hurt)
        return data


class _PublisherEnd(FilePublisherEnd):
    weather: _Weather

    def put_shard(self, number: int, shard: ShardBytes) -> manifest_pb2.ShardRef:
        self.weather.strike("put_shard")
        return super().put_shard(number, shard)

    def commit(self, manifest: manifest_pb2.VersionManifest) -> None:
        self.weather.strike("commit:before")
        super().commit(manifest)
        self.weather.strike("commit:after")

    def abort(self, number: int, reason: str) -> Fate:
        self.weather.strike("abort:before")
        fate = super().abort(number, reason)
        self.weather.strike("abort:after")
        return fate

    def next_number(self) -> int:
        self.weather.strike("next_number")
        return super().next_number()

    def reader(self) -> FileReplicaEnd:
        end = _ReplicaEnd(self._store, self._config, self._opened().run_id)
        end.weather = self.weather
        return end


class World:
    """A store, a trainer, replicas, and what each version must hold."""

    def __init__(self, seed: int, patch: pytest.MonkeyPatch) -> None:
        self.random = np.random.default_rng(seed)
        self.weather = weather = _Weather(self.random)

        class Transport(FileTransport):
            def publisher_end(self, rank: int, world_size: int) -> FilePublisherEnd:
                end = _PublisherEnd(self._store, self._config, rank, world_size)
                end.weather = weather
                return end

            def replica_end(self, run_id: str | None = None) -> FileReplicaEnd:
                end = _ReplicaEnd(self._store, self._config, run_id)
                end.weather = weather
                return end

        patch.setattr("weight_sync.publisher.open_transport", Transport)
        patch.setattr("weight_sync.replica.open_transport", Transport)
        self.keys = Config(
            uri=f"memory://random-{next(_names)}", poll_s=0.001, timeout_s=5, threads=2, anchor_every=5, anchor_share=0,
            keep_versions=4,
        )  # fmt: skip
        self.step = 0
        self.tensors = model(0)
        self.publisher = Publisher.open(self.keys)
        self.publish()
        self.engines = [MemoryEngine({}) for _ in range(3)]
        self.replicas = [self.attached(k) for k in range(3)]

    def attached(self, k: int) -> Replica:
        return Replica.open(self.keys, self.engines[k], replica_id=f"r{k}", audit_every=int(self.random.integers(3)))

    # --- the trainer ---

    def train(self) -> None:
        self.step += 1
        for tensor in self.tensors.values():
            if tensor.numel() and self.random.random() < 0.7:
                flat = tensor.reshape(-1).view(torch.uint8)
                at = torch.from_numpy(self.random.integers(0, len(flat), max(1, len(flat) // 50)))
                flat[at] ^= 1
        if self.random.random() < 0.1:
            self.tensors[f"new.{self.step}"] = torch.randn(int(self.random.integers(0, 30)))
        if self.random.random() < 0.1:
            del self.tensors[str(self.random.choice(sorted(self.tensors)))]
        if self.random.random() < 0.1:
            name = str(self.random.choice(sorted(self.tensors)))
            self.tensors[name] = torch.randn(int(self.random.integers(1, 30)))

    def publish(self) -> None:
        self.train()
        before = self.publisher.version
        try:
            report = self.publisher.publish(self.tensors, step=self.step, cast=False)
        except (StoreUnavailableError, CorruptionError):
            assert self.weather.bad
            return
        assert report is not None and report.digest == digest_of(self.tensors)
        assert before is None or report.version > before

    def restart(self) -> None:
        self.publisher.close()
        self.publisher = Publisher.open(self.keys)

    def fork(self) -> None:
        self.publisher.close()
        self.publisher = Publisher.open(self.keys.replace(fork=True))
        self.publish()

    def collect(self) -> None:
        self.publisher.collect()

    # --- the engines ---

    def sync(self) -> None:
        k = int(self.random.integers(3))
        replica, engine = self.replicas[k], self.engines[k]
        if self.random.random() < 0.3:
            verb = str(self.random.choice(VERBS + INSIDE))
            engine.fail_at[verb] = engine._counts[verb] + int(self.random.integers(1, 3))
        exact = None
        if self.random.random() < 0.2 and replica.version is not None:
            exact = int(self.random.integers(0, replica.version + 1))
        try:
            report = replica.sync(exact=exact, timeout=0)
        except (EngineError, StoreUnavailableError, VersionError, WeightSyncError) as error:
            self.check_error(error, engine)
            return
        assert report.version == replica.version and report.digest == held(engine)
        assert exact is None or report.version == exact

    def check_error(self, error: WeightSyncError, engine: MemoryEngine) -> None:
        expected = bool(self.weather.bad) or bool(engine.fail_at) or isinstance(error, VersionError)
        assert expected, f"nothing was wrong, but: {type(error).__name__}: {error}"

    def reattach(self) -> None:
        k = int(self.random.integers(3))
        self.replicas[k].close()
        self.engines[k]._undo = None
        self.replicas[k] = self.attached(k)

    def clear(self) -> None:
        """The weather gets better or worse; engines that failed work again."""
        self.weather.bad = float(self.random.choice([0.0, 0.0, 0.05, 0.2]))
        for engine in self.engines:
            engine.fail_at.clear()

    # --- promises ---

    def check(self) -> None:
        """Whoever serves a version serves its bits, whole."""
        for engine, replica in zip(self.engines, self.replicas, strict=True):
            if engine.admits and engine.announced is not None:
                expected = self.known[engine.announced.run_id, engine.announced.number]
                assert held(engine) == expected, f"{replica.replica_id} serves bits of no version"
                number, _ = engine.serve()
                assert number == engine.announced.number

    @property
    def known(self) -> dict[tuple[str, int], str]:
        """Digests of all versions, from the logs."""
        out = {}
        reader = FileTransport(self.keys).replica_end()
        reader.newest_run()
        for record in reader._register.records:
            for entry in FileTransport(self.keys).replica_end(record.run_id).entries():
                for view in entry.views:
                    out[record.run_id, entry.number] = Digest.from_proto(view.digest).hex()
        return out

    def finish(self) -> None:
        """Once all is well again, everybody gets to the newest version by itself."""
        self.clear()
        self.weather.bad = 0.0
        self.publish()
        for engine, replica in zip(self.engines, self.replicas, strict=True):
            replica.sync(timeout=0)
            assert same_bits(engine, self.tensors) and engine.serve()[0] == self.publisher.version
        late = MemoryEngine({})
        with Replica.open(self.keys, late) as replica:
            replica.sync(timeout=0)
        assert same_bits(late, self.tensors)


def held(engine: MemoryEngine) -> str:
    """Digest of the bits in place, without a call that could be made to fail."""
    return state_digest(engine.table.values()).hex()


@pytest.mark.parametrize("seed", range(8))
def test_every_promise_holds_after_every_step_of_a_random_walk(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(seed, monkeypatch)
    actions: list[tuple[Callable[[], None], float]] = [
        (world.publish, 0.3), (world.sync, 0.45), (world.restart, 0.03), (world.fork, 0.01), (world.collect, 0.06),
        (world.reattach, 0.05), (world.clear, 0.1),
    ]  # fmt: skip
    weights = np.array([weight for _, weight in actions])
    for _ in range(120):
        action = actions[int(world.random.choice(len(actions), p=weights / weights.sum()))][0]
        try:
            action()
        except StoreUnavailableError:
            assert world.weather.bad
        world.check()
    world.finish()
