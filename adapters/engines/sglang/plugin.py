"""What SGLang loads in each of its processes, through the entry point group ``sglang.srt.plugins``.

Owns which doors are opened in which process. Owns none of them. Hooks are applied by SGLang's own registry before a
server is built. Servers that were not started for weight_sync get sockets too: a driver that never comes costs one idle
thread per process.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import multiprocessing
import sys
from typing import Any

__all__ = ["register"]

_MANAGER = "sglang.srt.managers.tokenizer_manager"
_SCHEDULER = "sglang.srt.managers.scheduler"
_LOADER = "sglang.srt.model_loader.loader"
_log = logging.getLogger("weight_sync.sglang")


def register() -> None:
    """Registers the hooks of what this process may come to hold; a spawned one has imported what it is there for."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    spawned = multiprocessing.parent_process() is not None
    if not spawned or _MANAGER in sys.modules:
        HookRegistry.register(f"{_MANAGER}.TokenizerManager.__init__", _name, HookType.AFTER)
        HookRegistry.register(f"{_MANAGER}.TokenizerManager.auto_create_handle_loop", _open_door, HookType.AFTER)
    if spawned and _SCHEDULER in sys.modules:
        HookRegistry.register(f"{_SCHEDULER}.Scheduler.__init__", _open_rank, HookType.AFTER)
        HookRegistry.register(f"{_SCHEDULER}.Scheduler.process_input_requests", _work, HookType.AFTER)
        HookRegistry.register(f"{_LOADER}.DefaultModelLoader.postprocess_weights", _remember, HookType.BEFORE)


def _group(port_args: Any) -> str:
    """What the processes of one server share, and no two servers do: where its schedulers get their requests from."""
    return hashlib.sha256(str(port_args.scheduler_input_ipc_name).encode()).hexdigest()[:12]


def _name(result: None, manager: Any, server_args: Any, port_args: Any, *args: Any, **kwargs: Any) -> None:
    manager.weight_sync_group = _group(port_args)


def _open_door(result: None, manager: Any) -> None:
    """In the server's process, once the loop runs that its client of the schedulers lives on."""
    if hasattr(manager, "weight_sync_door"):
        return
    from weight_sync.adapters.engines.sglang.door import Door

    door = Door(manager, manager.weight_sync_group)
    manager.weight_sync_door = asyncio.get_running_loop().create_task(door.serve())
    manager.weight_sync_door.add_done_callback(_told)


def _told(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        _log.error("weight_sync: the control socket could not be opened: %s", task.exception())


def _open_rank(result: None, scheduler: Any, server_args: Any, port_args: Any, *args: Any, **kwargs: Any) -> None:
    """In a scheduler's process, once its model is loaded."""
    from weight_sync.adapters.engines.sglang.rank_door import RankDoor

    try:
        scheduler.weight_sync_rank = RankDoor(scheduler, _group(port_args))
        scheduler.weight_sync_rank.open()
    except Exception:  # SGLang would not start over it: the driver says that the rank does not answer
        _log.exception("weight_sync: the rank's socket could not be opened")


def _work(result: None, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Once per turn of a scheduler's loop, also while it is paused."""
    door = getattr(scheduler, "weight_sync_rank", None)
    if door is not None:
        door.work()


def _remember(model: Any, *args: Any, **kwargs: Any) -> None:
    """Before weights are packed for kernels."""
    from weight_sync.adapters.engines.sglang.reload import remember

    remember(model)
