"""From strided boxes to runs of bytes: the descriptors of a one-sided write.

Owns expansion and the merging of runs that continue each other on both sides. Owns no memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from weight_sync.layout.box import Box

__all__ = ["RUN", "merged", "run_bytes", "runs"]

RUN = np.dtype([("source", "<u8"), ("target", "<u8"), ("nbytes", "<u8")])
"""One descriptor: addresses on both sides, and how many bytes."""


def _inner(source: Box, target: Box) -> tuple[int, int]:
    """How many trailing dimensions are contiguous on both sides, and their elements."""
    count, at = 1, len(source.sizes)
    while at:
        size = source.sizes[at - 1]
        if size != 1 and (source.strides[at - 1] != count or target.strides[at - 1] != count):
            break
        count *= size
        at -= 1
    return at, count


def run_bytes(source: Box, target: Box, width: int) -> int:
    """Length in bytes of the runs that a pair of boxes expands to."""
    return _inner(source, target)[1] * width


def runs(source: Box, source_at: int, target: Box, target_at: int, width: int) -> npt.NDArray[Any]:
    """(n,) of `RUN` for two boxes of equal sizes in storages that begin at the given addresses."""
    outer, count = _inner(source, target)
    offsets = []
    for box, at in ((source, source_at), (target, target_at)):
        found = np.array([at + box.offset * width], np.uint64)
        for size, stride in zip(box.sizes[:outer], box.strides[:outer], strict=True):
            steps = np.arange(size, dtype=np.uint64) * np.uint64(stride * width)
            found = (found[:, None] + steps).reshape(-1)
        offsets.append(found)
    out = np.empty(len(offsets[0]), RUN)
    out["source"], out["target"], out["nbytes"] = offsets[0], offsets[1], count * width
    return out


def merged(pieces: Iterable[npt.NDArray[Any]], most: int) -> npt.NDArray[Any]:
    """All runs, those that continue each other on both sides as one of at most ``most`` bytes, by destination."""
    found = list(pieces)
    if not found:
        return np.empty(0, RUN)
    rows = np.concatenate(found)
    rows = rows[np.argsort(rows["target"], kind="stable")]
    joins = (rows["source"][:-1] + rows["nbytes"][:-1] == rows["source"][1:]) & (
        rows["target"][:-1] + rows["nbytes"][:-1] == rows["target"][1:]
    )
    heads = np.flatnonzero(np.concatenate(([True], ~joins)))
    sizes = np.add.reduceat(rows["nbytes"], heads)
    out = rows[heads].copy()
    out["nbytes"] = sizes
    if not (sizes > most).any():
        return out
    counts = -(-sizes.astype(np.int64) // most)
    which = np.repeat(np.arange(len(out)), counts)
    nth = (np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)).astype(np.uint64)
    cut = out[which]
    cut["source"] += nth * np.uint64(most)
    cut["target"] += nth * np.uint64(most)
    cut["nbytes"] = np.minimum(np.uint64(most), sizes[which] - nth * np.uint64(most))
    return cut
