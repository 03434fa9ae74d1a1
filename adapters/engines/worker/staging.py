"""A decoded version as files that all ranks of a host map, each reading what it holds.

Owns the folder, its bounds and its form. Owns no decoding and no engine. The folder holds safetensors containers, so
any tool can open them; ``index.json`` is written last and lists what is in which file. Shared memory is taken when the
version fits well, else the folder given.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from weight_sync.adapters.engines.worker.wire import decode_table, encode_table
from weight_sync.checkpoint import Checkpoint, write_safetensors
from weight_sync.codec.digest import Digest
from weight_sync.errors import EngineError, FormatError
from weight_sync.layout.box import Box
from weight_sync.ports import Changes, DensePiece, Update
from weight_sync.proto.v1 import common_pb2, manifest_pb2
from weight_sync.tensors import TensorSpec

__all__ = ["Staging", "read_staged"]

_FORMAT = 1
_BATCH = 256 << 20  # bytes of whole tensors in one file, and in memory
_SHARED = Path("/dev/shm")
_SHARE = 0.5  # of the free shared memory that one version may take
_INDEX = "index.json"


class Staging:
    """Writes one version at a time; the one before is removed.

    Args:
        folder: for versions that do not fit into shared memory; None leaves only that.
        limit: most bytes of one version in shared memory.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, limit: int) -> None:
        self._folder, self._limit = None if folder is None else Path(folder), limit
        self._owner = f"weight_sync-{os.getuid()}-{uuid.uuid4().hex[:12]}"
        self._current: Path | None = None

    def write(self, update: Update) -> Path:
        """The folder of the version. Raises EngineError when there is no room, and what reading the update raises."""
        self.drop()
        changed = sum(item.positions.nbytes + _values(item).nbytes for item in update.changes)
        whole = sum(spec.nbytes for spec in update.tensors) if update.full else 0
        folder = self._current = self._room(changed + whole)
        try:
            entries = _write_changes(folder, update.changes)
            entries += _write_dense(folder, update.dense())
            index = {
                "format": _FORMAT,
                "run_id": update.target.run_id,
                "number": update.target.number,
                "digest": update.digest.hex(),
                "full": update.full,
                "tensors": encode_table(update.tensors),
                "entries": entries,
            }
            (folder / _INDEX).write_text(json.dumps(index, ensure_ascii=False), encoding="utf-8")
        except BaseException as error:
            self.drop()
            if isinstance(error, OSError):
                raise EngineError("the version cannot be laid out for the engine", field=str(folder), found=str(error),
                                  do="make room there, or set cache_dir") from error  # fmt: skip
            raise
        return folder

    def drop(self) -> None:
        """Removes what is there. Ranks that still map it keep it until they let go."""
        folder, self._current = self._current, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):  # other versions of this process may lie there
                folder.parent.rmdir()

    def _room(self, size: int) -> Path:
        places = [(_SHARED, min(self._limit, int(_free(_SHARED) * _SHARE)))]
        if self._folder is not None:
            places.append((self._folder, _free(self._folder)))
        for place, free in places:
            if size <= free:
                folder = place / self._owner / uuid.uuid4().hex[:12]
                folder.mkdir(parents=True, mode=0o700)
                return folder
        raise EngineError("no room to lay out the version for the engine", field="cache_dir", found=dict(places),
                          expected=f"{size} bytes", do="set cache_dir to a folder with room")  # fmt: skip


def _free(place: Path) -> int:
    """Bytes; 0 where there is no such folder."""
    try:
        place.mkdir(parents=True, exist_ok=True)
        return shutil.disk_usage(place).free
    except OSError:
        return 0


def _values(item: Changes) -> npt.NDArray[Any]:
    values = item.bits if item.steps is None else item.steps
    assert values is not None
    return values


_UINTS = {1: "U8", 2: "U16", 4: "U32", 8: "U64"}


def _array(name: str, values: npt.NDArray[Any]) -> tuple[TensorSpec, npt.NDArray[Any]]:
    """As a tensor of unsigned integers."""
    return TensorSpec(name, _UINTS[values.dtype.itemsize], values.shape), values


def _entry(kind: str, file: str, key: str, spec: TensorSpec, box: Box) -> dict[str, Any]:
    return {"kind": kind, "file": file, "key": key, "tensor": spec.name,
            "box": [box.offset, list(box.sizes), list(box.strides)]}  # fmt: skip


def _write_changes(folder: Path, changes: Sequence[Changes]) -> list[dict[str, Any]]:
    entries, arrays = [], []
    for number, item in enumerate(changes):
        kind = "bits" if item.steps is None else "steps"
        entries.append(_entry(kind, "changes.safetensors", str(number), item.spec, item.coords))
        arrays += [_array(f"{number}.positions", item.positions), _array(f"{number}.values", _values(item))]
    if arrays:
        write_safetensors(folder / "changes.safetensors", arrays)
    return entries


def _write_dense(folder: Path, pieces: Iterator[DensePiece]) -> list[dict[str, Any]]:
    """In files of about _BATCH bytes, so that memory is bounded whatever the model's size."""
    entries: list[dict[str, Any]] = []
    batch: list[tuple[TensorSpec, npt.NDArray[Any]]] = []
    files = 0

    def flush() -> None:
        nonlocal files
        if batch:
            write_safetensors(folder / f"dense-{files}.safetensors", batch)
            batch.clear()
            files += 1

    size = 0
    for number, piece in enumerate(pieces):
        entries.append(_entry("dense", f"dense-{files}.safetensors", str(number), piece.spec, piece.coords))
        batch.append(_array(str(number), piece.bits))
        size += piece.bits.nbytes
        if size >= _BATCH:
            flush()
            size = 0
    flush()
    return entries


def read_staged(folder: str | os.PathLike[str]) -> Update:
    """A version laid out by `Staging`, mapped: its arrays are read when they are looked at.

    Raises FormatError when the folder is not one.
    """
    path = Path(folder)
    try:
        index = json.loads((path / _INDEX).read_text(encoding="utf-8"))
        if index["format"] != _FORMAT:
            raise FormatError("staged version of another format", field="format", found=index["format"],
                              expected=_FORMAT, do="install the same weight_sync on both sides")  # fmt: skip
        table = decode_table(index["tensors"])
        specs = {spec.name: spec for spec in table}
        files = {name: Checkpoint(path / name) for name in {entry["file"] for entry in index["entries"]}}
        rows = [(e["kind"], files[e["file"]], e["key"], specs[e["tensor"]], _box(e["box"])) for e in index["entries"]]
        target = common_pb2.VersionId(run_id=index["run_id"], number=index["number"])
        digest = Digest.parse(index["digest"])
        full = bool(index["full"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError("not a staged version", field=str(path), found=f"{type(error).__name__}: {error}",
                          do="stage it again") from error  # fmt: skip
    changes = [_changes(kind, file, key, spec, box) for kind, file, key, spec, box in rows if kind != "dense"]
    dense = [(file, key, spec, box) for kind, file, key, spec, box in rows if kind == "dense"]

    def pieces() -> Iterator[DensePiece]:
        for file, key, spec, box in dense:
            yield DensePiece(spec, box, file.bits(key))

    return Update(target, digest, table, changes, pieces, (), full, manifest_pb2.VersionManifest())


def _box(words: Any) -> Box:
    offset, sizes, strides = words
    return Box(int(offset), tuple(sizes), tuple(strides))


def _changes(kind: str, file: Checkpoint, key: str, spec: TensorSpec, box: Box) -> Changes:
    positions: npt.NDArray[np.uint32] = file.bits(f"{key}.positions")
    values = file.bits(f"{key}.values")
    if len(positions) != len(values) or positions.dtype != np.uint32 or values.dtype != spec.type.uint:
        raise FormatError("changes do not fit their tensor", field=spec.name, found=f"{len(positions)} positions, "
                          f"{len(values)} values of {values.dtype}", expected=str(spec.type.uint))  # fmt: skip
    return Changes(spec, box, positions, values if kind == "steps" else None, values if kind == "bits" else None)
