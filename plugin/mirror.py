"""Mirror: a folder in Hugging Face checkpoint format that is kept at a version, for readers that only know folders. Of an
adapter: a folder in PEFT's format.

Owns the names of the version folders, the atomic switch between them, the way back, recognition after a crash, and
`materialize` for a folder of one version. Owns no bytes of weights (folder.py), no reading of a store (history.py), no
engine.

    <path>                          a relative symbolic link; what readers open
    .<name>.weight_sync/            beside it: the house of the versions
        lock                        held by the one process that keeps the mirror
        <run_id>-<number>/          a version: weights, configuration, tokenizer, and last of all weight_sync.json

The link is replaced by one rename, so ``path`` is one whole version at any moment. Whatever the link does not name is
a leftover after a crash and is swept. A reader that has opened a file keeps it. One that opens files one by one
resolves the link first: its folder stays until the version after the next is prepared.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from weight_sync.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS, base_facts, base_of_facts
from weight_sync.checkpoint import Checkpoint, copy_other_files
from weight_sync.codec.digest import Digest
from weight_sync.config import check_name, crash_point
from weight_sync.errors import ConfigError, DigestMismatchError, VersionMissingError, WrongBaseError
from weight_sync.folder import FolderWriter, disk_faults, link_other_files, sync_folder, sync_path
from weight_sync.history import History
from weight_sync.ports import Update
from weight_sync.proto.v1 import manifest_pb2

__all__ = ["NOTE", "Kept", "Mirror", "materialize"]

NOTE = "weight_sync.json"
_FORMAT = 1


@dataclass(frozen=True)
class Kept:
    """One version's folder.

    Attributes:
        folder: a real directory.
        run_id, number: the version.
        view: name of the view.
        digest: of the bits in the folder, as they were written.
        adapter: of an adapter: the base that it is for; its configuration is a file of the folder.
    """

    folder: Path
    run_id: str
    number: int
    view: str
    digest: Digest
    adapter: manifest_pb2.Adapter | None = None


class _House:
    """The folder beside ``path`` in which versions are made; locked while it is open."""

    def __init__(self, path: Path) -> None:
        self.path = path.parent / f".{path.name}.weight_sync"
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.read(self._lock, 32).decode("ascii", "replace")
            os.close(self._lock)
            raise ConfigError("another process keeps this folder", field=str(path), found=f"process {owner}",
                              do="stop it, or give another path") from error  # fmt: skip
        os.truncate(self._lock, 0)
        os.write(self._lock, str(os.getpid()).encode("ascii"))

    def room(self, run_id: str, number: int) -> Path:
        """A new, empty folder for a version; a rebuild of a version that is there gets a name of its own."""
        name = f"{check_name('run_id', run_id)}-{number}"
        for k in range(1000):
            folder = self.path / (f"{name}.{k}" if k else name)
            with suppress(FileExistsError):  # the next name then
                folder.mkdir()
                return folder
        raise ConfigError("the house of the mirror is full", field=str(self.path), do="remove it and the link")

    def sweep(self, keep: tuple[Path | None, ...]) -> None:
        """Removes all but ``keep``. What cannot go now (a network file system holds open files) goes the next time."""
        for item in self.path.iterdir():
            if item in keep or item.name == "lock":
                continue
            if item.is_dir() and not item.is_symlink():
                shutil.rmtree(item, ignore_errors=True)
            else:
                with suppress(OSError):  # tried again by the next sweep
                    item.unlink()

    def close(self) -> None:
        """Gives up the lock; may be called again."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def remove(self) -> None:
        """Removes the house and gives up the lock."""
        self.sweep(())
        (self.path / "lock").unlink(missing_ok=True)
        with suppress(OSError):  # what could not be swept stays, and is swept when the path is used again
            self.path.rmdir()
        self.close()


def _absolute(path: str | os.PathLike[str]) -> Path:
    """The path without following its last link."""
    full = Path(os.path.abspath(path))
    if not full.name:
        raise ConfigError("not a folder that can be made", field="path", found=str(path))
    return full


def _check_free(path: Path) -> None:
    """Raises ConfigError unless the path is absent or an empty directory."""
    if path.is_symlink():
        raise ConfigError("path is a link to something else", field=str(path), found=os.readlink(path),
                          do="remove the link, or give another path")  # fmt: skip
    if path.is_dir():
        if next(path.iterdir(), None) is not None:
            raise ConfigError("folder is not empty", field=str(path), found=f"{sum(1 for _ in path.iterdir())} entries",
                              expected="no such folder, or an empty one",
                              do="move it away, or give another path; nothing in it was touched")  # fmt: skip
    elif path.exists():
        raise ConfigError("path is a file", field=str(path), do="remove it, or give another path")


def _view_name(update: Update) -> str:
    """The view whose state the update leads to."""
    wanted = update.digest.to_proto()
    return next((view.name for view in update.manifest.views if view.digest == wanted), "")


def _write_note(kept: Kept, step: int | None) -> None:
    """The last file of a folder: with it, the folder is a version."""
    note: dict[str, Any] = {
        "format": _FORMAT, "run_id": kept.run_id, "version": kept.number, "view": kept.view,
        "digest": kept.digest.hex(), "step": step,
    }  # fmt: skip
    if kept.adapter is not None:
        note["base"] = base_facts(kept.adapter)
    text = json.dumps(note, indent=2)
    making = kept.folder / f".{NOTE}"
    making.write_text(text + "\n", encoding="utf-8")
    sync_path(making)
    os.replace(making, kept.folder / NOTE)
    sync_path(kept.folder)


def _read_note(folder: Path) -> Kept | None:
    """What the folder says it is; None when it does not say so as we would."""
    try:
        note = json.loads((folder / NOTE).read_text(encoding="utf-8"))
        if note["format"] != _FORMAT:
            return None
        adapter = base_of_facts(note["base"]) if "base" in note else None
        return Kept(folder, check_name("run_id", note["run_id"]), int(note["version"]), str(note["view"]),
                    Digest.parse(note["digest"]), adapter)  # fmt: skip
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _write(folder: Path, update: Update, old: Kept | None, config_from: Path | None, threads: int,
           progress: Callable[[int, int], None] | None = None) -> Kept:  # fmt: skip
    """Fills an empty folder with the version that the update leads to, from ``old``'s bits unless it is full."""
    start = None if old is None else (Checkpoint(old.folder), old.digest)
    if update.manifest.HasField("adapter"):  # a folder of PEFT's: the base's files are not part of it
        config_from = None
        (folder / ADAPTER_CONFIG).write_text(update.manifest.adapter.config, encoding="utf-8")
        known: dict[str, str] | None = {spec.name: ADAPTER_WEIGHTS for spec in update.tensors}
    else:
        known = _base_files(config_from) if old is None else None
    writer = FolderWriter(folder, update.tensors, start, known, threads)
    total, done = sum(spec.nbytes for spec in update.tensors), 0
    for piece in update.dense():
        writer.put(piece)
        done += piece.bits.nbytes
        if progress is not None:
            progress(done, max(done, total))
    writer.patch(update.changes)
    writer.finish()
    if old is not None:
        link_other_files(old.folder, folder)
    elif config_from is not None:
        copy_other_files(config_from, folder)
    (folder / NOTE).unlink(missing_ok=True)  # what the folder that they came from says about itself
    sync_folder(folder)
    crash_point("mirror:written")
    adapter = update.manifest.adapter if update.manifest.HasField("adapter") else None
    kept = Kept(folder, update.target.run_id, update.target.number, _view_name(update), writer.digest, adapter)
    _write_note(kept, update.manifest.step if update.manifest.HasField("step") else None)
    return kept


def _base_files(folder: Path | None) -> dict[str, str] | None:
    """File names of the base's tensors; None when the folder has none."""
    if folder is None or (folder.is_dir() and not any(folder.glob("*.safetensors"))):
        return None
    return {name: file.name for name, file in Checkpoint(folder).files.items()}


class Mirror:
    """Keeps ``path`` at a version. A context manager. Not thread-safe.

    Args:
        path: becomes a symbolic link. Absent, an empty directory, or a mirror's link of before.
        config_from: folder of configuration and tokenizer files, and of the names of the weight files.
        threads: that patch and compute digests.

    Attributes:
        current: the version that ``path`` names; None before the first, and when the folder does not tell.
        previous: the one before, for `rollback`; None once the next is being prepared.
        staged: prepared and not yet switched to.

    Raises ConfigError for a path that is taken, StoreError when the folder cannot be made.
    """

    def __init__(
        self, path: str | os.PathLike[str], config_from: str | os.PathLike[str] | None = None, threads: int = 1
    ) -> None:
        self.path = _absolute(path)
        self.threads = threads
        self._config_from = None if config_from is None else Path(config_from)
        if self._config_from is not None and not self._config_from.exists():
            raise ConfigError("no such folder", field="base", found=str(config_from), do="name a checkpoint folder")
        with disk_faults(self.path):
            self._read_link()  # before anything is made beside a path that is not ours
            self._house = _House(self.path)
            try:
                self._linked = self._read_link()  # whoever held the lock until now may have switched
                self._house.sweep((self._linked,))
            except BaseException:
                self._house.close()
                raise
        self.current = None if self._linked is None else _read_note(self._linked)
        self.previous: Kept | None = None
        self.staged: Kept | None = None

    def _read_link(self) -> Path | None:
        """The folder that our link names; None when there is none. Raises ConfigError when something else is there."""
        house = f".{self.path.name}.weight_sync"
        if self.path.is_symlink():
            first, _, name = os.readlink(self.path).partition("/")
            if first == house and name and "/" not in name and name != "..":
                return self.path.parent / house / name
        _check_free(self.path)
        return None

    # --- a version ---

    def next(self, update: Update) -> Kept:
        """Prepares a version beside the one that is current; the version before that one goes.

        Returns its folder and the digest of what was written, which the caller compares. Raises WrongBaseError when
        the update needs a version and there is none, StoreError when the disk fails, and whatever reading the update
        raises; ``path`` is as it was then.
        """
        if not update.full and self.current is None:
            raise WrongBaseError("the mirror holds no version that a patch could change", field=str(self.path),
                                 do="start from a full state")  # fmt: skip
        self.discard()
        try:
            with disk_faults(self.path):
                folder = self._house.room(update.target.run_id, update.target.number)
                old = None if update.full else self.current
                self.staged = _write(folder, update, old, self._config_from, self.threads)
        except BaseException:
            self.discard()
            raise
        return self.staged

    def discard(self) -> None:
        """Removes what is staged, and the version to go back to."""
        self.staged = self.previous = None
        with disk_faults(self.path):
            self._house.sweep((self._linked,))

    def switch(self) -> Kept:
        """``path`` names the staged version from now on. Raises StoreError; ``current`` tells which one it names."""
        assert self.staged is not None, "nothing is staged"
        return self._point(self.staged, self.current)

    def rollback(self) -> Kept:
        """``path`` names the version before again. Raises VersionMissingError when it is gone, StoreError."""
        if self.previous is None:
            raise VersionMissingError("there is no version to go back to", field=str(self.path),
                                      do="start from a full state")  # fmt: skip
        return self._point(self.previous, None)

    def _point(self, kept: Kept, previous: Kept | None) -> Kept:
        link = self._house.path / "link"
        with disk_faults(self.path):
            link.unlink(missing_ok=True)
            os.symlink(f"{self._house.path.name}/{kept.folder.name}", link)
            if self.path.is_dir() and not self.path.is_symlink():
                self.path.rmdir()  # empty, or it fails
            os.replace(link, self.path)
            self._linked, self.current, self.previous, self.staged = kept.folder, kept, previous, None
            sync_path(self.path.parent)
        crash_point("mirror:switched")
        return kept

    def rename(self, run_id: str, number: int) -> None:
        """The current folder is this version from now on, whose bits are the same. Raises StoreError."""
        kept = self.current
        if kept is not None and (kept.run_id, kept.number) != (run_id, number):
            self.current = replace(kept, run_id=run_id, number=number)
            with disk_faults(self.path):
                _write_note(self.current, None)

    def audit(self) -> Digest:
        """Recomputes the digest of the current version from its files.

        Raises VersionMissingError when there is none, InputError and CorruptionError when the files are broken.
        """
        if self.current is None:
            raise VersionMissingError("the mirror holds no version", field=str(self.path), do="start from a full state")
        with disk_faults(self.path):
            return Checkpoint(self.current.folder).digest(self.threads)

    def close(self) -> None:
        """Lets others keep the mirror. ``path`` stays what it is; leftovers are swept by the next one."""
        self._house.close()

    def remove(self) -> None:
        """Removes the link and every version, and lets others use the path."""
        with disk_faults(self.path):
            if self._linked is not None:
                self.path.unlink(missing_ok=True)
            self._linked = self.current = self.previous = self.staged = None
            self._house.remove()

    def __enter__(self) -> Mirror:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def materialize(
    history: History, number: int, out: str | os.PathLike[str], progress: Callable[[int, int], None] | None = None
) -> Kept:
    """Writes a version as a plain folder in Hugging Face format, with the base's other files when the base is here.

    Args:
        history: of the view to write.
        number: of the version.
        out: absent, or an empty directory; becomes a real directory by one rename, after its bits were read back.
        progress: called with (bytes written, bytes in all).

    Raises ConfigError when ``out`` is taken, VersionError, DigestMismatchError when the bits read back are not the
    version's, CorruptionError when the store's are not, StoreError.
    """
    path = _absolute(out)
    _check_free(path)
    update = history.update(None, number)
    base = history.resolve_base(None)
    config_from = None if base is None else Path(base)
    with disk_faults(path):
        house = _House(path)
        try:
            house.sweep(())
            room = house.room(update.target.run_id, number)
            kept = _write(room, update, None, config_from, history.threads, progress)
            found = Checkpoint(kept.folder).digest(history.threads)
            if found != update.digest:
                raise DigestMismatchError(
                    f"version {number} came out with other bits",
                    field="digest",
                    found=found.hex(),
                    expected=update.digest.hex(),
                    do="verify the store",
                )
            _check_free(path)
            os.rename(kept.folder, path)
            sync_path(path.parent)
        finally:
            house.remove()
    return Kept(path, kept.run_id, kept.number, kept.view, kept.digest)
