"""verl's own agent loops, with their turns answered by engines elsewhere.

Owns the answer in verl's shape, and the trainer's step of a version, which verl counts staleness in. Owns no loop (verl's
single-turn and tool loops run unchanged) and no request (weight_sync.adapters.rollout).

agent_loops.yaml names the loops; the config groups put it into the job when ``weight_sync.rollout.engines`` lists any.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from verl.experimental.agent_loop import SingleTurnAgentLoop, ToolAgentLoop
from verl.workers.rollout.replica import TokenOutput

from weight_sync.adapters.rollout import Prompt
from weight_sync.adapters.trainers.block import read_block, wildcard
from weight_sync.adapters.trainers.remote import newest_version, sampling_of, shared_client, versions_of
from weight_sync.config import Config
from weight_sync.errors import ConfigError, InputError
from weight_sync.registry import open_transport
from weight_sync.trajectory import oldest_version

if TYPE_CHECKING:
    from weight_sync.proto.v1 import trajectory_pb2

__all__ = ["Remote", "RemoteSingleTurn", "RemoteTools", "Steps"]


class Steps:
    """The trainer's step of each version, read from the run.

    Args:
        config: of a run whose address can be dialled.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._known: dict[tuple[str, int], int] = {}

    def of(self, run_id: str, number: int) -> int:
        """0 for a version that no step made: the checkpoint that training starts from. Raises what reading raises."""
        known = self._known.get((run_id, number))
        if known is None:
            end = open_transport(self._config).replica_end(run_id)
            try:
                manifest = end.manifest(number)
            finally:
                end.close()
            known = self._known[run_id, number] = manifest.step if manifest.HasField("step") else 0
        return known


class Remote:
    """Stands where a loop expects verl's client of its own servers.

    Args:
        config: the job's weight_sync block.
        limit: of response tokens, where the sampling parameters have none.

    Raises ConfigError when the run's address cannot be dialled from here.
    """

    def __init__(self, config: Config, limit: int) -> None:
        self._client, self._flavour, self._limit = shared_client(config.rollout), config.rollout.flavour, limit
        self._steps = Steps(_dialled(config))

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **other: Any
    ) -> TokenOutput:
        """One turn. Raises InputError for what is more than token ids, DeadlineError when no engine answers in time."""
        media = [name for name in ("image_data", "video_data", "audio_data") if other.get(name)]
        if media:
            raise InputError("engines elsewhere are asked by token ids alone", field=media[0], found="given",
                             do="leave such prompts to verl's own loops: agent_name in the data set")  # fmt: skip
        sampling = {"max_tokens": self._limit, **sampling_of(self._flavour, sampling_params)}
        found = await self._client.ask(Prompt(list(prompt_ids), sampling=sampling, metadata={"request": request_id}))
        oldest, newest = await asyncio.to_thread(self._steps_of, found)
        return TokenOutput(
            token_ids=list(found.output_token_ids), log_probs=list(found.output_logprobs), stop_reason="completed",
            extra_fields={"global_steps": newest, "min_global_steps": oldest, "max_global_steps": newest,
                          "weight_sync": versions_of(found)},
        )  # fmt: skip

    def _steps_of(self, found: trajectory_pb2.Trajectory) -> tuple[int, int]:
        oldest, newest = oldest_version(found), newest_version(found)
        return self._steps.of(found.run_id, oldest), self._steps.of(found.run_id, newest)


class RemoteSingleTurn(SingleTurnAgentLoop):  # type: ignore[misc]
    """verl's single_turn_agent."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.server_manager = _remote(self)


class RemoteTools(ToolAgentLoop):  # type: ignore[misc]
    """verl's tool_agent."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.server_manager = _remote(self)


_made: dict[str, Remote] = {}


def _remote(loop: Any) -> Remote:
    """One per process and block: verl makes a loop for every sample."""
    config, limit = read_block(loop.config.weight_sync), int(loop.rollout_config.response_length)
    key = f"{limit} {config.model_dump_json()}"
    if key not in _made:
        _made[key] = Remote(config, limit)
    return _made[key]


def _dialled(config: Config) -> Config:
    """For reading the run from a process that may be on any node."""
    uri = config.rollout.uri or config.uri
    if wildcard(uri):
        raise ConfigError("nobody can dial this address", field="weight_sync.uri", found=uri,
                          expected="the name of the host that actor rank 0 runs on",
                          do="name the host; or set weight_sync.rollout.uri to the address that other nodes see")  # fmt: skip
    return config.replace(uri=uri, store=None, listen=None)
