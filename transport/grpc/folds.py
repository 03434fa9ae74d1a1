"""Objects that lead from one version to another: chosen from the store, or made and kept on disk.

Owns the choice and the files. Owns no merge (codec/fold.py) and no sending.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from blake3 import blake3

from weight_sync import version as rules
from weight_sync.codec.frame import encode_changes
from weight_sync.codec.shard import build_shard, identity
from weight_sync.cutting import cut_to, regions_from
from weight_sync.errors import StoreError, StoreFullError, VersionError
from weight_sync.history import History, table_of, view_of
from weight_sync.ports import Changes, DensePiece, ReplicaEnd
from weight_sync.proto.v1 import common_pb2, manifest_pb2, service_pb2
from weight_sync.transport.grpc.blobs import FileBlob, Quota
from weight_sync.transport.grpc.site import SiteCopy

__all__ = ["Choice", "Folds", "Way", "choose"]

_REMEMBERED = 64  # choices of stored shards
_SITE_S = 10.0  # longest wait for the copy of this site to move on, before steps are fetched
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


def choose(
    path: rules.Path | rules.NoPath, view: manifest_pb2.ViewManifest, compact: bool = False, part: bool = False
) -> Choice:
    """What to send for a way from one version to another. Pure.

    Args:
        path: the cheapest way by the log, of a reader that cannot resolve an anchor by reference.
        view: of the version at its end.
        compact: the reader holds the bits at its beginning, and takes the compact form where one shard of it will do.
        part: the reader wants some regions only, which no stored shard is cut to.
    """
    if isinstance(path, rules.NoPath):
        return Choice((), None, path.reason)
    if path.anchor is not None or not path.patches:
        return Choice((), None, f"not by patches: {path.reason}")
    if len(path.patches) > _LONGEST:
        return Choice((), None, f"{len(path.patches)} patches are too many for one fold")
    if part:
        return Choice(path.patches, None, f"part of it: {path.reason}")
    for form in (common_pb2.FORM_COMPACT, common_pb2.FORM_STEP) if compact else (common_pb2.FORM_STEP,):
        shards = [ref for ref in view.shards if ref.form == form]
        if len(path.patches) == 1 and len(shards) == 1:
            return Choice(path.patches, shards[0], "the patch itself")
    return Choice(path.patches, None, path.reason)


@dataclass(frozen=True)
class Way:
    """What is asked for: from one version to another, whole or in part. Equal ways are made once.

    Attributes:
        regions: of the reader, each as bytes of a Region; (): everything.
    """

    run_id: str
    view: str
    have: int
    target: int
    compact: bool = False
    regions: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, run_id: str, request: service_pb2.FoldRequest) -> Way:
        """Of a call."""
        regions = tuple(region.SerializeToString(deterministic=True) for region in request.regions)
        compact = request.form == common_pb2.FORM_COMPACT and not regions
        return cls(run_id, request.view, request.have, request.target, compact, regions)

    @property
    def name(self) -> str:
        """Of the file that holds the fold."""
        hasher = blake3()
        for region in self.regions:
            hasher.update(len(region).to_bytes(4, "little") + region)
        part = f"-{hasher.hexdigest(length=8)}" if self.regions else ""
        return f"{self.run_id}-fold-{self.view}-{self.have}-{self.target}{part}.safetensors"


class Folds:
    """Folds of all runs; one is made at a time, each once. On the service's loop."""

    def __init__(self, quota: Quota, pool: ThreadPoolExecutor, threads: int) -> None:
        self._quota = quota
        self._pool = pool
        self._threads = threads
        self._maker = ThreadPoolExecutor(1, "weight_sync-fold")
        self._making: dict[Way, asyncio.Task[Choice]] = {}
        self._stored: dict[Way, Choice] = {}
        self._own: set[str] = set()  # made at this site
        self.site: SiteCopy | None = None
        self.made = 0

    async def get(
        self, end: Callable[[], ReplicaEnd], run_id: str, request: service_pb2.FoldRequest
    ) -> tuple[Choice, FileBlob | None]:
        """What to send; the blob is None when it is a stored shard, or nothing.

        ``end`` opens a reading end of the run that the maker has for itself.
        """
        way = Way.of(run_id, request)
        if self.site is not None:
            way = replace(way, compact=False)  # it has crossed in that form once; the site is served steps
        if way in self._stored:  # the parts of one read come one after the other, and so do a fleet's
            return self._stored[way], None
        task = self._making.get(way)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._make(end, way))
            self._making[way] = task
            task.add_done_callback(lambda _: self._making.pop(way, None))
        choice = await asyncio.shield(task)
        if choice.stored is not None:
            self._stored[way] = choice
            while len(self._stored) > _REMEMBERED:
                del self._stored[next(iter(self._stored))]
        if choice.stored is not None or not choice.patches:
            return choice, None
        path = self._quota.folder / way.name
        self._quota.take(way.name, path.stat().st_size)
        return choice, FileBlob(path, self._pool, lambda: self._quota.free(way.name))

    async def _make(self, end: Callable[[], ReplicaEnd], way: Way) -> Choice:
        loop = asyncio.get_running_loop()
        if self.site is not None and not way.regions:
            await loop.run_in_executor(self._pool, self.site.wait, way.run_id, way.have, way.target, _SITE_S)
            if way.name in self._own and self._quota.holds(way.name):
                return Choice((way.target,), None, "from the copy of this site")
        return await loop.run_in_executor(self._maker, self._make_now, end, way)

    def _make_now(self, end: Callable[[], ReplicaEnd], way: Way) -> Choice:
        reader = end()
        try:
            history = History(reader, way.view, self._threads)
            try:
                path = rules.plan(history.entry, way.have, way.target, by_reference=False)
                wanted = view_of(history.manifest(way.target), way.view)
            except VersionError as error:
                return Choice((), None, str(error))
            choice = choose(path, wanted, way.compact, bool(way.regions))
            if choice.patches and choice.stored is None and not self._quota.holds(way.name):
                self._write(way, history, choice.patches, wanted)
            return choice
        finally:
            reader.close()

    def _write(self, way: Way, history: History, patches: tuple[int, ...], view: manifest_pb2.ViewManifest) -> None:
        table = table_of(view)
        regions = regions_from(map(common_pb2.Region.FromString, way.regions), table) if way.regions else None
        changes, whole = history.fold(patches, table)
        pieces = list(whole.values())
        if regions is not None:
            changes, pieces = cut_to(regions, changes, pieces)
        self._keep(way.name, way.run_id, way.view, way.target, changes, pieces)
        self.made += 1

    def add(
        self, run_id: str, view: str, have: int, target: int, changes: Sequence[Changes], whole: Sequence[DensePiece]
    ) -> None:
        """A fold that the copy of this site gives for nothing; from its thread."""
        name = Way(run_id, view, have, target).name
        if not self._quota.holds(name):
            self._keep(name, run_id, view, target, changes, whole)
            self._own = {one for one in self._own if self._quota.holds(one)} | {name}

    def _keep(
        self, name: str, run_id: str, view: str, number: int, changes: Sequence[Changes], whole: Sequence[DensePiece]
    ) -> None:
        step = common_pb2.FORM_STEP
        shard = build_shard("fold", identity(run_id, number, 0, view, step), list(encode_changes(changes)), list(whole))
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

    def close(self) -> None:
        """Ends the maker."""
        self._maker.shutdown(wait=False, cancel_futures=True)
