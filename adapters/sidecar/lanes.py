"""Lanes: LoRA adapters that a sidecar follows beside the engine's own weights, each at versions of its own.

Owns which request goes by which lane, and what a lane is made of: a gate, a driver and a folder of its own. Owns no load
(adapters/engines/adapter.py) and no request. A request that names an adapter stands on both: on a version of the adapter
by its lane, and on the version of the base by the sidecar's own gate, which therefore cannot move under it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weight_sync.adapter import base_facts as facts_of_base
from weight_sync.adapters.engines.adapter import AdapterEngine, HeldBase, ServerAdapters
from weight_sync.adapters.engines.worker.door import private_folder
from weight_sync.adapters.sidecar.answers import Refusal
from weight_sync.adapters.sidecar.driver import Driver
from weight_sync.adapters.sidecar.engine import GatedEngine, ServedEngine
from weight_sync.adapters.sidecar.gate import Gate
from weight_sync.adapters.sidecar.settings import Settings
from weight_sync.codec.digest import Digest
from weight_sync.config import Config, check_name
from weight_sync.errors import ConfigError, VersionMissingError
from weight_sync.history import view_of
from weight_sync.ports import PauseMode
from weight_sync.proto.v1 import common_pb2
from weight_sync.replica import Replica

__all__ = ["Lane", "Lanes", "base_facts", "check_adapters", "open_lanes"]


@dataclass(frozen=True)
class Lane:
    """One adapter.

    Attributes:
        name: that requests give as their model.
        config: where its versions come from.
    """

    name: str
    config: Config
    gate: Gate
    engine: AdapterEngine
    gated: GatedEngine
    driver: Driver

    def unfit(self) -> str:
        """Why it may not answer on the base as it is; "" when it may."""
        return self.engine.unfit()

    @property
    def base(self) -> dict[str, Any] | None:
        """What the version in place is for; None without one."""
        kept = self.engine.mirror.current
        return None if kept is None or kept.adapter is None else facts_of_base(kept.adapter)


class Lanes:
    """All of a sidecar's."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self._lanes = {lane.name: lane for lane in lanes}

    def __iter__(self) -> Iterator[Lane]:
        return iter(self._lanes.values())

    def named(self, body: bytes) -> Lane | None:
        """The lane of a request: by ``model`` ("name", SGLang's "base:name") or by SGLang's ``lora_path``.

        Raises Refusal for a body that names an adapter in a way that cannot be read here.
        """
        if not self._lanes or not body:
            return None
        try:
            request = json.loads(body)
        except ValueError:
            if any(name.encode() in body for name in self._lanes):
                raise _unreadable("adapters are asked by JSON bodies") from None
            return None
        if not isinstance(request, dict):
            return None
        paths = request.get("lora_path")
        given = {str(path) for path in (paths if isinstance(paths, list) else [paths]) if path is not None}
        model = request.get("model")
        if isinstance(model, str):
            given |= {model, model.partition(":")[2] or model, model.rpartition(":")[2] or model} & self._lanes.keys()
        found = given & self._lanes.keys()
        if not found:
            return None
        if len(given) > 1 or (isinstance(paths, list) and None in paths):
            raise _unreadable("a request for several adapters at once")
        return self._lanes[next(iter(found))]


def _unreadable(message: str) -> Refusal:
    return Refusal(400, "adapter_invalid", message)


def check_adapters(adapters: Mapping[str, Config], config: Config, settings: Settings) -> None:
    """Raises ConfigError for a name that is none, and for fences that would keep an adapter's request over a new base."""
    for name in adapters:
        check_name("--adapter", name)
    keeps = [("weight_sync.pause", one.pause) for one in (config, *adapters.values())]
    for field, found in [*keeps, ("after_drain", settings.after_drain)]:
        if adapters and found == "keep":
            raise ConfigError("requests of adapters cannot outlive their base", field=field, found=found,
                              expected="wait or abort")  # fmt: skip


def base_facts(driver: Driver, gated: GatedEngine, view: str | None) -> Callable[[], HeldBase]:
    """What the engine's own weights are, as their replica has verified; any thread may ask."""

    def held() -> HeldBase:
        try:
            manifest = driver.replica.manifest()
        except VersionMissingError:
            return HeldBase(contract=gated.contract)
        version = common_pb2.VersionId(run_id=manifest.run_id, number=manifest.number)
        return HeldBase(version, Digest.from_proto(view_of(manifest, view).digest), gated.contract)

    return held


def open_lanes(
    adapters: Mapping[str, Config], engines: Sequence[ServedEngine], settings: Settings,
    base: Callable[[], HeldBase], stack: ExitStack,
) -> Lanes:  # fmt: skip
    """Opens what the adapters need; closed with ``stack``. Raises ConfigError for an engine that takes none."""
    if not adapters:
        return Lanes(())
    servers: list[ServerAdapters] = []
    for engine in engines:
        server = getattr(engine, "adapters", None)
        if server is None:
            raise ConfigError("this engine takes no adapters", field="--adapter", found=type(engine).__name__,
                              expected="an engine with an adapter API", do="use vllm or sglang")  # fmt: skip
        servers.append(server)
    return Lanes([_open(name, config, servers, settings, base, stack) for name, config in adapters.items()])


def _open(
    name: str, config: Config, servers: Sequence[ServerAdapters], settings: Settings, base: Callable[[], HeldBase],
    stack: ExitStack,
) -> Lane:  # fmt: skip
    engine = AdapterEngine(servers, name, _folder(name, config, settings), base, config.fence_s, config.threads)
    stack.callback(engine.close)
    gate = Gate(settings.head_trust_s, settings.wait_s)
    gated = GatedEngine(engine, gate, settings.drain_s, PauseMode.ABORT)
    driver = Driver(Replica.open(config, gated), gate, lambda: base().version is not None)
    gate.on_behind = driver.wake
    return Lane(name, config, gate, engine, gated, driver)


def _folder(name: str, config: Config, settings: Settings) -> Path:
    """Where its versions lie, for this sidecar's engines alone; found again after a restart."""
    root = private_folder() if config.cache_dir is None else Path(config.cache_dir)
    whose = hashlib.sha256("\0".join(settings.engine_url).encode()).hexdigest()[:12]
    folder = root / "adapters" / whose
    folder.mkdir(parents=True, exist_ok=True)
    return folder / name
