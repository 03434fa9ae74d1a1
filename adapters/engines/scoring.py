"""Logprobs by any version of a run, on an embedded engine: what the mismatch monitor asks for.

Owns which tokens of a trajectory are scored. Owns no forward pass (the engine) and no version (the replica).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from weight_sync.adapters.engines.transformers import TransformersEngine
from weight_sync.proto.v1 import trajectory_pb2
from weight_sync.replica import Replica

__all__ = ["VersionScorer", "score_trajectories"]


def score_trajectories(
    engine: TransformersEngine, batch: Sequence[trajectory_pb2.Trajectory], temperature: float = 1.0
) -> list[npt.NDArray[np.float32]]:
    """Per trajectory the logprobs of its output tokens, by the weights that the engine holds now."""
    whole = [[*t.prompt_token_ids, *t.output_token_ids] for t in batch]
    found = engine.score(whole, temperature=temperature)
    return [row[-len(t.output_token_ids) :].float().cpu().numpy() for row, t in zip(found, batch, strict=True)]


class VersionScorer:
    """A `weight_sync.contract.monitor.Scorer`: takes an engine of its own from version to version.

    Args:
        replica: of an embedded engine that serves nobody else.
        temperature: that the trajectories were sampled with; 1 for greedy ones.
    """

    def __init__(self, replica: Replica, temperature: float = 1.0) -> None:
        self._replica, self._temperature = replica, temperature

    def __call__(self, version: int, batch: Sequence[trajectory_pb2.Trajectory]) -> Sequence[Any]:
        """Raises VersionError for a version that cannot be had."""
        self._replica.sync(exact=version, timeout=0)
        engine: Any = self._replica.engine
        return score_trajectories(engine, batch, self._temperature)
