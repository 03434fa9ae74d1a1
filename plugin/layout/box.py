"""N-d strided boxes of flat element indices.

Owns Box: its enumeration order, the address of the k-th element, views of flat arrays. Owns no tensor names and no
storages (layout/placement.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from weight_sync.errors import LayoutError
from weight_sync.proto.v1 import common_pb2

__all__ = ["Box", "Regions"]


@dataclass(frozen=True, slots=True)
class Box:
    """Elements ``offset + sum(i[d] * strides[d])`` for ``0 <= i[d] < sizes[d]``, enumerated row-major.

    ``sizes == ()`` is one element. Strides may be 0 or negative only where a caller says so; boxes of checkpoint
    coordinates have positive strides and address each element once.
    """

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.sizes) != len(self.strides):
            raise LayoutError("box has unequal ranks", field="strides", found=self.strides, expected=len(self.sizes))

    @classmethod
    def run(cls, offset: int, count: int) -> Box:
        """``count`` neighbouring elements from ``offset``."""
        return cls(offset, (count,), (1,))

    @property
    def count(self) -> int:
        """Number of elements."""
        return prod(self.sizes)

    @property
    def is_run(self) -> bool:
        """True when enumeration order is ``offset, offset + 1, ...``."""
        expected = 1
        for size, stride in zip(reversed(self.sizes), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    @property
    def last(self) -> int:
        """The largest index in the box, for positive strides. Undefined for an empty box."""
        return self.offset + sum((n - 1) * s for n, s in zip(self.sizes, self.strides, strict=True))

    def indices(self, positions: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Flat indices of the elements at ``positions`` (integers, ``[0, count)``) of the enumeration."""
        rest = positions.astype(np.int64)
        if self.is_run:
            return rest + self.offset
        out = np.full(rest.shape, self.offset, np.int64)
        for size, stride in zip(reversed(self.sizes), reversed(self.strides), strict=True):
            rest, digit = np.divmod(rest, size)
            out += digit * stride
        return out

    def find(self, indices: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Positions in the enumeration of flat indices, -1 for those outside: the inverse of `indices`.

        The box addresses each element once and its strides are nested (each at least the span of those below it), as
        all boxes of checkpoint coordinates are.
        """
        rest = indices.astype(np.int64) - self.offset
        inside = rest >= 0
        out = np.zeros(rest.shape, np.int64)
        weight = self.count
        steps = [1] * len(self.sizes)
        for d, size in enumerate(self.sizes):
            weight //= max(1, size)
            steps[d] = weight
        for d in sorted(range(len(self.sizes)), key=lambda d: -self.strides[d]):
            digit = np.minimum(rest // self.strides[d], self.sizes[d] - 1) if self.strides[d] else np.zeros_like(rest)
            rest = rest - digit * self.strides[d]
            out += digit * steps[d]
        inside &= (rest == 0) & (self.count > 0)
        return np.where(inside, out, -1)

    def view(self, flat: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The box as a strided view (shape ``sizes``) of a 1-d array. Raises LayoutError when it does not fit."""
        if self.count and not 0 <= self.offset <= self.last < len(flat):
            raise LayoutError("box leaves its array", field="last index", found=self.last, expected=f"< {len(flat)}")
        if not self.count:
            return flat[:0].reshape(self.sizes)
        step = flat.strides[0]
        return np.lib.stride_tricks.as_strided(
            flat[self.offset :], self.sizes, tuple(s * step for s in self.strides), writeable=flat.flags.writeable
        )

    def to_region(self, tensor: int, elements: int) -> common_pb2.Region:
        """As a message; ``elements`` is the size of the tensor, for the short spelling of the whole."""
        if self.is_run:
            if self.offset == 0 and self.count == elements:
                return common_pb2.Region(tensor=tensor)
            return common_pb2.Region(tensor=tensor, offset=self.offset, sizes=(self.count,))
        return common_pb2.Region(tensor=tensor, offset=self.offset, sizes=self.sizes, strides=self.strides)

    @classmethod
    def from_region(cls, region: common_pb2.Region, elements: int) -> Box:
        """From a message. Raises LayoutError when the box leaves a tensor of ``elements`` or is malformed."""
        sizes, strides = tuple(region.sizes), tuple(region.strides)
        if not sizes:
            return cls.run(0, elements)
        if not strides and len(sizes) == 1:
            strides = (1,)
        if len(sizes) > 32 or prod(sizes) > elements:
            raise LayoutError("region is larger than its tensor", field="sizes", found=sizes, expected=elements)
        box = cls(region.offset, sizes, strides)
        if box.count and box.last >= elements:
            raise LayoutError("region leaves its tensor", field="last index", found=box.last, expected=f"< {elements}")
        return box


Regions = Mapping[str, Sequence[Box]]
"""Boxes by name of the tensor."""
