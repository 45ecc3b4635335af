"""Gopher's rules, each provoked."""

import pytest

from helpers import texts
from megatron.lm.cleaning.quality import problem


def test_running_text_stays():
    assert problem(texts.SPEECH) is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "too few words"),
        ("the and of " * 16, "too few words"),
        ("of that " * 50_001, "too many words"),
        ("to be of " * 50, "mean length of words"),
        ("internationalisation the and of " * 5 + "internationalisation " * 50, "mean length of words"),
        (texts.SPEECH + " #tag" * 30, "symbols"),
        (texts.SPEECH + " so..." * 30, "symbols"),
        ("\n".join(["- the words of this line and that"] * 12), "bullet points"),
        ("\n".join(["the words of this long line and that which goes on..."] * 12), "ellipses"),
        (texts.SPEECH + " 1234 5678" * 30, "words without a letter"),
        ("lorem ipsum dolor amet " * 20, "stop words"),
    ],
)
def test_poor_text_goes(text: str, why: str):
    assert problem(text) == f"quality: {why}"


def test_stop_words_are_asked_of_english_alone():
    assert problem("lorem ipsum dolor amet " * 20, english=False) is None
