"""An object that arrives in parts, on several connections, and whose size the first chunk tells.

Owns the buffer and what was said about the object. Owns no call.
"""

from __future__ import annotations

import threading
from typing import Any

from weight_sync.errors import CorruptionError
from weight_sync.proto.v1 import manifest_pb2, service_pb2

__all__ = ["Parts"]


class Parts:
    """An object whose size its first chunk tells; its parts arrive on several connections."""

    def __init__(self, limit: int, name: str) -> None:
        self._limit, self._name = limit, name
        self._lock = threading.Lock()
        self._buffer: memoryview | None = None
        self._arrived = 0
        self.absent = False
        self.stored: manifest_pb2.ShardRef | None = None

    def filler(self) -> Any:
        """For one part."""
        start = [0]

        def fill(at: int, data: memoryview, message: service_pb2.Chunk | None) -> None:
            if message is not None:
                start[0] = message.start - at
                self._begin(message)
            if len(data):
                buffer, begin = self._buffer, start[0] + at
                if buffer is None or begin < 0 or begin + len(data) > len(buffer):
                    raise CorruptionError("a part leaves its object", field=self._name, found=begin + len(data))
                buffer[begin : begin + len(data)] = data

        return fill

    def _begin(self, message: service_pb2.Chunk) -> None:
        with self._lock:
            self.absent = self.absent or message.absent
            if message.HasField("stored"):
                self.stored = message.stored
            if message.size > self._limit:
                raise CorruptionError("object is larger than may be staged", field=self._name, found=message.size,
                                      expected=self._limit, do="raise staging_bytes")  # fmt: skip
            if self._buffer is None:
                self._buffer = memoryview(bytearray(message.size))
            elif len(self._buffer) != message.size:
                raise CorruptionError("object changed while it was read", field=self._name, found=message.size)

    def arrived(self, size: int) -> None:
        """One part is complete."""
        with self._lock:
            self._arrived += size

    def whole(self) -> memoryview:
        """All bytes. Raises CorruptionError when parts are missing."""
        if self._buffer is None or self._arrived != len(self._buffer):
            raise CorruptionError("object is incomplete", field=self._name, found=self._arrived)
        return self._buffer
