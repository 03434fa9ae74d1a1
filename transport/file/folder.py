"""What a folder needs beyond obstore: bytes on the disk before a name points at them.

Owns fsync, durable put-if-absent and replacement, and the names of files in the making. Owns no keys and no error
mapping: OSError goes up as it is. obstore's LocalStore links a new object into place without an fsync, so that a power
cut could leave an entry of the log visible and empty; entries are therefore written here, by the same steps (a file
in the making called ``name#n``, which obstore's listing hides, then a hard link) with the fsyncs in between.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

__all__ = ["create", "leftovers", "replace", "sync_file"]

_LEFTOVER = re.compile(r".+#[0-9]+")


def create(path: Path, data: bytes, root: Path) -> bool:
    """Writes ``path`` durably unless it exists, in which case False. Never shows part of it."""
    with _made(path, data) as making:
        try:
            os.link(making, path)
        except FileExistsError:
            return False
    _sync_folders(path.parent, root)
    return True


def replace(path: Path, data: bytes, root: Path) -> None:
    """Writes ``path`` durably over what may be there. Readers see the old bytes or the new ones."""
    with _made(path, data) as making:
        making.rename(path)
    _sync_folders(path.parent, root)


def sync_file(path: Path, root: Path) -> None:
    """Makes a file that obstore has written durable, and the folders that lead to it."""
    _sync(path)
    _sync_folders(path.parent, root)


def leftovers(root: Path) -> Iterator[tuple[Path, float]]:
    """Files in the making below ``root`` with the time of their last write (seconds, the file system's clock)."""
    for folder, _, names in os.walk(root):
        for name in names:
            if _LEFTOVER.fullmatch(name):
                path = Path(folder, name)
                with contextlib.suppress(FileNotFoundError):  # finished or swept meanwhile
                    yield path, path.stat().st_mtime


@contextlib.contextmanager
def _made(path: Path, data: bytes) -> Iterator[Path]:
    """A durable file with ``data`` beside ``path``, gone at the end unless it was renamed."""
    making = path.with_name(f"{path.name}#{secrets.randbits(63)}")
    try:
        with _opened(making) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield making
    finally:
        making.unlink(missing_ok=True)


def _opened(making: Path) -> BinaryIO:
    for _ in range(100):
        making.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # another process emptied the folder and removed it just then
            return open(making, "xb")
    raise FileNotFoundError(errno.ENOENT, "folder vanishes as soon as it is made", str(making.parent))


def _sync_folders(folder: Path, root: Path) -> None:
    # the chain up to the root's parent: any of these folders may be new, and is lost with its name
    for place in (folder, *folder.parents):
        if place == root.parent:
            with contextlib.suppress(PermissionError):  # not ours to read; only the name of a new root hangs on it
                _sync(place)
            break
        with contextlib.suppress(FileNotFoundError):  # a reader consumed the object and emptied the folder
            _sync(place)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
