"""slime, and miles, which has the same shape: the module that ``custom_megatron_init_path`` names.

    hooks.py      rebinds the updaters that slime chooses from, in each training actor
    updater.py    an updater that publishes at slime's own sync point
    host.py       what a training rank publishes
    megatron.py   Megatron's shards in checkpoint coordinates, learnt from slime's own gather and conversion
    rollout.py    a rollout function whose samples are answered by engines elsewhere

A user's YAML for ``--custom-config-path``::

    custom_megatron_init_path: weight_sync.adapters.trainers.slime.install
    weight_sync: {uri: "grpc://0.0.0.0:50071"}

and, for samples from engines elsewhere::

    rollout_function_path: weight_sync.adapters.trainers.slime.generate_rollout
    weight_sync: {uri: ..., rollout: {engines: ["http://site-a:9000"], flavour: sglang, max_staleness: 2}}

Owns the names. Imports nothing of slime: these functions are called by it.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

__all__ = ["generate", "generate_rollout", "install"]


def install(args: Namespace) -> None:
    """slime's hook, called on every training rank before the updater is made. Nothing without a weight_sync block.

    Raises ConfigError for a wrong block and for a slime that lacks a hook point.
    """
    from weight_sync.adapters.trainers.slime.hooks import rebind

    rebind(args)


def generate_rollout(args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """slime's ``--rollout-function-path``, and ``--eval-function-path``: a batch from engines elsewhere.

    Raises ConfigError for a wrong block, DeadlineError when no engine answers in time.
    """
    from weight_sync.adapters.trainers.slime.rollout import roll_out

    return roll_out(args, rollout_id, data_source, evaluation)


async def generate(args: Namespace, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """slime's ``--custom-generate-function-path``: one sample from engines elsewhere; `generate_rollout` sets it."""
    from weight_sync.adapters.trainers.slime.rollout import answered

    return await answered(args, sample, sampling_params)
