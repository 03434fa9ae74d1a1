"""Claims about the RDMA transport when something dies or does not fit: nothing torn is served, everybody is told why, and
the next version finds all who are there.

Owns processes that are killed with SIGKILL at named steps.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from loop import Child, digest_of
from rdma_cases import Say, TpEngine, connected, free_port, keys, right, state, trainers, wait_acks
from waiting import until

from weight_sync import Publisher, Replica
from weight_sync.config import Config
from weight_sync.errors import (
    ConfigError,
    DeadlineError,
    EngineError,
    EngineInDoubtError,
    LineageError,
    StoreUnavailableError,
    WeightSyncError,
)
from weight_sync.ports import PauseMode, Update
from weight_sync.proto.v1 import replica_pb2
from weight_sync.testing import MemoryEngine
from weight_sync.transport.rdma import receiver as receiving
from weight_sync.transport.rdma import sender as sending
from weight_sync.transport.rdma.sender import Sender

pytest.importorskip("nixl_cu12")
State = replica_pb2.ReplicaState


@pytest.fixture
def given() -> dict[str, Any]:
    return keys(free_port(), rdma={"window_s": 10, "patience_s": 1})


@pytest.fixture
def publisher(given: dict[str, Any]) -> Any:
    with Publisher.open(Config(**given)) as found:
        yield found


def attach(given: dict[str, Any], name: str = "e", **changes: Any) -> tuple[TpEngine, Replica]:
    engine = TpEngine(given, 1)
    return engine, Replica.open(Config(**{**given, **changes}), engine, replica_id=name)


def holds(engine: TpEngine, step: int) -> bool:
    return right(engine.near.layout, engine.near.weights, state(step))


# --- processes that die ---


@pytest.mark.parametrize("step", ["rdma:go", "rdma:note"])
def test_a_trainer_rank_that_dies_mid_transfer_leaves_the_engine_at_its_version(tmp_path: Path, step: str) -> None:
    given = keys(free_port(), rdma={"window_s": 8})
    ranks = trainers(tmp_path, given, 2, 3, 1, crash={1: f"{step}#2"})
    engine = TpEngine(given, 1)
    connected(given)
    with Replica.open(Config(**given), engine, replica_id="e") as replica:
        assert replica.sync(min_version=0).version == 0
        with pytest.raises((StoreUnavailableError, DeadlineError)) as caught:
            replica.sync(min_version=1)
        assert "rank" in str(caught.value)
        assert replica.version == 0 and replica.state == State.REPLICA_STATE_SERVING and holds(engine, 0)
        assert ranks[1].wait() == -9
        for rank in ranks:
            rank.kill()


def _die_while_landing(say: Say, given: dict[str, Any]) -> None:
    """An engine whose process ends while a version lands in live weights."""
    engine = TpEngine(given, 1)
    connected(given)
    replica = Replica.open(Config(**given), engine, replica_id="e")
    say(f"served {replica.sync(min_version=0).version}")
    engine.near.receiver.close()

    def arrived(self: Any, timeout: float) -> None:
        say("landing")
        os.kill(os.getpid(), 9)

    receiving.LocalReceiver.arrived = arrived  # type: ignore[method-assign]
    replica.sync(min_version=1)


def test_an_engine_that_dies_mid_transfer_and_comes_back_is_written_again(
    tmp_path: Path, given: dict[str, Any], publisher: Publisher
) -> None:
    publisher.publish(state(0), step=0)
    child = Child(tmp_path, _die_while_landing, given)
    until(lambda: "served 0" in child.lines(), limit=60)
    publisher.publish(state(1), step=1)
    assert child.wait() == -9 and child.lines()[-1] == "landing"
    engine, replica = attach(given)  # the same name, another process, other addresses
    with replica:
        assert replica.sync(min_version=1).version == 1 and holds(engine, 1)
        publisher.publish(state(2), step=2)
        assert replica.sync(min_version=2).version == 2 and holds(engine, 2)


def test_when_the_controller_dies_engines_go_on_serving_and_find_the_next_one(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    (trainer,) = trainers(tmp_path, given, 1, 1, 1)
    engine = TpEngine(given, 1)
    connected(given)
    with Replica.open(Config(**given), engine, replica_id="e") as replica:
        replica.sync(min_version=0)
        trainer.kill()
        with pytest.raises(StoreUnavailableError):
            replica.sync(min_version=1, timeout=2)
        assert replica.version == 0 and replica.state == State.REPLICA_STATE_SERVING and holds(engine, 0)
        with Publisher.open(Config(**given)) as publisher:  # on the same address
            publisher.publish(state(5), step=5)
            report = replica.sync()
            assert report.run_id == publisher.run_id and holds(engine, 5)


# --- transfers that go wrong ---


def test_a_missing_end_note_is_told_with_the_rank_and_the_next_try_succeeds(
    given: dict[str, Any], publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {**given, "rdma": {**given["rdma"], "window_s": 1.5}}
    publisher.publish(state(0), step=0)
    engine, replica = attach(given)
    with replica:
        monkeypatch.setattr(Sender, "_note", lambda self, engine, go: None)
        with pytest.raises(DeadlineError, match=r"version 0 has not landed: end notes of trainer ranks; found \[0\]"):
            replica.sync(min_version=0, timeout=5)
        assert replica.version is None
        monkeypatch.undo()
        assert replica.sync(min_version=0).version == 0 and holds(engine, 0)


def test_a_late_end_note_of_an_older_transfer_is_not_taken_for_this_one(
    given: dict[str, Any], publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {**given, "rdma": {**given["rdma"], "window_s": 1.5}}
    publisher.publish(state(0), step=0)
    engine, replica = attach(given)
    real = sending.end_note
    with replica:
        replica.sync(min_version=0)
        publisher.publish(state(1), step=1)
        monkeypatch.setattr(sending, "end_note", lambda nonce, rank: real(nonce - 1, rank))
        with pytest.raises(DeadlineError):
            replica.sync(min_version=1, timeout=5)
        assert replica.version == 0 and holds(engine, 0)
        monkeypatch.undo()
        assert replica.sync(min_version=1).version == 1 and holds(engine, 1)


def test_ranks_with_another_schedule_write_nothing(
    given: dict[str, Any], publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher.publish(state(0), step=0)
    engine, replica = attach(given)
    with replica:
        replica.sync(min_version=0)
        publisher.publish(state(1), step=1)
        real = Sender._write

        def other(self: Sender, connection: Any, go: Any) -> int:
            go.schedule = bytes(16)
            return real(self, connection, go)

        monkeypatch.setattr(Sender, "_write", other)
        with pytest.raises(LineageError, match="this rank has another schedule"):
            replica.sync(min_version=1, timeout=5)
        assert replica.version == 0 and holds(engine, 0)


def test_a_shape_that_changes_after_planning_is_planned_anew_or_refused(
    given: dict[str, Any], publisher: Publisher
) -> None:
    publisher.publish({"w": torch.zeros(8, 4), "b": torch.ones(3)}, step=0)
    grows, keeps = MemoryEngine({}), MemoryEngine({}, changes_tensors=False)
    keeps.table = {}
    with Replica.open(Config(**given), grows, replica_id="grows") as replica:
        replica.sync(min_version=0)
        changed = {"w": torch.full((16, 4), 2.0), "b": torch.ones(3)}
        publisher.publish(changed, step=1)
        assert replica.sync(min_version=1).digest == digest_of(changed)
    _, replica = attach(given, "fixed")
    with replica, pytest.raises(EngineError, match="the engine holds another model than the run"):
        replica.sync(min_version=1)


def test_direct_writes_that_fail_leave_the_engine_in_doubt_and_the_next_push_rebuilds_it(
    given: dict[str, Any], publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {**given, "rdma": {**given["rdma"], "commit": "direct", "window_s": 1.5}}
    publisher.publish(state(0), step=0)
    engine, replica = attach(given)
    with replica:
        replica.sync(min_version=0)
        publisher.publish(state(1), step=1)
        monkeypatch.setattr(Sender, "_note", lambda self, engine, go: None)
        with pytest.raises(EngineInDoubtError):
            replica.sync(min_version=1, timeout=5)
        assert replica.version is None and replica.state == State.REPLICA_STATE_IN_DOUBT
        monkeypatch.undo()
        assert replica.sync(min_version=1).version == 1 and holds(engine, 1)


def test_nothing_torn_is_served_while_a_version_lands(given: dict[str, Any], publisher: Publisher) -> None:
    """A reader that samples the live weights sees whole versions, unless admission is shut."""
    publisher.publish(state(0), step=0)
    engine, replica = attach(given)
    open_, torn, samples = [True], [], [0]
    pause, resume = engine.pause, engine.resume

    def shut(mode: PauseMode, timeout: float) -> None:
        open_[0] = False
        pause(mode, timeout)

    def reopen() -> None:
        resume()
        open_[0] = True

    engine.pause, engine.resume = shut, reopen  # type: ignore[method-assign]
    with replica:
        replica.sync(min_version=0)
        real = engine.near.store.stage

        def stage(update: Update, keep_undo: bool = True) -> None:
            samples[0] += 1  # everything has landed by now, and nothing may show
            if open_[0] and not holds(engine, update.target.number - 1):
                torn.append(update.target.number)
            real(update, keep_undo)

        engine.near.store.stage = stage  # type: ignore[method-assign]
        for step in range(1, 4):
            publisher.publish(state(step), step=step)
            replica.sync(min_version=step)
    assert samples[0] == 3 and not torn


# --- what does not fit ---


def test_memory_that_cannot_be_registered_is_told_and_the_store_is_read_instead(
    tmp_path: Path, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given = {**given, "store": str(tmp_path / "store")}

    def refuse(config: Config, role: str) -> Any:
        raise EngineError("memory cannot be registered (DRAM)", field="1 blocks", do="raise ulimit -l")

    with Publisher.open(Config(**given)) as publisher:
        publisher.publish(state(0), step=0)
        engine, replica = attach(given)
        monkeypatch.setattr(receiving, "open_agent", refuse)
        with replica:
            report = replica.sync(min_version=0)
            assert report.version == 0 and holds(engine, 0) and "anchor" in report.path
        assert "raise ulimit -l; versions are read through the controller instead" in caplog.text
        with Replica.open(str(tmp_path / "store"), MemoryEngine({}), replica_id="file") as follower:
            assert follower.sync().digest == report.digest  # the same publish, for followers of the store


def test_small_changes_travel_as_patches(given: dict[str, Any]) -> None:
    given = {**given, "rdma": {"ring_bytes": 1 << 20, "sparse_share": 0.5, "window_s": 10}}
    with Publisher.open(Config(**given)) as publisher:
        publisher.publish(state(0), step=0)
        engine, replica = attach(given)
        with replica:
            assert "landing" in replica.sync(min_version=0).path
            tensors = state(0)
            tensors["norm"].view(torch.int16)[3] += 1
            digest = publisher.publish(tensors, step=1).digest  # type: ignore[union-attr]
            report = replica.sync(min_version=1)
            assert (report.path, report.digest) == ("1 patch from version 0", digest)
            publisher.publish(state(7), step=2)  # everything changes: the state is smaller
            assert "landing" in replica.sync(min_version=2).path and holds(engine, 7)


def test_strangers_and_open_doors_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"would listen in the open: weight_sync\.auth\.token"):
        Publisher.open(Config(**{**given, "uri": "rdma://0.0.0.0:0"}))
    with Publisher.open(Config(**given, auth={"token": "secret"})) as publisher:
        publisher.publish(state(0), step=0)
        _, replica = attach(given)
        with pytest.raises(WeightSyncError, match="the controller refuses this token"):
            replica.sync(min_version=0, timeout=1)
        replica.close()
        engine, replica = attach(given, auth={"token": "secret"})
        with replica:
            assert replica.sync(min_version=0).version == 0 and holds(engine, 0)
            wait_acks(publisher, 0, 1)


def test_a_slow_reader_does_not_hold_the_trainer_up(
    given: dict[str, Any], publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher.publish(state(0), step=0)
    engine, replica = attach(given)
    real = Sender._write_dense
    slow = [True]

    def crawl(self: Sender, engine: Any) -> int:
        if slow[0]:
            until(lambda: self._holding.state()[0] == 1)  # type: ignore[union-attr]
        return real(self, engine)

    monkeypatch.setattr(Sender, "_write_dense", crawl)
    with replica:
        reports: list[Any] = []
        thread = threading.Thread(target=lambda: reports.append(replica.sync(min_version=0)))
        thread.start()
        until(lambda: publisher._views.parts[0].holding._readers)
        publisher.publish(state(1), step=1)  # waits for the reader as long as patience_s, then goes on
        slow[0] = False
        thread.join(60)
        assert reports and reports[0].version == 1 and holds(engine, 1)
