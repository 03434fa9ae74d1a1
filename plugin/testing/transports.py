"""The conformance suite of ``weight_sync.ports.Transport``.

Owns the claims that every transport must keep. Owns no codec: the versions here hold bytes that mean nothing, which is
all that a transport may know of them.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial

from blake3 import blake3

from weight_sync.errors import (
    CorruptionError,
    EpochFencedError,
    LineageError,
    VersionError,
    VersionExpiredError,
    VersionMissingError,
    WeightSyncError,
)
from weight_sync.ports import Fate, OpenedRun, PublisherEnd, ReplicaEnd, ShardBytes, Transport
from weight_sync.proto.v1 import common_pb2, manifest_pb2, replica_pb2, trajectory_pb2
from weight_sync.version import ABORTED, ANCHOR, EPOCH, PATCH, is_version

__all__ = ["check_transport", "transport_claims"]

_LIMIT_S = 60.0


def check_transport(
    make_transport: Callable[[], Transport], *, keep_versions: int = 2, only: Sequence[str] = ()
) -> list[str]:
    """Holds a transport to the promises of the port.

    Args:
        make_transport: a transport onto an empty store of its own; called once per claim. Configure it with a short
            ``poll_s`` and with ``keep_versions``.
        keep_versions: that the transports were configured with.
        only: claims to check, by name; all without it.

    Claims about history are left out for a transport whose publisher end says ``keeps_history = False``. In the other
    claims the readers that read bits are there before those are published, so that a push transport can keep them, too.

    Returns the names of the claims that were checked. Raises AssertionError that begins with the claim's name.
    """
    checked = []
    for name in only or transport_claims():
        with ExitStack() as stack:
            world = _World(make_transport(), keep_versions, stack)
            if name in _OF_HISTORY and not world.publisher().keeps_history:
                continue
            try:
                _CLAIMS[name](world)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error
            except WeightSyncError as error:
                raise AssertionError(f"{name}: unexpected {type(error).__name__}: {error}") from error
            checked.append(name)
    return checked


def transport_claims() -> list[str]:
    """Names of all claims, in the order in which they are checked."""
    return list(_CLAIMS)


@dataclass
class _World:
    """A transport onto an empty store; its ends are closed when the claim has been checked."""

    transport: Transport
    keep_versions: int
    stack: ExitStack

    def publisher(self, rank: int = 0, size: int = 1) -> PublisherEnd:
        return self.stack.enter_context(closing(self.transport.publisher_end(rank, size)))

    def replica(self, run_id: str | None = None) -> ReplicaEnd:
        return self.stack.enter_context(closing(self.transport.replica_end(run_id)))

    def opened(
        self, run_id: str | None = None, fork_of: common_pb2.VersionId | None = None
    ) -> tuple[PublisherEnd, OpenedRun]:
        end = self.publisher()
        return end, end.open_run(run_id, fork_of=fork_of, writer="conformance")


def _shard(label: str, body: bytes = b"body", rank: int = 0) -> ShardBytes:
    form = common_pb2.FORM_RAW if label.startswith("anchor") else common_pb2.FORM_STEP
    return ShardBytes(label, rank, form, b"head of it", [body[:3], memoryview(body)[3:]])


def _manifest(
    run: OpenedRun, number: int, parent: int | None, refs: Sequence[manifest_pb2.ShardRef] = (), kind: int | None = None
) -> manifest_pb2.VersionManifest:
    manifest = manifest_pb2.VersionManifest(
        format=1, run_id=run.run_id, number=number, epoch=run.epoch, parent=parent, nonce=secrets.token_bytes(16),
        kind=(ANCHOR if parent is None else PATCH) if kind is None else kind, writer="conformance",  # type: ignore[arg-type]
    )  # fmt: skip
    manifest.views.add(name="default", scheme="cast").shards.extend(refs)
    return manifest


def _publish(
    end: PublisherEnd, run: OpenedRun, parent: int | None, body: bytes = b"body", kind: int | None = None
) -> int:
    """One version; returns its number. A kind of ANCHOR, or no parent, makes it a full state."""
    number = end.next_number()
    label = "anchor" if kind == ANCHOR or parent is None else "patch"
    end.commit(_manifest(run, number, parent, [end.put_shard(number, _shard(label, body))], kind))
    return number


def _content(end: ReplicaEnd, number: int) -> list[bytes]:
    """The shards of a version, checked against the hashes that the publisher got."""
    out = []
    for ref in end.manifest(number).views[0].shards:
        data = bytes(end.read(ref, 0, ref.size))
        assert blake3(data).digest() == ref.blake3, "a shard reads with other bytes than were stored"
        assert blake3(data[: ref.head_size]).digest() == ref.head_blake3, "head_size or head_blake3 is wrong"
        out.append(data)
    return out


def _raises(kind: type[WeightSyncError], call: Callable[[], object], what: str) -> WeightSyncError:
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"{what} did not raise {kind.__name__}")


# --- versions ----------------------------------------------------------------------------------------------------------


def _an_empty_store_has_no_run(world: _World) -> None:
    end = world.replica()
    assert (end.newest_run(), end.head(), end.wait(None, 0)) == (None, None, None), "an empty store shows something"
    _raises(VersionMissingError, end.run_id, "run_id of an empty store")


def _a_version_is_visible_after_its_commit_and_not_before(world: _World) -> None:
    end, run = world.opened()
    assert run.created and run.head is None and run.epoch == 0, "a new run is created, with epoch 0 and no head"
    replica = world.replica()
    assert replica.newest_run() == run.run_id, "an opened run is not the newest"
    number = end.next_number()
    assert number == 0, f"the first number is {number}"
    ref = end.put_shard(number, _shard("anchor", bytes(range(256))))
    assert replica.head() is None and replica.wait(None, 0) is None, "a version shows before its commit"
    _raises(VersionMissingError, lambda: replica.manifest(0), "manifest before the commit")
    manifest = _manifest(run, number, None, [ref])
    end.commit(manifest)
    assert replica.head() == 0 and replica.wait(None, 0) == 0, "a committed version does not show"
    assert replica.manifest(0) == manifest, "the manifest was changed on the way"
    assert _content(replica, 0) == [b"head of it" + bytes(range(256))], "the shard was changed on the way"
    assert (ref.rank, ref.form) == (0, common_pb2.FORM_RAW), "the reference lost rank or form"


def _all_ranks_store_shards_and_rank_0_commits(world: _World) -> None:
    end, run = world.opened()
    replica = world.replica()
    other = world.publisher(1, 2)
    other.attach(run)
    refs = [end.put_shard(0, _shard("anchor", b"one")), other.put_shard(0, _shard("anchor", b"two", rank=1))]
    refs.append(other.put_shard(0, _shard("anchor-1", b"", rank=1)))
    end.commit(_manifest(run, 0, None, refs))
    found = _content(replica, 0)
    assert found == [b"head of it" + body for body in (b"one", b"two", b"")], "shards of several ranks were mixed up"


def _a_number_is_written_once(world: _World) -> None:
    end, run = world.opened()
    manifest = _manifest(run, 0, None)
    end.commit(manifest)
    end.commit(manifest)  # the answer was lost: the same manifest again is no conflict
    _raises(LineageError, lambda: end.commit(_manifest(run, 0, None)), "a second manifest under one number")
    assert world.replica().manifest(0) == manifest, "the first manifest was overwritten"
    assert end.fate(0) is Fate.COMMITTED and end.next_number() == 1, "the committed number is not taken"


def _of_two_publishers_of_a_new_run_one_wins(world: _World) -> None:
    ends = [world.opened("r") for _ in range(2)]
    winner, loser = ends
    winner[0].commit(_manifest(winner[1], 0, None))
    _raises(EpochFencedError, lambda: loser[0].commit(_manifest(loser[1], 0, None)), "the second commit of number 0")
    assert loser[0].fate(0) is not Fate.COMMITTED, "the loser takes the winner's version for its own"


def _opening_a_run_fences_its_older_publisher(world: _World) -> None:
    old, old_run = world.opened("r")
    _publish(old, old_run, None)
    new, new_run = world.opened("r")
    assert not new_run.created and new_run.head is not None and new_run.head.number == 0, "the head was not handed over"
    assert new_run.epoch > old_run.epoch, "the epoch did not grow"
    late = _manifest(old_run, 1, 0)
    error = _raises(EpochFencedError, lambda: old.commit(late), "the old publisher's commit")
    assert "conformance" in str(error), "the error does not name the publisher that won"
    _raises(EpochFencedError, old.next_number, "the old publisher's next number")
    number = _publish(new, new_run, 0)
    kinds = [entry.kind for entry in world.replica().entries()]
    assert kinds == [ANCHOR, EPOCH, PATCH] and number == 2, f"the log is {kinds}"


def _an_aborted_number_stays_closed(world: _World) -> None:
    end, run = world.opened()
    _publish(end, run, None)
    manifest = _manifest(run, 1, 0, [end.put_shard(1, _shard("patch"))])
    assert end.fate(1) is Fate.OPEN, "a number without an entry has a fate"
    assert end.abort(1, "test") is Fate.ABORTED and end.abort(1, "again") is Fate.ABORTED, "abort is not final"
    _raises(LineageError, lambda: end.commit(manifest), "a commit after the abort")
    assert end.fate(1) is Fate.ABORTED, "an aborted number has another fate"
    _raises(VersionMissingError, lambda: world.replica().manifest(1), "manifest of an aborted number")
    assert _publish(end, run, 0) == 2, "an aborted number was used again"
    assert end.abort(2, "too late") is Fate.COMMITTED, "abort undid a commit"
    kinds = [entry.kind for entry in world.replica().entries()]
    assert kinds == [ANCHOR, ABORTED, PATCH], f"the log is {kinds}"


def _ranges_of_a_shard_can_be_read(world: _World) -> None:
    end, run = world.opened()
    body = secrets.token_bytes(3 << 20)
    replica = world.replica()
    _publish(end, run, None, body)
    ref = replica.manifest(0).views[0].shards[0]
    whole = b"head of it" + body
    assert ref.size == len(whole), "the size is wrong"
    for offset, length in ((0, 10), (0, 0), (9, 3), (len(whole) - 1, 1), (1 << 20, (1 << 20) + 7), (len(whole), 0)):
        found = bytes(replica.read(ref, offset, length))
        assert found == whole[offset : offset + length], f"[{offset}, {offset + length}) reads with other bytes"
    for offset, length in ((0, len(whole) + 1), (len(whole), 1), (-1, 1)):
        read = partial(replica.read, ref, offset, length)
        _raises(CorruptionError, read, f"a read of {length} bytes from {offset}")


def _wait_ends_with_a_commit_or_at_its_limit(world: _World) -> None:
    end, run = world.opened()
    replica = world.replica()
    assert replica.wait(None, 0.01) is None, "wait found a version that nobody published"
    found: list[int | None] = []
    for expected, after in ((0, None), (1, 0)):
        waiting = threading.Thread(target=lambda: found.append(replica.wait(after, _LIMIT_S)))  # noqa: B023
        waiting.start()
        _publish(end, run, after)
        waiting.join(_LIMIT_S)
        assert found[-1:] == [expected], f"wait after {after} ended with {found[-1:]}"
    began = time.monotonic()
    assert replica.wait(1, 0.05) is None and time.monotonic() - began >= 0.05, "wait gave up before its limit"


def _a_reader_that_comes_late_gets_the_bits_or_is_told(world: _World) -> None:
    end, run = world.opened()
    _publish(end, run, None, b"before")
    late = world.replica()
    try:
        assert _content(late, 0) == [b"head of it" + b"before"], "a reader that came late gets other bits"
    except VersionExpiredError:
        late.want("late", 0)
        assert "late" in end.wants(), "a reader that came late cannot ask for a full state"
    number = _publish(end, run, 0, b"after", kind=ANCHOR)
    assert _content(late, number) == [b"head of it" + b"after"], "a reader that came late does not get what follows"


# --- history -----------------------------------------------------------------------------------------------------------


def _older_versions_stay_readable(world: _World) -> None:
    end, run = world.opened()
    _publish(end, run, None, b"0")
    for k in range(1, world.keep_versions):
        _publish(end, run, k - 1, str(k).encode())
    end.collect()
    for reader in (world.replica(), world.replica(run.run_id), end.reader()):
        for k in range(world.keep_versions):
            assert _content(reader, k) == [b"head of it" + str(k).encode()], f"version {k} was changed"
        assert [entry.number for entry in reader.entries(1)] == list(range(1, world.keep_versions)), "entries(1)"
    _raises(VersionMissingError, lambda: world.replica().manifest(99), "a version of the future")


def _a_lease_keeps_a_version_and_what_it_needs(world: _World) -> None:
    end, run = world.opened()
    _publish(end, run, None)
    _publish(end, run, 0)
    leaser = world.replica()
    leaser.lease("slow", 1, 600)
    head = 1
    for _ in range(world.keep_versions):
        head = _publish(end, run, head, kind=ANCHOR)
    end.collect()
    assert len(_content(leaser, 1)) == len(_content(leaser, 0)) == 1, "a leased version or its anchor was collected"
    leaser.release("slow")
    end.collect()
    _raises(VersionExpiredError, lambda: leaser.manifest(1), "manifest of a collected version")
    kinds = [is_version(entry.kind) for entry in leaser.entries()]
    assert kinds == [False, False, *[True] * world.keep_versions], "collection took the wrong versions"
    assert _publish(end, run, head) == head + 1, "collection stopped the publisher"


def _a_fork_is_a_run_of_its_own(world: _World) -> None:
    end, run = world.opened("first")
    _publish(end, run, None)
    follower = world.replica()
    assert follower.run_id() == "first", "the newest run is another"
    parent = common_pb2.VersionId(run_id="first", number=0)
    fork_end, fork = world.opened("second", parent)
    assert fork.created and fork.run_id == "second" and fork.head is None, "the fork is not a new run"
    _publish(fork_end, fork, None, b"fork")
    assert follower.newest_run() == "second" and follower.run_id() == "first", "a fork moved a reader by itself"
    assert follower.head() == 0 and _publish(end, run, 0) == 1, "the fork stopped its parent"
    assert _content(world.replica("second"), 0) == [b"head of it" + b"fork"], "the fork reads as its parent"
    missing = common_pb2.VersionId(run_id="first", number=77)
    _raises(VersionError, lambda: world.opened("third", missing), "a fork of a version that is not there")


# --- the other direction -----------------------------------------------------------------------------------------------


def _the_last_acknowledgement_of_each_replica_is_told(world: _World) -> None:
    end, run = world.opened()
    _publish(end, run, None)
    for replica_id, numbers in (("a", (0, 1)), ("b", (0,))):
        replica = world.replica()
        replica.head()
        for number in numbers:
            message = replica_pb2.Acknowledgement(replica_id=replica_id, state=replica_pb2.REPLICA_STATE_SERVING)
            message.version.run_id, message.version.number = run.run_id, number
            replica.acknowledge(message)
    found = {message.replica_id: message.version.number for message in end.acknowledgements()}
    assert found == {"a": 1, "b": 0}, f"acknowledgements are {found}"


def _a_want_lasts_until_an_anchor_answers_it(world: _World) -> None:
    end, run = world.opened()
    end.commit(_manifest(run, 0, None))  # an anchor by reference: no bits in the store
    replica = world.replica()
    replica.want("a", 0)
    assert dict(end.wants()) == {"a": 0}, "a want is not told"
    head = _publish(end, run, 0)
    assert dict(end.wants()) == {"a": 0}, "a patch answered a want"
    _publish(end, run, head, kind=ANCHOR)
    assert not end.wants(), "an anchor with its bits did not answer a want"


def _trajectories_arrive_at_least_once(world: _World) -> None:
    end, run = world.opened("r")
    _publish(end, run, None)
    replica = world.replica()
    replica.head()
    ids = [f"t{k}" for k in range(5)]
    span = trajectory_pb2.VersionSpan(number=0, begin=0, end=2)
    batch = [trajectory_pb2.Trajectory(id=i, run_id=run.run_id, output_token_ids=[1, 2], spans=[span]) for i in ids]
    receipts = replica.send_trajectories(batch)
    assert [(r.id, r.duplicate) for r in receipts] == [(i, False) for i in ids], "not every trajectory has a receipt"
    again = replica.send_trajectories(batch[:1])
    assert [(r.id, r.duplicate) for r in again] == [("t0", True)], "sent twice, a trajectory is no duplicate"
    taken = end.take_trajectories(3)
    assert len(taken) == 3 and taken[0] in batch, "the limit was not kept, or a trajectory was changed"
    restarted, _ = world.opened("r")  # the first trainer died before it asked for more
    found = {t.id for t in restarted.take_trajectories(100)}
    assert found | {t.id for t in taken} == set(ids), "a trajectory with a receipt was lost"
    assert not restarted.take_trajectories(100), "a trajectory that was taken comes again"
    restarted.close()
    last, _ = world.opened("r")
    assert not last.take_trajectories(100), "trajectories come again after a clean end"


_OF_HISTORY = {
    "older_versions_stay_readable",
    "a_lease_keeps_a_version_and_what_it_needs",
    "a_fork_is_a_run_of_its_own",
}
_CLAIMS: dict[str, Callable[[_World], None]] = {
    claim.__name__.strip("_"): claim
    for claim in (
        _an_empty_store_has_no_run,
        _a_version_is_visible_after_its_commit_and_not_before,
        _all_ranks_store_shards_and_rank_0_commits,
        _a_number_is_written_once,
        _of_two_publishers_of_a_new_run_one_wins,
        _opening_a_run_fences_its_older_publisher,
        _an_aborted_number_stays_closed,
        _ranges_of_a_shard_can_be_read,
        _wait_ends_with_a_commit_or_at_its_limit,
        _a_reader_that_comes_late_gets_the_bits_or_is_told,
        _older_versions_stay_readable,
        _a_lease_keeps_a_version_and_what_it_needs,
        _a_fork_is_a_run_of_its_own,
        _the_last_acknowledgement_of_each_replica_is_told,
        _a_want_lasts_until_an_anchor_answers_it,
        _trajectories_arrive_at_least_once,
    )
}
