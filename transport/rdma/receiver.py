"""LocalReceiver: memory of this process that trainer ranks write into.

Owns registration, where each tensor lands, and waiting for end notes. Owns no fence and no choice of versions, and no
live weight in shadow mode. Nothing runs between versions: whoever waits polls, and nobody else does.

shadow: each box of the engine's layout lands in host memory beside the live weights, in the order of its coordinates.
direct: bits land in the live storages themselves.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from weight_sync.config import Config
from weight_sync.errors import ConfigError, DeadlineError, WeightSyncError
from weight_sync.layout.box import Box
from weight_sync.layout.link import row_major
from weight_sync.layout.placement import Layout, Placement, StorageSpec
from weight_sync.ports import DensePiece
from weight_sync.proto.v1 import rdma_pb2
from weight_sync.push import Placed, Receiver
from weight_sync.tensors import TensorSpec
from weight_sync.transport.rdma.blocks import blocks_of
from weight_sync.transport.rdma.layouts import to_message
from weight_sync.transport.rdma.memory import RING, ranges_of
from weight_sync.transport.rdma.nixl import open_agent
from weight_sync.transport.rdma.onesided import OneSided, Span

if TYPE_CHECKING:
    import torch

__all__ = ["LocalReceiver", "end_note", "whole_layout"]

_NOTE = struct.Struct("<4sQI")
_MAGIC = b"WSe1"
_ALIGN = 64


def end_note(nonce: int, rank: int) -> bytes:
    """What trainer rank ``rank`` says when all of its bytes are on their way before it."""
    return _NOTE.pack(_MAGIC, nonce, rank)


def whole_layout(table: tuple[TensorSpec, ...]) -> Layout:
    """Of a process that holds every tensor of a table as it is."""
    placements = []
    for spec in table:
        if spec.elements:
            whole = Box.run(0, spec.elements)
            placements.append(Placement(spec.name, whole, spec.name, whole))
    return Layout(table, tuple(placements), {s.name: StorageSpec(s.elements, s.dtype) for s in table if s.elements})


@dataclass
class _Shadow:
    """Landing places: a layout whose storages are runs of one arena."""

    layout: Layout
    arena: npt.NDArray[np.uint8]
    spans: dict[str, Span] = field(default_factory=dict)
    pieces: list[tuple[TensorSpec, Box, npt.NDArray[Any]]] = field(default_factory=list)

    @classmethod
    def of(cls, layout: Layout) -> _Shadow:
        seen: set[tuple[str, Box]] = set()
        placements: list[Placement] = []
        storages: dict[str, StorageSpec] = {}
        offsets: list[int] = []
        at = 0
        for item in layout.placements:
            if not item.coords.count or (item.tensor, item.coords) in seen:
                continue  # held twice here: lands once
            seen.add((item.tensor, item.coords))
            key, spec = f"s{len(placements)}", layout.by_name[item.tensor]
            placements.append(Placement(item.tensor, item.coords, key, row_major(item.coords.sizes)))
            storages[key] = StorageSpec(item.coords.count, spec.dtype)
            offsets.append(at)
            at += -(-item.coords.count * spec.type.width // _ALIGN) * _ALIGN
        arena = np.zeros(max(at, 1), np.uint8)  # zeros: its pages come when they are written
        shadow = cls(Layout(layout.tensors, tuple(placements), storages), arena)
        base = int(arena.ctypes.data)
        for item, offset in zip(placements, offsets, strict=True):
            spec = layout.by_name[item.tensor]
            nbytes = item.coords.count * spec.type.width
            shadow.spans[item.storage] = Span(base + offset, nbytes)
            shadow.pieces.append((spec, item.coords, arena[offset : offset + nbytes].view(spec.type.uint)))
        return shadow


class LocalReceiver(Receiver):
    """The memory of this process.

    Args:
        placed: where the weights lie; None lands whole tensors of ``table`` in a shadow.
        with_ring: make room for patches, too.
    """

    def __init__(
        self, config: Config, placed: Placed | None, table: tuple[TensorSpec, ...] = (), *, with_ring: bool = False
    ) -> None:
        if config.rdma.commit == "direct" and placed is None:
            raise ConfigError("the engine does not say where its weights lie", field="weight_sync.rdma.commit",
                              found="direct", expected="shadow", do="use shadow with this engine")  # fmt: skip
        self._config, self._placed = config, placed
        self._layout = whole_layout(table) if placed is None else placed.layout
        self._shadow: _Shadow | None = None
        self.ring = np.zeros(config.rdma.ring_bytes if with_ring else 0, np.uint8)
        self._agent: OneSided | None = None
        self._offer: tuple[Any, bytes] | None = None
        self._going = rdma_pb2.Going()
        self._missing: set[int] = set()
        self._rank = 0
        self._aborted: WeightSyncError | None = None
        self._lock = threading.Lock()

    # --- what there is ---

    def offer(self, rank: int, world_size: int) -> bytes:
        """An OfferTarget. Raises EngineError when memory cannot be registered."""
        self._rank = rank
        spans, layout = self._spans()
        state = (rank, world_size, tuple(sorted(spans.items())))
        if self._offer is not None and self._offer[0] == state:
            return self._offer[1]
        self.close()  # memory has moved: everything is registered anew, under another name
        self._agent = open_agent(self._config, "engine")
        if len(self.ring):
            spans = {**spans, RING: Span(int(self.ring.ctypes.data), self.ring.nbytes)}
        self._agent.register(blocks_of(spans.values()))
        message = rdma_pb2.OfferTarget(
            rank=rank, world_size=world_size, layout=to_message(rank, layout), ring_bytes=len(self.ring)
        )
        message.memory.agent, message.memory.metadata = self._agent.name, self._agent.metadata()
        message.memory.ranges.extend(ranges_of(spans))
        self._offer = (state, message.SerializeToString())
        return self._offer[1]

    def _spans(self) -> tuple[dict[str, Span], Layout]:
        if self._config.rdma.commit == "direct":
            assert self._placed is not None
            now = self._placed.storages()
            return {key: _span(now[key]) for key in self._layout.storages}, self._layout
        if self._shadow is None:
            self._shadow = _Shadow.of(self._layout)
        return self._shadow.spans, self._shadow.layout

    # --- one version ---

    def expect(self, going: bytes) -> None:
        """Forgets what is left of older transfers."""
        self._going = rdma_pb2.Going.FromString(going)
        senders = next((s.trainers for s in self._going.senders if s.rank == self._rank), ())
        with self._lock:
            self._aborted = None
        self._missing = set(senders)

    def abort(self, nonce: int, error: WeightSyncError) -> None:
        """A sender has failed: `arrived` raises this."""
        with self._lock:
            if nonce == self._going.nonce:
                self._aborted = error

    def arrived(self, timeout: float) -> None:
        """Polls; over TCP nothing lands unless somebody does."""
        assert self._agent is not None
        deadline = time.monotonic() + timeout
        while self._missing:
            for _, note in self._agent.notes():
                self._take(note)
            with self._lock:
                aborted = self._aborted
            if aborted is not None:
                raise aborted
            if self._missing and time.monotonic() > deadline:
                raise DeadlineError(
                    f"version {self._going.number} has not landed", field="end notes of trainer ranks",
                    found=sorted(self._missing), expected=f"within {timeout:g} s", do="look at those trainer ranks' logs",
                )  # fmt: skip
            if self._missing:
                time.sleep(self._config.rdma.poll_s)

    def _take(self, note: bytes) -> None:
        if len(note) != _NOTE.size:
            return  # of something else that shares the library
        magic, nonce, rank = _NOTE.unpack(note)
        if magic == _MAGIC and nonce == self._going.nonce:
            self._missing.discard(rank)

    def pieces(self) -> Iterator[DensePiece]:
        """Views of the shadow."""
        for spec, coords, bits in self._shadow.pieces if self._shadow is not None else ():
            yield DensePiece(spec, coords, bits)

    def close(self) -> None:
        """Deregisters; the memory stays."""
        self._offer = None
        if self._agent is not None:
            self._agent.close()
            self._agent = None


def _span(storage: torch.Tensor) -> Span:
    device = None if storage.device.type == "cpu" else storage.device.index or 0
    return Span(storage.data_ptr(), storage.numel() * storage.element_size(), device)
