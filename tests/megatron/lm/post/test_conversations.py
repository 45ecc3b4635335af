"""Rows of instructions and preferences become messages, or are refused by file, row and remedy."""

import json

import pytest

from megatron.lm.post.conversations import Preference, conversation, preference, rows

ASKED, ANSWERED = {"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [ASKED, ANSWERED]},
        {"conversations": [{"from": "human", "value": "2+2"}, {"from": "gpt", "value": "4"}]},
        {"instruction": "2+2", "input": "", "output": "4"},
    ],
)
def test_each_form_is_the_same_conversation(row):
    assert conversation(row, "row 1") == [ASKED, ANSWERED]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2+2", "chosen": "4", "rejected": "5"},
        {"prompt": [ASKED], "chosen": [ASKED, ANSWERED], "rejected": {"role": "assistant", "content": "5"}},
        {"instruction": "2+2", "chosen": "4", "rejected": "5"},
        {
            "conversations": [{"from": "human", "value": "2+2"}],
            "chosen": {"from": "gpt", "value": "4"},
            "rejected": {"from": "gpt", "value": "5"},
        },
    ],
)
def test_each_form_is_the_same_preference(row):
    assert preference(row, "row 1") == Preference([ASKED], "4", "5")


@pytest.mark.parametrize("text", [json.dumps([{"a": 1}, {"a": 2}]), '{"a": 1}\n\n{"a": 2}\n'])
def test_lists_and_lines_are_read(tmp_path, text):
    file = tmp_path / "rows"
    file.write_text(text, encoding="utf-8")
    assert rows(file) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no rows"),
        ("[]", "has no rows"),
        ("[1]", "row 1 of .* is not a JSON object"),
        ("[{]", "is invalid JSON"),
        ('{"a": 1}\n{"a"', "line 2 of .* is invalid JSON"),
    ],
)
def test_a_file_without_rows_is_refused(tmp_path, text, said):
    file = tmp_path / "rows"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=said):
        rows(file)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"text": "a"}, "row 7 has .*a row has messages"),
        ({"messages": []}, "has no turn"),
        ({"messages": "a"}, "expected a list of messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "a turn must have a role"),
        ({"messages": [{"role": "user", "content": None}]}, "a turn must have a role"),
        ({"messages": [ASKED]}, "ends with the turn of 'user'"),
    ],
)
def test_a_row_of_no_form_is_refused(row, said):
    with pytest.raises(ValueError, match=said):
        conversation(row, "row 7")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "a", "chosen": "b"}, "must have chosen, rejected and a prompt"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "nothing to prefer"),
        ({"prompt": "a", "chosen": "", "rejected": "b"}, "chosen of row 7 is ''"),
        ({"prompt": [ANSWERED], "chosen": "a", "rejected": "b"}, "must end with the user's turn"),
    ],
)
def test_a_preference_that_is_none_is_refused(row, said):
    with pytest.raises(ValueError, match=said):
        preference(row, "row 7")


def test_an_input_follows_the_instruction_and_a_system_text_precedes_it():
    found = conversation({"instruction": "add", "input": "2 and 2", "output": "4", "system": "be brief"}, "row 1")
    assert found == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "add\n\n2 and 2"}, ANSWERED]
