"""The log of the run, for engines: what the store's reading end knows, asked for over the controller's connections.

Owns the translation of calls, and that one of them at a time uses the store's end. Owns no entry.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from weight_sync.errors import InputError, VersionError
from weight_sync.ports import ReplicaEnd
from weight_sync.proto.v1 import manifest_pb2, rdma_pb2, service_pb2

__all__ = ["Logbook"]

_ENTRIES = 256  # in one answer
_CHUNK = 32 << 20


class Logbook:
    """Ends by run; ``reader`` makes one, None follows the newest run."""

    def __init__(self, reader: Callable[[str | None], ReplicaEnd]) -> None:
        self._reader = reader
        self._ends: dict[str, ReplicaEnd] = {}
        self._lock = threading.RLock()

    def end(self, run_id: str) -> ReplicaEnd:
        """The end of a run; "" is any, to ask for the newest."""
        if run_id not in self._ends:
            self._ends[run_id] = self._reader(run_id or None)
        return self._ends[run_id]

    def manifest(self, number: int) -> manifest_pb2.VersionManifest:
        """Of the newest run."""
        with self._lock:
            return self.end(self.end("").newest_run() or "").manifest(number)

    def answer(self, call: rdma_pb2.Call) -> rdma_pb2.Call | None:
        """One call. Raises what the store's end raises, InputError for a call that is none."""
        kind = call.WhichOneof("body")
        answers: dict[str | None, Callable[[rdma_pb2.Call], rdma_pb2.Call | None]] = {
            "run": self._run, "entry": self._entry, "entries": self._entries, "acknowledge": self._acknowledge,
            "register": self._register, "lease": self._lease, "want": self._want, "release": self._release,
            "trajectories": self._trajectories, "fetch": self._fetch,
        }  # fmt: skip
        if kind not in answers:
            raise InputError("not a call of an engine", field="call", found=kind, expected=", ".join(map(str, answers)))
        with self._lock:
            return answers[kind](call)

    def _run(self, call: rdma_pb2.Call) -> rdma_pb2.Call:
        newest = self.end("").newest_run()
        run_id = call.run.run_id or newest
        info = service_pb2.RunInfo(newest_run=newest or "")
        if run_id is not None:
            end = self.end(run_id)
            try:
                info.run_id = end.run_id()
                head = end.head()
                if head is not None:
                    info.head = head
            except VersionError:
                info.run_id = ""
        return rdma_pb2.Call(run_info=info)

    def _entry(self, call: rdma_pb2.Call) -> rdma_pb2.Call:
        return rdma_pb2.Call(manifest=self.end(call.entry.run_id).manifest(call.entry.number))

    def _entries(self, call: rdma_pb2.Call) -> rdma_pb2.Call:
        found = rdma_pb2.Entries()
        for entry in self.end(call.entries.run_id).entries(call.entries.first):
            found.entries.append(entry)
            if len(found.entries) == min(call.entries.limit or _ENTRIES, _ENTRIES):
                break
        return rdma_pb2.Call(entry_list=found)

    def _fetch(self, call: rdma_pb2.Call) -> rdma_pb2.Call:
        wanted = call.fetch
        if wanted.length > _CHUNK:
            raise InputError("too much at once", field="length", found=wanted.length, expected=f"at most {_CHUNK}")
        data = self.end(wanted.run_id).read(wanted.object, wanted.offset, wanted.length)
        return rdma_pb2.Call(chunk=service_pb2.Chunk(data=bytes(data)))

    def _acknowledge(self, call: rdma_pb2.Call) -> None:
        self.end(call.acknowledge.run_id).acknowledge(call.acknowledge.acknowledgement)

    def _register(self, call: rdma_pb2.Call) -> None:
        told = call.register
        self.end(told.run_id).register(told.replica_id, told.description, told.ttl_s)

    def _lease(self, call: rdma_pb2.Call) -> None:
        lease = call.lease
        self.end(lease.version.run_id).lease(lease.replica_id, lease.version.number, lease.ttl_s)

    def _want(self, call: rdma_pb2.Call) -> None:
        self.end(call.want.version.run_id).want(call.want.replica_id, call.want.version.number)

    def _release(self, call: rdma_pb2.Call) -> None:
        self.end(call.release.run_id).release(call.release.replica_id)

    def _trajectories(self, call: rdma_pb2.Call) -> rdma_pb2.Call:
        told = call.trajectories
        receipts = self.end(told.run_id).send_trajectories(list(told.batch.trajectories))
        return rdma_pb2.Call(receipts=service_pb2.TrajectoryReceipts(receipts=receipts))

    def close(self) -> None:
        """Closes all ends."""
        with self._lock:
            for end in self._ends.values():
                end.close()
            self._ends.clear()
