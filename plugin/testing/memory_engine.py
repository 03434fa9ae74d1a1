"""MemoryEngine: the port ``weight_sync.ports.Engine`` over plain arrays, to read and to test with.

Owns a table of arrays, an undo log and faults on demand. Owns no model: what it "serves" is its arrays, and whether
admission is open. Engines of real hosts differ in where bits lie (a Layout maps them) and in what a pause does.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from weight_sync.canonical import Bits
from weight_sync.checkpoint import Checkpoint
from weight_sync.codec.apply import apply_changes, restore_changes, write_dense
from weight_sync.codec.digest import Digest, state_digest
from weight_sync.dtypes import DTYPES, dtype_of, dtype_of_torch
from weight_sync.errors import DeadlineError, EngineError, EngineInDoubtError, TensorError
from weight_sync.layout.box import Box
from weight_sync.ports import DensePiece, Engine, PauseMode, Update
from weight_sync.proto.v1 import common_pb2, contract_pb2, replica_pb2
from weight_sync.served import bits_of
from weight_sync.tensors import TensorSpec

if TYPE_CHECKING:
    import torch

    Tensors = Mapping[str, torch.Tensor | npt.NDArray[Any]]

__all__ = ["MemoryEngine"]


class MemoryEngine(Engine):
    """An engine whose model is a table of arrays.

    Args:
        tensors: contiguous CPU tensors or NumPy arrays by checkpoint name, written in place (a ``np.memmap`` makes the
            state outlive the process); or a checkpoint, which is copied. bf16 and fp8 come as torch tensors.
        view: name of the view that it serves.
        changes_tensors: whether it takes versions with other tensors; engines that compute in place do not.
        fail_at: faults for tests, step to the call that fails, counted from 1. Steps are the port's verbs, which then
            raise EngineError (``pause``: DeadlineError) and do nothing, and three ways in which ``commit`` goes wrong
            inside: ``commit:half`` stops half-way and restores, ``commit:torn`` stops half-way and cannot restore,
            ``commit:wrong`` ends with one bit flipped.

    Attributes:
        table: name to (spec, bits); bits are (elements,) unsigned of the element's width.
        admits: True while requests would be admitted.
        contract: how it computes, as it will present it; says nothing unless a test sets it.
        announced: the version that responses would carry, None before the first.
        calls: the port's verbs in the order in which they were called.
        caches_of: the digest of the bits that caches were filled from; None after `clear_caches`. `serve` fills them.
    """

    def __init__(
        self,
        tensors: Tensors | str | os.PathLike[str],
        view: str = "default",
        *,
        changes_tensors: bool = True,
        fail_at: Mapping[str, int] | None = None,
    ) -> None:
        self.view, self.changes_tensors = view, changes_tensors
        self.table: dict[str, tuple[TensorSpec, npt.NDArray[Any]]] = _table_of(tensors)
        self.admits = True
        self.contract = contract_pb2.ExecutionContract()
        self.announced: common_pb2.VersionId | None = None
        self.calls: list[str] = []
        self.caches_of: Digest | None = None
        self.fail_at = dict(fail_at or {})
        self._counts: Counter[str] = Counter()
        self._digest: Digest | None = None  # None until it has been computed once
        self._staged: tuple[Update, list[DensePiece]] | None = None
        self._undo: list[Callable[[], object]] | None = None
        self._torn = False

    # --- what it holds ---

    def bits(self) -> Bits:
        """For patches in the compact form."""
        return lambda spec: self.table[spec.name][1]

    def describe(self) -> replica_pb2.EngineDescription:
        self._called("describe")
        description = replica_pb2.EngineDescription(
            engine_id="memory", kind="memory", view=self.view, complete=True, host=socket.gethostname(),
            tensors=[spec.to_proto() for _, (spec, _) in sorted(self.table.items())],
            forms=[common_pb2.FORM_STEP, common_pb2.FORM_ABSOLUTE], changes_tensors=self.changes_tensors,
            contract=self.contract,
        )  # fmt: skip
        description.digest.CopyFrom(self._recomputed().to_proto())
        return description

    def audit(self) -> Digest:
        self._called("audit")
        return self._recomputed()

    def _recomputed(self) -> Digest:
        self._digest = state_digest(self.table.values())
        return self._digest

    # --- one version ---

    def stage(self, update: Update) -> None:
        """Everything that can be refused is refused here, and all that is slow is done: the fence only writes."""
        self._called("stage")
        self._staged, self._undo = None, None
        if self._digest is None and not update.full:
            raise EngineError("the digest of what is held is not known", do="call describe or audit, then stage again")
        specs = {spec.name: spec for spec in update.tensors}
        if not self.changes_tensors and specs != {name: spec for name, (spec, _) in self.table.items()}:
            raise EngineError("the version has other tensors", do="start the engine from a checkpoint of that version")
        pieces = list(update.dense())  # may read the store
        arriving: Counter[TensorSpec] = Counter()
        for piece in pieces:
            arriving[piece.spec] += piece.coords.count
        for name, spec in specs.items():
            held = self.table[name][0] if name in self.table else None
            if (update.full or held != spec) and arriving[spec] != spec.elements:  # of an empty one there is no piece
                raise EngineError("the update lacks a tensor", field=name, found=held, expected=spec,
                                  do="stage a full update")  # fmt: skip
        for item in (*update.changes, *pieces):
            if specs.get(item.spec.name) != item.spec:
                raise EngineError("part of another tensor", field=item.spec.name, found=item.spec,
                                  expected=specs.get(item.spec.name), do="stage a full update")  # fmt: skip
        self._staged = update, pieces

    def commit(self) -> Digest:
        """Writes in place. Each write first adds its inverse to the undo log, so that any failure can be taken back."""
        self._called("commit")
        if self._staged is None:
            raise EngineError("nothing is staged", do="call stage first")
        (update, pieces), self._staged = self._staged, None
        before, undo, self._torn = self._digest, self._undo_log(), False
        try:
            gained = self._write(update, pieces, undo)
        except Exception as error:
            if self._torn:
                self._digest = None
                raise EngineInDoubtError("commit stopped half-way and could not be undone", do="sync again") from error
            self._run_back()
            raise EngineError("commit failed, the old bits are back", found=str(error), do="sync again") from error
        # a full update replaces bits that nobody vouches for; otherwise old and new bits of what changed tell
        self._digest = self._recomputed() if update.full or before is None else before + gained
        return self._digest

    def _write(self, update: Update, pieces: list[DensePiece], undo: list[Callable[[], object]]) -> Digest:
        gained = Digest()
        wanted = {spec.name: spec for spec in update.tensors}
        for name in [name for name, (spec, _) in self.table.items() if wanted.get(name) != spec]:
            gained -= self._removed(name, undo)
        for spec in update.tensors:
            if spec.name not in self.table:
                gained += self._added(spec, undo)
        for piece in pieces:  # dense pieces first: changes of a full update continue them
            bits = self.table[piece.spec.name][1]
            old, gain = write_dense(piece, bits, piece.coords)
            assert old is not None
            back = DensePiece(piece.spec, piece.coords, old)
            undo.append(partial(write_dense, back, bits, piece.coords, keep_old=False))
            gained += gain
        self._torn = self._fault("commit:torn")
        if self._fault("commit:half") or self._torn:
            raise OSError("a fault on demand")
        for item in update.changes:
            bits = self.table[item.spec.name][1]
            old, gain = apply_changes(item, bits, item.coords)
            undo.append(partial(restore_changes, item, bits, item.coords, old))
            gained += gain
        if self._fault("commit:wrong"):
            gained += self._flip_one_bit(undo)
        return gained

    def _added(self, spec: TensorSpec, undo: list[Callable[[], object]]) -> Digest:
        """An array of zeros; its elements arrive as dense pieces."""
        self.table[spec.name] = spec, np.zeros(spec.elements, spec.type.uint)
        undo.append(lambda: self.table.pop(spec.name))
        return state_digest([self.table[spec.name]])

    def _removed(self, name: str, undo: list[Callable[[], object]]) -> Digest:
        entry = self.table.pop(name)
        undo.append(lambda: self.table.update({name: entry}))
        return state_digest([entry])

    def rollback(self) -> Digest:
        """Restores the bits before the last commit. May be called again: writing old bits is idempotent."""
        self._called("rollback")
        if self._undo is None:
            raise EngineInDoubtError("the undo log is gone", do="rebuild the engine from an anchor")
        return self._run_back()

    def _undo_log(self) -> list[Callable[[], object]]:
        self._undo = []
        return self._undo

    def _run_back(self) -> Digest:
        undo, self._undo = self._undo, []  # once taken back, taking it back again changes nothing
        for step in reversed(undo or []):
            step()
        return self._recomputed()

    # --- the fence ---

    def pause(self, mode: PauseMode, timeout: float) -> None:
        self._called("pause")
        self.admits = False

    def resume(self) -> None:
        self._called("resume")
        self.admits = True

    def clear_caches(self) -> None:
        self._called("clear_caches")
        self.caches_of = None

    def announce(self, version: common_pb2.VersionId) -> None:
        self._called("announce")
        self.announced = common_pb2.VersionId(run_id=version.run_id, number=version.number)

    def close(self) -> None:
        self._staged, self._undo = None, None

    def serve(self) -> tuple[int | None, Digest]:
        """One request: the announced version and the digest of the bits that answer. Raises EngineError when paused or
        when caches would mix two versions.
        """
        if not self.admits:
            raise EngineError("admission is closed", do="resume")
        held = state_digest(self.table.values())
        if self.caches_of not in (None, held):
            raise EngineError(
                "caches are of other weights", field="caches", found=str(self.caches_of), expected=str(held)
            )
        self.caches_of = held
        return None if self.announced is None else self.announced.number, held

    # --- faults ---

    def _called(self, verb: str) -> None:
        self.calls.append(verb)
        if self._fault(verb):
            kind = DeadlineError if verb == "pause" else EngineError
            raise kind("a fault on demand", field=verb, found=f"call {self._counts[verb]}")

    def _fault(self, step: str) -> bool:
        self._counts[step] += 1
        return self.fail_at.get(step) == self._counts[step]

    def _flip_one_bit(self, undo: list[Callable[[], object]]) -> Digest:
        spec, bits = next(entry for _, entry in sorted(self.table.items()) if len(entry[1]))
        flipped = bits.copy()
        flipped[-1] ^= 1
        piece = DensePiece(spec, Box.run(0, spec.elements), flipped)
        old, gained = write_dense(piece, bits, piece.coords)
        assert old is not None
        undo.append(partial(write_dense, DensePiece(spec, piece.coords, old), bits, piece.coords, keep_old=False))
        return gained


def _table_of(tensors: Any) -> dict[str, tuple[TensorSpec, npt.NDArray[Any]]]:
    if not isinstance(tensors, Mapping):
        checkpoint = Checkpoint(tensors)
        return {spec.name: (spec, checkpoint.bits(spec.name).copy()) for spec in checkpoint.table}
    return {name: _entry_of(name, tensor) for name, tensor in tensors.items()}


def _entry_of(name: str, tensor: Any) -> tuple[TensorSpec, npt.NDArray[Any]]:
    """Spec and bits, sharing memory. Raises TensorError on what cannot be shared or has no safetensors dtype."""
    if isinstance(tensor, np.ndarray):
        dtype = next((d.name for d in DTYPES.values() if d.torch_name == tensor.dtype.name and d.bits >= 8), None)
        if dtype is None or not tensor.flags.c_contiguous or not tensor.flags.writeable:
            raise TensorError("array cannot be served in place", field=name, found=str(tensor.dtype),
                              expected="a contiguous, writable array of a dtype that safetensors knows")  # fmt: skip
        return TensorSpec(name, dtype, tensor.shape), tensor.reshape(-1).view(dtype_of(dtype).uint)
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise TensorError("tensor cannot be served in place", field=name, found=str(tensor.device),
                          expected="a contiguous tensor of the CPU")  # fmt: skip
    dtype = dtype_of_torch(tensor.dtype).name
    shape = tuple(tensor.shape)
    if dtype_of(dtype).bits < 8:  # torch counts bytes, safetensors counts codes
        shape = (*shape[:-1], shape[-1] * (8 // dtype_of(dtype).bits))
    return TensorSpec(name, dtype, shape), bits_of(tensor)
