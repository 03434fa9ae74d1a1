"""Stand-in for OpenRLHF's agent executors."""

from __future__ import annotations

from typing import Any


class AgentExecutorBase:
    async def execute(
        self, prompt: Any, label: Any, sampling_params: Any, max_length: int, hf_tokenizer: Any, llm_engine: Any,
        images: Any = None,
    ) -> Any:  # fmt: skip
        raise AssertionError("a subclass says how")


class SingleTurnAgentExecutor(AgentExecutorBase):
    def __init__(self, remote_rm_url: Any = None) -> None:
        self.remote_rm_url = remote_rm_url
