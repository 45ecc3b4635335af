"""The text of the dry run."""

from megatron.lm.config.cli import parse_args
from megatron.lm.planning.report import report


def test_the_report_names_grid_batch_parameters_and_the_fullest_rank():
    said = report(parse_args(["--preset", "175b", "--opt-level", "O3"]), 128)
    assert "grid: 128 processes = TP 8 x PP 4 x DP 4, sequence parallel, ZeRO" in said
    assert "batch: 512 sequences = 1,048,576 tokens, 128 x 1 per process; 38,147 iterations = 40.0B tokens" in said
    assert "parameters: 174,590,681,088; per process 5,437,845,504 to 5,516,513,280; vocabulary 51,200" in said
    assert "fullest: stage 0" in said
    assert "least: stage 3" in said
    ramp = "--preset 175b --opt-level O3 --train-samples 19531250 --rampup-batch-size 32 32 5859375"
    assert "; 67,210 iterations = 40.0B tokens; ramp: from 32 sequences by 32 over 5,859,375 samples" in report(
        parse_args(ramp.split()), 128
    )


def test_a_mixture_of_experts_has_active_parameters():
    said = report(parse_args(["--preset", "qwen3-30b-a3b", "--opt-level", "O3", "--vocab-size", "151936"]), 64)
    assert "parameters: 30,532,122,624, 3,353,032,704 active per token; per process " in said
    assert "active" not in report(parse_args(["--preset", "qwen3-8b", "--opt-level", "O3"]), 8)
