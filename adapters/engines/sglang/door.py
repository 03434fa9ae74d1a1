"""The control socket in SGLang's server process: pause, resume, caches, version, and calls into the schedulers.

Owns what each call does to SGLang's client of its own schedulers (`TokenizerManager`). Owns no socket (worker/door.py) and
no weight. Weights are written only while all schedulers are paused and hold no keys and values of a request: requests
that are kept are retracted, and computed again by the new weights.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from weight_sync.adapters.engines.sglang.rank_door import socket_of
from weight_sync.adapters.engines.worker.door import DoorServer
from weight_sync.adapters.engines.worker.wire import Reply, decode_error
from weight_sync.errors import DeadlineError, EngineError, WeightSyncError

__all__ = ["SUFFIX", "Door"]

SUFFIX = ".sglang.sock"
_REPLY = 64 << 20  # longest answer of a rank in bytes
_LOOK_S = 0.002  # between two looks at requests in flight
_ABORT_LOOKS = 50
_ALIVE_S = 10.0  # that a scheduler's loop has for one turn; the caller has a limit of its own


class Door(DoorServer):
    """Serves one tokenizer manager on the event loop that it lives on."""

    def __init__(self, manager: Any, group: str) -> None:
        self._manager, self._group = manager, group
        calls: dict[str, Callable[..., Awaitable[Reply]]] = {
            "alive": self._alive,
            "ranks": self._ranks,
            "pause": self._pause,
            "resume": self._resume,
            "clear": self._clear,
            "announce": self._announce,
            "lora": self._lora,
        }
        super().__init__(SUFFIX, calls)

    # --- the ranks ---

    def _count(self) -> int:
        """How many ranks there are. Raises EngineError for a server that cannot be driven."""
        from sglang.srt.runtime_context import get_disagg, get_memory, get_parallel, get_serving

        parallel = get_parallel()
        apart = "start one server per replica and host, each with a sidecar of its own"
        stale = "start the server without it: keys and values of old weights would outlive a version"
        for names, field, expected, do in (
            (parallel, "dp_size", 1, apart),
            (parallel, "attn_dp_size", 1, apart),
            (parallel, "nnodes", 1, apart),
            (parallel, "pp_size", 1, "use tensor parallelism: SGLang's pipelines run on while it is paused"),
            (get_serving(), "tokenizer_worker_num", 1, apart),
            (get_memory(), "hicache_storage_backend", None, stale),
            (get_memory(), "enable_lmcache", False, stale),
            (get_disagg(), "disaggregation_mode", "null", stale),
        ):
            found = getattr(names, field, expected)
            if found != expected:
                raise EngineError("a server of this kind cannot be driven", field=field, found=found,
                                  expected=repr(expected), do=do)  # fmt: skip
        return int(parallel.tp_size)

    async def _ask(self, verb: str, within: float, arguments: dict[str, Any]) -> list[Reply]:
        asked = [self._ask_rank(rank, verb, within, arguments) for rank in range(self._count())]
        return list(await asyncio.gather(*asked))

    async def _ask_rank(self, rank: int, verb: str, within: float, arguments: dict[str, Any]) -> Reply:
        path = socket_of(self._group, rank)
        try:
            reader, writer = await asyncio.open_unix_connection(path, limit=_REPLY)
        except OSError as error:
            raise EngineError("a rank cannot be asked", field=f"rank {rank}", found=repr(error),
                              do="look into the server's log; all ranks must run on this host") from error  # fmt: skip
        try:
            message = {"verb": verb, "arguments": arguments, "within": within}
            writer.write(json.dumps(message).encode() + b"\n")
            line = await reader.readline()
        except OSError as error:
            line, found = b"", repr(error)
        else:
            found = "it closed the connection"
        finally:
            writer.close()
        if not line.endswith(b"\n"):
            raise EngineError("a rank died over a call", field=f"rank {rank}", found=found, do="start the server again")
        return dict(json.loads(line))

    async def _turning(self, verb: str, within: float) -> None:
        """That every scheduler's loop turns. Raises DeadlineError, EngineError."""
        for rank, reply in enumerate(await self._ask(verb, within, {})):
            if "error" in reply:
                raise decode_error(reply, f"rank {rank}")

    # --- the calls ---

    async def _alive(self) -> Reply:
        await self._turning("alive", _ALIVE_S)
        return {}

    async def _ranks(self, verb: str, arguments: dict[str, Any], within: float) -> Reply:
        return {"ranks": await self._ask(verb, within, arguments)}

    async def _pause(self, mode: str, within: float) -> Reply:
        before = self._manager.is_pause
        try:
            async with asyncio.timeout(within):
                await self._settle(mode, before)
                await self._turning("paused", within)
        except BaseException as error:
            if not before:
                await self._resume()
            if isinstance(error, WeightSyncError) or not isinstance(error, TimeoutError):
                raise
            raise DeadlineError("requests in flight took too long", field="timeout", expected=f"within {within:g} s",
                                do="allow more time, or pause in another mode") from error  # fmt: skip
        return {}

    async def _settle(self, mode: str, before: bool) -> None:
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        manager = self._manager
        async with manager.is_pause_cond:
            manager.is_pause = True  # who comes now waits outside
        # those inside hold this lock. Paused already: they wait for a resume, and hold no keys and values
        looks = 0
        while mode != "keep" and not before and await manager.model_update_lock.is_locked():
            if mode == "abort" and looks % _ABORT_LOOKS == 0:  # again: one may only now reach its scheduler
                manager.abort_request(abort_all=True)
            looks += 1
            await asyncio.sleep(_LOOK_S)
        await manager.pause_generation(PauseGenerationReqInput(mode="retract"))

    async def _resume(self) -> Reply:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        await self._manager.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))
        return {}

    async def _clear(self) -> Reply:
        if not (await self._manager.flush_cache()).success:
            raise EngineError("SGLang did not drop its caches", field="flush_cache", found=False,
                              do="pause in mode wait: a request that waits for its grammar forbids it")  # fmt: skip
        return {}

    async def _announce(self, text: str) -> Reply:
        from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

        await self._manager.update_weight_version(
            UpdateWeightVersionReqInput(new_version=text, abort_all_requests=False)
        )
        return {}

    async def _lora(self) -> Reply:
        from sglang.srt.runtime_context import get_lora

        found = get_lora()
        most = getattr(found, "max_lora_rank", None)
        return {"enabled": bool(found.enable_lora), "max_rank": None if most is None else int(most)}
