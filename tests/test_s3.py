"""Claims about the whole loop on a bucket: a real S3 server process, real requests, one that stops answering."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import moto_server, s3_bucket
from loop import (
    Child,
    checkpoint,
    config,
    digest_of,
    engine,
    follow_fresh,
    killed,
    model,
    publish_steps,
    reader,
    same_bits,
    versions,
)
from trajectory_cases import make

from weight_sync import Publisher, Replica
from weight_sync.config import Config
from weight_sync.errors import CorruptionError, EpochFencedError, StoreUnavailableError
from weight_sync.testing import MemoryEngine
from weight_sync.transport.file.store import Store


@pytest.fixture
def keys(tmp_path: Path, s3_uri: tuple[str, dict[str, str]]) -> Config:
    uri, options = s3_uri
    base = str(checkpoint(tmp_path / "base"))
    return config(tmp_path, uri=uri, store_options=options, base=base, anchor_every=3, keep_versions=2)


def test_the_whole_loop_runs_on_a_bucket(keys: Config) -> None:
    held = engine(0)
    with Replica.open(keys, held, replica_id="r") as replica:
        for start in (1, 4):  # the trainer restarts in between
            with Publisher.open(keys) as publisher:
                for step in range(start, start + 3):
                    report = publisher.publish(model(step), step=step)
                    assert report is not None and report.digest == digest_of(model(step))
                    assert replica.sync(timeout=0).version == report.version
                    assert same_bits(held, model(step))
                receipts = replica.send_trajectories([make(f"t{start}", run_id=publisher.run_id)])
                assert [r.duplicate for r in receipts] == [False]
                assert [t.id for t in publisher.take_trajectories()] == [f"t{start}"]
                acked = {a.replica_id: a.version.number for a in publisher.acknowledgements()}
                assert acked == {"r": publisher.version}
                assert publisher.collect()["expired"] >= (start > 1)
    assert same_bits(follow_fresh(keys.replace(base=None))[0], model(6))


def test_processes_that_are_killed_beside_a_bucket_are_continued(tmp_path: Path, keys: Config) -> None:
    keys = keys.replace(anchor_every=0)
    said = killed(tmp_path, publish_steps, keys, 1, 4, crash_at="commit:after#3")  # the base is the first commit
    assert [line.split()[1] for line in said] == [digest_of(model(1))]
    assert versions(keys) == [0, 1, 2]
    said = killed(tmp_path, publish_steps, keys, 3, 5, crash_at="put_shard:after#2")
    assert [line.split()[1] for line in said] == [digest_of(model(3))]
    child = Child(tmp_path, publish_steps, keys, 4, 5)
    assert child.wait() == 0
    assert same_bits(follow_fresh(keys)[0], model(5))


def test_rivals_on_a_bucket_are_fenced(keys: Config) -> None:
    with Publisher.open(keys) as first:
        first.publish(model(1), step=1)
        with Publisher.open(keys) as second:
            with pytest.raises(EpochFencedError):
                first.publish(model(2), step=2)
            second.publish(model(3), step=3)
    assert same_bits(follow_fresh(keys)[0], model(3))


def test_an_object_that_was_damaged_in_the_bucket_is_named(keys: Config) -> None:
    with Publisher.open(keys) as publisher, Replica.open(keys, engine(0)) as replica:
        publisher.publish(model(1), step=1)
        ref = reader(keys).manifest(1).views[0].shards[0]
        store, key = Store(keys), f"{publisher.run_id}/{ref.object}"
        good = store.get(key)
        assert good is not None
        store.put(key, good[:-1] + bytes([good[-1] ^ 1]))
        with pytest.raises(CorruptionError, match=ref.object.rpartition("/")[2]):
            replica.sync(timeout=0)
        store.put(key, good)
        assert replica.sync(timeout=0).version == 1


@pytest.fixture
def stoppable() -> Iterator[tuple[str, dict[str, str], int]]:
    """A bucket on a server of its own, and the server's process."""
    with moto_server() as (endpoint, server):
        uri, options = s3_bucket(endpoint)
        yield uri, {**options, "timeout": "1s", "read_timeout": "1s", "connect_timeout": "1s"}, server.pid


def test_a_bucket_that_stops_answering_costs_nothing_but_time(
    tmp_path: Path, stoppable: tuple[str, dict[str, str], int]
) -> None:
    uri, options, pid = stoppable
    keys = config(tmp_path, uri=uri, store_options=options, timeout_s=1)
    held = MemoryEngine({})
    with Publisher.open(keys) as publisher, Replica.open(keys, held, replica_id="r") as replica:
        publisher.publish(model(1), step=1)
        replica.sync(timeout=0)
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(StoreUnavailableError):
            publisher.publish(model(2), step=2)
        with pytest.raises(StoreUnavailableError):
            replica.sync(timeout=0)
        assert same_bits(held, model(1)) and held.serve()[0] == 0
        os.kill(pid, signal.SIGCONT)  # what was sent meanwhile may still arrive
        report = publisher.publish(model(3), step=3)
        assert report is not None and report.digest == digest_of(model(3))
        replica.sync(min_version=report.version, timeout=30)
        assert same_bits(held, model(3))
