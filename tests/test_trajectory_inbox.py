"""Claims about the durable inbox: receipts, redelivery, duplicates, staleness, capacity, and faults of its file.

Owns no claim about single fields (test_trajectory_rules) and none about killed processes (test_trajectory_crash).
"""

from __future__ import annotations

import gc
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trajectory_cases import make, spans

import weight_sync
from weight_sync.errors import (
    CorruptionError,
    FormatError,
    InboxFullError,
    InputError,
    LineageError,
    StoreFullError,
    StoreUnavailableError,
    TrajectoryError,
)
from weight_sync.proto.v1 import trajectory_pb2
from weight_sync.trajectory import DROPS, Batch, TrajectoryInbox, staleness


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "inner" / "inbox.sqlite"


@pytest.fixture
def inbox(path: Path) -> Iterator[TrajectoryInbox]:
    with TrajectoryInbox(path, run_id="run") as opened:
        yield opened


def ids(batch: Batch | list[trajectory_pb2.Trajectory]) -> list[str]:
    return [trajectory.id for trajectory in batch]


# --- receipts and delivery ---


def test_what_is_put_is_taken_unchanged_and_in_order(inbox: TrajectoryInbox) -> None:
    batch = [make(f"t{k}", k, router_replay=b"\0\1", contract_id="c", output_logprobs=[]) for k in range(5)]
    receipts = inbox.put(batch)
    assert [(r.id, r.duplicate) for r in receipts] == [(f"t{k}", False) for k in range(5)]
    first = inbox.take(3)
    assert list(first) == batch[:3]
    second = inbox.take(9)
    assert list(second) == batch[3:], "what is out is not given out again"
    assert not inbox.take(9)


def test_an_id_counts_once(inbox: TrajectoryInbox) -> None:
    inbox.put([make("a")])
    receipts = inbox.put([make("a"), make("b"), make("b", 3)])
    assert [r.duplicate for r in receipts] == [True, False, True]
    with inbox.take(9) as batch:
        assert list(batch) == [make("a"), make("b")]
    assert inbox.put([make("a")])[0].duplicate, "used, it is known"
    assert not inbox.take(9)
    assert inbox.counts().duplicates == 3


def test_what_is_not_acknowledged_comes_back(inbox: TrajectoryInbox) -> None:
    inbox.put([make(f"t{k}") for k in range(6)])
    released = inbox.take(2)
    released.release()
    with pytest.raises(ZeroDivisionError), inbox.take(2):
        raise ZeroDivisionError
    del released
    dropped = inbox.take(2)
    assert ids(dropped) == ["t0", "t1"]
    del dropped
    gc.collect()
    with inbox.take(6) as batch:
        assert ids(batch) == [f"t{k}" for k in range(6)]
    batch.acknowledge()
    batch.release()
    assert not inbox.take(6), "acknowledged is acknowledged"
    assert (inbox.counts().pending, inbox.counts().taken, inbox.counts().acknowledged) == (0, 0, 6)


def test_closing_brings_back_what_was_out_and_keeps_what_was_used(path: Path) -> None:
    with TrajectoryInbox(path) as inbox:
        inbox.put([make(f"t{k}") for k in range(4)])
        inbox.take(1).acknowledge()
        out = inbox.take(2)
    with pytest.raises(InputError, match="closed"):
        out.acknowledge()
    with TrajectoryInbox(path) as inbox:
        assert ids(inbox.take(9)) == ["t1", "t2", "t3"]
        assert [r.duplicate for r in inbox.put([make("t0"), make("t1")])] == [True, True]


def test_used_ids_are_forgotten_after_the_last_ones(path: Path) -> None:
    with TrajectoryInbox(path, remember=3) as inbox:
        inbox.put([make("pending")])
        held = inbox.take(1)
        for k in range(9):
            inbox.put([make(f"t{k}")])
            inbox.take(1).acknowledge()
        assert [inbox.put([make(name)])[0].duplicate for name in ("pending", "t8", "t7", "t0")] == [True] * 3 + [False]
        assert ids(held) == ["pending"]


def test_a_take_waits_for_as_many_as_it_wants(inbox: TrajectoryInbox) -> None:
    inbox.put([make("a")])
    assert not inbox.take(5, at_least=2), "less than that is nothing"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(inbox.take, 5, at_least=3, timeout=60)
        inbox.put([make("b")])
        assert not waiting.done()
        inbox.put([make("c")])
        assert ids(waiting.result(60)) == ["a", "b", "c"]
    began = time.monotonic()
    assert not inbox.take(1, timeout=0.05) and time.monotonic() - began >= 0.05


def test_many_threads_lose_nothing_and_share_transactions(inbox: TrajectoryInbox) -> None:
    got: list[str] = []
    done = threading.Event()

    def take() -> None:
        while not done.is_set() or inbox.counts().pending:
            with inbox.take(7, timeout=0.01) as batch:
                got.extend(ids(batch))

    taker = threading.Thread(target=take)
    taker.start()
    with ThreadPoolExecutor(8) as pool:
        names = [f"{k}-{j}" for k in range(8) for j in range(25)]
        list(pool.map(lambda name: inbox.put([make(name), make(name)]), names))
    done.set()
    taker.join(60)
    assert sorted(got) == sorted(names)


# --- staleness and order ---


def test_the_too_stale_are_dropped_and_counted(inbox: TrajectoryInbox) -> None:
    inbox.put([make("old", 2), make("mixed", spans=spans((5, 0, 2), (3, 2, 4))), make("new", 5)])
    batch = inbox.take(9, max_staleness=2, current_version=6)
    assert ids(batch) == ["new"]
    assert inbox.counts().dropped == {**dict.fromkeys(DROPS, 0), "too_stale": 2}
    assert inbox.put([make("old", 2)])[0].duplicate, "dropped, it is not delivered by a second put"


def test_what_is_out_is_not_dropped(inbox: TrajectoryInbox) -> None:
    inbox.put([make("a", 0)])
    out = inbox.take(1)
    assert not inbox.take(1, max_staleness=0, current_version=9)
    out.acknowledge()
    assert inbox.counts().dropped["too_stale"] == 0


def test_staleness_needs_a_version_and_orders_have_names(inbox: TrajectoryInbox) -> None:
    for arguments in ({"max_staleness": 1}, {"max_staleness": -1, "current_version": 1}, {"order": "random"}):
        with pytest.raises(InputError):
            inbox.take(1, **arguments)  # type: ignore[arg-type]
    for limit, least in ((0, 0), (1, 2), (1, 0)):
        with pytest.raises(InputError):
            inbox.take(limit, at_least=least)


actions = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.lists(st.tuples(st.integers(0, 9), st.integers(0, 6)), max_size=4)),
        st.tuples(
            st.sampled_from(["arrival", "freshest"]), st.integers(1, 5), st.none() | st.integers(0, 3),
            st.sampled_from(["acknowledge", "release", "reopen"]),
        ),
    ),
    max_size=14,
)  # fmt: skip


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(actions=actions)
def test_it_behaves_like_a_list_in_memory(actions: list[tuple], tmp_path_factory: pytest.TempPathFactory) -> None:
    """Order, staleness and duplicates against a model of four lines, through releases and reopenings."""
    path = tmp_path_factory.mktemp("model") / "inbox.sqlite"
    inbox = TrajectoryInbox(path)
    known: set[str] = set()
    held: list[trajectory_pb2.Trajectory] = []
    current, stale = 6, 0
    for action, *rest in actions:
        if action == "put":
            batch = [make(f"t{name}", version) for name, version in rest[0]]
            expected = []
            for trajectory in batch:
                expected.append(trajectory.id in known)
                if trajectory.id not in known:
                    held.append(trajectory)
                known.add(trajectory.id)
            assert [r.duplicate for r in inbox.put(batch)] == expected
            continue
        limit, most, end = rest
        if most is not None:
            stale += sum(staleness(t, current) > most for t in held)
            held = [t for t in held if staleness(t, current) <= most]
        order = sorted(held, key=lambda t: staleness(t, current)) if action == "freshest" else held
        taken = inbox.take(limit, max_staleness=most, current_version=current, order=action)
        assert list(taken) == order[:limit]
        if end == "acknowledge":
            taken.acknowledge()
            held = [t for t in held if t not in list(taken)]
        elif end == "release":
            taken.release()
        else:
            inbox.close()
            inbox = TrajectoryInbox(path)
        counts = inbox.counts()
        assert (counts.pending, counts.taken, counts.dropped["too_stale"]) == (len(held), 0, stale)
        assert counts.received == counts.pending + counts.acknowledged + stale, "everything is accounted for"
        assert counts.pending_bytes == sum(t.ByteSize() for t in held)
    inbox.close()


# --- refusals ---


def test_a_bad_one_keeps_its_batch_out_unless_told_otherwise(inbox: TrajectoryInbox) -> None:
    batch = [make("a"), make("b", reward=float("nan")), make("c", run_id="other"), make("d")]
    with pytest.raises(TrajectoryError, match=r"batch\[1\]\.reward"):
        inbox.put(batch)
    with pytest.raises(LineageError, match=r"batch\[0\]\.run_id"):
        inbox.put(batch[2:])
    assert inbox.counts().pending == 0
    assert [r.id for r in inbox.put(batch, skip_bad=True)] == ["a", "d"]
    assert inbox.counts().dropped == {**dict.fromkeys(DROPS, 0), "malformed": 2, "other_run": 2}


def test_counts_are_of_the_file_and_not_of_the_process(path: Path) -> None:
    with TrajectoryInbox(path, run_id="run") as inbox:
        inbox.put([make("a"), make("a")])
        with pytest.raises(LineageError):
            inbox.put([make("b", run_id="other")])
        before = inbox.counts()
    with TrajectoryInbox(path, run_id="run") as inbox:
        assert inbox.counts() == before
        assert (before.received, before.duplicates, before.dropped["other_run"]) == (1, 1, 1)


def test_another_run_finds_none_of_the_old_ones(path: Path) -> None:
    with TrajectoryInbox(path, run_id="run") as inbox:
        inbox.put([make("a"), make("b")])
    with TrajectoryInbox(path, run_id="fork") as inbox:
        assert not inbox.take(9) and inbox.counts().dropped["other_run"] == 2


# --- capacity ---


def test_a_full_inbox_says_when_to_come_again(path: Path) -> None:
    with TrajectoryInbox(path, max_count=4) as inbox:
        inbox.put([make(f"t{k}") for k in range(3)])
        with pytest.raises(InboxFullError, match="3 trajectories") as caught:
            inbox.put([make("a"), make("b")])
        assert caught.value.retry_after_s > 0
        assert [r.duplicate for r in inbox.put([make("t0"), make("c")])] == [True, False], "duplicates need no room"
        assert inbox.put([make("t1")])[0].duplicate
        with pytest.raises(InboxFullError):
            inbox.put([make("a")])
        with inbox.take(1):
            pass
        assert not inbox.put([make("a")])[0].duplicate, "what was refused is no duplicate"


def test_bytes_count_too(path: Path) -> None:
    size = make("t0").ByteSize()
    with TrajectoryInbox(path, max_bytes=3 * size) as inbox:
        inbox.put([make(f"t{k}") for k in range(3)])
        with pytest.raises(InboxFullError):
            inbox.put([make("t4")])
        with pytest.raises(InputError, match=r"bytes of batch; found .* expected"):
            inbox.put([make(f"x{k}") for k in range(4)])
    with TrajectoryInbox(path, max_count=2) as inbox, pytest.raises(InputError, match="trajectories of batch; found 3"):
        inbox.put([make(f"x{k}") for k in range(3)])


def test_eviction_drops_the_stalest_and_never_what_is_out(path: Path) -> None:
    with TrajectoryInbox(path, max_count=3, when_full="evict") as inbox:
        inbox.put([make("v5", 5), make("v1", 1), make("v3", 3)])
        inbox.put([make("v4", 4)])
        out = inbox.take(2)
        assert ids(out) == ["v5", "v3"]
        with pytest.raises(InboxFullError):
            inbox.put([make("a", 9), make("b", 9)])
        inbox.put([make("a", 9)])
        assert inbox.counts().dropped["evicted"] == 2 + inbox.counts().pending - 3
        out.acknowledge()
        assert ids(inbox.take(9)) == ["a"]


# --- drawing from a transport ---


def test_it_draws_from_a_transport_and_forgets_nothing_on_the_way(path: Path) -> None:
    waiting = [[make("a"), make("bad", reward=float("nan"))], [make("b")], [make("c"), make("d")]]
    asked: list[int] = []

    def source(limit: int) -> list[trajectory_pb2.Trajectory]:
        asked.append(limit)
        return waiting.pop(0) if waiting else []

    with TrajectoryInbox(path, run_id="run", max_count=2) as inbox:
        inbox.draw_from(source, poll_s=0.01)
        with inbox.take(9) as batch:
            assert ids(batch) == ["a", "b"]
        assert len(waiting) == 0, "the third was fetched and waits for room"
        assert ids(inbox.take(9, at_least=2, timeout=60)) == ["c", "d"]
        assert inbox.counts().dropped["malformed"] == 1


def test_a_publisher_drains_the_store_through_its_inbox(path: Path, tmp_path: Path) -> None:
    import torch

    weights = {"w": torch.zeros(4)}
    store = str(tmp_path / "store")
    with weight_sync.Publisher.open(store, inbox=str(path), poll_s=0.01) as publisher:
        publisher.publish(weights)
        assert publisher.inbox is not None
        end = publisher._end.reader()
        end.send_trajectories([make(f"t{k}", run_id=publisher.run_id) for k in range(3)])
        assert ids(publisher.take_trajectories(2)) == ["t0", "t1"]
        with publisher.inbox.take(9, max_staleness=0, current_version=publisher.version) as batch:
            assert ids(batch) == ["t2"]
        run = publisher.run_id
    with weight_sync.Publisher.open(store, inbox=str(path)) as publisher:
        assert publisher.run_id == run and not publisher.take_trajectories(9), "a clean end counts as used"
    with weight_sync.Publisher.open(store) as publisher:
        assert publisher.inbox is None and publisher.take_trajectories(9) == []


# --- faults of the file ---


def test_a_second_holder_is_told(inbox: TrajectoryInbox, path: Path) -> None:
    with pytest.raises(StoreUnavailableError, match="another process, or another inbox in this one"):
        TrajectoryInbox(path)
    code = f"from weight_sync import TrajectoryInbox; TrajectoryInbox({str(path)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert "StoreUnavailableError" in done.stderr
    inbox.put([make("a")])


@pytest.mark.parametrize("content", [b"not a database at all" * 300, None])
def test_a_file_that_is_no_inbox_is_refused(path: Path, content: bytes | None) -> None:
    path.parent.mkdir()
    if content is not None:
        path.write_bytes(content)
    else:
        with closing(sqlite3.connect(path)) as other:
            other.execute("CREATE TABLE mine(x)")
    before = path.read_bytes()
    with pytest.raises(FormatError, match="not an inbox"):
        TrajectoryInbox(path)
    assert path.read_bytes() == before


def test_an_inbox_of_a_later_version_is_refused(path: Path) -> None:
    TrajectoryInbox(path).close()
    with closing(sqlite3.connect(path)) as raw:
        raw.execute("PRAGMA user_version=7")
    with pytest.raises(FormatError, match="another version"):
        TrajectoryInbox(path)


def test_a_damaged_file_is_noticed(path: Path) -> None:
    with TrajectoryInbox(path) as inbox:
        inbox.put([make(f"t{k}") for k in range(200)])
    data = bytearray(path.read_bytes())
    data[8192:24576] = bytes(16384)
    path.write_bytes(data)
    with pytest.raises(CorruptionError):
        TrajectoryInbox(path)


def test_a_flipped_bit_of_a_trajectory_is_noticed_once_and_costs_no_other(path: Path) -> None:
    with TrajectoryInbox(path) as inbox:
        inbox.put([make("a"), make("b", metadata={"text": "needle"}), make("c")])
    data = path.read_bytes()
    assert data.count(b"needle") == 1
    path.write_bytes(data.replace(b"needle", b"noodle"))
    with TrajectoryInbox(path) as inbox:
        with pytest.raises(CorruptionError, match=r"inbox\.sqlite: b"):
            inbox.take(9)
        assert ids(batch := inbox.take(9)) == ["a", "c"]
        counts = inbox.counts()
        assert (counts.dropped["corrupt"], counts.pending, counts.taken) == (1, 2, len(batch))


def test_a_full_disk_is_told_and_costs_nothing(small_disk: Path) -> None:
    path = small_disk / "inbox.sqlite"
    receipted: list[str] = []
    with TrajectoryInbox(path) as inbox:
        with pytest.raises(StoreFullError):
            for k in range(100):
                receipted += [r.id for r in inbox.put([make(f"{k}-{j}", router_replay=bytes(4096)) for j in range(8)])]
        counts = inbox.counts()
        assert counts.pending == len(receipted) > 0
    with TrajectoryInbox(path) as inbox:
        assert ids(inbox.take(10_000)) == receipted


def test_bad_sizes_are_refused(path: Path) -> None:
    for arguments in ({"max_count": 0}, {"max_bytes": 0}, {"remember": -1}, {"when_full": "grow"}):
        with pytest.raises(InputError):
            TrajectoryInbox(path, **arguments)  # type: ignore[arg-type]
