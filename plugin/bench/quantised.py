"""Traces of quantised formats, made of both versions of a recorded bf16 trace.

Owns which tensors have codes, and the codes. Owns no traces (bench/traces.py) and no served view (quantize/).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from weight_sync.bench import fp4
from weight_sync.bench.traces import Trace, TracedTensor
from weight_sync.quantize.extrema import block_extrema
from weight_sync.tensors import TensorSpec

if TYPE_CHECKING:
    import torch

__all__ = ["QUANTISED", "quantised"]

_BLOCK = 128  # of fp8: rows and columns that share a scale
_GROUP = 32  # of mxfp4: columns that share an exponent
QUANTISED = {"fp8": ("F8_E4M3", 0), "mxfp4": ("U8", 4)}
"""Formats of traces that are made by quantising both versions of a bf16 trace: dtype of the codes, and their bits when
a byte packs two."""


def quantised(trace: Trace, format: str) -> Trace:
    """The codes of both versions of a bf16 trace; scales are left out, tensors that cannot be cut into blocks, too.

    ``fp8``: e4m3 in blocks of 128 x 128 (smaller at the edges), ``mxfp4``: e2m1 in groups of 32, two codes in a byte.
    """
    dtype, code_bits = QUANTISED[format]
    quantise = _fp8_codes if format == "fp8" else _mxfp4_codes
    tensors: list[TracedTensor] = []
    for t in trace.tensors:
        shape = t.spec.shape
        if len(shape) < 2 or (code_bits and shape[-1] % _GROUP):
            continue
        rows = (-1, shape[-1])
        old, new = (quantise(_bf16(bits).reshape(rows)) for bits in (t.old, t.new))
        packed = (*shape[:-1], shape[-1] // 2) if code_bits else shape
        tensors.append(TracedTensor(TensorSpec(t.spec.name, dtype, packed, code_bits), old.ravel(), new.ravel()))
    return Trace(trace.name, format, tuple(tensors))


def _bf16(bits: npt.NDArray[Any]) -> torch.Tensor:
    import torch

    return torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16)


def _fp8_codes(values: torch.Tensor) -> npt.NDArray[np.uint8]:
    import torch

    low, high = block_extrema(values, (0, 0), (_BLOCK, _BLOCK))
    largest = torch.maximum(low.abs(), high.abs()).float().clamp(min=torch.finfo(torch.float32).tiny)
    forward = (448.0 / largest).repeat_interleave(_BLOCK, 0)[: values.shape[0]]
    forward = forward.repeat_interleave(_BLOCK, 1)[:, : values.shape[1]]
    codes = (values.float() * forward).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8).numpy()


def _mxfp4_codes(values: torch.Tensor) -> npt.NDArray[np.uint8]:
    """OCP MX: the exponent of a group is that of its largest, less that of 6."""
    import torch

    groups = values.float().unflatten(1, (-1, _GROUP))
    largest = groups.abs().amax(2, keepdim=True).clamp(min=2.0**-120)
    return fp4.pack((groups / torch.exp2(torch.floor(torch.log2(largest)) - 2)).flatten(1))
