"""What crosses the wire: the table of calls, how chunks are written and read, errors as status and trailing metadata.

Owns the translation both ways. Owns no connection and no decision. The table comes from the service's descriptor, so
there is no generated stub whose version would have to fit the installed grpc.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from weight_sync import errors
from weight_sync.errors import WeightSyncError
from weight_sync.proto.v1 import service_pb2

__all__ = ["CALLS", "CHUNK", "OPTIONS", "SERVICE", "Call", "error_of", "status_of", "trailer_of", "write_chunk"]

SERVICE = "weight_sync.v1.WeightSync"
CHUNK = 512 << 10
"""Bytes of an object in one message: 256 KiB to 1 MiB do equally well on loopback, and a slow reader holds one."""

MESSAGE = 64 << 20
"""Most bytes of one message; manifests of the largest models are the largest."""

OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MESSAGE),
    ("grpc.max_send_message_length", MESSAGE),
    ("grpc.http2.lookahead_bytes", 8 << 20),  # 64 KiB, the default, is less than a long link holds
    ("grpc.http2.max_frame_size", 4 << 20),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),  # a half-open connection is noticed after these two
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
)
"""Options of both sides."""

_ERROR = "weight-sync-error-bin"
_TEXT = 1500  # bytes of one field: metadata has room for 8 KiB

Codec = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the service.

    Attributes:
        path: as HTTP/2 has it.
        encode_request, decode_request, encode_reply, decode_reply: messages to bytes and back.
    """

    path: str
    name: str
    request_streams: bool
    reply_streams: bool
    encode_request: Codec
    decode_request: Codec
    encode_reply: Codec
    decode_reply: Codec


def _encode(message: Message | bytes) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()


def _as_is(data: bytes) -> bytes:
    return data


def read_chunk(data: bytes) -> tuple[memoryview, service_pb2.Chunk | None]:
    """The bytes of a Chunk, not copied when nothing else is in it, and the message when something is."""
    if data[:1] == b"\x0a":
        size, at = _varint(data, 1)
        if at + size == len(data):
            return memoryview(data)[at:], None
    try:
        message = service_pb2.Chunk.FromString(data)
    except DecodeError as error:
        raise errors.CorruptionError("not a Chunk", field="Fetch", found=f"{len(data)} bytes") from error
    return memoryview(message.data), message


def write_chunk(data: bytes | memoryview) -> bytes:
    """A Chunk of nothing but ``data``, by one copy."""
    header = bytearray(b"\x0a")
    left = len(data)
    while left >= 0x80:
        header.append(left & 0x7F | 0x80)
        left >>= 7
    header.append(left)
    return b"".join((header, data))


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 64:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7
    return 1 << 62, at  # nothing has this length: the message is parsed in full, which tells what is wrong


def _table() -> dict[str, Call]:
    service = service_pb2.DESCRIPTOR.services_by_name["WeightSync"]
    table = {}
    for method in service.methods:
        request, reply = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
        chunks = reply is service_pb2.Chunk
        table[method.name] = Call(
            f"/{SERVICE}/{method.name}", method.name, method.client_streaming, method.server_streaming,
            _encode, request.FromString, _as_is if chunks else _encode, read_chunk if chunks else reply.FromString,
        )  # fmt: skip
    return table


CALLS: dict[str, Call] = _table()

# --- errors -----------------------------------------------------------------------------------------------------------

_STATUS: Sequence[tuple[type[WeightSyncError], grpc.StatusCode]] = (
    (errors.InputError, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.CorruptionError, grpc.StatusCode.DATA_LOSS),
    (errors.LineageError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.ContractError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.VersionError, grpc.StatusCode.NOT_FOUND),
    (errors.StoreFullError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.StoreReadOnlyError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.StoreError, grpc.StatusCode.UNAVAILABLE),
    (errors.DeadlineError, grpc.StatusCode.DEADLINE_EXCEEDED),
)


def status_of(error: WeightSyncError) -> grpc.StatusCode:
    """The status that comes nearest to an error."""
    return next((code for kind, code in _STATUS if isinstance(error, kind)), grpc.StatusCode.INTERNAL)


def trailer_of(error: WeightSyncError) -> tuple[tuple[str, bytes], ...]:
    """The error itself, as trailing metadata."""
    info = service_pb2.ErrorInfo(kind=type(error).__name__, what=error.what[:_TEXT], do=error.do[:_TEXT])
    for name in ("field", "found", "expected"):
        value = getattr(error, name)
        if value is not None:
            setattr(info, name, str(value)[:_TEXT])
    if isinstance(error, errors.InboxFullError):
        info.retry_after_s = error.retry_after_s
    return ((_ERROR, info.SerializeToString()),)


def error_of(call: Any, where: str) -> WeightSyncError:
    """What a failed call means to its caller.

    Args:
        call: the grpc.RpcError, which is the call as well.
        where: the server, for messages.
    """
    for key, value in call.trailing_metadata() or ():
        if key == _ERROR:
            try:
                return _rebuilt(service_pb2.ErrorInfo.FromString(value))
            except DecodeError:
                break  # of a stranger: the status says enough
    code, details = call.code(), (call.details() or "")[:_TEXT]
    found = f"{code.name}: {details}"
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return errors.ConfigError("the server refuses this token", field="weight_sync.auth", found=details,
                                  do=f"give a token that {where} knows, with the role that the call needs")  # fmt: skip
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return errors.StoreError("the server does not know this call", field=where, found=details,
                                 do="install the same weight_sync on both sides")  # fmt: skip
    if code in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED,
                grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.ABORTED):  # fmt: skip
        return errors.StoreUnavailableError("the server cannot be reached, or is busy", field=where, found=found,
                                            do="try again; check the address, TLS and the network")  # fmt: skip
    return errors.StoreError("the server failed", field=where, found=found, do="look at the server's log")


def _rebuilt(info: service_pb2.ErrorInfo) -> WeightSyncError:
    kind = getattr(errors, info.kind) if info.kind in errors.__all__ else None
    given = {name: getattr(info, name) for name in ("field", "found", "expected") if info.HasField(name)}
    if info.HasField("retry_after_s"):
        return errors.InboxFullError(info.what, info.retry_after_s, do=info.do, **given)
    made: WeightSyncError = (kind or errors.StoreError)(info.what, do=info.do, **given)
    return made
