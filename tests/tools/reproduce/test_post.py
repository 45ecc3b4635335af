"""After pre-training: what is made of rows, against rows by hand; a toy of each runs nightly (test_registry.py)."""

import math
import re
from pathlib import Path

import pytest

from tools.docs.evidence import ROOT, read
from tools.reproduce import post
from tools.reproduce.entry import Task
from tools.reproduce.fine_tuning import RATES
from tools.reproduce.registry import ENTRIES

KEPT = Task("kept", "whole", Path("text"), Path("folder"))
ENCODER = {"precision": "bf16-d", "phase": "phase1", "ppl": "8"}


def by_name(found):
    return {finding.quantity: finding for finding in found if finding.x is None}


def test_zero_shot_scores_differ_by_so_many_standard_errors():
    def row(model, task, metric, value, stderr="0.03"):
        return {"model": model, "task": task, "metric": metric, "value": str(value), "stderr": stderr}

    scores = [row("ck-O0", "a", "acc", 0.5), row("ck-O3", "a", "acc", 0.44), row("ck-O0", "b", "acc", 0.3), row("ck-O3", "b", "acc", 0.31)]
    text = [row("ck-O0", "text", "bits_per_byte", 0.8, ""), row("ck-O3", "text", "bits_per_byte", 0.82, "")]
    found = by_name(post.zero_shot([*scores, *text, row("ck-O0", "c", "acc", 0.1), row("smollm2", "a", "acc", 0.9)]))
    assert found["a: O3 less O0"].ours == pytest.approx(-6)
    assert found["b: accuracy at O0"].ours == 30
    assert found[post.LARGEST2].ours == pytest.approx(0.06 / (0.03 * 2**0.5))
    assert found["held-out text: bits per byte, O3 over O0, each read in its own precision"].ours == pytest.approx(1.025)
    assert not any("exported" in name for name in found)
    exported = [row(f"continued-{level}-bf16", "text", "bits_per_byte", bits, "") for level, bits in (("O0", 0.8), ("O3", 0.81))]
    found = by_name(post.zero_shot([*scores, *text, *exported]))
    assert found["held-out text: bits per byte, O3 over O0, both exported to BF16"].ours == pytest.approx(1.0125)
    assert not any(name.startswith("c") for name in found)
    with pytest.raises(ValueError, match="no task has results of both O0 and O3"):
        list(post.zero_shot(text))


def test_the_page_of_fine_tuning_has_the_models_exported_to_bf16():
    recorded = {finding.quantity: finding for finding in post.table3(KEPT)}
    assert recorded[post.TUNED3].ours == pytest.approx(0.984029 / 0.980953)


def test_the_page_of_rlhf_has_the_rows_that_speak_against_it():
    findings = list(post.table4(KEPT))
    found = {finding.quantity: finding.ours for finding in findings}
    assert found["DPO, O0: loss of the last steps"] < found["DPO, O0: loss of the first step"] < found["DPO, O3: loss of the last steps"]
    assert found["PPO, O3: time of a step"] > 3 * found["PPO, O0: time of a step"]
    counted = "O3, LLaMA-7B counted: states and gradients from O0's with FP32 gradients"
    assert found[counted] == pytest.approx(-62, abs=0.5)
    assert found["O3: states and gradients from O0's"] > found[counted]  # the baseline measured has BF16 gradients
    assert found["O3: reward `digits` of the last 10 steps"] > 0.9 > 0.2 > found["O3: reward `arithmetic` of the last 10 steps"]
    own = {
        (each.quantity, each.seed): each.ours
        for each in findings
        if re.fullmatch("DPO at .* 2e-05, .*: loss in its own layers", each.quantity)
    }
    assert {seed for _, seed in own} == {1234, 1235, 1236}
    assert all((loss < math.log(2)) == (", O0" in name) for (name, _), loss in own.items())
    assert {each.where["commit"] for each in findings if "learning rate" in each.quantity} == {row["commit"] for row in read(RATES)}


def test_encoders_are_told_over_option_d():
    rows = [ENCODER, ENCODER | {"precision": "collage-plus", "ppl": "9"}, ENCODER | {"precision": "O3", "ppl": "10"}]
    found = by_name(post.encoder_findings([*rows, ENCODER | {"ppl": "4", "phase": "phase2"}]))
    assert found["plus, phase1: perplexity over D's"].ours == pytest.approx(9 / 8)
    assert found["O3, phase1: perplexity over D's"].ours == pytest.approx(10 / 8)
    assert found["d, phase2: perplexity"].ours == 4
    with pytest.raises(ValueError, match="train bf16-d too"):
        list(post.encoder_findings(rows[1:]))


def test_boolq_tells_each_seed():
    row = {"precision": "bf16-d", "seed": "1", "accuracy": "0.62", "majority": "0.6"}
    found = list(post.boolq_findings([row, row | {"precision": "collage-plus", "seed": "2", "accuracy": "0.7"}]))
    assert [(each.quantity, each.ours, each.seed) for each in found] == [
        ("d: accuracy on BoolQ", 62, 1), ("plus: accuracy on BoolQ", 70, 2), ("majority answer", 60, None)
    ]  # fmt: skip


def test_rows_on_file_are_asked_for_by_name():
    for name in ("fp8lm-table2", "fp8lm-table3", "fp8lm-table4", "collage-table3", "collage-table4"):
        lacking = ENTRIES[name].sizes["kept"].lacking()
        assert bool(lacking) != all((ROOT / file).is_file() for file in ENTRIES[name].sizes["kept"].files)


def test_a_continued_model_is_compared_in_its_own_layers_and_in_bf16():
    def row(case, seed, start, own, bf16):
        return {"case": case, "seed": seed, "start": start, "own": own, "bf16": bf16, "commit": "abc1234"}

    rows = [
        row("O0", "1", "3", "2", "2"),
        row("O0", "2", "4", "2.5", "2.5"),
        row("O2", "1", "3.03", "2.02", "2.01"),
        row("O2", "2", "4.04", "2.525", "2.5"),
    ]
    found = {finding.quantity: finding.ours for finding in post.continued(rows)}
    told = "O2, continued: held-out loss from O0's "
    assert found[told + "before training"] == pytest.approx(1.0)
    assert found[told + "after it, each in its own layers"] == pytest.approx(1.0)
    assert found[told + "after it, both in BF16 layers"] == pytest.approx(0.25)
    assert found[told + "after it, both in BF16 layers: half width of the 95 % interval"] == pytest.approx(12.7062 * 0.25)
    assert len(found) == 6
