"""One sample in the words of each engine's API: how it is asked for, and what of the answer is kept. Pure, no I/O.

Owns `Prompt`, the request and the reading of the answer. Owns no version headers (spans.py) and no HTTP (client.py).
"""

from __future__ import annotations

import base64
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from weight_sync.errors import EngineError, InputError

__all__ = ["FLAVOURS", "Answer", "Flavour", "Prompt"]


@dataclass(frozen=True)
class Prompt:
    """What is asked, as token ids.

    Attributes:
        token_ids: of the prompt.
        id: names the prompt; its samples are the trajectories ``<id>-0``, ``<id>-1``, ..., their group is ``<id>``.
            Give the same one when the same prompt is asked for again after a crash: an inbox keeps one of each.
        samples: how many answers.
        sampling: parameters for this prompt, over those of the client.
        metadata: travels with each trajectory.
    """

    token_ids: Sequence[int]
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    samples: int = 1
    sampling: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.token_ids or not self.id or self.samples < 1:
            raise InputError("nothing to ask", field="token_ids, id, samples",
                             found=(len(self.token_ids), self.id, self.samples), expected="none of them empty")  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """One sample, as the engine told it.

    Attributes:
        tokens, logprobs: of the output, equally many.
        finish_reason: stop, length, abort, ...
        labels: the engine's own spans (its version label, begin, end); None when it tells none.
        router_replay: as the engine packed it.
    """

    tokens: list[int]
    logprobs: list[float]
    finish_reason: str
    labels: list[tuple[str, int, int]] | None = None
    router_replay: bytes = b""


class Flavour(Protocol):
    """One API. ``read`` raises KeyError, TypeError, ValueError or IndexError on an answer of another shape."""

    path: str

    def request(self, prompt: Sequence[int], sampling: Mapping[str, Any], model: str | None) -> dict[str, Any]:
        """The body. ``max_tokens`` means the same everywhere; the other parameters are the engine's own."""

    def read(self, body: Any) -> Answer:
        """The sample."""


class Completions:
    """``/v1/completions`` with vLLM's ``return_token_ids``. Tells no spans per token."""

    path = "/v1/completions"

    def request(self, prompt: Sequence[int], sampling: Mapping[str, Any], model: str | None) -> dict[str, Any]:
        """Logprobs of the sampled tokens come with those of one more."""
        body = {"prompt": list(prompt), "logprobs": 1, "return_token_ids": True, **sampling, "n": 1, "stream": False}
        return body if model is None else {"model": model, **body}

    def read(self, body: Any) -> Answer:
        """Raises EngineError when the engine gives no token ids, which text cannot replace."""
        choice = body["choices"][0]
        if choice.get("token_ids") is None:
            raise EngineError("the engine returns no token ids", field="choices[0].token_ids", found=None,
                              do="use vLLM, which knows return_token_ids, or the flavour of the engine")  # fmt: skip
        return Answer(
            list(choice["token_ids"]), list(choice["logprobs"]["token_logprobs"]), choice["finish_reason"] or "",
            None, _packed(choice.get("routed_experts")),
        )  # fmt: skip


class VllmGenerate:
    """vLLM's ``/inference/v1/generate`` (``--enable-scale-out``): tokens in, tokens and version spans out."""

    path = "/inference/v1/generate"

    def request(self, prompt: Sequence[int], sampling: Mapping[str, Any], model: str | None) -> dict[str, Any]:
        """Everything about sampling is in one object."""
        body = {"token_ids": list(prompt), "sampling_params": {"logprobs": 0, **sampling, "n": 1}, "stream": False}
        return body if model is None else {"model": model, **body}

    def read(self, body: Any) -> Answer:
        """The one choice."""
        choice = body["choices"][0]
        return Answer(
            list(choice["token_ids"]), [item["logprob"] for item in choice["logprobs"]["content"]],
            choice["finish_reason"] or "", _labels(choice.get("weight_versions")), _packed(choice.get("routed_experts")),
        )  # fmt: skip


class SglangGenerate:
    """SGLang's ``/generate``."""

    path = "/generate"

    def request(self, prompt: Sequence[int], sampling: Mapping[str, Any], model: str | None) -> dict[str, Any]:
        """``max_tokens`` is called max_new_tokens there."""
        own = {"max_new_tokens" if key == "max_tokens" else key: value for key, value in sampling.items()}
        return {"input_ids": list(prompt), "sampling_params": {**own, "n": 1}, "return_logprob": True, "stream": False}

    def read(self, body: Any) -> Answer:
        """Tokens and logprobs come in triples of logprob, token, text."""
        meta = body["meta_info"]
        triples = meta["output_token_logprobs"]
        reason = meta["finish_reason"]
        return Answer(
            [item[1] for item in triples], [item[0] for item in triples],
            reason["type"] if isinstance(reason, dict) else str(reason or ""), _labels(meta.get("weight_versions")),
            _packed(meta.get("routed_experts")),
        )  # fmt: skip


def _labels(spans: Any) -> list[tuple[str, int, int]] | None:
    """Both engines' spans, as objects or as arrays of three."""
    if spans is None:
        return None
    fields = [(s["version"], s["start"], s["end"]) if isinstance(s, dict) else s for s in spans]
    return [(str(version), int(start), int(end)) for version, start, end in fields]


def _packed(text: str | None) -> bytes:
    return b"" if text is None else base64.b64decode(text, validate=True)


FLAVOURS: dict[str, Flavour] = {
    "completions": Completions(),
    "vllm": VllmGenerate(),
    "sglang": SglangGenerate(),
}
"""By the name that the option ``flavour`` takes."""
