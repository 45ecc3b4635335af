"""Tasks for PPO with programmatic rewards from 0 to 1, and questions drawn from a seed.

A task is a pair of functions. `register` adds one from your own file, and `examples/rlhf/ppo.py --reward` then accepts its name;
`tests/extend/test_own_task.py` adds one that asks to reverse a word.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron.lm.post.conversations import Message


class Question(NamedTuple):
    """A prompt, and the expected answer for its judge."""

    messages: list[Message]
    expected: str


@dataclass(frozen=True)
class Task:
    """One kind of question.

    Attributes:
        questions: (count, generator) -> questions; the same generator state must give the same questions.
        judge: (text of an answer, the question's `expected`) -> the reward, 0 to 1.
    """

    questions: Callable[[int, torch.Generator], list[Question]]
    judge: Callable[[str, str], float]


def sums(text: str) -> Callable[[int, torch.Generator], list[Question]]:
    """Return a function that asks for sums of two numbers from 0 to 99; `text` contains `{a}` and `{b}`."""

    def questions(count: int, draw: torch.Generator) -> list[Question]:
        numbers = torch.randint(100, (count, 2), generator=draw).tolist()
        return [Question([{"role": "user", "content": text.format(a=a, b=b)}], str(a + b)) for a, b in numbers]

    return questions


def digits(answer: str, expected: str) -> float:
    """Return the fraction of an answer's characters that are digits."""
    return sum(letter in "0123456789" for letter in answer) / max(1, len(answer))


def number(answer: str, expected: str) -> float:
    """Return 1 for the expected number and nothing else, 1/2 if it is the last number in a text, 1/10 for another number."""
    numbers = re.findall(r"\d+", answer)
    if not numbers:
        return 0.0
    if answer.strip().rstrip(".") == expected:
        return 1.0
    return 0.5 if numbers[-1] == expected else 0.1


def tagged(answer: str, expected: str) -> float:
    """Return 1/2 for an answer `<answer>NUMBER</answer>` and nothing else, 1 if the number is right; 1/10 for the tags alone."""
    match = re.fullmatch(r"\s*<answer>\s*(\d+)\s*</answer>\s*", answer)
    if match is None:
        return 0.1 if re.search(r"<answer>.*</answer>", answer, re.DOTALL) else 0.0
    return 1.0 if match[1] == expected else 0.5


TASKS = {
    "digits": Task(sums("{a}+{b}"), digits),
    "arithmetic": Task(sums("What is {a} + {b}? Answer with the number alone."), number),
    "format": Task(sums("What is {a} + {b}? Answer in the form <answer>NUMBER</answer> and write nothing else."), tagged),
}


def register(name: str, task: Task) -> None:
    """Register a task; call it in every process that uses the task.

    Raises:
        ValueError: if another task has that name.
    """
    if TASKS.setdefault(name, task) != task:
        raise ValueError(f"task {name!r} already exists; choose a name other than {', '.join(TASKS)}")
