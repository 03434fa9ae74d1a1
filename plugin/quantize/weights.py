"""What a quantised weight looks like in a table: where its codes and scales lie, and which blocks share a scale.

Owns the geometry: weights, the cells that one served element stands for, blocks, and cutting what a rank holds into
rectangles. Owns no arithmetic on weights (the quantisers) and no storage (projection.py).

A weight is a stack of matrices of ``rows`` x ``cols``; blocks and cells never reach from one matrix into the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from weight_sync.errors import LayoutError, TensorError
from weight_sync.layout.box import Box
from weight_sync.tensors import TensorSpec

__all__ = ["Grid", "Output", "QuantizedWeight", "Rect", "cut", "served"]


@dataclass(frozen=True, slots=True)
class Rect:
    """Rows [top, bottom) and columns [left, right) of one matrix of a stack."""

    matrix: int
    top: int
    bottom: int
    left: int
    right: int

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns)."""
        return self.bottom - self.top, self.right - self.left


@dataclass(frozen=True, slots=True)
class Grid:
    """Cells of ``height`` x ``width`` over matrices of ``rows`` x ``cols``; those at the lower and right edge may be cut."""

    rows: int
    cols: int
    height: int
    width: int

    @property
    def shape(self) -> tuple[int, int]:
        """Cells per matrix, (down, across)."""
        return -(-self.rows // self.height), -(-self.cols // self.width)

    def begun(self, rect: Rect) -> Rect:
        """The cells whose first element lies in ``rect``: each cell belongs to exactly one rectangle of a partition."""
        return Rect(rect.matrix, -(-rect.top // self.height), -(-rect.bottom // self.height),
                    -(-rect.left // self.width), -(-rect.right // self.width))  # fmt: skip

    def touched(self, rect: Rect) -> Rect:
        """The cells that have an element in ``rect``."""
        return Rect(rect.matrix, rect.top // self.height, -(-rect.bottom // self.height),
                    rect.left // self.width, -(-rect.right // self.width))  # fmt: skip

    def splits(self, rect: Rect) -> bool:
        """True when an edge of ``rect`` runs through a cell."""
        inner_rows = rect.top % self.height or (rect.bottom % self.height and rect.bottom != self.rows)
        return bool(inner_rows or rect.left % self.width or (rect.right % self.width and rect.right != self.cols))

    def box(self, cells: Rect) -> Box:
        """Cells in the coordinates of a tensor that holds one element per cell, row-major."""
        down, across = self.shape
        offset = cells.matrix * down * across + cells.top * across + cells.left
        return Box(offset, cells.shape, (across, 1))


@dataclass(frozen=True)
class Output:
    """One served tensor of a weight.

    Attributes:
        role: what the quantiser calls it: codes, scale, ...
        spec: as the checkpoint lists it.
        cell: rows and columns of the weight that one element stands for.
        codes: an element holds codes, so all its weights must be on one rank; else it follows from extrema.
    """

    role: str
    spec: TensorSpec
    cell: tuple[int, int]
    codes: bool = False


@dataclass(frozen=True)
class QuantizedWeight:
    """One weight that is quantised.

    Attributes:
        source: what the trainer offers, (..., rows, cols) of 16 bits.
        outputs: what is served.
        levels: blocks whose extrema decide on scales, from large to small: (rows, columns). All but the last are whole
            matrices.
        how: of the scheme.
    """

    source: TensorSpec
    outputs: tuple[Output, ...]
    levels: tuple[tuple[int, int], ...]
    how: Any = None

    @property
    def matrices(self) -> int:
        """Matrices in the stack."""
        return prod(self.source.shape[:-2])

    def grid(self, cell: tuple[int, int]) -> Grid:
        """Of cells over the matrices."""
        return Grid(self.source.shape[-2], self.source.shape[-1], *cell)

    def check(self) -> None:
        """Raises TensorError when a served tensor has not one element per cell."""
        for output in self.outputs:
            down, across = self.grid(output.cell).shape
            if output.spec.elements != self.matrices * down * across:
                raise TensorError(
                    "scales do not fit their weight", field=output.spec.name, found=list(output.spec.shape),
                    expected=f"{self.matrices * down * across} elements: {down} x {across} for "
                             f"{list(self.source.shape)} in blocks of {output.cell[0]} x {output.cell[1]}",
                    do="quantise the base again, or correct quantization_config in its config.json",
                )  # fmt: skip


def served(table: Mapping[str, TensorSpec], name: str, of: str) -> TensorSpec:
    """A tensor of the base. Raises TensorError when the weight ``of`` lacks it."""
    if name not in table:
        raise TensorError("a quantised weight lacks its scales", field=of, found="not in the base", expected=name,
                          do="quantise the base again")  # fmt: skip
    return table[name]


def cut(weight: QuantizedWeight, box: Box) -> Iterator[tuple[int, Rect]]:
    """(first position in the box's enumeration, rectangle) of what ``box`` holds of a weight.

    Raises LayoutError when it holds single columns, or an edge runs through an element of packed codes.
    """
    at = 0
    for first, count, stride in _rows_of(weight, box):
        for rect in _rects(weight, first, count, stride):
            for output in weight.outputs:
                if output.codes and weight.grid(output.cell).splits(rect):
                    raise _uncuttable(weight, output.cell)
            yield at, rect
            at += prod(rect.shape)


def _uncuttable(weight: QuantizedWeight, cell: tuple[int, int]) -> LayoutError:
    return LayoutError("a shard ends inside packed codes", field=weight.source.name,
                       expected=f"shards of whole multiples of {cell[0]} x {cell[1]}",
                       do="shard by rows, or by columns at such multiples")  # fmt: skip


def _rows_of(weight: QuantizedWeight, box: Box) -> Iterator[tuple[int, tuple[int, int], int]]:
    """Runs and blocks of rows: first element, (rows, columns), and the distance of rows; a run is one row."""
    if box.is_run:
        yield box.offset, (1, box.count), 0
    elif len(box.sizes) == 2 and box.strides == (weight.source.shape[-1], 1):
        yield box.offset, (box.sizes[0], box.sizes[1]), box.strides[0]
    elif len(box.sizes) < 2 or box.strides[-1] != 1:
        raise LayoutError("a shard holds single columns of a quantised weight", field=weight.source.name,
                          found=f"sizes {box.sizes}, strides {box.strides}", expected="rows, or ranges of columns",
                          do="shard by rows")  # fmt: skip
    else:
        for k in range(box.sizes[0]):
            yield from _rows_of(weight, Box(box.offset + k * box.strides[0], box.sizes[1:], box.strides[1:]))


def _rects(weight: QuantizedWeight, first: int, size: tuple[int, int], stride: int) -> Iterator[Rect]:
    rows, cols = weight.source.shape[-2:]
    if stride:  # a range of columns of some rows
        row, left = divmod(first, cols)
        yield from _by_matrix(rows, row, row + size[0], left, left + size[1])
        return
    last = first + size[1]
    while first < last:  # a run: part of a row, whole rows, part of a row
        row, left = divmod(first, cols)
        stop = min(last, (row + 1) * cols) if left or last - first < cols else last // cols * cols
        right = left + stop - first if left or stop - first < cols else cols
        yield from _by_matrix(rows, row, row + max(1, (stop - first) // cols), left, right)
        first = stop


def _by_matrix(rows: int, top: int, bottom: int, left: int, right: int) -> Iterator[Rect]:
    while top < bottom:
        matrix, inner = divmod(top, rows)
        count = min(rows - inner, bottom - top)
        yield Rect(matrix, inner, inner + count, left, right)
        top += count
