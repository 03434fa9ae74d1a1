"""RemoteEngine: the engine port over the ranks of an engine that runs elsewhere.

Owns the order of calls to all ranks, what becomes of a call that some ranks answered, and the staging files. Owns no
way to reach an engine (a `Control` does) and no weight.
"""

from __future__ import annotations

import socket
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from weight_sync.adapters.engines.worker.facts import contract_of
from weight_sync.adapters.engines.worker.landing import Landings
from weight_sync.adapters.engines.worker.ranks import Ranks, unheld
from weight_sync.adapters.engines.worker.staging import Staging
from weight_sync.adapters.engines.worker.wire import (
    Reply,
    decode_bytes,
    decode_digests,
    decode_error,
    decode_table,
    encode_bytes,
)
from weight_sync.codec.digest import Digest
from weight_sync.config import Config
from weight_sync.errors import DeadlineError, EngineError, EngineInDoubtError, WeightSyncError
from weight_sync.layout.coverage import decode_summary
from weight_sync.ports import PauseMode, Update
from weight_sync.proto.v1 import common_pb2, replica_pb2
from weight_sync.push import LAND, LANDED, Receiver
from weight_sync.tensors import TensorSpec

__all__ = ["Control", "RemoteEngine", "version_text"]

_LOOK_S = (0.002, 0.1)  # first and longest pause between two looks at work in the background


def version_text(version: common_pb2.VersionId) -> str:
    """A version as engines spell it in their own answers: ``run_id:number``."""
    return f"{version.run_id}:{version.number}"


class Control(Protocol):
    """How an engine is reached. Every call ends within its limit, in seconds.

    Methods raise EngineError when the engine refused or cannot be reached, DeadlineError at the limit.
    """

    def ranks(self, verb: str, arguments: Mapping[str, Any], limit: float) -> list[Reply]:
        """Calls `WorkerCore.call` on every rank."""

    def pause(self, mode: PauseMode, limit: float) -> None:
        """Closes admission and settles requests in flight; as before when it fails."""

    def resume(self, limit: float) -> None:
        """Opens admission."""

    def clear(self, limit: float) -> None:
        """Drops everything computed from old weights, of requests in flight, too."""

    def announce(self, text: str, limit: float) -> None:
        """What the engine calls its weights from now on."""

    def alive(self, limit: float) -> bool:
        """Whether the engine answers, its scheduler included."""

    def close(self) -> None:
        """Releases everything; never raises."""


class RemoteEngine:
    """An implementation of ``weight_sync.ports.Engine``, driven by one thread; `alive` may be called from any.

    Attributes:
        kind: of the engine, for its description.
        copied: by tensor that is reloaded from a host copy instead of written in place, why; told by `describe`.
    """

    kind = "remote"

    def __init__(self, control: Control, config: Config, name: str) -> None:
        self._control, self._config, self._name = control, config, name
        self._staging = Staging(config.cache_dir, config.staging_bytes)
        self._table: tuple[TensorSpec, ...] = ()
        self._ranks: Ranks | None = None
        self._epochs: list[str] = []
        self._token = ""
        self._known = False  # whether there is a version to go back to
        self._land: Callable[[], None] | None = None
        self._landings: Landings | None = None
        self.copied: dict[str, str] = {}

    # --- asking all ranks ---

    def _ask(self, verb: str, limit: float, **arguments: Any) -> list[Reply]:
        """Every rank's answer, by rank. Raises what a rank raised, EngineInDoubtError before anything else."""
        return self._checked(verb, self._control.ranks(verb, arguments, limit))

    def _checked(self, verb: str, answers: list[Reply]) -> list[Reply]:
        replies = sorted(answers, key=lambda reply: int(reply["rank"]))
        found = [(reply["rank"], reply["world"]) for reply in replies]
        if not replies or found != [(rank, len(replies)) for rank in range(len(replies))]:
            raise EngineError("not all ranks of the engine answered", field=verb, found=found,
                              do="drive each data-parallel replica by a sidecar of its own")  # fmt: skip
        epochs = [str(reply["epoch"]) for reply in replies]
        if verb != "attach" and epochs != self._epochs:
            raise EngineInDoubtError("the engine was started anew", field="epoch",
                                     do="sync again: its digest tells what it holds")  # fmt: skip
        failed = [decode_error(reply, f"rank {rank}") for rank, reply in enumerate(replies) if "error" in reply]
        if failed:
            raise next((error for error in failed if isinstance(error, EngineInDoubtError)), failed[0])
        self._epochs = epochs
        return replies

    def _wait(self, verb: str, **arguments: Any) -> list[Reply]:
        """The answers to work that ranks do in the background while they serve."""
        return self._wait_for(verb, self._config.timeout_s, lambda: None, **arguments)

    def _wait_for(self, verb: str, limit: float, between: Callable[[], None], **arguments: Any) -> list[Reply]:
        """The same within ``limit`` seconds; ``between`` is called before each look."""
        end = time.monotonic() + limit
        self._ask(verb, limit, **arguments)
        pause = _LOOK_S[0]
        while True:
            between()
            left = end - time.monotonic()
            if left <= 0:
                raise DeadlineError("the engine's ranks took too long", field=verb, expected=f"within {limit:g} s",
                                    do="set timeout_s higher")  # fmt: skip
            answers = self._control.ranks("poll", {}, max(left, _LOOK_S[1]))
            if not any(
                reply.get("busy") for reply in answers
            ):  # only then: a rank that failed does not wait for others
                return self._checked("poll", answers)
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LOOK_S[1])

    def _total(self, replies: list[Reply]) -> Digest:
        assert self._ranks is not None
        return self._ranks.total([decode_digests(reply["digests"]) for reply in replies])

    # --- the engine port ---

    def describe(self) -> replica_pb2.EngineDescription:
        """What it holds now; the digest is recomputed from the bits, unset when they are not known.

        The first call in the life of an engine process makes its ranks learn their layouts. Ranks that a driver left on
        two versions are brought back to the older one. Raises EngineError and LayoutError when the engine cannot be
        driven, DeadlineError.
        """
        replies = self._ask("attach", self._config.timeout_s, base=self._config.base)
        self._table = decode_table(replies[0]["table"])
        self.copied = {name: reason for reply in replies for name, reason in reply["packed"].items()}
        summaries = [decode_summary(decode_bytes(reply["summary"])) for reply in replies]
        if lost := unheld(self._table, summaries):
            answers = self._ask("adopt", self._config.timeout_s, names=lost, rank=0)
            summaries = [decode_summary(decode_bytes(reply["summary"])) for reply in answers]
        self._ranks = Ranks(self._table, summaries)
        self._settle(replies)
        message = self._description(replies[0]["facts"], len(replies))
        told = self._wait("audit")
        self._known = all(reply["digests"] is not None for reply in told)
        if self._known:
            try:
                message.digest.CopyFrom(self._total(told).to_proto())
            except EngineError:  # replicas differ: the digest cannot be told
                self._known = False
        return message

    def _settle(self, replies: list[Reply]) -> None:
        """After a driver that died inside a fence: ranks that committed go back when others did not."""
        phases = {(reply["phase"], reply["token"]) for reply in replies}
        for token in {token for phase, token in phases if phase == "committed"}:
            if phases != {("committed", token)}:
                self._ask("rollback", self._config.fence_s, token=token)

    def _description(self, facts: Mapping[str, str], ranks: int) -> replica_pb2.EngineDescription:
        return replica_pb2.EngineDescription(
            engine_id=self._name,
            kind=self.kind,
            view=self._config.view,
            tensors=[spec.to_proto() for spec in self._table],
            complete=True,
            forms=[common_pb2.FORM_STEP, common_pb2.FORM_ABSOLUTE],
            world_size=ranks,
            host=socket.gethostname(),
            versions={self.kind: facts.get("engine_version", ""), "torch": facts.get("torch", "")},
            contract=contract_of(self.kind, facts),
        )

    def stage(self, update: Update) -> None:
        """Lays the version out for all ranks and lets them prepare while they serve.

        Raises EngineError; then nothing has changed. EngineInDoubtError when the engine was started anew.
        """
        self._need()
        self._token = ""
        self._land = update.extra.get(LAND)
        token = uuid.uuid4().hex
        keep = self._known or not update.full
        if self._land is not None or LANDED in update.extra:
            target = encode_bytes(update.target.SerializeToString())
            self._wait("stage_landed", token=token, target=target, keep_undo=keep, direct=self._land is not None)
        else:
            try:
                folder = self._staging.write(update)
                self._wait("stage", folder=str(folder), token=token, keep_undo=keep)
            except BaseException:
                self._staging.drop()
                raise
        self._token = token

    def commit(self) -> Digest:
        """Inside the fence: all ranks write, or none does; the sum of what they now hold.

        Raises EngineError after having restored the old bits, EngineInDoubtError when that is not known.
        """
        self._need()
        if not self._token:
            raise EngineError("nothing is staged", do="call stage first")
        try:
            self._let_in()
            total = self._total(self._surely("commit"))
        except EngineInDoubtError:
            self._known = False
            raise
        except WeightSyncError as error:  # a rank could not, or replicas differ
            self.rollback()
            raise EngineError("commit failed, the old bits are back on all ranks", found=str(error)) from error
        finally:
            self._staging.drop()
        self._known = True
        return total

    def _let_in(self) -> None:
        """Bits that go straight into live weights; whatever goes wrong, nobody knows what lies there then."""
        land, self._land = self._land, None
        if land is None:
            return
        self._known = False
        try:
            land()
        except WeightSyncError as error:
            raise EngineInDoubtError("a version was written half into the live weights", found=str(error),
                                     do="sync again: it loads a full state") from error  # fmt: skip

    def receivers(self) -> Sequence[Receiver]:
        """For push transports: one per rank; none where patches land beside the engine, which need the parent's bits."""
        if self._ranks is None or self._config.rdma.ring_bytes:
            return ()
        if self._landings is None:
            self._landings = Landings(self._ask, self._wait_for, self._config, len(self._epochs))
        return self._landings.receivers

    def rollback(self) -> Digest:
        """Inside the fence: the bits before the last commit, on all ranks. May be called again."""
        self._need()
        return self._total(self._surely("rollback"))

    def _surely(self, verb: str) -> list[Reply]:
        """A call that changes weights: without an answer nobody knows what became of it, and the engine is in doubt."""
        try:
            answers = self._control.ranks(verb, {"token": self._token}, self._config.fence_s)
        except WeightSyncError as error:
            raise EngineInDoubtError(f"nobody knows whether the {verb} was made", found=str(error),
                                     do="sync again: its digest tells what it holds") from error  # fmt: skip
        return self._checked(verb, answers)

    def audit(self) -> Digest:
        """The digest of the whole state, recomputed from the bits in place.

        Raises EngineInDoubtError when it cannot be told, EngineError when replicas of a region differ.
        """
        self._need()
        replies = self._wait("audit")
        if any(reply["digests"] is None for reply in replies):
            raise EngineInDoubtError("the weights in place are not known", do="sync again: it loads a full state")
        return self._total(replies)

    def _need(self) -> None:
        if self._ranks is None:
            self.describe()

    def pause(self, mode: PauseMode, timeout: float) -> None:
        """Closes admission and settles requests in flight. Raises DeadlineError; admission is as before then."""
        self._control.pause(mode, timeout)

    def resume(self) -> None:
        """Opens admission."""
        self._control.resume(self._config.fence_s)

    def clear_caches(self) -> None:
        """Drops KV and prefix caches; requests in flight compute theirs again."""
        self._control.clear(self._config.fence_s)

    def announce(self, version: common_pb2.VersionId) -> None:
        """The version string that the engine's own answers carry from now on."""
        self._control.announce(version_text(version), self._config.fence_s)

    def alive(self, timeout: float) -> bool:
        """Whether the engine answers within ``timeout`` seconds, its scheduler included; any thread may ask."""
        return self._control.alive(timeout)

    def close(self) -> None:
        """Releases the staging files; the engine goes on serving."""
        self._staging.drop()
        self._control.close()
