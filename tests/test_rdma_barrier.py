"""Claims about the barrier between mesh groups: nobody writes a group before all have written the one before.

Owns pipelines of two ranks in one process, and a job of trainer and engine processes with two meshes.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from loop import Child
from rdma_cases import Say, free_port, keys, serve, train

from weight_sync.errors import StoreUnavailableError
from weight_sync.proto.v1 import rdma_pb2
from weight_sync.transport.rdma.barrier import BarrierCount, BarrierWait
from weight_sync.transport.rdma.pipeline import Pipeline, Task

GROUPS = 3


def test_the_last_rank_opens_a_group_once() -> None:
    count = BarrierCount(frozenset({0, 2}))
    assert not count.add(0, 0) and not count.add(0, 0)
    assert not count.add(1, 0), "no rank of this transfer"
    assert count.add(2, 0) and not count.add(2, 0)
    assert not count.add(2, 1) and count.add(0, 1)


class Ranks:
    """Two ranks and their controller: each runs a pipeline of one write per group, rank 1 once it is let."""

    def __init__(self) -> None:
        self.count = BarrierCount(frozenset({0, 1}))
        self.waits = [BarrierWait(0), BarrierWait(1)]
        self.let = threading.Event()
        self.first = threading.Event()
        self.written: list[tuple[int, int]] = []
        self.lock = threading.Lock()
        self.errors: list[BaseException] = []

    def told(self, call: rdma_pb2.Call) -> None:
        with self.lock:
            last = self.count.add(call.barrier.rank, call.barrier.group)
        if last:
            for wait in self.waits:
                wait.passed(call.barrier)

    def write(self, rank: int, group: int) -> None:
        if rank == 1 and group == 0:
            assert self.let.wait(20)
        with self.lock:
            self.written.append((group, rank))
        if rank == 0:
            self.first.set()

    def run(self, rank: int) -> None:
        wait = self.waits[rank]
        wait.begin(7, self.told)
        tasks: list[Task] = []
        gate = -1
        for group in range(GROUPS):
            tasks.append(Task(f"group {group}", 0, (("write", lambda group=group: self.write(rank, group)),), gate))
            if group + 1 < GROUPS:
                gate = len(tasks)
                tasks.append(Task("end", 0, (("barrier", wait.stage("e", group)),), gate - 1))
        try:
            Pipeline([("write", 4), ("barrier", 1)], 1).run(tasks, 20)
        except StoreUnavailableError as error:
            self.errors.append(error)

    def start(self) -> list[threading.Thread]:
        threads = [threading.Thread(target=self.run, args=(rank,), daemon=True) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        return threads


def test_nobody_begins_a_group_before_all_have_written_the_one_before() -> None:
    ranks = Ranks()
    threads = ranks.start()
    assert ranks.first.wait(20)
    assert ranks.written == [(0, 0)], "rank 0 has to wait"
    ranks.let.set()
    for thread in threads:
        thread.join(20)
    assert [group for group, _ in ranks.written] == sorted(group for group, _ in ranks.written)
    assert len(ranks.written) == 2 * GROUPS and not ranks.errors


@pytest.mark.parametrize("early", [False, True])
def test_a_rank_that_fails_ends_the_wait_of_the_others(early: bool) -> None:
    ranks = Ranks()
    failed = rdma_pb2.Barrier(nonce=7, error=rdma_pb2.Barrier().error)
    failed.error.what = "rank 1 has no disk"
    if early:
        ranks.waits[0].passed(failed)  # before the transfer began here
    thread = threading.Thread(target=ranks.run, args=(0,), daemon=True)
    thread.start()
    if not early:
        ranks.waits[0].passed(failed)
    thread.join(20)
    assert "rank 1 has no disk" in str(ranks.errors[0])
    ranks.waits[0].begin(8, ranks.told)
    done = ranks.waits[0].stage("e", 0)()
    assert not done(), "the failure was of another transfer"


def _counted(say: Say, given: dict[str, Any], meeting: str, rank: int) -> None:
    """A trainer rank that tells what its controller counts."""
    add = BarrierCount.add

    def told(self: BarrierCount, rank: int, group: int) -> bool:
        last = add(self, rank, group)
        say(f"rank {rank} group {group} {last}")
        return last

    BarrierCount.add = told  # type: ignore[method-assign]
    train(say, given, meeting, rank, 2, 2, 1)


def test_two_meshes_are_written_one_after_the_other_bit_for_bit(tmp_path: Path) -> None:
    pytest.importorskip("nixl_cu12")
    given = keys(free_port(), rdma={"barrier": True, "chunk_bytes": 4096})
    ranks = [Child(tmp_path, _counted, given, str(tmp_path / "meeting"), rank) for rank in (0, 1)]
    engine = Child(tmp_path, serve, given, "tp1", 1, 2)
    assert engine.wait() == 0, engine.lines()
    assert [line.split()[:3] for line in engine.lines()] == [["tp1", "0", "True"], ["tp1", "1", "True"]]
    for rank in ranks:
        assert rank.wait() == 0, rank.lines()
    counted = [line for line in ranks[0].lines() if line.startswith("rank")]
    assert len(counted) == 4, "two ranks at one border of two groups, in two versions"
    assert [line.split()[-1] for line in counted] == ["False", "True"] * 2
