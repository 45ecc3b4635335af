"""The table as text."""

from megatron.lm.config.megatron_flags.listing import LIMITS, WIDTH, help_sections, page
from megatron.lm.config.megatron_flags.table import TABLE
from megatron.lm.config.megatron_flags.topics.row import ACCEPTED

ROWS = [row for rows in TABLE.values() for row in rows]


def test_the_page_has_every_line_with_its_reason():
    text = page()
    for row in ROWS:
        assert f"| `{row.line}` | {row.verdict.treatment} | " in text
    assert "| `--layernorm-epsilon X` | translated | `--norm-epsilon X` |" in text


def test_an_accepted_flag_with_a_limit_shows_it():
    assert set(LIMITS) <= {row.line for row in ROWS if row.verdict.treatment == ACCEPTED}
    for line, limit in LIMITS.items():
        assert f"| `{line}` | accepted | {limit} |" in page()


def test_no_reason_breaks_the_table_of_the_page():
    assert [row.line for row in ROWS if "|" in row.verdict.says or "\n" in row.verdict.says] == []


def test_the_help_has_each_treated_line_and_ends_with_three_examples():
    text = help_sections()
    for row in ROWS:
        assert row.verdict.treatment == "accepted" or row.line in text
    assert max(map(len, text.splitlines())) <= WIDTH
    assert text[text.index("\nexamples:\n") :].count("-m megatron.lm.pretrain") == 3
