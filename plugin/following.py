"""The decisions of a replica: which version next, whether an engine fits a run, what an engine holds, what may pass.

Owns them as functions that give a reason and change nothing. Owns no state (replica.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weight_sync.canonical import Bits
from weight_sync.codec.digest import Digest
from weight_sync.config import Config
from weight_sync.errors import (
    CorruptionError,
    DeadlineError,
    DigestMismatchError,
    EngineError,
    EngineInDoubtError,
    StoreError,
    VersionError,
    VersionExpiredError,
    WeightSyncError,
)
from weight_sync.history import History
from weight_sync.kept import keeping
from weight_sync.ports import Engine, ReplicaEnd, Update
from weight_sync.proto.v1 import manifest_pb2, replica_pb2
from weight_sync.push import place
from weight_sync.signing import checker
from weight_sync.tensors import TensorSpec

__all__ = ["check_fits", "choose_target", "history_of", "may_pass", "prepare", "recognise", "table_difference"]

_LOOKED_AT = 256  # newest versions that an engine's digest is compared with


def choose_target(
    have: int | None, head: int | None, min_version: int | None, exact: int | None
) -> tuple[int | None, str]:
    """The version to serve next and why; None while it is not there yet."""
    if exact is not None:
        if head is None or exact > head:
            return None, f"version {exact} has not been published, the newest is {head}"
        return exact, f"exactly {exact} was asked for"
    if head is None:
        return None, "the run has no version yet"
    if min_version is not None and head < min_version:
        return None, f"version {min_version} has not been published, the newest is {head}"
    if have is not None and have >= head:
        return have, f"{have} is the newest"
    return head, f"{head} is the newest"


def table_difference(engine: Sequence[TensorSpec], run: Sequence[TensorSpec]) -> list[str]:
    """How an engine's tensors differ from a run's, a line each; [] when the engine can serve the run."""
    mine, theirs = {s.name: s for s in engine}, {s.name: s for s in run}
    lines = [f"the engine lacks {name!r}" for name in sorted(theirs.keys() - mine.keys())]
    lines += [f"the run lacks {name!r}" for name in sorted(mine.keys() - theirs.keys())]
    for name in sorted(mine.keys() & theirs.keys()):
        a, b = mine[name], theirs[name]
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            lines.append(f"{name!r} is {a.dtype} {list(a.shape)} in the engine, {b.dtype} {list(b.shape)} in the run")
    return lines


def check_fits(description: replica_pb2.EngineDescription, run: Sequence[TensorSpec]) -> None:
    """Raises EngineError, with what differs, when an engine cannot take the tensors of a run."""
    mine = tuple(TensorSpec.from_proto(spec) for spec in description.tensors)
    lines = table_difference(mine, run) if mine else []  # an engine that lists nothing takes any table
    if lines and not description.changes_tensors:
        raise EngineError(
            "the engine holds another model than the run", field="tensors",
            found="; ".join(lines[:5]) + (f"; and {len(lines) - 5} more" if len(lines) > 5 else ""),
            do="start the engine from the run's base checkpoint",
        )  # fmt: skip


def history_of(end: ReplicaEnd, config: Config, replica_id: str, engine: Engine) -> History:
    """The versions of the configured view, for an engine that the end is told of.

    Raises ConfigError when a trusted key is none.
    """
    place(end, replica_id, config.view, engine)
    return History(keeping(end, config), config.view, config.threads, config.base, check=checker(config.signing))


def prepare(
    history: History, have: int | None, target: int, held: Sequence[TensorSpec] | None, bits: Bits | None = None
) -> Update:
    """`History.update`; where an object on the cheapest way is damaged or gone, from a full state that lies behind it.

    Raises what the cheapest way raised when there is none.
    """
    try:
        return history.update(have, target, held, bits)
    except (CorruptionError, VersionExpiredError) as error:
        if have is None:
            raise
        try:
            return history.update(None, target)
        except (CorruptionError, VersionError):
            raise error from None


def recognise(
    end: ReplicaEnd, wanted: Mapping[str | None, Digest], head: int, held: replica_pb2.EngineDescription | None = None
) -> manifest_pb2.VersionManifest | None:
    """The version whose views (None: the only one) have these digests: the head, the first one, which engines boot from,
    or one of the newest; None when it is none of them. An engine that holds an older one is served from a full state
    instead, which costs time and nothing else. The same adapter for another base than ``held`` has is another version.
    """
    # the head comes first: after steps that changed nothing, older versions have its digest, too
    for number in (head, 0, *range(head - 1, max(0, head - _LOOKED_AT), -1)):
        try:
            manifest = end.manifest(number)
        except VersionError:
            continue  # collected, or no version
        other = held is not None and held.HasField("adapter_base") and held.adapter_base != manifest.adapter.base_digest
        if not other and all(_has(manifest, view, digest) for view, digest in wanted.items()):
            return manifest
    return None


def _has(manifest: manifest_pb2.VersionManifest, view: str | None, digest: Digest) -> bool:
    return any(view in (None, part.name) and part.digest == digest.to_proto() for part in manifest.views)


def may_pass(error: WeightSyncError, serving: bool, again: bool) -> bool:
    """Whether to go on after an error: it may be gone at the next try, and trying does no harm.

    Args:
        serving: whether a version is served.
        again: whether the try before ended with the same class of error.
    """
    if isinstance(error, EngineInDoubtError):
        return not again  # the next try rebuilds the engine; that must not fail, too
    if isinstance(error, EngineError):
        return serving  # else it may never fit the run
    return isinstance(error, StoreError | VersionError | CorruptionError | DigestMismatchError | DeadlineError)
