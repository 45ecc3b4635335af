"""Comparison of models item by item: what counts as correct, the value over all items, and the interval of the difference."""

import json
import math

import pytest
import torch

from megatron.lm.evaluation.models import Score
from tools.reproduce import judge_items
from tools.reproduce.judge_items import DOCUMENTS, LAST_WORDS, compared, judged

TEXTS = ["abab", "abba", "bbbbbbaa"]


class Letters:
    """A model of bytes that gives every "b" a log-probability and every other byte what is left, whatever stands before it."""

    name, seq_length, eod = "letters", 8, 0

    def __init__(self, of_b: float) -> None:
        self.of_b, self.about = of_b, {"precision": "O0", "iteration": 3}

    def encode(self, text):
        return list(text.encode())

    def score(self, sequences, starts):
        return [self._score(sequence[start:]) for sequence, start in zip(sequences, starts, strict=True)]

    def _score(self, targets):
        assert len(targets) <= self.seq_length
        share = [self.of_b if token == ord("b") else 1 - self.of_b for token in targets]
        return Score(torch.tensor(share).log(), all(value > 0.5 for value in share))


def test_the_value_is_that_of_all_text_and_the_mean_of_the_items():
    found = judged(Letters(0.75), TEXTS, (), {})[DOCUMENTS]
    expected = -(10 * math.log2(0.75) + 6 * math.log2(0.25)) / 16
    assert found.value == pytest.approx(expected)
    assert sum(found.each) / len(found.each) == pytest.approx(expected)


def test_a_pair_is_correct_if_the_right_continuation_is_the_likelier_one():
    examples = [{"input": "x ", "target_scores": {"a": 0, "b": 1}}, {"input": "x ", "target_scores": {"b": 0, "a": 1}}]
    words = [{"context": "x", "word": "bbb"}]
    found = judged(Letters(0.75), (), words, {"letters": examples})
    assert found["letters, share correct"].each == [1.0, 0.0]
    assert found[LAST_WORDS].each == [0.0]  # the space before it is not the likeliest byte
    assert judged(Letters(0.25), (), (), {"letters": examples})["letters, share correct"].each == [0.0, 1.0]
    assert DOCUMENTS not in found


def test_a_long_context_loses_its_beginning():
    words = [{"context": "x" * 30, "word": "b"}]
    assert judged(Letters(0.75), (), words, {})[LAST_WORDS].each == [0.0]


def test_the_difference_has_an_interval_over_items():
    models = {name: judged(Letters(share), TEXTS, (), {}) for name, share in (("base", 0.75), ("other", 0.5))}
    base, other = compared(models, {name: {"precision": "O3", "iteration": 7} for name in models})
    assert (base["above_base"], base["half_width"], other["items"], other["precision"], other["iteration"]) == (0, 0, 3, "O3", 7)
    assert other["above_base"] == pytest.approx(other["value"] - base["value"], abs=2e-6)
    assert other["half_width"] > 0


def test_a_call_without_items_and_a_model_twice_are_refused_before_anything_is_loaded(tmp_path, capsys):
    empty = tmp_path / "empty.json"
    empty.write_text(json.dumps({"examples": []}))
    cut, other = tmp_path / "cut.jsonl", tmp_path / "other.jsonl"
    cut.write_text('{"text": "whole"}\n{"text": "c')
    other.write_text('{"word": "b"}\n')
    for flags, said in (
        (["--load", "a", "--pairs", str(empty)], "nothing to judge in"),
        (["--load", "a"], "nothing to judge: give --text"),
        (["--load", "a", "--text", str(cut)], "line 2: not JSON"),
        (["--load", "a", "--last-words", str(other)], "line 1: no key 'context'"),
        (["--load", "a", "--text", str(tmp_path / "absent.jsonl")], "absent"),
        (["--load", "a", "--pairs", str(cut)], "is not JSON"),
        (["--load", "a", "--pairs", str(other)], "has no list of examples"),
        (["--load", "a", "a", "--pairs", str(empty)], "a model is listed twice"),
    ):
        assert judge_items.main([*flags, "--out", str(tmp_path / "out.csv")]) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "out.csv").exists()
