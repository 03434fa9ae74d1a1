"""The barrier between mesh groups: who has written a group, and when the next one may begin.

Owns both halves: what the controller counts, and what a trainer rank waits for as a stage of its pipeline. Owns no
connection and no schedule.

Writes are one-sided and each goes to a place of its own, so their order changes no bit, and ``rdma.barrier`` is off: a
round trip over the controller per group, engine and step buys nothing. It is for trainers whose ranks share links or
memory between meshes and should not have two of them under way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from weight_sync.errors import StoreUnavailableError
from weight_sync.proto.v1 import rdma_pb2
from weight_sync.transport.rdma.pipeline import Done

__all__ = ["BarrierCount", "BarrierWait"]


@dataclass
class BarrierCount:
    """The controller's half, for one transfer.

    Attributes:
        ranks: trainer ranks that write in it.
        reached: by mesh group, those that have written it.
    """

    ranks: frozenset[int] = frozenset()
    reached: dict[int, set[int]] = field(default_factory=dict)

    def add(self, rank: int, group: int) -> bool:
        """Whether this rank is the last one of the group. Again is not last."""
        there = self.reached.setdefault(group, set())
        before = len(there)
        there |= {rank} & self.ranks
        return len(there) > before and len(there) == len(self.ranks)


class BarrierWait:
    """A trainer rank's half, for one engine; one transfer at a time.

    Args:
        rank: of this trainer.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._lock = threading.Lock()
        self._nonce = 0
        self._passed: set[int] = set()
        self._failed: tuple[int, str] | None = None  # transfer and reason; it may come before the transfer begins here
        self._send: Callable[[rdma_pb2.Call], None] | None = None

    def begin(self, nonce: int, send: Callable[[rdma_pb2.Call], None]) -> None:
        """A transfer begins; ``send`` leads to the controller."""
        with self._lock:
            self._nonce, self._passed, self._send = nonce, set(), send

    def passed(self, barrier: rdma_pb2.Barrier) -> None:
        """The controller tells that all have written a group, or why they never will."""
        with self._lock:
            if barrier.HasField("error"):
                self._failed = (barrier.nonce, barrier.error.what)
            elif barrier.nonce == self._nonce:  # else of a transfer that has ended
                self._passed.add(barrier.group)

    def stage(self, replica_id: str, group: int) -> Callable[[], Done]:
        """The pipeline's stage at the end of a group. Its ``done`` raises StoreUnavailableError when a rank has failed."""

        def start() -> Done:
            assert self._send is not None
            told = rdma_pb2.Barrier(replica_id=replica_id, nonce=self._nonce, rank=self._rank, group=group)
            self._send(rdma_pb2.Call(barrier=told))
            return lambda: self._is_open(group)

        return start

    def _is_open(self, group: int) -> bool:
        with self._lock:
            if self._failed is not None and self._failed[0] == self._nonce:
                raise StoreUnavailableError("the transfer ended at another trainer rank", field="mesh group", found=group,
                                            expected=self._failed[1], do="wait for the next version")  # fmt: skip
            return group in self._passed
