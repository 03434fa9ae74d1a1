"""An engine's end: the log through the controller, and versions written into the engine's memory.

Owns one connection, what has landed, and the order of a transfer as the engine sees it. Owns no memory (receiver.py) and
no fence.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from weight_sync.config import Config
from weight_sync.errors import (
    ConfigError,
    CorruptionError,
    EngineError,
    EngineInDoubtError,
    StoreUnavailableError,
    VersionMissingError,
    WeightSyncError,
)
from weight_sync.history import table_of, view_of
from weight_sync.ports import DensePiece, Engine, ReplicaEnd
from weight_sync.proto.v1 import common_pb2, manifest_pb2, rdma_pb2, replica_pb2, service_pb2, trajectory_pb2
from weight_sync.push import Pushed, Receiver, placed_of, receivers_of
from weight_sync.tensors import TensorSpec
from weight_sync.transport.rdma.receiver import LocalReceiver
from weight_sync.transport.rdma.wire import Connection, connect, error_of, parse_address

__all__ = ["RdmaReplicaEnd"]

_READ = 16 << 20  # bytes of the store in one answer
_log = logging.getLogger("weight_sync.rdma")


class RdmaReplicaEnd(ReplicaEnd):
    """A reader's end. ``close`` ends a ``wait``; other methods belong to one thread."""

    def __init__(self, config: Config, run_id: str | None) -> None:
        self._config = config
        self._named = run_id if run_id is not None else config.run_id
        self._run: str | None = None
        self._address = parse_address(config.uri)
        self._connection: Connection | None = None
        self._engine: Engine | None = None
        self._replica_id = ""
        self._view: str | None = None
        self._receivers: Sequence[Receiver] = ()
        self._local: LocalReceiver | None = None  # the receiver, when it is of this process
        self._table: tuple[TensorSpec, ...] = ()  # whose tensors land whole; () where the engine says where they lie
        self._told: dict[int, bytes] = {}  # offers that the controller of this connection has
        self._ring: dict[str, tuple[int, int]] = {}  # objects that landed as a patch: offset and size
        self._refused = False  # memory could not be registered
        self._news = threading.Condition()
        self._head: tuple[str, int] | None = None  # run and number that the controller told of
        self._is_closed = False

    # --- the connection ---

    def _connected(self) -> Connection:
        if self._connection is None or not self._connection.is_open:
            if self._is_closed:
                raise StoreUnavailableError("this end is closed", field=self._config.uri)
            who = self._replica_id or "reader"
            self._connection = connect(self._address, who, self._config.auth.token, self._called,
                                       min(self._config.timeout_s, self._config.rdma.window_s))  # fmt: skip
            self._told = {}
        return self._connection

    def _request(self, call: rdma_pb2.Call, timeout: float | None = None) -> rdma_pb2.Call:
        return self._connected().request(call, self._config.timeout_s if timeout is None else timeout)

    def _called(self, connection: Connection, call: rdma_pb2.Call) -> None:
        if call.WhichOneof("body") == "run_info" and call.run_info.HasField("head"):
            with self._news:
                self._head = (call.run_info.run_id, call.run_info.head)
                self._news.notify_all()
        elif call.WhichOneof("body") == "went":
            for receiver in self._receivers:
                receiver.abort(call.went.nonce, error_of(call.went.error))

    # --- the run ---

    def _info(self, run_id: str | None) -> service_pb2.RunInfo:
        return self._request(rdma_pb2.Call(run=service_pb2.RunRequest(run_id=run_id or ""))).run_info

    def _followed(self) -> str:
        if self._run is None:
            info = self._info(self._named)
            if not info.run_id:
                raise VersionMissingError("the controller has no such run", field=self._config.uri,
                                          found=info.newest_run or None, expected=self._named or "a run",
                                          do="start the publisher, or correct weight_sync.run_id")  # fmt: skip
            self._run = info.run_id
        return self._run

    def run_id(self) -> str:
        """The run that is followed; never changes once known."""
        return self._followed()

    def newest_run(self) -> str | None:
        """The trainer's run now. None while there is none; while the trainer is away, the one that is followed."""
        return self._info(None).newest_run or None

    def head(self) -> int | None:
        """Number of the newest version; None while there is none."""
        info = self._info(self._run or self._named)
        return info.head if info.HasField("head") else None

    def manifest(self, number: int) -> manifest_pb2.VersionManifest:
        """Version ``number``, as the log has it."""
        request = service_pb2.EntryRequest(run_id=self._followed(), number=number)
        return self._request(rdma_pb2.Call(entry=request)).manifest

    def entries(self, first: int = 0) -> Iterator[manifest_pb2.VersionManifest]:
        """All entries from ``first`` on, in pages."""
        while True:
            request = service_pb2.EntriesRequest(run_id=self._followed(), first=first)
            found = self._request(rdma_pb2.Call(entries=request)).entry_list.entries
            if not found:
                return
            yield from found
            first = found[-1].number + 1

    def wait(self, after: int | None, timeout: float) -> int | None:
        """The newest version above ``after``: the controller says so as soon as it is committed."""
        deadline = time.monotonic() + timeout
        head = self.head()

        def newer() -> bool:
            told = self._head
            return self._is_closed or (told is not None and told[0] == self._run and (after is None or told[1] > after))

        while head is None or (after is not None and head <= after):
            left = deadline - time.monotonic()
            if left <= 0 or self._is_closed:
                return None
            with self._news:
                self._news.wait_for(newer, min(left, 1.0))  # a lost connection tells nothing, the next call does
            head = self.head()
        return head

    def read(self, ref: manifest_pb2.ShardRef, offset: int, length: int) -> memoryview:
        """A patch that has landed, else bytes of the trainer's store, where it keeps one.

        Raises VersionExpiredError where it does not, CorruptionError for a range outside of the object.
        """
        if offset < 0 or length < 0 or offset + length > ref.size:
            raise CorruptionError("range leaves the shard", field=ref.object, found=f"[{offset}, {offset + length})",
                                  expected=f"[0, {ref.size})")  # fmt: skip
        if ref.object in self._ring and self._local is not None:
            at = self._ring[ref.object][0] + offset
            return self._local.ring[at : at + length].data
        parts = bytearray()
        while len(parts) < length:
            some = min(_READ, length - len(parts))
            request = service_pb2.FetchRequest(
                run_id=self._followed(), object=ref, offset=offset + len(parts), length=some
            )
            parts += self._request(rdma_pb2.Call(fetch=request)).chunk.data
        return memoryview(bytes(parts))

    def local(self, ref: manifest_pb2.ShardRef) -> Path | None:
        """Nothing lies in a file here."""
        return None

    # --- versions into memory ---

    def place(self, replica_id: str, view: str | None, engine: Engine) -> None:
        """The engine; its memory is registered when the first version is due."""
        self._replica_id, self._view, self._engine = replica_id, view, engine

    def pushed(self, view: str | None, have: int | None, target: int) -> Pushed | None:
        """Has ``target`` written here. None where there is no engine, where it came as a patch (`read` has it then), and
        where memory cannot be registered, which is said once.
        """
        if self._engine is None or view != self._view or self._refused:
            return None
        self._ring = {}
        try:
            self._offer(target)
        except EngineError as error:
            if self._config.rdma.commit == "direct":
                raise
            self._refused = True
            _log.warning("%s; versions are read through the controller instead", error)
            return None
        ask = rdma_pb2.Ask(replica_id=self._replica_id, number=target, have=have)
        window = self._config.rdma.window_s
        going = self._request(rdma_pb2.Call(ask=ask), window + self._config.timeout_s).going
        if going.shards:
            self._transfer(going)
            self._ring = {ref.object: (at, ref.size) for ref, at in zip(going.shards, going.offsets, strict=True)}
            return None
        if self._config.rdma.commit == "direct":
            return Pushed(lambda: iter(()), lambda: self._transfer(going), f"version {target} straight into place")
        self._transfer(going)
        inside = self._local is None
        where = f"in {len(self._receivers)} engine ranks" if inside else "beside the engine"
        return Pushed(self._pieces, None, f"version {target} by {len(going.senders)} landing {where}", inside)

    def _pieces(self) -> Iterator[DensePiece]:
        for receiver in self._receivers:
            yield from receiver.pieces()

    def _offer(self, target: int) -> None:
        """Tells the controller of memory that it does not know of yet."""
        connection = self._connected()
        for rank, data in enumerate(self._offers(target)):
            if self._told.get(rank) != data:
                offer = rdma_pb2.OfferTarget.FromString(data)
                offer.replica_id = self._replica_id
                connection.request(rdma_pb2.Call(offer_target=offer), self._config.timeout_s)
                self._told[rank] = data

    def _offers(self, target: int) -> list[bytes]:
        """Of the engine's own receivers; where it has none, or they cannot, of the one in this process."""
        assert self._engine is not None
        if self._local is None and not self._receivers:
            self._receivers = receivers_of(self._engine)
        if self._local is None and self._receivers:
            try:
                return [receiver.offer(rank, len(self._receivers)) for rank, receiver in enumerate(self._receivers)]
            except EngineInDoubtError:
                raise
            except (ConfigError, EngineError) as error:
                if self._config.rdma.commit == "direct":
                    raise
                _log.warning("the engine's ranks cannot be written into: %s; versions land beside it", error)
        self._receivers = self._own(target)
        return [self._receivers[0].offer(0, 1)]

    def _own(self, target: int) -> Sequence[Receiver]:
        """The receiver of this process: made once, and again when whole tensors land and they are others now."""
        assert self._engine is not None
        placed = placed_of(self._engine)
        table = table_of(view_of(self.manifest(target), self._view)) if placed is None else ()
        if self._local is None or table != self._table:
            if self._local is not None:
                self._local.close()
            room = self._config.rdma.ring_bytes > 0
            self._local, self._table = LocalReceiver(self._config, placed, table, with_ring=room), table
        return (self._local,)

    def _transfer(self, going: rdma_pb2.Going) -> None:
        """Start, then wait for every rank's end notes. Raises DeadlineError, or what a trainer rank failed with."""
        window = self._config.rdma.window_s
        deadline = time.monotonic() + window
        data = going.SerializeToString()
        for receiver in self._receivers:
            receiver.expect(data)
        start = rdma_pb2.Start(replica_id=self._replica_id, nonce=going.nonce)
        self._request(rdma_pb2.Call(start=start), window)
        try:
            self._await_all(deadline)
        except WeightSyncError:
            if not self._connected_still():
                raise StoreUnavailableError("the controller has gone while a version landed", field=self._config.uri,
                                            do="wait for the trainer's return") from None  # fmt: skip
            raise

    def _await_all(self, deadline: float) -> None:
        """All at once: a rank that does not poll holds up the writes to it, and a trainer's notes to the others."""
        if len(self._receivers) == 1:
            self._receivers[0].arrived(max(0.0, deadline - time.monotonic()))
            return
        with ThreadPoolExecutor(len(self._receivers), thread_name_prefix="weight_sync-landing") as pool:
            waits = [pool.submit(r.arrived, max(0.0, deadline - time.monotonic())) for r in self._receivers]
            for wait in waits:
                wait.result()

    def _connected_still(self) -> bool:
        return self._connection is not None and self._connection.is_open

    # --- the other direction ---

    def lease(self, replica_id: str, number: int, ttl_s: int) -> None:
        """In the trainer's store."""
        version = common_pb2.VersionId(run_id=self._followed(), number=number)
        self._request(rdma_pb2.Call(lease=replica_pb2.Lease(replica_id=replica_id, version=version, ttl_s=ttl_s)))

    def release(self, replica_id: str) -> None:
        """Drops the lease; a run that went with its trainer took it along."""
        request = service_pb2.ReplicaRequest(run_id=self._followed(), replica_id=replica_id)
        with suppress(VersionMissingError):
            self._request(rdma_pb2.Call(release=request))

    def want(self, replica_id: str, number: int) -> None:
        """Told to the trainer, whose next full state helps where it keeps a store."""
        version = common_pb2.VersionId(run_id=self._followed(), number=number)
        self._request(rdma_pb2.Call(want=replica_pb2.Lease(replica_id=replica_id, version=version)))

    def acknowledge(self, message: replica_pb2.Acknowledgement) -> None:
        """Tells the trainer what this replica serves."""
        request = service_pb2.AcknowledgeRequest(run_id=self._followed(), acknowledgement=message)
        self._request(rdma_pb2.Call(acknowledge=request))

    def register(self, replica_id: str, description: replica_pb2.EngineDescription, ttl_s: int) -> None:
        """For whoever looks at the fleet."""
        request = service_pb2.RegisterRequest(
            replica_id=replica_id, run_id=self._followed(), description=description, ttl_s=ttl_s
        )
        self._request(rdma_pb2.Call(register=request))

    def send_trajectories(self, batch: Sequence[trajectory_pb2.Trajectory]) -> list[trajectory_pb2.TrajectoryReceipt]:
        """Into the trainer's inbox."""
        told = trajectory_pb2.TrajectoryBatch(trajectories=batch)
        request = service_pb2.TrajectoriesRequest(run_id=self._followed(), batch=told)
        return list(self._request(rdma_pb2.Call(trajectories=request)).receipts.receipts)

    def close(self) -> None:
        """Takes the memory out of reach, and ends the connection."""
        self._is_closed = True
        with self._news:
            self._news.notify_all()
        for receiver in self._receivers:
            receiver.close()
        if self._connection is not None:
            self._connection.close()
