"""SGLang's own API for LoRA adapters.

Owns what SGLang does in its own way. Owns no requests (adapters/engines/adapter_routes.py), no folder and no order
(adapters/engines/adapter.py).
"""

from __future__ import annotations

from pathlib import Path

from weight_sync.adapters.engines.adapter_routes import AdapterRoutes

__all__ = ["SglangAdapters"]


class SglangAdapters(AdapterRoutes):
    """Implements ``weight_sync.adapters.engines.adapter.ServerAdapters``.

    SGLang cannot replace an adapter: the old one is unloaded first, which waits for requests that use it. Each load gets a
    new id, which its prefix cache tells blocks apart by.
    """

    server, prefix = "SGLang", ""
    how = "start SGLang with --enable-lora, --max-lora-rank and --lora-target-modules, and look at what it says"

    def load(self, name: str, folder: Path, limit: float) -> None:
        """Raises EngineError with SGLang's reason; ``name`` is no adapter then."""
        self.unload(name, limit)
        self._load(name, folder, limit)

    def clear(self, limit: float) -> None:
        """Nothing to do: no request will ever find blocks of an id that is gone, and SGLang flushes only when it is idle."""
