"""Stand-in for vLLM's AsyncLLMEngine: the worker core of weight_sync over a small model of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from worker_cases import Host

from weight_sync.adapters.engines.worker.core import WorkerCore

EXTENSION = "weight_sync.adapters.engines.vllm.extension.WorkerExtension"


class AsyncLLMEngine:
    def __init__(self, model: str, worker_extension_cls: str, **_: Any) -> None:
        self.host = Host(Path(model))
        self.core = WorkerCore(self.host) if worker_extension_cls == EXTENSION else None
        self.resets = 0

    async def collective_rpc(self, method: str, args: Any = ()) -> list[Any]:
        assert method == "weight_sync_call" and self.core is not None
        verb, arguments = args
        return [json.dumps(self.core.call(verb, json.loads(arguments)))]

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        self.resets += 1
        return True

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        raise AssertionError("pausing is OpenRLHF's own")

    async def resume_generation(self) -> None:
        raise AssertionError("resuming is OpenRLHF's own")
