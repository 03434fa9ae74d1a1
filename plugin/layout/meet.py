"""Which elements two maps share, and what is left of one map without some elements.

Owns the set operations on links (layout/link.py). Owns no names of tensors or storages.

Two boxes meet in the digits of a mixed radix that holds all their strides: there a box is a product of ranges, after
a few cuts where its offset makes a digit carry. The cost does not depend on how many elements a box has. Boxes whose
strides do not divide each other, or that overlap themselves, are compared as lists of indices.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weight_sync.layout.box import Box
from weight_sync.layout.link import Link, compact, from_indices, is_nested, normal

__all__ = ["meet", "minus"]

_LISTED = 1 << 22
"""Boxes of up to this many elements may be written out as indices; larger ones are halved first."""


def meet(left: Sequence[Link], right: Sequence[Link]) -> Iterator[tuple[int, int, Link]]:
    """Where the keys of two maps share elements: ``(i, j, (key, *left[i][1:], *right[j][1:]))``.

    Links are in normal form and keys have no negative stride. A key of ``left`` has each element once; a key of
    ``right`` may repeat elements (a stride of 0, overlapping windows), and each repetition is met.
    """
    order = sorted((j for j in range(len(right)) if right[j][0].count), key=lambda j: right[j][0].offset)
    starts = [right[j][0].offset for j in order]
    lasts = [right[j][0].last for j in order]
    reach = list(accumulate(lasts, max))
    for i, link in enumerate(left):
        key = link[0]
        if not key.count:
            continue
        last = key.last
        for at in range(bisect_left(reach, key.offset), bisect_right(starts, last)):
            if lasts[at] >= key.offset:
                for found in _meet_pair(link, last, right[order[at]], lasts[at]):
                    yield i, order[at], found


def _meet_pair(left: Link, left_last: int, right: Link, right_last: int) -> Iterable[Link]:
    a, b = left[0], right[0]
    a_run, b_run = a.strides == (1,), b.strides == (1,)
    if a_run and a.offset <= b.offset and right_last <= left_last:
        return [(b, *(_inside(box, b, a.offset) for box in left[1:]), *right[1:])]
    if b_run and b.offset <= a.offset and left_last <= right_last:
        return [(a, *left[1:], *(_inside(box, a, b.offset) for box in right[1:]))]
    if a_run and b_run:
        first = max(a.offset, b.offset)
        key = Box.run(first, min(left_last, right_last) + 1 - first)
        cut = [_inside(box, key, a.offset) for box in left[1:]]
        return [(key, *cut, *(_inside(box, key, b.offset) for box in right[1:]))]
    if b_run and (inside := _in_one_row(left, b)) is not None:
        return [(b, *inside, *right[1:])]
    if a_run and (inside := _in_one_row(right, a)) is not None:
        return [(a, *left[1:], *inside)]
    if 0 in b.strides:
        return _meet_repeated(left, left_last, right)
    radices = _radices(a, b)
    return _meet_listed(left, right) if radices is None else _meet_digits(left, right, radices)


def _inside(box: Box, key: Box, start: int) -> Box:
    """What a box, linked to the run from ``start``, holds at the elements of ``key``."""
    step = box.strides[0]
    return Box(box.offset + (key.offset - start) * step, key.sizes, tuple(stride * step for stride in key.strides))


def _in_one_row(link: Link, run: Box) -> list[Box] | None:
    """What the boxes of a link hold at a run that lies in one row of its nested key; None when it does not."""
    key = link[0]
    if key.strides[-1] != 1 or not is_nested(key):
        return None
    rest, index = run.offset - key.offset, []
    for size, stride in zip(key.sizes, key.strides, strict=True):
        digit, rest = divmod(rest, stride)
        index.append(digit)
        if not 0 <= digit < size:
            return None
    if index[-1] + run.sizes[0] > key.sizes[-1]:
        return None
    starts = (sum(i * stride for i, stride in zip(index, box.strides, strict=True)) for box in link[1:])
    return [Box(box.offset + start, run.sizes, box.strides[-1:]) for box, start in zip(link[1:], starts, strict=True)]


def _meet_repeated(left: Link, left_last: int, right: Link) -> Iterator[Link]:
    """Dimensions along which the key of ``right`` stands still are left out, and put back where the rest meets."""
    moving = [d for d, stride in enumerate(right[0].strides) if stride]
    still = [d for d, stride in enumerate(right[0].strides) if not stride]
    rest = normal(tuple(_dimensions(box, moving) for box in right))
    for found in _meet_pair(left, left_last, rest, rest[0].last):
        unmoved = [Box(0, _dimensions(right[0], still).sizes, (0,) * len(still))] * len(left)
        extra = [*unmoved, *(_dimensions(box, still) for box in right[1:])]
        yield normal(
            tuple(
                Box(box.offset, more.sizes + box.sizes, more.strides + box.strides)
                for box, more in zip(found, extra, strict=True)
            )
        )


def _dimensions(box: Box, dims: Sequence[int]) -> Box:
    return Box(box.offset, tuple(box.sizes[d] for d in dims), tuple(box.strides[d] for d in dims))


# --- digits of a mixed radix ------------------------------------------------------------------------------------------


def _radices(a: Box, b: Box) -> tuple[int, ...] | None:
    """Place values, each a multiple of the one before, that hold every stride of two nested boxes; None without."""
    if not (is_nested(a) and is_nested(b)):
        return None
    places = sorted({1, *a.strides, *b.strides})
    return None if any(upper % lower for lower, upper in pairwise(places)) else tuple(places)


class _Digits(NamedTuple):
    """A link whose key is a product of digit ranges, lowest digit first.

    Attributes:
        lows, counts: per digit, the range ``[low, low + count)``.
        steps: per digit, the strides of the boxes other than the key.
        offsets: of those boxes, where all digits are lowest.
    """

    lows: tuple[int, ...]
    counts: tuple[int, ...]
    steps: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]

    def narrowed(self, lows: tuple[int, ...], counts: tuple[int, ...]) -> _Digits:
        """The part within other ranges, which lie in its own."""
        offsets = list(self.offsets)
        for low, own, steps in zip(lows, self.lows, self.steps, strict=True):
            for k, step in enumerate(steps):
                offsets[k] += (low - own) * step
        return _Digits(lows, counts, self.steps, tuple(offsets))

    def link(self, radices: tuple[int, ...]) -> Link:
        """As boxes."""
        key = Box(sum(low * place for low, place in zip(self.lows, radices, strict=True)), self.counts, radices)
        rest = (Box(at, self.counts, tuple(s[k] for s in self.steps)) for k, at in enumerate(self.offsets))
        return normal((key, *rest))


def _digits(link: Link, radices: tuple[int, ...]) -> list[_Digits]:
    """Cuts a link with a nested key into products of digit ranges."""
    key, rest = link[0], link[1:]
    none = (1, (0,) * len(rest))
    own = {stride: (size, step) for size, stride, *step in zip(key.sizes, *(box.strides for box in link), strict=True)}
    # (digits so far, what is left of the offset, a dimension of whole blocks carried up from below)
    parts = [(_Digits((), (), (), tuple(box.offset for box in rest)), key.offset, none)]
    for place, above in zip(radices, (*radices[1:], 0), strict=True):
        higher = []
        for done, left, carried in parts:
            # nested boxes never carry whole blocks into a place where they have a dimension themselves
            size, step = carried if carried[0] > 1 else own.get(place, none)
            for low, count, skipped, rest_of_offset, blocks in _carry(left, size, above // place):
                offsets = tuple(at + skipped * s for at, s in zip(done.offsets, step, strict=True))
                part = _Digits((*done.lows, low), (*done.counts, count), (*done.steps, tuple(step)), offsets)
                up = (blocks, tuple(s * (above // place) for s in step)) if blocks > 1 else none
                higher.append((part, rest_of_offset, up))
        parts = higher
    return [part for part, _, _ in parts]


def _carry(left: int, size: int, base: int) -> list[tuple[int, int, int, int, int]]:
    """Cuts ``left + i``, ``0 <= i < size``, at multiples of ``base`` (0: the highest place, which has no base).

    Returns head, whole blocks and tail as (lowest digit, digits, elements skipped, what goes to the next place,
    blocks).
    """
    if not base:
        return [(left, size, 0, 0, 1)]
    upper, digit = divmod(left, base)
    if digit + size <= base:
        return [(digit, size, 0, upper, 1)]
    cuts = []
    head = (base - digit) % base
    if head:
        cuts.append((digit, head, 0, upper, 1))
        upper += 1
    blocks, tail = divmod(size - head, base)
    if blocks:
        cuts.append((0, base, head, upper, blocks))
    if tail:
        cuts.append((0, tail, head + blocks * base, upper + blocks, 1))
    return cuts


def _common(a: _Digits, b: _Digits) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    lows = tuple(map(max, a.lows, b.lows))
    ends = (min(x + n, y + m) for x, n, y, m in zip(a.lows, a.counts, b.lows, b.counts, strict=True))
    counts = tuple(end - low for low, end in zip(lows, ends, strict=True))
    return (lows, counts) if min(counts) > 0 else None


def _meet_digits(left: Link, right: Link, radices: tuple[int, ...]) -> Iterator[Link]:
    others = _digits(right, radices)
    for a in _digits(left, radices):
        for b in others:
            common = _common(a, b)
            if common is not None:
                steps = tuple(x + y for x, y in zip(a.steps, b.steps, strict=True))
                offsets = a.narrowed(*common).offsets + b.narrowed(*common).offsets
                yield _Digits(*common, steps, offsets).link(radices)


# --- difference -------------------------------------------------------------------------------------------------------


def minus(links: Iterable[Link], hole: Box) -> list[Link]:
    """The links without the elements whose key lies in ``hole``; links and hole are in normal form."""
    out: list[Link] = []
    for link in links:
        key = link[0]
        if not key.count or not hole.count or key.last < hole.offset or hole.last < key.offset:
            out.append(link)
            continue
        radices = _radices(key, hole)
        if radices is None:
            out += _minus_listed(link, hole)
            continue
        parts = _digits(link, radices)
        for cut in _digits((hole,), radices):
            parts = [rest for part in parts for rest in _without(part, cut)]
        out += [part.link(radices) for part in parts]
    return out


def _without(part: _Digits, cut: _Digits) -> list[_Digits]:
    """Digit by digit, what lies below and above the common range."""
    common = _common(part, cut)
    if common is None:
        return [part]
    out = []
    for d, (low, count) in enumerate(zip(*common, strict=True)):
        own, end = part.lows[d], part.lows[d] + part.counts[d]
        for start, stop in ((own, low), (low + count, end)):
            if start < stop:
                out.append(
                    part.narrowed(
                        (*part.lows[:d], start, *part.lows[d + 1 :]),
                        (*part.counts[:d], stop - start, *part.counts[d + 1 :]),
                    )
                )
        part = part.narrowed(
            (*part.lows[:d], low, *part.lows[d + 1 :]), (*part.counts[:d], count, *part.counts[d + 1 :])
        )
    return out


# --- lists of indices -------------------------------------------------------------------------------------------------


def _listed(link: Link) -> list[npt.NDArray[np.int64]]:
    positions = np.arange(link[0].count, dtype=np.int64)
    return [box.indices(positions) for box in link]


def _halves(link: Link) -> list[Link]:
    """A link of two elements or more, cut in the middle of its first dimension."""
    size = link[0].sizes[0]
    parts = ((0, size // 2), (size // 2, size - size // 2))
    return [
        normal(tuple(Box(b.offset + first * b.strides[0], (count, *b.sizes[1:]), b.strides) for b in link))
        for first, count in parts
    ]


def _meet_listed(left: Link, right: Link) -> list[Link]:
    if max(left[0].count, right[0].count) > _LISTED:
        halved = left[0].count > right[0].count
        pairs = meet(_halves(left), [right]) if halved else meet([left], _halves(right))
        return compact(link for _, _, link in pairs)
    mine, other = _listed(left), _listed(right)
    order = np.argsort(mine[0], kind="stable")
    at = order[np.minimum(np.searchsorted(mine[0], other[0], sorter=order), len(order) - 1)]
    hit = np.flatnonzero(mine[0][at] == other[0])
    return from_indices([*(column[at[hit]] for column in mine), *(column[hit] for column in other[1:])])


def _minus_listed(link: Link, hole: Box) -> list[Link]:
    if link[0].count > _LISTED:
        return compact(minus(_halves(link), hole))
    if hole.count > _LISTED:
        first, second = _halves((hole,))
        return minus(minus([link], *first), *second)
    columns = _listed(link)
    keep = ~np.isin(columns[0], _listed((hole,))[0])
    return from_indices([column[keep] for column in columns])
