"""Two tasks whose answers a rule can check.

Owns the questions and the rewards. Owns no model and no training.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

CAPITALS = {
    "France": "Paris",
    "Italy": "Rome",
    "Japan": "Tokyo",
    "Egypt": "Cairo",
    "Spain": "Madrid",
    "Germany": "Berlin",
    "Greece": "Athens",
    "Russia": "Moscow",
    "China": "Beijing",
    "Cuba": "Havana",
    "Portugal": "Lisbon",
    "Austria": "Vienna",
    "Poland": "Warsaw",
    "Ireland": "Dublin",
    "Norway": "Oslo",
    "Peru": "Lima",
    "Kenya": "Nairobi",
    "Iraq": "Baghdad",
    "Iran": "Tehran",
    "Thailand": "Bangkok",
    "Hungary": "Budapest",
    "Sweden": "Stockholm",
    "Finland": "Helsinki",
    "Canada": "Ottawa",
}


@dataclass(frozen=True)
class Question:
    """What the model is told and asked, and what a right answer contains ("": anything is right)."""

    instruction: str
    text: str
    answer: str


class Capitals:
    """Name a country's capital, in as few words as possible."""

    def questions(self, seed: str) -> Iterator[Question]:
        """Without end, shuffled anew each time all countries were asked."""
        dice = random.Random(seed)
        while True:
            for country in dice.sample(sorted(CAPITALS), len(CAPITALS)):
                yield Question("Answer with one word.", f"What is the capital of {country}?", CAPITALS[country])

    def reward(self, question: Question, text: str) -> float:
        """0 without the capital's name; else 1 for the bare name, and a tenth less for each further word."""
        words = re.findall(r"\w+", text)
        if question.answer not in words:
            return 0.0
        return max(0.2, 1.0 - 0.1 * (len(words) - 1))


class Letters:
    """Write small letters: a task that a random model scores on, for tests."""

    def questions(self, seed: str) -> Iterator[Question]:
        """Without end."""
        dice = random.Random(seed)
        while True:
            yield Question("", dice.choice(("abc", "spell", "write")), "")

    def reward(self, question: Question, text: str) -> float:
        """The share of small letters."""
        return sum("a" <= letter <= "z" for letter in text) / max(1, len(text))
