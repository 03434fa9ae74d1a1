"""InPlaceStore: versions written straight into the memory of a running model, with an undo log and a digest.

Owns stage, commit, rollback and audit over the storages of one process, in whatever way a Layout maps them to the
checkpoint. Owns no model, no fence and no version numbers: engines (transformers, vLLM, SGLang) add those.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from weight_sync.adapters.engines.memory import Memory, Scatter, memory_of
from weight_sync.adapters.engines.routes import Routes, Slot, slots_of
from weight_sync.canonical import Bits
from weight_sync.codec.apply import changed_digest, new_bits_of
from weight_sync.codec.digest import Digest, header_digest
from weight_sync.codec.threads import ordered_map
from weight_sync.cutting import cut_changes, cut_piece
from weight_sync.errors import DigestMismatchError, EngineError, EngineInDoubtError, LayoutError
from weight_sync.layout.box import Box
from weight_sync.layout.placement import Layout
from weight_sync.layout.storage import check_storages
from weight_sync.ports import Changes, DensePiece, Update
from weight_sync.push import LAND
from weight_sync.tensors import TensorSpec

__all__ = ["InPlaceStore"]


_Memories = Mapping[tuple[str, str], Memory]


@dataclass
class _Staged:
    """An update cut to this process's memories. ``whole`` is None when its dense part is read inside the fence."""

    update: Update
    keep_undo: bool
    scatters: list[tuple[str, Scatter]]
    aliases: list[tuple[Changes, Scatter]]
    whole: list[DensePiece] | None
    addresses: dict[str, int]


@dataclass
class _Undo:
    """Closures that restore old bits, oldest first; ``complete`` is False when some old bits were not kept."""

    before: Digest | None
    complete: bool
    steps: list[Callable[[], None]] = field(default_factory=list)


class InPlaceStore:
    """The weights of one process.

    Attributes:
        table: the checkpoint's tensors.
        digest: of the bits in place; None until `audit` has told, and while they are in doubt.
        parts: the same by tensor, of what is held here and without header terms; empty while ``digest`` is None.
    """

    def __init__(
        self,
        layout: Layout,
        storages: Callable[[], Mapping[str, torch.Tensor]],
        *,
        threads: int = 1,
        staging_bytes: int = 4 << 30,
        partial: bool = False,
    ) -> None:
        """
        Args:
            layout: of this process.
            storages: the flat storages as they lie now; called anew for every operation, because hosts move weights.
            threads: that share the work.
            staging_bytes: most memory for whole tensors read ahead of the fence.
            partial: other processes hold the rest; the digest then counts what is held here, and no header terms.

        Raises LayoutError when the bits of the checkpoint cannot lie in the storages.
        """
        self.table: tuple[TensorSpec, ...] = layout.tensors
        self.digest: Digest | None = None
        self.parts: dict[str, Digest] = {}
        self._layout, self._storages, self._threads = layout, storages, threads
        self._staging_bytes, self._partial = staging_bytes, partial
        now = storages()
        check_storages(layout, now)
        self._slots = slots_of(layout, {key: now[key].data_ptr() for key in layout.storages})
        self._routes = Routes(self._slots)
        self._headers = Digest.sum(() if partial else map(header_digest, self.table))
        self._staged: _Staged | None = None
        self._undo: _Undo | None = None

    # --- what is in place ---

    def audit(self) -> Digest:
        """The digest of all bits in place, recomputed.

        Raises EngineInDoubtError when a float32 holds more than its served bf16, EngineError when the storages are not
        those that the layout was learnt from.
        """
        self._forget()
        memories, _ = self._resolve()
        for slot in self._slots:
            if self._is_widened(slot) and memories[_key(slot)].read(_lower(slot.place)).any():
                raise EngineInDoubtError(
                    "a float32 parameter holds more bits than the served bf16",
                    field=slot.spec.name,
                    do="load the model from a bf16 checkpoint, or sync to rebuild it",
                )
        found = ordered_map(
            lambda slot: memories[_key(slot)].digest(slot.spec, slot.coords, slot.place, 1), self._slots, self._threads
        )
        parts: dict[str, Digest] = {}
        for slot, digest in zip(self._slots, found, strict=True):
            parts[slot.spec.name] = parts.get(slot.spec.name, Digest()) + digest
        self.parts, self.digest = parts, self._headers + Digest.sum(parts.values())
        return self.digest

    def _forget(self) -> None:
        """Nobody knows what is in place."""
        self.parts, self.digest = {}, None

    def _resolve(self) -> tuple[_Memories, dict[str, int]]:
        """The memories and the addresses of the storages as they lie now."""
        now = self._storages()
        try:
            check_storages(self._layout, now)
        except LayoutError as error:
            raise EngineError(
                "the host changed its weights' storage",
                field=error.field,
                found=str(error),
                do="attach the engine again",
            ) from error
        wanted = {_key(slot): slot.spec.type.width for slot in self._slots}
        memories = {key: memory_of(now[key[0]], width) for key, width in wanted.items()}
        return memories, {key: now[key].data_ptr() for key in self._layout.storages}

    def bits(self) -> Bits:
        """All elements of any tensor as they lie now; valid until the host moves its weights."""
        memories, _ = self._resolve()
        held: dict[str, list[Slot]] = {}
        for slot in self._slots:
            held.setdefault(slot.spec.name, []).append(slot)

        def read(spec: TensorSpec) -> npt.NDArray[Any]:
            out = np.empty(spec.elements, spec.type.uint)
            for slot in held.get(spec.name, ()):
                slot.coords.view(out)[...] = memories[_key(slot)].read(slot.place).reshape(slot.coords.sizes)
            return out

        return read

    def _is_widened(self, slot: Slot) -> bool:
        return self._layout.storages[slot.storage].dtype != slot.spec.dtype

    # --- one update ---

    def stage(self, update: Update, keep_undo: bool = True) -> None:
        """Makes an update ready while the model serves, and drops the undo log of the one before.

        ``keep_undo`` False saves the memory of old bits where there is no version to go back to. Raises EngineError;
        then nothing has changed.
        """
        self._staged = self._undo = None
        self._check(update)
        memories, addresses = self._resolve()
        scatters: list[tuple[str, Scatter]] = []
        aliases: list[tuple[Changes, Scatter]] = []
        for changes in update.changes:
            for slot in self._find(changes.spec, changes.coords):
                part = cut_changes(changes, slot.coords)
                ready = memories[_key(slot)].scatter(part, slot.place)
                if slot.alias:
                    aliases.append((part, ready))
                else:
                    scatters.append((changes.spec.name, ready))
        size = sum(spec.nbytes for spec in self.table) if update.full else 0
        keep_undo = keep_undo and LAND not in update.extra  # bits that go straight into place leave no old ones
        whole = list(update.dense()) if size <= self._staging_bytes else None
        self._staged = _Staged(update, keep_undo, scatters, aliases, whole, addresses)

    def _check(self, update: Update) -> None:
        mine = {spec.name: (spec.dtype, spec.shape) for spec in self.table}
        theirs = {spec.name: (spec.dtype, spec.shape) for spec in update.tensors}
        if mine != theirs:
            name = min(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
            raise EngineError(
                "a running model cannot change its tensors",
                field=name,
                found=theirs.get(name),
                expected=mine.get(name),
                do="restart the engine from a checkpoint of that version",
            )
        if self.digest is None and not update.full:
            raise EngineInDoubtError("the weights in place are not known", do="audit, or stage a full update")

    def _find(self, spec: TensorSpec, box: Box) -> tuple[Slot, ...]:
        found = self._routes.find(spec.name, box)
        held = sum(slot.coords.count for slot in found)
        if held != box.count and not self._partial:
            raise EngineError(
                "the engine does not hold what the version changes",
                field=spec.name,
                found=f"{held} elements",
                expected=f"{box.count}",
                do="attach the engine again",
            )
        return found

    def commit(self) -> Digest:
        """Writes what is staged; returns the digest of the bits in place.

        Incremental, from the old bits read and the new bits written; recomputed when whole tensors were written. Raises
        EngineError after having restored the old bits, EngineInDoubtError when it could not.
        """
        staged, self._staged = self._staged, None
        if staged is None:
            raise EngineError("nothing is staged", do="call stage first")
        memories, addresses = self._resolve()
        if addresses != staged.addresses:
            raise EngineError("the host moved its weights after stage", do="stage again")
        self._undo = undo = _Undo(self.digest, staged.keep_undo)
        try:
            return self._write(staged, memories, undo)
        except BaseException as error:
            self._undo = None
            self._restore(undo, error)
            if isinstance(error, Exception):
                raise EngineError("commit failed, the old bits are back", found=str(error)) from error
            raise

    def _write(self, staged: _Staged, memories: _Memories, undo: _Undo) -> Digest:
        update = staged.update
        if LAND in update.extra:
            update.extra[LAND]()
            return self.audit()
        whole = 0
        before = [ready.old() for _, ready in staged.aliases]
        if update.full:
            self._clear_lower_halves(memories, undo)
        for piece in update.dense() if staged.whole is None else staged.whole:
            self._write_piece(piece, memories, undo)
            whole += 1
        gained = list(ordered_map(lambda item: (item[0], _applied(item[1], undo)), staged.scatters, self._threads))
        if update.full or whole:
            return self.audit()
        for (changes, ready), old in zip(staged.aliases, before, strict=True):
            if not np.array_equal(ready.old(), new_bits_of(changes, old)):
                raise DigestMismatchError(
                    "a tied tensor was published with other values than its twin",
                    field=changes.spec.name,
                    do="publish tied tensors equal, or one of them",
                )
            gained.append((changes.spec.name, changed_digest(changes, old)))
        assert self.digest is not None  # _check has seen to it
        for name, more in gained:
            self.parts[name] += more
        self.digest += Digest.sum(more for _, more in gained)
        return self.digest

    def _write_piece(self, piece: DensePiece, memories: _Memories, undo: _Undo) -> None:
        for slot in self._find(piece.spec, piece.coords):
            if slot.alias:
                continue  # its twin is written; the audit that follows counts both
            memory = memories[_key(slot)]
            if undo.complete:
                undo.steps.append(_writer(memory, slot.place, memory.read(slot.place)))
            memory.write(slot.place, cut_piece(piece, slot.coords).bits)

    def _clear_lower_halves(self, memories: _Memories, undo: _Undo) -> None:
        for slot in self._slots:
            if self._is_widened(slot):
                memory, lower = memories[_key(slot)], _lower(slot.place)
                old = memory.read(lower)
                if old.any():
                    undo.steps.append(_writer(memory, lower, old))
                    memory.write(lower, np.zeros_like(old))

    def rollback(self) -> Digest:
        """Restores the bits before the last commit; returns their digest, recomputed.

        Raises EngineInDoubtError when the undo log is gone or the bits did not come back.
        """
        if self._undo is None:
            raise EngineInDoubtError("the undo log is gone", do="rebuild the engine from an anchor")
        return self._restore(self._undo, None)

    def _restore(self, undo: _Undo, cause: BaseException | None) -> Digest:
        """Old bits are written, not steps taken back: doing it twice does no harm."""
        try:
            for step in reversed(undo.steps):
                step()
            held = self.audit()
        except Exception as error:
            self._forget()
            raise EngineInDoubtError(
                "the old bits could not be restored", found=str(error), do="rebuild the engine from an anchor"
            ) from (cause or error)
        if not undo.complete or held != undo.before:
            self._forget()
            raise EngineInDoubtError(
                "the weights in place are those of no version",
                field="digest",
                found=held.hex(),
                expected="none" if undo.before is None else undo.before.hex(),
                do="rebuild the engine from an anchor",
            ) from cause
        return held


def _key(slot: Slot) -> tuple[str, str]:
    """Of the memory that a slot is read through: one storage may hold elements of two widths."""
    return slot.storage, slot.spec.dtype


def _applied(ready: Scatter, undo: _Undo) -> Digest:
    old, gained = ready.apply()
    undo.steps.append(lambda: ready.undo(old))
    return gained


def _writer(memory: Memory, place: Box, old: npt.NDArray[Any]) -> Callable[[], None]:
    return lambda: memory.write(place, old)


def _lower(place: Box) -> Box:
    """The lower halves of a widened place."""
    return Box(place.offset - 1, place.sizes, place.strides)
