"""One broadcast: from a publisher's rank to the readers that are there.

Owns the announcement of a broadcast, the process group that it runs in, and who counts as being there. Owns no log and
no storage of what arrives.

A group is made for each shard, of one publisher's rank and the readers that it found alive, and ends in a barrier after
which every one of them holds the bytes. Announcements stand in one list on the board; readers take part in those that
name them, one after the other. A reader that fails in the middle fails the group: it is made again without those that
give no sign of life.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from weight_sync_gloo.board import Board

__all__ = ["Announcement", "Readers", "announce", "receive", "send"]

LIST, READERS = "pushes", "reader/"
_BEAT_S = 0.5
_SILENT_S = 3.0  # a reader that gave no sign for so long is taken for dead


class Announcement:
    """That ``size`` bytes called ``name`` come, for these readers."""

    def __init__(self, name: str, size: int, readers: Sequence[str]) -> None:
        self.name, self.size, self.readers = name, size, list(readers)

    def encode(self) -> bytes:
        """For the board."""
        return json.dumps([self.name, self.size, self.readers]).encode()

    @classmethod
    def decode(cls, data: bytes) -> Announcement:
        """From the board."""
        return cls(*json.loads(data))


class Readers:
    """Who is there, by signs of life. A sign's time is when it was seen here: clocks of other hosts do not matter."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._seen: dict[str, tuple[bytes | None, float]] = {}

    def alive(self) -> list[str]:
        """Ids; one that was never looked at before counts as alive."""
        now = time.monotonic()
        for key in self._board.keys(READERS):
            sign = self._board.get(key)
            if key not in self._seen or self._seen[key][0] != sign:
                self._seen[key] = (sign, now)
        present = set(self._board.keys(READERS))
        return sorted(
            key.removeprefix(READERS)
            for key, (_, when) in self._seen.items()
            if key in present and now - when < _SILENT_S
        )


def announce(board: Board, announcement: Announcement, at: int) -> int:
    """Puts it on the list; returns its place."""
    return board.append(LIST, announcement.encode(), at)


def send(board: Board, place: int, announcement: Announcement, data: torch.Tensor, timeout_s: float) -> None:
    """The sender's part. Raises RuntimeError when a reader did not take part."""
    group = _group(board, place, 0, len(announcement.readers) + 1, timeout_s)
    _broadcast(group, data)
    group.barrier().wait()


def receive(
    board: Board, place: int, announcement: Announcement, me: str, timeout_s: float
) -> tuple[torch.Tensor, Any]:
    """A reader's part: the bytes, and the group, whose barrier is still to come. Raises RuntimeError."""
    rank = announcement.readers.index(me) + 1
    group = _group(board, place, rank, len(announcement.readers) + 1, timeout_s)
    data = torch.empty(announcement.size, dtype=torch.uint8)
    _broadcast(group, data)
    return data, group


def _group(board: Board, place: int, rank: int, size: int, timeout_s: float) -> Any:
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=board.own_address())]
    options._timeout = timedelta(seconds=timeout_s)
    return dist.ProcessGroupGloo(dist.PrefixStore(f"group/{place}", board.rendezvous()), rank, size, options)


def _broadcast(group: Any, data: torch.Tensor) -> None:
    if len(data):
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        group.broadcast([data], options).wait()
