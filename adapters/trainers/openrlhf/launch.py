"""In OpenRLHF's driver, before its own code runs: our actors instead of its own.

Owns the two replacements and when they are not made. Owns no option (weight_sync.run has taken ours off the command
line) and no actor (actors.py).
"""

from __future__ import annotations

import importlib
from typing import Any

from weight_sync.adapters.trainers.block import read_block
from weight_sync.adapters.trainers.openrlhf import SUPPORTED
from weight_sync.adapters.trainers.openrlhf.actors import policy_actor, rollout_actor
from weight_sync.adapters.trainers.openrlhf.hooks import ACTORS, check_hooks
from weight_sync.adapters.trainers.versions import check_version
from weight_sync.errors import ConfigError

__all__ = ["TARGET", "prepare"]

TARGET = "openrlhf.cli.train_ppo_ray"


def prepare(target: str, block: dict[str, Any]) -> None:
    """Makes ``target`` train through weight_sync once it is run; without a block, or with backend native, leaves it.

    Args:
        target: the module that will run as the main program.
        block: the ``--weight_sync.*`` options. ``lora`` (merge or adapter) says what is published of a model that
            trains LoRA; every other key is one of `Config`.

    Raises ConfigError for what is wrong with the options, the version of OpenRLHF or its hook points.
    """
    if not block or block.get("backend") == "native":
        return
    if target != TARGET:
        raise ConfigError("this program of OpenRLHF has no rollout engines to sync", field="target", found=target,
                          expected=TARGET)  # fmt: skip
    check_version(*SUPPORTED)
    settings = {key: value for key, value in block.items() if key != "lora"}
    lora = block.get("lora", "merge")
    if lora not in ("merge", "adapter"):
        raise ConfigError("unknown value", field="weight_sync.lora", found=lora, expected="merge or adapter")
    read_block(settings)  # a bad key is said before anything is loaded
    check_hooks()
    import ray

    made = {"PolicyModelActor": (policy_actor, {"num_gpus": 1}), "RolloutRayActor": (rollout_actor, {})}
    for home, name in ACTORS:
        module: Any = importlib.import_module(home)
        make, options = made[name]
        actor = make(getattr(module, name).__ray_metadata__.modified_class, settings, lora)
        setattr(module, name, ray.remote(**options)(actor) if options else ray.remote(actor))
