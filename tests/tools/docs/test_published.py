"""The sentence beside NVIDIA's figure has the row's numbers, names what differs, and stands in README."""

from pathlib import Path

from tools.docs import published
from tools.docs.cells import pick

ROOT = Path(__file__).parents[3]


def test_it_has_the_numbers_of_the_row_and_what_differs():
    (*_, row) = pick(published.STEP, lambda row: (row["case"], row["preset"]) == (published.CASE, published.MODEL))
    text = " ".join(published.llama().markdown().split())
    assert f"{int(row['tokens_s_gpu']):,} tokens/s on one H200" in text
    assert row["commit"] in text
    assert "on eight H100s" in text
    assert published.NVIDIA_PAGE in text


def test_it_stands_in_readme():
    assert "<!-- table: llama-published -->" in (ROOT / "README.md").read_text(encoding="utf-8")
