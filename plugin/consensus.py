"""How the publisher's ranks come to one answer, and to one error.

Owns the one collective verb that the core uses, and the packing of errors that cross it and keep their class. Owns no
decision: whoever calls says what a rank offers and what rank 0 makes of it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence

from weight_sync import errors
from weight_sync.errors import WeightSyncError
from weight_sync.ports import Group

__all__ = ["together", "writer_name"]

_ANSWER, _ERROR = b"=", b"!"


def together(group: Group, offer: Callable[[], bytes], join: Callable[[Sequence[bytes]], bytes]) -> bytes:
    """What rank 0 makes of every rank's offer, on every rank. A collective call.

    Args:
        offer: this rank's part.
        join: called on rank 0 with all parts, by rank.

    When an offer or the join raises, no rank is left waiting: each raises its own error, or else that of the first
    rank that failed, of the same class. Raises DeadlineError when a rank does not take part.
    """
    own: Exception | None = None
    try:
        part = _ANSWER + offer()
    except Exception as error:  # told to the others, then raised
        own, part = error, _packed(error)
    parts = group.gather(part)
    answer: bytes | None = None
    if group.rank == 0:
        try:
            answer = _ANSWER + join([_unpacked(part, f"rank {rank}: ") for rank, part in enumerate(parts)])
        except Exception as error:
            own, answer = own or error, _packed(error)
    answer = group.broadcast(answer)
    if own is not None:
        raise own
    return _unpacked(answer)


def _packed(error: Exception) -> bytes:
    """Class and message; an error that is not ours becomes a WeightSyncError elsewhere."""
    name, text = type(error).__name__, str(error)
    if not isinstance(error, WeightSyncError):
        name, text = WeightSyncError.__name__, f"{name}: {text}"
    return _ERROR + f"{name}\0{text}".encode("utf-8", "replace")


def _unpacked(data: bytes, whose: str = "") -> bytes:
    """The answer. Raises the error that came instead."""
    if data[:1] == _ANSWER:
        return data[1:]
    name, _, text = data[1:].decode("utf-8", "replace").partition("\0")
    kind = getattr(errors, name, None)
    if not (isinstance(kind, type) and issubclass(kind, WeightSyncError)):
        kind = WeightSyncError
    raise kind(whose + text)


def writer_name() -> str:
    """Host and process, for people."""
    return f"{socket.gethostname()}:{os.getpid()}"
