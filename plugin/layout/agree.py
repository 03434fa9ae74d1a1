"""The ranks agree who publishes what.

Owns the exchange over a ``ports.Group``: two collectives when all is well, four when coverage is wrong. Owns no rule
(layout/coverage.py). Every rank takes part in every collective, one that could not learn its layout too, so that all
of them raise and none waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from weight_sync.errors import FormatError, LayoutError, WeightSyncError
from weight_sync.layout.coverage import (
    SHOWN,
    check_exactly_once,
    decode_boxes,
    decode_summary,
    elect,
    encode_boxes,
    encode_summary,
    faults,
    summarise,
)
from weight_sync.layout.placement import Layout
from weight_sync.tensors import TensorSpec

if TYPE_CHECKING:
    from weight_sync.ports import Group

__all__ = ["Ownership", "agree_on_owners"]

_FAILED, _SUMMARY, _AGREED, _DISPUTED = b"F", b"S", b"A", b"D"


@dataclass(frozen=True)
class Ownership:
    """What the ranks agreed on, seen from one of them.

    Attributes:
        owned: names that this rank publishes, each with the whole of what it holds, in the order of the table.
        owners: for every name that this rank holds elements of, the rank that publishes them.
    """

    owned: tuple[str, ...]
    owners: Mapping[str, int]


def agree_on_owners(group: Group, layout: Layout | WeightSyncError) -> Ownership:
    """Elects an owner for everything that any rank holds, and checks that the owners cover the table exactly once.

    ``layout`` is what this rank has learnt, or the error that kept it from learning. Raises that error, or on every
    rank a LayoutError that lists what is wrong (tables that differ, holes, overlaps, other ranks' errors).
    """
    if isinstance(layout, Layout):
        summary = summarise(layout)
        parts = group.gather(_SUMMARY + encode_summary(summary))
        verdict = group.broadcast(_judge(layout.tensors, parts) if group.rank == 0 else None)
    else:
        parts = group.gather(_FAILED + str(layout).encode())
        group.broadcast(_join_failures(parts) if group.rank == 0 else None)
        raise layout
    if verdict[:1] == _FAILED:
        raise LayoutError(verdict[1:].decode())
    disputed, owners = _decode_verdict(verdict, group.rank, len(summary.held))
    named = {layout.tensors[held.tensor].name: owner for held, owner in zip(summary.held, owners, strict=True)}
    owned = tuple(name for name, owner in named.items() if owner == group.rank)
    if disputed:
        _explain(group, layout, disputed, frozenset(owned))
    return Ownership(owned, named)


def _judge(table: Sequence[TensorSpec], parts: Sequence[bytes]) -> bytes:
    """Rank 0's verdict; never raises, because the others wait for it."""
    if any(part[:1] != _SUMMARY for part in parts):
        return _join_failures(parts)
    try:
        summaries = [decode_summary(part[1:]) for part in parts]
        owners = elect(table, summaries)
        return _encode_verdict(check_exactly_once(table, summaries), owners)
    except WeightSyncError as error:
        return _FAILED + str(error).encode()


def _join_failures(parts: Sequence[bytes]) -> bytes:
    lines = [f"rank {rank}: {part[1:].decode()}" for rank, part in enumerate(parts) if part[:1] == _FAILED]
    return _FAILED + "\n".join(["a rank could not learn its layout", *lines[:SHOWN]]).encode()


def _encode_verdict(disputed: Sequence[int], owners: Sequence[Sequence[int]]) -> bytes:
    """u32: number of disputed tensors, their indices, then for each rank the number of owners and the owners."""
    words = [len(disputed[:SHOWN]), *disputed[:SHOWN]]
    for row in owners:
        words += [len(row), *row]
    return (_DISPUTED if disputed else _AGREED) + np.array(words, "<u4").tobytes()


def _decode_verdict(data: bytes, rank: int, held: int) -> tuple[list[int], list[int]]:
    """Indices of disputed tensors, and the owners of what ``rank`` holds. Raises FormatError."""
    if data[:1] not in (_AGREED, _DISPUTED) or len(data) % 4 != 1:
        raise FormatError("not a verdict on ownership", field="bytes", found=data[:1])
    words = np.frombuffer(data, "<u4", offset=1).tolist()
    lists: list[list[int]] = []
    at = 0
    while at < len(words) and len(lists) < rank + 2:
        lists.append(words[at + 1 : at + 1 + words[at]])
        at += 1 + words[at]
    if len(lists) < rank + 2 or len(lists[-1]) != held:
        raise FormatError("verdict lacks this rank", field="rank", found=rank, expected=f"{held} owners")
    return lists[0], lists[-1]


def _explain(group: Group, layout: Layout, disputed: Sequence[int], owned: frozenset[str]) -> None:
    """Exchanges the owned boxes of the disputed tensors. Raises the LayoutError that lists holes and overlaps."""
    names = {index: layout.tensors[index].name for index in disputed}
    mine = {index: layout.coverage(name) for index, name in names.items() if name in owned}
    parts = group.gather(encode_boxes(mine))
    text: bytes | None = None
    if group.rank == 0:
        try:
            lines = faults(layout.tensors, [decode_boxes(part, layout.tensors) for part in parts], disputed)
        except WeightSyncError as error:
            lines = [str(error)]
        text = "\n".join(lines).encode()
    raise LayoutError(
        f"the ranks do not cover the table exactly once\n{group.broadcast(text).decode()}",
        do="publish from every rank that holds weights, and shard replicas alike",
    )
