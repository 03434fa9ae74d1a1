"""vLLM's own API for LoRA adapters.

Owns what vLLM does in its own way. Owns no requests (adapters/engines/adapter_routes.py), no folder and no order
(adapters/engines/adapter.py).
"""

from __future__ import annotations

from pathlib import Path

from weight_sync.adapters.engines.adapter_routes import AdapterRoutes

__all__ = ["VllmAdapters"]


class VllmAdapters(AdapterRoutes):
    """Implements ``weight_sync.adapters.engines.adapter.ServerAdapters``.

    ``load_inplace`` puts new weights under the name. vLLM tells blocks of its prefix cache apart by name and folder (0.29:
    by name alone), so every version has a folder of its own and the cache is dropped, too.
    """

    server, prefix = "vLLM", "/v1"
    how = "start vLLM with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, and look at what it says"

    def load(self, name: str, folder: Path, limit: float) -> None:
        """Raises EngineError with vLLM's reason."""
        self._load(name, folder, limit, load_inplace=True)

    def clear(self, limit: float) -> None:
        """The prefix cache; requests in flight compute theirs again."""
        self._control.clear(limit)
