"""The control socket in vLLM's API process: pause, resume, caches, version, and calls into the workers.

Owns what each call does to vLLM's client of its own engine (`AsyncLLM`). Owns no socket (worker/door.py) and no weight.
None of vLLM's development routes is needed.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable
from typing import Any

from weight_sync.adapters.engines.worker.door import DoorServer
from weight_sync.adapters.engines.worker.wire import Reply
from weight_sync.errors import DeadlineError, EngineError

__all__ = ["METHOD", "SUFFIX", "Door", "open_door"]

METHOD = "weight_sync_call"
"""Of a worker, through which calls reach its core."""

SUFFIX = ".vllm.sock"


class Door(DoorServer):
    """Serves one engine client on the event loop that it lives on."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._said = ""  # the version, where vLLM keeps none
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

    # --- the calls ---

    async def _alive(self) -> Reply:
        await self._engine.check_health()
        if hasattr(self._engine, "is_paused"):
            await self._engine.is_paused()  # asks the scheduler's process
        return {}

    async def _ranks(self, verb: str, arguments: dict[str, Any], within: float) -> Reply:
        # no limit of vLLM's own: one that runs out leaves answers behind that the next call would take for its own.
        # A call that comes late comes before the next driver's, for workers take calls in turn
        answers = await self._engine.collective_rpc(METHOD, args=(verb, json.dumps(arguments)))
        return {"ranks": [json.loads(answer) for answer in answers]}

    async def _pause(self, mode: str, within: float) -> Reply:
        before = await self._engine.is_paused()
        task = asyncio.ensure_future(self._engine.pause_generation(**self._pause_arguments(mode)))
        done, _ = await asyncio.wait({task}, timeout=within)
        if not done:
            if not before:
                await self._engine.resume_generation()
            raise DeadlineError("requests in flight took too long", field="timeout", expected=f"within {within:g} s",
                                do="allow more time, or pause in another mode")  # fmt: skip
        task.result()
        return {}

    def _pause_arguments(self, mode: str) -> dict[str, Any]:
        names = inspect.signature(self._engine.pause_generation).parameters
        if "mode" in names:
            return {"mode": mode, "clear_cache": False}
        if mode == "keep":
            raise EngineError("this vLLM cannot keep requests across a pause", field="pause", found=mode,
                              expected="wait or abort", do="set pause to wait")  # fmt: skip
        return {"wait_for_inflight_requests": mode == "wait", "clear_cache": False}

    async def _resume(self) -> Reply:
        await self._engine.resume_generation()
        return {}

    async def _clear(self) -> Reply:
        reset = self._engine.reset_prefix_cache
        names = inspect.signature(reset).parameters
        # requests that were kept hold keys and values of the old weights: they are computed again
        options = {name: True for name in ("reset_running_requests", "reset_connector") if name in names}
        if await reset(**options) is False:
            raise EngineError("vLLM did not drop its prefix cache", field="reset_prefix_cache", found=False,
                              do="pause in mode wait")  # fmt: skip
        for name in ("reset_mm_cache", "reset_encoder_cache"):
            if hasattr(self._engine, name):
                await getattr(self._engine, name)()
        return {}

    async def _announce(self, text: str) -> Reply:
        self._said = text
        if hasattr(self._engine, "update_weight_version"):
            await self._engine.update_weight_version(text)
        return {}

    async def _lora(self) -> Reply:
        config = getattr(self._engine.vllm_config, "lora_config", None)
        return {"enabled": config is not None, "max_rank": None if config is None else int(config.max_lora_rank)}


def open_door(client: Any) -> bool:
    """Opens the door of a client on the event loop that it was made on, once; whether drivers find it by now. From any
    thread.

    Raises EngineError for a client that was made without a loop, and what ended a door that was open.
    """
    held = getattr(client, "weight_sync_door", None)
    if held is None:
        loop = getattr(client, "weight_sync_loop", None)
        if loop is None:
            raise EngineError("this vLLM was not started with our plugin, or has no event loop", field="AsyncLLM",
                              do="weight-sync doctor vllm tells whether it loads the plugin")  # fmt: skip
        door = Door(client)
        held = client.weight_sync_door = (door, asyncio.run_coroutine_threadsafe(door.serve(), loop))
    door, served = held
    if served.done():
        served.result()
    return bool(door.is_open)
