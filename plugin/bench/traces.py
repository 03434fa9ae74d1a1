"""Two consecutive served versions to measure on: the standard traces, and recorded ones.

Owns how they are made and read. Owns no measurement.

A standard trace emulates a run in progress: weights N(0, 0.02), fp32 masters spread uniformly within half an ulp of
them, one update of ``lr * N(0, 0.45)``, ``lr`` solved for the density asked for. Masters must not start on served
values, as those of a fresh checkpoint do: far fewer elements would change than in the rest of a run.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from weight_sync.bench import fp4
from weight_sync.dtypes import dtype_of
from weight_sync.errors import InputError
from weight_sync.tensors import TensorSpec

__all__ = [
    "DENSITIES",
    "FORMATS",
    "STANDARD_ELEMENTS",
    "Trace",
    "TracedTensor",
    "find_recorded",
    "recorded",
    "standard",
]

DENSITIES = (0.0055, 0.019, 0.046)
STANDARD_ELEMENTS = 64 << 20
_TENSOR_ELEMENTS = 4 << 20  # of one tensor of a standard trace: a matrix of 2048 x 2048
_SEED = 20260101
_UPDATE_RMS = 0.45
_RECORDED = "tests/data/trace_smollm2_bf16.npz"


@dataclass(frozen=True)
class Format:
    """What a standard trace needs to know of a served dtype.

    Attributes:
        dtype: safetensors spelling.
        mantissa_bits, min_exponent: one ulp of a normal number x is 2^(floor(log2 |x|) - mantissa_bits), of any smaller
            than 2^min_exponent that of 2^min_exponent.
        master: dtype of the master weights.
        std: of the weights. For fp8 and mxfp4 in units of the scale: a block of 128 x 128, a group of 32, whose largest
            element is the largest number of the format.
        largest: finite number.
        codes: in one element; two of mxfp4's in a byte.
    """

    dtype: str
    mantissa_bits: int
    min_exponent: int
    master: type[np.floating[Any]] = np.float32
    std: float = 0.02
    largest: float = np.inf
    codes: int = 1


FORMATS = {
    "bf16": Format("BF16", 7, -126),
    "fp16": Format("F16", 10, -14),
    "fp32": Format("F32", 23, -126, np.float64),
    "fp8": Format("F8_E4M3", 3, -6, std=109.0, largest=448.0),
    "mxfp4": Format("U8", 1, 0, std=2.2, largest=6.0, codes=2),
}


@dataclass(frozen=True)
class TracedTensor:
    """One tensor before and after; ``old`` and ``new``: (spec.elements,) unsigned of the element's width."""

    spec: TensorSpec
    old: npt.NDArray[Any]
    new: npt.NDArray[Any]


@dataclass(frozen=True)
class Trace:
    """Two consecutive served versions of some tensors.

    Attributes:
        name: ``standard-...`` or ``recorded-...``.
        format: key of `FORMATS`.
        tensors: of one dtype.
    """

    name: str
    format: str
    tensors: tuple[TracedTensor, ...]

    @property
    def elements(self) -> int:
        """Elements of one version."""
        return sum(t.spec.elements for t in self.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of one version: what speeds are counted in."""
        return sum(t.spec.nbytes for t in self.tensors)

    @cached_property
    def changed(self) -> int:
        """Elements whose bits differ."""
        return sum(int(np.count_nonzero(t.old != t.new)) for t in self.tensors)

    @property
    def density(self) -> float:
        """Changed elements over all elements."""
        return self.changed / self.elements


# --- standard -----------------------------------------------------------------------------------------------------


def standard(format: str, density: float, elements: int = STANDARD_ELEMENTS) -> Trace:
    """A standard trace; equal arguments give equal bits.

    Args:
        format: key of `FORMATS`.
        density: share of elements to change, in (0, 1).
        elements: in all; rounded up to whole tensors of 4 Mi elements when larger than one.

    Raises InputError on an unknown format or a density that no update reaches.
    """
    form = FORMATS.get(format)
    if form is None:
        raise InputError("unknown format", field="format", found=format, expected=", ".join(FORMATS))
    if not 0 < density < 1 or elements < 1:
        raise InputError("no trace can have it", field="density", found=density, expected="between 0 and 1")
    size = min(elements, _TENSOR_ELEMENTS)
    rate = _solve_rate(form, density, size)
    tensors: list[TracedTensor] = []
    for k in range(-(-elements // size)):
        master, update = _draw(form, k, size)
        spec = TensorSpec(f"model.layers.{k}.weight", form.dtype, _matrix(size), 4 if form.codes == 2 else 0)
        tensors.append(TracedTensor(spec, _serve(form, master), _serve(form, master + form.master(rate) * update)))
    return Trace(f"standard-{100 * density:g}pct", format, tuple(tensors))


def _matrix(size: int) -> tuple[int, int]:
    rows = 1 << (size.bit_length() // 2)
    return (rows, size // rows) if size % rows == 0 else (1, size)


def _draw(form: Format, chunk: int, size: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Masters, and updates per unit of ``lr``."""
    dice = np.random.default_rng([_SEED, chunk])
    size *= form.codes
    weights = dice.standard_normal(size, np.float32) * np.float32(form.std)
    served = _values(form, _serve(form, weights.astype(form.master)))
    normal = np.maximum(np.abs(served), form.master(2.0**form.min_exponent))
    ulp = np.spacing(normal) * form.master(2.0 ** (np.finfo(form.master).nmant - form.mantissa_bits))
    master = served + ulp * (dice.random(size, form.master) - form.master(0.5))
    update = dice.standard_normal(size, np.float32).astype(form.master) * form.master(_UPDATE_RMS)
    return master, update


def _serve(form: Format, master: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Bits of the served dtype, rounded to nearest even."""
    import torch

    kept = np.clip(master, -form.largest, form.largest) if np.isfinite(form.largest) else master
    if form.codes == 2:
        return fp4.pack(torch.from_numpy(kept).reshape(1, -1)).ravel()
    dtype = dtype_of(form.dtype)
    cast = torch.from_numpy(kept).to(dtype.torch)
    return cast.view(torch.uint8).numpy().view(dtype.uint)


def _values(form: Format, bits: npt.NDArray[Any]) -> npt.NDArray[Any]:
    import torch

    if form.codes == 2:
        return fp4.unpack(bits)
    dtype = dtype_of(form.dtype)
    values = torch.from_numpy(bits.view(np.uint8)).view(dtype.torch)
    return values.to(torch.float64 if form.master is np.float64 else torch.float32).numpy()


def _solve_rate(form: Format, density: float, size: int) -> float:
    """``lr`` that changes the share ``density`` of one tensor, by bisection of its logarithm."""
    master, update = _draw(form, 0, size)
    old = _serve(form, master)
    low, high = -60.0, 20.0
    for _ in range(24):
        middle = (low + high) / 2
        new = _serve(form, master + form.master(2.0**middle) * update)
        low, high = (low, middle) if np.count_nonzero(new != old) > density * size else (middle, high)
    return float(2.0**high)


# --- recorded -----------------------------------------------------------------------------------------------------


def find_recorded() -> Path | None:
    """The recorded trace of this checkout, None for an installed wheel."""
    for root in (Path(__file__).resolve().parents[2], Path.cwd()):
        if (root / _RECORDED).is_file():
            return root / _RECORDED
    return None


def recorded(path: Path) -> Iterator[Trace]:
    """All steps of all runs of a recorded trace, one at a time, in the order of the file.

    The file is an .npz of uint16 arrays, bit patterns of bf16, named ``run|tensor|plane``; planes are ``v0`` (the first
    version), or ``v0xor`` (the same, xor that of the one run that has a ``v0``), then ``xor01``, ``xor12``, ... (each
    version xor the one before). The step that leads to version k is called ``recorded-RUN-k``.

    Raises InputError when it is not such a file.
    """
    runs = _by_run(path, _load(path))
    for run, tensors in runs.items():
        old = {name: _first(path, runs, run, name) for name in tensors}
        for k in range(1, 1 + min(sum(plane.startswith("xor") for plane in planes) for planes in tensors.values())):
            new = {name: old[name] ^ _plane(path, planes, f"xor{k - 1}{k}") for name, planes in tensors.items()}
            pairs = (TracedTensor(TensorSpec(n, "BF16", old[n].shape), old[n].ravel(), new[n].ravel()) for n in tensors)
            yield Trace(f"recorded-{run}-{k}", "bf16", tuple(pairs))
            old = new


_Planes = dict[str, npt.NDArray[Any]]


def _load(path: Path) -> _Planes:
    if not zipfile.is_zipfile(path):  # False where there is no file, too
        raise InputError("not a trace", field=str(path), expected="an .npz file")
    try:
        with np.load(path) as file:
            return {key: file[key] for key in file.files if key.count("|") == 2}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise InputError("trace cannot be read", field=str(path), found=str(error), do="copy it again") from error


def _by_run(path: Path, arrays: _Planes) -> dict[str, dict[str, _Planes]]:
    runs: dict[str, dict[str, _Planes]] = {}
    for key, array in arrays.items():
        run, name, plane = key.split("|")
        if array.dtype != np.uint16:
            raise InputError(f"array {key!r} of {path}", field="dtype", found=str(array.dtype), expected="uint16")
        runs.setdefault(run, {}).setdefault(name, {})[plane] = array
    if not runs:
        raise InputError("no trace in the file", field=str(path), expected="arrays named run|tensor|plane")
    return runs


def _plane(path: Path, planes: _Planes, name: str) -> npt.NDArray[Any]:
    if name not in planes:
        raise InputError("trace lacks a plane", field=str(path), found=", ".join(planes), expected=name)
    return planes[name]


def _first(path: Path, runs: dict[str, dict[str, _Planes]], run: str, name: str) -> npt.NDArray[Any]:
    planes = runs[run][name]
    if "v0" in planes:
        return planes["v0"]
    bases: Sequence[_Planes] = [tensors[name] for tensors in runs.values() if "v0" in tensors.get(name, {})]
    if len(bases) != 1:
        raise InputError("trace has no first version", field=f"{run}|{name}", found=str(path), expected="one v0")
    first: npt.NDArray[Any] = bases[0]["v0"] ^ _plane(path, planes, "v0xor")
    return first
