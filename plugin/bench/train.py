"""A small trainer for the density benchmark: real steps on any causal LM of transformers.

Owns masters, Adam, Muon, and one step of GRPO or of supervised fine-tuning. Owns no measurement and no tasks
(bench/exercises.py).

Masters are fp32 and start spread uniformly within half an ulp of the checkpoint's bf16 values, as in a run in progress;
the served view is their bf16 cast, and the model computes with exactly those values. Constant learning rate after a
warm-up of three steps, gradients clipped to norm 1, no weight decay.
"""

from __future__ import annotations

import contextlib
import runpy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weight_sync.bench.exercises import Exercise, Exercises, Parity, Sums
from weight_sync.errors import InputError

__all__ = [
    "OBJECTIVES",
    "OPTIMIZERS",
    "StepReport",
    "Trainer",
    "find_model",
    "load_model",
    "orthogonalized",
    "tiny_model",
]

OPTIMIZERS = ("adam", "muon")
OBJECTIVES = ("grpo", "sft")
WARM_UP = 3
PROMPTS, GROUP, NEW_TOKENS = 5, 4, 32
_ROWS = 4  # of one forward pass: bounds the logits
_BETA1, _BETA2, _EPSILON = 0.9, 0.999, 1e-8
_MOMENTUM = 0.95
_MUON_RMS = 0.2  # the update's RMS in units of the learning rate, about that of Adam's
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # a quintic that takes singular values in (0, 1] near 1 within five rounds


def find_model() -> Path:
    """The quick start's checkpoint; its own code makes it, once. Raises InputError where it cannot be had."""
    example = Path(__file__).resolve().parents[2] / "examples/quickstart/model.py"
    if not example.is_file():
        raise InputError("no model is named", field="model", do="name a checkpoint folder with --model")
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what it says is no result
            found: Path = runpy.run_path(str(example))["find"]()
    except ImportError as error:
        do = "run make quickstart first, or name a checkpoint folder with --model"
        raise InputError("the quick start's model cannot be made", field="model", found=str(error), do=do) from error
    return found


def load_model(path: Path) -> tuple[nn.Module, Exercises]:
    """A checkpoint folder as a model, fp32 that holds the bf16 values, and exercises in its tokenizer's ids.

    Raises InputError when transformers is missing or the folder is no checkpoint.
    """
    transformers = _transformers()
    if not (path / "config.json").is_file():
        raise InputError("not a checkpoint folder", field="model", found=str(path), expected="config.json in it")
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    if getattr(model.config, "quantization_config", None) is not None:
        raise InputError("checkpoint is quantised", field="model", found=str(path), do="name one with plain weights")
    return model.float(), Sums(transformers.AutoTokenizer.from_pretrained(path))


def tiny_model(seed: int = 0) -> tuple[nn.Module, Exercises]:
    """A random model of some 60 thousand parameters, for tests, with exercises that need no tokenizer."""
    transformers = _transformers()
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128, tie_word_embeddings=True, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.LlamaForCausalLM(config).bfloat16().float()
    return model, Parity(config.vocab_size)


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise InputError(
            "bench density needs transformers", field="transformers", do="pip install 'weight-sync[quickstart]'"
        ) from error
    return transformers


@dataclass(frozen=True)
class StepReport:
    """Loss, mean reward (None for sft) and the share of gradients that are not zero."""

    loss: float
    reward: float | None
    nonzero_gradients: float


class Trainer:
    """One run.

    Args:
        model: from `load_model`; its parameters hold the served values and are overwritten by every step.
        optimizer: "adam"; "muon" for hidden matrices and Adam for the rest.
        objective: "grpo" or "sft".
        lr: learning rate after the warm-up.
        seed: of masters, exercises and sampling; sets torch's own.
    """

    def __init__(
        self, model: nn.Module, exercises: Exercises, optimizer: str, objective: str, lr: float, seed: int = 0
    ) -> None:
        for field, found, known in (("optimizer", optimizer, OPTIMIZERS), ("objective", objective, OBJECTIVES)):
            if found not in known:
                raise InputError("unknown choice", field=field, found=found, expected=" or ".join(known))
        torch.manual_seed(seed)
        self.model, self.exercises = model.eval(), exercises
        self.optimizer, self.objective, self.lr, self.steps = optimizer, objective, lr, 0
        self.parameters = dict(model.named_parameters())
        self.hidden = hidden_matrices(model)
        self.masters = {name: _spread(p.detach()) for name, p in self.parameters.items()}
        self._first = {name: torch.zeros_like(m) for name, m in self.masters.items()}
        muon = self.hidden if optimizer == "muon" else frozenset()
        self._second = {name: torch.zeros_like(m) for name, m in self.masters.items() if name not in muon}
        self._serve()

    def served(self) -> Mapping[str, Tensor]:
        """The served view, bf16, tied parameters once."""
        return {name: master.bfloat16() for name, master in self.masters.items()}

    def _serve(self) -> None:
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(self.masters[name].bfloat16())

    def step(self) -> StepReport:
        """Generates (grpo) or takes (sft) a batch, one backward pass, one update."""
        rows, reward = self._grpo_rows() if self.objective == "grpo" else self._sft_rows()
        tokens = sum(len(output) for _, output, _ in rows)
        loss = 0.0
        for start in range(0, len(rows), _ROWS):
            part = _loss(self.model, rows[start : start + _ROWS], tokens)
            part.backward()
            loss += part.item()
        report = StepReport(loss, reward, self._nonzero())
        self._update()
        return report

    def _grpo_rows(self) -> tuple[list[_Row], float]:
        """Answers sampled from the served weights, weighted by their advantage within the prompt's group."""
        rows: list[_Row] = []
        total = 0.0
        exercises = [self.exercises.draw() for _ in range(PROMPTS)]
        answers = _sample(self.model, exercises, self.exercises.end)
        for exercise, outputs in zip(exercises, answers, strict=True):
            rewards = torch.tensor([self.exercises.reward(exercise, output) for output in outputs])
            gains = (rewards - rewards.mean()) / (rewards.std(unbiased=False) + 1e-4)
            rows += [(exercise.prompt, output, float(gain)) for output, gain in zip(outputs, gains, strict=True)]
            total += float(rewards.sum())
        return rows, total / len(rows)

    def _sft_rows(self) -> tuple[list[_Row], None]:
        exercises = [self.exercises.draw() for _ in range(PROMPTS * GROUP)]
        return [(exercise.prompt, exercise.answer, 1.0) for exercise in exercises], None

    def _nonzero(self) -> float:
        grads = [p.grad for p in self.parameters.values() if p.grad is not None]
        return sum(int(torch.count_nonzero(g)) for g in grads) / max(1, sum(g.numel() for g in grads))

    def _update(self) -> None:
        self.steps += 1
        nn.utils.clip_grad_norm_(self.parameters.values(), 1.0)
        rate = self.lr * min(1.0, self.steps / WARM_UP)
        for name, parameter in self.parameters.items():
            assert parameter.grad is not None, name
            if name in self._second:
                self._adam(name, parameter.grad, rate)
            else:
                self._muon(name, parameter.grad, rate)
            parameter.grad = None
        self._serve()

    def _adam(self, name: str, grad: Tensor, rate: float) -> None:
        first = self._first[name].lerp_(grad, 1 - _BETA1)
        second = self._second[name].mul_(_BETA2).addcmul_(grad, grad, value=1 - _BETA2)
        scale = (second / (1 - _BETA2**self.steps)).sqrt_().add_(_EPSILON)
        self.masters[name].addcdiv_(first, scale, value=-rate / (1 - _BETA1**self.steps))

    def _muon(self, name: str, grad: Tensor, rate: float) -> None:
        """Nesterov momentum, orthogonalised. An orthogonal m x n matrix has an RMS of 1 / sqrt(max(m, n))."""
        momentum = self._first[name].mul_(_MOMENTUM).add_(grad)
        update = orthogonalized(grad.add(momentum, alpha=_MOMENTUM))
        self.masters[name].add_(update, alpha=-rate * _MUON_RMS * max(update.shape) ** 0.5)


_Row = tuple[list[int], list[int], float]
"""Prompt, output, weight of the output's log-likelihood."""


def hidden_matrices(model: nn.Module) -> frozenset[str]:
    """Names of 2-d parameters other than the embedding and the head."""
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]  # type: ignore[operator]
    outer = {id(end.weight) for end in ends if end is not None}
    return frozenset(name for name, p in model.named_parameters() if p.ndim == 2 and id(p) not in outer)


def orthogonalized(matrix: Tensor, rounds: int = 5) -> Tensor:
    """Near U V^T of the matrix's U S V^T, by Newton-Schulz iteration; singular values end within about 0.7 to 1.2."""
    a, b, c = _NEWTON_SCHULZ
    x: Tensor = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(rounds):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def _spread(weights: Tensor) -> Tensor:
    """fp32 masters uniformly within half an ulp of bf16 weights (7 mantissa bits)."""
    _, exponent = torch.frexp(weights)  # weight = m * 2^exponent, m in [0.5, 1): the ulp is 2^(exponent - 8)
    ulp = torch.ldexp(torch.ones_like(weights), (exponent - 8).clamp(min=-133))
    return weights + ulp * (torch.rand_like(weights) - 0.5)


def _loss(model: nn.Module, rows: Sequence[_Row], tokens: int) -> Tensor:
    """Minus the weighted log-likelihood of the outputs, over ``tokens``.

    For answers sampled by these very weights its gradient is that of the clipped surrogate, whose ratios are all 1.
    """
    longest = max(len(output) for _, output, _ in rows)
    width = max(len(prompt) for prompt, _, _ in rows) + longest
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    weights = torch.zeros(len(rows), longest)
    for k, (prompt, output, weight) in enumerate(rows):  # prompts end, and outputs begin, in the same column
        first = width - longest - len(prompt)
        last = first + len(prompt) + len(output)
        ids[k, first:last] = torch.tensor(prompt + output)
        mask[k, first:last] = 1
        weights[k, : len(output)] = weight
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    out = model(input_ids=ids, attention_mask=mask, position_ids=places, use_cache=False, logits_to_keep=longest + 1)
    logits: Tensor = out.logits[:, :-1].float()
    likely = torch.log_softmax(logits, dim=-1).gather(-1, ids[:, -longest:, None])[..., 0]
    return -(likely * weights).sum() / tokens


def _sample(model: nn.Module, exercises: Sequence[Exercise], end: int) -> list[list[list[int]]]:
    """Per exercise, GROUP answers of at most NEW_TOKENS, sampled at temperature 1 from all tokens."""
    width = max(len(exercise.prompt) for exercise in exercises)
    ids = torch.full((len(exercises) * GROUP, width), end)
    mask = torch.zeros_like(ids)
    for k, exercise in enumerate(exercises):
        ids[k * GROUP : (k + 1) * GROUP, width - len(exercise.prompt) :] = torch.tensor(exercise.prompt)
        mask[k * GROUP : (k + 1) * GROUP, width - len(exercise.prompt) :] = 1
    with torch.no_grad():
        out = model.generate(  # type: ignore[operator]
            ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=NEW_TOKENS,
            pad_token_id=end, eos_token_id=end,
        )  # fmt: skip
    answers = [_until(row.tolist(), end) for row in out[:, width:]]
    return [answers[k * GROUP : (k + 1) * GROUP] for k in range(len(exercises))]


def _until(ids: list[int], end: int) -> list[int]:
    """Up to and with the first ``end``."""
    return ids[: ids.index(end) + 1] if end in ids else ids
