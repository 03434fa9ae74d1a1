"""The switches that a profile of the contract sets, by engine and trainer; what is in force is told by each adapter.

Owns the table. Owns no process: whoever starts one sets what is listed here before it starts, and weight_sync's own
plugin sets it inside vLLM. Nothing here says that a switch works: docs/contract.md says what was run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from weight_sync.errors import ConfigError

__all__ = ["SGLANG", "TORCH", "VLLM", "Switches", "set_environment", "switch_torch", "switches"]


@dataclass(frozen=True)
class Switches:
    """Of one kind of process: variables of its environment, and options of its command line."""

    environment: Mapping[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()


TORCH = Switches({
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # else torch refuses cuBLAS under deterministic algorithms
    "FLASH_ATTENTION_DETERMINISTIC": "1",  # transformers' backward
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",  # Transformer Engine, Megatron
    "NCCL_ALGO": "Ring",  # a fixed order of reduction
})  # fmt: skip
VLLM = Switches({**TORCH.environment, "VLLM_BATCH_INVARIANT": "1"})
SGLANG = Switches(TORCH.environment, ("--enable-deterministic-inference",))

_KINDS = {"torch": TORCH, "transformers": TORCH, "vllm": VLLM, "sglang": SGLANG}


def switches(profile: str, kind: str) -> Switches:
    """What a process of a kind needs under a profile. Raises ConfigError for a kind that has no such profile."""
    if kind not in _KINDS:
        raise ConfigError("no such engine", field="engine", found=kind, expected=", ".join(_KINDS))
    if profile == "native":
        return Switches()
    if profile == "unified" and kind not in ("torch", "transformers"):
        raise ConfigError("this engine cannot run the trainer's own kernels", field="contract.profile", found=profile,
                          expected="native or deterministic", do="serve by the transformers engine")  # fmt: skip
    return _KINDS[kind]


def set_environment(profile: str, kind: str, environment: MutableMapping[str, str] | None = None) -> None:
    """Sets the variables, over what was there: the contract tells what is in force."""
    target = os.environ if environment is None else environment
    target.update(switches(profile, kind).environment)


def switch_torch(profile: str) -> None:
    """Deterministic algorithms in this process, unless the profile is native, which leaves everything as it is.

    An operation that has no deterministic form raises from then on, as torch says.
    """
    if profile == "native":
        return
    import torch

    set_environment(profile, "torch")
    torch.use_deterministic_algorithms(True)
    backends: Any = torch.backends
    backends.cudnn.benchmark = False
    backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
