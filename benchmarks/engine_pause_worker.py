"""What benchmarks/engine_pause.py adds to a vLLM worker: vLLM's own patch of checkpoint weights, timed where it runs.

Owns the timing of that one function; the patch is read before the clock starts.
"""

from __future__ import annotations

import json
import time
from typing import Any

from weight_sync.adapters.engines.vllm.extension import WorkerExtension

__all__ = ["BenchmarkWorker"]


class BenchmarkWorker(WorkerExtension):
    """The worker's door, and the benchmark's method."""

    def weight_sync_benchmark(self, path: str) -> float:
        """Seconds of ``load_checkpoint_weight_patches`` for the patch in the file."""
        from safetensors import safe_open
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.checkpoint_weight_patch import (
            CheckpointWeightPatch,
            load_checkpoint_weight_patches,
        )

        worker: Any = self
        patches = []
        with safe_open(path, "pt") as file:
            for name, shape in (file.metadata() or {}).items():
                values, indices = file.get_tensor(f"{name}|values"), file.get_tensor(f"{name}|indices")
                patches.append(CheckpointWeightPatch(name, tuple(json.loads(shape)), values.dtype, values, indices))
        model = worker.model_runner.get_model()
        with set_current_vllm_config(worker.vllm_config):
            began = time.perf_counter()
            load_checkpoint_weight_patches(model, patches)
            return time.perf_counter() - began
