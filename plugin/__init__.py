"""weight_sync: a policy's weights from an RL trainer to rollout engines, exactly, with versions.

Owns the public names. Importing this package imports no torch extension, no grpc, no transport and no host; names are
loaded when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weight_sync.adapting import AdapterSource
    from weight_sync.codec.digest import Digest
    from weight_sync.config import Config
    from weight_sync.errors import WeightSyncError
    from weight_sync.publisher import Publisher
    from weight_sync.replica import Replica, SyncReport
    from weight_sync.reports import PublishReport
    from weight_sync.tensors import TensorSpec
    from weight_sync.trajectory import TrajectoryInbox

__version__ = "0.1.0"

_HOMES = {
    "AdapterSource": "weight_sync.adapting",
    "Config": "weight_sync.config",
    "Digest": "weight_sync.codec.digest",
    "PublishReport": "weight_sync.reports",
    "Publisher": "weight_sync.publisher",
    "Replica": "weight_sync.replica",
    "RolloutClient": "weight_sync.adapters.rollout",  # by name alone: it needs an extra
    "SyncReport": "weight_sync.replica",
    "TensorSpec": "weight_sync.tensors",
    "TrajectoryInbox": "weight_sync.trajectory",
    "WeightSyncError": "weight_sync.errors",
}

__all__ = [
    "AdapterSource",
    "Config",
    "Digest",
    "PublishReport",
    "Publisher",
    "Replica",
    "RolloutClient",
    "SyncReport",
    "TensorSpec",
    "TrajectoryInbox",
    "WeightSyncError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'weight_sync' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
