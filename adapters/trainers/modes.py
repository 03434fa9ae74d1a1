"""Which jobs of verl call a checkpoint engine at all.

Owns the rule; pure.
"""

from __future__ import annotations

from typing import Any

__all__ = ["never_synced"]


def never_synced(config: Any) -> tuple[str, str]:
    """Why this job would publish nothing, and what to set; two empty texts when it would publish.

    Args:
        config: the job's whole configuration, by attribute. Programs that have no trainer.v1 (fully_async, one_step_off)
            always call the engine.
    """
    trainer = config.trainer
    if trainer.get("v1") is None:
        return "", ""
    if not trainer.get("use_v1", True):
        return "the legacy trainer colocates rollouts", "set trainer.use_v1=True"
    mode = trainer.v1.get("trainer_mode")
    if mode != "separate_async":
        return (
            f"trainer mode {mode!r} never calls a checkpoint engine (verl forces its own 'naive')",
            "set trainer.v1.trainer_mode=separate_async, or leave +weight_sync out",
        )
    backend = config.actor_rollout_ref.rollout.checkpoint_engine.backend
    if backend != "weight_sync":
        return f"checkpoint_engine.backend is {backend!r}", "leave checkpoint_engine.backend to +weight_sync"
    return "", ""
