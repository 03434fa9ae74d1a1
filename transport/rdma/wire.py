"""Connections between the controller and the ranks: calls as protobuf messages, each with its length before it.

Owns framing, requests and their answers, errors on the wire, and what a lost connection means. Owns no meaning of a
call. Bytes come from strangers: a frame has a limit and nothing in it is executed.
"""

from __future__ import annotations

import itertools
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress

from google.protobuf.message import DecodeError

from weight_sync import errors
from weight_sync.errors import ConfigError, DeadlineError, FormatError, StoreUnavailableError, WeightSyncError
from weight_sync.proto.v1 import rdma_pb2, service_pb2

__all__ = ["FORMAT", "Connection", "connect", "error_message", "error_of", "parse_address"]

FORMAT = 1
_LIMIT = 1 << 30  # one rank's part of a large schedule is the largest message
_HEAD = struct.Struct("<I")
_TEXT = 4000

Handler = Callable[["Connection", rdma_pb2.Call], rdma_pb2.Call | None]
"""Answers a request, or takes note of a call that wants no answer. Runs on the connection's reading thread."""


def parse_address(uri: str) -> tuple[str, int]:
    """Host and port of ``rdma://host:port``. Raises ConfigError."""
    scheme, found, rest = uri.partition("://")
    host, colon, port = rest.rstrip("/").rpartition(":")
    if scheme != "rdma" or not found or not colon or not host or not port.isdigit() or not 0 <= int(port) < 65536:
        raise ConfigError("not an address", field="weight_sync.uri", found=uri, expected="rdma://host:port")
    return host.strip("[]"), int(port)


def error_message(error: WeightSyncError) -> service_pb2.ErrorInfo:
    """An error for the wire."""
    info = service_pb2.ErrorInfo(kind=type(error).__name__, what=error.what[:_TEXT], do=error.do[:_TEXT])
    for name in ("field", "found", "expected"):
        value = getattr(error, name)
        if value is not None:
            setattr(info, name, str(value)[:_TEXT])
    return info


def error_of(info: service_pb2.ErrorInfo) -> WeightSyncError:
    """The other way."""
    kind = getattr(errors, info.kind) if info.kind in errors.__all__ and info.kind != "InboxFullError" else None
    given = {name: getattr(info, name) for name in ("field", "found", "expected") if info.HasField(name)}
    made: WeightSyncError = (kind or errors.StoreError)(info.what, do=info.do, **given)
    return made


def connect(address: tuple[str, int], who: str, token: str | None, handler: Handler, timeout: float) -> Connection:
    """Connects to the controller and says who calls. Raises StoreUnavailableError, ConfigError for a wrong token."""
    try:
        plain = socket.create_connection(address, timeout)
    except OSError as error:
        raise StoreUnavailableError("the controller cannot be reached", field=f"rdma://{address[0]}:{address[1]}",
                                    found=str(error), do="start the trainer, or correct weight_sync.uri") from error  # fmt: skip
    connection = Connection(plain, f"rdma://{address[0]}:{address[1]}", handler)
    connection.start()
    try:
        connection.request(rdma_pb2.Call(hello=rdma_pb2.Hello(format=FORMAT, token=token or "", who=who)), timeout)
    except BaseException:
        connection.close()
        raise
    return connection


class Connection:
    """One socket. Thread-safe.

    Attributes:
        peer: for messages.
        on_close: called once, from the reading thread, when the connection has ended.
    """

    def __init__(self, plain: socket.socket, peer: str, handler: Handler) -> None:
        plain.settimeout(None)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a host that vanished is noticed
        for name, seconds in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
            plain.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)
        self.peer = peer
        self.on_close: Callable[[Connection], None] = lambda _: None
        self._socket, self._handler = plain, handler
        self._write = threading.Lock()
        self._ids = itertools.count(1)
        self._answers: dict[int, rdma_pb2.Call | None] = {}  # None: awaited
        self._came = threading.Condition()
        self._lost: str | None = None
        self._thread = threading.Thread(target=self._read, name=f"weight_sync-{peer}", daemon=True)

    def start(self) -> None:
        """Begins to read."""
        self._thread.start()

    def use(self, handler: Handler) -> None:
        """Another handler from the next call on."""
        self._handler = handler

    @property
    def is_open(self) -> bool:
        """False once it has ended."""
        return self._lost is None

    # --- out ---

    def send(self, call: rdma_pb2.Call) -> None:
        """Sends; nothing is awaited. Raises StoreUnavailableError."""
        data = call.SerializeToString()
        if len(data) > _LIMIT:
            raise FormatError("message is too large", field=call.WhichOneof("body"), found=len(data), expected=_LIMIT)
        try:
            with self._write:
                self._socket.sendall(_HEAD.pack(len(data)))
                self._socket.sendall(data)
        except OSError as error:
            self._end(str(error))
            raise self._gone() from error

    def request(self, call: rdma_pb2.Call, timeout: float) -> rdma_pb2.Call:
        """Sends and waits for the answer. Raises the other side's error, StoreUnavailableError, DeadlineError."""
        with self._came:
            call.id = next(self._ids)
            self._answers[call.id] = None
        try:
            self.send(call)
            with self._came:
                came = self._came.wait_for(lambda: self._answers[call.id] is not None or self._lost, timeout)
                answer = self._answers[call.id]
        finally:
            with self._came:
                self._answers.pop(call.id, None)
        if answer is None:
            if came:
                raise self._gone()
            raise DeadlineError("no answer", field=f"{self.peer}: {call.WhichOneof('body')}",
                                expected=f"within {timeout:g} s")  # fmt: skip
        if answer.WhichOneof("body") == "error":
            raise error_of(answer.error)
        return answer

    def _gone(self) -> StoreUnavailableError:
        return StoreUnavailableError("the connection has ended", field=self.peer, found=self._lost or "closed",
                                     do="look whether the other side still runs")  # fmt: skip

    # --- in ---

    def _read(self) -> None:
        try:
            while True:
                call = self._next()
                if call.answer:
                    with self._came:
                        if call.id in self._answers:
                            self._answers[call.id] = call
                            self._came.notify_all()
                    continue
                self._handle(call)
        except (OSError, FormatError, StoreUnavailableError) as error:
            self._end(str(error))
        finally:
            with suppress(OSError):  # it has ended anyway
                self._socket.close()
            self.on_close(self)

    def _handle(self, call: rdma_pb2.Call) -> None:
        try:
            answer = self._handler(self, call)
        except WeightSyncError as error:
            answer = rdma_pb2.Call(error=error_message(error))
        except Exception as error:
            info = service_pb2.ErrorInfo(kind="StoreError", what=f"{type(error).__name__}: {error}"[:_TEXT])
            answer = rdma_pb2.Call(error=info)
        if call.id:
            answer = rdma_pb2.Call(done=service_pb2.Done()) if answer is None else answer
            answer.id, answer.answer = call.id, True
            self.send(answer)

    def _next(self) -> rdma_pb2.Call:
        (size,) = _HEAD.unpack(self._exactly(_HEAD.size))
        if size > _LIMIT:
            raise FormatError("frame is too large", field=self.peer, found=size, expected=f"at most {_LIMIT}")
        try:
            return rdma_pb2.Call.FromString(bytes(self._exactly(size)))
        except DecodeError as error:
            raise FormatError("not a call", field=self.peer, found=f"{size} bytes") from error

    def _exactly(self, size: int) -> bytearray:
        # grown as bytes come: a stranger's length alone takes no memory
        data = bytearray()
        while len(data) < size:
            part = self._socket.recv(min(size - len(data), 1 << 20))
            if not part:
                raise ConnectionResetError("the other side closed the connection")
            data += part
        return data

    def _end(self, why: str) -> None:
        with self._came:
            if self._lost is None:
                self._lost = why
            self._came.notify_all()
        with suppress(OSError):  # whoever reads it wakes up
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends it; never raises."""
        self._end("closed")
        if threading.current_thread() is not self._thread and self._thread.is_alive():
            self._thread.join(5.0)
