"""Group relative policy optimisation in plain PyTorch: fp32 masters, Adam, a clipped token-level loss.

Owns the trainer's state and its file. Owns no rollouts and no publishing.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from weight_sync.folder import sync_path

CLIP = 0.2  # of the importance ratio
WARM_UP = 3  # steps
ROWS = 8  # samples in one forward pass


@dataclass(frozen=True)
class Sample:
    """One answer: token ids, the logprobs with which they were sampled, its prompt's group, its reward."""

    prompt: list[int]
    output: list[int]
    logprobs: list[float]
    group: str
    reward: float


class Trainer:
    """A model whose parameters always hold what engines serve: the fp32 masters, rounded to the served dtype.

    Attributes:
        step: optimizer steps taken.
    """

    def __init__(self, model: Any, served: torch.dtype, lr: float, seed: int) -> None:
        torch.manual_seed(seed)
        self.model, self.served, self.lr, self.step = model, served, lr, 0
        self.parameters = dict(model.named_parameters())
        self.masters = {name: spread(p.detach().float(), served) for name, p in self.parameters.items()}
        self.optimizer = torch.optim.Adam(self.masters.values(), lr=lr, fused=True)

    def train(self, samples: Sequence[Sample]) -> None:
        """One optimizer step on one batch."""
        gains = advantages(samples)
        tokens = sum(len(sample.output) for sample in samples)
        order = sorted(range(len(samples)), key=lambda i: len(samples[i].prompt) + len(samples[i].output))
        for start in range(0, len(order), ROWS):  # samples of like length together: less padding
            rows = order[start : start + ROWS]
            surrogate = clipped_surrogate(self.model, [samples[i] for i in rows], [gains[i] for i in rows])
            (-surrogate / tokens).backward()
        torch.nn.utils.clip_grad_norm_(self.parameters.values(), 1.0)
        self.step += 1
        self.optimizer.param_groups[0]["lr"] = self.lr * min(1.0, self.step / WARM_UP)
        for name, parameter in self.parameters.items():
            grad, parameter.grad = parameter.grad, None  # None: an expert that no token was routed to
            self.masters[name].grad = torch.zeros_like(self.masters[name]) if grad is None else grad.float()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._round()

    @torch.no_grad()
    def _round(self) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(self.masters[name].to(self.served))

    def save(self, path: Path) -> None:
        """Masters, moments and step as one safetensors file.

        It appears complete or not at all, and is on the disk on return: the version that belongs to it comes after it.
        """
        tensors: dict[str, Tensor] = {}
        for name, master in self.masters.items():
            state = self.optimizer.state[master]
            tensors |= {f"master.{name}": master, f"mean.{name}": state["exp_avg"], f"var.{name}": state["exp_avg_sq"]}
        fresh = path.with_suffix(".new")
        save_file(tensors, fresh, metadata={"step": str(self.step)})
        sync_path(fresh)
        os.replace(fresh, path)
        sync_path(path.parent)

    def load(self, path: Path) -> None:
        """Goes on from where `save` was called."""
        with safe_open(path, "pt") as file:
            self.step = int(file.metadata()["step"])
            for name, master in self.masters.items():
                master.copy_(file.get_tensor(f"master.{name}"))
                self.optimizer.state[master] = {
                    "step": torch.tensor(float(self.step)),
                    "exp_avg": file.get_tensor(f"mean.{name}"),
                    "exp_avg_sq": file.get_tensor(f"var.{name}"),
                }
        self._round()


def advantages(samples: Sequence[Sample]) -> list[float]:
    """Reward minus the mean of its group, over the group's standard deviation."""
    groups = defaultdict(list)
    for sample in samples:
        groups[sample.group].append(sample.reward)
    moments = {key: torch.tensor(rewards) for key, rewards in groups.items()}
    return [
        float((s.reward - moments[s.group].mean()) / (moments[s.group].std(unbiased=False) + 1e-4)) for s in samples
    ]


def clipped_surrogate(model: Any, samples: Sequence[Sample], gains: Sequence[float]) -> Tensor:
    """Sum over all output tokens of the clipped importance ratio times the sample's advantage.

    The ratio is against the logprobs that came with the tokens, whichever version sampled them: that is what corrects
    for staleness.
    """
    longest = max(len(s.output) for s in samples)
    width = longest + max(len(s.prompt) for s in samples)
    ids, mask = torch.zeros(len(samples), width, dtype=torch.long), torch.zeros(len(samples), width, dtype=torch.long)
    old, used = torch.zeros(len(samples), longest), torch.zeros(len(samples), longest)
    for row, s in enumerate(samples):  # all outputs begin in the same column
        first, last = width - longest - len(s.prompt), width - longest + len(s.output)
        ids[row, first:last], mask[row, first:last] = torch.tensor(s.prompt + s.output), 1
        old[row, : len(s.output)], used[row, : len(s.output)] = torch.tensor(s.logprobs), 1
    logits = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=(mask.cumsum(-1) - 1).clamp(min=0),
        use_cache=False,
        logits_to_keep=longest + 1,
    ).logits[:, :-1]
    new = torch.log_softmax(logits.float(), dim=-1).gather(-1, ids[:, -longest:, None])[..., 0]
    ratio, gain = torch.exp(new - old), torch.tensor(gains)[:, None]
    return (torch.minimum(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain) * used).sum()


def spread(weights: Tensor, served: torch.dtype) -> Tensor:
    """fp32 masters of weights that were rounded to ``served``: anywhere within half a unit in the last place.

    The masters of a run in progress lie anywhere between two numbers of the served dtype. Those of a fresh checkpoint
    would all start exactly on one, and far fewer weights would change than in the rest of a run.
    """
    if served is torch.float32:
        return weights.clone()
    half = torch.finfo(served).eps / 4 * torch.exp2(torch.frexp(weights).exponent.float())  # of the ulp
    moved = weights + half * (2 * torch.rand_like(weights) - 1)
    return torch.where(moved.to(served) == weights.to(served), moved, weights)
