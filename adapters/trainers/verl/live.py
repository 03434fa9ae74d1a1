"""The workers of verl's own vLLM, taken from version to version where their weights lie.

Owns whether that can be, the way to the workers, and that all rollout workers of a replica go one way. Owns no full load
(arrival.py), no write (weight_sync.adapters.engines) and no admission: verl has aborted and paused before, and resumes.

A replica's first rollout worker leads: it opens our door in the process of verl's server and drives vLLM's workers by
it. What changes weights runs in a worker's own loop, between two steps, like every call that vLLM makes into it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from weight_sync.adapters.engines.vllm.door import SUFFIX, open_door
from weight_sync.adapters.engines.worker.control import SocketControl
from weight_sync.adapters.engines.worker.remote import RemoteEngine
from weight_sync.config import Config
from weight_sync.consensus import together
from weight_sync.errors import DeadlineError, EngineError, InputError, WeightSyncError
from weight_sync.group import default_group
from weight_sync.replica import Replica

if TYPE_CHECKING:
    from weight_sync.ports import Group, PauseMode

__all__ = ["Live", "why_whole"]

log = logging.getLogger("weight_sync.verl")

_LASTING = "!"  # before a reason that will not pass
_LEADER_CALLS = 8  # each with a limit of its own: what the workers that wait for the leader allow it


def why_whole(rollout: Any, uri: str, ranks: int, local: int) -> str:
    """Why a replica loads every version whole; "" when its weights may be written where they lie.

    Args:
        rollout: verl's rollout configuration.
        uri: where versions come from.
        ranks: rollout workers that meet in torch.distributed.
        local: how many of them this host has.
    """
    options = rollout.engine_kwargs.get("vllm") or {}
    reasons = {
        "verl drops the weights before each sync (set rollout.free_cache_engine=false)": rollout.free_cache_engine,
        "its vLLM has data-parallel ranks": rollout.data_parallel_size > 1,
        "prefill and decode are on different servers": rollout.disaggregation.enabled,
        "verl loads a draft model, too": (rollout.mtp.enable and rollout.mtp.enable_rollout)
        or options.get("speculative_config"),
        "its rollout workers share their group with others": ranks
        != rollout.tensor_model_parallel_size * rollout.pipeline_model_parallel_size,
        "its ranks are on several hosts": local < ranks,
        "versions come by RDMA": uri.startswith("rdma:"),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


class Live:
    """One replica, as one of its rollout workers sees it.

    Args:
        adapter: verl's client of the replica's server.
        config: of the run; ``base`` is the checkpoint that vLLM has its names and shapes from.
        variables: this process's environment.

    Attributes:
        lasting: why this replica loads every version whole; "" while it need not.
    """

    def __init__(self, adapter: Any, config: Config, variables: Mapping[str, str] = os.environ) -> None:
        ranks = int(variables.get("WORLD_SIZE", "1"))
        local = int(variables.get("RAY_LOCAL_WORLD_SIZE", "1"))
        self.lasting = why_whole(adapter.config, config.uri, ranks, local)
        self._adapter, self._config = adapter, config
        self._group: Group | None = None
        self._run = ""
        self._replica: Replica | None = None
        self._was_found = self._was_loaded = False

    def reach(self, run_id: str, version: int) -> str:
        """Brings vLLM's workers to a version that is committed; why not, "" when they hold it. All rollout workers of the
        replica call it, and are told the same.

        Failures are reasons, since a full load mends them. Raises DeadlineError when another rollout worker is gone.
        """
        if self.lasting:
            return self.lasting
        if self._group is None:
            self._group = default_group(_LEADER_CALLS * self._config.timeout_s)
        group = self._group
        told = together(
            group, lambda: self._try(run_id, version).encode() if group.rank == 0 else b"", lambda parts: parts[0]
        ).decode()
        if told.startswith(_LASTING):
            self.lasting = told = told.removeprefix(_LASTING)
        return told

    def loads(self) -> None:
        """verl loads a version whole: what the workers hold is found out anew at the next sync."""
        self._was_loaded = True
        self._let_go()

    # --- the leader ---

    def _try(self, run_id: str, version: int) -> str:
        try:
            reason = self._move(run_id, version)
        except WeightSyncError as error:
            fits = self._was_found or not isinstance(error, EngineError | InputError)
            reason = ("" if fits else _LASTING) + str(error)
        except Exception as error:  # also of Ray and of the operating system: verl's own load does not need them
            log.warning("not in place", exc_info=True)
            reason = ("" if self._was_found else _LASTING) + repr(error)
        if reason:
            self._let_go()
        return reason

    def _move(self, run_id: str, version: int) -> str:
        """Why not, where nothing was tried. Raises whatever went wrong; weights are as before then, or in doubt."""
        if self._replica is None or self._run != run_id:
            self._let_go()
            replica, self._run = self._open(run_id), run_id
            self._replica = replica
            held, copied = replica.identify(), replica.engine.copied  # type: ignore[attr-defined]
            if copied:
                name = min(copied)
                return f"{_LASTING}vLLM does not compute with what it loaded: {name}: {copied[name]}"
            if held is None and not self._was_found:  # else a full state is written, into places that are proven
                unproven = (
                    f"{_LASTING}its parameters are not known to be what verl has loaded (load_format=auto may help)"
                )
                return unproven if self._was_loaded else "its workers hold no version of the run yet"
            self._was_found = True
        report = self._replica.sync(exact=version)
        log.info("version %d in place after %.3f s (%s), digest %s", version, report.seconds["total"], report.path,
                 report.digest)  # fmt: skip
        return ""

    def _open(self, run_id: str) -> Replica:
        control = _Control(self._door(), "vLLM", SUFFIX, "look at the log of verl's server")
        config = self._config.replace(run_id=run_id, fork=False, replica_id=None)
        engine = RemoteEngine(control, config, f"verl-replica-{self._adapter.replica_rank}")
        engine.kind = "vllm"
        return Replica.open(config, engine)

    def _door(self) -> str:
        """URL of verl's server, whose door is open then."""
        if not self._adapter._ensure_server_handle():
            raise EngineError("verl's first rollout worker has no server", do="look at verl's log")
        server, end = self._adapter.server_handle, time.monotonic() + self._config.fence_s

        def ask(call: Any) -> Any:
            try:
                return call.future().result(max(0.001, end - time.monotonic()))
            except TimeoutError as error:
                raise DeadlineError("verl's server does not answer", field="fence_s",
                                    expected=f"within {self._config.fence_s:g} s") from error  # fmt: skip

        while not ask(server.__ray_call__.remote(lambda server: open_door(server.engine))):
            time.sleep(0.02)
        _, port = ask(server.get_server_address.remote())
        return f"http://127.0.0.1:{port}"

    def _let_go(self) -> None:
        replica, self._replica = self._replica, None
        if replica is not None:
            with suppress(WeightSyncError):  # nothing of ours is left to be lost
                replica.close()
            replica.engine.close()


class _Control(SocketControl):
    """Admission is verl's own, and it names weights by its steps."""

    def pause(self, mode: PauseMode, limit: float) -> None:
        """Done by verl."""

    def resume(self, limit: float) -> None:
        """Done by verl."""

    def announce(self, text: str, limit: float) -> None:
        """verl loads some versions itself, and says none to vLLM."""
