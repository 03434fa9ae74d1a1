"""Trajectories for tests: valid ones, and hypothesis strategies for them."""

from __future__ import annotations

from weight_sync.proto.v1 import trajectory_pb2


def make(
    name: str, version: int = 0, *, run_id: str = "run", tokens: int = 4, **fields: object
) -> trajectory_pb2.Trajectory:
    """A valid trajectory that one version has sampled."""
    values: dict[str, object] = {
        "id": name, "run_id": run_id, "prompt_token_ids": [1, 2], "output_token_ids": range(tokens),
        "output_logprobs": [-0.5] * tokens, "reward": 1.0, "finish_reason": "stop", "engine_id": "e", "group": "g",
        "spans": [trajectory_pb2.VersionSpan(number=version, begin=0, end=tokens)], "metadata": {"key": "value"},
    }  # fmt: skip
    return trajectory_pb2.Trajectory(**{**values, **fields})  # type: ignore[arg-type]


def spans(*parts: tuple[int, int, int]) -> list[trajectory_pb2.VersionSpan]:
    """Of (number, begin, end)."""
    return [trajectory_pb2.VersionSpan(number=n, begin=b, end=e) for n, b, e in parts]
