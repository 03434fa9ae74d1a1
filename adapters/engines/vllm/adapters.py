"""vLLM's own API for LoRA adapters: its routes for loading, and our control socket for what they do not tell.

Owns the requests. Owns no folder and no order (adapters/engines/adapter.py).
"""

from __future__ import annotations

import json
from pathlib import Path

from weight_sync.adapters.engines.hook import Hook
from weight_sync.adapters.engines.worker.control import DoorControl
from weight_sync.errors import EngineError

__all__ = ["VllmAdapters"]

_DO = "start vLLM with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, and look at what it says"


class VllmAdapters:
    """Implements ``weight_sync.adapters.engines.adapter.ServerAdapters``.

    ``load_inplace`` puts new weights under the name. vLLM tells blocks of its prefix cache apart by name and folder (0.29:
    by name alone), so every version has a folder of its own and the cache is dropped, too.
    """

    rank_option = "--max-lora-rank"

    def __init__(self, control: DoorControl, url: str) -> None:
        self._control, self._url = control, url.rstrip("/")

    def most(self, limit: float) -> int | None:
        """``max_lora_rank``. Raises EngineError for a server without LoRA."""
        told = self._control.lora(limit)
        if not told["enabled"]:
            raise EngineError("this vLLM takes no adapters", field=self._url, do=_DO)
        most = told["max_rank"]
        return None if most is None else int(most)

    def load(self, name: str, folder: Path, limit: float) -> None:
        """Raises EngineError with vLLM's reason."""
        facts: dict[str, str | int] = {"lora_name": name, "lora_path": str(folder), "load_inplace": True}
        try:
            self._hook("/v1/load_lora_adapter").run(facts, limit)
        except EngineError as error:
            raise EngineError("vLLM did not load the adapter", field=name, found=error.found or str(error),
                              do=_DO) from error  # fmt: skip

    def unload(self, name: str, limit: float) -> None:
        """If it is there."""
        if self._folder_of(name, limit) is not None:
            self._hook("/v1/unload_lora_adapter").run({"lora_name": name}, limit)

    def holds(self, name: str, folder: Path, limit: float) -> bool:
        """By the folder that it was loaded from."""
        return self._folder_of(name, limit) == str(folder)

    def clear(self, limit: float) -> None:
        """The prefix cache; requests in flight compute theirs again."""
        self._control.clear(limit)

    def _hook(self, route: str) -> Hook:
        return Hook("engine_url", self._url + route)

    def _folder_of(self, name: str, limit: float) -> str | None:
        models = json.loads(self._hook("/v1/models").run({}, limit, method="GET"))["data"]
        return next((str(model["root"]) for model in models if model["id"] == name and model.get("parent")), None)
