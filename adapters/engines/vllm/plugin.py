"""What vLLM loads in each of its processes, through the entry point group ``vllm.general_plugins``.

Owns which doors are opened in which process. Owns none of them. May be called more than once; never raises over what a
version of vLLM lacks, since vLLM would not start then: what is missing is logged, and the driver says what it needs.

Nothing here imports numba: vLLM walks over all loaded modules when a CPU worker starts, and trips over llvmlite's.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import multiprocessing
import sys
from contextlib import suppress
from typing import Any

from weight_sync.adapters.engines.switches import set_environment
from weight_sync.config import wanted_profile

__all__ = ["BACKEND", "register", "wanted"]

BACKEND = "weight_sync"
"""Of ``--weight-transfer-config``."""

_log = logging.getLogger("weight_sync.vllm")


def register() -> None:
    """Registers the weight-transfer engine, the control socket, the door of verl's workers and, on CPUs, the choice to keep
    weights unpacked; sets the switches of the profile that WEIGHT_SYNC_PROFILE names.
    """
    set_environment(wanted_profile(), "vllm")  # before vLLM reads it
    for step in (_register_transfer, _register_door, _register_worker, _register_in_place):
        try:
            step()
        except ImportError as error:
            _log.warning("weight_sync: this vLLM lacks what %s needs: %s", step.__name__, error)


def wanted(vllm_config: Any) -> bool:
    """Whether a server was started for weight_sync: with its backend, or with its worker extension."""
    transfer = getattr(vllm_config, "weight_transfer_config", None)
    extension = str(getattr(vllm_config.parallel_config, "worker_extension_cls", "") or "")
    return getattr(transfer, "backend", None) == BACKEND or extension.startswith("weight_sync.")


def _register_transfer() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "weight_sync.adapters.engines.vllm.transfer", "WeightSyncTransfer"
        )


def _register_door() -> None:
    """Only in a process that serves: its children never make a client of an engine."""
    if multiprocessing.parent_process() is not None or not any(n.startswith("vllm.entrypoints.") for n in sys.modules):
        return
    from vllm.v1.engine.async_llm import AsyncLLM

    _open_when_made(AsyncLLM)


def _open_when_made(client: Any) -> None:
    """From now on every ``client`` (AsyncLLM) of an engine that was started for weight_sync opens a door; others remember the
    event loop on which one can be opened later.
    """
    original = client.__init__
    if hasattr(original, "weight_sync"):
        return

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        with suppress(RuntimeError):  # no event loop: an offline engine, which its own process drives
            self.weight_sync_loop = asyncio.get_running_loop()
            if wanted(self.vllm_config):
                from weight_sync.adapters.engines.vllm.door import open_door

                open_door(self)

    init.weight_sync = True  # type: ignore[attr-defined]
    client.__init__ = init


def _register_worker() -> None:
    from vllm.v1.worker.worker_base import WorkerBase

    _extend_when_made(WorkerBase)


def _extend_when_made(worker: Any) -> None:
    """From now on every ``worker`` that verl has extended gets our door, too: vLLM takes one extension only. Nothing opens
    it unless verl trains through weight_sync.
    """
    original = worker.__init__
    if hasattr(original, "weight_sync"):
        return

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if any(kind.__module__.startswith("verl.") for kind in type(self).__mro__):
            from weight_sync.adapters.engines.vllm.extension import put_on

            put_on(type(self))

    init.weight_sync = True  # type: ignore[attr-defined]
    worker.__init__ = init


def _register_in_place() -> None:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from weight_sync.adapters.engines.vllm.in_place import install

        install()
