"""One tensor's identity in a served view.

Owns TensorSpec and the rules for names and tables of tensors. Owns no bits and no storage.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from weight_sync.dtypes import DType, dtype_of
from weight_sync.errors import TensorError
from weight_sync.proto.v1 import common_pb2

__all__ = ["RESERVED_PREFIX", "TensorSpec", "sorted_table"]

RESERVED_PREFIX = "__weight_sync__."
"""Safetensors keys of ours inside a shard start with this; a tensor of a user may too, and then travels as a piece."""


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype and shape as the base checkpoint's safetensors header lists them.

    Attributes:
        name: data, never a path. Any UTF-8 string but ``__metadata__``.
        dtype: safetensors spelling, a key of ``weight_sync.dtypes.DTYPES``.
        shape: as in the header; ``()`` is a 0-d tensor of one element.
        code_bits: 4 when each byte packs two 4-bit codes, else 0.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    code_bits: int = 0

    def __post_init__(self) -> None:
        if self.name == "__metadata__":
            raise TensorError("safetensors reserves this name", field="name", found=self.name, do="rename the tensor")
        try:
            self.name.encode("utf-8")
        except UnicodeEncodeError as error:
            raise TensorError(
                "name is not valid UTF-8", field="name", found=self.name.encode("utf-8", "replace")
            ) from error
        if any(size < 0 for size in self.shape):
            raise TensorError(f"negative size in tensor {self.name!r}", field="shape", found=self.shape)
        if self.code_bits not in (0, 4):
            raise TensorError(f"tensor {self.name!r}", field="code_bits", found=self.code_bits, expected="0 or 4")
        _ = self.elements  # unknown dtype and partial bytes are refused here, not in a kernel

    @cached_property
    def type(self) -> DType:
        """The row of the dtype table."""
        return dtype_of(self.dtype)

    @cached_property
    def elements(self) -> int:
        """Number of elements (container elements: bytes for packed codes)."""
        return self.type.elements(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.elements * self.type.width

    def to_proto(self) -> common_pb2.TensorSpec:
        """As a message."""
        return common_pb2.TensorSpec(name=self.name, dtype=self.dtype, shape=self.shape, code_bits=self.code_bits)

    @classmethod
    def from_proto(cls, message: common_pb2.TensorSpec) -> TensorSpec:
        """From a message. Raises TensorError when a field is out of range."""
        return cls(message.name, message.dtype, tuple(message.shape), message.code_bits)


def sorted_table(specs: Iterable[TensorSpec]) -> tuple[TensorSpec, ...]:
    """The specs by name. Raises TensorError on a name that comes twice."""
    table = tuple(sorted(specs, key=lambda spec: spec.name))
    for first, second in pairwise(table):
        if first.name == second.name:
            raise TensorError("tensor is offered twice", field="name", found=first.name, do="publish each tensor once")
    return table
