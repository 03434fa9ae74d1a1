"""A rollout worker's side of a sync: the version that it ended with, in place or whole.

Owns which of the two ways is taken, and saying so. Owns neither way (live.py, copy.py) and no protocol of verl's
(engine.py).
"""

from __future__ import annotations

import asyncio
import functools
import logging
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from weight_sync.adapters.trainers.block import dialled, read_block
from weight_sync.adapters.trainers.verl.copy import HostCopy, tensors_of
from weight_sync.adapters.trainers.verl.live import Live
from weight_sync.adapters.trainers.verl.notice import IN_PLACE, WHOLE, Notice, read_notice, tell_path
from weight_sync.errors import WeightSyncError

if TYPE_CHECKING:
    import torch

    from weight_sync.config import Config

__all__ = ["Arrival", "Rollout", "hook_rollout"]

log = logging.getLogger("weight_sync.verl")

_CLIENT = "verl.workers.rollout.vllm_rollout.vllm_rollout"
_MARK = "_weight_sync_hooked"


def hook_rollout() -> None:
    """Wraps verl's client of its vLLM servers, where it is loaded: workers are brought to a version in place before verl
    would make them wait for tensors. Once.
    """
    _be_heard()
    module = sys.modules.get(_CLIENT)
    client: Any = None if module is None else getattr(module, "ServerAdapter", None)
    if client is None or getattr(client.update_weights, _MARK, False):
        return
    original = client.update_weights

    @functools.wraps(original)
    async def update_weights(self: Any, weights: Any, *args: Any, **options: Any) -> Any:
        if isinstance(weights, Arrival) and await weights.in_place(self):
            return None
        return await original(self, weights, *args, **options)

    setattr(update_weights, _MARK, True)
    client.update_weights = update_weights


def _be_heard() -> None:
    """Some processes of verl's let nothing but errors out: the way of each version is said past that. Once."""
    if log.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s:%(asctime)s:%(name)s: %(message)s"))
    handler.addFilter(lambda record: all(other.level > record.levelno for other in logging.root.handlers))
    log.addHandler(handler)
    log.setLevel(logging.INFO)


class Rollout:
    """One rollout worker, from sync to sync.

    Args:
        block: the weight_sync block.

    Attributes:
        copy: this worker's hold on its host's copy of the weights; None while it needs none.
    """

    def __init__(self, block: object) -> None:
        self._block = block
        self.copy: HostCopy | None = None
        self._live: Live | None = None
        self._said = ""

    def config(self, where: dict[str, Any], base: str | None = None) -> Config:
        """As a reader's. ``base``: used where the block has none."""
        return dialled(read_block(self._block, base=base), where["host"])

    def live(self, adapter: Any, where: dict[str, Any]) -> Live:
        """The workers of the server that ``adapter`` is verl's client of."""
        if self._live is None:
            self._live = Live(adapter, self.config(where, base=adapter.model_config.local_path))
        return self._live

    def loads(self, reason: str) -> None:
        """Every tensor is yielded: said once for each reason."""
        if self._live is not None:
            self._live.loads()
        if reason != self._said:
            log.warning("this rollout takes versions by a full load: %s", reason)
        self._said = reason

    def has(self, version: int) -> None:
        """The version is in place."""
        self._said = ""
        if self.copy is not None and self.copy.let_go(version):
            self.copy = None


class Arrival:
    """One sync of one rollout worker: what verl iterates over to load every tensor, unless `in_place` has spared it that.

    Args:
        where: how the trainer is asked how the sync ended.
        step: verl's.
    """

    def __init__(self, rollout: Rollout, where: dict[str, Any], step: int | None) -> None:
        self._rollout, self._where, self._step = rollout, where, step
        self._began = time.perf_counter()
        self._notice: Notice | None = None
        self._reason = "its engine is not verl's vLLM"
        self._counts = True  # of a replica's workers, one is counted

    async def notice(self) -> Notice:
        """How the sync ended; waits for that. Raises DeadlineError and StoreUnavailableError."""
        if self._notice is None:
            limit = self._rollout.config(self._where).timeout_s
            self._notice = await asyncio.to_thread(read_notice, self._where, limit)
        return self._notice

    async def in_place(self, adapter: Any) -> bool:
        """Whether the workers of verl's vLLM hold the version now, proven by digest; then verl needs to load nothing.

        Does what verl does after a load: drops the prefix cache, and tells the server the step.
        """
        notice = await self.notice()
        if notice.version is None:
            return False
        self._counts = bool(adapter._has_server)
        live = self._rollout.live(adapter, self._where)
        self._reason = await asyncio.to_thread(live.reach, notice.run_id, notice.version)
        if self._reason:
            return False
        self._rollout.has(notice.version)
        if adapter._ensure_server_handle():
            await adapter.server_handle.clear_kv_cache.remote()
            if self._step is not None:
                await adapter.server_handle.set_global_steps.remote(self._step)
        await self._tell(IN_PLACE)
        return True

    def __aiter__(self) -> AsyncIterator[tuple[str, torch.Tensor]]:
        return self._tensors()

    async def _tensors(self) -> AsyncIterator[tuple[str, torch.Tensor]]:
        notice = await self.notice()
        if notice.version is None:
            log.error("the first sync failed, rollouts keep the checkpoint that they booted from")
            return
        rollout = self._rollout
        rollout.loads(self._reason)
        if rollout.copy is None:
            rollout.copy = HostCopy(rollout.config(self._where))
        folder = await asyncio.to_thread(rollout.copy.reach, notice.run_id, notice.version)
        log.info("full load of version %d (step %s) from %s, there after %.3f s%s", notice.version, self._step,
                 folder, time.perf_counter() - self._began, "; the sync failed" if notice.failed else "")  # fmt: skip
        await self._tell(WHOLE)
        for name, tensor in tensors_of(folder):
            yield name, _to_device(tensor)

    async def _tell(self, path: str) -> None:
        if self._counts:
            with suppress(WeightSyncError):  # a metric that the trainer goes without; what matters is in place
                await asyncio.to_thread(tell_path, self._where, path, self._rollout.config(self._where).fence_s)


def _to_device(tensor: torch.Tensor) -> torch.Tensor:
    from verl.utils.device import get_device_id

    return tensor.to(get_device_id())
