"""What a replica is called when nobody names it.

Owns the names of this process: leases and acknowledgements are kept by name, so two replicas with one name would drop
each other's lease. Owns no names that are given.
"""

from __future__ import annotations

import os
import socket
import threading

__all__ = ["give_back", "take_name"]

_taken: set[str] = set()
_lock = threading.Lock()


def take_name() -> str:
    """Host and process; from the second replica of a process on with a number behind. Free again after `give_back`."""
    first = f"{socket.gethostname()}-{os.getpid()}".replace("_", "-")
    with _lock:
        name, number = first, 2
        while name in _taken:
            name, number = f"{first}-{number}", number + 1
        _taken.add(name)
    return name


def give_back(name: str) -> None:
    """The replica with this name, taken here or given, is closed."""
    with _lock:
        _taken.discard(name)
