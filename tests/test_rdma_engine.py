"""Claims about RDMA into the ranks of an engine that is driven from another process: bits land where the weights are.

Owns no real engine: ranks in miniature (worker_cases), with the real library underneath.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rdma_cases import free_port, keys
from safetensors.torch import load_file
from worker_cases import Host, LocalControl, checkpoint, engine_of

from weight_sync import Publisher, Replica
from weight_sync.adapters.engines.worker import landing
from weight_sync.adapters.engines.worker.remote import RemoteEngine
from weight_sync.config import Config
from weight_sync.errors import ConfigError, EngineInDoubtError, StoreError, StoreUnavailableError, WeightSyncError
from weight_sync.proto.v1 import replica_pb2
from weight_sync.transport.rdma.sender import Sender

pytest.importorskip("nixl_cu12")
State = replica_pb2.ReplicaState


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    return [checkpoint(tmp_path / f"v{seed}", seed) for seed in range(4)]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def given(**rdma: Any) -> dict[str, Any]:
    return keys(free_port(), rdma={"window_s": 10, "patience_s": 1, **rdma})


@contextlib.contextmanager
def opened(config: dict[str, Any], base: Path, engine: RemoteEngine) -> Iterator[tuple[Publisher, Replica]]:
    with (
        Publisher.open(Config(**config), base=base) as publisher,
        Replica.open(Config(**config), engine, replica_id="e") as replica,
    ):
        yield publisher, replica


def fresh(control: LocalControl, folder: Path) -> bool:
    """Whether every rank holds what an engine would that had loaded this checkpoint."""
    for host in control.hosts:
        want = Host(folder, host.rank, host.world_size, host.pack).model().state_dict()
        found = host.model().state_dict()
        if any(not torch.equal(found[name].view(torch.int16), want[name].view(torch.int16)) for name in want):
            return False
    return True


@pytest.mark.parametrize(("ranks", "pack"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("commit", ["shadow", "direct"])
def test_versions_land_in_the_ranks_of_a_driven_engine(
    folders: list[Path], ranks: int, pack: bool, commit: str
) -> None:
    config = given(commit=commit)
    engine, control = engine_of(folders[0], ranks, pack, **config)
    with opened(config, folders[0], engine) as (publisher, replica):
        for step, folder in enumerate(folders[1:], 1):
            sent = publisher.publish(tensors(folder), step=step)
            report = replica.sync(min_version=step)
            assert sent is not None and report.digest == sent.digest
            assert f"in {ranks} engine ranks" in report.path or "straight into place" in report.path
            assert fresh(control, folder)


def test_a_version_that_fails_its_digest_is_undone_on_all_ranks(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = given()
    engine, control = engine_of(folders[0], 2, **config)
    with opened(config, folders[0], engine) as (publisher, replica):
        publisher.publish(tensors(folders[1]), step=1)
        replica.sync(min_version=1)
        publisher.publish(tensors(folders[2]), step=2)
        lands = control.cores[1]._lands
        assert lands is not None and lands._receiver is not None
        arrived = type(lands._receiver).arrived

        def spoiled(self: Any, timeout: float) -> None:
            arrived(self, timeout)
            next(self.pieces()).bits[0] ^= 1

        monkeypatch.setattr(type(lands._receiver), "arrived", spoiled)
        with pytest.raises(WeightSyncError):
            replica.sync(min_version=2)
        assert replica.version == 1 and fresh(control, folders[1])
        monkeypatch.undo()
        assert replica.sync(min_version=2).version == 2 and fresh(control, folders[2])


def test_ranks_hear_of_a_sender_that_failed(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    config = given(window_s=30)
    engine, control = engine_of(folders[0], 2, **config)
    with opened(config, folders[0], engine) as (publisher, replica):
        publisher.publish(tensors(folders[1]), step=1)

        def broken(self: Any, engine: Any, go: Any) -> None:
            raise StoreUnavailableError("the link is gone")

        monkeypatch.setattr(Sender, "_note", broken)
        with pytest.raises(StoreError, match="the link is gone"):
            replica.sync(min_version=1, timeout=25)
        assert replica.version == 0 and fresh(control, folders[0])
        monkeypatch.undo()
        assert replica.sync(min_version=1).version == 1 and fresh(control, folders[1])


def test_a_transfer_into_live_weights_that_fails_leaves_the_engine_in_doubt(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = given(commit="direct", window_s=3)
    engine, control = engine_of(folders[0], 2, **config)
    with opened(config, folders[0], engine) as (publisher, replica):
        publisher.publish(tensors(folders[1]), step=1)
        monkeypatch.setattr(Sender, "_note", lambda self, engine, go: None)
        with pytest.raises(EngineInDoubtError):
            replica.sync(min_version=1, timeout=20)
        assert replica.state == State.REPLICA_STATE_IN_DOUBT and not control.is_open
        monkeypatch.undo()
        assert replica.sync(min_version=1).version == 1 and fresh(control, folders[1]) and control.is_open


def test_where_ranks_cannot_receive_versions_land_beside_the_engine(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(config: Config) -> Any:
        raise ConfigError("transport cannot be imported", field="rdma", do="pip install 'weight-sync[rdma]'")

    monkeypatch.setattr(landing, "open_transport", missing)
    config = given()
    engine, control = engine_of(folders[0], 2, **config)
    with opened(config, folders[0], engine) as (publisher, replica):
        publisher.publish(tensors(folders[1]), step=1)
        assert "beside the engine" in replica.sync(min_version=1).path and fresh(control, folders[1])
    assert "pip install" in caplog.text


def test_with_room_for_patches_versions_land_beside_the_engine(folders: list[Path]) -> None:
    config = given(ring_bytes=1 << 20)
    engine, control = engine_of(folders[0], 1, **config)
    with opened(config, folders[0], engine) as (publisher, replica):
        changed = tensors(folders[0])
        changed["norm.weight"][0] += 1
        publisher.publish(changed, step=1)
        report = replica.sync(min_version=1)
        assert report.version == 1 and "beside the engine" in report.path
        assert engine.receivers() == () and len(control.hosts) == 1
