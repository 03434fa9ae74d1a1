"""The dtypes of the safetensors container, once: widths, ordered lines, classes, torch and numpy twins.

Owns the table. Owns no arithmetic on elements (codec/) and no tensor names.

An *element* is the smallest piece with an address of its own: one number, or one byte where the container packs
several codes into a byte (F4, F6). Kernels see elements as unsigned integers of ``width`` bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from weight_sync.errors import TensorError

if TYPE_CHECKING:
    import torch

__all__ = ["DTYPES", "DType", "dtype_of", "dtype_of_torch"]


@dataclass(frozen=True)
class DType:
    """One dtype.

    Attributes:
        name: safetensors spelling.
        width: bytes per element: 1, 2, 4 or 8.
        signed_magnitude: the top bit is a sign over a magnitude (floats); the ordered line folds it.
            Otherwise codes are ordered as they are (integers differ only by a wrap, which is lossless).
        class_shift: right shift of the code that leaves its class (the exponent).
        class_bits: number of bits of the class after the shift; 0 means one class for all.
        torch_name: attribute of the torch module, "" when torch has none.
        bits: bits per number in the container (4, 6: packed; the header's shape counts numbers).
    """

    name: str
    width: int
    signed_magnitude: bool
    class_shift: int
    class_bits: int
    torch_name: str
    bits: int

    @property
    def uint(self) -> np.dtype[Any]:
        """The unsigned numpy dtype in which kernels see an element."""
        return np.dtype(f"u{self.width}")

    @property
    def torch(self) -> torch.dtype:
        """The torch dtype. Raises TensorError when torch has none."""
        import torch

        found = getattr(torch, self.torch_name, None) if self.torch_name else None
        if found is None:
            raise TensorError(
                "this torch has no such dtype", field="dtype", found=self.name, do="install a newer torch"
            )
        return found  # type: ignore[no-any-return]

    def elements(self, shape: tuple[int, ...]) -> int:
        """Elements of a tensor whose safetensors header lists ``shape``. Raises TensorError on part of a byte."""
        count = 1
        for size in shape:
            count *= size
        total_bits = count * self.bits
        if total_bits % (8 * self.width):
            raise TensorError("tensor ends inside a byte", field="shape", found=shape, expected="whole bytes")
        return total_bits // (8 * self.width)


def _table() -> dict[str, DType]:
    rows = [
        # name          width  sign   shift bits  torch                bits
        ("BOOL", 1, False, 0, 0, "bool", 8),
        ("U8", 1, False, 0, 8, "uint8", 8),
        ("I8", 1, False, 0, 8, "int8", 8),
        ("F8_E4M3", 1, True, 0, 8, "float8_e4m3fn", 8),
        ("F8_E5M2", 1, True, 0, 8, "float8_e5m2", 8),
        ("F8_E4M3FNUZ", 1, True, 0, 8, "float8_e4m3fnuz", 8),
        ("F8_E5M2FNUZ", 1, True, 0, 8, "float8_e5m2fnuz", 8),
        ("F8_E8M0", 1, False, 0, 8, "float8_e8m0fnu", 8),
        ("F4", 1, False, 0, 8, "float4_e2m1fn_x2", 4),
        ("F6_E2M3", 1, False, 0, 8, "", 6),
        ("F6_E3M2", 1, False, 0, 8, "", 6),
        ("U16", 2, False, 0, 0, "uint16", 16),
        ("I16", 2, False, 0, 0, "int16", 16),
        ("F16", 2, True, 10, 5, "float16", 16),
        ("BF16", 2, True, 7, 8, "bfloat16", 16),
        ("U32", 4, False, 0, 0, "uint32", 32),
        ("I32", 4, False, 0, 0, "int32", 32),
        ("F32", 4, True, 23, 8, "float32", 32),
        ("U64", 8, False, 0, 0, "uint64", 64),
        ("I64", 8, False, 0, 0, "int64", 64),
        ("F64", 8, True, 55, 8, "float64", 64),
        ("C64", 8, False, 0, 0, "complex64", 64),
    ]
    return {row[0]: DType(*row) for row in rows}


DTYPES: dict[str, DType] = _table()


def dtype_of(name: str) -> DType:
    """The dtype of a safetensors spelling. Raises TensorError on an unknown one."""
    found = DTYPES.get(name)
    if found is None:
        raise TensorError(
            "unknown dtype", field="dtype", found=name, expected=", ".join(DTYPES), do="cast it before publishing"
        )
    return found


@cache
def _by_torch() -> dict[Any, DType]:
    import torch

    return {getattr(torch, d.torch_name): d for d in DTYPES.values() if d.torch_name and hasattr(torch, d.torch_name)}


def dtype_of_torch(dtype: torch.dtype) -> DType:
    """The dtype of a torch dtype. Raises TensorError when the container has none."""
    found = _by_torch().get(dtype)
    if found is None:
        raise TensorError(
            "safetensors cannot hold this dtype", field="dtype", found=str(dtype), do="cast it before publishing"
        )
    return found
