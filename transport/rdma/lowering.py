"""A rank's part of a schedule as tasks of a pipeline: writes straight out of the snapshot, and those made first.

Owns which writes are gathered or converted, where in the staging memory, and how descriptors become posts. Owns no
memory but the staging, and no agreement (sender.py).

A write is made first when dtypes differ, or when its source is cut into short runs that lie together at the
destination: then one gather and one large write beat thousands of small ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from weight_sync.dtypes import dtype_of
from weight_sync.errors import LayoutError
from weight_sync.layout.link import row_major
from weight_sync.transport.rdma.memory import MemoryMap
from weight_sync.transport.rdma.onesided import OneSided, Post, Span
from weight_sync.transport.rdma.pipeline import Done, Task
from weight_sync.transport.rdma.runs import merged, run_bytes, runs
from weight_sync.transport.rdma.writes import Write

if TYPE_CHECKING:
    import torch

__all__ = ["Lowered", "STAGES", "Staging", "lower"]

STAGES = ("make", "write", "barrier")
_POST_BYTES = 64 << 20
_POST_ROWS = 1024
_ALIGN = 256


@dataclass
class Staging:
    """Registered memory that bits are made in, handed out in a ring.

    Attributes:
        memory: (bytes,) uint8, on the device of the sources.
        span: the same for the agent.
    """

    memory: torch.Tensor
    span: Span
    _at: int = 0
    _taken: list[tuple[int, int]] = field(default_factory=list)  # (start, end) by task, all tasks so far

    def take(self, nbytes: int) -> tuple[int, int]:
        """Offset for the next task, and the index of the last earlier staged task that used the same bytes (-1: none).

        The offsets do not depend on time, so that descriptors are prepared once.
        """
        size = -(-nbytes // _ALIGN) * _ALIGN
        if self._at + size > self.memory.numel():
            self._at = 0
        start, self._at = self._at, self._at + size
        after = -1
        for index in range(len(self._taken) - 1, -1, -1):
            a, b = self._taken[index]
            if a < start + size and start < b:
                after = index
                break
        self._taken.append((start, start + size))
        return start, after


@dataclass
class Lowered:
    """What one rank does for one engine at each step.

    Attributes:
        tasks: for the pipeline.
        nbytes: in all.
        direct, staged: writes of either kind.
    """

    tasks: list[Task]
    nbytes: int
    direct: int
    staged: int
    posts: list[Post] = field(default_factory=list)

    def release(self) -> None:
        """Gives the posts back."""
        for post in self.posts:
            post.release()


def lower(
    agent: OneSided,
    writes: Sequence[Write],
    sources: Mapping[str, torch.Tensor],
    targets: Mapping[int, tuple[str, MemoryMap]],
    staging: Callable[[int], Staging],
    *,
    staging_bytes: int,
    gather_bytes: int,
    groups: int = 0,
    barrier: Callable[[int], Callable[[], Done]] | None = None,
) -> Lowered:
    """Tasks in the order of the schedule: mesh group by mesh group, and within one the direct writes first.

    Args:
        sources: flat storages by key.
        targets: by engine rank, the peer's name and its memory.
        staging: makes staging memory of so many bytes, registered; called at most once.
        staging_bytes: how large it may be.
        gather_bytes: runs shorter than this are gathered where that makes fewer of them.
        groups: mesh groups of the whole schedule, of which this rank may have none of the writes.
        barrier: makes the stage that waits, behind a group's tasks, for the other ranks; none: nobody waits.

    Raises FormatError when a write leaves its memory, LayoutError when one does not fit into the staging memory.
    """
    direct: dict[tuple[int, int, int | None, int | None], list[npt.NDArray[Any]]] = defaultdict(list)
    made: list[Write] = []
    for item in writes:
        source, span = (
            sources[item.source],
            targets[item.rank][1].find(item.target, item.target_place, item.dtypes[2], item.tensor),
        )
        width = dtype_of(item.dtypes[2]).width
        if item.place.count and item.place.last >= source.numel():
            raise LayoutError(
                "a write reads beside its storage", field=item.tensor, found=item.place, expected=source.numel()
            )
        if item.converts or _gathers(item, width, gather_bytes):
            made.append(item)
            continue
        key = (item.group, item.rank, _device(source), span.device)
        direct[key].append(runs(item.place, source.data_ptr(), item.target_place, span.address, width))
    out = Lowered([], sum(item.nbytes for item in writes), len(writes) - len(made), len(made))
    plain: dict[int, list[Task]] = defaultdict(list)
    for (group, rank, local, remote), pieces in direct.items():
        rows = merged(pieces, _POST_BYTES)
        for post in agent.prepare(targets[rank][0], rows, local, remote, _splits(rows)):
            out.posts.append(post)
            plain[group].append(Task(f"engine rank {rank}", 0, (("write", _starter(post)),)))
    ready = list(_staged(agent, made, sources, targets, staging, staging_bytes, out))
    count = max(groups, 1 + max((item.group for item in writes), default=-1))
    out.tasks += _in_groups(plain, ready, count, barrier)
    return out


def _in_groups(
    plain: Mapping[int, list[Task]], ready: Sequence[tuple[int, Task]], count: int,
    barrier: Callable[[int], Callable[[], Done]] | None,
) -> list[Task]:  # fmt: skip
    """All tasks, mesh group by mesh group, with the barrier's between them."""
    tasks: list[Task] = []
    staged_at: list[int] = []  # index among all tasks of each staged task
    gate = -1  # index of the barrier before this group
    for group in range(count):
        tasks += [Task(task.name, task.nbytes, task.stages, gate) for task in plain.get(group, ())]
        for task in (task for owner, task in ready if owner == group):
            after = staged_at[task.after] if task.after >= 0 else -1
            staged_at.append(len(tasks))
            tasks.append(Task(task.name, task.nbytes, task.stages, max(after, gate)))
        if barrier is not None and group + 1 < count:
            gate = len(tasks)
            tasks.append(Task(f"mesh group {group}", 0, (("barrier", barrier(group)),), gate - 1))
    return tasks


def _gathers(item: Write, width: int, limit: int) -> bool:
    now = run_bytes(item.place, item.target_place, width)
    return now < limit and now < item.nbytes and run_bytes(row_major(item.place.sizes), item.target_place, width) > now


def _device(storage: torch.Tensor) -> int | None:
    return None if storage.device.type == "cpu" else storage.device.index or 0


def _splits(rows: npt.NDArray[Any]) -> list[int]:
    """Ends of posts."""
    ends, size, count = [], 0, 0
    for index, nbytes in enumerate(rows["nbytes"].tolist()):
        if count and (size + nbytes > _POST_BYTES or count == _POST_ROWS):
            ends.append(index)
            size = count = 0
        size, count = size + nbytes, count + 1
    return [*ends, len(rows)] if len(rows) else []


def _starter(post: Post) -> Callable[[], Done | None]:
    return lambda: None if post.start() else post.done


def _staged(
    agent: OneSided, made: Sequence[Write], sources: Mapping[str, torch.Tensor],
    targets: Mapping[int, tuple[str, MemoryMap]], staging: Callable[[int], Staging], staging_bytes: int, out: Lowered,
) -> Iterator[tuple[int, Task]]:  # fmt: skip
    """(mesh group, task); ``after`` counts staged tasks only."""
    made = sorted(made, key=lambda item: item.group)
    total = sum(-(-item.nbytes // _ALIGN) * _ALIGN for item in made)
    if not made:
        return
    largest = max(item.nbytes for item in made)
    if largest > staging_bytes:
        raise LayoutError("a write does not fit into the staging memory", field="weight_sync.rdma.staging_bytes",
                          found=staging_bytes, expected=f"{largest} or more",
                          do="raise it, or lower rdma.chunk_bytes")  # fmt: skip
    memory = staging(max(_ALIGN, min(total, staging_bytes // _ALIGN * _ALIGN)))
    for item in made:
        width = dtype_of(item.dtypes[2]).width
        at, after = memory.take(item.nbytes)
        peer, where = targets[item.rank]
        span = where.find(item.target, item.target_place, item.dtypes[2], item.tensor)
        rows = merged(
            [runs(row_major(item.place.sizes), memory.span.address + at, item.target_place, span.address, width)],
            _POST_BYTES,
        )
        posts = agent.prepare(peer, rows, memory.span.device, span.device, _splits(rows))
        out.posts += posts
        room = memory.memory[at : at + item.nbytes]
        stages: list[tuple[str, Callable[[], Done | None]]] = [("make", _maker(item, sources[item.source], room))]
        stages += [("write", _starter(post)) for post in posts]
        yield item.group, Task(item.tensor, item.nbytes, tuple(stages), after)


def _maker(item: Write, source: torch.Tensor, room: torch.Tensor) -> Callable[[], Done | None]:
    """Gathers and converts into ``room``. On a GPU it only enqueues, and an event tells when it is done."""
    import torch

    kinds = [dtype_of(name).torch for name in item.dtypes]
    taken = source.as_strided(item.place.sizes, item.place.strides, source.storage_offset() + item.place.offset)
    target = room.view(kinds[2]).view(item.place.sizes)

    def make() -> Done | None:
        some = taken.view(kinds[0]) if taken.dtype == kinds[0] else taken
        for kind in kinds[1:]:
            some = some.to(kind)
        target.copy_(some, non_blocking=True)
        if target.device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(target.device))
        return lambda: bool(event.query())

    return make


def host_tensor(array: npt.NDArray[Any], dtype: str) -> torch.Tensor:
    """(n,) unsigned bits as a flat tensor of a dtype, sharing memory."""
    import torch

    signed = array.view("u1" if array.dtype.itemsize == 1 else f"i{array.dtype.itemsize}")
    return torch.from_numpy(signed).view(dtype_of(dtype).torch)
