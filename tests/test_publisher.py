"""Claims about the publisher: what versions it makes, and that nothing moves forward until it is safe."""

from __future__ import annotations

import pytest
from pathlib import Path

import loop
from loop import checkpoint, config, digest_of, engine, follow_fresh, killed, model, publish_steps, reader, same_bits, versions

from weight_sync import Publisher, Replica
from weight_sync.version import ANCHOR, EPOCH, PATCH
from weight_sync.transport.file.store import Store

STEPS = ["publish:encoded", "put_shard:before", "put_shard:after", "publish:sent", "publish:commit", "commit:before",
         "commit:after", "publish:promoted"]  # fmt: skip


def test_without_a_base_the_first_version_is_a_full_state(tmp_path: Path) -> None:
    keys = config(tmp_path)
    with Publisher.open(keys) as publisher:
        assert publisher.version is None
        first = publisher.publish(model(1), step=1, metadata={"note": "ü"})
        second = publisher.publish(model(2), step=2)
    assert first is not None and second is not None
    assert (first.version, first.kind, first.patch_bytes, first.digest) == (0, "ANCHOR", 0, digest_of(model(1)))
    assert (second.version, second.kind, second.anchor_bytes, second.digest) == (1, "PATCH", 0, digest_of(model(2)))
    assert 0 < second.changed < second.elements / 10
    manifest = reader(keys).manifest(0)
    assert (manifest.step, dict(manifest.metadata), manifest.HasField("parent")) == (1, {"note": "ü"}, False)
    assert same_bits(follow_fresh(keys)[0], model(2))


def test_a_base_is_version_0_by_reference(tmp_path: Path) -> None:
    keys = config(tmp_path, base=str(checkpoint(tmp_path / "base")))
    with Publisher.open(keys) as publisher:
        assert publisher.version == 0
        report = publisher.publish(model(1), step=1)
    assert report is not None and (report.version, report.kind) == (1, "PATCH")
    base = reader(keys).manifest(0)
    assert (base.kind, list(base.views[0].shards), base.base.uri) == (ANCHOR, [], str(tmp_path / "base"))
    assert same_bits(follow_fresh(keys)[0], model(1))
    booted = engine(0)
    with Replica.open(keys, booted) as replica:
        report = replica.sync(timeout=0)
        assert (report.version, report.path) == (1, "1 patches from version 0")
    assert same_bits(booted, model(1))


@pytest.mark.parametrize("based", [False, True])
def test_a_restarted_publisher_continues_the_run_bit_for_bit(tmp_path: Path, based: bool) -> None:
    keys = config(tmp_path, base=str(checkpoint(tmp_path / "base")) if based else None)
    follower = engine(0)
    with Replica.open(keys, follower, replica_id="r") as replica:
        runs = set()
        for start in (1, 4, 7):
            with Publisher.open(keys) as publisher:
                runs.add(publisher.run_id)
                for step in range(start, start + 3):
                    report = publisher.publish(model(step), step=step)
                    assert report is not None and report.digest == digest_of(model(step))
                    replica.sync(timeout=0)
                    assert same_bits(follower, model(step))
    assert len(runs) == 1
    kinds = [entry.kind for entry in reader(keys).entries()]
    assert kinds == [ANCHOR, *[PATCH] * (2 + based), EPOCH, *[PATCH] * 3, EPOCH, *[PATCH] * 3]
    assert same_bits(follow_fresh(keys)[0], model(9))


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("at", [1, 3])
def test_a_publisher_killed_at_any_step_is_continued(tmp_path: Path, step: str, at: int) -> None:
    keys = config(tmp_path)
    said = killed(tmp_path, publish_steps, keys, 1, 5, crash_at=f"{step}#{at}")
    done = step in ("commit:after", "publish:promoted")
    committed = at if done else at - 1
    assert len(said) == at - 1
    assert versions(keys) == list(range(committed))
    if committed:
        assert same_bits(follow_fresh(keys)[0], model(committed))
    with Publisher.open(keys, keep_versions=100) as publisher:
        assert publisher.step == (committed or None)
        report = publisher.publish(model(6), step=6)
        assert report is not None and report.digest == digest_of(model(6))
        publisher.collect()
    assert same_bits(follow_fresh(keys)[0], model(6))
    assert objects(keys) == {ref.object for entry in reader(keys).entries() for v in entry.views for ref in v.shards}


def objects(keys: loop.Config) -> set[str]:
    run = reader(keys).run_id()
    return {meta.key.removeprefix(f"{run}/") for meta in Store(keys).list(f"{run}/data")}
