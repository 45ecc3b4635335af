"""Tasks with answers that a program can judge: questions by seed, and a reward from 0 to 1."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron.lm.post.conversations import Message


class Question(NamedTuple):
    """What is asked, and what a right answer holds."""

    messages: list[Message]
    expected: str


@dataclass(frozen=True)
class Task:
    """One kind of question.

    Attributes:
        ask: two numbers from 0 to 99 -> the text of the question.
        judge: an answer's text and what is expected -> 0 to 1.
    """

    ask: Callable[[int, int], str]
    judge: Callable[[str, str], float]

    def questions(self, count: int, draw: torch.Generator) -> list[Question]:
        """`count` of them."""
        numbers = torch.randint(100, (count, 2), generator=draw).tolist()
        return [Question([{"role": "user", "content": self.ask(a, b)}], str(a + b)) for a, b in numbers]


def digits(answer: str, expected: str) -> float:
    """The share of an answer's characters that are digits."""
    return sum(letter in "0123456789" for letter in answer) / max(1, len(answer))


def number(answer: str, expected: str) -> float:
    """1 for the expected number and nothing else, 1/2 where it is the last number among words, 1/10 for another number."""
    found = re.findall(r"\d+", answer)
    if not found:
        return 0.0
    if answer.strip().rstrip(".") == expected:
        return 1.0
    return 0.5 if found[-1] == expected else 0.1


def tagged(answer: str, expected: str) -> float:
    """1/2 for an answer of the form `<answer>NUMBER</answer>` and nothing else, 1/2 more for the right number; 1/10 for the tags alone."""
    found = re.fullmatch(r"\s*<answer>\s*(\d+)\s*</answer>\s*", answer)
    if found is None:
        return 0.1 if re.search(r"<answer>.*</answer>", answer, re.DOTALL) else 0.0
    return 1.0 if found[1] == expected else 0.5


TASKS = {
    "digits": Task(lambda a, b: f"{a}+{b}", digits),
    "arithmetic": Task(lambda a, b: f"What is {a} + {b}? Answer with the number alone.", number),
    "format": Task(lambda a, b: f"What is {a} + {b}? Answer in the form <answer>NUMBER</answer> and write nothing else.", tagged),
}
