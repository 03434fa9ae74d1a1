"""What servers' own APIs for LoRA adapters have in common: two routes, a list of models, and our control socket.

Owns the requests. Owns no order of them and no folder (adapter.py); what an engine does in its own way is its adapter's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

from weight_sync.adapters.engines.hook import Hook
from weight_sync.adapters.engines.worker.control import DoorControl
from weight_sync.errors import EngineError

__all__ = ["AdapterRoutes"]


class AdapterRoutes:
    """The part of ``weight_sync.adapters.engines.adapter.ServerAdapters`` that engines share.

    Attributes:
        server: the engine's name, for errors.
        prefix: of its routes.
        how: what to start it with.
    """

    rank_option = "--max-lora-rank"
    server: ClassVar[str]
    prefix: ClassVar[str]
    how: ClassVar[str]

    def __init__(self, control: DoorControl, url: str) -> None:
        self._control, self._url = control, url.rstrip("/")

    def most(self, limit: float) -> int | None:
        """``max_lora_rank``. Raises EngineError for a server without LoRA."""
        told = self._control.lora(limit)
        if not told["enabled"]:
            raise EngineError(f"this {self.server} takes no adapters", field=self._url, do=self.how)
        most = told["max_rank"]
        return None if most is None else int(most)

    def unload(self, name: str, limit: float) -> None:
        """If it is there."""
        if self._folder_of(name, limit) is not None:
            self._hook("unload_lora_adapter").run({"lora_name": name}, limit)

    def holds(self, name: str, folder: Path, limit: float) -> bool:
        """By the folder that it was loaded from."""
        return self._folder_of(name, limit) == str(folder)

    def _load(self, name: str, folder: Path, limit: float, **more: bool) -> None:
        """Raises EngineError with the server's reason."""
        facts: dict[str, str | int] = {"lora_name": name, "lora_path": str(folder), **more}
        try:
            self._hook("load_lora_adapter").run(facts, limit)
        except EngineError as error:
            raise EngineError(f"{self.server} did not load the adapter", field=name, found=error.found or str(error),
                              do=self.how) from error  # fmt: skip

    def _hook(self, route: str) -> Hook:
        return Hook("engine_url", f"{self._url}{self.prefix}/{route}")

    def _folder_of(self, name: str, limit: float) -> str | None:
        models = json.loads(Hook("engine_url", f"{self._url}/v1/models").run({}, limit, method="GET"))["data"]
        return next((str(model["root"]) for model in models if model["id"] == name and model.get("parent")), None)
