"""The check that runs before verl does: that the block is right, and that the trainer calls a checkpoint engine at all.

Owns how a failure ends the process. The config groups name it as a Hydra callback; Hydra turns exceptions of callbacks into
warnings, so a failure leaves as SystemExit. Owns no rule (weight_sync.adapters.trainers.modes).
"""

from __future__ import annotations

from typing import Any

from hydra.experimental.callback import Callback

from weight_sync.adapters.trainers.modes import never_synced

__all__ = ["StartCheck"]


class StartCheck(Callback):  # type: ignore[misc]
    """Named by ``hydra.callbacks.weight_sync``."""

    def on_run_start(self, config: Any, **_: Any) -> None:
        """Ends the process with one line when nothing would be published."""
        from weight_sync.adapters.trainers.block import read_block
        from weight_sync.errors import ConfigError, WeightSyncError

        try:
            read_block(config.weight_sync)
            reason, do = never_synced(config)
            if reason:
                raise ConfigError(reason, field="weight_sync", do=do)
        except WeightSyncError as error:
            raise SystemExit(f"weight_sync: {error}") from error
