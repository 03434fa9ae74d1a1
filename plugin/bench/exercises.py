"""What the density benchmark's model is trained on: endless small exercises with a rule that checks the answer.

Owns prompts, answers and rewards, in token ids. Owns no model and no training.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["Exercise", "Exercises", "Parity", "Sums"]


@dataclass(frozen=True)
class Exercise:
    """Token ids of the prompt and of a right answer with its end token; ``solution`` is what the rule looks for."""

    prompt: list[int]
    answer: list[int]
    solution: str


class Exercises(Protocol):
    """Where exercises come from."""

    end: int
    """Id of the token that ends an answer."""

    def draw(self) -> Exercise:
        """The next one."""

    def reward(self, exercise: Exercise, output: list[int]) -> float:
        """Higher is better."""


class Sums:
    """Sums of two numbers, asked in the tokenizer's own chat template when it has one."""

    def __init__(self, tokenizer: Any, seed: int = 0) -> None:
        self._tokenizer = tokenizer
        self._dice = random.Random(seed)
        self.end: int = tokenizer.eos_token_id

    def draw(self) -> Exercise:
        a, b = self._dice.randint(2, 60), self._dice.randint(2, 60)
        question, answer = f"What is {a} plus {b}? Answer with one number.", f"{a} plus {b} is {a + b}."
        if getattr(self._tokenizer, "chat_template", None):
            messages = [{"role": "user", "content": question}]
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            prompt = self._tokenizer.encode(text, add_special_tokens=False)
        else:
            prompt = self._tokenizer.encode(question + "\n")
        return Exercise(prompt, [*self._tokenizer.encode(answer, add_special_tokens=False), self.end], str(a + b))

    def reward(self, exercise: Exercise, output: list[int]) -> float:
        """1 for the right number, less 0.02 per token: answers of one group nearly always differ."""
        numbers = re.findall(r"\d+", self._tokenizer.decode(output, skip_special_tokens=True))
        return float(exercise.solution in numbers) - 0.02 * len(output)


class Parity:
    """Random prompts; even ids are rewarded. For models without a tokenizer."""

    def __init__(self, vocabulary: int, seed: int = 0) -> None:
        self._vocabulary = vocabulary
        self._dice = random.Random(seed)
        self.end = 1

    def draw(self) -> Exercise:
        prompt = [self._dice.randrange(2, self._vocabulary) for _ in range(8)]
        answer = [2 * self._dice.randrange(1, self._vocabulary // 2) for _ in range(8)]
        return Exercise(prompt, [*answer, self.end], "even")

    def reward(self, exercise: Exercise, output: list[int]) -> float:
        """Share of even ids."""
        return sum(token % 2 == 0 for token in output) / max(1, len(output))
