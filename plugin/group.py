"""The ranks that publish together, as a port of two verbs.

Owns SoloGroup and TorchGroup. Owns no meaning of the bytes and never pickles: everything that crosses is a byte string
in a uint8 tensor.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from weight_sync.errors import ConfigError, DeadlineError
from weight_sync.ports import Group

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["SoloGroup", "TorchGroup", "default_group"]


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
    """

    def __init__(self, ranks: list[int] | None = None, timeout_s: float = 600.0) -> None:
        import torch.distributed as dist

        if not dist.is_initialized():
            raise ConfigError("torch.distributed is not initialised", field="group", do="call init_process_group first")
        self._group: dist.ProcessGroup = dist.new_group(ranks, timeout=timedelta(seconds=timeout_s), backend="gloo")
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


def default_group(timeout_s: float) -> Group:
    """All ranks when torch.distributed runs with more than one, else this process alone."""
    import sys

    module = sys.modules.get("torch.distributed")
    if module is not None and module.is_available() and module.is_initialized() and module.get_world_size() > 1:
        return TorchGroup(timeout_s=timeout_s)
    return SoloGroup()
