"""What the hosts share to have prompts answered by engines elsewhere: the client that the ``rollout`` block describes.

Owns the client of this process, sampling parameters in the words of the engines' API, and what a host can keep of a
trajectory. Owns no request (weight_sync.adapters.rollout) and no host's interface (the host's adapter has it).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weight_sync.blocks import Rollout
from weight_sync.errors import ConfigError
from weight_sync.trajectory import oldest_version

if TYPE_CHECKING:
    from weight_sync.adapters.rollout import RolloutClient
    from weight_sync.proto.v1 import trajectory_pb2

__all__ = ["newest_version", "open_client", "sampling_of", "shared_client", "spans_in", "versions_of"]

_OTHER_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
_SGLANG_NAMES = {"min_tokens": "min_new_tokens", "seed": "sampling_seed"}
_SGLANG_ONLY = ("no_stop_trim", "spaces_between_special_tokens", "custom_params")
_OURS = ("logprobs", "n", "stream")


def open_client(block: Rollout, current: Callable[[], int | None] | None = None) -> RolloutClient:
    """The client of a block.

    Args:
        current: the trainer's version, where the host knows it better than the sidecars do.

    Raises ConfigError, also when the block names no engine.
    """
    from weight_sync.adapters.rollout import RolloutClient

    if not block.engines:
        raise ConfigError("no engine to ask", field="weight_sync.rollout.engines", found="none",
                          expected="addresses of sidecars")  # fmt: skip
    return RolloutClient(
        block.engines, flavour=block.flavour, model=block.model, max_staleness=block.max_staleness,
        current_version=current, per_engine=block.per_engine, concurrency=block.per_engine * len(block.engines),
        request_s=block.request_s, deadline_s=block.deadline_s, token=_token(block),
    )  # fmt: skip


@functools.cache
def shared_client(block: Rollout) -> RolloutClient:
    """The one client of a block in this process. Raises as `open_client`."""
    return open_client(block)


def _token(block: Rollout) -> str | None:
    if block.token_file is None:
        return None
    try:
        return Path(block.token_file).read_text().strip()
    except OSError as error:
        raise ConfigError("the token cannot be read", field="weight_sync.rollout.token_file", found=error.strerror,
                          do=f"look at {block.token_file}") from error  # fmt: skip


def sampling_of(flavour: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """A host's sampling parameters in the words of an API; those that are None, or that the client sets, are left out.

    Hosts use vLLM's names or SGLang's; the client itself understands ``max_tokens`` everywhere.
    """
    plain = {_OTHER_NAMES.get(name, name): value for name, value in given.items() if value is not None}
    plain = {name: value for name, value in plain.items() if name not in _OURS}
    if flavour == "sglang":
        return {_SGLANG_NAMES.get(name, name): value for name, value in plain.items()}
    return {name: value for name, value in plain.items() if name not in _SGLANG_ONLY}


def newest_version(trajectory: trajectory_pb2.Trajectory) -> int:
    """Of those that sampled one of its tokens."""
    return max(span.number for span in trajectory.spans)


def spans_in(trajectory: trajectory_pb2.Trajectory) -> list[list[int]]:
    """Which version sampled which output tokens, as plain values: number, begin, end."""
    return [[span.number, span.begin, span.end] for span in trajectory.spans]


def versions_of(trajectory: trajectory_pb2.Trajectory) -> dict[str, Any]:
    """What a host keeps beside the tokens, as plain values."""
    return {"run_id": trajectory.run_id, "oldest": oldest_version(trajectory), "newest": newest_version(trajectory),
            "spans": spans_in(trajectory), "engine": trajectory.engine_id}  # fmt: skip
