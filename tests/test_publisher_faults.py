"""Claims about a publisher whose process, store or rivals fail: nothing half-made shows, and nothing is lost."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from loop import checkpoint, config, digest_of, follow_fresh, killed, model, publish_steps, reader, same_bits, versions

from weight_sync import Publisher
from weight_sync.config import Config
from weight_sync.errors import (
    CorruptionError,
    DeadlineError,
    EpochFencedError,
    ForkRequiredError,
    LineageError,
    StoreFullError,
    StoreReadOnlyError,
    StoreUnavailableError,
    VersionExpiredError,
    VersionMissingError,
)
from weight_sync.ports import Fate, ReplicaEnd, ShardBytes
from weight_sync.proto.v1 import manifest_pb2
from weight_sync.transport.file import FilePublisherEnd, FileTransport
from weight_sync.transport.file.store import Store
from weight_sync.version import ABORTED, ANCHOR, EPOCH, PATCH

STEPS = ["publish:encoded", "put_shard:before", "put_shard:after", "publish:sent", "publish:commit", "commit:before",
         "commit:after", "publish:promoted"]  # fmt: skip


def kinds(keys: Config) -> list[int]:
    return [entry.kind for entry in reader(keys).entries()]


def check_store(keys: Config, step: int) -> None:
    """The head is the state after ``step``, a late joiner gets its bits, and the store holds nothing else."""
    assert same_bits(follow_fresh(keys)[0], model(step))
    run = reader(keys).run_id()
    found = {meta.key.removeprefix(f"{run}/") for meta in Store(keys).list(f"{run}/data")}
    assert found == {ref.object for entry in reader(keys).entries() for v in entry.views for ref in v.shards}


# --- killed ---


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("at", [1, 3])
def test_a_publisher_killed_at_any_step_is_continued(tmp_path: Path, step: str, at: int) -> None:
    keys = config(tmp_path)
    said = killed(tmp_path, publish_steps, keys, 1, 5, crash_at=f"{step}#{at}")
    committed = at if step in ("commit:after", "publish:promoted") else at - 1
    assert len(said) == at - 1
    assert versions(keys) == list(range(committed))
    if committed:
        assert same_bits(follow_fresh(keys)[0], model(committed))
    with Publisher.open(keys) as publisher:
        assert publisher.step == (committed or None)
        report = publisher.publish(model(6), step=6)
        assert report is not None and report.digest == digest_of(model(6))
        publisher.collect()
    check_store(keys, 6)


@pytest.mark.parametrize("step", ["commit:before", "commit:after"])
def test_a_publisher_killed_around_its_base_starts_from_it(tmp_path: Path, step: str) -> None:
    keys = config(tmp_path, base=str(checkpoint(tmp_path / "base")))
    assert killed(tmp_path, publish_steps, keys, 1, 5, crash_at=step) == []
    with Publisher.open(keys) as publisher:
        report = publisher.publish(model(1), step=1)
    assert report is not None and report.kind == "PATCH"
    assert same_bits(follow_fresh(keys)[0], model(1))


# --- a store that fails ---


def filled(disk: Path) -> Path:
    filler = disk / "filler"
    with pytest.raises(OSError, match="No space left"), open(filler, "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return filler


@pytest.mark.parametrize("anchor_every", [0, 1])  # 1: the base is promoted before a full state is sent
def test_a_full_disk_leaves_head_and_base_and_the_next_publish_carries_both_steps(
    small_disk: Path, anchor_every: int
) -> None:
    keys = config(small_disk, anchor_every=anchor_every)
    with Publisher.open(keys) as publisher:
        publisher.publish(model(1), step=1)
        filler = filled(small_disk)
        for _ in range(2):
            with pytest.raises(StoreFullError, match="gc"):
                publisher.publish(model(2), step=2)
        assert (publisher.version, publisher.step, versions(keys)) == (0, 1, [0])
        filler.unlink()
        report = publisher.publish(model(3), step=3)
        assert report is not None and report.digest == digest_of(model(3))
        assert reader(keys).manifest(report.version).parent == 0
        publisher.publish(model(4), step=4)
        publisher.collect()
    check_store(keys, 4)


def test_a_read_only_store_leaves_head_and_base_and_the_next_publish_carries_both_steps(small_disk: Path) -> None:
    keys = config(small_disk)
    with Publisher.open(keys) as publisher:
        publisher.publish(model(1), step=1)
        subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
        with pytest.raises(StoreReadOnlyError):
            publisher.publish(model(2), step=2)
        subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
        assert versions(keys) == [0]
        report = publisher.publish(model(3), step=3)
        assert report is not None and report.digest == digest_of(model(3))
    check_store(keys, 3)


def test_a_file_snapshot_without_room_is_refused_and_does_not_kill_the_trainer(
    tmp_path: Path, small_disk: Path
) -> None:
    keys = config(tmp_path, snapshot="file", snapshot_dir=str(small_disk))
    big = {"w": torch.zeros(1 << 20, dtype=torch.bfloat16)}
    with Publisher.open(keys) as publisher:
        with pytest.raises(StoreFullError, match="snapshot_dir"):
            publisher.publish(big)
        publisher.publish(model(1))
    assert same_bits(follow_fresh(keys)[0], model(1))


class _Faulty(FilePublisherEnd):
    """A store end whose answers get lost: ``faults`` maps a call to what happens instead, once per entry."""

    faults: list[tuple[str, str]]  # (method, "before" or "after" the real thing), consumed in order

    def _fault(self, method: str, when: str) -> None:
        if self.faults[:1] == [(method, when)]:
            self.faults.pop(0)
            raise StoreUnavailableError("the answer was lost", field=method)

    def commit(self, manifest: manifest_pb2.VersionManifest) -> None:
        self._fault("commit", "before")
        super().commit(manifest)
        self._fault("commit", "after")

    def abort(self, number: int, reason: str) -> Fate:
        self._fault("abort", "before")
        fate = super().abort(number, reason)
        self._fault("abort", "after")
        return fate

    def put_shard(self, number: int, shard: ShardBytes) -> manifest_pb2.ShardRef:
        self._fault("put_shard", "before")
        return super().put_shard(number, shard)

    def collect(self) -> dict[str, int]:  # type: ignore[override]
        self._fault("collect", "before")
        return dict(super().collect())


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Faults to come, of every publisher's end in this test."""
    waiting: list[tuple[str, str]] = []

    class Transport(FileTransport):
        def publisher_end(self, rank: int, world_size: int) -> FilePublisherEnd:
            end = _Faulty(self._store, self._config, rank, world_size)
            end.faults = waiting
            return end

    monkeypatch.setattr("weight_sync.publisher.open_transport", Transport)
    return waiting


def test_a_commit_whose_answer_was_lost_is_looked_up(tmp_path: Path, faults: list[tuple[str, str]]) -> None:
    with Publisher.open(config(tmp_path)) as publisher:
        publisher.publish(model(1), step=1)
        faults += [("commit", "after")]
        report = publisher.publish(model(2), step=2)
        assert not faults and report is not None and (report.version, publisher.version) == (1, 1)
        publisher.publish(model(3), step=3)
    assert kinds(config(tmp_path)) == [ANCHOR, PATCH, PATCH]
    check_store(config(tmp_path), 3)


def test_a_commit_that_failed_is_closed_before_the_next(tmp_path: Path, faults: list[tuple[str, str]]) -> None:
    with Publisher.open(config(tmp_path)) as publisher:
        publisher.publish(model(1), step=1)
        faults += [("commit", "before")]
        with pytest.raises(StoreUnavailableError):
            publisher.publish(model(2), step=2)
        assert (faults, publisher.version, publisher.step) == ([], 0, 1)
        report = publisher.publish(model(2), step=2)
        assert report is not None and report.version == 2
        publisher.collect()
    assert kinds(config(tmp_path)) == [ANCHOR, ABORTED, PATCH]
    check_store(config(tmp_path), 2)


@pytest.mark.parametrize("anchor_every", [0, 1])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_number_of_unknown_fate_is_settled_by_the_next_publish(
    tmp_path: Path, faults: list[tuple[str, str]], when: str, anchor_every: int
) -> None:
    keys = config(tmp_path, anchor_every=anchor_every)
    with Publisher.open(keys) as publisher:
        publisher.publish(model(1), step=1)
        faults += [("commit", when), ("abort", "before"), ("abort", "before")]
        for _ in range(2):
            with pytest.raises(StoreUnavailableError):
                publisher.publish(model(2), step=2)
        assert (faults, publisher.version) == ([], 0)
        report = publisher.publish(model(3), step=3)
        assert report is not None and (report.version, report.digest) == (2, digest_of(model(3)))
        assert reader(keys).manifest(2).parent == (1 if when == "after" else 0)
        publisher.publish(model(4), step=4)
        publisher.collect()
    second = ANCHOR if anchor_every else PATCH
    assert kinds(keys) == [ANCHOR, second if when == "after" else ABORTED, second, second]
    check_store(keys, 4)


def test_an_abort_whose_answer_was_lost_is_asked_again(tmp_path: Path, faults: list[tuple[str, str]]) -> None:
    with Publisher.open(config(tmp_path)) as publisher:
        publisher.publish(model(1), step=1)
        faults += [("commit", "before"), ("abort", "after")]
        with pytest.raises(StoreUnavailableError):
            publisher.publish(model(2), step=2)
        publisher.publish(model(3), step=3)
    assert kinds(config(tmp_path)) == [ANCHOR, ABORTED, PATCH]
    assert same_bits(follow_fresh(config(tmp_path))[0], model(3))


def test_a_run_whose_first_number_was_aborted_still_starts_from_its_base(
    tmp_path: Path, faults: list[tuple[str, str]]
) -> None:
    keys = config(tmp_path, base=str(checkpoint(tmp_path / "base")))
    faults += [("commit", "before")]
    with pytest.raises(StoreUnavailableError):
        Publisher.open(keys)
    with Publisher.open(keys) as publisher:
        report = publisher.publish(model(1), step=1)
        assert report is not None and report.kind == "PATCH"
    assert kinds(keys) == [ABORTED, EPOCH, ANCHOR, PATCH]
    assert same_bits(follow_fresh(keys)[0], model(1))
    with Publisher.open(keys) as publisher:
        publisher.publish(model(2), step=2)
    wrong = keys.replace(base=str(checkpoint(tmp_path / "other", 5)))
    with pytest.raises(ForkRequiredError):
        Publisher.open(wrong)


def test_a_collection_that_fails_does_not_fail_the_publish(tmp_path: Path, faults: list[tuple[str, str]]) -> None:
    keys = config(tmp_path, collect_every=2, keep_versions=1, anchor_every=2)
    with Publisher.open(keys) as publisher:
        publisher.publish(model(1), step=1)
        faults += [("collect", "before")]
        report = publisher.publish(model(2), step=2)
        assert report is not None and "answer was lost" in report.collect_error
        publisher.publish(model(3), step=3)
        report = publisher.publish(model(4), step=4)
        assert report is not None and report.collect_error == ""
    assert versions(keys) == [2, 3]
    check_store(keys, 4)


def test_garbage_from_a_replica_does_not_stop_the_trainer(tmp_path: Path) -> None:
    keys = config(tmp_path, base=str(checkpoint(tmp_path / "base")))
    with Publisher.open(keys) as publisher:
        Store(keys).put(f"{publisher.run_id}/wants/evil.pb", b"\xff\xff")
        Store(keys).put(f"{publisher.run_id}/acks/evil.pb", b"\xff\xff")
        Store(keys).put(f"{publisher.run_id}/leases/evil.pb", b"\xff\xff")
        for step in (1, 2):
            report = publisher.publish(model(step), step=step)
            assert report is not None and report.kind == "PATCH"
        assert "not a" in next(message.error for message in publisher.acknowledgements())
        assert publisher.collect()["unreadable_leases"] == 1
    check_store(keys, 2)


# --- in the background ---


def test_an_error_in_the_background_surfaces_at_the_next_call_and_nothing_is_lost(
    tmp_path: Path, faults: list[tuple[str, str]]
) -> None:
    keys = config(tmp_path, overlap=True)
    tensors = model(1)
    with Publisher.open(keys) as publisher:
        assert publisher.publish(tensors, step=1) is None
        for tensor in tensors.values():
            tensor.zero_()  # the trainer goes on at once; what was handed over has been taken
        report = publisher.settle()
        assert report is not None and report.digest == digest_of(model(1))
        faults += [("put_shard", "before")]
        assert publisher.publish(model(2), step=2) is None
        with pytest.raises(StoreUnavailableError):
            publisher.publish(model(3), step=3)
        assert publisher.version == 0
        assert publisher.publish(model(3), step=3) is None
        report = publisher.settle()
        assert report is not None and (report.version, report.digest) == (1, digest_of(model(3)))
        faults += [("put_shard", "before")]
        assert publisher.publish(model(4), step=4) is None
        with pytest.raises(StoreUnavailableError):
            publisher.settle()
        assert publisher.settle() == report  # told once
    check_store(keys, 3)


def test_waiting_for_the_version_in_flight_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_again = threading.Event()
    put = FilePublisherEnd.put_shard

    def slow(end: FilePublisherEnd, number: int, shard: ShardBytes) -> manifest_pb2.ShardRef:
        assert open_again.wait(60)
        return put(end, number, shard)

    monkeypatch.setattr(FilePublisherEnd, "put_shard", slow)
    with Publisher.open(config(tmp_path, overlap=True)) as publisher:
        publisher.publish(model(1), step=1)
        for _ in range(2):
            with pytest.raises(DeadlineError):
                publisher.settle(timeout=0.01)
        open_again.set()
        report = publisher.settle()
        assert report is not None and report.digest == digest_of(model(1))


def test_closing_tells_that_the_version_in_flight_failed(tmp_path: Path, faults: list[tuple[str, str]]) -> None:
    publisher = Publisher.open(config(tmp_path, overlap=True))
    faults += [("put_shard", "before")]
    publisher.publish(model(1), step=1)
    with pytest.raises(StoreUnavailableError):
        publisher.close()


# --- rivals and other lines ---


def test_a_second_publisher_fences_the_first(tmp_path: Path) -> None:
    keys = config(tmp_path)
    first = Publisher.open(keys)
    first.publish(model(1), step=1)
    second = Publisher.open(keys)
    for _ in range(2):
        with pytest.raises(EpochFencedError, match=r"another publisher owns.*EPOCH 1"):
            first.publish(model(2), step=2)
    assert first.version == 0
    first.close()
    report = second.publish(model(3), step=3)
    assert report is not None and report.version == 2
    second.close()
    check_store(keys, 3)


def test_of_two_publishers_at_once_one_wins_every_number(tmp_path: Path) -> None:
    keys = config(tmp_path)
    publishers = [Publisher.open(keys) for _ in range(2)]
    won: list[str] = []
    lost: list[Exception] = []
    barrier = threading.Barrier(2)

    def race(publisher: Publisher, offset: int) -> None:
        barrier.wait(60)
        try:
            report = publisher.publish(model(1 + offset), step=1)
            assert report is not None
            won.append(report.digest)
        except LineageError as error:
            lost.append(error)

    threads = [threading.Thread(target=race, args=(p, k)) for k, p in enumerate(publishers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(won) == 1 and isinstance(lost[0], EpochFencedError)
    assert digest_of(model(1)) in won or digest_of(model(2)) in won
    assert versions(keys) == [0] and reader(keys).manifest(0).views[0].digest.ByteSize()


@pytest.mark.parametrize("step", [0, 3])
def test_a_step_that_does_not_continue_the_head_needs_a_fork(tmp_path: Path, step: int) -> None:
    keys = config(tmp_path)
    with Publisher.open(keys) as publisher:
        publisher.publish(model(3), step=3)
        with pytest.raises(ForkRequiredError, match=f"head is step 3, this is step {step}.*fork"):
            publisher.publish(model(step), step=step)
    with Publisher.open(keys) as publisher:
        with pytest.raises(ForkRequiredError):
            publisher.publish(model(step), step=step)
        publisher.publish(model(4), step=4)
    check_store(keys, 4)


def test_another_base_needs_a_fork(tmp_path: Path) -> None:
    keys = config(tmp_path, base=str(checkpoint(tmp_path / "base")))
    with Publisher.open(keys) as publisher:
        publisher.publish(model(1), step=1)
        other = keys.replace(base=str(checkpoint(tmp_path / "other", 5)))
        for wrong in (other, other.replace(run_id=publisher.run_id), other.replace(run_id=publisher.run_id, fork=True)):
            with pytest.raises(ForkRequiredError, match=r"other with digest .*fork"):
                Publisher.open(wrong)
        with pytest.raises(VersionMissingError, match=r"other.*default"):
            Publisher.open(keys.replace(base=None, view="other"))
        publisher.publish(model(2), step=2)  # those that were refused have not fenced it
    assert kinds(keys) == [ANCHOR, PATCH, PATCH]
    check_store(keys, 2)


def test_a_base_that_was_changed_behind_the_run_is_noticed(tmp_path: Path) -> None:
    base = checkpoint(tmp_path / "base")
    keys = config(tmp_path, base=str(base))
    with Publisher.open(keys) as publisher:
        publisher.publish(model(1), step=1)
    checkpoint(base, 2)
    with pytest.raises(ForkRequiredError):
        Publisher.open(keys)
    with Publisher.open(keys.replace(base=None)) as publisher, pytest.raises(LineageError, match="not the run's base"):
        publisher.publish(model(2), step=2)


@pytest.mark.parametrize("named", [None, "second"])
def test_a_fork_is_a_new_run_that_names_its_parent(tmp_path: Path, named: str | None) -> None:
    keys = config(tmp_path)
    with Publisher.open(keys) as publisher:
        publisher.publish(model(1), step=1)
        publisher.publish(model(2), step=2)
        parent = publisher.run_id
    forked = keys.replace(fork=True, run_id=named)
    with Publisher.open(forked) as publisher:
        assert publisher.run_id != parent and named in (None, publisher.run_id)
        report = publisher.publish(model(1), step=1)
        assert report is not None and (report.version, report.kind) == (0, "ANCHOR")
    records = [manifest_pb2.RunRecord.FromString(Store(keys).get(f"runs/{k:08d}.pb") or b"") for k in range(2)]
    assert (records[1].parent.run_id, records[1].parent.number) == (parent, 1)
    assert reader(keys, parent).head() == 1
    if named is not None:  # a restart with the same configuration goes on
        with Publisher.open(forked) as publisher:
            report = publisher.publish(model(3), step=3)
            assert report is not None and (publisher.run_id, report.kind) == ("second", "PATCH")
    assert same_bits(follow_fresh(keys)[0], model(1 if named is None else 3))


def test_fork_in_an_empty_store_is_a_plain_new_run(tmp_path: Path) -> None:
    with Publisher.open(config(tmp_path, fork=True, run_id="first")) as publisher:
        publisher.publish(model(1))
    assert versions(config(tmp_path)) == [0]


# --- a store that was damaged while nobody published ---


def shard_of(keys: Config, number: int) -> Path:
    end: ReplicaEnd = reader(keys)
    return Path(keys.uri) / end.run_id() / end.manifest(number).views[0].shards[0].object


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


@pytest.mark.parametrize(("damage", "kind"), [
    (lambda path: flip(path, -3), CorruptionError),
    (lambda path: flip(path, 40), CorruptionError),
    (lambda path: path.write_bytes(path.read_bytes()[:-9]), CorruptionError),
    (lambda path: path.unlink(), VersionExpiredError),
])  # fmt: skip
@pytest.mark.parametrize("number", [0, 1])
def test_a_restart_on_a_damaged_store_names_the_object_and_a_fork_goes_on(
    tmp_path: Path, damage: Callable[[Path], None], kind: type[Exception], number: int
) -> None:
    keys = config(tmp_path)
    with Publisher.open(keys) as publisher:
        publisher.publish(model(1), step=1)
        publisher.publish(model(2), step=2)
    shard = shard_of(keys, number)
    damage(shard)
    with Publisher.open(keys) as publisher:
        for _ in range(2):
            with pytest.raises(kind) as caught:
                publisher.publish(model(3), step=3)
            assert shard.name in str(caught.value) and str(number) in str(caught.value)
        assert (publisher.version, publisher.step) == (1, 2)
    with Publisher.open(keys.replace(fork=True)) as publisher:
        publisher.publish(model(3), step=3)
    assert same_bits(follow_fresh(keys)[0], model(3))
