"""Memory as messages: where the storages of a process lie, checked when writes into them are lowered to addresses.

Owns MemoryMap. Owns no registration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weight_sync.dtypes import dtype_of
from weight_sync.errors import FormatError
from weight_sync.layout.box import Box
from weight_sync.proto.v1 import rdma_pb2
from weight_sync.transport.rdma.onesided import Span

__all__ = ["RING", "MemoryMap", "ranges_of"]

RING = "ring"
"""Key of the range that patches land in; no storage has a key without a prefix."""


def ranges_of(spans: Mapping[str, Span]) -> list[rdma_pb2.MemoryRange]:
    """Spans by storage as messages."""
    return [
        rdma_pb2.MemoryRange(
            key=key,
            address=span.address,
            nbytes=span.nbytes,
            device=span.device or 0,
            on_device=span.device is not None,
        )
        for key, span in spans.items()
    ]


@dataclass(frozen=True)
class MemoryMap:
    """Storages of one process by key."""

    spans: Mapping[str, Span]

    @classmethod
    def of(cls, message: rdma_pb2.Memory) -> MemoryMap:
        """From a message."""
        return cls({r.key: Span(r.address, r.nbytes, r.device if r.on_device else None) for r in message.ranges})

    def find(self, key: str, box: Box, dtype: str, tensor: str) -> Span:
        """The storage that a box lies in. Raises FormatError when it does not: nobody writes beside registered memory."""
        span = self.spans.get(key)
        width = dtype_of(dtype).width
        bad = min(box.sizes, default=1) < 1 or min(box.strides, default=0) < 0 or box.offset < 0
        if span is None or bad or (box.last + 1) * width > span.nbytes:
            raise FormatError("a write leaves its storage", field=f"{tensor} in {key!r}", found=box,
                              expected=None if span is None else f"{span.nbytes} bytes")  # fmt: skip
        return span
