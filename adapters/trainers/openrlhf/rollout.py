"""In a rollout actor: OpenRLHF's vLLM engine, brought to the version that the trainer names; or none, where engines
elsewhere answer.

Owns the way into an engine that lives in the same process. Owns no request to others (remote.py), no following
(weight_sync.replica), no protocol (weight_sync.adapters.engines.vllm) and no admission: OpenRLHF has paused, or asks
for nothing, while the engine moves.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weight_sync import blocks
    from weight_sync.replica import Replica

__all__ = ["Rollout", "switch_engine"]


def switch_engine(block: Mapping[str, Any]) -> None:
    """Before vLLM starts in this process: tells weight_sync's plugin in it which profile to set switches for."""
    from weight_sync.adapters.trainers.block import read_block

    profile = read_block({key: value for key, value in block.items() if key != "lora"}).contract.profile
    if profile != "native":
        os.environ["WEIGHT_SYNC_PROFILE"] = profile


class Rollout:
    """One engine. Made before vLLM starts, when nothing of weight_sync's core is imported yet.

    Args:
        block: the options of weight_sync.
        lora: "merge" or "adapter".
        engine: the arguments with which vLLM will be made.

    Attributes:
        told: the version that the trainer has named last; None before.
    """

    def __init__(self, block: dict[str, Any], lora: str, engine: dict[str, Any]) -> None:
        self._block, self._model = block, str(engine.get("model", ""))
        self._replica: Replica | None = None
        self._turn: asyncio.Lock | None = None
        self.told: int | None = None

    @property
    def asks_elsewhere(self) -> bool:
        """Whether engines elsewhere answer: then this actor starts none."""
        return bool(_rollout_block(self._block).engines)

    def replace_engine(self, actor: Any, given: Mapping[str, Any]) -> None:
        """Makes of the actor what OpenRLHF's own start would, but for the engine. Raises ConfigError.

        Args:
            given: the arguments with which OpenRLHF makes the actor.
        """
        from openrlhf.trainer.ray import vllm_engine

        from weight_sync.adapters.trainers.openrlhf.remote import NoEngine, RemoteExecutor

        path = given.get("agent_func_path")
        inner = (vllm_engine._load_agent_executor(path) if path
                 else vllm_engine.SingleTurnAgentExecutor(given.get("remote_rm_url")))  # fmt: skip
        actor.executor = RemoteExecutor(inner, _rollout_block(self._block), lambda: self.told)
        actor.kwargs, actor._mm_pad_token_ids = dict(given), None
        actor.llm = NoEngine(actor.executor.client)

    async def reach(self, actor: Any, uri: str, run_id: str, version: int) -> dict[str, Any]:
        """Brings the engine to the version; says what came of it: name, version, error ("" for none), seconds, copied.

        Called on the actor's event loop, which goes on serving meanwhile. Engines elsewhere move on their own.
        """
        self.told = version
        if self.asks_elsewhere:
            return {"name": _name(), "version": version, "error": "", "seconds": 0.0, "copied": 0}
        if self._turn is None:
            self._turn = asyncio.Lock()
        async with self._turn:
            loop = asyncio.get_running_loop()
            return await asyncio.to_thread(self._move, actor.llm, loop, uri, run_id, version)

    def _move(self, llm: Any, loop: asyncio.AbstractEventLoop, uri: str, run_id: str, version: int) -> dict[str, Any]:
        from weight_sync.errors import WeightSyncError

        name, seconds, error = _name(), 0.0, ""
        try:
            if self._replica is None:
                self._replica = self._open(name, llm, loop, uri, run_id)
            seconds = self._replica.sync(exact=version).seconds["total"]
        except WeightSyncError as found:
            error = str(found)
        served = None if self._replica is None else self._replica.version
        copied = 0 if self._replica is None else len(self._replica.engine.copied)  # type: ignore[attr-defined]
        return {"name": name, "version": served, "error": error, "seconds": seconds, "copied": copied}

    def _open(self, name: str, llm: Any, loop: asyncio.AbstractEventLoop, uri: str, run_id: str) -> Replica:
        from weight_sync.adapters.engines.worker.remote import RemoteEngine
        from weight_sync.adapters.trainers.block import read_block
        from weight_sync.adapters.trainers.openrlhf.host import checkpoint_folder
        from weight_sync.replica import Replica

        base = checkpoint_folder(str(self._block.get("base") or self._model))
        ours = {key: value for key, value in self._block.items() if key not in ("base", "store", "listen")}
        config = read_block({**ours, "uri": uri}, base=base, replica_id=name).replace(run_id=run_id, fork=False)
        engine = RemoteEngine(_control(llm, loop), config, name)
        engine.kind = "vllm"
        return Replica.open(config, engine)


def _rollout_block(block: Mapping[str, Any]) -> blocks.Rollout:
    from weight_sync.config import load

    return load({key: value for key, value in block.items() if key != "lora"}).rollout


def _name() -> str:
    import ray

    return f"openrlhf-{ray.get_runtime_context().get_actor_id()}"


def _control(llm: Any, loop: asyncio.AbstractEventLoop) -> Any:
    """The engine's door without its socket; pausing is the host's own."""
    from weight_sync.adapters.engines.vllm.door import Door
    from weight_sync.adapters.engines.worker.control import DoorControl
    from weight_sync.adapters.engines.worker.wire import Reply, decode_error
    from weight_sync.errors import DeadlineError
    from weight_sync.ports import PauseMode

    class LoopControl(DoorControl):
        door = Door(llm)

        def _ask(self, call: str, limit: float, **arguments: Any) -> Reply:
            asked = asyncio.run_coroutine_threadsafe(self.door.reply(call, **arguments), loop)
            try:
                reply = asked.result(limit)
            except concurrent.futures.TimeoutError as error:
                asked.cancel()
                raise DeadlineError("the engine did not answer in time", field=call, expected=f"within {limit:g} s",
                                    do="look at the engine, or allow more time") from error  # fmt: skip
            if "error" in reply:
                raise decode_error(reply, "vLLM")
            return reply

        def pause(self, mode: PauseMode, limit: float) -> None:
            """Done by OpenRLHF."""

        def resume(self, limit: float) -> None:
            """Done by OpenRLHF."""

    return LoopControl()
