"""Claims about the replica: which version an engine serves, how it gets there, and what it does when that fails."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from loop import checkpoint, config, digest_of, engine, holding, model, reader, same_bits

from weight_sync import Publisher, Replica
from weight_sync.config import Config
from weight_sync.errors import (
    CorruptionError,
    DeadlineError,
    DigestMismatchError,
    EngineError,
    EngineInDoubtError,
    InputError,
    StoreFullError,
    TensorError,
    VersionExpiredError,
    VersionNotReadyError,
    WeightSyncError,
    WrongBaseError,
)
from weight_sync.following import choose_target, may_pass, table_difference
from weight_sync.ports import PauseMode
from weight_sync.proto.v1 import common_pb2, manifest_pb2, replica_pb2
from weight_sync.tensors import TensorSpec
from weight_sync.testing import MemoryEngine
from weight_sync.transport.file import FileReplicaEnd, FileTransport
from weight_sync.transport.file.store import Store

State = replica_pb2.ReplicaState


@pytest.fixture
def keys(tmp_path: Path) -> Config:
    return config(tmp_path, base=str(checkpoint(tmp_path / "base")), keep_versions=2)


@pytest.fixture
def publisher(keys: Config) -> Iterator[Publisher]:
    """Of a run whose version n is the state after step n."""
    with Publisher.open(keys) as publisher:
        yield publisher


def publish(publisher: Publisher, *steps: int) -> None:
    for step in steps:
        report = publisher.publish(model(step), step=step)
        assert report is not None and report.version == step


def acked(publisher: Publisher, replica_id: str = "r") -> replica_pb2.Acknowledgement:
    return next(message for message in publisher.acknowledgements() if message.replica_id == replica_id)


def serves(held: MemoryEngine, step: int) -> bool:
    """Whether requests are answered by exactly that state, under its number."""
    number, digest = held.serve()
    return (number, digest.hex()) == (step, digest_of(model(step))) and same_bits(held, model(step))


# --- decisions ---


@pytest.mark.parametrize(
    ("have", "head", "min_version", "exact", "target"),
    [
        (None, None, None, None, None),
        (None, 0, None, None, 0),
        (0, 0, None, None, 0),
        (0, 3, None, None, 3),
        (0, 3, 3, None, 3),
        (0, 3, 4, None, None),
        (3, 3, 0, None, 3),
        (3, 3, None, 0, 0),
        (3, 3, None, 4, None),
        (None, None, None, 0, None),
        (None, None, 0, None, None),
        (5, 3, None, None, 5),
    ],
)
def test_the_target_follows_from_what_is_held_there_and_wanted(
    have: int | None, head: int | None, min_version: int | None, exact: int | None, target: int | None
) -> None:
    found, reason = choose_target(have, head, min_version, exact)
    assert found == target and reason


def test_every_difference_between_two_models_is_a_line() -> None:
    mine = [TensorSpec("a", "BF16", (2,)), TensorSpec("b", "F32", (2, 3)), TensorSpec("c", "F32", (1,))]
    theirs = [TensorSpec("a", "F32", (2,)), TensorSpec("b", "F32", (3, 2)), TensorSpec("d", "F32", (1,))]
    assert table_difference(mine, theirs) == [
        "the engine lacks 'd'", "the run lacks 'c'", "'a' is BF16 [2] in the engine, F32 [2] in the run",
        "'b' is F32 [2, 3] in the engine, F32 [3, 2] in the run",
    ]  # fmt: skip
    assert table_difference(mine, list(mine)) == []


def test_an_error_passes_when_trying_again_can_help() -> None:
    for error in (
        StoreFullError("x"),
        VersionExpiredError("x"),
        CorruptionError("x"),
        DeadlineError("x"),
        DigestMismatchError("x"),
    ):
        assert may_pass(error, False, True)
    assert may_pass(EngineError("x"), True, True) and not may_pass(EngineError("x"), False, False)
    assert may_pass(EngineInDoubtError("x"), False, False) and not may_pass(EngineInDoubtError("x"), False, True)
    assert not may_pass(WrongBaseError("x"), True, False)


# --- following ---


def test_the_newest_version_is_served_and_the_trainer_is_told(keys: Config, publisher: Publisher) -> None:
    held = engine(0)
    with Replica.open(keys, held, replica_id="r") as replica:
        report = replica.sync(timeout=0)
        assert (report.version, report.previous, report.changed) == (0, None, True)
        assert serves(held, 0)
        held.calls.clear()
        publish(publisher, 1, 2, 3)
        report = replica.sync(timeout=0)
        assert (report.version, report.previous, report.staleness, report.ack_error) == (3, 0, 0, "")
        assert report.path == "3 patches from version 0" and report.run_id == publisher.run_id
        assert report.digest == digest_of(model(3)) and report.pause_s >= report.seconds["apply"]
        assert held.calls == ["stage", "pause", "commit", "clear_caches", "announce", "resume"]
        assert serves(held, 3) and replica.version == 3 and replica.manifest().step == 3
        message = acked(publisher)
        assert (message.version.number, message.state, message.error) == (3, State.REPLICA_STATE_SERVING, "")
        assert message.digest == reader(keys).manifest(3).views[0].digest
        report = replica.sync(timeout=0)
        assert (report.version, report.previous, report.changed) == (3, 3, False)
        assert held.calls[-1] == "resume"
    assert acked(publisher).state == State.REPLICA_STATE_CLOSED
    assert serves(held, 3)  # the engine stays the caller's


def test_an_older_version_can_be_pinned_and_left_again(keys: Config, publisher: Publisher) -> None:
    held = engine(0)
    publish(publisher, 1, 2, 3)
    with Replica.open(keys, held) as replica:
        for exact in (3, 1, 2, 0, 3, 3):
            assert replica.sync(exact=exact, timeout=0).version == exact
            assert serves(held, exact)
        assert replica.sync(exact=1, timeout=0).staleness == 2
        with pytest.raises(VersionNotReadyError, match="version 4 has not been published, the newest is 3"):
            replica.sync(exact=4, timeout=0.05)
        assert serves(held, 1)
        assert replica.sync(timeout=0).version == 3


def test_min_version_waits_for_the_trainer(keys: Config, publisher: Publisher) -> None:
    held = engine(0)
    with Replica.open(keys, held) as replica:
        replica.sync(timeout=0)
        waiting = threading.Thread(target=lambda: publish(publisher, 1, 2))
        waiting.start()
        assert replica.sync(min_version=2, timeout=60).version == 2
        waiting.join()
        assert serves(held, 2)
        began = time.monotonic()
        with pytest.raises(VersionNotReadyError, match="version 3 has not been published"):
            replica.sync(min_version=3, timeout=0.1)
        assert time.monotonic() - began >= 0.1
        assert replica.sync(min_version=1, timeout=0).version == 2


@pytest.mark.parametrize("run_id", [None, "named"])
def test_a_replica_may_be_there_before_the_trainer(tmp_path: Path, run_id: str | None) -> None:
    keys = config(tmp_path, run_id=run_id)
    held = MemoryEngine({})
    with Replica.open(keys, held) as replica:
        with pytest.raises(VersionNotReadyError, match="no run yet"):
            replica.sync(timeout=0.05)
        assert not (tmp_path / "store").exists()

        def train() -> None:
            with Publisher.open(keys) as publisher:
                publisher.publish(model(1), step=1)

        training = threading.Thread(target=train)
        training.start()
        assert replica.sync(timeout=60).version == 0
        training.join()
        assert same_bits(held, model(1))


def test_a_run_without_versions_is_not_ready(keys: Config) -> None:
    with Publisher.open(keys.replace(base=None)), Replica.open(keys, engine(0)) as replica:
        with pytest.raises(VersionNotReadyError, match="no version yet"):
            replica.sync(timeout=0.05)
        assert (replica.version, replica.state) == (None, State.REPLICA_STATE_ATTACHING)


def test_what_an_engine_holds_is_recognised_by_its_digest(keys: Config, publisher: Publisher) -> None:
    publish(publisher, 1, 2, 3)
    for step, path in ((2, "1 patch from version 2"), (3, "3 is the newest"), (0, "3 patches from version 0")):
        held = engine(step)
        with Replica.open(keys, held) as replica:
            report = replica.sync(timeout=0)
            assert (report.version, report.path) == (3, path)
            assert serves(held, 3)


def test_an_engine_that_was_left_paused_is_opened_again(keys: Config, publisher: Publisher) -> None:
    publish(publisher, 1)
    held = engine(1)
    held.serve()
    held.admits = False  # its replica died inside a fence, before it cleared the caches
    held.caches_of = replica_digest(model(0))
    with Replica.open(keys, held) as replica:
        assert replica.sync(timeout=0).version == 1
    assert serves(held, 1)


def replica_digest(tensors: dict[str, torch.Tensor]) -> Any:
    return holding(tensors).audit()


def test_bits_of_no_version_are_not_served_until_they_are_replaced(keys: Config, publisher: Publisher) -> None:
    publish(publisher, 1)
    stranger = {name: torch.zeros_like(tensor) for name, tensor in model(0).items()}
    held = MemoryEngine(stranger, fail_at={"stage": 1})
    with Replica.open(keys, held, replica_id="r") as replica:
        with pytest.raises(EngineError):
            replica.sync(timeout=0)
        assert not held.admits and acked(publisher).state == State.REPLICA_STATE_ATTACHING
        assert replica.sync(timeout=0).version == 1
    assert serves(held, 1)


def test_another_model_is_refused_with_what_differs(keys: Config, publisher: Publisher) -> None:
    other = {**model(0), "extra": torch.zeros(2), "norm": torch.zeros(3)}
    del other["flags"]
    held = MemoryEngine(other, changes_tensors=False)
    with Replica.open(keys, held, replica_id="r") as replica:
        with pytest.raises(
            EngineError, match=r"lacks 'flags'; the run lacks 'extra'; 'norm' is F32 \[3\] in the engine"
        ):
            replica.sync(timeout=0)
        assert "extra" in acked(publisher).error
    assert same_bits(held, other) and held.calls == ["describe"]


def test_a_base_that_is_not_the_runs_is_refused_before_anything_is_written(
    tmp_path: Path, keys: Config, publisher: Publisher
) -> None:
    publish(publisher, 1)
    held = MemoryEngine({})
    other = keys.replace(base=str(checkpoint(tmp_path / "other", 3)))
    with Replica.open(other, held) as replica, pytest.raises(WrongBaseError, match=r"not the run's base.*other"):
        replica.sync(timeout=0)
    assert held.table == {}


# --- followed in a thread ---


class Following:
    """`Replica.follow` in a thread of its own."""

    def __init__(self, replica: Replica) -> None:
        self.replica, self.stop = replica, threading.Event()
        self.seen: list[int] = []
        self.errors: list[WeightSyncError] = []
        self.ended: list[BaseException | None] = []
        self._news = threading.Condition()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.replica.follow(
                lambda report: self._note(self.seen, report.version), self.stop, lambda e: self._note(self.errors, e)
            )
            self._note(self.ended, None)
        except BaseException as error:
            self._note(self.ended, error)

    def _note(self, where: list[Any], what: Any) -> None:
        with self._news:
            where.append(what)
            self._news.notify_all()

    def until(self, settled: Any) -> None:
        with self._news:
            assert self._news.wait_for(settled, 60), (self.seen, self.errors, self.ended)

    def __enter__(self) -> Following:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self._thread.join(60)
        assert not self._thread.is_alive()


def test_following_goes_on_until_it_is_stopped(keys: Config, publisher: Publisher) -> None:
    held = engine(0)
    with Replica.open(keys, held, replica_id="r") as replica, Following(replica) as following:
        following.until(lambda: following.seen == [0])
        for step in (1, 2, 3):
            publish(publisher, step)
            following.until(lambda s=step: following.seen[-1] == s)  # type: ignore[misc]
        assert acked(publisher).error == ""
    assert following.ended == [None] and not following.errors
    assert serves(held, 3)


def test_following_survives_what_may_pass_and_rebuilds_once(keys: Config, publisher: Publisher) -> None:
    held = engine(0, fail_at={"pause": 2, "commit:half": 1, "commit:torn": 2, "stage": 5})
    with Replica.open(keys, held, replica_id="r") as replica, Following(replica) as following:
        following.until(lambda: following.seen == [0])
        publish(publisher, 1)
        following.until(lambda: following.seen == [0, 1])
    kinds = [type(error) for error in following.errors]
    assert kinds == [DeadlineError, EngineError, EngineInDoubtError], kinds
    assert serves(held, 1)


def test_following_ends_when_a_rebuild_fails_too(keys: Config, publisher: Publisher) -> None:
    class Torn(MemoryEngine):
        def commit(self) -> Any:
            self.fail_at["commit:torn"] = self._counts["commit:torn"] + 1
            return super().commit()

    held = Torn(model(0))
    publish(publisher, 1)
    with Replica.open(keys, held) as replica, Following(replica) as following:
        following.until(lambda: following.ended)
    assert isinstance(following.ended[0], EngineInDoubtError) and len(following.errors) == 1
    assert not held.admits


# --- a store that is bad on the way, or bad ---


class _Wire(FileReplicaEnd):
    """Flips a bit of the next reads that are larger than a head of nothing."""

    hurt: list[int]

    def read(self, ref: manifest_pb2.ShardRef, offset: int, length: int) -> memoryview:
        data = bytearray(super().read(ref, offset, length))
        if self.hurt and data:
            self.hurt.pop()
            data[len(data) // 2] ^= 4
        return memoryview(data)


@pytest.fixture
def hurt(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As many reads as it has entries come out with a flipped bit."""
    left: list[int] = []

    class Transport(FileTransport):
        def replica_end(self, run_id: str | None = None) -> FileReplicaEnd:
            end = _Wire(self._store, self._config, run_id)
            end.hurt = left
            return end

    monkeypatch.setattr("weight_sync.replica.open_transport", Transport)
    return left


def test_a_byte_that_flips_on_the_way_is_fetched_again(keys: Config, publisher: Publisher, hurt: list[int]) -> None:
    held = engine(0)
    publish(publisher, 1)
    with Replica.open(keys, held) as replica:
        hurt.append(1)
        assert replica.sync(timeout=0).version == 1 and not hurt
        assert serves(held, 1)


def shard_of(keys: Config, number: int) -> Path:
    end = reader(keys)
    return Path(keys.uri) / end.run_id() / end.manifest(number).views[0].shards[0].object


@pytest.mark.parametrize("at", [0, 30, -1])
def test_a_byte_that_flipped_in_the_store_is_named_and_the_old_version_served(
    keys: Config, publisher: Publisher, at: int
) -> None:
    held = engine(0)
    publish(publisher, 1)
    shard = shard_of(keys, 1)
    good = shard.read_bytes()
    bad = bytearray(good)
    bad[at] ^= 1
    with Replica.open(keys, held, replica_id="r") as replica:
        replica.sync(exact=0, timeout=0)
        shard.write_bytes(bad)
        for _ in range(2):
            with pytest.raises(CorruptionError, match=rf"version 1.*{shard.name}|{shard.name}.*") as caught:
                replica.sync(timeout=0)
            assert shard.name in str(caught.value) and "version 1" in str(caught.value)
            assert serves(held, 0) and held.calls[-1] == "resume"
        message = acked(publisher)
        assert shard.name in message.error and message.version.number == 0
        assert message.state == State.REPLICA_STATE_SERVING
        shard.write_bytes(good)
        assert replica.sync(timeout=0).version == 1
        assert acked(publisher).error == ""


def test_a_bad_patch_is_passed_by_once_there_is_a_full_state(tmp_path: Path) -> None:
    keys = config(tmp_path, anchor_every=2)
    held = MemoryEngine({})
    with Publisher.open(keys) as publisher, Replica.open(keys, held) as replica:
        publisher.publish(model(0))
        replica.sync(timeout=0)
        publisher.publish(model(1))
        shard_of(keys, 1).unlink()
        with pytest.raises(VersionExpiredError, match="gone"):
            replica.sync(exact=1, timeout=0)
        assert serves(held, 0)
        publisher.publish(model(2))
        late = MemoryEngine({})
        with Replica.open(keys, late) as other:
            assert other.sync(timeout=0).path == "anchor 2 and 0 patches"
        assert same_bits(late, model(2))


@pytest.mark.parametrize("gone", [False, True])
def test_a_replica_that_meets_damage_asks_for_a_full_state_and_gets_over_it(tmp_path: Path, gone: bool) -> None:
    keys = config(tmp_path)
    held = MemoryEngine({})
    with Publisher.open(keys) as publisher, Replica.open(keys, held, replica_id="r") as replica:
        publisher.publish(model(0))
        replica.sync(timeout=0)
        publisher.publish(model(1))
        shard = shard_of(keys, 1)
        if gone:
            shard.unlink()
        else:
            shard.write_bytes(bytes(255 - byte for byte in shard.read_bytes()))
        with pytest.raises(VersionExpiredError if gone else CorruptionError):
            replica.sync(timeout=0)
        assert same_bits(held, model(0))
        report = publisher.publish(model(2))
        assert report is not None and report.reason == "replica r asks for a full state"
        assert replica.sync(timeout=0).path.startswith("anchor 2 ")
        assert same_bits(held, model(2))
        report = publisher.publish(model(3))
        assert report is not None and report.kind == "PATCH"
        assert replica.sync(timeout=0).path == "1 patch from version 2"
        assert same_bits(held, model(3))


def test_a_full_state_without_elements_is_followed(tmp_path: Path) -> None:
    keys = config(tmp_path)
    held = MemoryEngine({})
    states = [{"a": torch.empty(0, 3), "b": torch.empty(2, 0)}, {"a": torch.empty(0, 3), "b": torch.ones(2, 2)}]
    with Publisher.open(keys) as publisher, Replica.open(keys, held) as replica:
        for state in states:
            publisher.publish(state)
            replica.sync(timeout=0)
            assert same_bits(held, state)


def test_nothing_to_publish_is_said(tmp_path: Path) -> None:
    with Publisher.open(config(tmp_path)) as publisher:
        with pytest.raises(TensorError, match="no rank offers a tensor"):
            publisher.publish({})
        assert publisher.version is None


def test_tensors_that_appear_vanish_or_change_are_carried_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    held = MemoryEngine({})
    keys = config(tmp_path)
    with Publisher.open(keys) as publisher, Replica.open(keys, held) as replica:
        publisher.publish({"a": torch.ones(4), "b": torch.ones(3)})
        assert not caplog.records
        state = {"module.a": torch.ones(4), "b": torch.ones(3, dtype=torch.bfloat16)}
        with caplog.at_level(logging.WARNING, "weight_sync"):
            publisher.publish(state, cast=False)
        told = [record.getMessage() for record in caplog.records]
        assert told == [
            "tensors of view 'default' after version 0: 1 appear (module.a); 1 vanish (a); 1 change dtype or shape (b)"
        ]
        replica.sync(timeout=0)
    assert same_bits(held, state)


def test_nothing_is_done_after_close(keys: Config, publisher: Publisher) -> None:
    replica = Replica.open(keys, engine(0))
    replica.close()
    with pytest.raises(InputError, match="closed"):
        replica.sync(timeout=0)
    publisher.close()
    with pytest.raises(InputError, match="closed"):
        publisher.publish(model(1))


def test_collected_versions_are_passed_by_or_named(keys: Config, publisher: Publisher) -> None:
    keys = keys.replace(anchor_every=3)
    publisher.close()
    held = engine(0)
    with Publisher.open(keys) as writer, Replica.open(keys, held, replica_id="slow") as replica:
        replica.sync(timeout=0)
        for step in range(1, 8):
            writer.publish(model(step), step=step)
        reader(keys).release("slow")  # it was silent for so long that its lease ran out
        assert writer.collect()["expired"] > 0
        with pytest.raises(VersionExpiredError, match=r"version 2 has been collected|was collected"):
            replica.sync(exact=2, timeout=0)
        assert serves(held, 0)
        report = replica.sync(timeout=0)
        assert report.path.startswith("anchor ")
        assert same_bits(held, model(7))


# --- an engine that fails ---


def test_a_commit_that_fails_leaves_the_old_version_served(keys: Config, publisher: Publisher) -> None:
    held = engine(0, fail_at={"commit:half": 1})
    publish(publisher, 1)
    with Replica.open(keys, held, replica_id="r") as replica:
        with pytest.raises(EngineError, match="old bits are back"):
            replica.sync(timeout=0)
        assert serves(held, 0) and (replica.version, replica.state) == (0, State.REPLICA_STATE_SERVING)
        message = acked(publisher)
        assert message.version.number == 0 and "old bits are back" in message.error
        assert replica.sync(timeout=0).version == 1
    assert serves(held, 1)


def test_wrong_bits_are_rolled_back_and_never_announced(keys: Config, publisher: Publisher) -> None:
    held = engine(0, fail_at={"commit:wrong": 1})
    publish(publisher, 1)
    with Replica.open(keys, held) as replica:
        with pytest.raises(DigestMismatchError, match="version 1 came out with other bits"):
            replica.sync(timeout=0)
        assert serves(held, 0)
        assert replica.sync(timeout=0).path == "1 patch from version 0"
    assert serves(held, 1)


@pytest.mark.parametrize("verb", ["clear_caches", "announce"])
def test_a_version_whose_caches_cannot_be_cleared_is_rolled_back(keys: Config, publisher: Publisher, verb: str) -> None:
    held = engine(0, fail_at={verb: 2})  # the first call is that of attaching
    publish(publisher, 1)
    with Replica.open(keys, held) as replica:
        with pytest.raises(EngineError, match="fault on demand"):
            replica.sync(timeout=0)
        assert serves(held, 0)
        assert replica.sync(timeout=0).version == 1
    assert serves(held, 1)


def test_a_fence_that_cannot_be_closed_changes_nothing(keys: Config, publisher: Publisher) -> None:
    held = engine(0, fail_at={"pause": 2})
    publish(publisher, 1)
    with Replica.open(keys, held) as replica:
        with pytest.raises(DeadlineError):
            replica.sync(timeout=0)
        assert serves(held, 0) and replica.state == State.REPLICA_STATE_SERVING
        assert replica.sync(timeout=0).version == 1
    assert serves(held, 1)


def test_a_resume_that_fails_is_tried_again(keys: Config, publisher: Publisher) -> None:
    held = engine(0, fail_at={"resume": 2})
    publish(publisher, 1)
    with Replica.open(keys, held) as replica:
        with pytest.raises(EngineError):
            replica.sync(timeout=0)
        assert (replica.version, replica.state, held.admits) == (1, State.REPLICA_STATE_FENCED, False)
        report = replica.sync(timeout=0)
        assert (report.version, report.changed) == (1, False)
    assert serves(held, 1)


@pytest.mark.parametrize("fault", ["commit:torn", "rollback", "audit"])
def test_an_engine_in_doubt_serves_nothing_and_is_rebuilt(keys: Config, publisher: Publisher, fault: str) -> None:
    held = engine(0, fail_at={fault: 1} if fault == "commit:torn" else {fault: 1, "commit:wrong": 1})
    publish(publisher, 1)
    with Replica.open(keys, held, replica_id="r") as replica:
        with pytest.raises(EngineInDoubtError):
            replica.sync(timeout=0)
        assert (replica.version, replica.state) == (None, State.REPLICA_STATE_IN_DOUBT)
        assert acked(publisher).state == State.REPLICA_STATE_IN_DOUBT
        with pytest.raises(EngineError, match="closed"):
            held.serve()
        assert replica.sync(timeout=0).version == 1
    assert serves(held, 1)


def test_an_engine_whose_memory_was_hurt_is_rebuilt(keys: Config, publisher: Publisher) -> None:
    held = engine(0)
    publish(publisher, 1)
    with Replica.open(keys, held) as replica:
        replica.sync(timeout=0)
        publish(publisher, 2)
        changed = {item.spec.name for item in _changes(keys, 2)}
        assert "scalar" in changed
        held.table["scalar"][1][0] ^= 0x40  # the patch's steps will lead elsewhere from here
        with pytest.raises(EngineInDoubtError, match="no version"):
            replica.sync(timeout=0)
        assert not held.admits
        report = replica.sync(timeout=0)
        assert (report.version, report.previous, report.path) == (2, None, "anchor 0 and 2 patches")
    assert serves(held, 2)


def _changes(keys: Config, number: int) -> Any:
    from weight_sync.history import History

    return History(reader(keys), "default").changes(number)


def test_an_audit_finds_what_no_patch_touches(keys: Config, publisher: Publisher) -> None:
    held = engine(0)
    with Replica.open(keys, held, audit_every=2) as replica:
        replica.sync(timeout=0)
        held.table["lm_head"][1][100] ^= 1
        publish(publisher, 1)
        replica.sync(timeout=0)  # not due yet, and no change of ours
        publish(publisher, 2)
        with pytest.raises(EngineInDoubtError, match="audit found other bits"):
            replica.sync(timeout=0)
        assert not held.admits
        assert replica.sync(timeout=0).version == 2
    assert serves(held, 2)


def test_an_engine_that_raises_what_it_may_not_is_in_doubt(keys: Config, publisher: Publisher) -> None:
    class Crashing(MemoryEngine):
        def commit(self) -> Any:
            if self._counts["commit"] == 0:
                self._counts["commit"] += 1
                raise RuntimeError("device lost")
            return super().commit()

    held = Crashing(model(0))
    publish(publisher, 1)
    with Replica.open(keys, held) as replica:
        with pytest.raises(RuntimeError, match="device lost"):
            replica.sync(timeout=0)
        assert (held.admits, replica.version, replica.state) == (False, None, State.REPLICA_STATE_IN_DOUBT)
        assert replica.sync(timeout=0).version == 1
    assert serves(held, 1)


# --- a trainer that cannot be told, forks, or collects ---


def test_a_trainer_that_cannot_be_told_does_not_stop_serving(
    keys: Config, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = engine(0)
    publish(publisher, 1)

    def refuse(self: Store, key: str, data: bytes) -> None:
        raise StoreFullError("cannot write", field=key)

    with Replica.open(keys, held, replica_id="r") as replica:
        with monkeypatch.context() as patch:
            patch.setattr(Store, "put", refuse)
            report = replica.sync(timeout=0)
            assert report.version == 1 and "cannot write" in report.ack_error
            assert serves(held, 1)
        publish(publisher, 2)
        assert replica.sync(timeout=0).ack_error == ""
        assert acked(publisher).version.number == 2


def test_followers_switch_to_a_fork_once_it_has_a_version(tmp_path: Path, keys: Config, publisher: Publisher) -> None:
    held = engine(0)
    publish(publisher, 1, 2, 3)
    with (
        Replica.open(keys, held, replica_id="r") as replica,
        Replica.open(keys.replace(run_id=publisher.run_id), engine(0), replica_id="stays") as faithful,
    ):
        replica.sync(timeout=0)
        with Publisher.open(keys.replace(base=None, fork=True)) as fork:
            assert replica.sync(timeout=0).version == 3  # the fork has none yet
            assert (replica.run_id, serves(held, 3)) == (publisher.run_id, True)
            fork.publish(model(5), step=5)
            report = replica.sync(timeout=0)
            assert (report.version, report.previous, report.run_id) == (0, 3, fork.run_id)
            assert same_bits(held, model(5)) and held.announced == common_pb2.VersionId(run_id=fork.run_id, number=0)
            fork.publish(model(6), step=6)
            assert replica.sync(timeout=0).path == "1 patch from version 0"
            assert acked(fork).version.run_id == fork.run_id
            assert faithful.sync(timeout=0).run_id == publisher.run_id
        old = Path(keys.uri) / publisher.run_id / "leases"
        assert sorted(path.name for path in old.iterdir()) == ["stays.pb"]


def test_a_fork_from_what_is_served_moves_no_bits(tmp_path: Path, keys: Config, publisher: Publisher) -> None:
    held = engine(0)
    publish(publisher, 1)
    with Replica.open(keys, held, replica_id="r") as replica:
        replica.sync(timeout=0)
        held.calls.clear()
        base = str(checkpoint(tmp_path / "one", 1))
        with Publisher.open(keys.replace(base=base, fork=True)) as fork:
            report = replica.sync(timeout=0)
            assert (report.version, report.changed, report.run_id) == (0, True, fork.run_id)
            assert held.calls == ["describe", "announce"]
            fork.publish(model(2), step=2)
            assert replica.sync(timeout=0).path == "1 patch from version 0"
    assert same_bits(held, model(2))


def test_waiting_for_a_version_notices_a_fork(keys: Config, publisher: Publisher) -> None:
    held = engine(0)
    publish(publisher, 1)

    def train() -> None:
        with Publisher.open(keys.replace(base=None, fork=True)) as fork:
            for step in range(2, 6):
                fork.publish(model(step), step=step)

    with Replica.open(keys, held) as replica, Following(replica) as following:
        following.until(lambda: following.seen)
        training = threading.Thread(target=train)
        training.start()
        following.until(lambda: replica.run_id != publisher.run_id and replica.version == 3)
        training.join()
    assert same_bits(held, model(5))


def test_a_fork_that_an_engine_cannot_serve_leaves_it_where_it_was(keys: Config, publisher: Publisher) -> None:
    held = engine(0, changes_tensors=False)
    publish(publisher, 1)
    with Replica.open(keys, held) as replica:
        replica.sync(timeout=0)
        with Publisher.open(keys.replace(base=None, fork=True)) as fork:
            fork.publish({"other": torch.zeros(3)})
            for _ in range(2):
                with pytest.raises(EngineError, match="another model"):
                    replica.sync(timeout=0)
                assert serves(held, 1) and (replica.run_id, replica.version) == (publisher.run_id, 1)


def test_replicas_of_one_process_keep_leases_of_their_own(keys: Config, publisher: Publisher) -> None:
    publisher.publish(model(0), step=0)
    engines = [holding(model(9)), holding(model(9))]
    with Replica.open(keys, engines[0]) as first, Replica.open(keys, engines[1]) as second:
        assert first.replica_id != second.replica_id
        before = first.sync().version
        publisher.publish(model(1), step=1)
        after = second.sync().version
        assert dict(publisher._end.leases()) == {first.replica_id: before, second.replica_id: after} and before != after
        name = second.replica_id
        second.close()
        with Replica.open(keys, engines[1]) as again:
            assert again.replica_id == name, "a name that is free is taken again"


def test_a_lease_keeps_what_a_replica_serves(tmp_path: Path) -> None:
    keys = config(tmp_path, anchor_every=2, keep_versions=1)
    held = MemoryEngine({})
    with Publisher.open(keys) as publisher, Replica.open(keys, held, replica_id="r") as replica:
        for step in range(4):
            publisher.publish(model(step), step=step)
        replica.sync(exact=1, timeout=0)
        publisher.publish(model(4), step=4)
        publisher.collect()
        assert [e.number for e in reader(keys).entries() if e.kind in (1, 2)] == [0, 1, 4]
        assert replica.sync(timeout=0).version == 4
        publisher.collect()
        assert [e.number for e in reader(keys).entries() if e.kind in (1, 2)] == [4]
    assert not list((Path(keys.uri) / reader(keys).run_id()).glob("leases/*"))


def test_a_view_that_the_run_does_not_have_is_named(keys: Config, publisher: Publisher) -> None:
    with Replica.open(keys, engine(0), view="fp8") as replica, pytest.raises(WeightSyncError, match=r"fp8.*default"):
        replica.sync(timeout=0)


@pytest.mark.parametrize("mode", [mode.value for mode in PauseMode])
def test_the_fence_is_closed_as_configured(keys: Config, publisher: Publisher, mode: str) -> None:
    seen: list[tuple[PauseMode, float]] = []

    class Noting(MemoryEngine):
        def pause(self, mode: PauseMode, timeout: float) -> None:
            seen.append((mode, timeout))
            super().pause(mode, timeout)

    publish(publisher, 1)
    with Replica.open(keys, Noting(model(0)), pause=mode, fence_s=7.5) as replica:
        replica.sync(timeout=0)
    assert set(seen) == {(PauseMode(mode), 7.5)}


def test_an_engine_that_was_away_is_identified_again_before_it_serves(publisher: Publisher, keys: Config) -> None:
    publish(publisher, 1, 2)
    held = engine()
    with Replica.open(keys, held) as replica:
        assert replica.sync(timeout=0).version == 2
        for step, path in ((2, "2 is the newest"), (1, "from version 1"), (9, "anchor 0")):
            held.table, held.admits, held.announced = engine(step).table, True, None
            held.calls.clear()
            replica.forget()
            assert replica.version is None and replica.state == State.REPLICA_STATE_ATTACHING
            report = replica.sync(timeout=0)
            assert report.changed and report.previous is None and path in report.path
            assert held.calls.index("describe") < held.calls.index("pause") < held.calls.index("announce")
            assert serves(held, 2)


def test_what_an_engine_holds_is_told_without_moving_it(publisher: Publisher, keys: Config) -> None:
    publish(publisher, 1, 2)
    for step, held in ((0, engine(0)), (1, engine(1)), (None, engine(7))):
        with Replica.open(keys, held) as replica:
            before = {name: bits.copy() for name, (_, bits) in held.table.items()}
            assert replica.identify() == step == replica.version
            assert all((held.table[name][1] == bits).all() for name, bits in before.items())
            assert replica.sync(timeout=0).version == 2 and serves(held, 2)
