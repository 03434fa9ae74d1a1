"""Speed of the trajectory inbox, beside a plain file that gets the same bytes and is synced as often.

Owns the rows of ``weight-sync bench inbox``. Owns no inbox.
"""

from __future__ import annotations

import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from weight_sync.proto.v1 import trajectory_pb2
from weight_sync.trajectory import TrajectoryInbox

__all__ = ["InboxRow", "bench_inbox"]


@dataclass(frozen=True)
class InboxRow:
    """One arrangement of senders.

    Attributes:
        senders: threads that put at the same time.
        batch: trajectories of one put.
        bytes: of one trajectory, as a message.
        put_per_s: trajectories that got a receipt, per second.
        file_per_s: the same bytes in the same batches, one sender, each followed by fdatasync: what the disk allows
            without an index, a check or sharing of syncs.
        take_per_s: taken in batches of 512 and acknowledged, per second.
        put_cpu_us: CPU of one put trajectory, checks and serialisation included.
        sync_ms: one fdatasync after 4 KiB.
    """

    senders: int
    batch: int
    trajectories: int
    tokens: int
    bytes: int
    put_per_s: float
    file_per_s: float
    take_per_s: float
    put_cpu_us: float
    sync_ms: float

    def to_json(self) -> dict[str, Any]:
        """As it is printed."""
        return asdict(self)


def bench_inbox(senders: int, batch: int, count: int, tokens: int, folder: Path | None = None) -> InboxRow:
    """One row, in a temporary folder below ``folder``: which disk it is decides the result."""
    made = _trajectories(count, tokens)
    with tempfile.TemporaryDirectory(dir=folder, prefix="weight-sync-bench-") as place:
        plain = Path(place) / "plain"
        file_s = _seconds(lambda: _write(plain, made, batch))
        sync_s = _seconds(lambda: _write(plain, [bytes(4096)] * 50, 1)) / 50
        with TrajectoryInbox(Path(place) / "inbox.sqlite", run_id="bench", max_count=count) as inbox:
            cpu = time.process_time()
            put_s = _seconds(lambda: _put(inbox, made, senders, batch))
            cpu = time.process_time() - cpu
            take_s = _seconds(lambda: _take(inbox))
    return InboxRow(
        senders, batch, count, tokens, made[0].ByteSize(), count / put_s, count / file_s, count / take_s,
        1e6 * cpu / count, 1e3 * sync_s,
    )  # fmt: skip


def _seconds(job: Callable[[], object]) -> float:
    begun = time.perf_counter()
    job()
    return time.perf_counter() - begun


def _trajectories(count: int, tokens: int) -> list[trajectory_pb2.Trajectory]:
    """Token ids as of a vocabulary of 150,000; 64 of prompt."""
    dice = random.Random(0)
    made = []
    for k in range(count):
        made.append(trajectory_pb2.Trajectory(
            id=f"{dice.getrandbits(128):032x}", run_id="bench", reward=1.0, finish_reason="stop", group=str(k // 8),
            prompt_token_ids=dice.choices(range(150_000), k=64),
            output_token_ids=dice.choices(range(150_000), k=tokens), output_logprobs=[-0.5] * tokens,
            spans=[trajectory_pb2.VersionSpan(number=0, begin=0, end=tokens)],
        ))  # fmt: skip
    return made


def _put(inbox: TrajectoryInbox, made: Sequence[trajectory_pb2.Trajectory], senders: int, batch: int) -> None:
    failed: list[BaseException] = []

    def send(mine: Sequence[trajectory_pb2.Trajectory]) -> None:
        try:
            for start in range(0, len(mine), batch):
                inbox.put(mine[start : start + batch])
        except BaseException as error:
            failed.append(error)
            raise

    threads = [threading.Thread(target=send, args=[made[k::senders]]) for k in range(senders)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def _take(inbox: TrajectoryInbox) -> None:
    while batch := inbox.take(512):
        batch.acknowledge()


def _write(path: Path, made: Sequence[trajectory_pb2.Trajectory | bytes], batch: int) -> None:
    with path.open("wb", buffering=0) as file:
        for start in range(0, len(made), batch):
            parts = [m if isinstance(m, bytes) else m.SerializeToString() for m in made[start : start + batch]]
            file.write(b"".join(parts))
            os.fdatasync(file.fileno())
