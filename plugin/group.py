"""The ranks that publish together, as a port of two verbs.

Owns SoloGroup, TorchGroup and StoreGroup. Owns no meaning of the bytes and never pickles: everything that crosses is a
byte string, in a uint8 tensor or in a key-value store.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from weight_sync.errors import ConfigError, DeadlineError
from weight_sync.ports import Group

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["SoloGroup", "StoreGroup", "TorchGroup", "default_group"]


class SoloGroup:
    """One rank."""

    rank = 0
    size = 1

    def gather(self, data: bytes) -> list[bytes]:
        """The bytes themselves."""
        return [data]

    def broadcast(self, data: bytes | None) -> bytes:
        """The bytes themselves."""
        assert data is not None
        return data


class TorchGroup:
    """The ranks of a torch.distributed job, over a gloo group of its own, which never meets the host's collectives.

    Args:
        ranks: global ranks that publish together, None for all. Every one of them must make the group.
        timeout_s: limit of every call; DeadlineError at the limit.
        existing: a gloo group to use instead of making one; the host must not use it at the same time.
    """

    def __init__(
        self, ranks: list[int] | None = None, timeout_s: float = 600.0, existing: dist.ProcessGroup | None = None
    ) -> None:
        import torch.distributed as dist

        if not dist.is_initialized():
            raise ConfigError("torch.distributed is not initialised", field="group", do="call init_process_group first")
        made = existing or dist.new_group(ranks, timeout=timedelta(seconds=timeout_s), backend="gloo")
        self._group: dist.ProcessGroup = made
        self._timeout_s = timeout_s
        self.rank = dist.get_rank(self._group)
        self.size = dist.get_world_size(self._group)

    def _call(self, function: Any, *args: Any, **kwargs: Any) -> None:
        try:
            function(*args, group=self._group, **kwargs)
        except RuntimeError as error:
            raise DeadlineError(
                "a rank did not take part", field="group", found=str(error).splitlines()[0],
                expected=f"an answer within {self._timeout_s:g} s", do="look for the rank that died",
            ) from error  # fmt: skip

    def gather(self, data: bytes) -> list[bytes]:
        """On rank 0 everyone's bytes by rank, elsewhere []."""
        import torch
        import torch.distributed as dist

        size = torch.tensor([len(data)], dtype=torch.int64)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self._call(dist.all_gather, sizes, size)
        room = max(1, max(int(s) for s in sizes))
        mine = torch.zeros(room, dtype=torch.uint8)
        if data:
            mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        all_of = [torch.empty(room, dtype=torch.uint8) for _ in range(self.size)] if self.rank == 0 else None
        self._call(dist.gather, mine, all_of, dst=dist.get_global_rank(self._group, 0))
        if all_of is None:
            return []
        return [part[: int(n)].numpy().tobytes() for part, n in zip(all_of, sizes, strict=True)]

    def broadcast(self, data: bytes | None) -> bytes:
        """Rank 0's bytes, everywhere."""
        import torch
        import torch.distributed as dist

        root = dist.get_global_rank(self._group, 0)
        size = torch.tensor([len(data or b"")], dtype=torch.int64)
        self._call(dist.broadcast, size, src=root)
        payload = torch.zeros(max(1, int(size)), dtype=torch.uint8)
        if self.rank == 0 and data:
            payload[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._call(dist.broadcast, payload, src=root)
        return payload[: int(size)].numpy().tobytes()


class StoreGroup:
    """The same ranks over a TCP store on rank 0's host: outlives the host's process groups, whatever it does to them.

    Args:
        meeting: a group of the same ranks, used once, to tell where the store is.
        host: under which the other ranks reach rank 0; default: the one that it knows itself by.
        timeout_s: limit of every call; DeadlineError at the limit.
    """

    def __init__(self, meeting: Group, host: str | None = None, timeout_s: float = 600.0) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self.rank, self.size, self._timeout_s, self._calls = meeting.rank, meeting.size, timeout_s, 0
        limit = timedelta(seconds=timeout_s)
        if self.rank == 0:
            name = host or socket.gethostname()
            self._store = TCPStore(name, 0, self.size, is_master=True, timeout=limit, wait_for_workers=False)
            meeting.broadcast(f"{name} {self._store.port}".encode())
        else:
            name, port = meeting.broadcast(None).decode().split()
            self._store = TCPStore(name, int(port), self.size, is_master=False, timeout=limit, wait_for_workers=False)

    def gather(self, data: bytes) -> list[bytes]:
        """On rank 0 everyone's bytes by rank, elsewhere []."""
        self._calls += 1
        if self.rank:
            self._store.set(f"{self._calls}/{self.rank}", data)  # type: ignore[arg-type]  # takes bytes, too
            return []
        return [data, *(self._take(f"{self._calls}/{rank}") for rank in range(1, self.size))]

    def broadcast(self, data: bytes | None) -> bytes:
        """Rank 0's bytes, everywhere."""
        self._calls += 1
        if self.rank:
            return self._take(f"{self._calls}/{self.rank}")
        assert data is not None
        for rank in range(1, self.size):  # each takes its own, so that nothing is left behind
            self._store.set(f"{self._calls}/{rank}", data)  # type: ignore[arg-type]
        return data

    def _take(self, key: str) -> bytes:
        try:
            data = bytes(self._store.get(key))
        except RuntimeError as error:  # DistStoreError among them
            raise DeadlineError(
                "a rank did not take part", field="group", found=str(error).splitlines()[0],
                expected=f"an answer within {self._timeout_s:g} s", do="look for the rank that died",
            ) from error  # fmt: skip
        self._store.delete_key(key)
        return data


def default_group(timeout_s: float) -> Group:
    """All ranks when torch.distributed runs with more than one, else this process alone."""
    import sys

    module = sys.modules.get("torch.distributed")
    if module is not None and module.is_available() and module.is_initialized() and module.get_world_size() > 1:
        return TorchGroup(timeout_s=timeout_s)
    return SoloGroup()
