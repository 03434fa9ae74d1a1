"""The task: name a country's capital, in as few words as possible; a rule checks the answer.

Owns the questions and the reward. Owns no model and no training.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

INSTRUCTION = "Answer with one word."
CAPITALS = dict(
    pair.split(":")
    for pair in (
        "France:Paris Italy:Rome Japan:Tokyo Egypt:Cairo Spain:Madrid Germany:Berlin Greece:Athens Russia:Moscow "
        "China:Beijing Cuba:Havana Portugal:Lisbon Austria:Vienna Poland:Warsaw Ireland:Dublin Norway:Oslo "
        "Peru:Lima Kenya:Nairobi Iraq:Baghdad Iran:Tehran Thailand:Bangkok Hungary:Budapest Sweden:Stockholm "
        "Finland:Helsinki Canada:Ottawa"
    ).split()
)


@dataclass(frozen=True)
class Question:
    """``text`` is what the user asks, ``answer`` what a right answer must contain."""

    text: str
    answer: str


def questions(seed: int) -> Iterator[Question]:
    """Endless questions, shuffled anew each time all countries were asked."""
    dice = random.Random(seed)
    while True:
        for country in dice.sample(sorted(CAPITALS), len(CAPITALS)):
            yield Question(f"What is the capital of {country}?", CAPITALS[country])


def reward(question: Question, text: str) -> float:
    """In [0, 1]: 0 without the capital's name; else 1 for the bare name, a tenth less for each further word."""
    words = re.findall(r"\w+", text)
    if question.answer not in words:
        return 0.0
    return max(0.2, 1.0 - 0.1 * (len(words) - 1))
