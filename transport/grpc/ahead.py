"""The object that leads to the next version, asked for before there is one: the server begins to send when it is committed.

Owns the waiting calls and what has arrived. Owns no decision to ask (replica_end.py). Saves the round trip between hearing
of a version and its first byte, which over a long link is longer than the transfer.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import grpc

from weight_sync.errors import WeightSyncError
from weight_sync.ports import Folded
from weight_sync.proto.v1 import common_pb2, service_pb2
from weight_sync.transport.grpc.client import Client
from weight_sync.transport.grpc.parts import Parts

__all__ = ["Ahead"]


class Ahead:
    """One request, spread over the client's connections, each in a thread of its own.

    Attributes:
        view, have: what leads on from where.
    """

    def __init__(self, client: Client, run_id: str, view: str, have: int, form: common_pb2.Form, limit: int) -> None:
        self.view, self.have = view, have
        self._client, self._run, self._form = client, run_id, form
        self._parts = Parts(limit, f"fold of the version after {have}")
        self._target: int | None = None
        self._left = client.connections
        self._failed = False
        self._calls: list[Any] = []
        self._news = threading.Condition()
        for k in range(client.connections):
            threading.Thread(target=self._follow, args=(k,), name="weight_sync-ahead", daemon=True).start()

    # --- the threads ---

    def _follow(self, part: int) -> None:
        try:
            self._read(part)
        except (grpc.RpcError, WeightSyncError, ValueError):  # ValueError: the channel was closed
            self._end(failed=True)
        else:
            self._end(failed=False)

    def _request(self, part: int) -> service_pb2.FetchRequest:
        fold = service_pb2.FoldRequest(view=self.view, have=self.have, form=self._form, next=True)
        return service_pb2.FetchRequest(run_id=self._run, fold=fold, part=part, parts=self._client.connections)

    def _read(self, part: int) -> None:
        request, fill, done = self._request(part), self._parts.filler(), 0
        call = self._client.start("Fetch", request, None, part)
        with self._news:
            self._calls.append(call)
        try:
            for data, message in call:
                if message is not None:
                    self._told(message)
                fill(done, data, message)
                done += len(data)
        except grpc.RpcError:
            with self._news:
                target, failed = self._target, self._failed
            if failed or target is None:
                raise
            request.fold.next, request.fold.target, request.offset = False, target, done
            done += self._client.fetch(request, self._parts.filler(), part)  # goes on at the byte where it stopped
        self._parts.arrived(done)

    def _told(self, message: service_pb2.Chunk) -> None:
        with self._news:
            if self._target not in (None, message.target):
                self._failed = True  # a version was committed between two of the calls
            self._target = message.target
            self._news.notify_all()

    def _end(self, failed: bool) -> None:
        with self._news:
            self._left -= 1
            self._failed = self._failed or failed
            self._news.notify_all()

    # --- the reader ---

    def take(self, view: str, have: int, target: int, form: common_pb2.Form, timeout: float) -> Folded | None:
        """The object for this way, once it is here; None when it is for another one, or has not come. Call it once."""
        deadline = time.monotonic() + timeout
        asked = (view, have, form) == (self.view, self.have, self._form)
        with self._news:
            if asked:
                self._wait(deadline, target)
            fine = asked and not self._failed and not self._left and self._target == target
        if not fine or self._parts.absent:
            self.cancel()
            return None
        return Folded(self._parts.whole(), self._parts.stored)

    def _wait(self, deadline: float, target: int) -> None:
        def settled() -> bool:
            return self._failed or not self._left or self._target not in (None, target)

        self._news.wait_for(settled, max(0.0, deadline - time.monotonic()))

    def cancel(self) -> None:
        """Ends the calls."""
        with self._news:
            self._failed = True
            calls = list(self._calls)
        for call in calls:
            call.cancel()
