"""verl (0.9): the module that ``checkpoint_engine.custom_backend_module`` names.

    host.py      what verl's actor publishes, from its FSDP2 shards or from verl's own generator
    engine.py    the checkpoint engine ``weight_sync``, on both sides
    notice.py    how the rollout side learns which version a sync ended with
    arrival.py   how a rollout worker gets there: in place or whole
    live.py      in place: verl's own vLLM workers, driven where their weights lie
    copy.py      whole: one copy of the served weights per rollout host
    hook.py      reaching the training engine in the actor
    agent.py     verl's agent loops, answered by engines elsewhere; agent_loops.yaml names them

Importing it registers the engine and hooks the actor's worker class, in whatever process of verl's it happens. Owns
that and nothing else. Raises ConfigError on a version of verl that the adapter was not proven with.
"""

from __future__ import annotations

from weight_sync.adapters.trainers.verl.engine import WeightSyncEngine
from weight_sync.adapters.trainers.verl.hook import hook_actor
from weight_sync.adapters.trainers.versions import check_version

__all__ = ["SUPPORTED", "WeightSyncEngine"]

SUPPORTED = ("verl", "0.9.1", "0.10")

check_version(*SUPPORTED)
hook_actor()
