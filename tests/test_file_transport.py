"""Claims about the store transport that hold on a folder, in memory and on a real S3 server alike."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from blake3 import blake3
from file_store import check_everything_readable, objects, opened, publish, reader, shard, version
from trajectory_cases import make

from weight_sync.config import Config
from weight_sync.errors import (
    CorruptionError,
    EpochFencedError,
    ForkRequiredError,
    InputError,
    LineageError,
    VersionMissingError,
)
from weight_sync.ports import Fate, ShardBytes
from weight_sync.proto.v1 import common_pb2, replica_pb2, trajectory_pb2
from weight_sync.transport.file import FileTransport
from weight_sync.transport.file.store import Store
from weight_sync.version import ABORTED, ANCHOR, EPOCH, PATCH


@pytest.fixture(params=["folder", "memory", "s3"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> Config:
    if request.param == "s3":
        uri, options = request.getfixturevalue("s3_uri")
        return Config(uri=uri, store_options=options, poll_s=0.02, timeout_s=30, replica_id="me")
    uri = str(tmp_path / "a store") if request.param == "folder" else f"memory://{tmp_path.name}/store"
    return Config(uri=uri, poll_s=0.02, timeout_s=30, replica_id="me")


# --- versions ---


def test_a_version_is_seen_after_its_commit_and_not_before(config: Config) -> None:
    end, follower = opened(config), reader(config)
    assert follower.head() is None
    ref = end.put_shard(0, shard("anchor"))
    assert follower.head() is None
    end.commit(version(end, 0, ANCHOR, None, [ref]))
    assert follower.head() == 0
    assert publish(end) == 1
    assert follower.head() == 1
    assert follower.manifest(1).views[0].shards[0].object in objects(config)
    assert check_everything_readable(follower) == [0, 1]


def test_a_large_shard_comes_back_byte_for_byte_and_by_range(config: Config) -> None:
    end = opened(config)
    parts = [bytes([n]) * size for n, size in enumerate((5 << 20, 0, 1, 9 << 20, 7 << 20))]
    whole = b"the head" + b"".join(parts)
    ref = end.put_shard(0, ShardBytes("anchor", 3, common_pb2.FORM_RAW, b"the head", [memoryview(p) for p in parts]))
    assert (ref.size, ref.head_size, ref.rank, ref.form) == (len(whole), 8, 3, common_pb2.FORM_RAW)
    assert ref.blake3 == blake3(whole).digest()
    assert ref.head_blake3 == blake3(b"the head").digest()
    end.commit(version(end, 0, ANCHOR, None, [ref]))
    follower = reader(config)
    assert follower.read(ref, 0, ref.size) == whole
    assert follower.read(ref, 5 << 20, 100) == whole[5 << 20 : (5 << 20) + 100]
    assert follower.read(ref, ref.size - 1, 1) == whole[-1:]
    assert follower.read(ref, ref.size, 0) == b""


def test_a_restarted_publisher_goes_on_in_a_new_epoch_from_the_head(config: Config) -> None:
    first = opened(config)
    assert (first._opened().epoch, first._opened().created) == (0, True)
    publish(first)
    publish(first)
    second = FileTransport(config).publisher_end(0, 1)
    run = second.open_run(None, fork_of=None, writer="second")
    assert (run.run_id, run.epoch, run.created) == ("r", 2, False)
    assert run.head is not None
    assert run.head.number == 1
    assert publish(second) == 3
    assert [e.kind for e in second.reader().entries()] == [ANCHOR, PATCH, EPOCH, PATCH]
    assert [e.epoch for e in second.reader().entries()] == [0, 0, 2, 2]


def test_a_zombie_publisher_is_fenced_and_told_by_whom(config: Config) -> None:
    zombie = opened(config)
    publish(zombie)
    refs = [zombie.put_shard(1, shard())]
    late = version(zombie, 1, PATCH, 0, refs)
    newer = opened(config, writer="host7 pid 42")
    with pytest.raises(EpochFencedError, match="EPOCH 1 of epoch 1 by host7 pid 42"):
        zombie.commit(late)
    with pytest.raises(EpochFencedError):
        zombie.next_number()
    assert zombie.fate(1) is Fate.ABORTED
    assert zombie.abort(1, "settle") is Fate.ABORTED
    assert publish(newer) == 2
    with pytest.raises(EpochFencedError):
        zombie.commit(version(zombie, 3, PATCH, 2))
    with pytest.raises(EpochFencedError):
        zombie.abort(3, "settle")
    assert check_everything_readable(reader(config)) == [0, 2]


def test_a_new_run_opened_twice_belongs_to_whoever_commits_entry_0(config: Config) -> None:
    one, two = opened(config, "one"), opened(config, "two")
    assert one._opened() == two._opened()  # nothing was written yet, so both may try
    one.commit(version(one, 0, ANCHOR, None))
    with pytest.raises(EpochFencedError, match="by test"):
        two.commit(version(two, 0, ANCHOR, None))
    with pytest.raises(EpochFencedError):
        two.next_number()
    assert two.fate(0) is Fate.ABORTED
    assert publish(one) == 1


def test_the_same_put_again_is_success_and_another_one_is_not(config: Config) -> None:
    end = opened(config)
    manifest = version(end, 0, ANCHOR, None)
    end.commit(manifest)
    end.commit(manifest)  # as after an answer that was lost
    assert end.next_number() == 1
    with pytest.raises(LineageError, match="committed already"):
        end.commit(version(end, 0, ANCHOR, None))


def test_an_aborted_number_cannot_come_back_by_a_delayed_put(config: Config) -> None:
    end = opened(config)
    publish(end)
    delayed = version(end, 1, PATCH, 0, [end.put_shard(1, shard())])
    assert end.fate(1) is Fate.OPEN
    assert end.abort(1, "no answer") is Fate.ABORTED
    assert end.abort(1, "again") is Fate.ABORTED
    with pytest.raises(LineageError, match="no answer"):
        end.commit(delayed)
    assert end.fate(1) is Fate.ABORTED
    assert publish(end) == 2
    follower = reader(config)
    assert follower.manifest(2).parent == 0
    with pytest.raises(VersionMissingError, match="ABORTED: no answer"):
        follower.manifest(1)
    assert [e.kind for e in follower.entries()] == [ANCHOR, ABORTED, PATCH]


def test_a_committed_number_is_not_aborted(config: Config) -> None:
    end = opened(config)
    publish(end)
    assert end.abort(0, "no answer") is Fate.COMMITTED
    assert end.fate(0) is Fate.COMMITTED


def test_other_ranks_learn_the_fate_from_the_log(config: Config) -> None:
    rank0, rank1 = FileTransport(config).publisher_end(0, 2), FileTransport(config).publisher_end(1, 2)
    rival = FileTransport(config).publisher_end(1, 2)
    run = rank0.open_run("r", fork_of=None, writer="w")
    for other in (rank1, rival):
        other.attach(run)
    refs = [rank0.put_shard(0, shard("anchor")), rank1.put_shard(0, shard("anchor", rank=1))]
    rival.put_shard(0, shard("anchor", rank=1))
    assert rank1.fate(0) is Fate.OPEN
    rank0.commit(version(rank0, 0, ANCHOR, None, refs))
    assert rank1.fate(0) is Fate.COMMITTED
    assert rival.fate(0) is Fate.ABORTED  # of the publisher that lost entry 0, though its epoch is 0 too


def test_entries_that_do_not_continue_the_log_are_refused(config: Config) -> None:
    end = opened(config)
    publish(end)
    for bad in (version(end, 5, PATCH, 0), version(end, 1, PATCH, None)):
        with pytest.raises(LineageError):
            end.commit(bad)
    with pytest.raises(LineageError):
        end.abort(5, "not there yet")
    wrong_epoch = version(end, 1, PATCH, 0)
    wrong_epoch.epoch = 1
    no_nonce = version(end, 1, PATCH, 0)
    no_nonce.nonce = b""
    for bad in (wrong_epoch, no_nonce, version(end, 1, EPOCH, None)):
        with pytest.raises(InputError):
            end.commit(bad)
    assert end.next_number() == 1


# --- runs ---


def test_a_fork_is_a_new_run_that_followers_notice(config: Config) -> None:
    end, follower, named = opened(config, run_id=None), reader(config), None
    publish(end)
    old = follower.run_id()
    fork = FileTransport(config).publisher_end(0, 1)
    parent = common_pb2.VersionId(run_id=old, number=0)
    run = fork.open_run("forked", fork_of=parent, writer="w")
    assert (run.run_id, run.epoch, run.head, run.created) == ("forked", 0, None, True)
    assert (follower.run_id(), follower.newest_run()) == (old, "forked")
    assert reader(config).head() is None  # nothing of the old run is served as the new one's
    with pytest.raises(VersionMissingError):
        reader(config).manifest(0)
    publish(fork)
    named = reader(config, old)
    assert (reader(config).run_id(), named.run_id()) == ("forked", old)
    assert reader(config.replace(run_id=old)).run_id() == old
    with pytest.raises(InputError, match="exists already"):
        end.open_run(old, fork_of=parent, writer="w")
    with pytest.raises(VersionMissingError):
        end.open_run("x", fork_of=common_pb2.VersionId(run_id=old, number=9), writer="w")
    with pytest.raises(VersionMissingError):
        end.open_run("x", fork_of=common_pb2.VersionId(run_id="nobody", number=0), writer="w")


def test_a_run_that_is_not_there_is_not_confused_with_the_others(config: Config) -> None:
    opened(config, run_id="first")
    with pytest.raises(ForkRequiredError, match="frist"):
        opened(config, run_id="frist")
    with pytest.raises(VersionMissingError, match="frist"):
        reader(config, "frist").run_id()


def test_a_run_without_entries_is_opened_as_new_again(config: Config) -> None:
    assert opened(config)._opened().created
    again = opened(config, run_id=None)
    assert again._opened().created
    assert publish(again) == 0


def test_a_run_whose_first_number_was_aborted_is_still_usable(config: Config) -> None:
    first = opened(config)
    assert first.abort(0, "base vanished") is Fate.ABORTED
    second = opened(config)
    assert (second._opened().created, second._opened().head, second._opened().epoch) == (False, None, 1)
    assert publish(second) == 2
    assert check_everything_readable(reader(config)) == [2]


# --- following ---


def test_a_wait_ends_with_the_newest_version_or_with_none(config: Config) -> None:
    follower = reader(config)
    assert follower.wait(None, 0.05) is None  # no store yet
    end = opened(config)
    assert follower.wait(None, 0.05) is None  # no version yet
    publisher = threading.Thread(target=lambda: publish(end))
    publisher.start()
    assert follower.wait(None, 30) == 0
    publisher.join()
    assert follower.wait(0, 0) is None
    publish(end)
    publish(end)
    end.abort(3, "test")
    assert follower.wait(0, 0) == 2
    opened(config)
    assert follower.wait(2, 0.05) is None  # EPOCH and ABORTED are no versions
    assert follower.head() == 2


def test_closing_ends_a_wait_at_once(config: Config) -> None:
    follower = reader(config)
    closer = threading.Thread(target=follower.close)
    closer.start()
    assert follower.wait(None, 600) is None
    closer.join()


def test_a_late_reader_finds_the_head_of_a_long_log_whatever_the_hint_says(config: Config) -> None:
    end = opened(config)
    early = reader(config)
    assert early.head() is None
    for _ in range(14):
        number = end.next_number()
        end.commit(version(end, number, PATCH if number else ANCHOR, number - 1 if number else None))
    store = Store(config)
    hints = [b"", b"\xff\xff", common_pb2.VersionId(run_id="r", number=10**9).SerializeToString()]
    hints += [common_pb2.VersionId(run_id="r", number=3).SerializeToString(), b"x" * 5000]
    for hint in hints:
        store.put("latest", hint)
        assert reader(config).head() == 13
    store.delete("latest")
    assert reader(config).head() == 13
    assert early.head() == 13
    assert [e.number for e in reader(config).entries(11)] == [11, 12, 13]
    assert list(reader(config).entries(99)) == []


# --- the other direction ---


def test_acknowledgements_are_the_last_of_each_replica(config: Config) -> None:
    end = opened(config)
    follower = reader(config)
    for name, number in (("a", 1), ("b", 1), ("a", 2)):
        version_id = common_pb2.VersionId(run_id="r", number=number)
        follower.acknowledge(replica_pb2.Acknowledgement(replica_id=name, version=version_id))
    Store(config).put("r/acks/evil.pb", b"\xff\xff")
    found = {ack.replica_id: ack for ack in end.acknowledgements()}
    assert {name: ack.version.number for name, ack in found.items() if not ack.error} == {"a": 2, "b": 1}
    assert "not a Acknowledgement" in found["evil"].error


def test_wants_are_answered_by_a_stored_anchor_and_withdrawn_by_a_serving_replica(config: Config) -> None:
    end, follower = opened(config), reader(config)
    end.commit(version(end, 0, ANCHOR, None))
    follower.want("a", 0)
    follower.want("b", 0)
    assert end.wants() == {"a": 0, "b": 0}
    serving = replica_pb2.Acknowledgement(replica_id="a", state=replica_pb2.REPLICA_STATE_SERVING)
    follower.acknowledge(serving)
    assert end.wants() == {"b": 0}
    publish(end, ANCHOR)
    assert end.wants() == {}


def batch(*ids: str) -> list[trajectory_pb2.Trajectory]:
    return [make(name, run_id="r") for name in ids]


def test_trajectories_arrive_once_and_duplicates_are_said_to_be_such(config: Config) -> None:
    end, sender = opened(config), reader(config)
    assert [r.duplicate for r in sender.send_trajectories(batch("a", "b", "a"))] == [False, False, True]
    assert [r.duplicate for r in sender.send_trajectories(batch("b", "c"))] == [True, False]
    restarted = reader(config)
    assert [r.duplicate for r in restarted.send_trajectories(batch("c", "d"))] == [True, False]
    with pytest.raises(InputError, match=r"batch\[0\].id"):
        sender.send_trajectories(batch(""))
    taken = [t.id for t in end.take_trajectories(2)] + [t.id for t in end.take_trajectories(9)]
    assert sorted(taken) == ["a", "b", "c", "d"]
    assert end.take_trajectories(9) == []
    assert Store(config).list("r/trajectories") == []


def test_trajectories_are_delivered_again_when_the_taker_dies_before_its_next_call(config: Config) -> None:
    end, sender = opened(config), reader(config)
    sender.send_trajectories(batch("a", "b"))
    assert [t.id for t in end.take_trajectories(1)] == ["a"]
    after_crash = opened(config)
    assert [t.id for t in after_crash.take_trajectories(5)] == ["a", "b"]
    after_crash.close()
    assert opened(config).take_trajectories(5) == []


def test_an_unreadable_batch_is_reported_once_and_set_aside(config: Config) -> None:
    end, sender = opened(config), reader(config)
    sender.send_trajectories(batch("a"))
    Store(config).put("r/trajectories/evil/0.pb", b"\xff\xff")
    with pytest.raises(CorruptionError, match=r"trajectories/evil/0\.pb"):
        end.take_trajectories(5)
    assert [t.id for t in end.take_trajectories(5)] == ["a"]
    assert [meta.key for meta in Store(config).list("r/rejected")] == ["r/rejected/trajectories.evil.0.pb"]
