"""In a rollout actor: OpenRLHF's agent executors, with their turns answered by engines elsewhere.

Owns what an executor meets instead of an engine, and the versions in OpenRLHF's logs. Owns no executor (OpenRLHF's
single-turn one, or the user's ``--train.agent_func_path``, runs unchanged) and no request (weight_sync.adapters.rollout).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from weight_sync.adapters.rollout import Prompt
from weight_sync.adapters.trainers.remote import newest_version, open_client, sampling_of
from weight_sync.blocks import Rollout
from weight_sync.errors import InputError
from weight_sync.trajectory import oldest_version

if TYPE_CHECKING:
    from weight_sync.adapters.rollout import RolloutClient
    from weight_sync.proto.v1 import trajectory_pb2

__all__ = ["NoEngine", "RemoteExecutor"]

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "stop", "stop_token_ids", "seed",
             "skip_special_tokens", "ignore_eos", "presence_penalty", "frequency_penalty", "repetition_penalty")  # fmt: skip


class RemoteExecutor:
    """An executor of OpenRLHF's that asks engines elsewhere.

    Args:
        inner: the executor that would run here.
        block: the ``rollout`` block.
        current: the trainer's version as this actor was told last; None before.
    """

    def __init__(self, inner: Any, block: Rollout, current: Callable[[], int | None]) -> None:
        self._inner, self._flavour, self._current = inner, block.flavour, current
        self.client: RolloutClient = open_client(block, current)

    async def execute(self, *, llm_engine: Any, hf_tokenizer: Any, **given: Any) -> Any:
        """OpenRLHF's; the response's ``extra_logs`` say which versions answered, which OpenRLHF logs."""
        asked = _Asked(self.client, self._flavour, hf_tokenizer)
        response = await self._inner.execute(llm_engine=asked, hf_tokenizer=hf_tokenizer, **given)
        response["extra_logs"] = {**(response.get("extra_logs") or {}), **self._logs(asked.turns)}
        return response

    def _logs(self, turns: Sequence[trajectory_pb2.Trajectory]) -> dict[str, float]:
        """The same names for every sample: OpenRLHF makes columns of them."""
        oldest = min(map(oldest_version, turns), default=-1)
        newest = max(map(newest_version, turns), default=-1)
        current = self._current()
        behind = max(0, current - oldest) if turns and current is not None else 0
        return {"rollout_version_oldest": float(oldest), "rollout_version_newest": float(newest),
                "rollout_staleness": float(behind)}  # fmt: skip


class _Asked:
    """What one execution meets as its engine.

    Attributes:
        turns: the answers so far.
    """

    def __init__(self, client: RolloutClient, flavour: str, tokenizer: Any) -> None:
        self._client, self._flavour, self._tokenizer = client, flavour, tokenizer
        self.turns: list[trajectory_pb2.Trajectory] = []

    async def generate(self, prompt_token_ids: Any, sampling_params: Any, multi_modal_data: Any = None) -> Any:
        """An answer as vLLM's ``RequestOutput``, as far as OpenRLHF's executors read one."""
        if multi_modal_data:
            raise InputError("engines elsewhere are asked by token ids alone", field="multi_modal_data", found="given",
                             do="train vision models with engines of OpenRLHF's own")  # fmt: skip
        given = {name: getattr(sampling_params, name, None) for name in _SAMPLING}
        sampling = sampling_of(self._flavour, {name: value for name, value in given.items() if value != []})
        found = await self._client.ask(Prompt([int(token) for token in prompt_token_ids], sampling=sampling))
        self.turns.append(found)
        tokens = list(found.output_token_ids)
        likely = [
            {token: SimpleNamespace(logprob=value)} for token, value in zip(tokens, found.output_logprobs, strict=True)
        ]
        text = self._tokenizer.decode(tokens, skip_special_tokens=bool(given["skip_special_tokens"]))
        return SimpleNamespace(outputs=[SimpleNamespace(
            token_ids=tokens, text=text, finish_reason=found.finish_reason,
            logprobs=None if getattr(sampling_params, "logprobs", None) is None else likely,
        )])  # fmt: skip


class NoEngine:
    """Stands where an actor has its vLLM: nothing to pause, to wake or to empty, since nothing runs here.

    Attributes:
        output_processor: answers how many requests are open, by which OpenRLHF spreads prompts over its actors.
    """

    def __init__(self, client: RolloutClient) -> None:
        def unfinished() -> int:
            return sum(seat.in_flight for seat in client.fleet.seats)

        self.output_processor = SimpleNamespace(get_num_unfinished_requests=unfinished)

    async def reset_prefix_cache(self) -> None:
        """Engines elsewhere empty theirs when they take a version."""

    async def pause_generation(self, mode: str) -> None:
        """Sidecars pause their engines at each version, and only for it."""

    async def resume_generation(self) -> None:
        """See `pause_generation`."""

    async def sleep(self, level: int = 1) -> None:
        """No memory is held here."""

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """See `sleep`."""
