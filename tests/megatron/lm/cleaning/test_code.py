"""FP8-LM, appendix A.3, rule by rule."""

import pytest

from megatron.lm.cleaning.code import clean

GOOD = (
    "import os\n\n\ndef name(path):\n    # The last part of a path.\n    if path:\n        return os.path.basename(path)\n    return None\n"
)


def test_good_code_stays_as_it_is():
    assert clean(GOOD) == (GOOD, None)


def test_control_characters_go_but_for_tab_and_line_end():
    assert clean(GOOD.replace("    if", "\tif").replace("None", "No\x00ne\x0c\x1b")) == (GOOD.replace("    if", "\tif"), None)
    assert clean(GOOD.replace("\n", "\r\n")) == (GOOD, None)


@pytest.mark.parametrize(
    "notice",
    [
        "# Copyright 2020 Somebody.\n# Licensed to all.\n",
        '"""Module.\n\nCopyright (c) 2019 X.\n"""\n',
        "# (C) 2011 A\n",
        "# All rights reserved.\n#\n# More.\n",
    ],
)
def test_copyright_comments_go(notice: str):
    assert clean(notice + GOOD)[0].lstrip("\n") == GOOD
    assert clean(GOOD + notice)[0].rstrip("\n") == GOOD.rstrip("\n") or notice.startswith('"""')


def test_a_first_line_for_the_system_and_other_comments_stay():
    text, problem = clean("#!/usr/bin/env python\n# Copyright 1999 A\n" + GOOD)
    assert (text, problem) == ("#!/usr/bin/env python\n" + GOOD, None)
    assert clean('"""What it does."""\n' + GOOD)[0].startswith('"""What it does."""')


def test_comment_lines_of_few_letters_go():
    assert clean(GOOD.replace("    # The", "    # ------- x\n    #\n    # The"))[0] == GOOD


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "code: alphanumeric rate"),
        (GOOD + "x = '" + "\u00e9" * 20 + "'\n", "code: alphanumeric rate"),
        ("import os\nfor x in y:\n    if x: pass\n", "code: too few lines"),
        (GOOD + "x = '" + "a" * 1000 + "'\n", "code: a line too long"),
        (GOOD + ("x = '" + "a" * 300 + "'\n") * 6, "code: lines too long on average"),
        ("x = 1\n" * 6 + "import os\nimport sys\n", "code: too few keywords"),
        ("x = important\n" * 6, "code: too few keywords"),
    ],
)
def test_files_that_are_poor_go(text: str, problem: str):
    assert clean(text)[1] == problem
