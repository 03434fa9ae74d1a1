"""The arithmetic of mismatch: differences of logprobs, estimates of the divergence, and tokens by version. Pure.

Owns the definitions. Owns no judgement (monitor.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from weight_sync.proto.v1 import trajectory_pb2

__all__ = ["Numbers", "measure", "tokens_by_version"]


@dataclass(frozen=True)
class Numbers:
    """Of some tokens, sampled under ``rollout`` logprobs q and scored as p.

    Attributes:
        tokens: how many; with none, everything else is 0.
        mean, max: of |log p - log q|.
        k1, k2, k3: estimates of KL(q || p) from samples of q, with r = log p - log q: means of -r, of r^2 / 2 and of
            exp(r) - 1 - r. The first is unbiased and may be negative; the last is unbiased and never is.
        share: of tokens whose |difference| is above the outlier limit.
    """

    tokens: int
    mean: float
    max: float
    k1: float
    k2: float
    k3: float
    share: float

    def as_dict(self) -> dict[str, float]:
        """By name, as floats."""
        return {name: float(value) for name, value in asdict(self).items()}


def measure(rollout: npt.NDArray[np.float64], scored: npt.NDArray[np.float64], outlier: float) -> Numbers:
    """(tokens,) logprobs of the sampled tokens, as they were sampled and as they are scored."""
    if not len(rollout):
        return Numbers(0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    ratio = scored - rollout
    size = np.abs(ratio)
    with np.errstate(over="ignore"):  # a ratio beyond e^700 is infinite, and shall be seen
        k3 = float(np.mean(np.expm1(ratio) - ratio))
    return Numbers(
        len(rollout), float(size.mean()), float(size.max()), float(-ratio.mean()), float(np.mean(ratio**2) / 2), k3,
        float(np.mean(size > outlier)),
    )  # fmt: skip


def tokens_by_version(
    batch: Sequence[trajectory_pb2.Trajectory],
) -> dict[int, dict[int, npt.NDArray[np.bool_]]]:
    """Version -> index in the batch -> which of its output tokens that version sampled, as the trajectory says."""
    out: dict[int, dict[int, npt.NDArray[np.bool_]]] = defaultdict(dict)
    for index, trajectory in enumerate(batch):
        tokens = len(trajectory.output_token_ids)
        for span in trajectory.spans:
            mask = out[span.number].setdefault(index, np.zeros(tokens, bool))
            mask[span.begin : span.end] = True
    return dict(out)
