"""One folder of weights in the making: fresh, or from the folder of the version before plus what changed.

Owns which file holds which tensor, the sharing of bytes between two folders, the writes through mappings, and the
digest of what was written. Owns no versions, no names of folders and no switch between them (mirror.py).

A file whose tensors did not change is a hard link to the old one. One whose tensors changed in place is cloned (shared
extents where the file system has them, else a copy) and patched through a mapping. One that gains, loses or reshapes a
tensor is written anew, its other tensors copied from mapping to mapping. Memory is that of one piece; mapped pages are
the kernel's to drop. Space is reserved before a mapping is written, for a full disk shows there only as a signal.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from weight_sync.checkpoint import Checkpoint, file_head, is_weights, plan_files, write_index
from weight_sync.codec.apply import apply_changes, write_dense
from weight_sync.codec.digest import Digest, digest_box, digest_tensor, header_digest
from weight_sync.codec.threads import ordered_map
from weight_sync.errors import CorruptionError, StoreError, StoreFullError, StoreReadOnlyError, WeightSyncError
from weight_sync.ports import Changes, DensePiece
from weight_sync.tensors import TensorSpec

__all__ = ["FolderWriter", "clone", "disk_faults", "link_other_files", "plan_folder", "sync_folder"]

_FICLONE = 0x40049409
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}


@contextmanager
def disk_faults(path: Path) -> Iterator[None]:
    """What the file system refuses, as StoreFullError, StoreReadOnlyError or StoreError that name the folder."""
    try:
        yield
    except WeightSyncError:  # a DeadlineError is an OSError, too
        raise
    except OSError as error:
        kind, do = StoreError, "look at the disk"
        if error.errno in _FULL:
            kind, do = StoreFullError, "make room; the folder is as it was"
        elif error.errno in _DENIED:
            kind, do = StoreReadOnlyError, "make the folder writable for this process"
        raise kind("the folder cannot be written", field=str(path), found=str(error), do=do) from error


def plan_folder(table: Sequence[TensorSpec], known: Mapping[str, str] | None) -> dict[str, list[TensorSpec]]:
    """Which file holds which tensor.

    Args:
        table: of the version, sorted by name.
        known: file names by tensor name, of the folder before or of the base; None to name the files as the hub does.

    A tensor stays in its file and a new one joins the last file, so that what did not change can be shared.
    """
    if not known:
        return plan_files(table)
    last = max(known.values())
    files: dict[str, list[TensorSpec]] = {}
    for spec in table:
        files.setdefault(known.get(spec.name, last), []).append(spec)
    return files or {last: []}


def clone(source: Path, target: Path) -> None:
    """A file of its own with the same bytes: shared extents where the file system has them, else a copy."""
    with source.open("rb") as old, target.open("xb") as new:
        try:
            fcntl.ioctl(new.fileno(), _FICLONE, old.fileno())
        except OSError:  # no such call here; the copy below reports what is really wrong
            shutil.copyfileobj(old, new, 1 << 20)
            return
        free, size = shutil.disk_usage(target.parent).free, os.fstat(old.fileno()).st_size
    if free < size:  # writing to shared extents takes room
        raise OSError(errno.ENOSPC, f"patching needs up to {size} bytes, {free} are free", str(target))


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links; cloning reports what is really wrong
        clone(source, target)


def link_other_files(source: Path, target: Path) -> None:
    """Configuration, tokenizer and the like from one folder of ours to the next; what is there already stays."""
    for item in sorted(source.iterdir()):
        if item.is_file() and not is_weights(item) and not (target / item.name).exists():
            _link(item, target / item.name)


def sync_folder(folder: Path) -> None:
    """Makes the folder and its own files durable; linked files are so already."""
    for item in folder.iterdir():
        if item.stat().st_nlink == 1:
            sync_path(item)
    sync_path(folder)


def sync_path(path: Path) -> None:
    """Makes one file, or one folder's list of names, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _same(a: TensorSpec, b: TensorSpec) -> bool:
    """Equal as a file's header tells it."""
    return (a.name, a.dtype, a.shape) == (b.name, b.dtype, b.shape)


class FolderWriter:
    """Writes one version's weights into an empty folder.

    Args:
        folder: exists and is empty.
        table: of the version, sorted by name.
        start: the folder to start from, written by this class, and its digest; None when every tensor comes whole.
        known: file names by tensor name, when there is no folder to start from.
        threads: that patch and compute digests.

    Attributes:
        digest: of what has been written, kept up from the bits read and written.
    """

    def __init__(
        self,
        folder: Path,
        table: Sequence[TensorSpec],
        start: tuple[Checkpoint, Digest] | None = None,
        known: Mapping[str, str] | None = None,
        threads: int = 1,
    ) -> None:
        self.folder, self.table, self.threads = folder, table, threads
        old, self.digest = start if start is not None else (None, Digest())
        self._old: Checkpoint | None = old
        if old is not None:
            known = {name: file.name for name, file in old.files.items()}
        self._files = plan_folder(table, known)
        self._places: dict[str, tuple[str, int]] = {}  # tensor: file, offset in bytes
        self._specs = {spec.name: spec for spec in table}
        self._maps: dict[str, np.memmap[Any, np.dtype[np.uint8]]] = {}
        self._missing: dict[str, int] = {}  # tensor without old bits: elements to come
        self._retire()
        before: dict[str, set[str]] = {}
        for name, path in old.files.items() if old is not None else ():
            before.setdefault(path.name, set()).add(name)
        for file, specs in self._files.items():
            self._prepare(file, specs, before.get(file, set()))

    def _kept(self, spec: TensorSpec) -> bool:
        """The old folder has this very tensor."""
        return self._old is not None and spec.name in self._old and _same(self._old.spec(spec.name), spec)

    def _retire(self) -> None:
        """The digest loses what the new table lacks and gains the headers of what it adds."""
        if self._old is not None:
            for spec in self._old.table:
                if spec.name not in self._specs or not _same(self._specs[spec.name], spec):
                    self.digest -= digest_tensor(spec, self._old.bits(spec.name), self.threads)
        for spec in self.table:
            if not self._kept(spec):
                self.digest += header_digest(spec)
                self._missing[spec.name] = spec.elements

    def _prepare(self, file: str, specs: Sequence[TensorSpec], before: set[str]) -> None:
        """Finds the places in a file that keeps its tensors (``before`` in the old folder), or makes the file."""
        if self._old is not None and before == {spec.name for spec in specs} and all(map(self._kept, specs)):
            self._places |= {name: (file, self._old.span(name)[0]) for name in before}
            return
        head, offsets = file_head(specs)
        with (self.folder / file).open("xb") as stream:
            stream.write(head)
            stream.flush()
            os.posix_fallocate(stream.fileno(), 0, len(head) + sum(spec.nbytes for spec in specs))
        self._places |= {name: (file, offset) for name, offset in offsets.items()}
        for spec in specs:
            if self._kept(spec):
                assert self._old is not None
                self._flat(spec)[...] = self._old.bits(spec.name)

    def _writable(self, file: str) -> npt.NDArray[np.uint8]:
        """The mapping of a file of our own, cloned from the old one at the first touch."""
        if file not in self._maps:
            path = self.folder / file
            if not path.exists():
                assert self._old is not None
                clone(self._old.path / file, path)
            self._maps[file] = np.memmap(path, np.uint8, "r+")
        return self._maps[file]

    def _flat(self, spec: TensorSpec) -> npt.NDArray[Any]:
        file, offset = self._places[spec.name]
        return self._writable(file)[offset : offset + spec.nbytes].view(spec.type.uint)

    def _check(self, spec: TensorSpec) -> None:
        if spec.name not in self._specs or not _same(self._specs[spec.name], spec):
            raise CorruptionError("data of a tensor that the version does not have", field=spec.name, found=spec,
                                  expected=self._specs.get(spec.name), do="verify the store")  # fmt: skip

    def put(self, piece: DensePiece) -> None:
        """Writes a dense piece. Raises CorruptionError for a foreign tensor, LayoutError when it does not fit."""
        self._check(piece.spec)
        flat = self._flat(piece.spec)
        if piece.spec.name not in self._missing:
            self.digest += write_dense(piece, flat, piece.coords, keep_old=False)[1]
            return
        place = piece.coords.view(flat)  # nothing was there, so there is nothing to subtract
        place[...] = piece.bits.reshape(place.shape)
        self.digest += digest_box(piece.spec, piece.bits, piece.coords, self.threads)
        self._missing[piece.spec.name] -= piece.coords.count

    def patch(self, changes: Sequence[Changes]) -> None:
        """Applies changes, after all dense pieces. Raises CorruptionError for a foreign tensor, LayoutError."""
        some = [item for item in changes if len(item.positions)]
        for item in some:
            self._check(item.spec)
            self._flat(item.spec)  # cloned here, by one thread

        def work(item: Changes) -> Digest:
            return apply_changes(item, self._flat(item.spec), item.coords)[1]

        self.digest += Digest.sum(ordered_map(work, some, self.threads))

    def finish(self) -> None:
        """Links what did not change, writes the index and drops the mappings. Raises CorruptionError on holes."""
        holes = [name for name, count in self._missing.items() if count]
        if holes:
            raise CorruptionError("pieces do not make up their tensor", field=holes[0],
                                  found=f"{len(holes)} such tensors", do="verify the store")  # fmt: skip
        for file in self._files:
            if not (self.folder / file).exists():
                assert self._old is not None
                _link(self._old.path / file, self.folder / file)
        write_index(self.folder, self._files)
        for mapping in self._maps.values():
            mapping.flush()
        self._maps.clear()
