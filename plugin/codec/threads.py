"""One way to spread work over threads: an ordered map with a bounded number in flight.

Owns the pools. Owns no work. Threads, not processes: kernels and libraries used here release the GIL.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import TypeVar

__all__ = ["ordered_map"]

_T = TypeVar("_T")
_R = TypeVar("_R")


@lru_cache(maxsize=16)
def _pool(threads: int, pid: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="weight_sync")


def ordered_map(function: Callable[[_T], _R], items: Iterable[_T], threads: int) -> Iterator[_R]:
    """``map`` on ``threads`` threads, results in order, at most ``threads + 1`` items in flight (bounds memory).

    The first exception is raised here; what was in flight then is waited for, so that nothing writes afterwards.
    Nested calls run in the caller's thread (``threads`` of 1), which cannot deadlock a pool.
    """
    if threads == 1:
        yield from map(function, items)
        return
    pool = _pool(threads, os.getpid())  # keyed by process: a pool does not survive a fork
    flying: deque[Future[_R]] = deque()
    try:
        for item in items:
            flying.append(pool.submit(function, item))
            if len(flying) > threads:
                yield flying.popleft().result()
        while flying:
            yield flying.popleft().result()
    finally:
        for future in flying:
            if not future.cancel():
                future.exception()
