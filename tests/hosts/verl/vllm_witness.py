"""What verl's vLLM worker holds after each load: verl's own extension of the worker, and a file of the live parameters.

Owns the file, WEIGHT_SYNC_TEST_OUT/vllm-N.safetensors after load N. Changes nothing of what verl does.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from witness import dump_engine  # of tests/hosts/openrlhf

__all__ = ["Witness"]


class Witness(vLLMColocateWorkerExtension):  # type: ignore[misc]
    """Named by ``engine_kwargs.vllm.worker_extension_cls``."""

    def update_weights_from_ipc(self, *args: Any, **options: Any) -> None:
        super().update_weights_from_ipc(*args, **options)
        folder = Path(os.environ["WEIGHT_SYNC_TEST_OUT"])
        dump_engine(self, str(folder / f"vllm-{len(list(folder.glob('vllm-*')))}.safetensors"))
