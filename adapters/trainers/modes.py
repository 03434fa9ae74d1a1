"""Which jobs of verl call a checkpoint engine at all, and which agent loops a job with engines elsewhere takes.

Owns the rules; pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

__all__ = ["AGENT_LOOPS", "never_synced", "remote_loops"]

AGENT_LOOPS = {"single_turn_agent": "weight_sync", "tool_agent": "weight_sync_tools"}
"""verl's loops, and ours that stand for them (verl/agent_loops.yaml)."""


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


def remote_loops(config: Any) -> tuple[Mapping[str, str], str]:
    """What to set in ``actor_rollout_ref.rollout.agent`` so that engines elsewhere answer, and why that cannot be done.

    Nothing where the job names no such engines, or has set everything itself. Our loops are named in a file that verl
    takes one of: a job with one of its own lists ours in there.
    """
    agent = config.actor_rollout_ref.rollout.agent
    default = agent.get("default_agent_loop")
    if not config.weight_sync.rollout.engines:
        return {}, ""
    if agent.get("agent_loop_config_path"):
        ours = default in AGENT_LOOPS.values()
        return {}, "" if ours else f"agent_loop_config_path is set, and default_agent_loop is {default!r}"
    if default not in (*AGENT_LOOPS, *AGENT_LOOPS.values()):
        return {}, f"default_agent_loop is {default!r}, which no loop of ours stands for"
    return {"default_agent_loop": AGENT_LOOPS.get(default, default), "agent_loop_config_path": _loops_file()}, ""


def _loops_file() -> str:
    """Found without importing verl, which the package of its adapter does."""
    spec = find_spec("weight_sync.adapters.trainers")
    assert spec is not None and spec.submodule_search_locations, "a package"
    return str(Path(next(iter(spec.submodule_search_locations))) / "verl" / "agent_loops.yaml")
