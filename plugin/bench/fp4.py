"""E2M1, two codes in a byte: rounding and packing as the benchmarks' traces need them.

Owns those. Owns no scales and no served view (quantize/).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

__all__ = ["pack", "unpack"]

_VALUES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_EDGES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def pack(values: torch.Tensor) -> npt.NDArray[np.uint8]:
    """(rows, columns) in units of the scale as (rows, columns / 2) bytes, lower nibble first; ties to the even code."""
    import torch

    edges = torch.tensor(_EDGES, dtype=values.dtype)
    size = values.abs()
    code = torch.bucketize(size, edges)  # a tie goes down ...
    up = (code < len(_EDGES)) & (code % 2 == 1)
    code += (up & (size == edges[code.clamp(max=len(_EDGES) - 1)])).long()  # ... or to the even code above
    code |= values.signbit().long() << 3
    flat = code.to(torch.uint8)
    return (flat[:, 0::2] | (flat[:, 1::2] << 4)).numpy()


def unpack(packed: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """The values of (n,) bytes, (2 n,)."""
    codes = np.stack([packed & 15, packed >> 4], axis=1).ravel()
    sign = 1 - 2 * (codes >> 3).astype(np.float32)
    return np.asarray(_VALUES[codes & 7] * sign)
