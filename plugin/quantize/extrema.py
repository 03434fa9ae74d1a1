"""The largest and smallest weight of blocks: what scales are made of, and all that ranks exchange about cut blocks.

Owns reduction by blocks and the merging of ranks' parts. Owns no scale. Extrema are exact and do not depend on order,
so scales come out bit for bit as from the whole weight, wherever shards end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from weight_sync.proto.v1 import report_pb2

if TYPE_CHECKING:
    import torch

__all__ = ["Ranges", "block_extrema", "block_key", "block_keys", "merge_ranges"]


def block_extrema(
    weights: torch.Tensor, offset: tuple[int, int], size: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(low, high), each of shape (blocks down, blocks across), of the weights' dtype.

    Args:
        weights: (rows, columns), part of a matrix.
        offset: of its first element in the matrix.
        size: rows and columns of a block; blocks at the edges of ``weights`` are seen in part.
    """
    import torch

    low = _reduce(_reduce(weights, 1, offset[1], size[1], torch.amin), 0, offset[0], size[0], torch.amin)
    high = _reduce(_reduce(weights, 1, offset[1], size[1], torch.amax), 0, offset[0], size[0], torch.amax)
    return low, high


def _reduce(x: torch.Tensor, dim: int, offset: int, size: int, how: object) -> torch.Tensor:
    import torch

    assert callable(how)
    if size == 1:
        return x
    count = x.shape[dim]
    head = min(count, -offset % size)
    body = (count - head) // size * size
    parts = []
    if head:
        parts.append(how(x.narrow(dim, 0, head), dim=dim, keepdim=True))
    if body:
        parts.append(how(x.narrow(dim, head, body).unflatten(dim, (body // size, size)), dim=dim + 1))
    if head + body < count:
        parts.append(how(x.narrow(dim, head + body, count - head - body), dim=dim, keepdim=True))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def block_key(weight: int, level: int, block: int) -> int:
    """A block's place in the order that all ranks share."""
    return weight << 40 | level << 36 | block


def block_keys(weight: int, level: int, blocks: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """Of several blocks."""
    return blocks.astype(np.uint64) + np.uint64(block_key(weight, level, 0))


class Ranges:
    """Extrema by block, sorted."""

    def __init__(self, message: report_pb2.BlockRanges | None = None) -> None:
        message = report_pb2.BlockRanges() if message is None else message
        self._keys = np.array(message.key, np.uint64)
        self._low, self._high = np.array(message.low, np.float32), np.array(message.high, np.float32)

    def fill(self, keys: npt.NDArray[np.uint64], low: torch.Tensor, high: torch.Tensor) -> None:
        """Puts what is known of blocks in place of what was seen of them; ``keys``: as ``low`` and ``high``, (n, m)."""
        import torch

        if not len(self._keys):
            return
        at = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        known = np.nonzero(self._keys[at] == keys)
        for target, source in ((low, self._low), (high, self._high)):
            values = torch.from_numpy(source[at[known]]).to(target)
            target[tuple(torch.from_numpy(index) for index in known)] = values


def merge_ranges(parts: Iterable[report_pb2.BlockRanges]) -> report_pb2.BlockRanges:
    """Of all ranks together: one entry per block, ascending."""
    keys, low, high = _joined(list(parts))
    out = report_pb2.BlockRanges()
    if not len(keys):
        return out
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    starts = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
    out.key.extend(keys[starts].tolist())
    out.low.extend(np.minimum.reduceat(low[order], starts).tolist())
    out.high.extend(np.maximum.reduceat(high[order], starts).tolist())
    return out


def _joined(parts: Sequence[report_pb2.BlockRanges]) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
    """Keys, low and high of all parts, one after the other."""
    return (
        np.concatenate([np.array(part.key, np.uint64) for part in parts] or [np.empty(0, np.uint64)]),
        np.concatenate([np.array(part.low, np.float32) for part in parts] or [np.empty(0, np.float32)]),
        np.concatenate([np.array(part.high, np.float32) for part in parts] or [np.empty(0, np.float32)]),
    )
