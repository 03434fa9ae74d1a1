"""Tells Hydra where the config groups are.

Owns one line of the search path. Imports Hydra alone: this runs at the start of every Hydra program of the environment.
"""

from __future__ import annotations

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

__all__ = ["WeightSyncSearchPath"]


class WeightSyncSearchPath(SearchPathPlugin):  # type: ignore[misc]
    """Found by Hydra."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Adds the groups behind the program's own."""
        search_path.append(provider="weight_sync", path="pkg://hydra_plugins.weight_sync.conf")
