"""What benchmarks/engine_pause.py adds to a vLLM worker: when forward steps begin and end, and vLLM's own patch, timed.

Owns the clocks; the patch is read before its clock starts.
"""

from __future__ import annotations

import json
import time
from typing import Any

from weight_sync.adapters.engines.vllm.extension import WorkerExtension

__all__ = ["BenchmarkWorker"]


class BenchmarkWorker(WorkerExtension):
    """The worker's door, and the benchmark's methods."""

    def weight_sync_benchmark_watch(self) -> None:
        """From now on the gaps between forward steps count."""
        worker: Any = self
        if not hasattr(self, "weight_sync_steps"):
            self.weight_sync_steps, self.weight_sync_ended = 0, time.perf_counter()
            original = worker.model_runner.execute_model

            def execute(*args: Any, **kwargs: Any) -> Any:
                self.weight_sync_gap = max(self.weight_sync_gap, time.perf_counter() - self.weight_sync_ended)
                try:
                    return original(*args, **kwargs)
                finally:
                    self.weight_sync_steps += 1
                    self.weight_sync_ended = time.perf_counter()

            worker.model_runner.execute_model = execute
        self.weight_sync_gap = 0.0

    def weight_sync_benchmark_steps(self) -> int:
        """How many there were."""
        return self.weight_sync_steps

    def weight_sync_benchmark_gap(self) -> float:
        """Seconds from the end of a step to the start of the next, at most."""
        return self.weight_sync_gap

    def weight_sync_benchmark_patch(self, path: str) -> float:
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
