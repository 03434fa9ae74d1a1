"""OpenRLHF (0.11): started by ``python -m weight_sync.run openrlhf.cli.train_ppo_ray ... --weight_sync.uri ...``.

    launch.py    in the driver: puts our subclasses where OpenRLHF finds its Ray actors
    actors.py    the two subclasses, which Ray ships by value
    host.py      in a policy actor: what it publishes, and telling the engines
    rollout.py   in a rollout actor: its vLLM engine, brought to a version
    remote.py    in a rollout actor: its agent executor, answered by engines elsewhere
    hooks.py     what all of this relies on, checked by ``weight-sync doctor openrlhf``

Locks, pauses, sleep and wake-up stay OpenRLHF's own. Importing this imports nothing of OpenRLHF.
"""

from __future__ import annotations

__all__ = ["SUPPORTED"]

SUPPORTED = ("openrlhf", "0.11.2", "0.12")
"""Distribution, first version, and the first one that the adapter was not proven with."""
