"""Sampling from a Hugging Face model whose weights may change between two tokens.

Owns the decode loop, its KV cache and the version of every token. Owns no weights and no decision when they change: the
gate stops the loop, the engine moves the weights.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch

from weight_sync.adapters.engines.gate import Gate
from weight_sync.errors import EngineError, InputError
from weight_sync.proto.v1 import common_pb2, trajectory_pb2

__all__ = ["Completion", "Decoder", "Rows"]


@dataclass(frozen=True)
class Completion:
    """What became of one prompt.

    Attributes:
        prompt: token ids.
        tokens: sampled token ids, the stop token included.
        logprobs: of the sampled tokens, under the temperature that they were sampled with.
        spans: (version, begin, end): tokens [begin, end) were sampled by this version; ascending, without gaps.
        run_id: of the versions.
        finish_reason: "stop", "length" or "abort".
        contract_id: how the engine computes; "" when it does not say.
    """

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    spans: list[tuple[int, int, int]]
    run_id: str
    finish_reason: str
    contract_id: str = ""

    def to_trajectory(self, id: str, **fields: Any) -> trajectory_pb2.Trajectory:
        """As a message, with further fields of it: reward, group, metadata, ..."""
        return trajectory_pb2.Trajectory(
            id=id,
            run_id=self.run_id,
            spans=[trajectory_pb2.VersionSpan(number=n, begin=b, end=e) for n, b, e in self.spans],
            prompt_token_ids=self.prompt,
            output_token_ids=self.tokens,
            output_logprobs=self.logprobs,
            finish_reason=self.finish_reason,
            contract_id=self.contract_id,
            **fields,
        )


@dataclass
class Rows:
    """Requests that advance together: rows of ``ids``, left-padded, longer by one token each step."""

    ids: torch.Tensor  # (rows, length)
    mask: torch.Tensor  # (rows, length)
    samples: int
    stop: torch.Tensor
    cache: Any = None
    age: int = -1  # of the weights that the cache was computed with
    logprobs: list[torch.Tensor] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    ended: torch.Tensor = field(default_factory=lambda: torch.empty(0))


class Decoder:
    """Samples completions of one model.

    Attributes:
        gate: stops the loop at a fence.
        version: that answers carry; None until one is announced.
        contract_id: that answers carry: how the model computes.
    """

    contract_id = ""

    def __init__(self, model: Any) -> None:
        self.model: Any = model.eval()
        self.gate = Gate()
        self.version: common_pb2.VersionId | None = None
        self._age = 0
        parameters = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"  # renamed in transformers 5

    def drop_caches(self) -> None:
        """Requests in flight compute their keys and values again, with the weights of their next step."""
        self._age += 1

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        samples: int = 1,
        temperature: float = 1.0,
        stop: Collection[int] = (),
        seed: int | None = None,
        timeout: float = 600.0,
    ) -> list[Completion]:
        """``samples`` completions of each prompt (token ids), those of one prompt next to each other.

        Args:
            temperature: 0 takes the likeliest token; logprobs are then those of temperature 1.
            stop: token ids that end a completion.
            seed: of the sampling; None draws from torch's global state.
            timeout: longest wait at the gate in seconds.

        Raises InputError on a bad argument, EngineError before the first version was announced, DeadlineError when the
        gate stays closed.
        """
        if not prompts or not all(prompts) or max_new_tokens < 1 or samples < 1 or temperature < 0:
            raise InputError("nothing to generate", field="prompts, max_new_tokens, samples, temperature",
                             expected="non-empty prompts, positive numbers")  # fmt: skip
        device = next(self.model.parameters()).device
        dice = None if seed is None else torch.Generator(device).manual_seed(seed)
        batch = _batch(prompts, samples, stop, device)
        aborted = False
        with torch.inference_mode(), self.gate.request(timeout):
            run_id = self._announced().run_id
            while len(batch.versions) < max_new_tokens and not batch.ended.all():
                with self.gate.step(timeout) as goes_on:
                    if not goes_on:
                        aborted = True
                        break
                    batch.versions.append(self._announced().number)
                    logprobs = self._log_softmax(self._forward(batch), temperature or 1.0)
                _extend(batch, logprobs, temperature, dice)
        return _completions(batch, prompts, run_id, aborted, self.contract_id)

    def score(
        self, sequences: Sequence[Sequence[int]], temperature: float = 1.0, timeout: float = 600.0
    ) -> list[torch.Tensor]:
        """Per sequence (tokens - 1,) float32: the logprob of each token after those before it, by the weights of now.

        All of one call are by the same weights. Raises InputError, and DeadlineError when the gate stays closed.
        """
        if temperature <= 0 or not sequences or any(len(tokens) < 2 for tokens in sequences):
            raise InputError("nothing to score", field="sequences, temperature",
                             expected="sequences of 2 or more tokens, a temperature above 0")  # fmt: skip
        with torch.inference_mode(), self.gate.request(timeout):
            return self._score(sequences, temperature)

    def _score(self, sequences: Sequence[Sequence[int]], temperature: float) -> list[torch.Tensor]:
        width = max(map(len, sequences))
        device = next(self.model.parameters()).device
        ids = torch.tensor([[*tokens, *[0] * (width - len(tokens))] for tokens in sequences], device=device)
        mask = torch.tensor([[1] * len(t) + [0] * (width - len(t)) for t in sequences], device=device)
        logits = self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
        found = self._log_softmax(logits, temperature).gather(-1, ids[:, 1:, None])[..., 0]
        return [row[: len(tokens) - 1] for row, tokens in zip(found, sequences, strict=True)]

    def _log_softmax(self, logits: torch.Tensor, temperature: float) -> torch.Tensor:
        return torch.log_softmax(logits.float() / temperature, -1)

    def _announced(self) -> common_pb2.VersionId:
        if self.version is None:
            raise EngineError("no version is served yet", field="version", found=None, do="sync the replica first")
        return self.version

    def _forward(self, batch: Rows) -> torch.Tensor:
        """(rows, vocabulary) logits of the next tokens; computes no more than the cache lacks."""
        repeats = 1
        if batch.age != self._age:
            from transformers import DynamicCache

            repeats = batch.samples if not batch.logprobs else 1  # rows of one prompt are equal until they are sampled
            batch.cache, batch.age = DynamicCache(config=self.model.config), self._age
            feed = batch.ids[::repeats]
        else:
            feed = batch.ids[:, -1:]
        mask = batch.mask[::repeats]
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -feed.shape[1] :]
        logits: torch.Tensor = self.model(
            input_ids=feed,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_argument: batch.cache},
        ).logits[:, -1]
        if repeats > 1:
            batch.cache.batch_repeat_interleave(repeats)
            logits = logits.repeat_interleave(repeats, 0)
        return logits


def _batch(prompts: Sequence[Sequence[int]], samples: int, stop: Collection[int], device: torch.device) -> Rows:
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    rows = len(prompts) * samples
    return Rows(
        ids.repeat_interleave(samples, 0),
        mask.repeat_interleave(samples, 0),
        samples,
        torch.tensor(sorted(stop), dtype=torch.long, device=device),
        ended=torch.zeros(rows, dtype=torch.bool, device=device),
    )


def _extend(batch: Rows, logprobs: torch.Tensor, temperature: float, dice: torch.Generator | None) -> None:
    """Samples one token per row. Rows that have ended go on with tokens that nobody reads."""
    if temperature:
        token = torch.multinomial(logprobs.exp(), 1, generator=dice)
    else:
        token = logprobs.argmax(-1, keepdim=True)
    batch.logprobs.append(logprobs.gather(-1, token))
    batch.ids = torch.cat([batch.ids, token], -1)
    batch.mask = torch.cat([batch.mask, torch.ones_like(token)], -1)
    batch.ended |= torch.isin(token[:, 0], batch.stop)


def _completions(
    batch: Rows, prompts: Sequence[Sequence[int]], run_id: str, aborted: bool, contract_id: str
) -> list[Completion]:
    steps = len(batch.logprobs)
    tokens = batch.ids[:, batch.ids.shape[1] - steps :].tolist()
    logprobs = torch.cat(batch.logprobs, -1).tolist() if steps else [[] for _ in tokens]
    stop = set(batch.stop.tolist())
    out = []
    for row, (drawn, likely) in enumerate(zip(tokens, logprobs, strict=True)):
        end = next((i + 1 for i, token in enumerate(drawn) if token in stop), None)
        reason = "stop" if end is not None else "abort" if aborted else "length"
        count = steps if end is None else end
        out.append(
            Completion(
                list(prompts[row // batch.samples]),
                drawn[:count],
                likely[:count],
                _spans(batch.versions[:count]),
                run_id,
                reason,
                contract_id,
            )
        )
    return out


def _spans(versions: Sequence[int]) -> list[tuple[int, int, int]]:
    spans, begin = [], 0
    for number, group in groupby(versions):
        end = begin + len(list(group))
        spans.append((number, begin, end))
        begin = end
    return spans
