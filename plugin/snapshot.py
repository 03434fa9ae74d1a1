"""The base that the next diff is taken against: this rank's pieces of the version that was committed last.

Owns where those bits are kept and their promotion. Owns no comparison and no knowledge of stores: whoever opens it
fills it. Memory: exactly the bytes of this rank's pieces, in RAM, in a file that the kernel may page out, or on the
pieces' own device.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from weight_sync.codec.apply import apply_changes, new_bits_of
from weight_sync.codec.ordered import add_steps
from weight_sync.errors import StoreError, StoreFullError
from weight_sync.layout.box import Box
from weight_sync.ports import Changes
from weight_sync.served import ServedPiece, bits_of
from weight_sync.tensors import TensorSpec

if TYPE_CHECKING:
    import torch

__all__ = ["Snapshot"]

_ALIGN = 64
_CHUNK = 4 << 20  # elements copied to a device at a time
Key = tuple[TensorSpec, Box]


class Snapshot:
    """Bits by piece.

    Args:
        where: "memory", "file" or "device"; pieces on the CPU are kept in memory by "device", too.
        folder: for "file"; None for a temporary folder. The file has no name once it is open: it goes with the process.
    """

    def __init__(self, where: str, folder: str | None = None) -> None:
        self.where = where
        self._folder = folder
        self._arrays: dict[Key, npt.NDArray[Any]] = {}
        self._tensors: dict[Key, torch.Tensor] = {}
        self._boxes: dict[TensorSpec, list[Box]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(a.nbytes for a in self._arrays.values()) + sum(
            t.numel() * t.element_size() for t in self._tensors.values()
        )

    def __contains__(self, piece: ServedPiece) -> bool:
        return piece.key in self._arrays or piece.key in self._tensors

    def allocate(self, pieces: Iterable[ServedPiece], storages: Mapping[str, torch.Tensor]) -> None:
        """Makes room for the pieces that are not here yet; their bits are undefined until `fill`.

        ``storages`` tell on which device a piece lies. Raises StoreFullError when a file snapshot has no room.
        """
        near: list[ServedPiece] = []
        for piece in pieces:
            if piece in self:
                continue
            device = storages[piece.placement.storage].device
            if self.where == "device" and self._is_far(device):
                self._tensors[piece.key] = _empty(piece, device)
            else:
                near.append(piece)
        if self.where == "file" and near:
            self._arrays |= {piece.key: array for piece, array in zip(near, self._mapped(near), strict=True)}
        else:
            self._arrays |= {piece.key: np.empty(piece.coords.count, piece.spec.type.uint) for piece in near}
        self._index()

    @staticmethod
    def _is_far(device: torch.device) -> bool:
        return device.type != "cpu"

    def retain(self, pieces: Iterable[ServedPiece]) -> None:
        """Forgets all other pieces."""
        keys = {piece.key for piece in pieces}
        self._arrays = {key: array for key, array in self._arrays.items() if key in keys}
        self._tensors = {key: tensor for key, tensor in self._tensors.items() if key in keys}
        self._index()

    def _index(self) -> None:
        self._boxes = {}
        for spec, box in (*self._arrays, *self._tensors):
            self._boxes.setdefault(spec, []).append(box)

    def _mapped(self, pieces: Sequence[ServedPiece]) -> list[npt.NDArray[Any]]:
        sizes = [-(-p.coords.count * p.spec.type.width // _ALIGN) * _ALIGN for p in pieces]
        try:
            if self._folder is not None:
                Path(self._folder).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._folder, prefix="weight_sync-snapshot-") as file:
                # room now: a page that finds none when it is written to would kill the process
                os.posix_fallocate(file.fileno(), 0, max(1, sum(sizes)))
                whole = np.memmap(file, np.uint8, "r+")
        except OSError as error:
            kind = StoreFullError if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else StoreError
            raise kind("cannot make the snapshot's file", field="weight_sync.snapshot_dir", found=error.strerror,
                       expected=f"{sum(sizes)} bytes in {self._folder or tempfile.gettempdir()}",
                       do="set snapshot_dir to a disk with room, or snapshot to memory") from error  # fmt: skip
        out: list[npt.NDArray[Any]] = []
        at = 0
        for piece, size in zip(pieces, sizes, strict=True):
            out.append(whole[at : at + piece.coords.count * piece.spec.type.width].view(piece.spec.type.uint))
            at += size
        return out

    # --- bits ---

    def array(self, piece: ServedPiece) -> npt.NDArray[Any]:
        """(count,) unsigned, writable: the bits themselves; of a device snapshot a copy."""
        found = self._arrays.get(piece.key)
        return bits_of(self._tensors[piece.key].cpu()) if found is None else found

    def tensor(self, piece: ServedPiece) -> torch.Tensor | None:
        """The bits of a device snapshot, None when the piece is kept by the host."""
        return self._tensors.get(piece.key)

    def fill(self, piece: ServedPiece, bits: npt.NDArray[Any], start: int = 0) -> None:
        """Writes elements [start, start + len(bits)) of a piece."""
        found = self._arrays.get(piece.key)
        if found is not None:
            found[start : start + len(bits)] = bits
            return
        target = self._tensors[piece.key][start : start + len(bits)]
        for at in range(0, len(bits), _CHUNK):
            target[at : at + _CHUNK].copy_(_tensor_of(bits[at : at + _CHUNK], target))

    def change(self, piece: ServedPiece, at: npt.NDArray[np.int64], item: Changes, pick: npt.NDArray[Any]) -> None:
        """Applies changes ``pick`` of ``item`` to the piece's elements ``at``, (n,) each, which may exceed 32 bits."""
        found = self._arrays.get(piece.key)
        old = _bits_at(self._tensors[piece.key], at) if found is None else found[at]
        if item.steps is None:
            assert item.bits is not None
            new = item.bits[pick]
        else:
            new = add_steps(old, item.steps[pick], item.spec.type)
        if found is None:
            _put_at(self._tensors[piece.key], at, new)
        else:
            found[at] = new

    # --- promotion ---

    def promote(self, changes: Iterable[Changes]) -> None:
        """Moves to the next version by our own decoded patch, which holds steps."""
        for item in changes:
            key, place = self._home(item)
            found = self._arrays.get(key)
            if found is not None:
                apply_changes(item, found, place)
                continue
            at = place.indices(item.positions)
            _put_at(self._tensors[key], at, new_bits_of(item, _bits_at(self._tensors[key], at)))

    def demote(self, changes: Iterable[Changes]) -> None:
        """Takes `promote` of the same changes back exactly: steps wrap, so each is undone by its negative."""
        for item in changes:
            assert item.steps is not None
            self.promote([Changes(item.spec, item.coords, item.positions, np.negative(item.steps))])

    def _home(self, item: Changes) -> tuple[Key, Box]:
        """The piece that holds a frame's box, and where: frames cut pieces into runs, or along their outer dimension."""
        ends = np.array([0, item.coords.count - 1])
        for box in self._boxes.get(item.spec, ()):
            if box == item.coords:
                return (item.spec, box), Box.run(0, box.count)
            first, last = box.find(item.coords.indices(ends))
            if first >= 0 and last - first == item.coords.count - 1:
                return (item.spec, box), Box.run(int(first), item.coords.count)
        raise AssertionError(f"no piece of {item.spec.name!r} holds {item.coords}")


def _empty(piece: ServedPiece, device: torch.device) -> torch.Tensor:
    import torch

    return torch.empty(piece.coords.count, dtype=piece.spec.type.torch, device=device)


def _tensor_of(bits: npt.NDArray[Any], like: torch.Tensor) -> torch.Tensor:
    import torch

    signed = bits.view("u1" if bits.dtype.itemsize == 1 else f"i{bits.dtype.itemsize}")
    shared = (
        signed if signed.flags.writeable else signed.copy()
    )  # torch takes no read-only memory, such as a mapped file
    return torch.from_numpy(shared).to(like.device).view(like.dtype)


def _bits_at(target: torch.Tensor, at: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    import torch

    return bits_of(target.view(_signed(target))[torch.from_numpy(at).to(target.device)].cpu())


def _put_at(target: torch.Tensor, at: npt.NDArray[np.int64], bits: npt.NDArray[Any]) -> None:
    import torch

    view = target.view(_signed(target))
    view[torch.from_numpy(at).to(target.device)] = _tensor_of(bits, view)


def _signed(tensor: torch.Tensor) -> torch.dtype:
    import torch

    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
