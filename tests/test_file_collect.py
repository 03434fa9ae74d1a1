"""Claims about collection: what it keeps, in which order it deletes, and whose clock it believes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from file_store import check_everything_readable, objects, opened, publish, reader, referenced, run_until_killed, shard

from weight_sync.config import Config
from weight_sync.errors import CorruptionError, VersionExpiredError, VersionMissingError
from weight_sync.proto.v1 import common_pb2, manifest_pb2, replica_pb2
from weight_sync.transport.file import FileTransport
from weight_sync.transport.file.collect import FORGET_S, LONGEST_LEASE_S, STALE_S
from weight_sync.transport.file.store import Store
from weight_sync.version import ANCHOR, EXPIRED, PATCH


@pytest.fixture
def folder(tmp_path: Path) -> Config:
    return Config(uri=str(tmp_path / "store"), poll_s=0.02, timeout_s=30, keep_versions=2)


@pytest.fixture(params=["folder", "s3"])
def config(request: pytest.FixtureRequest, folder: Config) -> Config:
    if request.param == "folder":
        return folder
    uri, options = request.getfixturevalue("s3_uri")
    return folder.replace(uri=uri, store_options=options)


def age(config: Config, key: str, seconds: float) -> None:
    """Makes an object of a folder store older by its file's own time."""
    then = time.time() - seconds
    os.utime(Path(config.uri) / key, (then, then))


def kinds(config: Config) -> str:
    """The log as a word: A P for versions, X for expired ones, E and - for EPOCH and ABORTED."""
    return "".join("?APE-X"[manifest.kind] for manifest in reader(config).entries())


def test_old_versions_become_tombstones_and_their_objects_go(config: Config) -> None:
    end = opened(config)
    for kind in (ANCHOR, PATCH, PATCH, ANCHOR, PATCH, PATCH):
        publish(end, kind)
    follower = reader(config)
    old = follower.manifest(1)
    follower.lease("slow", 1, 600)
    counts = end.collect()
    assert kinds(config) == "APXAPP"
    assert (counts["expired"], counts["objects"], counts["kept"]) == (1, 1, 5)
    follower.release("slow")
    counts = end.collect()
    assert kinds(config) == "XXXAPP"
    assert (counts["expired"], counts["objects"], counts["bytes"]) == (2, 2, 2 * len(b"headbody"))
    assert end.collect()["expired"] == 0
    assert check_everything_readable(follower) == [3, 4, 5]
    assert objects(config) == referenced(follower)
    with pytest.raises(VersionExpiredError, match="was PATCH"):
        follower.manifest(1)
    with pytest.raises(VersionExpiredError, match="version 1"):
        follower.read(old.views[0].shards[0], 0, 4)


def test_a_tombstone_keeps_its_place_and_its_digest(folder: Config) -> None:
    end = opened(folder)
    for kind in (ANCHOR, PATCH, ANCHOR, PATCH):
        publish(end, kind)
    before = list(reader(folder).entries())
    end.collect()
    tomb = list(reader(folder).entries())[1]
    assert (tomb.kind, tomb.number, tomb.epoch, tomb.parent) == (EXPIRED, 1, 0, 0)
    assert tomb.nonce == before[1].nonce
    assert tomb.views[0].digest == before[1].views[0].digest
    assert not tomb.views[0].shards
    # the number stays taken: a stale publisher cannot put it again
    assert not Store(folder).create(f"r/log/{1:020d}.pb", before[1].SerializeToString())
    assert publish(opened(folder)) == 5


def test_a_lease_ends_by_the_clock_of_the_store(config: Config) -> None:
    end = opened(config)
    for kind in (ANCHOR, PATCH, ANCHOR, PATCH, PATCH):
        publish(end, kind)
    reader(config).lease("slow", 1, 1)
    deadline = time.monotonic() + 30
    while end.collect()["expired"] == 0:
        assert time.monotonic() < deadline
    assert kinds(config) == "XXAPP"


def test_leases_are_fresh_by_their_objects_time_alone(folder: Config) -> None:
    end = opened(folder)
    for kind in (ANCHOR, PATCH, ANCHOR, PATCH, ANCHOR, PATCH, PATCH):
        publish(end, kind)
    follower = reader(folder)
    follower.lease("fresh", 1, 600)
    follower.lease("old", 3, 600)
    age(folder, "r/leases/fresh.pb", 500)
    age(folder, "r/leases/old.pb", 700)
    follower.lease("endless", 3, 2**32 - 1)
    age(folder, "r/leases/endless.pb", LONGEST_LEASE_S + 60)
    end.collect()
    assert kinds(folder) == "APXXAPP"


def test_what_no_version_refers_to_is_swept_but_never_the_number_in_flight(config: Config) -> None:
    end = opened(config)
    publish(end)
    end.put_shard(1, shard(body=b"aborted"))
    end.abort(1, "test")
    publish(end)
    refs = [end.put_shard(3, shard(body=b"in flight")) for _ in range(2)]
    counts = end.collect()
    assert (counts["expired"], counts["objects"]) == (0, 1)
    assert objects(config) == referenced(reader(config)) | {ref.object for ref in refs}
    opened(config)  # the new epoch takes number 3: its objects have lost
    assert end.collect()["objects"] == 2
    assert objects(config) == referenced(reader(config))


def test_only_age_ends_what_lies_above_the_number_in_flight(folder: Config) -> None:
    end = opened(folder)
    publish(end)
    ref = end.put_shard(7, shard())
    assert end.collect()["objects"] == 0
    age(folder, f"r/{ref.object}", STALE_S + 60)
    assert end.collect()["objects"] == 1


def test_files_in_the_making_and_things_of_silent_replicas_go_with_age(folder: Config) -> None:
    end, follower = opened(folder), reader(folder)
    publish(end)
    ack = replica_pb2.Acknowledgement(replica_id="gone")
    follower.acknowledge(ack)
    follower.acknowledge(replica_pb2.Acknowledgement(replica_id="here"))
    follower.lease("gone", 0, 600)
    for name in ("old#1", "young#2", "no leftover#x"):
        Path(folder.uri, "r", "data", name).write_bytes(b"part")
    assert objects(folder) - {"data/no leftover#x"} == referenced(follower)  # listings hide them
    age(folder, "r/acks/gone.pb", FORGET_S + 60)
    age(folder, "r/leases/gone.pb", FORGET_S + 60)
    age(folder, "r/data/old#1", 2 * 3600)
    counts = end.collect()
    assert (counts["small"], counts["leftovers"]) == (2, 1)
    assert [a.replica_id for a in end.acknowledgements()] == ["here"]
    assert {path.name for path in Path(folder.uri, "r", "data").iterdir() if path.is_file()} == {
        "young#2",
        "no leftover#x",
    }


def test_garbage_leases_keep_nothing_and_are_counted(folder: Config) -> None:
    end = opened(folder)
    for kind in (ANCHOR, ANCHOR, ANCHOR):
        publish(end, kind)
    store = Store(folder)
    store.put("r/leases/garbage.pb", b"\xff\xff")
    elsewhere = replica_pb2.Lease(version=common_pb2.VersionId(run_id="other", number=0), ttl_s=600)
    store.put("r/leases/elsewhere.pb", elsewhere.SerializeToString())
    reader(folder).lease("absurd", 2**63, 600)
    counts = end.collect()
    assert (counts["unreadable_leases"], counts["expired"]) == (1, 1)


def test_a_corrupt_entry_stops_the_collection_before_anything_is_deleted(folder: Config) -> None:
    end = opened(folder)
    for kind in (ANCHOR, ANCHOR, ANCHOR, ANCHOR):
        publish(end, kind)
    before = objects(folder)
    Store(folder).put(f"r/log/{2:020d}.pb", b"\xff\xff")
    with pytest.raises(CorruptionError, match=f"log/{2:020d}"):
        end.collect()
    assert objects(folder) == before


def test_collection_needs_no_publisher_and_disturbs_none(folder: Config) -> None:
    with pytest.raises(VersionMissingError):
        FileTransport(folder).publisher_end(0, 1).collect()
    end = opened(folder)
    for kind in (ANCHOR, PATCH, ANCHOR, PATCH):
        publish(end, kind)
    bystander = FileTransport(folder).publisher_end(0, 1)
    assert bystander.collect()["expired"] == 2
    assert publish(end) == 4
    assert bystander.collect()["expired"] == 0
    assert check_everything_readable(reader(folder)) == [2, 3, 4]


@pytest.mark.parametrize(
    "crash_at", ["collect:tombstone#1", "collect:tombstone#3", "collect:delete#1", "collect:delete#3"]
)
def test_a_killed_collection_is_finished_by_the_next(folder: Config, crash_at: str) -> None:
    end = opened(folder)
    for kind in (ANCHOR, PATCH, PATCH, ANCHOR, PATCH):
        publish(end, kind)
    run_until_killed("collect", folder, crash_at)
    follower = reader(folder)
    assert check_everything_readable(follower)[-2:] == [3, 4]
    assert referenced(follower) <= objects(folder)
    end.collect()
    assert kinds(folder) == "XXXAP"
    assert objects(folder) == referenced(follower)


def test_a_manifest_says_expired_after_any_order_of_reads(folder: Config) -> None:
    end = opened(folder)
    publish(end)
    follower = reader(folder)
    held: manifest_pb2.VersionManifest = follower.manifest(0)
    for _ in range(2):
        publish(end, ANCHOR)
    end.collect()
    with pytest.raises(VersionExpiredError):
        follower.read(held.views[0].shards[0], 0, 1)
    with pytest.raises(VersionExpiredError):
        follower.manifest(0)
    assert follower.head() == 2
