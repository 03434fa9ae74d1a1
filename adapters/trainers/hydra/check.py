"""What runs before verl does: the check that the block is right and that the trainer calls a checkpoint engine at all, and
the choice of agent loops where engines elsewhere are to answer.

Owns how a failure ends the process. The config groups name it as a Hydra callback; Hydra turns exceptions of callbacks into
warnings, so a failure leaves as SystemExit. Owns no rule (weight_sync.adapters.trainers.modes).
"""

from __future__ import annotations

from typing import Any

from hydra.experimental.callback import Callback

from weight_sync.adapters.trainers.modes import AGENT_LOOPS, never_synced, remote_loops

__all__ = ["StartCheck"]


class StartCheck(Callback):  # type: ignore[misc]
    """Named by ``hydra.callbacks.weight_sync``."""

    def on_run_start(self, config: Any, **_: Any) -> None:
        """Ends the process with one line when nothing would be published, or nobody elsewhere asked who should be."""
        from omegaconf import open_dict

        from weight_sync.adapters.trainers.block import read_block
        from weight_sync.errors import ConfigError, WeightSyncError

        try:
            read_block(config.weight_sync)
            reason, do = never_synced(config)
            if reason:
                raise ConfigError(reason, field="weight_sync", do=do)
            changes, reason = remote_loops(config)
            if reason:
                raise ConfigError(reason, field="weight_sync.rollout.engines",
                                  do=f"set default_agent_loop to {' or '.join(AGENT_LOOPS.values())}, and list it in that "
                                  "file as weight_sync/adapters/trainers/verl/agent_loops.yaml does")  # fmt: skip
            with open_dict(config):
                config.actor_rollout_ref.rollout.agent.update(changes)
        except WeightSyncError as error:
            raise SystemExit(f"weight_sync: {error}") from error
