"""The weights of one rank of an engine: learnt, then taken from version to version and back.

Owns what is written in place and what is reloaded from copies, and the order of commit and reload. Owns no call
(core.py) and no engine (the host).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from weight_sync.adapters.engines.inplace import InPlaceStore
from weight_sync.adapters.engines.worker.copies import PREFIX, Copies, owner_of, spread
from weight_sync.adapters.engines.worker.staging import read_staged
from weight_sync.adapters.engines.worker.twin import learn_loader, meta_twin, named_tensors, same_shape
from weight_sync.adapters.engines.worker.wire import Reply, encode_digests
from weight_sync.checkpoint import Checkpoint
from weight_sync.codec.digest import Digest, digest_box
from weight_sync.config import crash_point
from weight_sync.errors import EngineError, EngineInDoubtError, WeightSyncError
from weight_sync.layout.placement import Layout
from weight_sync.layout.storage import flat_storage
from weight_sync.ports import DensePiece, Update
from weight_sync.proto.v1 import common_pb2, manifest_pb2
from weight_sync.push import LAND, Placed

__all__ = ["Host", "Rank"]


class Host(Protocol):
    """What an engine tells about one rank of it."""

    rank: int
    world_size: int

    def model(self) -> torch.nn.Module:
        """The model that serves."""

    def load(self, model: torch.nn.Module, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Feeds checkpoint tensors to the loader of ``model``, which may be a twin."""

    def originals(self, module: torch.nn.Module) -> Mapping[str, torch.Tensor]:
        """Its parameters as they were when it was loaded, on meta; {} where they are as they were."""

    def packed(self, module: torch.nn.Module) -> str:
        """Why the module computes with something else than its parameters; "" when it does not."""

    def reload(self, modules: Iterable[torch.nn.Module], tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Loads these modules anew, as after a start. Called inside a fence."""

    def checkpoint(self) -> Path | None:
        """The folder that this process loaded its weights from; None when it did not, or is not here."""

    def facts(self) -> dict[str, str]:
        """What the engine says about itself: version, dtype, parallel sizes, attention backend."""


class Rank:
    """What one rank holds, and where it is with one update.

    Attributes:
        layout: of the parameters that are written in place and of the copies.
        reasons: by tensor that is reloaded from a copy, why.
        phase: "idle", "staged", "committed" or "undone".
        token: of the update that ``phase`` speaks of.
    """

    def __init__(self, host: Host, base: str | None, threads: int) -> None:
        """Learns. ``base``: a checkpoint with the engine's names and shapes, for a host that has none.

        Raises EngineError without any checkpoint, LayoutError when the loader does not take it.
        """
        self._host, self._threads = host, threads
        self.phase, self.token = "idle", ""
        self._copies = Copies()
        self._touched: frozenset[str] = frozenset()
        loaded = host.checkpoint()
        self._loaded = None if loaded is None else Checkpoint(loaded)
        source = self._loaded or (None if base is None else Checkpoint(base))
        if source is None:
            raise EngineError("the engine's checkpoint is not here", field="base",
                              do="set base to a folder of that checkpoint")  # fmt: skip
        twin = meta_twin(host.model(), host.originals)
        self._found = learn_loader(host.load, twin, source.table)
        self._packed = _packed(host, twin, self._found)
        self._place()
        if self._loaded is not None:
            self._check_bits()

    def _place(self) -> None:
        """Splits the layout into what is written in place and what is reloaded from copies."""
        _, self.reasons = spread(self._found, self._packed)
        self.layout = self._copies.redirect(self._found, self.reasons)
        self._copies.fill(self.layout, self._loaded)
        self._make_store()

    def _make_store(self) -> None:
        self._store = InPlaceStore(self.layout, self._storages, threads=self._threads, partial=True)

    def _storages(self) -> dict[str, torch.Tensor]:
        """All storages as they lie now."""
        tensors = named_tensors(self._host.model())
        own = {key: flat_storage(tensors[key]) for key in self.layout.storages if key in tensors}
        return {**own, **self._copies.storages()}

    def _check_bits(self) -> None:
        """Parameters of the right shape whose bits are not the checkpoint's were packed in place, or changed since.

        Nobody can tell which: they are reloaded from copies, and what the engine holds is unknown until a full version
        was loaded.
        """
        assert self._loaded is not None
        self._store.audit()
        wrong = {}
        for item in self.layout.placements:
            if item.storage.startswith(PREFIX):
                continue
            spec, bits = self.layout.by_name[item.tensor], self._loaded.bits(item.tensor)
            boxes = self.layout.coverage(item.tensor)
            expected = Digest.sum(digest_box(spec, box.view(bits).reshape(-1), box, self._threads) for box in boxes)
            if self._store.parts[item.tensor] != expected:
                wrong[owner_of(item.storage)] = "its bits are not the checkpoint's"
        if wrong:
            self._packed |= wrong
            self._place()
            self._copies.known = False

    def adopt(self, names: Iterable[str]) -> None:
        """Holds these tensors whole, in copies that no module is loaded from."""
        new = [name for name in names if name not in self._copies.flats]
        if new:
            self.layout = self._copies.redirect(self.layout, (), new)
            self._copies.fill(self.layout.restrict(new), self._loaded)
            self._make_store()

    def audit(self) -> bool:
        """Recomputes the digests of what is held; False when copies may not be what the engine computes with."""
        self._store.audit()
        return self._copies.known

    def told(self, known: bool) -> Reply:
        """Digests by tensor held, in the order of the summary; none while they are not known."""
        held = [spec.name for spec in self.layout.tensors if spec.elements and spec.name in self.layout.by_tensor]
        parts = encode_digests(self._store.parts[name] for name in held) if known else None
        return {"digests": parts, "phase": self.phase, "token": self.token}

    # --- one update ---

    def placed(self) -> Placed:
        """Where versions may be written."""
        return Placed(self.layout, self._storages)

    def stage_landed(
        self, target: bytes, token: str, pieces: Callable[[], Iterator[DensePiece]], keep_undo: bool, direct: bool
    ) -> None:
        """As `stage`, of a full version that lies in this rank's receiver; ``direct``: that will lie in place."""
        version = common_pb2.VersionId.FromString(target)
        extra: dict[str, Any] = {LAND: lambda: None} if direct else {}
        table = self.layout.tensors
        update = Update(version, Digest(), table, (), pieces, (), True, manifest_pb2.VersionManifest(), extra)
        self._prepare(update, token, keep_undo)

    def stage(self, folder: str, token: str, keep_undo: bool) -> None:
        """Prepares while the engine serves; drops the undo log. Raises EngineError, FormatError; nothing has changed."""
        self.phase, self.token = "idle", token
        self._prepare(read_staged(folder), token, keep_undo)

    def _prepare(self, update: Update, token: str, keep_undo: bool) -> None:
        self.phase, self.token = "idle", token
        if not self._copies.known and not update.full:
            raise EngineInDoubtError("the weights in place are not known", do="sync again: it loads a full state")
        self._store.stage(update, keep_undo=keep_undo and self._copies.known)
        self._touched = self._copied(update)
        self.phase = "staged"
        crash_point("rank:staged")

    def _copied(self, update: Update) -> frozenset[str]:
        """The tensors of an update that modules are reloaded from."""
        if update.full:
            return frozenset(self.reasons)
        names = {item.spec.name for item in update.changes} | {piece.spec.name for piece in update.dense()}
        return frozenset(names & self.reasons.keys())

    def commit(self, token: str) -> None:
        """Writes what is staged. Raises EngineError after having restored the old bits, EngineInDoubtError."""
        if self.phase != "staged" or token != self.token:
            raise EngineError("nothing is staged", field="token", found=self.token, expected=token,
                              do="call stage first")  # fmt: skip
        self.phase = "idle"
        crash_point("rank:committing")
        self._store.commit()
        try:
            self._reload()
        except Exception as error:
            self._undo(error)
            raise EngineError("the engine's reload failed, the old bits are back", found=str(error)) from error
        self._copies.known = True
        self.phase = "committed"
        crash_point("rank:committed")

    def _reload(self) -> None:
        """Loads the modules anew that hold what was touched."""
        if not self._touched:
            return
        owners = {owner_of(item.storage) for item in self._found.placements if item.tensor in self._touched}
        names = {item.tensor for item in self._found.placements if owner_of(item.storage) in owners}
        modules = dict(self._host.model().named_modules())
        order = [spec.name for spec in self.layout.tensors if spec.name in names]
        self._host.reload([modules[name] for name in sorted(owners)], self._copies.tensors(self.layout, order))

    def _undo(self, cause: Exception) -> None:
        try:
            self._store.rollback()
            self._reload()
        except WeightSyncError:
            self._copies.known = False
            raise
        except Exception as error:
            self._copies.known = False
            raise EngineInDoubtError("the old weights could not be loaded again", found=str(error),
                                     do="sync again: it rebuilds from a full state") from cause  # fmt: skip

    def rollback(self, token: str) -> None:
        """Back to before the commit, if it was made; else there is nothing to do. May be called again.

        Raises EngineInDoubtError when the old bits are gone.
        """
        if self.phase in ("committed", "undone") and token == self.token:
            self.phase = "undone"
            self._undo(EngineError("rolled back"))


def _packed(host: Host, twin: torch.nn.Module, found: Layout) -> dict[str, str]:
    """Modules whose parameters are not what they compute with, or do not hold the checkpoint's bits, and why."""
    loaded, now = named_tensors(twin), named_tensors(host.model())
    sharing: dict[int, list[torch.nn.Module]] = {}  # a tied parameter is packed when any module that has it packs it
    for module in host.model().modules():
        for parameter in module.parameters(recurse=False):
            sharing.setdefault(id(parameter), []).append(module)
    modules = dict(host.model().named_modules())
    out: dict[str, str] = {}
    for item in found.placements:
        path = owner_of(item.storage)
        if path in out:
            continue
        real = now.get(item.storage)
        users = [modules[path], *sharing.get(id(real), ())]
        if reason := next(filter(None, map(host.packed, users)), ""):
            out[path] = reason
        elif not same_shape(loaded[item.storage], real):
            out[path] = f"{item.storage} was replaced after loading"
        elif item.casts and (item.casts, found.storages[item.storage].dtype) != (("BF16",), "F32"):
            out[path] = f"{item.storage} holds a cast of the checkpoint's bits"
    return out
