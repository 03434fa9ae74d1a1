"""Rebinding slime's names in a training actor, once, from its own init hook.

Owns the list of hook points and what is put there: updaters that publish, the count of trainings, and a rollout manager
that never says that there are no engines. Owns no updater (updater.py).

Ray gives an actor's class copies of its methods before any hook runs, so methods cannot be replaced here. What is replaced
are names of slime's module, which its code looks up when it needs them, and an attribute.
"""

from __future__ import annotations

import functools
import importlib
import logging
from argparse import Namespace
from types import ModuleType
from typing import Any

from weight_sync.adapters.trainers.block import read_block
from weight_sync.adapters.trainers.slime.host import SlimeHost
from weight_sync.adapters.trainers.slime.megatron import Conversion
from weight_sync.adapters.trainers.slime.updater import Nobody, make_updater
from weight_sync.config import Config
from weight_sync.errors import ConfigError
from weight_sync.group import SoloGroup, StoreGroup, TorchGroup
from weight_sync.ports import Group

__all__ = ["rebind"]

log = logging.getLogger("weight_sync.slime")

_HOSTS = ("slime", "miles")
_UPDATERS = ("UpdateWeightFromDistributed", "UpdateWeightFromTensor", "UpdateWeightFromDisk", "UpdateWeightP2P")
_DELTA = ("update_weight_from_disk_delta", "UpdateWeightFromDiskDelta")


def rebind(args: Namespace) -> None:
    """See ``weight_sync.adapters.trainers.slime.install``."""
    block = getattr(args, "weight_sync", None)
    if not block:
        log.warning(
            "custom_megatron_init_path names weight_sync, but there is no weight_sync block: nothing is published"
        )
        return
    folder = getattr(args, "save", None)
    config = read_block(block, beside=folder, base=getattr(args, "hf_checkpoint", None), overlap=True)
    actor = _actor_module()
    package = actor.__name__.partition(".")[0]
    reader = _need(actor, "UpdateWeightFromDistributed")
    if getattr(reader, "_weight_sync_reads", None) is not None:
        return  # the same process was initialised before
    steps = _Steps()
    _count_trainings(actor, steps)
    _manager_with_engines(_need(actor, "MegatronTrainRayActor"))

    def host_of(updater: Any) -> SlimeHost:
        conversion = Conversion(reader, updater.args, updater.model, updater.model_name, updater.quantization_config)
        backup = updater.weight_sync_backup if getattr(args, "offload_train", False) else None
        return SlimeHost(config, _group(package, config), conversion, backup)

    for module, name in _places(actor, args):
        base = getattr(module, name)
        made = make_updater(base, host_of, steps.value)
        made._weight_sync_reads = reader
        setattr(module, name, made)
    log.info("updaters of %s publish to %s", package, config.uri)


class _Steps:
    """How often this actor has trained, counted over resumes."""

    def __init__(self) -> None:
        self.done: int | None = None

    def value(self) -> int | None:
        """None when it is not known, as before the checkpoint was loaded."""
        return self.done


def _actor_module() -> ModuleType:
    """The module whose names slime's selection reads. Raises ConfigError outside of a training actor."""
    for package in _HOSTS:
        try:
            return importlib.import_module(f"{package}.backends.megatron_utils.actor")
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith(package):
                raise
    raise ConfigError("neither slime nor miles is importable", field="custom_megatron_init_path",
                      do="run it as slime's --custom-megatron-init-path")  # fmt: skip


def _need(owner: Any, name: str) -> Any:
    found = getattr(owner, name, None)
    if found is None:
        raise ConfigError("this version of the host lacks a hook point", field=f"{owner.__name__}.{name}",
                          do="weight-sync doctor slime lists them all; use a supported version")  # fmt: skip
    return found


def _places(actor: ModuleType, args: Namespace) -> list[tuple[ModuleType, str]]:
    """Where the selection finds its classes; the delta updater is imported by it from its own module."""
    places = [(actor, name) for name in _UPDATERS if hasattr(actor, name)]
    if getattr(args, "update_weight_mode", "full") == "delta":
        home = importlib.import_module(f"{actor.__package__}.update_weight.{_DELTA[0]}")
        places.append((home, _DELTA[1]))
    return places


def _count_trainings(actor: ModuleType, steps: _Steps) -> None:
    load, train = _need(actor, "initialize_model_and_optimizer"), _need(actor, "train")

    @functools.wraps(load)
    def initialize_model_and_optimizer(args: Any, role: str, *more: Any, **options: Any) -> Any:
        result = load(args, role, *more, **options)
        steps.done = int(result[-1]) + 1
        return result

    @functools.wraps(train)
    def counted(rollout_id: int, *more: Any, **options: Any) -> Any:
        result = train(rollout_id, *more, **options)
        steps.done = rollout_id + 1
        return result

    actor.initialize_model_and_optimizer = initialize_model_and_optimizer  # type: ignore[attr-defined]
    actor.train = counted  # type: ignore[attr-defined]


def _manager_with_engines(cls: Any) -> None:
    """slime skips an update when the rollout manager has no engines: for a remote fleet it gets one that stands for it."""

    def read(self: Any) -> Any:
        return self.__dict__["_weight_sync_manager"]

    def write(self: Any, handle: Any) -> None:
        self.__dict__["_weight_sync_manager"] = handle if handle is None else _Manager(handle)

    cls.rollout_manager = property(read, write)


class _Manager:
    """The rollout manager's handle; everything but the list of engines goes straight through."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._handle, name)
        return _Engines(method) if name == "get_updatable_engines_and_lock" else method


class _Engines:
    def __init__(self, method: Any) -> None:
        self._method = method

    def remote(self, *args: Any, **options: Any) -> Any:
        """As the method's, with `Nobody` in the list when nobody is there."""
        import ray

        reference = self._method.remote(*args, **options)
        engines, lock, new, *facts = ray.get(reference)
        if engines:
            return reference
        return ray.put(
            ([Nobody()], lock, new or 1, [1], [0], [{}]) if len(facts) == 3 else ([Nobody()], lock, 1, *facts)
        )


def _group(package: str, config: Config) -> Group:
    """The training ranks, over a store of their own: slime takes its process groups down and up again."""
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return SoloGroup()
    gloo = importlib.import_module(f"{package}.utils.distributed_utils").get_gloo_group()
    return StoreGroup(TorchGroup(existing=gloo), timeout_s=config.timeout_s, host=_own_address())


def _own_address() -> str | None:
    import ray

    return str(ray.util.get_node_ip_address()) if ray.is_initialized() else None
