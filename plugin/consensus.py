"""How the publisher's ranks share one answer: errors that cross the group and keep their class.

Owns the packing of errors. Owns no collective of its own beyond `tell` and no decision.
"""

from __future__ import annotations

import os
import socket

from weight_sync import errors
from weight_sync.errors import WeightSyncError

__all__ = ["pack_error", "raise_packed", "unpack_error", "writer_name"]


def pack_error(error: WeightSyncError) -> str:
    """Class and message as one string."""
    return f"{type(error).__name__}\0{error}"


def unpack_error(text: str) -> WeightSyncError:
    """Another rank's error, of the same class."""
    kind, _, message = text.partition("\0")
    found = getattr(errors, kind, None)
    if isinstance(found, type) and issubclass(found, WeightSyncError):
        return found(message)
    return WeightSyncError(message)


def raise_packed(packed: str, own: WeightSyncError | None) -> None:
    """Raises what ``packed`` holds, or this rank's own error, whose traceback says more; nothing when it is empty."""
    if packed:
        raise own if own is not None else unpack_error(packed)


def writer_name() -> str:
    """Host and process, for people."""
    return f"{socket.gethostname()}:{os.getpid()}"
