"""What this host has read of a store, kept on its disk, so that neither a second replica nor a restart reads it again.

Owns the folder, its quota and what goes first: folds, which can be made again from patches, then patches, which anchors
stand in for, then anchors. Owns no meaning of a byte: readers check what they get and say when it was bad. Processes of
one user may share a folder; two that ask for the same bytes at the same time may both read them.
"""

from __future__ import annotations

import os
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from blake3 import blake3

from weight_sync.config import Config
from weight_sync.layout.box import Regions
from weight_sync.ports import Folded, ReplicaEnd
from weight_sync.proto.v1 import common_pb2, manifest_pb2

__all__ = ["Kept", "keeping"]

_ORDER = ("fold", "patch", "anchor")  # who goes first
_HASH = 16  # bytes before the data: what a crash or the disk did to a file shows


def keeping(end: ReplicaEnd, config: Config) -> ReplicaEnd:
    """The end, which keeps what it reads in ``cache_dir``, where that is set and the store is not a folder here."""
    if config.cache_dir is None:
        return end
    return cast(ReplicaEnd, _KeepingEnd(end, Kept(Path(config.cache_dir) / "objects", config.cache_bytes)))


class Kept:
    """Files of bytes by kind and name, together below a limit. A disk that fails costs the keeping and nothing else."""

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder, self._limit = folder, limit

    def get(self, kind: str, name: str) -> memoryview | None:
        """The bytes; None when they are not here, or not as they were put."""
        path = self._folder / f"{kind}-{name}"
        try:
            data = memoryview(path.read_bytes())
            os.utime(path)  # it goes later
        except OSError:
            return None
        if blake3(data[_HASH:]).digest(_HASH) != data[:_HASH]:
            path.unlink(missing_ok=True)
            return None
        return data[_HASH:]

    def put(self, kind: str, name: str, data: memoryview) -> None:
        """Keeps the bytes, and drops others if there is no room. What is larger than the limit is not kept."""
        if _HASH + len(data) > self._limit:
            return
        making = self._folder / f".{uuid.uuid4().hex}"
        with suppress(OSError):  # a full or broken disk: the bytes were read all the same
            self._folder.mkdir(parents=True, exist_ok=True)
            try:
                with making.open("wb") as file:
                    file.write(blake3(data).digest(_HASH))
                    file.write(data)
                making.rename(self._folder / f"{kind}-{name}")
            finally:
                making.unlink(missing_ok=True)
            self._make_room(f"{kind}-{name}")

    def _make_room(self, newest: str) -> None:
        """By kind, then by when they were last used; what was just put goes last."""
        found = []
        for path in self._folder.iterdir():
            kind = path.name.partition("-")[0]
            with suppress(FileNotFoundError):  # another process made room
                stat = path.stat()
                rank = _ORDER.index(kind) if kind in _ORDER else -1  # left by a crash
                found.append((path.name == newest, rank, stat.st_mtime_ns, stat.st_size, path))
        over = sum(item[3] for item in found) - self._limit
        for *_, size, path in sorted(found):
            if over <= 0:
                break
            path.unlink(missing_ok=True)
            over -= size

    def drop(self, kind: str, prefix: str) -> None:
        """Removes all whose name begins so."""
        for path in self._folder.glob(f"{kind}-{prefix}*"):
            path.unlink(missing_ok=True)


class _KeepingEnd:
    """A replica's end: reads of shards and folds come from what is kept, all else is the end's own."""

    def __init__(self, end: ReplicaEnd, kept: Kept) -> None:
        self._end, self._kept = end, kept
        self._given = ""  # the fold that was given last

    def __getattr__(self, name: str) -> Any:
        return getattr(self._end, name)

    def read(self, ref: manifest_pb2.ShardRef, offset: int, length: int) -> memoryview:
        """As the end's."""
        if not ref.blake3 or self._end.local(ref) is not None:
            return self._end.read(ref, offset, length)
        kind, name = _kind(ref), f"{ref.blake3.hex()}-{offset}-{length}"
        data = self._kept.get(kind, name)
        if data is None:
            data = self._end.read(ref, offset, length)
            self._kept.put(kind, name, data)
        return data

    def fold(
        self, view: str, have: int, target: int, compact: bool = False, regions: Regions | None = None
    ) -> Folded | None:
        """As the end's; parts are not kept."""
        if regions is not None:
            return self._end.fold(view, have, target, compact, regions)
        name = f"{self._end.run_id()}-{view}-{have}-{target}{'-compact' if compact else ''}"
        data = self._kept.get("fold", name)
        self._given = name
        if data is not None:
            size = int.from_bytes(data[:4], "little")
            stored = manifest_pb2.ShardRef.FromString(bytes(data[4 : 4 + size])) if size else None
            return Folded(data[4 + size :], stored)
        found = self._end.fold(view, have, target, compact)
        if found is not None:
            head = b"" if found.stored is None else found.stored.SerializeToString()
            self._kept.put("fold", name, memoryview(b"".join([len(head).to_bytes(4, "little"), head, found.data])))
        return found

    def forget(self, ref: manifest_pb2.ShardRef | None) -> None:
        """What was read of a shard, or the last fold, was bad: the next read asks the store again."""
        if ref is None:
            self._kept.drop("fold", self._given)
        else:
            self._kept.drop(_kind(ref), ref.blake3.hex())


def _kind(ref: manifest_pb2.ShardRef) -> str:
    return "anchor" if ref.form == common_pb2.FORM_RAW else "patch"
