"""Flat storages as arrays of unsigned elements, in host memory and on any torch device.

Owns reading, writing, scattering and digesting elements where they lie. Owns no map of a model (inplace.py) and no
decision about versions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from weight_sync.codec.apply import apply_changes, changed_digest, new_bits_of, restore_changes
from weight_sync.codec.digest import Digest, digest_box, digest_torch
from weight_sync.layout.box import Box
from weight_sync.ports import Changes
from weight_sync.tensors import TensorSpec

__all__ = ["DeviceMemory", "HostMemory", "Memory", "Scatter", "memory_of"]

_SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Scatter(Protocol):
    """Changes made ready for one memory. Preparing one writes nothing."""

    def old(self) -> npt.NDArray[Any]:
        """The bits that lie at the changed places now, (n,)."""

    def apply(self) -> tuple[npt.NDArray[Any], Digest]:
        """Writes the new bits; returns the old ones and what the digest gains."""

    def undo(self, old: npt.NDArray[Any]) -> None:
        """Writes the old bits back."""


class Memory(Protocol):
    """One flat storage, element by element."""

    def read(self, place: Box) -> npt.NDArray[Any]:
        """The elements of a box, (count,) unsigned, in enumeration order; a copy."""

    def write(self, place: Box, bits: npt.NDArray[Any]) -> None:
        """All elements of a box from (count,) unsigned."""

    def digest(self, spec: TensorSpec, coords: Box, place: Box, threads: int) -> Digest:
        """Of the elements in ``place``, which are those of ``coords`` in the tensor; no header term."""

    def scatter(self, changes: Changes, place: Box) -> Scatter:
        """Changes of ``changes.coords``, which lie in ``place``, made ready."""


def memory_of(storage: torch.Tensor, width: int) -> Memory:
    """A 1-d contiguous tensor as elements of ``width`` bytes, wherever it lies; shares its memory."""
    bits = storage.detach().view(_SIGNED[width])
    if bits.device.type != "cpu":
        return DeviceMemory(bits)
    return HostMemory(bits.numpy().view(np.dtype(f"u{width}")))


@dataclass(frozen=True)
class HostMemory:
    """``flat``: (elements,) unsigned, writable; a view of the storage."""

    flat: npt.NDArray[Any]

    def read(self, place: Box) -> npt.NDArray[Any]:
        return place.view(self.flat).flatten()

    def write(self, place: Box, bits: npt.NDArray[Any]) -> None:
        place.view(self.flat)[...] = bits.reshape(place.sizes)

    def digest(self, spec: TensorSpec, coords: Box, place: Box, threads: int) -> Digest:
        # a run is digested where it lies; anything else is gathered first
        return digest_box(spec, place.view(self.flat).reshape(-1), coords, threads)

    def scatter(self, changes: Changes, place: Box) -> Scatter:
        ready = _HostScatter(self.flat, changes, place)
        ready.warm_up()
        return ready


@dataclass(frozen=True)
class _HostScatter:
    flat: npt.NDArray[Any]
    changes: Changes
    place: Box

    def warm_up(self) -> None:
        """Applies none of the changes, so that kernels are compiled before the fence and not inside it."""
        some = self.changes
        steps, bits = (None if part is None else part[:0] for part in (some.steps, some.bits))
        apply_changes(Changes(some.spec, some.coords, some.positions[:0], steps, bits), self.flat, self.place)

    def old(self) -> npt.NDArray[Any]:
        return self.flat[self.place.indices(self.changes.positions)]

    def apply(self) -> tuple[npt.NDArray[Any], Digest]:
        return apply_changes(self.changes, self.flat, self.place)

    def undo(self, old: npt.NDArray[Any]) -> None:
        restore_changes(self.changes, self.flat, self.place, old)


@dataclass(frozen=True)
class DeviceMemory:
    """``flat``: (elements,) integers of the element's width, on any device; a view of the storage."""

    flat: torch.Tensor

    def read(self, place: Box) -> npt.NDArray[Any]:
        return _to_host(self._view(place).reshape(-1))

    def write(self, place: Box, bits: npt.NDArray[Any]) -> None:
        self._view(place).copy_(self._to_device(bits).reshape(place.sizes))

    def digest(self, spec: TensorSpec, coords: Box, place: Box, threads: int) -> Digest:
        # digest_torch sees bits only, so the integer view stands for the tensor's own dtype
        return digest_torch(spec, self._view(place).reshape(-1).contiguous(), coords)

    def scatter(self, changes: Changes, place: Box) -> Scatter:
        indices = torch.from_numpy(place.indices(changes.positions)).to(self.flat.device)
        return _DeviceScatter(self, changes, indices)

    def _view(self, place: Box) -> torch.Tensor:
        return self.flat.as_strided(place.sizes, place.strides, self.flat.storage_offset() + place.offset)

    def _to_device(self, bits: npt.NDArray[Any]) -> torch.Tensor:
        signed = np.ascontiguousarray(bits).view(_to_numpy(self.flat.dtype))
        return torch.from_numpy(signed if signed.flags.writeable else signed.copy()).to(self.flat.device)


@dataclass(frozen=True)
class _DeviceScatter:
    """Only changed elements cross the bus; the arithmetic on them is the host's, so both kinds of memory agree."""

    memory: DeviceMemory
    changes: Changes
    indices: torch.Tensor

    def old(self) -> npt.NDArray[Any]:
        return _to_host(self.memory.flat.index_select(0, self.indices))

    def apply(self) -> tuple[npt.NDArray[Any], Digest]:
        old = self.old()
        self.undo(new_bits_of(self.changes, old))
        written = Changes(self.changes.spec, self.changes.coords, self.changes.positions, None, self.old())
        return old, changed_digest(written, old)  # of the bits read back, not of those that were meant

    def undo(self, old: npt.NDArray[Any]) -> None:
        self.memory.flat.index_copy_(0, self.indices, self.memory._to_device(old))


def _to_numpy(signed: torch.dtype) -> np.dtype[Any]:
    return np.dtype({torch.uint8: "u1", torch.int16: "i2", torch.int32: "i4", torch.int64: "i8"}[signed])


def _to_host(bits: torch.Tensor) -> npt.NDArray[Any]:
    # copied even where the device is the host: old bits must outlive the writes
    host = bits.to("cpu", copy=True).numpy()
    return host.view(np.dtype(f"u{host.itemsize}"))
