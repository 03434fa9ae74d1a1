"""The controller on trainer rank 0: collects layouts, keeps schedules, says go, and hands the log to engines.

Owns who is there, which schedule an engine has, and the order of one transfer: ask, going, start, go, went. Owns no
bytes of a version, no schedule's making (schedule.py) and no log (the store's ends).
"""

from __future__ import annotations

import hmac
import itertools
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from weight_sync.config import Config
from weight_sync.errors import (
    ConfigError,
    InputError,
    StoreError,
    StoreUnavailableError,
    VersionExpiredError,
)
from weight_sync.layout.placement import Layout
from weight_sync.ports import ReplicaEnd
from weight_sync.proto.v1 import rdma_pb2, service_pb2
from weight_sync.transport.rdma.barrier import BarrierCount
from weight_sync.transport.rdma.layouts import from_message
from weight_sync.transport.rdma.logbook import Logbook
from weight_sync.transport.rdma.schedule import Schedule, plan
from weight_sync.transport.rdma.side import Side
from weight_sync.transport.rdma.wire import FORMAT, Connection, error_message, parse_address
from weight_sync.transport.rdma.writes import encode_writes, hash_of, ranks_written, writes_of

__all__ = ["Controller"]

_KEPT = 8  # schedules
_PATCH_FORMS = frozenset({1, 3})  # STEP and ABSOLUTE: what a reader applies without the old bits


@dataclass
class _Trainer:
    connection: Connection
    offer: rdma_pb2.OfferSource
    layout: Layout
    holds: rdma_pb2.Holds = field(default_factory=rdma_pb2.Holds)


@dataclass
class _Replica:
    """One engine: its ranks' offers, and what its trainers were told."""

    connection: Connection
    targets: dict[int, rdma_pb2.OfferTarget] = field(default_factory=dict)
    schedule: Schedule | None = None
    made_of: object = None
    assigned: set[int] = field(default_factory=set)  # trainer ranks that have their part, for these addresses
    pending: rdma_pb2.Going | None = None
    sparse: bool = False
    barrier: BarrierCount = field(default_factory=BarrierCount)

    @property
    def world_size(self) -> int:
        return next(iter(self.targets.values())).world_size if self.targets else 0


class Controller:
    """Listens from `start` to `close`.

    Args:
        reader: makes a reader of the log for one run (None: the newest), see `Logbook`.
    """

    def __init__(self, config: Config, world_size: int, reader: Callable[[str | None], ReplicaEnd]) -> None:
        self._config, self._world_size = config, world_size
        self.log = Logbook(reader)
        self._trainers: dict[int, _Trainer] = {}
        self._replicas: dict[str, _Replica] = {}
        self._connections: set[Connection] = set()
        self._schedules: dict[bytes, Schedule] = {}  # by what they were made of
        self._nonces = itertools.count(time.time_ns() & 0x7FFFFFFFFFFF)
        self._changed = threading.Condition()
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self.port = 0

    # --- life ---

    def start(self) -> None:
        """Listens. Raises ConfigError when the address is taken, or open to strangers without a token."""
        host, port = parse_address(self._config.uri if self._config.listen is None else f"rdma://{self._config.listen}")
        token = self._config.auth.token
        loopback = host.startswith("127.") or host in ("localhost", "::1")
        if not (loopback or token or self._config.insecure):
            raise ConfigError("would listen in the open", field="weight_sync.auth.token", found=None, expected="a token",
                              do="set auth.token on all sides, or insecure: true on a closed network")  # fmt: skip
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, port), family=family, backlog=512)
        except OSError as error:
            raise ConfigError("cannot listen", field="weight_sync.uri", found=f"{host}:{port}: {error.strerror}",
                              do="choose a free port of this host") from error  # fmt: skip
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name="weight_sync-controller", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        assert self._listener is not None
        while True:
            try:
                plain, address = self._listener.accept()
            except OSError:
                return  # closed
            connection = Connection(plain, f"{address[0]}:{address[1]}", self._first)
            connection.on_close = self._gone
            with self._changed:
                self._connections.add(connection)
            connection.start()

    def close(self) -> None:
        """Ends all connections."""
        if self._listener is not None:
            self._listener.close()
        with self._changed:
            connections = list(self._connections)
        for connection in connections:
            connection.close()
        self.log.close()

    def _gone(self, connection: Connection) -> None:
        with self._changed:
            self._connections.discard(connection)
            lost = [rank for rank, t in self._trainers.items() if t.connection is connection]
            for rank in lost:
                del self._trainers[rank]
            for replica in self._replicas.values():
                replica.assigned -= set(lost)
            left = [name for name, r in self._replicas.items() if r.connection is connection]
            for name in left:
                del self._replicas[name]
            trainers, replicas = list(self._trainers.values()), list(self._replicas.items())
            self._changed.notify_all()
        for rank in lost:
            error = StoreUnavailableError("a trainer rank has gone", field="rank", found=rank, do="wait for its return")
            for name, replica in replicas:
                if replica.pending is not None:
                    went = rdma_pb2.Went(nonce=replica.pending.nonce, rank=rank, error=error_message(error))
                    _try_send(replica.connection, rdma_pb2.Call(went=went))
                    self._open(replica, rdma_pb2.Barrier(replica_id=name, nonce=went.nonce, error=went.error))
        for name in left:
            for trainer in trainers:
                _try_send(trainer.connection, rdma_pb2.Call(forget=rdma_pb2.Forget(replica_id=name)))

    # --- calls ---

    def _first(self, connection: Connection, call: rdma_pb2.Call) -> rdma_pb2.Call | None:
        """Nobody is answered who has not said hello with the right token."""
        if call.WhichOneof("body") != "hello":
            raise InputError("no hello", field=connection.peer, found=call.WhichOneof("body"), expected="hello")
        if not hmac.compare_digest(call.hello.token.encode(), (self._config.auth.token or "").encode()):
            raise ConfigError("the controller refuses this token", field="weight_sync.auth.token",
                              do="set the trainer's token")  # fmt: skip
        if call.hello.format != FORMAT:
            raise ConfigError("another weight_sync", field="format", found=call.hello.format, expected=FORMAT,
                              do="install the same weight_sync on both sides")  # fmt: skip
        connection.peer = call.hello.who or connection.peer
        connection.use(self._call)
        return None

    def _call(self, connection: Connection, call: rdma_pb2.Call) -> rdma_pb2.Call | None:
        kind = call.WhichOneof("body")
        if kind == "ask":
            return rdma_pb2.Call(going=self._ask(call.ask))
        if kind == "offer_source":
            self._offer_source(connection, call.offer_source)
        elif kind == "holds":
            self._holds(connection, call.holds)
        elif kind == "offer_target":
            self._offer_target(connection, call.offer_target)
        elif kind == "start":
            self._start(call.start)
        elif kind == "went":
            self._went(call.went)
        elif kind == "barrier":
            self._reached(call.barrier)
        else:
            return self.log.answer(call)
        return None

    def _offer_source(self, connection: Connection, offer: rdma_pb2.OfferSource) -> None:
        if offer.world_size != self._world_size or offer.rank >= self._world_size:
            raise InputError("not a rank of this trainer", field="rank", found=(offer.rank, offer.world_size),
                             expected=f"of {self._world_size}")  # fmt: skip
        layout = from_message(offer.layout)
        with self._changed:
            self._trainers[offer.rank] = _Trainer(connection, offer, layout)
            for replica in self._replicas.values():
                replica.assigned.discard(offer.rank)
            self._changed.notify_all()

    def _holds(self, connection: Connection, holds: rdma_pb2.Holds) -> None:
        with self._changed:
            for trainer in self._trainers.values():
                if trainer.connection is connection:
                    trainer.holds = holds
            self._changed.notify_all()

    def _offer_target(self, connection: Connection, offer: rdma_pb2.OfferTarget) -> None:
        from_message(offer.layout)  # refused now, not when the first version is due
        with self._changed:
            replica = self._replicas.get(offer.replica_id)
            if replica is None or replica.connection is not connection:
                replica = self._replicas[offer.replica_id] = _Replica(connection)
            replica.targets[offer.rank] = offer
            replica.assigned = set()  # addresses may be new

    # --- one transfer ---

    def _ask(self, ask: rdma_pb2.Ask) -> rdma_pb2.Going:
        """What will come. Raises VersionExpiredError, StoreUnavailableError."""
        replica = self._replica(ask.replica_id)
        if len(replica.targets) != replica.world_size:
            raise InputError("engine ranks are missing", field=ask.replica_id, found=sorted(replica.targets),
                             expected=replica.world_size, do="offer every rank's memory before asking")  # fmt: skip
        trainers = self._holding(ask.number)
        began = time.perf_counter()
        schedule = self._schedule(replica, trainers)
        self._assign(ask.replica_id, replica, schedule, trainers)
        going = rdma_pb2.Going(number=ask.number, nonce=next(self._nonces), schedule=schedule.hash)
        going.seconds = time.perf_counter() - began
        replica.sparse = self._as_patch(ask, replica, schedule, trainers, going)
        if not replica.sparse:
            for source, target in ranks_written(schedule):
                entry = next((s for s in going.senders if s.rank == target), None)
                (entry or going.senders.add(rank=target)).trainers.append(source)
        replica.barrier = BarrierCount(frozenset(rank for s in going.senders for rank in s.trainers))
        replica.pending = going
        return going

    def _replica(self, replica_id: str) -> _Replica:
        with self._changed:
            replica = self._replicas.get(replica_id)
        if replica is None:
            raise InputError("engine has not registered", field="replica_id", found=replica_id, do="offer its memory")
        return replica

    def _holding(self, number: int) -> dict[int, _Trainer]:
        """The trainer ranks, once all of them hold version ``number``: rank 0 commits a little before they do."""
        deadline = time.monotonic() + min(self._config.rdma.window_s, self._config.timeout_s)

        def there() -> bool:
            held = [t.holds.number for t in self._trainers.values() if t.holds.HasField("number")]
            newer = any(n > number for n in held)
            return newer or (len(held) == self._world_size and all(n == number for n in held))

        with self._changed:
            came = self._changed.wait_for(there, max(0.0, deadline - time.monotonic()))
            trainers = dict(self._trainers)
        held = {rank: t.holds.number for rank, t in trainers.items() if t.holds.HasField("number")}
        if any(n > number for n in held.values()):
            raise VersionExpiredError("the trainer has moved on", field="number", found=max(held.values()),
                                      expected=number, do="ask for the newest version")  # fmt: skip
        if not came:
            raise StoreUnavailableError("not all trainer ranks hold the version", field="number", found=held,
                                        expected=number, do="wait for the next version")  # fmt: skip
        return trainers

    def _schedule(self, replica: _Replica, trainers: dict[int, _Trainer]) -> Schedule:
        """Made once for the same layouts on both sides, whichever engine they are of."""
        key = b"".join(trainers[r].offer.layout.SerializeToString(deterministic=True) for r in sorted(trainers))
        key += b"".join(
            replica.targets[r].layout.SerializeToString(deterministic=True) for r in sorted(replica.targets)
        )
        found = self._schedules.get(key)
        if found is None:
            sources = Side.of({rank: t.layout for rank, t in trainers.items()})
            targets = Side.of({rank: from_message(t.layout) for rank, t in replica.targets.items()})
            if len(self._schedules) >= _KEPT:
                self._schedules.clear()  # most are of layouts that nobody has any more
            found = self._schedules[key] = plan(sources, targets, chunk_bytes=self._config.rdma.chunk_bytes)
        if replica.schedule is not found:
            replica.schedule, replica.assigned = found, set()
        return found

    def _assign(self, replica_id: str, replica: _Replica, schedule: Schedule, trainers: dict[int, _Trainer]) -> None:
        targets = []
        for offer in replica.targets.values():
            light = rdma_pb2.OfferTarget()
            light.CopyFrom(offer)
            light.ClearField("layout")
            targets.append(light)
        for rank, trainer in trainers.items():
            if rank in replica.assigned:
                continue
            writes = encode_writes(writes_of(schedule, rank))
            assign = rdma_pb2.Assign(replica_id=replica_id, schedule=schedule.hash, part=hash_of(writes), writes=writes,
                                     groups=schedule.groups, barrier=self._config.rdma.barrier)  # fmt: skip
            assign.targets.extend(targets)
            trainer.connection.request(rdma_pb2.Call(assign=assign), self._config.rdma.window_s)
            replica.assigned.add(rank)

    def _as_patch(
        self, ask: rdma_pb2.Ask, replica: _Replica, schedule: Schedule, trainers: dict[int, _Trainer],
        going: rdma_pb2.Going,
    ) -> bool:  # fmt: skip
        """Whether the patch travels instead of the state: the engine holds its parent, and it is small enough."""
        room = replica.targets[min(replica.targets)].ring_bytes
        if not ask.HasField("have") or replica.world_size != 1 or not room:
            return False
        manifest = self.log.manifest(ask.number)
        shards = [(rank, ref) for rank, t in sorted(trainers.items()) for ref in t.holds.shards]
        if not manifest.HasField("parent") or manifest.parent != ask.have:
            return False
        if any(ref.form not in _PATCH_FORMS for _, ref in shards):
            return False
        total = sum(-(-ref.size // 64) * 64 for _, ref in shards)
        if total > min(room, self._config.rdma.sparse_share * int(schedule.nbytes.sum())):
            return False
        at = 0
        for _, ref in shards:
            going.shards.append(ref)
            going.offsets.append(at)
            at += -(-ref.size // 64) * 64
        senders = going.senders.add(rank=min(replica.targets))
        senders.trainers.extend(sorted({rank for rank, _ in shards}))
        return True

    def _start(self, start: rdma_pb2.Start) -> None:
        replica = self._replica(start.replica_id)
        going = replica.pending
        if going is None or going.nonce != start.nonce:
            raise InputError("no such transfer", field="nonce", found=start.nonce, do="ask first")
        with self._changed:
            trainers = dict(self._trainers)
        for rank in sorted({rank for s in going.senders for rank in s.trainers}):
            trainer = trainers.get(rank)
            if trainer is None:
                raise StoreUnavailableError(
                    "a trainer rank has gone", field="rank", found=rank, do="wait for its return"
                )
            go = rdma_pb2.Go(replica_id=start.replica_id, number=going.number, schedule=going.schedule,
                             nonce=going.nonce, sparse=replica.sparse)  # fmt: skip
            for ref, offset in zip(going.shards, going.offsets, strict=True):
                if any(mine.object == ref.object for mine in trainer.holds.shards):
                    go.objects.append(ref.object)
                    go.offsets.append(offset)
            trainer.connection.send(rdma_pb2.Call(go=go))

    def _went(self, went: rdma_pb2.Went) -> None:
        """A trainer rank's failure is told to the engine, which waits for its note."""
        with self._changed:
            replica = self._replicas.get(went.replica_id)
        if replica is not None and went.HasField("error"):
            _try_send(replica.connection, rdma_pb2.Call(went=went))
            self._open(replica, rdma_pb2.Barrier(replica_id=went.replica_id, nonce=went.nonce, error=went.error))

    def _reached(self, barrier: rdma_pb2.Barrier) -> None:
        """A trainer rank has written a mesh group; all are told once the last one has."""
        with self._changed:
            replica = self._replicas.get(barrier.replica_id)
            going = None if replica is None else replica.pending
            if replica is None or going is None or going.nonce != barrier.nonce:
                return  # the engine has gone, or asked again
            last = replica.barrier.add(barrier.rank, barrier.group)
        if last:
            self._open(replica, barrier)

    def _open(self, replica: _Replica, barrier: rdma_pb2.Barrier) -> None:
        """Tells the ranks of a transfer that a mesh group is written, or that it will not be."""
        if not self._config.rdma.barrier:
            return
        with self._changed:
            there = [self._trainers[rank] for rank in sorted(replica.barrier.ranks) if rank in self._trainers]
        for trainer in there:
            _try_send(trainer.connection, rdma_pb2.Call(barrier=barrier))

    # --- the log ---

    def note(self, run_id: str, number: int | None) -> None:
        """A version was committed, or a run opened: whoever is connected hears of it."""
        with self._changed:
            connections = list(self._connections)
        info = service_pb2.RunInfo(run_id=run_id, newest_run=run_id, head=number)
        for connection in connections:
            _try_send(connection, rdma_pb2.Call(run_info=info))


def _try_send(connection: Connection, call: rdma_pb2.Call) -> None:
    try:
        connection.send(call)
    except StoreError:
        connection.close()  # its reading thread tells the rest
