"""The board: small values by key, for all processes, in one `torch.distributed.TCPStore`.

Owns put-if-absent (a TCPStore's ``compare_set``), append-only lists made of it, and a run's log. Owns no meaning of the
values, and no shards: those would not fit.
"""

from __future__ import annotations

import base64
import secrets
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from weight_sync.errors import StoreUnavailableError
from weight_sync.proto.v1 import manifest_pb2

__all__ = ["Board", "read_entries", "read_runs"]

_TOKEN = 16  # characters in front of each value, so that our own is told from an equal one


class Board:
    """A connection, which is made again after a failure. Threads may share it.

    Raises StoreUnavailableError when the board does not answer, from every method.
    """

    def __init__(self, host: str, port: int, *, timeout_s: float, may_host: bool = False) -> None:
        self.host, self.port, self._timeout = host, port, timedelta(seconds=timeout_s)
        self._lock = threading.Lock()
        self._client: Any = None
        self._server: Any = self._host() if may_host else None  # lives as long as this object
        self.create("board", b"")

    def _host(self) -> Any:
        try:
            return dist.TCPStore(self.host, self.port, is_master=True, wait_for_workers=False, timeout=self._timeout)
        except RuntimeError:
            return None  # another process hosts it; if none does, connecting says so

    def _do(self, name: str, *values: Any) -> Any:
        with self._lock:
            try:
                if self._client is None:
                    self._client = dist.TCPStore(
                        self.host, self.port, is_master=False, wait_for_workers=False, timeout=self._timeout
                    )
                return getattr(self._client, name)(*values)
            except RuntimeError as error:
                self._client = None
                raise StoreUnavailableError("the board does not answer", field=f"gloo://{self.host}:{self.port}",
                                            found=str(error).splitlines()[0],
                                            do="look whether the trainer runs") from error  # fmt: skip

    def own_address(self) -> str:
        """The address of this host by which it reaches the board: what a group listens on."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing
            probe.connect((self.host, self.port))
            return str(probe.getsockname()[0])

    def rendezvous(self) -> dist.Store:
        """For a process group."""
        self._do("check", ["board"])
        return self._client.clone()

    # --- values ---

    def create(self, key: str, value: bytes) -> bool:
        """Put-if-absent: True when the value that stands there now is this one."""
        text = secrets.token_hex(_TOKEN // 2) + base64.b64encode(value).decode()
        return bool(self._do("compare_set", key, "", text) == text.encode())

    def put(self, key: str, value: bytes) -> None:
        """Sets, or replaces."""
        self._do("set", key, secrets.token_hex(_TOKEN // 2) + base64.b64encode(value).decode())

    def get(self, key: str) -> bytes | None:
        """None when there is none."""
        if not self._do("check", [key]):
            return None
        return base64.b64decode(self._do("get", key)[_TOKEN:])

    def delete(self, key: str) -> None:
        """Fine when there is none."""
        self._do("delete_key", key)

    def keys(self, prefix: str) -> list[str]:
        """That begin so, sorted."""
        return sorted(key for key in self._do("list_keys") if key.startswith(prefix))

    # --- lists ---

    def append(self, name: str, value: bytes, at: int = 0) -> int:
        """Adds to a list; returns the place. ``at`` is one that may be free."""
        while not self.create(_item(name, at), value):
            at += 1
        return at

    def item(self, name: str, at: int) -> bytes | None:
        """None beyond the end."""
        return self.get(_item(name, at))

    def drop(self, name: str, at: int) -> None:
        """Empties a place of a list; the others stay where they are."""
        self.delete(_item(name, at))

    def set_item(self, name: str, at: int, value: bytes) -> bool:
        """Put-if-absent of one place."""
        return self.create(_item(name, at), value)


def _item(name: str, at: int) -> str:
    return f"{name}/{at:020d}"


def read_entries(board: Board, run_id: str, first: int = 0) -> Iterator[manifest_pb2.VersionManifest]:
    """A run's log from ``first`` on."""
    while (found := board.item(f"log/{run_id}", first)) is not None:
        yield manifest_pb2.VersionManifest.FromString(found)
        first += 1


def read_runs(board: Board) -> list[manifest_pb2.RunRecord]:
    """All runs, in order of creation."""
    runs: list[manifest_pb2.RunRecord] = []
    while (found := board.item("runs", len(runs))) is not None:
        runs.append(manifest_pb2.RunRecord.FromString(found))
    return runs
