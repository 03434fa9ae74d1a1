"""What the adapter relies on in OpenRLHF and vLLM, point by point.

Owns the list, for the launcher and for ``weight-sync doctor openrlhf``. Changes nothing.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

from weight_sync.adapters.trainers.openrlhf import SUPPORTED
from weight_sync.adapters.trainers.versions import installed, outside
from weight_sync.checkup import ABSENT, Check, hook
from weight_sync.errors import ConfigError

__all__ = ["ACTORS", "check_hooks", "doctor", "hook_points"]

ACTORS = (
    ("openrlhf.trainer.ray.ppo_actor", "PolicyModelActor"),
    ("openrlhf.trainer.ray.vllm_engine", "RolloutRayActor"),
)
"""Ray actor classes that are replaced: module and name."""

_INIT = ("strategy", "pretrain", "max_steps", "vllm_engines")


def hook_points() -> Iterator[Check]:
    """Every point in the host's code."""
    (policy, actor), (engine, rollout) = ACTORS
    yield hook(policy, _inside(actor, "init_model_from_pretrained"), _INIT)
    yield hook(policy, _inside(actor, "broadcast_to_vllm"))
    yield hook(policy, _inside(actor, "fit"), ("kl_ctl",))
    yield hook(engine, _inside(rollout, "__init__"), ("kwargs",))
    yield hook("openrlhf.utils.agent", "AgentExecutorBase.execute", ("llm_engine", "hf_tokenizer"))
    for name in ("_load_agent_executor", "SingleTurnAgentExecutor"):
        yield hook(engine, name)
    yield hook("openrlhf.utils.logging_utils", "init_logger")
    yield hook(engine, "create_vllm_engines")
    yield _makes_engines(engine, rollout)
    for method in ("collective_rpc", "reset_prefix_cache"):
        yield hook("vllm", f"AsyncLLMEngine.{method}")


def doctor() -> Iterator[Check]:
    """The version, then every point."""
    distribution, lowest, below = SUPPORTED
    found = installed(distribution)
    reason = ABSENT if found is None else outside(found, lowest, below)
    yield Check(f"{distribution} {found or ''}".strip(), not reason, reason,
                f"pip install '{distribution}>={lowest},<{below}'")  # fmt: skip
    yield from hook_points()


def check_hooks() -> None:
    """Raises ConfigError that names the first point that is not as expected."""
    for check in hook_points():
        if not check.ok:
            raise ConfigError("OpenRLHF lacks a hook point", field=check.what, found=check.found,
                              do="weight-sync doctor openrlhf lists them all; use a supported version")  # fmt: skip


def _inside(actor: str, method: str) -> str:
    return f"{actor}.__ray_metadata__.modified_class.{method}"


def _makes_engines(module: str, actor: str) -> Check:
    """Whether engines are made by the name that is replaced, with the argument that is overridden."""
    what = f"{module}.create_vllm_engines makes {actor} with a worker_extension_cls"
    try:
        made: Any = importlib.import_module(module)
        source = inspect.getsource(made.create_vllm_engines)
    except Exception as error:  # as `hook`: whatever the host raises
        return Check(what, False, f"{type(error).__name__}: {error}")
    lacking = [word for word in (actor, "worker_extension_cls") if word not in source]
    return Check(what, not lacking, f"no {', '.join(lacking)} in it" if lacking else "")
