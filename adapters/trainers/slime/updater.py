"""An updater that publishes at slime's own sync point.

Owns what happens in one ``update_weights``: the publish, then slime's own way to the engines that slime started, if
there are any. Owns no weight (host.py).

The engines of slime's own cluster go on getting their weights from slime, at once and inside the cluster; remote fleets
follow the published run. Both carry the same version number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from weight_sync.adapters.trainers.slime.host import SlimeHost

__all__ = ["Nobody", "make_updater", "real_engines"]


class Nobody:
    """Stands for the engines of a fleet that slime holds no handles of, where slime would skip the update."""


def real_engines(engines: Sequence[Any] | None) -> list[Any]:
    """The handles that slime's own code can talk to."""
    return [engine for engine in engines or () if not isinstance(engine, Nobody)]


def make_updater(base: Any, host_of: Callable[[Any], SlimeHost], step_of: Callable[[], int | None]) -> Any:
    """A subclass of one of slime's updater classes that publishes.

    Args:
        base: slime's class.
        host_of: makes the host of an updater; called at its first sync, on every rank.
        step_of: the number of trainings so far.
    """
    numbered = base.__name__ in ("UpdateWeightFromDistributed", "UpdateWeightFromTensor", "UpdateWeightP2P")

    class WeightSyncUpdater(base):  # type: ignore[misc]
        """slime's own updater, and a publisher."""

        def __init__(self, args: Any, model: Any, weights_getter: Any, **options: Any) -> None:
            super().__init__(args, model, weights_getter, **options)
            self.weight_sync: SlimeHost | None = None
            self.weight_sync_backup = weights_getter  # not every updater of slime's keeps it
            if not isinstance(getattr(self, "update_weight_metrics", None), dict):
                self.update_weight_metrics: dict[str, float] = {}

        def connect_rollout_engines(self, rollout_engines: Sequence[Any], *args: Any, **options: Any) -> None:
            """slime's own, for engines that it has handles of."""
            if real_engines(rollout_engines):
                super().connect_rollout_engines(rollout_engines, *args, **options)
                return
            self.rollout_engines = rollout_engines

        def update_weights(self) -> None:
            """Publishes, then lets slime bring its own engines there. Metrics wait in ``pop_metrics``."""
            if self.weight_sync is None:
                self.weight_sync = host_of(self)
            metrics = self.weight_sync.sync(step_of())
            number = self.weight_sync.version
            if real_engines(getattr(self, "rollout_engines", None)):
                if numbered and number:
                    self.weight_version = number - 1  # slime counts up by one
                super().update_weights()
            elif number is not None:
                self.weight_version = number
            self.update_weight_metrics.update(metrics)

        # miles asks for these two

        def is_rollout_engines_fresh(self) -> bool:
            """Whether the connection to the engines is current; to a remote fleet there is none that could age."""
            known = getattr(self, "rollout_engines", None)
            if known is not None and not real_engines(known):
                return True
            return bool(super().is_rollout_engines_fresh())

        def mark_engine_connection_stale(self) -> None:
            """Of the engines that the host has handles of."""
            if real_engines(getattr(self, "rollout_engines", None)):
                super().mark_engine_connection_stale()

    WeightSyncUpdater.__name__ = f"WeightSync{base.__name__}"
    return WeightSyncUpdater
