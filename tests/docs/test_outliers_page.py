"""The column "at a resume" of the remedies for outliers, against the code that judges a resume's scaling settings."""

import re
from pathlib import Path

import pytest

from megatron.lm.config.cli import parse_args
from megatron.lm.config.sections.precision import PrecisionConfig, with_saved_scaling

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "outliers.md"
REMEDIES = re.findall(r"^\| `(--[^`]+)` \| [^|]+ \| (accepted|refused) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
SHAPE = "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 32 --micro-batch-size 2 --lr 1e-3 --train-iters 1 --swiglu"


def precision(flags: str) -> PrecisionConfig:
    return parse_args(f"{SHAPE} --opt-level O3 {flags}".split()).precision


def test_the_column_has_both_answers():
    assert {answer for _, answer in REMEDIES} == {"accepted", "refused"}
    assert len(REMEDIES) >= 9


@pytest.mark.parametrize(("flags", "answer"), REMEDIES)
def test_a_resume_answers_as_the_page_says(flags: str, answer: str):
    if answer == "refused":
        with pytest.raises(ValueError, match=f"scales the operands of its GEMMs differently: {flags} "):
            with_saved_scaling(precision(flags), precision(""))
    else:
        assert with_saved_scaling(precision(flags), precision("")) is not None
