"""Linked boxes: the normal form, and how many elements, runs or pieces become few N-d boxes.

Owns Link and compaction. Owns no set operation (layout/meet.py) and no names of tensors or storages
(layout/placement.py).

A *link* is a tuple of boxes of equal sizes whose k-th elements belong together, for example (checkpoint coordinates,
place in a storage). Its first box is the *key*.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from weight_sync.layout.box import Box

__all__ = ["Link", "compact", "from_indices", "is_nested", "normal", "row_major"]

Link = tuple[Box, ...]


def row_major(shape: Sequence[int]) -> Box:
    """All elements of a contiguous tensor of ``shape``, one dimension of the box per dimension of the tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return Box(0, tuple(shape), tuple(reversed(strides)))


def normal(link: Link) -> Link:
    """The same link, its dimensions by falling stride of the key and merged where all boxes allow it.

    One element has sizes ``(1,)``, an empty link sizes ``(0,)``.
    """
    sizes = link[0].sizes
    if len(sizes) == 1 and (sizes[0] > 1 or all(box.strides == (1,) for box in link)):
        return link
    if 0 in sizes:
        return tuple(Box(box.offset, (0,), (1,)) for box in link)
    dims = [(strides, size) for size, *strides in zip(sizes, *(box.strides for box in link), strict=True) if size != 1]
    dims.sort(key=itemgetter(0), reverse=True)
    merged: list[tuple[list[int], int]] = []
    for strides, size in dims:
        if merged and all(outer == size * inner for outer, inner in zip(merged[-1][0], strides, strict=True)):
            size *= merged.pop()[1]
        merged.append((strides, size))
    if not merged:
        merged = [([1] * len(link), 1)]
    shape = tuple(size for _, size in merged)
    return tuple(Box(box.offset, shape, tuple(strides[k] for strides, _ in merged)) for k, box in enumerate(link))


def is_nested(box: Box) -> bool:
    """True when each stride is longer than all that lies inside of it, so that no element comes twice."""
    extent = 0
    for stride, size in sorted(zip(box.strides, box.sizes, strict=True)):
        if size == 1:
            continue
        if stride <= extent:
            return False
        extent += (size - 1) * stride
    return True


def from_indices(columns: Sequence[npt.NDArray[np.int64]]) -> list[Link]:
    """Links of elements that are given one by one: ``columns[c][k]`` is the index of element k in box c.

    Columns are 1-d and equally long; the order of the elements does not matter.
    """
    count = len(columns[0])
    if not count:
        return []
    order = np.argsort(columns[0], kind="stable")
    table = np.stack([column[order] for column in columns])
    gaps = np.diff(table)
    rising = (gaps[0] > 0) & (gaps >= 0).all(axis=0)
    changes = np.flatnonzero((gaps[:, 1:] != gaps[:, :-1]).any(axis=0)) + 1
    ends = [*changes.tolist(), count - 1] if count > 1 else []
    # a stretch of equal gaps that do not rise cannot become a dimension
    equal = [(end, bool(rising[end - 1])) for end in ends]
    runs = list(_stretches(equal, count))
    found = compact(_run(table, first, size) for first, size in runs)
    even = _evenly(runs)
    if len(even) == len(runs):
        return found
    return min(found, compact(_run(table, first, size) for first, size in even), key=len)


def _run(table: npt.NDArray[np.int64], first: int, size: int) -> Link:
    """Elements first, first + 1, ... of a table of indices whose gaps are equal."""
    steps = (table[:, first + 1] - table[:, first]).tolist() if size > 1 else [1] * len(table)
    return tuple(Box(at, (size,), (step,)) for at, step in zip(table[:, first].tolist(), steps, strict=True))


def _evenly(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Runs cut to the commonest length, as far as that makes sense.

    Where two rows of a permutation happen to follow each other they look like one long run, which hides the pattern.
    """
    length = Counter(size for _, size in runs).most_common(1)[0][0]
    phase = next(first for first, size in runs if size == length)
    if length == 1 or sum(size for _, size in runs) > 4 * length * len(runs):
        return runs
    out = []
    for first, size in runs:
        borders = range(first + (phase - first) % length or first + length, first + size, length)
        out += [(a, b - a) for a, b in pairwise([first, *borders, first + size])]
    return out


def compact(links: Iterable[Link]) -> list[Link]:
    """The same elements in fewer links, ascending by key offset.

    Links that continue each other become one longer link, and links of one shape whose offsets grow evenly in every
    box become one link with one more dimension, again and again. No box gets a negative stride, and no key overlaps
    itself that did not before.
    """
    done = sorted((normal(link) for link in links if link[0].count), key=_offset)
    while len(done) > 1:
        fewer = [link for group in _alike(done, 0) for link in _stack(group)]
        if len(fewer) == len(done):  # joining comes last, it hides patterns
            fewer = [link for group in _alike(done, 1) for link in _join(group)]
        if len(fewer) == len(done):
            break
        done = sorted(fewer, key=_offset)
    return done


def _offset(link: Link) -> int:
    return link[0].offset


def _alike(links: Iterable[Link], free: int) -> Iterable[list[Link]]:
    """Links by strides and sizes, those of the first ``free`` dimensions aside; order is kept."""
    groups: dict[Any, list[Link]] = defaultdict(list)
    for link in links:
        groups[link[0].sizes[free:], tuple(box.strides for box in link)].append(link)
    return groups.values()


def _join(group: Sequence[Link]) -> Iterator[Link]:
    """Joins each link with the one that follows it in the group, where that one starts where it ends in every box."""
    open_link, *rest = group
    for link in rest:
        size = open_link[0].sizes[0]
        if all(b.offset == a.offset + size * a.strides[0] for a, b in zip(open_link, link, strict=True)):
            size += link[0].sizes[0]
            open_link = tuple(Box(a.offset, (size, *a.sizes[1:]), a.strides) for a in open_link)
        else:
            yield normal(open_link)
            open_link = link
    yield normal(open_link)


def _stack(group: list[Link]) -> Iterator[Link]:
    group.sort(key=_offset)
    offsets = ([box.offset for box in link] for link in group)
    gaps = [tuple(b - a for a, b in zip(here, there, strict=True)) for here, there in pairwise(offsets)]
    equal = []
    for at, gap in enumerate(gaps):
        if at + 1 == len(gaps) or gaps[at + 1] != gap:
            equal.append((at + 1, gap[0] > 0 and min(gap) >= 0))
    for first, size in _stretches(equal, len(group)):
        if size > 1:
            whole = tuple(
                Box(box.offset, (size, *box.sizes), (step, *box.strides))
                for box, step in zip(group[first], gaps[first], strict=True)
            )
            if is_nested(whole[0]):
                yield normal(whole)
                continue
        yield from group[first : first + size]


def _stretches(equal: Sequence[tuple[int, bool]], count: int) -> Iterator[tuple[int, int]]:
    """Cuts ``count`` elements into (first, size) with equal gaps inside, greedily.

    ``equal`` lists the stretches of equal gaps in order: (the element after which the gap changes, usable). An element
    before a longer stretch stays alone, so that a jump between two runs does not eat the first element of a run.
    """
    at = 0
    for index, (end, usable) in enumerate(equal):
        left = end - at
        following = equal[index + 1][0] - end if index + 1 < len(equal) and equal[index + 1][1] else 0
        if not usable or (left == 1 and following > 1):
            yield from ((single, 1) for single in range(at, end))
            at = max(at, end)
        elif left >= 1:
            yield at, left + 1
            at = end + 1
    if at < count:
        yield at, 1
