"""Sender: one trainer rank's part. Offers what its snapshot holds, prepares its part of each schedule, writes on go.

Owns the rank's agent, its registrations and its connection to the controller. Owns no schedule and no log. Everything
here runs beside the training loop, in threads; the loop waits for writes at most ``rdma.patience_s``, when it moves the
snapshot.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from weight_sync.config import Config, crash_point
from weight_sync.errors import CorruptionError, LineageError, StoreError, StoreUnavailableError, WeightSyncError
from weight_sync.holding import Holding
from weight_sync.layout.link import row_major
from weight_sync.layout.placement import Layout, Placement, StorageSpec
from weight_sync.ports import ShardBytes
from weight_sync.proto.v1 import common_pb2, manifest_pb2, rdma_pb2
from weight_sync.served import ServedPiece
from weight_sync.transport.rdma.barrier import BarrierWait
from weight_sync.transport.rdma.blocks import blocks_of
from weight_sync.transport.rdma.layouts import to_message
from weight_sync.transport.rdma.lowering import STAGES, Lowered, Staging, host_tensor, lower
from weight_sync.transport.rdma.memory import RING, MemoryMap
from weight_sync.transport.rdma.nixl import open_agent
from weight_sync.transport.rdma.onesided import OneSided, Span
from weight_sync.transport.rdma.pipeline import Pipeline
from weight_sync.transport.rdma.receiver import end_note
from weight_sync.transport.rdma.runs import RUN
from weight_sync.transport.rdma.wire import Connection, connect, error_message
from weight_sync.transport.rdma.writes import decode_writes, hash_of

if TYPE_CHECKING:
    import torch

__all__ = ["Sender"]

_LOOK_S = 0.25
_MOST_GOES = 512  # engines that are written to at once; with a barrier, fewer could wait for each other
_TEND_S = 2.0  # notes are driven out for so long after the last transfer


@dataclass
class _Engine:
    """What is prepared for one engine."""

    schedule: bytes
    peers: dict[int, tuple[str, MemoryMap]]
    writes: list[Any]
    barrier: BarrierWait
    lowered: Lowered | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


class Sender:
    """Made by a publisher's end; works from the first `offer` to `close`."""

    def __init__(self, config: Config, address: tuple[str, int], rank: int, world_size: int) -> None:
        self._config, self._address = config, address
        self._rank, self._world_size = rank, world_size
        self._agent: OneSided | None = None
        self._holding: Holding | None = None
        self._connection: Connection | None = None
        self._storages: dict[str, torch.Tensor] = {}
        self._state: Any = None  # of the pieces that are registered
        self._engines: dict[str, _Engine] = {}
        self._staging: dict[int, torch.Tensor] = {}  # by address
        self._patch: dict[str, tuple[int, Span]] = {}  # object -> number, where it lies registered
        self._patch_memory = np.zeros(0, np.uint8)
        self._refs: dict[int, list[manifest_pb2.ShardRef]] = {}
        self._bodies: dict[int, list[tuple[manifest_pb2.ShardRef, ShardBytes]]] = {}
        self._closed = threading.Event()
        self._lock = threading.RLock()
        self._pool = ThreadPoolExecutor(_MOST_GOES, thread_name_prefix="weight_sync-go")
        self._thread: threading.Thread | None = None
        self._last_go = 0.0
        self.error: str = ""
        self.seconds: Mapping[str, float] = {}

    # --- what the publisher tells ---

    def offer(self, holding: Holding) -> None:
        """Begins to watch the snapshot."""
        if self._holding is None:
            self._holding = holding
            self._thread = threading.Thread(target=self._watch, name="weight_sync-sender", daemon=True)
            self._thread.start()

    def keep(self, number: int, ref: manifest_pb2.ShardRef, shard: ShardBytes) -> None:
        """A shard of version ``number``, which engines may want instead of the state."""
        if shard.form != common_pb2.FORM_STEP or not self._config.rdma.sparse_share:
            return
        with self._lock:
            for old in [n for n in self._bodies if n != number]:
                del self._bodies[old]
            self._bodies.setdefault(number, []).append((ref, shard))

    # --- the watching thread ---

    def _watch(self) -> None:
        assert self._holding is not None
        known: int | None = None
        told = False
        while not self._closed.is_set():
            number = self._holding.wait(known, _LOOK_S)
            fresh = self._connection is None or not self._connection.is_open
            if number == known and told and not fresh:
                self._tend()
                continue
            try:
                self._tell(number, fresh)
                known, told, self.error = number, True, ""
            except WeightSyncError as error:
                self.error, told = str(error), False
                self._closed.wait(_LOOK_S)

    def _tend(self) -> None:
        """End notes leave only when the library is called."""
        until = self._last_go + _TEND_S
        while self._agent is not None and time.monotonic() < until and not self._closed.is_set():
            with suppress(StoreError):  # nobody writes to us
                self._agent.notes()
            self._closed.wait(0.005)

    def _tell(self, number: int | None, fresh: bool) -> None:
        assert self._holding is not None
        if fresh:
            self._connection = connect(self._address, f"trainer rank {self._rank}", self._config.auth.token,
                                       self._called, self._config.rdma.window_s)  # fmt: skip
            with self._lock:
                self._drop_engines()
        assert self._connection is not None
        if number is not None:
            number, pieces = self._holding.state()
            changed = self._register(pieces)
            if changed or fresh:
                layout = to_message(self._rank, _layout_of(pieces))
                offer = rdma_pb2.OfferSource(rank=self._rank, world_size=self._world_size, layout=layout)
                self._connection.request(rdma_pb2.Call(offer_source=offer), self._config.rdma.window_s)
        holds = rdma_pb2.Holds()
        if number is not None:
            holds.number = number
            with self._lock:
                holds.shards.extend(self._stage_patch(number))
        self._connection.request(rdma_pb2.Call(holds=holds), self._config.rdma.window_s)

    def _register(self, pieces: tuple[ServedPiece, ...]) -> bool:
        """Registers the snapshot's memory when its pieces or their addresses are new."""
        assert self._holding is not None
        storages = {f"p{i}": self._flat(piece) for i, piece in enumerate(pieces)}
        state = tuple(
            (t.data_ptr(), t.numel(), t.dtype, p.spec, p.coords) for t, p in zip(storages.values(), pieces, strict=True)
        )
        if state == self._state:
            return False
        with self._lock:
            self._drop_engines()
            if self._agent is not None:
                self._agent.close()
            self._staging, self._patch_memory, self._patch = {}, np.zeros(0, np.uint8), {}
            self._agent = open_agent(self._config, f"trainer-{self._rank}")
            self._agent.register(blocks_of(_span(t) for t in storages.values()))
            self._storages, self._state = storages, state
        return True

    def _flat(self, piece: ServedPiece) -> torch.Tensor:
        assert self._holding is not None
        near = self._holding.snapshot.tensor(piece)
        return host_tensor(self._holding.snapshot.array(piece), piece.spec.dtype) if near is None else near

    def _stage_patch(self, number: int) -> list[manifest_pb2.ShardRef]:
        """Copies this version's patch into registered memory; nothing of older ones is kept."""
        bodies = self._bodies.pop(number, [])
        if not bodies or self._agent is None:
            return [ref for name, ref in ((r.object, r) for r in self._refs.get(number, [])) if name in self._patch]
        total = sum(-(-shard.size // 64) * 64 for _, shard in bodies)
        if total > len(self._patch_memory):
            self._patch_memory = np.zeros(max(1 << 16, 2 * total), np.uint8)
            self._agent.register([Span(int(self._patch_memory.ctypes.data), self._patch_memory.nbytes)])
        self._patch, at = {}, 0
        for ref, shard in bodies:
            self._patch[ref.object] = (number, Span(int(self._patch_memory.ctypes.data) + at, shard.size))
            for part in (shard.head, *shard.body):
                flat = np.frombuffer(part, np.uint8)
                self._patch_memory[at : at + len(flat)] = flat
                at += len(flat)
            at = -(-at // 64) * 64
        self._refs = {number: [ref for ref, _ in bodies]}
        return self._refs[number]

    # --- what the controller tells ---

    def _called(self, connection: Connection, call: rdma_pb2.Call) -> rdma_pb2.Call | None:
        kind = call.WhichOneof("body")
        if kind == "assign":
            self._assigned(call.assign)
        elif kind == "go":
            self._pool.submit(self._go, connection, call.go)
        elif kind == "barrier":
            with self._lock:
                engine = self._engines.get(call.barrier.replica_id)
            if engine is not None:
                engine.barrier.passed(call.barrier)
        elif kind == "forget":
            with self._lock:
                self._drop(call.forget.replica_id)
        return None

    def _assigned(self, assign: rdma_pb2.Assign) -> None:
        """Prepares descriptors, once. Raises CorruptionError when the part is not the one that was planned."""
        found = hash_of(assign.writes)
        if found != assign.part:
            raise CorruptionError("a part of the schedule was changed on the way", field="part", found=found.hex(),
                                  expected=assign.part.hex(), do="install the same weight_sync on both sides")  # fmt: skip
        with self._lock:
            self._drop(assign.replica_id)
            assert self._agent is not None
            peers = {t.rank: (self._agent.connect(t.memory.metadata), MemoryMap.of(t.memory)) for t in assign.targets}
            writes = decode_writes(assign.writes)
            engine = _Engine(assign.schedule, peers, writes, BarrierWait(self._rank))
            self._engines[assign.replica_id] = engine
            engine.lowered = self._lower(engine, assign)

    def _lower(self, engine: _Engine, assign: rdma_pb2.Assign) -> Lowered:
        assert self._agent is not None
        rdma = self._config.rdma
        barrier = partial(engine.barrier.stage, assign.replica_id) if assign.barrier else None
        return lower(self._agent, engine.writes, self._storages, engine.peers, self._staged, groups=assign.groups,
                     staging_bytes=rdma.staging_bytes, gather_bytes=rdma.gather_bytes, barrier=barrier)  # fmt: skip

    def _staged(self, nbytes: int) -> Staging:
        import torch

        assert self._agent is not None
        device = next(iter(self._storages.values())).device
        memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        span = _span(memory)
        self._agent.register([span])
        self._staging[span.address] = memory  # as long as it is registered
        return Staging(memory, span)

    def _go(self, connection: Connection, go: rdma_pb2.Go) -> None:
        began = time.perf_counter()
        went = rdma_pb2.Went(replica_id=go.replica_id, nonce=go.nonce, rank=self._rank)
        try:
            crash_point("rdma:go")
            went.nbytes = self._write(connection, go)
            crash_point("rdma:written")
        except WeightSyncError as error:
            went.error.CopyFrom(error_message(error))
        except Exception as error:
            went.error.kind, went.error.what = "StoreError", f"{type(error).__name__}: {error}"
        went.seconds = time.perf_counter() - began
        with suppress(StoreError):  # the controller has gone; whoever waits for the note hears of it
            connection.send(rdma_pb2.Call(went=went))

    def _write(self, connection: Connection, go: rdma_pb2.Go) -> int:
        with self._lock:
            engine = self._engines.get(go.replica_id)
        if engine is None or engine.schedule != go.schedule:
            raise LineageError(
                "this rank has another schedule", field="schedule", found=None if engine is None else engine.schedule.hex(),
                expected=go.schedule.hex(), do="let the engine ask again; install the same weight_sync on all ranks",
            )  # fmt: skip
        assert self._holding is not None
        with engine.lock, self._holding.reading(go.number):
            engine.barrier.begin(go.nonce, connection.send)
            nbytes = self._write_patch(engine, go) if go.sparse else self._write_dense(engine)
        self._note(engine, go)
        return nbytes

    def _write_dense(self, engine: _Engine) -> int:
        assert engine.lowered is not None
        rdma = self._config.rdma
        stages = [(name, rdma.in_flight if name == "write" else 1) for name in STAGES]
        pipeline = Pipeline(stages, rdma.staging_bytes)
        pipeline.run(engine.lowered.tasks, rdma.window_s)
        self.seconds = {name: spent.busy for name, spent in pipeline.seconds.items()}
        return engine.lowered.nbytes

    def _write_patch(self, engine: _Engine, go: rdma_pb2.Go) -> int:
        assert self._agent is not None
        peer, memory = engine.peers[min(engine.peers)]
        ring = memory.spans[RING]
        rows = np.empty(len(go.objects), RUN)
        for k, (name, offset) in enumerate(zip(go.objects, go.offsets, strict=True)):
            number, span = self._patch.get(name, (-1, Span(0, 0)))
            if number != go.number or offset + span.nbytes > ring.nbytes:
                raise StoreUnavailableError(
                    "the patch is not here any more", field=name, found=number, expected=go.number
                )
            rows[k] = (span.address, ring.address + offset, span.nbytes)
        posts = self._agent.prepare(peer, rows, None, ring.device, [len(rows)] if len(rows) else [])
        deadline = time.monotonic() + self._config.rdma.window_s
        for post in posts:
            done = post.start()
            while not done and time.monotonic() < deadline:
                done = post.done()
            post.release()
            if not done:
                raise StoreUnavailableError("the patch could not be written in time", field=peer)
        return int(rows["nbytes"].sum())

    def _note(self, engine: _Engine, go: rdma_pb2.Go) -> None:
        """To every rank of the engine that this one has written to."""
        assert self._agent is not None
        ranks = {min(engine.peers)} if go.sparse else {item.rank for item in engine.writes}
        crash_point("rdma:note")
        for rank in sorted(ranks):
            self._agent.notify(engine.peers[rank][0], end_note(go.nonce, self._rank))
        self._last_go = time.monotonic()
        for _ in range(3):
            self._agent.notes()

    # --- the end ---

    def _drop(self, replica_id: str) -> None:
        engine = self._engines.pop(replica_id, None)
        if engine is None or self._agent is None:
            return
        with engine.lock:  # a go that is under way ends first; to a dead peer it fails soon
            if engine.lowered is not None:
                engine.lowered.release()
            for peer, _ in engine.peers.values():
                self._agent.disconnect(peer)

    def _drop_engines(self) -> None:
        for replica_id in list(self._engines):
            self._drop(replica_id)

    def close(self) -> None:
        """Ends the connection and deregisters; never raises."""
        self._closed.set()
        if self._connection is not None:
            self._connection.close()
        if self._thread is not None:
            self._thread.join(5.0)
        self._pool.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            self._drop_engines()
            if self._agent is not None:
                self._agent.close()
                self._agent = None


def _layout_of(pieces: tuple[ServedPiece, ...]) -> Layout:
    """The snapshot keeps each piece in the order of its coordinates, in an array of its own."""
    placements = [
        Placement(piece.spec.name, piece.coords, f"p{i}", row_major(piece.coords.sizes))
        for i, piece in enumerate(pieces)
    ]
    storages = {f"p{i}": StorageSpec(piece.coords.count, piece.spec.dtype) for i, piece in enumerate(pieces)}
    specs = {piece.spec.name: piece.spec for piece in pieces}
    return Layout(tuple(specs.values()), tuple(placements), storages)


def _span(storage: torch.Tensor) -> Span:
    device = None if storage.device.type == "cpu" else storage.device.index or 0
    return Span(storage.data_ptr(), storage.numel() * storage.element_size(), device)
