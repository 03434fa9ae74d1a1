"""The door of a worker: one method through which calls reach its core.

Owns the method's name and the core's place. Given to vLLM as ``--worker-extension-cls
weight_sync.adapters.engines.vllm.extension.WorkerExtension``, or put onto the worker's class by the weight-transfer
engine, or by the plugin where verl has extended the worker, which is the same thing without the option.
"""

from __future__ import annotations

import json
from typing import Any

from weight_sync.adapters.engines.worker.wire import Reply, encode_error

__all__ = ["WorkerExtension", "put_on"]


class WorkerExtension:
    """Mixed into vLLM's worker; its names must not clash with the worker's."""

    def weight_sync_call(self, verb: str, arguments: str) -> str:
        """See `WorkerCore.call`; arguments and answer as JSON text.

        Never raises, and answers plain text only: vLLM loses the answers of the other workers over an exception in one,
        and its scheduler dies of an answer that it cannot serialise.
        """
        core = getattr(self, "weight_sync_core", None)
        try:
            if core is None:
                from weight_sync.adapters.engines.vllm.host import VllmHost
                from weight_sync.adapters.engines.worker.core import WorkerCore
                from weight_sync.config import default_threads

                core = WorkerCore(VllmHost(self), default_threads())
                self.weight_sync_core = core
        except Exception as error:
            worker: Any = self
            world = worker.vllm_config.parallel_config.world_size
            failed: Reply = {"epoch": "", "rank": int(worker.rank), "world": int(world), **encode_error(error)}
            return json.dumps(failed)
        return json.dumps(core.call(verb, json.loads(arguments)))


def put_on(worker: type) -> None:
    """Gives a worker's class the method, unless it has it."""
    if not hasattr(worker, "weight_sync_call"):
        worker.weight_sync_call = WorkerExtension.weight_sync_call  # type: ignore[attr-defined]
