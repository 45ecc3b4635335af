"""Passages by the rule, from text whose passages are known."""

from helpers import texts
from megatron.lm.tools.evaluate import passages

FOUR = "The committee met on Monday. Its report was short. Nobody liked the report. They wrote another report."


def test_a_word_that_the_sentences_before_hold_is_asked_for():
    assert list(passages([FOUR])) == [
        {"context": "The committee met on Monday. Its report was short. Nobody liked the report. They wrote another", "word": "report"}
    ]


def test_what_no_sentence_before_holds_is_not():
    assert list(passages([FOUR.replace("another report", "another letter")])) == []
    assert list(passages([FOUR.replace("They wrote another report", "They said it was so").replace("Monday", "so")])) == [], "short words"
    assert list(passages([" ".join(FOUR.split(". ")[1:])])) == [], "three sentences are too few"


def test_no_two_share_a_sentence_and_paragraphs_stay_apart():
    assert len(list(passages([FOUR + " " + "It was the report."]))) == 1
    assert len(list(passages([FOUR + " " + FOUR]))) == 2
    assert len(list(passages([FOUR + "\n\n" + FOUR, FOUR]))) == 3
    assert list(passages([FOUR.replace(" They", "\n\nThey")])) == []


def test_line_ends_within_a_sentence_are_spaces():
    assert list(passages([FOUR.replace(" was ", "\nwas ")])) == list(passages([FOUR]))


def test_real_text_gives_whole_passages():
    for found in passages([texts.SPEECH * 3]):
        assert found["word"].lower() in found["context"].lower()
        assert not found["context"].endswith(" ")
