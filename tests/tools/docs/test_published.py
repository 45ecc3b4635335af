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
    for name in ("llama-published", "step-ratios"):
        assert f"<!-- table: {name} -->" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_ratios_are_of_steps_of_one_run_and_name_how_the_baselines_ran():
    text = " ".join(published.ratios().markdown().split())
    rows = {
        (row["commit"], row["case"]): float(row["ms"])
        for row in pick(published.STEP)
        if row["micro_batch"] == "4" and row["preset"] == "1.3b"
    }
    compiled = rows[published.COMPILED, "torchao bf16"] / rows[published.COMPILED, "O3"]
    eager = rows[published.EAGER, "megatron te-delayed"] / rows[published.EAGER, "O3"]
    assert f"is {compiled:.2f} times as fast as BF16" in text
    assert f"and {eager:.2f} times in FP8, but these ran eagerly" in text
    assert "both compiled by torch.compile and timed in the same run" in text
