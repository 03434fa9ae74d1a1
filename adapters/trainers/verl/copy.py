"""One copy of the served weights per rollout host, however many rollout workers it has.

Owns who keeps the copy (the worker that holds the lock) and reading it. Owns no following (weight_sync.replica) and no
folder (weight_sync.mirror): the keeper follows the run into a folder, the others map its files.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weight_sync.checkpoint import Checkpoint
from weight_sync.config import Config, runtime_dir
from weight_sync.errors import VersionNotReadyError
from weight_sync.mirror import NOTE, Mirror
from weight_sync.registry import find
from weight_sync.replica import Replica

if TYPE_CHECKING:
    import torch

__all__ = ["HostCopy", "tensors_of"]


class HostCopy:
    """The run's weights in a folder of this host: in ``cache_dir``, else in memory (/dev/shm), else in a runtime folder."""

    def __init__(self, config: Config) -> None:
        self._config = config
        shared = Path(f"/dev/shm/weight_sync-{os.getuid()}") if Path("/dev/shm").is_dir() else runtime_dir()
        name = hashlib.blake2b(f"{config.uri}\0{config.view}".encode(), digest_size=8).hexdigest()
        home = Path(config.cache_dir) if config.cache_dir is not None else shared
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        if config.cache_dir is None:
            _sweep(home, f"verl-{name}")
        self.path = home / f"verl-{name}"
        self._lock = os.open(home / f"verl-{name}.keeper", os.O_RDWR | os.O_CREAT, 0o600)
        self._replica: Replica | None = None
        self._is_temporary = config.cache_dir is None
        atexit.register(self.close)

    @property
    def keeps(self) -> bool:
        """Whether this process is the one that follows the run."""
        return self._replica is not None

    def reach(self, run_id: str, version: int) -> Path:
        """The folder of a version at least as new; waits for it within ``timeout_s``.

        Raises VersionNotReadyError, and whatever following raises.
        """
        deadline = time.monotonic() + self._config.timeout_s
        while True:
            if self._elected():
                assert self._replica is not None
                self._replica.sync(min_version=version, timeout=max(0.0, deadline - time.monotonic()))
                return self.path.resolve()
            folder = self.path.resolve()
            if _holds(folder, run_id, version):
                return folder
            if time.monotonic() > deadline:
                raise VersionNotReadyError("the process that keeps this host's copy is behind", field="version",
                                           found=str(self.path), expected=version, do="look at the other workers")  # fmt: skip
            time.sleep(min(0.05, self._config.poll_s))

    def let_go(self, version: int) -> bool:
        """Closes a copy that is older than this version, so that a worker that wants the version may keep one; whether it
        did. Nobody reads an older one: whoever reads has waited for a newer one.
        """
        if self._replica is None or (self._replica.version is not None and self._replica.version >= version):
            return False
        self.close()
        return True

    def _elected(self) -> bool:
        """Takes over when nobody keeps the copy: at first, and when the keeper has died."""
        if self._replica is None:
            with suppress(BlockingIOError):  # another worker keeps it
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                engine: Any = find("engines", "checkpoint")
                self._replica = Replica.open(self._config, engine(self.path, base=self._config.base))
        return self._replica is not None

    def close(self) -> None:
        """Lets another worker keep the copy; one in memory goes with its keeper. May be called again."""
        if self._lock < 0:
            return
        if self._replica is not None:
            mirror: Mirror = self._replica.engine.mirror  # type: ignore[attr-defined]
            self._replica.close()
            if self._is_temporary:
                mirror.remove()
            self._replica.engine.close()
        os.close(self._lock)
        self._lock = -1


def _sweep(home: Path, own: str) -> None:
    """Removes copies of other runs whose keepers are gone: Ray kills workers at a job's end, before they could."""
    for lock in home.glob("verl-*.keeper"):
        if lock.stem == own:
            continue
        handle = os.open(lock, os.O_RDWR)
        try:
            with suppress(BlockingIOError):  # that job runs
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                (home / lock.stem).unlink(missing_ok=True)
                shutil.rmtree(home / f".{lock.stem}.weight_sync", ignore_errors=True)
        finally:
            os.close(handle)


def _holds(folder: Path, run_id: str, version: int) -> bool:
    try:
        note = json.loads((folder / NOTE).read_text())
        return bool(note["run_id"] == run_id and note["version"] >= version)
    except (OSError, ValueError, LookupError, TypeError):
        return False  # not there yet


def tensors_of(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a folder, each a copy of its own."""
    import torch

    checkpoint = Checkpoint(folder)
    for spec in checkpoint.table:
        bits = checkpoint.bits(spec.name)
        flat = torch.from_numpy(bits.copy().view("u1"))
        yield spec.name, flat.view(spec.type.torch).view(spec.shape)
