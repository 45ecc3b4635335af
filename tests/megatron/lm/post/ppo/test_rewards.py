"""What a program says of answers."""

import pytest
import torch

from megatron.lm.post.ppo.rewards import TASKS, digits, number, tagged


@pytest.mark.parametrize(("answer", "want"), [("", 0), ("12a4", 0.75), ("٣", 0), ("777", 1)])
def test_digits(answer, want):
    assert digits(answer, "") == want


@pytest.mark.parametrize(("answer", "want"), [("12", 1), (" 12.\n", 1), ("It is 12", 0.5), ("12 and then 13", 0.1), ("no", 0), ("", 0)])
def test_number(answer, want):
    assert number(answer, "12") == want


@pytest.mark.parametrize(
    ("answer", "want"),
    [
        ("<answer>12</answer>", 1),
        (" <answer> 12 </answer>\n", 1),
        ("<answer>13</answer>", 0.5),
        ("It is <answer>12</answer>", 0.1),
        ("12", 0),
    ],
)
def test_tagged(answer, want):
    assert tagged(answer, "12") == want


@pytest.mark.parametrize("name", TASKS)
def test_questions_are_of_the_generator_and_hold_their_sum(name):
    first, second = (TASKS[name].questions(5, torch.Generator().manual_seed(3)) for _ in range(2))
    assert first == second
    assert len({question.expected for question in first}) > 1
    assert all(question.messages[-1]["role"] == "user" for question in first)
    assert TASKS[name].judge("<answer>5</answer>" if name == "format" else "5", "5") == 1
