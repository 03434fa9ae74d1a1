"""What OpenRLHF lacks to run without an accelerator.

Owns doubles of CUDA calls; Ray runs `apply` in every worker process. Everything else is OpenRLHF's, DeepSpeed's and
vLLM's own.
"""

from __future__ import annotations

from typing import Any

__all__ = ["apply"]


def apply() -> None:
    """Once per process."""
    import torch

    if getattr(torch, "_without_cuda", False):
        return
    torch._without_cuda = True  # type: ignore[attr-defined]
    for name in ("set_device", "synchronize", "empty_cache", "current_stream"):
        setattr(torch.cuda, name, lambda *_, **__: None)
    torch.cuda.current_device = lambda: "cpu"
    empty = torch.empty

    def on_cpu(*args: Any, **options: Any) -> Any:
        if str(options.get("device", "")).startswith("cuda"):
            options["device"] = "cpu"
        return empty(*args, **options)

    torch.empty = on_cpu
    import torch.distributed.device_mesh as meshes

    make = meshes.init_device_mesh
    meshes.init_device_mesh = lambda kind, *a, **k: make("cpu" if kind == "cuda" else kind, *a, **k)
    import openrlhf.trainer.ppo_utils.replay_buffer as buffer

    class Torch:
        """``torch`` as that module sees it: every device is the CPU."""

        def __getattr__(self, name: str) -> Any:
            return (lambda _: torch.device("cpu")) if name == "device" else getattr(torch, name)

    buffer.torch = Torch()
