"""Asks a fleet of sidecars for samples and turns the answers into trajectories.

Owns `RolloutClient` and what it needs: the engines' request formats, who is asked next, what follows a refusal. Owns no
version (sidecars decide what they serve), no reward and no inbox.
"""

from __future__ import annotations

try:
    import httpx  # noqa: F401
except ImportError as error:
    raise ImportError("RolloutClient needs httpx: pip install 'weight-sync[rollout]'") from error

from weight_sync.adapters.rollout.client import RolloutClient
from weight_sync.adapters.rollout.flavours import FLAVOURS, Answer, Flavour, Prompt

__all__ = ["FLAVOURS", "Answer", "Flavour", "Prompt", "RolloutClient"]
