"""The checkpoint engine ``weight_sync``: what verl calls at a sync, in actors and in rollout workers.

Owns verl's protocol: which method runs where, and that a failed sync leaves nobody paused. Owns no publishing (host.py,
base.py) and no following (arrival.py).

Each sync, verl calls on every worker ``prepare``, ``init_process_group``, then ``send_weights`` or ``receive_weights``,
then ``finalize``; the engines live on from sync to sync. An actor publishes the version and says on a board how that
ended; a rollout worker reads the board and brings its engine there. After a sync that failed that is the version
before, so that the rollouts come back.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from weight_sync.adapters.trainers.block import read_block
from weight_sync.adapters.trainers.metrics import PREFIX
from weight_sync.adapters.trainers.verl.arrival import Arrival, Rollout, hook_rollout
from weight_sync.adapters.trainers.verl.host import VerlHost
from weight_sync.adapters.trainers.verl.notice import Board, Notice
from weight_sync.errors import ConfigError
from weight_sync.group import default_group

if TYPE_CHECKING:
    import torch

__all__ = ["WeightSyncEngine"]


@CheckpointEngineRegistry.register("weight_sync")
class WeightSyncEngine(CheckpointEngine):  # type: ignore[misc]
    """Args: ``config`` is the weight_sync block, ``checkpoints`` verl's checkpoint folder; the others are verl's.

    Attributes:
        syncs: how often weights were sent or received.
    """

    def __init__(
        self, bucket_size: int, is_master: bool = False, config: object = None, checkpoints: str | None = None,
        **other: object,
    ) -> None:  # fmt: skip
        if other:
            raise ConfigError("unknown key", field=f"engine_kwargs.weight_sync.{min(other)}",
                              expected="config: the weight_sync block")  # fmt: skip
        self.syncs = 0
        self._block, self._is_master, self._checkpoints = config, is_master, checkpoints
        read_block(config)  # a bad key is said before anything is loaded
        self._engine: Any = None
        self._host: VerlHost | None = None
        self._rollout = Rollout(config)
        self._board: Board | None = None
        self._where: dict[str, Any] | None = None

    def bind(self, engine: Any) -> None:
        """Names verl's training engine, in the actor."""
        self._engine = engine

    # --- verl's protocol ---

    def prepare(self) -> dict[str, Any]:
        """On actor rank 0: where the rollouts read how this sync ends."""
        if not self._is_master:
            return {}
        if self._board is None:
            import ray

            self._board = Board(ray.util.get_node_ip_address(), read_block(self._block).timeout_s)
        return self._board.begin()

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """In the driver: hands every rollout worker what actor rank 0 said."""
        return {"where": [None] * actor_wg_world_size}, {"where": [metadata[0]] * rollout_world_size}

    def init_process_group(self, where: dict[str, Any] | None) -> None:
        """Nothing is connected here: the board is asked once the weights are wanted."""
        self._where = where
        if where is not None:
            hook_rollout()

    def finalize(self) -> None:
        """Nothing is left over between two syncs."""

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Publishes. Returns metrics, which verl logs with the step; raises only what must stop the job."""
        notice = Notice("", None, True)
        try:
            host = self._trainer()
            host.engine, host.weights = self._engine, weights
            metrics = host.sync(global_steps)
            self.syncs += 1
            notice = Notice(host.publisher.run_id, host.publisher.version, bool(metrics[PREFIX + "failed"]))
            return metrics if self._board is None else metrics | self._board.paths()
        finally:
            if self._board is not None:
                self._board.post(notice)

    def receive_weights(self, global_steps: int | None = None) -> Arrival:
        """What verl iterates over to load the version that the sync ended with."""
        assert self._where is not None, "init_process_group comes first"
        self.syncs += 1
        return Arrival(self._rollout, self._where, global_steps)

    # --- parts ---

    def _trainer(self) -> VerlHost:
        if self._host is None:
            model = getattr(self._engine, "model_config", None)
            config = read_block(self._block, beside=self._checkpoints, base=getattr(model, "local_path", None))
            self._host = VerlHost(config, default_group(config.timeout_s))
        return self._host
