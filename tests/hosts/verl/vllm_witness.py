"""What verl's vLLM worker holds after each version: verl's own extension of the worker, and a file of the live parameters.

Owns the files, and one failure on purpose. Changes nothing of what verl and vLLM do.

    WEIGHT_SYNC_TEST_OUT    folder: vllm-N-whole-RANK.safetensors after a load by verl, vllm-N-in_place-RANK after a commit
    WEIGHT_SYNC_TEST_FAIL   the commit with this number fails
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from witness import dump_engine  # of tests/hosts/openrlhf

from weight_sync.adapters.engines.vllm.extension import WorkerExtension

__all__ = ["Witness"]


class Witness(vLLMColocateWorkerExtension):  # type: ignore[misc]
    """Named by ``engine_kwargs.vllm.worker_extension_cls``."""

    def update_weights_from_ipc(self, *args: Any, **options: Any) -> None:
        super().update_weights_from_ipc(*args, **options)
        _dump(self, "whole")


def _dump(worker: Any, way: str) -> None:
    folder = Path(os.environ["WEIGHT_SYNC_TEST_OUT"])
    before = len(list(folder.glob(f"vllm-*-{worker.rank}.safetensors")))
    dump_engine(worker, str(folder / f"vllm-{before}-{way}-{worker.rank}.safetensors"))


_original = WorkerExtension.weight_sync_call
_commits = 0


def _witnessed(self: Any, verb: str, arguments: str) -> str:
    global _commits
    if verb != "commit":
        return _original(self, verb, arguments)
    _commits += 1
    if _commits == int(os.environ.get("WEIGHT_SYNC_TEST_FAIL", "0")):
        self.weight_sync_core._rank._store._staged = None
    answer = _original(self, verb, arguments)
    if '"error"' not in answer:
        _dump(self, "in_place")
    return answer


WorkerExtension.weight_sync_call = _witnessed  # type: ignore[method-assign]  # which the plugin puts onto verl's worker
