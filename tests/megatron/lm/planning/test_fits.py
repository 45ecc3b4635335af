"""What does not fit is refused by its size, with what would help, before anything is built; and the text of a dry run."""

from types import SimpleNamespace

import pytest
import torch

from megatron.lm.config import Config
from megatron.lm.config.cli import parse_args
from megatron.lm.config.presets import parameter_count
from megatron.lm.planning.fits import check_fits, device_memory, report, with_vocabulary
from megatron.lm.planning.layers import vocabulary
from megatron.lm.planning.memory import GIB, plan
from megatron.lm.planning.rates import GPUS


def flags(text: str) -> Config:
    return parse_args(text.split())


@pytest.mark.parametrize(("size", "gpus", "level"), [("7b", 32, "O0"), ("13b", 32, "O1"), ("175b", 128, "O0"), ("175b", 128, "O3")])
def test_the_papers_models_fit_on_the_papers_gpus_at_every_level(size, gpus, level):
    check_fits(flags(f"--preset {size} --opt-level {level} --use-distributed-optimizer"), gpus, 80 * GIB)


def test_what_does_not_fit_is_refused_with_what_would_help():
    config = flags("--preset 13b --opt-level O0 --micro-batch-size 4")
    with pytest.raises(ValueError, match=r"pipeline stage 0 needs 1\d\d.\d GiB") as caught:
        check_fits(config, 2, 80 * GIB)
    for remedy in ("--use-distributed-optimizer", "--micro-batch-size 4", "--save-activations coat", "--opt-level O2", "--tensor-model"):
        assert remedy in str(caught.value)
    assert "device has 80.0 (--device-memory-gib)" in str(caught.value)
    check_fits(config, 2, 1000 * GIB)
    with pytest.raises(ValueError, match="use --opt-level O3"):
        check_fits(config, 64, 40 * GIB)


@pytest.mark.parametrize("gpus", [1, 2, 3, 8])
def test_o2_needs_the_least_memory_on_up_to_two_gpus_and_o3_on_more(gpus: int):
    """README, choosing.md and the remedies say so: by ZeRO O2 has 2 + 4 / N bytes per parameter on N GPUs, O3 1 + 6 / N."""
    words = f"--preset 1.3b --use-distributed-optimizer --micro-batch-size 1 --global-batch-size {gpus} --opt-level"
    o2, o3 = (max(rank.total for rank in plan(flags(f"{words} {level}"), gpus)) / GIB for level in ("O2", "O3"))
    assert o2 < o3 - 0.5 if gpus == 1 else o2 == pytest.approx(o3, abs=0.01) if gpus == 2 else o3 < o2 - 0.2


TINY = "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 60 --lr 1e-3 --micro-batch-size 2"
HUGE = {
    "width": ("--hidden-size 10000000", "--hidden-size"),
    "depth": ("--num-layers 10000 --hidden-size 4096", "--num-layers"),
    "head": ("--kv-channels 16777216 --num-attention-heads 1024", "--kv-channels"),
    "vocabulary": ("--vocab-size 2147483647", "vocabulary"),
    "batch": ("--micro-batch-size 100000000", "--micro-batch-size 100000000"),
}


@pytest.mark.promise("Starting and ending", "A model or batch that this machine cannot hold is refused before anything is built.")
@pytest.mark.parametrize("name", HUGE)
def test_what_no_device_holds_is_refused_at_once(name):
    settings, message = HUGE[name]
    with pytest.raises(ValueError, match=message):
        check_fits(flags(f"{TINY} --train-iters 5 {settings}"), 1, 16 * GIB, reserved=0)


def test_dry_run_and_planner_ask_one_function_for_a_gpus_memory(monkeypatch: pytest.MonkeyPatch):
    """Before, a dry run without a GPU took 80 GiB, and the planner the H100's 79."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_memory(None) == device_memory(None, "h100") == GPUS["h100"].memory_gib * GIB
    assert device_memory(None, "h200") == GPUS["h200"].memory_gib * GIB
    assert device_memory(40.0) == device_memory(40.0, "h200") == 40 * GIB
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=123))
    assert device_memory(None) == 123
    assert device_memory(None, "h100") == GPUS["h100"].memory_gib * GIB


@pytest.mark.parametrize(("name", "rows"), [("llama3-8b", 128256), ("llama2-7b", 32000), ("qwen3-8b", 151936), ("125m", 50304)])
def test_a_dry_run_of_a_preset_has_its_published_vocabulary(name: str, rows: int):
    """Before, it was GPT-2's: Llama-3-8B was planned with 7.39B parameters."""
    config = with_vocabulary(flags(f"--preset {name} --dry-run"))
    assert vocabulary(config) == -(-rows // 128) * 128
    assert vocabulary(flags(f"--preset {name} --dry-run --vocab-size 1000")) == 1024
    if name == "llama3-8b":
        assert parameter_count(config.model, vocabulary(config)) == 8_030_261_248


def test_the_report_names_grid_batch_parameters_and_the_fullest_rank():
    text = report(flags("--preset 175b --opt-level O3"), 128)
    for part in (
        "128 processes = TP 8 x PP 4 x DP 4, sequence parallel, ZeRO",
        "512 sequences = 1,048,576 tokens, 128 x 1 per process; 38,147 iterations = 40.0B tokens",
        "174,590,681,088; per process 5,437,845,504 to 5,516,513,280; vocabulary 51,200 (GPT-2; there is no tokenizer)",
        "fullest: stage 0",
        "least: stage 3",
    ):
        assert part in text
    ramp = "--preset 175b --opt-level O3 --train-samples 19531250 --rampup-batch-size 32 32 5859375"
    assert "67,210 iterations = 40.0B tokens; ramp: from 32 sequences by 32 over 5,859,375 samples" in report(flags(ramp), 128)
    assert "3,353,032,704 active" in report(flags("--preset qwen3-30b-a3b --opt-level O3 --vocab-size 151936"), 64)
    assert "active" not in report(flags("--preset qwen3-8b --opt-level O3"), 8)
