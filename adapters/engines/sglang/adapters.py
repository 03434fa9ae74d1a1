"""SGLang's own API for LoRA adapters: its routes for loading, and our control socket for what they do not tell.

Owns the requests. Owns no folder and no order (adapters/engines/adapter.py).
"""

from __future__ import annotations

import json
from pathlib import Path

from weight_sync.adapters.engines.hook import Hook
from weight_sync.adapters.engines.worker.control import DoorControl
from weight_sync.errors import EngineError

__all__ = ["SglangAdapters"]

_DO = "start SGLang with --enable-lora, --max-lora-rank and --lora-target-modules, and look at what it says"


class SglangAdapters:
    """Implements ``weight_sync.adapters.engines.adapter.ServerAdapters``.

    SGLang cannot replace an adapter: the old one is unloaded first. Each load gets a new id, which its prefix cache tells
    blocks apart by.
    """

    rank_option = "--max-lora-rank"

    def __init__(self, control: DoorControl, url: str) -> None:
        self._control, self._url = control, url.rstrip("/")

    def most(self, limit: float) -> int | None:
        """``max_lora_rank``. Raises EngineError for a server without LoRA."""
        told = self._control.lora(limit)
        if not told["enabled"]:
            raise EngineError("this SGLang takes no adapters", field=self._url, do=_DO)
        most = told["max_rank"]
        return None if most is None else int(most)

    def load(self, name: str, folder: Path, limit: float) -> None:
        """Raises EngineError with SGLang's reason; ``name`` is no adapter then."""
        self.unload(name, limit)
        try:
            self._hook("/load_lora_adapter").run({"lora_name": name, "lora_path": str(folder)}, limit)
        except EngineError as error:
            raise EngineError("SGLang did not load the adapter", field=name, found=error.found or str(error),
                              do=_DO) from error  # fmt: skip

    def unload(self, name: str, limit: float) -> None:
        """If it is there; waits for requests that use it."""
        if self._folder_of(name, limit) is not None:
            self._hook("/unload_lora_adapter").run({"lora_name": name}, limit)

    def holds(self, name: str, folder: Path, limit: float) -> bool:
        """By the folder that it was loaded from."""
        return self._folder_of(name, limit) == str(folder)

    def clear(self, limit: float) -> None:
        """Nothing to do: no request will ever find blocks of an id that is gone, and SGLang flushes only when it is idle."""

    def _hook(self, route: str) -> Hook:
        return Hook("engine_url", self._url + route)

    def _folder_of(self, name: str, limit: float) -> str | None:
        models = json.loads(self._hook("/v1/models").run({}, limit, method="GET"))["data"]
        return next((str(model["root"]) for model in models if model["id"] == name and model.get("parent")), None)
