"""Claims about what a host keeps of a store: it is read once, stays below its quota, and never hides damage."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loop import checkpoint, config, digest_of, model

from weight_sync import Publisher, Replica
from weight_sync.config import Config
from weight_sync.errors import CorruptionError
from weight_sync.kept import Kept
from weight_sync.ports import Folded, ReplicaEnd
from weight_sync.registry import open_transport
from weight_sync.testing import MemoryEngine


class Far:
    """A transport whose store is far away: it counts what is read there, and may hurt it."""

    def __init__(self, config: Config) -> None:
        self.inner, self.reads, self.hurt = open_transport(config), Counter[tuple[str, int, int]](), 0

    def replica_end(self, run_id: str | None = None) -> ReplicaEnd:
        far, end = self, self.inner.replica_end(run_id)

        class End:
            def __getattr__(self, name: str) -> Any:
                return getattr(end, name)

            def local(self, ref: Any) -> Path | None:
                return None

            def fold(
                self, view: str, have: int, target: int, compact: bool = False, regions: Any = None
            ) -> Folded | None:
                return None

            def read(self, ref: Any, offset: int, length: int) -> memoryview:
                far.reads[ref.object, offset, length] += 1
                data = bytearray(end.read(ref, offset, length))
                if far.hurt and data:
                    far.hurt -= 1
                    data[-1] ^= 1
                return memoryview(data)

        return End()  # type: ignore[return-value]


@pytest.fixture
def keys(tmp_path: Path) -> Config:
    made = config(tmp_path, base=str(checkpoint(tmp_path / "base")))
    with Publisher.open(made) as publisher:
        for step in (1, 2, 3):
            publisher.publish(model(step), step=step)
    return made.replace(cache_dir=str(tmp_path / "cache"))


def follow(keys: Config, far: Far) -> str:
    """A new replica with an empty engine; the digest that it serves."""
    with Replica(keys, far, MemoryEngine(model(0))) as replica:  # type: ignore[arg-type]
        replica.sync(exact=1)
        return replica.sync().digest


def test_a_second_replica_of_the_host_reads_nothing_again(keys: Config) -> None:
    far = Far(keys)
    assert follow(keys, far) == digest_of(model(3))
    assert far.reads and set(far.reads.values()) == {1}
    before = dict(far.reads)
    assert follow(keys, far) == digest_of(model(3)), "also after a restart: nothing is in memory"
    assert far.reads == before
    assert follow(keys.replace(cache_dir=None), far) and far.reads != before


def test_bytes_that_were_hurt_on_the_way_are_not_kept(keys: Config) -> None:
    far = Far(keys)
    far.hurt = 1
    assert follow(keys, far) == digest_of(model(3))
    before = dict(far.reads)
    assert follow(keys, far) == digest_of(model(3)) and far.reads == before
    other = Far(keys)
    other.hurt = 10**9
    shard = next(Path(keys.cache_dir or "", "objects").glob("patch-*"))
    data = shard.read_bytes()
    shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CorruptionError):
        follow(keys, other)
    assert follow(keys, far) == digest_of(model(3)), "a file that the disk hurt is read again"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_can_be_derived_goes_first(tmp_path: Path) -> None:
    kept = Kept(tmp_path, 3 * 116)
    for k, kind in enumerate(("anchor", "patch", "fold")):
        kept.put(kind, "a", memoryview(bytes(100)))
        os.utime(tmp_path / f"{kind}-a", ns=(k, k))  # the anchor is the oldest
    kept.put("patch", "b", memoryview(bytes(100)))
    assert names(tmp_path) == ["anchor-a", "patch-a", "patch-b"]
    assert kept.get("patch", "a") is not None, "used just now"
    kept.put("fold", "b", memoryview(bytes(100)))
    assert names(tmp_path) == ["anchor-a", "fold-b", "patch-a"]
    kept.put("anchor", "b", memoryview(bytes(400)))
    assert names(tmp_path) == ["anchor-a", "fold-b", "patch-a"], "larger than the quota"


@settings(max_examples=30, deadline=None)
@given(
    puts=st.lists(
        st.tuples(st.sampled_from(["fold", "patch", "anchor"]), st.integers(0, 5), st.binary(max_size=60)), max_size=30
    )
)
def test_what_is_kept_comes_back_as_it_was_and_stays_below_the_quota(puts: Any, tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.mktemp("kept")
    kept, last = Kept(folder, 150), {}
    for kind, name, data in puts:
        kept.put(kind, str(name), memoryview(data))
        last[kind, str(name)] = data
        assert kept.get(kind, str(name)) == data, "what was just put is there"
        assert sum(path.stat().st_size for path in folder.iterdir()) <= 150
        for (a, b), expected in last.items():
            assert kept.get(a, b) in (None, expected)


def test_a_disk_that_is_full_costs_nothing_but_the_keeping(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    kept = Kept(tmp_path / "file" / "folder", 100)
    kept.put("patch", "a", memoryview(b"x"))
    assert kept.get("patch", "a") is None
