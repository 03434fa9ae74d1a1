"""The deepest check of a store: every version's whole state is rebuilt, in order, and compared by digest.

Owns the walk from anchors through patches, in all stored forms. Owns no decoding (codec/) and no faults (checks.py).
Memory: the state lies in a mapped temporary file; decoded changes of one version are held at a time.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from weight_sync import version as rules
from weight_sync.cli.checks import Findings, Manifest, blame
from weight_sync.codec.apply import apply_changes, changed_digest
from weight_sync.codec.digest import Digest, digest_box, digest_tensor, header_digest
from weight_sync.codec.frame import FrameBox, decode_frame
from weight_sync.errors import CorruptionError, DigestMismatchError, VersionMissingError, WeightSyncError
from weight_sync.history import History, table_of, view_of
from weight_sync.pieces import assemble
from weight_sync.ports import Changes, DensePiece
from weight_sync.proto.v1 import common_pb2, manifest_pb2
from weight_sync.tensors import TensorSpec

__all__ = ["replay"]

_ALIGN = 64


class _State:
    """Bits and digests of one version, by tensor."""

    def __init__(self, table: Sequence[TensorSpec]) -> None:
        self.bits = _mapped(table)
        self.digests = {spec: header_digest(spec) for spec in table}

    def find(self, spec: TensorSpec) -> npt.NDArray[Any]:
        """The bits of a tensor. Raises CorruptionError when the state lacks it."""
        if spec not in self.bits:
            raise CorruptionError("data of a tensor that is not in this state", field=spec.name, found=spec,
                                  do="do not trust this store")  # fmt: skip
        return self.bits[spec]

    def fill(self, pieces: Iterable[DensePiece], threads: int) -> None:
        """All elements, each once."""
        for piece in pieces:
            place = piece.coords.view(self.find(piece.spec))
            place[...] = piece.bits.reshape(place.shape)
            self.digests[piece.spec] += digest_box(piece.spec, piece.bits, piece.coords, threads)

    def apply(self, changes: Iterable[Changes]) -> Digest:
        """Applies a patch's changes; returns what the digest gained."""
        gained = Digest()
        for item in changes:
            gain = apply_changes(item, self.find(item.spec), item.coords)[1]
            self.digests[item.spec] += gain
            gained += gain
        return gained

    def retable(self, table: Sequence[TensorSpec], whole: dict[str, DensePiece], threads: int) -> None:
        """Drops tensors that are gone, takes in those that came whole. Raises CorruptionError for one without bits."""
        bits: dict[TensorSpec, npt.NDArray[Any]] = {}
        digests: dict[TensorSpec, Digest] = {}
        for spec in table:
            piece = whole.get(spec.name)
            if piece is not None or (spec not in self.bits and not spec.elements):
                new = np.empty(0, spec.type.uint) if piece is None else np.array(piece.bits)
                bits[spec], digests[spec] = new, digest_tensor(spec, new, threads)
            else:
                bits[spec], digests[spec] = self.find(spec), self.digests[spec]
        self.bits, self.digests = bits, digests


def _mapped(table: Sequence[TensorSpec]) -> dict[TensorSpec, npt.NDArray[Any]]:
    """Room for the tensors in a file that has no name, so that the kernel may page it out."""
    sizes = [-(-spec.nbytes // _ALIGN) * _ALIGN for spec in table]
    with tempfile.TemporaryFile(prefix="weight_sync-verify-") as file:
        file.truncate(max(1, sum(sizes)))
        whole = np.memmap(file, np.uint8, "r+")
    ends = np.cumsum([0, *sizes])
    return {spec: whole[at : at + spec.nbytes].view(spec.type.uint) for spec, at in zip(table, ends, strict=False)}


def replay(
    history: History, versions: Sequence[Manifest], findings: Findings, progress: Callable[[int, int], None]
) -> None:
    """Rebuilds the state of every version of the history's view; faults and gaps go to the findings.

    After a fault the walk goes on at the next full state.
    """
    state: _State | None = None
    at: int | None = None
    skipped: list[int] = []
    for done, manifest in enumerate(versions):
        number = manifest.number
        if findings.bad(number) or not any(view.name == history.view for view in manifest.views):
            state = None
        else:
            try:
                continues = manifest.HasField("parent") and manifest.parent == at
                state = _next_state(history, manifest, state if continues else None)
                if state is not None:
                    _compare(state, view_of(manifest, history.view))
            except VersionMissingError as error:
                findings.notes.append(f"version {number}: {error}")  # the base is elsewhere; nothing is wrong with it
                state = None
            except WeightSyncError as error:
                blame(history.end, findings, number, None, error)
                state = None
            if state is None:
                skipped.append(number)
            else:
                findings.replayed.setdefault(history.view or "", []).append(number)
        at = number
        progress(done + 1, len(versions))
    if skipped:
        findings.notes.append(f"view {history.view}: not replayed: {', '.join(map(str, skipped))}")


def _next_state(history: History, manifest: Manifest, before: _State | None) -> _State | None:
    """The version's state from the one before it, or from its own full state; None when there is neither."""
    number, view = manifest.number, view_of(manifest, history.view)
    table = table_of(view)
    if before is None:
        if manifest.kind != rules.ANCHOR:
            return None
        state = _State(table)
        state.fill(history.full(number), history.threads)
        return state
    changes = history.changes(number)
    whole = assemble(history.pieces(number, anchor=False))
    compact = _compact_gain(history, view, manifest, before)
    gained = before.apply(changes)
    if compact is not None and compact != gained:
        raise CorruptionError("compact and step form of the patch lead to different states", field=history.view,
                              found=compact.hex(), expected=gained.hex(), do="do not trust this store")  # fmt: skip
    before.retable(table, whole, history.threads)
    if any(ref.form == common_pb2.FORM_RAW for ref in view.shards):
        _compare_full(history, manifest, view)
    return before


def _compact_gain(
    history: History, view: manifest_pb2.ViewManifest, manifest: Manifest, state: _State
) -> Digest | None:
    """What the digest gains by the patch's compact form, if it has one; ``state`` is that of the parent."""
    refs = [ref for ref in view.shards if ref.form == common_pb2.FORM_COMPACT]
    if not refs:
        return None

    def old(box: FrameBox) -> npt.NDArray[Any]:
        return np.ascontiguousarray(box.coords.view(state.find(box.spec)).reshape(-1))

    gained = Digest()
    for ref in refs:
        head = history.head(manifest, ref)
        for frame, (offset, length) in zip(head.index.frames, head.frame_spans, strict=True):
            for item in decode_frame(ref.form, frame, history.end.read(ref, offset, length), head.specs, old):
                gained += changed_digest(item, state.find(item.spec)[item.coords.indices(item.positions)])
    return gained


def _compare(state: _State, view: manifest_pb2.ViewManifest) -> None:
    """Raises DigestMismatchError that names the first tensors which came out otherwise."""
    wrong = [entry.spec.name for entry in view.tensors
             if state.digests[TensorSpec.from_proto(entry.spec)] != Digest.from_proto(entry.digest)]  # fmt: skip
    found, expected = Digest.sum(state.digests.values()), Digest.from_proto(view.digest)
    if wrong or found != expected:
        raise DigestMismatchError(
            f"the state that was rebuilt has other bits in {len(wrong)} tensors", field=", ".join(wrong[:3]),
            found=found.hex(), expected=expected.hex(), do="do not use this version; publish a full state",
        )  # fmt: skip


def _compare_full(history: History, manifest: Manifest, view: manifest_pb2.ViewManifest) -> None:
    """An anchor that has a patch as well: its full state is the same state. Raises DigestMismatchError."""
    found = Digest.sum(header_digest(spec) for spec in table_of(view))
    for piece in history.pieces(manifest.number, anchor=True):
        found += digest_box(piece.spec, piece.bits, piece.coords, history.threads)
    expected = Digest.from_proto(view.digest)
    if found != expected:
        raise DigestMismatchError("the full state is not the version's", field=view.name, found=found.hex(),
                                  expected=expected.hex(), do="publish another anchor")  # fmt: skip
