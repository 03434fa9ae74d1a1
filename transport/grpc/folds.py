"""Objects that lead from one version to another: chosen from the store, or made and kept on disk.

Owns the choice and the files. Owns no merge (codec/fold.py) and no sending.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from weight_sync import version as rules
from weight_sync.codec.frame import encode_changes
from weight_sync.codec.shard import build_shard, identity
from weight_sync.errors import StoreError, StoreFullError, VersionError
from weight_sync.history import History, table_of, view_of
from weight_sync.ports import ReplicaEnd
from weight_sync.proto.v1 import common_pb2, manifest_pb2
from weight_sync.transport.grpc.blobs import FileBlob, Quota

__all__ = ["Choice", "Folds", "choose"]

_REMEMBERED = 64  # choices of stored shards
_LONGEST = 1000  # patches in one fold: a reader that is further behind takes an anchor, or patches


@dataclass(frozen=True)
class Choice:
    """What a reader gets that asked for a fold.

    Attributes:
        patches: versions to fold; empty: there is no fold for it.
        stored: the one shard that does it already.
        reason: for people.
    """

    patches: tuple[int, ...]
    stored: manifest_pb2.ShardRef | None
    reason: str


def choose(path: rules.Path | rules.NoPath, view: manifest_pb2.ViewManifest) -> Choice:
    """What to send for a way from one version to another. Pure.

    Args:
        path: the cheapest way by the log, of a reader that cannot resolve an anchor by reference.
        view: of the version at its end.
    """
    if isinstance(path, rules.NoPath):
        return Choice((), None, path.reason)
    if path.anchor is not None or not path.patches:
        return Choice((), None, f"not by patches: {path.reason}")
    if len(path.patches) > _LONGEST:
        return Choice((), None, f"{len(path.patches)} patches are too many for one fold")
    shards = [ref for ref in view.shards if ref.form == common_pb2.FORM_STEP]
    if len(path.patches) == 1 and len(shards) == 1:
        return Choice(path.patches, shards[0], "the patch itself")
    return Choice(path.patches, None, path.reason)


class Folds:
    """Folds of all runs; one is made at a time, each once. On the service's loop."""

    def __init__(self, quota: Quota, pool: ThreadPoolExecutor, threads: int) -> None:
        self._quota = quota
        self._pool = pool
        self._threads = threads
        self._maker = ThreadPoolExecutor(1, "weight_sync-fold")
        self._making: dict[str, asyncio.Task[Choice]] = {}
        self._stored: dict[str, Choice] = {}
        self.made = 0

    async def get(
        self, end: Callable[[], ReplicaEnd], run_id: str, view: str, have: int, target: int
    ) -> tuple[Choice, FileBlob | None]:
        """What to send; the blob is None when it is a stored shard, or nothing.

        ``end`` opens a reading end of the run that the maker has for itself.
        """
        name = f"{run_id}-fold-{view}-{have}-{target}.safetensors"
        if name in self._stored:  # the parts of one read come one after the other, and so do a fleet's
            return self._stored[name], None
        task = self._making.get(name)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._make(end, name, view, have, target))
            self._making[name] = task
            task.add_done_callback(lambda _: self._making.pop(name, None))
        choice = await asyncio.shield(task)
        if choice.stored is not None:
            self._stored[name] = choice
            while len(self._stored) > _REMEMBERED:
                del self._stored[next(iter(self._stored))]
        if choice.stored is not None or not choice.patches:
            return choice, None
        path = self._quota.folder / name
        self._quota.take(name, path.stat().st_size)
        return choice, FileBlob(path, self._pool, lambda: self._quota.free(name))

    async def _make(self, end: Callable[[], ReplicaEnd], name: str, view: str, have: int, target: int) -> Choice:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._maker, self._make_now, end, name, view, have, target)

    def _make_now(self, end: Callable[[], ReplicaEnd], name: str, view: str, have: int, target: int) -> Choice:
        reader = end()
        try:
            history = History(reader, view, self._threads)
            try:
                path = rules.plan(history.entry, have, target, by_reference=False)
                wanted = view_of(history.manifest(target), view)
            except VersionError as error:
                return Choice((), None, str(error))
            choice = choose(path, wanted)
            if choice.patches and choice.stored is None and not self._quota.holds(name):
                self._write(name, history, choice.patches, wanted)
            return choice
        finally:
            reader.close()

    def _write(self, name: str, history: History, patches: tuple[int, ...], view: manifest_pb2.ViewManifest) -> None:
        changes, whole = history.fold(patches, table_of(view))
        step = common_pb2.FORM_STEP
        run_id = history.manifest(patches[-1]).run_id
        shard = build_shard("fold", identity(run_id, patches[-1], 0, history.view, step),
                            list(encode_changes(changes)), list(whole.values()))  # fmt: skip
        self._quota.take(name, shard.size)
        making = self._quota.folder / f"{name}.making"
        try:
            with making.open("wb") as file:
                for part in (shard.head, *shard.body):
                    file.write(part)
            making.rename(self._quota.folder / name)
        except OSError as error:
            making.unlink(missing_ok=True)
            self._quota.forget(name)
            kind = StoreFullError if error.errno == errno.ENOSPC else StoreError
            raise kind("cannot write a fold", field=str(making), found=error.strerror,
                       do="free space where cache_dir is, or set cache_dir") from error  # fmt: skip
        finally:
            self._quota.free(name)
        self.made += 1

    def close(self) -> None:
        """Ends the maker."""
        self._maker.shutdown(wait=False, cancel_futures=True)
