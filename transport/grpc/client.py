"""A client's connections: channels with TLS and token, calls by name, failures as errors of ours.

Owns channels, limits in time, retries after a break. Owns no meaning of a call (replica_end.py, remote_publisher.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import grpc

from weight_sync.config import Config
from weight_sync.errors import ConfigError, StoreUnavailableError
from weight_sync.transport.grpc import wire
from weight_sync.transport.grpc.address import Address, parse, refuse_dialling
from weight_sync.transport.grpc.security import channel_credentials, client_token

__all__ = ["Client"]

PATIENCE_S = 60.0
"""Longest time without a byte before a read gives up; ``timeout_s`` when that is shorter."""

_RECONNECT = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),  # else channels to one server share one connection
)


class Client:
    """Calls to one server. Threads may share it. Channels connect at the first use and again after a break.

    Raises ConfigError when the address, TLS files or the token are no good.
    """

    def __init__(self, config: Config) -> None:
        self.address: Address = parse(config.uri)
        token = client_token(config)
        reason = refuse_dialling(self.address, token is not None, config.insecure)
        if reason is not None:
            raise ConfigError(f"not called: {reason}", field="weight_sync.uri", found=config.uri,
                              expected="grpcs://", do="use TLS, or set insecure: true in a network that you trust")  # fmt: skip
        self._credentials = channel_credentials(config, self.address)
        options: list[tuple[str, Any]] = [*wire.OPTIONS, *_RECONNECT]
        if config.tls.server_name is not None:
            options.append(("grpc.ssl_target_name_override", config.tls.server_name))
        self._options = options
        self._metadata = () if token is None else (("authorization", f"Bearer {token}"),)
        self.timeout_s = config.timeout_s
        self.connections = 1 if self.address.loopback else config.connections
        self._lock = threading.Lock()
        self._channels: list[grpc.Channel | None] = [None] * self.connections
        self._closed = False

    def _channel(self, index: int) -> grpc.Channel:
        with self._lock:
            if self._closed:
                raise StoreUnavailableError("the connection was closed", field=str(self.address))
            channel = self._channels[index]
            if channel is None:
                target = self.address.target
                if self._credentials is None:
                    channel = grpc.insecure_channel(target, options=self._options)
                else:
                    channel = grpc.secure_channel(target, self._credentials, options=self._options)
                self._channels[index] = channel
            return channel

    def start(self, name: str, request: Any, timeout: float | None, connection: int = 0) -> Any:
        """A call: the answer, or an iterator of answers; either raises grpc.RpcError. ``timeout`` None: no limit."""
        call = wire.CALLS[name]
        channel = self._channel(connection)
        kinds: dict[tuple[bool, bool], Any] = {
            (False, False): channel.unary_unary, (False, True): channel.unary_stream,
            (True, False): channel.stream_unary, (True, True): channel.stream_stream,
        }  # fmt: skip
        make = kinds[call.request_streams, call.reply_streams]
        stub = make(call.path, call.encode_request, call.decode_reply)
        return stub(request, timeout=timeout, metadata=self._metadata)

    def call(self, name: str, request: Any, timeout: float | None = None) -> Any:
        """One answer to one request. Raises the error that the server sent, or StoreUnavailableError."""
        limit = self.timeout_s if timeout is None else timeout
        with self.failures():
            return self.start(name, request, limit)

    def again(self, name: str, request: Any) -> Any:
        """Like `call`, once more after a break: for calls that do no harm twice."""
        try:
            return self.call(name, request)
        except StoreUnavailableError:
            return self.call(name, request)

    def send(self, name: str, requests: Iterable[Any]) -> Any:
        """One answer to many requests."""
        with self.failures():
            return self.start(name, iter(requests), self.timeout_s)

    def stream(self, name: str, request: Any, timeout: float | None = None) -> Iterator[Any]:
        """Many answers to one request (or to an iterator of them)."""
        with self.failures():
            call = self.start(name, request, self.timeout_s if timeout is None else timeout)
            try:
                yield from call
            finally:
                call.cancel()

    def failures(self) -> _Failures:
        """A context in which grpc's errors become ours."""
        return _Failures(str(self.address))

    def fetch(self, request: Any, fill: Callable[[int, memoryview, Any], None], connection: int = 0) -> int:
        """Reads a range into ``fill(position in the range, bytes, first message or None)``; resumes after a break.

        Goes on at the byte where it stopped, as long as no PATIENCE_S pass without one. Returns the bytes read.
        """
        done = 0
        began = request.offset
        length = request.length if request.HasField("length") else None
        patience = min(self.timeout_s, PATIENCE_S)
        moved = time.monotonic()
        pause = 0.05
        while True:
            request.offset = began + done
            if length is not None:
                request.length = length - done
            try:
                call = self.start("Fetch", request, self.timeout_s, connection)
                try:
                    for data, message in call:
                        fill(done, data, message)
                        done += len(data)
                        moved, pause = time.monotonic(), 0.05
                finally:
                    call.cancel()
                return done
            except grpc.RpcError as broken:
                error = wire.error_of(broken, str(self.address))
                if type(error) is not StoreUnavailableError or time.monotonic() + pause - moved > patience:
                    raise error from broken
                time.sleep(pause)
                pause = min(2 * pause, 1.0)

    def close(self) -> None:
        """Ends all calls."""
        with self._lock:
            self._closed = True
            for channel in self._channels:
                if channel is not None:
                    channel.close()


class _Failures:
    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, grpc.RpcError):
            raise wire.error_of(error, self._where) from error
        if isinstance(error, ValueError) and "closed" in str(error):  # "channel closed" or "closed channel", by version
            raise StoreUnavailableError("the connection was closed", field=self._where) from error
