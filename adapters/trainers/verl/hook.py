"""How the checkpoint engine reaches the training engine: verl hands third parties a generator of full tensors only.

Owns one wrapper, around ``ActorRolloutRefWorker.update_weights``, which names the training engine to ours before verl's
own code runs. Owns no weight.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from weight_sync.adapters.trainers.verl.engine import WeightSyncEngine
from weight_sync.errors import ConfigError

__all__ = ["WORKERS", "hook_actor", "naive_refused"]

WORKERS = "verl.workers.engine_workers"
_MARK = "_weight_sync_hooked"


def hook_actor() -> None:
    """Wraps the worker class where it is loaded: in the actor's process, whose own code imports us. Once."""
    module = sys.modules.get(WORKERS)
    worker: Any = None if module is None else getattr(module, "ActorRolloutRefWorker", None)
    if worker is None or getattr(worker.update_weights, _MARK, False):
        return
    original = worker.update_weights

    @functools.wraps(original)  # with the attributes by which verl dispatches it
    async def update_weights(self: Any, global_steps: int | None = None, mode: str = "auto") -> Any:
        engine = getattr(self, "checkpoint_engine", None)
        if isinstance(engine, WeightSyncEngine):
            reason = naive_refused(mode, engine.syncs)
            if reason:
                raise ConfigError(reason, field="trainer.v1.trainer_mode", expected="separate_async",
                                  do="set trainer.v1.trainer_mode=separate_async, or leave +weight_sync out")  # fmt: skip
            engine.bind(self.actor.engine)
        return await original(self, global_steps=global_steps, mode=mode)

    setattr(update_weights, _MARK, True)
    worker.update_weights = update_weights


def naive_refused(mode: str, syncs: int) -> str:
    """Why a sync of verl's own is a misconfiguration; "" when it is not.

    Trainer modes that colocate rollouts sync them without any checkpoint engine. Where rollouts are separate, ours comes
    first and verl's own only serves the replicas that share the trainer's GPUs.
    """
    if mode == "naive" and syncs == 0:
        return "this trainer mode never calls a checkpoint engine: weight_sync would publish nothing"
    return ""
