"""One rank of an engine as its driver sees it: calls by name, answers as JSON.

Owns the verbs, their order and the background thread. Owns no weight (rank.py), no other rank (ranks.py) and no fence
(remote.py). Answers never raise: an engine's own plumbing may not survive an exception.

Calls that may take long run in a thread while the engine serves and are asked for with ``poll``; commit and rollback
run where they are called, inside the fence.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from weight_sync.adapters.engines.worker.landing import Landing
from weight_sync.adapters.engines.worker.rank import Host, Rank
from weight_sync.adapters.engines.worker.wire import Reply, decode_bytes, encode_bytes, encode_error, encode_table
from weight_sync.errors import EngineError, EngineInDoubtError
from weight_sync.layout.coverage import encode_summary, summarise

__all__ = ["WorkerCore"]


class WorkerCore:
    """The adapter inside one rank; made once per process. ``call`` is not re-entrant: engines call in turn."""

    def __init__(self, host: Host, threads: int = 1) -> None:
        self._host, self._threads = host, threads
        self._epoch = uuid.uuid4().hex
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="weight_sync-rank")
        self._job: Future[Reply] | None = None
        self._rank: Rank | None = None
        self._lands: Landing | None = None
        self._verbs: dict[str, Callable[..., Reply]] = {
            "attach": self._attach,
            "adopt": self._adopt,
            "audit": lambda: self._start(self._audit),
            "stage": lambda **given: self._start(lambda: self._stage(**given)),
            "poll": self._poll,
            "commit": self._commit,
            "rollback": self._rollback,
            "land_offer": lambda keys: self._landing().offer(keys, self._host.rank, self._host.world_size),
            "land_expect": lambda going: self._landing().expect(going),
            "land_wait": lambda within: self._start(lambda: self._landing().wait(within)),
            "land_abort": lambda **given: self._landing().abort(**given),
            "land_close": self._land_close,
            "stage_landed": lambda **given: self._start(lambda: self._stage_landed(**given)),
        }

    def call(self, verb: str, arguments: Mapping[str, Any]) -> Reply:
        """One call of the driver; the answer is a JSON object with ``epoch`` and ``rank``, and ``error`` on failure."""
        try:
            reply = self._verbs[verb](**arguments)
        except Exception as error:
            reply = encode_error(error)
        return self.signed(reply)

    def signed(self, reply: Reply) -> Reply:
        """An answer with who gives it."""
        return {"epoch": self._epoch, "rank": self._host.rank, "world": self._host.world_size, **reply}

    # --- in the background ---

    def _start(self, work: Callable[[], Reply]) -> Reply:
        if self._job is not None and not self._job.done():
            raise EngineError("the rank is still at the call before", do="wait for it")
        self._job = self._pool.submit(work)
        return {"started": True}

    def _poll(self) -> Reply:
        if self._job is None:
            raise EngineError("nothing was started", do="attach the engine again")
        return self._job.result() if self._job.done() else {"busy": True}

    def _held(self) -> Rank:
        if self._rank is None:
            raise EngineInDoubtError("the rank is not attached: the engine was started anew", do="sync again")
        if self._job is not None and not self._job.done():
            raise EngineError("the rank is still at the call before", do="wait for it")
        return self._rank

    # --- the verbs ---

    def _attach(self, base: str | None = None) -> Reply:
        """Learns, once; later calls tell the same. Digests come with ``audit``."""
        if self._rank is None:
            self._rank = Rank(self._host, base, self._threads)
        rank = self._rank
        return {
            "summary": encode_bytes(encode_summary(summarise(rank.layout))),
            "table": encode_table(rank.layout.tensors) if self._host.rank == 0 else None,
            "packed": rank.reasons,
            "phase": rank.phase,
            "token": rank.token,
            "facts": self._host.facts(),
        }

    def _adopt(self, names: list[str], rank: int) -> Reply:
        """One rank keeps copies of tensors that no rank's loader takes, so that the whole state is held."""
        held = self._held()
        if rank == self._host.rank:
            held.adopt(names)
        return {"summary": encode_bytes(encode_summary(summarise(held.layout)))}

    def _audit(self) -> Reply:
        rank = self._rank
        if rank is None:
            raise EngineInDoubtError("the rank is not attached", do="attach it first")
        return rank.told(rank.audit())

    def _stage(self, folder: str, token: str, keep_undo: bool) -> Reply:
        rank = self._rank
        if rank is None:
            raise EngineInDoubtError("the rank is not attached: the engine was started anew", do="sync again")
        rank.stage(folder, token, keep_undo)
        return {"staged": token}

    def _landing(self) -> Landing:
        if self._rank is None:
            raise EngineInDoubtError("the rank is not attached: the engine was started anew", do="sync again")
        if self._lands is None:
            self._lands = Landing(self._rank.placed)
        return self._lands

    def _land_close(self) -> Reply:
        if self._lands is not None:
            self._lands.close()
        return {}

    def _stage_landed(self, token: str, target: str, keep_undo: bool, direct: bool) -> Reply:
        landing, rank = self._landing(), self._rank
        assert rank is not None
        rank.stage_landed(decode_bytes(target), token, landing.pieces, keep_undo, direct)
        return {"staged": token}

    def _commit(self, token: str) -> Reply:
        rank = self._held()
        rank.commit(token)
        return rank.told(True)

    def _rollback(self, token: str) -> Reply:
        rank = self._held()
        rank.rollback(token)
        return rank.told(True)
