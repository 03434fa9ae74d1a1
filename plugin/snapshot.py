"""The base that the next diff is taken against: this rank's pieces of the version that was committed last.

Owns where those bits are kept and their promotion. Owns no comparison and no knowledge of stores: whoever opens it
fills it. Memory: exactly the bytes of this rank's pieces, in RAM, in a file that the kernel may page out, or on the
pieces' own device.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from weight_sync.codec.apply import apply_changes, new_bits_of, restore_changes
from weight_sync.layout.box import Box
from weight_sync.ports import Changes
from weight_sync.served import ServedPiece
from weight_sync.tensors import TensorSpec

if TYPE_CHECKING:
    import torch

__all__ = ["Snapshot", "Undo"]

_ALIGN = 64
Key = tuple[TensorSpec, Box]
Undo = list[tuple[Changes, npt.NDArray[Any]]]


class Snapshot:
    """Bits by piece.

    Args:
        where: "memory", "file" or "device".
        folder: for "file"; None for a temporary folder. The file has no name once it is open: it goes with the process.
    """

    def __init__(self, where: str, folder: str | None = None) -> None:
        self.where = where
        self._folder = folder
        self._arrays: dict[Key, npt.NDArray[Any]] = {}
        self._tensors: dict[Key, torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(a.nbytes for a in self._arrays.values()) + sum(
            t.numel() * t.element_size() for t in self._tensors.values()
        )

    def __contains__(self, piece: ServedPiece) -> bool:
        return piece.key in self._arrays or piece.key in self._tensors

    def allocate(self, pieces: Iterable[ServedPiece], device: torch.device | None = None) -> None:
        """Makes room for the pieces that are not here yet; their bits are undefined until `fill`."""
        missing = [piece for piece in pieces if piece not in self]
        if self.where == "device" and device is not None and device.type != "cpu":
            import torch

            for piece in missing:
                self._tensors[piece.key] = torch.empty(piece.coords.count, dtype=piece.spec.type.torch, device=device)
        elif self.where == "file":
            self._arrays |= {p.key: array for p, array in zip(missing, self._mapped(missing), strict=True)}
        else:
            self._arrays |= {p.key: np.empty(p.coords.count, p.spec.type.uint) for p in missing}

    def retain(self, pieces: Iterable[ServedPiece]) -> None:
        """Forgets all other pieces."""
        keys = {piece.key for piece in pieces}
        self._arrays = {key: array for key, array in self._arrays.items() if key in keys}
        self._tensors = {key: tensor for key, tensor in self._tensors.items() if key in keys}

    def _mapped(self, pieces: Sequence[ServedPiece]) -> list[npt.NDArray[Any]]:
        sizes = [-(-p.coords.count * p.spec.type.width // _ALIGN) * _ALIGN for p in pieces]
        if self._folder is not None:
            Path(self._folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self._folder, prefix="weight_sync-snapshot-") as file:
            file.truncate(max(1, sum(sizes)))
            whole = np.memmap(file, np.uint8, "r+")
        out: list[npt.NDArray[Any]] = []
        at = 0
        for piece, size in zip(pieces, sizes, strict=True):
            out.append(whole[at : at + piece.coords.count * piece.spec.type.width].view(piece.spec.type.uint))
            at += size
        return out

    def array(self, piece: ServedPiece) -> npt.NDArray[Any]:
        """(count,) unsigned, writable: the bits themselves; of a device snapshot a copy."""
        found = self._arrays.get(piece.key)
        if found is None:
            from weight_sync.served import bits_of

            return bits_of(self._tensors[piece.key].cpu())
        return found

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
        target.copy_(_tensor_of(bits, target))

    def promote(self, changes: Iterable[Changes]) -> Undo:
        """Moves to the next version by our own decoded patch; returns what `demote` needs."""
        homes = self._homes()
        undo: Undo = []
        for item in changes:
            key, place = _home(homes, item)
            found = self._arrays.get(key)
            if found is not None:
                undo.append((item, apply_changes(item, found, place)[0]))
                continue
            old = _bits_at(self._tensors[key], place.indices(item.positions))
            _put_at(self._tensors[key], place.indices(item.positions), new_bits_of(item, old))
            undo.append((item, old))
        return undo

    def demote(self, undo: Undo) -> None:
        """Takes `promote` back exactly."""
        homes = self._homes()
        for item, old in reversed(undo):
            key, place = _home(homes, item)
            found = self._arrays.get(key)
            if found is not None:
                restore_changes(item, found, place, old)
            else:
                _put_at(self._tensors[key], place.indices(item.positions), old)

    def _homes(self) -> dict[TensorSpec, list[Box]]:
        homes: dict[TensorSpec, list[Box]] = {}
        for spec, box in (*self._arrays, *self._tensors):
            homes.setdefault(spec, []).append(box)
        return homes


def _home(homes: dict[TensorSpec, list[Box]], item: Changes) -> tuple[Key, Box]:
    """The piece that holds a frame's box, and where: frames cut pieces into runs, or along their outer dimension."""
    ends = np.array([0, item.coords.count - 1])
    for box in homes[item.spec]:
        if box == item.coords:
            return (item.spec, box), Box.run(0, box.count)
        first, last = box.find(item.coords.indices(ends))
        if first >= 0 and last - first == item.coords.count - 1:
            return (item.spec, box), Box.run(int(first), item.coords.count)
    raise AssertionError(f"no piece of {item.spec.name!r} holds {item.coords}")


def _tensor_of(bits: npt.NDArray[Any], like: torch.Tensor) -> torch.Tensor:
    import torch

    signed = bits.view("u1" if bits.dtype.itemsize == 1 else f"i{bits.dtype.itemsize}")
    return torch.from_numpy(signed).to(like.device).view(like.dtype)


def _bits_at(target: torch.Tensor, at: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    import torch

    from weight_sync.served import bits_of

    return bits_of(target.view(_signed(target))[torch.from_numpy(at).to(target.device)].cpu())


def _put_at(target: torch.Tensor, at: npt.NDArray[np.int64], bits: npt.NDArray[Any]) -> None:
    import torch

    view = target.view(_signed(target))
    view[torch.from_numpy(at).to(target.device)] = _tensor_of(bits, view)


def _signed(tensor: torch.Tensor) -> torch.dtype:
    import torch

    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
