"""Group relative policy optimisation in plain PyTorch: fp32 masters, Adam, a clipped token-level loss.

Owns the trainer's state (masters, moments, step) and its file. Owns no rollouts and no publishing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

CLIP = 0.2
WARM_UP = 3


@dataclass(frozen=True)
class Sample:
    """One answer: token ids, the logprobs with which they were sampled, its prompt group and its reward."""

    prompt: list[int]
    output: list[int]
    logprobs: list[float]
    group: str
    reward: float


def advantages(samples: Sequence[Sample]) -> list[float]:
    """Reward minus the group's mean, over the group's standard deviation."""
    groups: dict[str, list[float]] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample.reward)
    result = []
    for sample in samples:
        rewards = torch.tensor(groups[sample.group])
        result.append(float((sample.reward - rewards.mean()) / (rewards.std(unbiased=False) + 1e-4)))
    return result


def loss(model: nn.Module, samples: Sequence[Sample], weights: Sequence[float], tokens: int) -> Tensor:
    """The clipped surrogate, summed over the samples' output tokens and divided by ``tokens``.

    The importance ratio is against the logprobs of the version that sampled each token, so stale samples are corrected.
    """
    longest = max(len(s.output) for s in samples)
    width = max(len(s.prompt) for s in samples) + longest
    ids = torch.zeros(len(samples), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    old = torch.zeros(len(samples), longest)
    used = torch.zeros(len(samples), longest)
    for row, s in enumerate(samples):  # prompts end, and outputs begin, in the same column
        first = width - longest - len(s.prompt)
        both = torch.tensor(s.prompt + s.output)
        ids[row, first : first + len(both)] = both
        mask[row, first : first + len(both)] = 1
        old[row, : len(s.output)] = torch.tensor(s.logprobs)
        used[row, : len(s.output)] = 1
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(
        input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False, logits_to_keep=longest + 1
    ).logits[:, :-1]
    target = ids[:, -longest:, None]
    new = torch.log_softmax(logits.float(), dim=-1).gather(-1, target)[..., 0]
    ratio = torch.exp(new - old)
    gain = torch.tensor(weights)[:, None]
    surrogate = torch.minimum(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain)
    return -(surrogate * used).sum() / tokens


class Masters:
    """fp32 masters of a model's bf16 weights, with Adam; the model's parameters always hold the rounded bf16 values."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        self.model, self.lr, self.step = model, lr, 0
        self.parameters = dict(model.named_parameters())
        self.values = {name: spread(p.detach()) for name, p in self.parameters.items()}
        self.first = {name: torch.zeros_like(v) for name, v in self.values.items()}
        self.second = {name: torch.zeros_like(v) for name, v in self.values.items()}

    def served(self) -> Iterator[tuple[str, Tensor]]:
        """What engines serve: the masters, rounded to bf16."""
        for name, value in self.values.items():
            yield name, value.bfloat16()

    def update(self) -> None:
        """One Adam step from the parameters' gradients (clipped to norm 1), then rounds the masters into the model."""
        self.step += 1
        nn.utils.clip_grad_norm_(self.parameters.values(), 1.0)
        rate = self.lr * min(1.0, self.step / WARM_UP)
        for name, parameter in self.parameters.items():
            grad = parameter.grad
            assert grad is not None
            grad = grad.float()
            first = self.first[name].lerp_(grad, 0.1)
            second = self.second[name].lerp_(grad.square(), 0.001)
            scale = (second / (1 - 0.999**self.step)).sqrt_().add_(1e-8)
            self.values[name].addcdiv_(first, scale, value=-rate / (1 - 0.9**self.step))
            with torch.no_grad():
                parameter.copy_(self.values[name].bfloat16())
            parameter.grad = None


def spread(weights: Tensor) -> Tensor:
    """fp32 masters for bf16 weights: uniform within half a unit in the last place of each.

    Masters of a run in progress lie anywhere between two bf16 numbers. Those of a fresh checkpoint would start exactly
    on one, and fewer weights would change in the first tens of steps than in the rest of a run.
    """
    _, exponent = torch.frexp(weights.float())
    half = torch.ldexp(torch.ones((), dtype=torch.float32), exponent - 9)  # bf16 keeps 8 bits: the ulp is 2^(e - 8)
    spreaded = weights.float() + half * (torch.rand(weights.shape) * 2 - 1) * 0.999
    return torch.where(spreaded.bfloat16() == weights.bfloat16(), spreaded, weights.float())
