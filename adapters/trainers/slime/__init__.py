"""slime, and miles, which has the same shape: the module that ``custom_megatron_init_path`` names.

    hooks.py      rebinds the updaters that slime chooses from, in each training actor
    updater.py    an updater that publishes at slime's own sync point
    host.py       what a training rank publishes
    megatron.py   Megatron's shards in checkpoint coordinates, learnt from slime's own gather and conversion

A user's YAML for ``--custom-config-path``::

    custom_megatron_init_path: weight_sync.adapters.trainers.slime.install
    weight_sync: {uri: "grpc://0.0.0.0:50071"}

Owns the name. Imports nothing of slime: `install` is called by it.
"""

from __future__ import annotations

from argparse import Namespace

__all__ = ["install"]


def install(args: Namespace) -> None:
    """slime's hook, called on every training rank before the updater is made. Nothing without a weight_sync block.

    Raises ConfigError for a wrong block and for a slime that lacks a hook point.
    """
    from weight_sync.adapters.trainers.slime.hooks import rebind

    rebind(args)
