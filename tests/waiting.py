"""Waiting in tests: until something is true, with a limit.

Owns the one loop that looks and looks again. Owns no condition.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def until(true: Callable[[], Any], what: str = "it to happen", limit: float = 30.0) -> Any:
    """The first true answer of ``true``. Raises AssertionError at the limit of seconds."""
    deadline = time.monotonic() + limit
    while not (found := true()):
        assert time.monotonic() < deadline, f"waited {limit:g} s for {what}"
        time.sleep(0.01)
    return found
