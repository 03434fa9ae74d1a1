"""Where a converter's outputs come from, found by sending numbered elements through it.

Owns the fallback for converters that cannot be traced on meta tensors (layout/trace.py), and the proof that what was
found is a movement of elements and no arithmetic. Costs eight bytes per element and a few runs of the converter.

Every element is numbered from 1; a 0 that comes out is a hole. The numbers travel as int64; where the converter
insists on its own dtype they travel digit by digit in that dtype, in a base that all dtypes on the way hold exactly.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import numpy.typing as npt
import torch

from weight_sync.dtypes import dtype_of_torch
from weight_sync.errors import UntraceableError, WeightSyncError
from weight_sync.layout.link import from_indices
from weight_sync.layout.placement import Layout, Placement, StorageSpec, merge
from weight_sync.layout.trace import Converter, spec_of

__all__ = ["probe_converter"]

_Codes = dict[str, npt.NDArray[np.int64]]


def probe_converter(
    convert: Converter, sources: Mapping[str, torch.Tensor], only: Collection[str] | None = None
) -> Layout:
    """Runs ``convert`` on numbered elements and reads off where its outputs come from.

    ``sources`` give shapes and dtypes; nothing else of them is used. With ``only``, just these sources carry values and
    the others are meta tensors; outputs on meta are left out. Works on the CPU.

    Returns a layout as ``trace_converter`` does. Casts are those seen between source and output; a detour through a
    third dtype is not seen, nor what a converter would do with other values. Raises UntraceableError when the
    converter does arithmetic.
    """
    names = [name for name in sources if only is None or name in only]
    numbering = _Numbering(convert, sources, names)
    first = numbering.send(numbering.noise(8, seed=0))
    base = min(_exact_base(tensor.dtype) for tensor in (*first.values(), *(sources[name] for name in names)))
    codes = _by_int64(numbering) or _by_digits(numbering, base)
    if codes.keys() != first.keys():
        raise UntraceableError(
            "the converter's names depend on dtypes", field="names", found=sorted(codes), expected=sorted(first)
        )
    for seed in (1, 2):
        _prove(numbering, codes, base, seed)
    placements = []
    for name, code in codes.items():
        out_dtype = dtype_of_torch(first[name].dtype).name
        at = np.flatnonzero(code)
        owner = np.searchsorted(numbering.starts, code[at] - 1, side="right") - 1
        for index in np.unique(owner).tolist():
            source = names[index]
            in_dtype = dtype_of_torch(sources[source].dtype).name
            mine = at[owner == index]
            for coords, place in from_indices([mine, code[mine] - 1 - numbering.starts[index]]):
                casts = () if in_dtype == out_dtype else (out_dtype,)
                placements.append(Placement(name, coords, source, place, casts))
    storages = {n: StorageSpec(sources[n].numel(), dtype_of_torch(sources[n].dtype).name) for n in names}
    return merge([spec_of(name, tensor) for name, tensor in first.items()], placements, storages)


class _Numbering:
    """Sends values through a converter; element e of the k-th source has the number ``starts[k] + e + 1``."""

    def __init__(self, convert: Converter, sources: Mapping[str, torch.Tensor], names: list[str]) -> None:
        self._convert, self._sources, self._names = convert, sources, names
        sizes = [sources[name].numel() for name in names]
        self.starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self.total = int(self.starts[-1])

    def send(self, values: npt.NDArray[np.int64], dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        """Outputs for the ``total`` values, in each source's dtype when ``dtype`` is None; those on meta are left out.

        Raises UntraceableError when the converter raises.
        """
        inputs = {}
        for name, tensor in self._sources.items():
            inputs[name] = torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device="meta")
        for name, start, end in zip(self._names, self.starts[:-1], self.starts[1:], strict=True):
            tensor = self._sources[name]
            inputs[name] = torch.from_numpy(values[start:end]).reshape(tensor.shape).to(dtype or tensor.dtype)
        try:
            outputs = self._convert(inputs)
        except WeightSyncError:
            raise
        except Exception as error:  # whatever a host raises on values or a dtype that it does not like
            raise UntraceableError(
                "the converter fails on numbered elements", field=type(error).__name__, found=str(error)
            ) from error
        return {name: tensor for name, tensor in outputs.items() if tensor.device.type != "meta"}

    def noise(self, base: int, seed: int) -> npt.NDArray[np.int64]:
        """Random values in [1, base)."""
        return np.random.default_rng(seed).integers(1, base, self.total)


def _integers(tensor: torch.Tensor) -> npt.NDArray[np.int64]:
    flat = tensor.detach().reshape(-1).cpu()
    return flat.to(torch.float64).numpy().astype(np.int64) if flat.is_floating_point() else flat.to(torch.int64).numpy()


def _by_int64(numbering: _Numbering) -> _Codes | None:
    """The number of the source element at each place of the outputs; None when the converter wants another dtype."""
    try:
        outputs = numbering.send(np.arange(1, numbering.total + 1), torch.int64)
    except UntraceableError:
        return None
    if any(tensor.dtype != torch.int64 for tensor in outputs.values()):
        return None
    return {name: _integers(tensor) for name, tensor in outputs.items()}


def _by_digits(numbering: _Numbering, base: int) -> _Codes:
    codes: _Codes = {}
    numbers, place = np.arange(1, numbering.total + 1), 1
    while place <= numbering.total:
        for name, tensor in numbering.send(numbers // place % base).items():
            codes[name] = codes.get(name, 0) + _integers(tensor) * place
        place *= base
    return codes


def _prove(numbering: _Numbering, codes: _Codes, base: int, seed: int) -> None:
    """Other values come out where the numbers said. Raises UntraceableError when they do not."""
    values = numbering.noise(base, seed)
    known = np.concatenate([[0], values])
    for name, tensor in numbering.send(values).items():
        code = codes[name]
        inside = code.size == tensor.numel() and bool(((code >= 0) & (code <= numbering.total)).all())
        if not inside or not np.array_equal(known[code], _integers(tensor)):
            raise UntraceableError(
                "the converter changes values", field=name, do="publish what it makes through a Quantizer"
            )


def _exact_base(dtype: torch.dtype) -> int:
    """A power of two up to which the dtype holds every integer exactly, at most 256."""
    if not dtype.is_floating_point:
        return 2 if dtype is torch.bool else 64
    # eps is 2^-m for m explicit mantissa bits: integers are exact up to 2^(m + 1)
    return min(256, round(2 / torch.finfo(dtype).eps))
