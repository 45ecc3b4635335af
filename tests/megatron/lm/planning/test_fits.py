"""What does not fit is refused by its size, with what would help, before anything is built."""

import pytest

from megatron.lm.config import Config
from megatron.lm.config.cli import parse_args
from megatron.lm.planning.fits import ORDER_BYTES, check_data_order, check_fits, check_weights
from megatron.lm.planning.memory import GIB


def flags(text: str) -> Config:
    return parse_args(text.split())


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize(("size", "gpus"), [("7b", 32), ("13b", 32), ("175b", 128)])
def test_the_papers_models_fit_on_the_papers_gpus_at_every_level(size, gpus, level):
    check_fits(flags(f"--preset {size} --opt-level {level} --use-distributed-optimizer"), gpus, 80 * GIB)


def test_what_does_not_fit_is_refused_with_what_would_help():
    config = flags("--preset 13b --opt-level O0 --micro-batch-size 4")
    with pytest.raises(
        ValueError, match=r"pipeline stage 0 needs 1\d\d.\d GiB a process and 3 for CUDA and NCCL, and the device"
    ) as caught:
        check_fits(config, 2, 80 * GIB)
    for remedy in (
        "--use-distributed-optimizer",
        "lower --micro-batch-size 4",
        "--save-activations coat",
        "--opt-level O3",
        "raise --tensor-model",
    ):
        assert remedy in str(caught.value)
    assert "device has 80.0 (--device-memory-gib)" in str(caught.value)
    check_fits(config, 2, 1000 * GIB)


TINY = "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 60 --lr 1e-3 --micro-batch-size 2"
HUGE = {
    "width": ("--hidden-size 10000000", r"the model has 2\.4e\+15 parameters, .* take smaller --num-layers, --hidden-size"),
    "depth": ("--num-layers 10000 --hidden-size 4096", r"the model has 2\.01e\+12 parameters"),
    "head": ("--kv-channels 16777216 --num-attention-heads 1024", r"--kv-channels"),
    "vocabulary": ("--vocab-size 2147483647", r"the model has 6\.87e\+10 parameters, .* or vocabulary"),
    "batch": (
        "--micro-batch-size 100000000",
        r"needs .* and the device has 16\.0: .*lower --micro-batch-size 100000000",
    ),
}


@pytest.mark.promise("Starting and ending", "A model or batch that this machine cannot hold is refused before anything is built.")
@pytest.mark.parametrize("name", HUGE)
def test_what_no_device_holds_is_refused_at_once(name):
    settings, message = HUGE[name]
    with pytest.raises(ValueError, match=message):
        check_fits(flags(f"{TINY} --train-iters 5 {settings}"), 1, 16 * GIB, reserved=0)


def test_weights_are_judged_by_the_share_of_a_process():
    settings = flags("--preset 13b --pipeline-model-parallel-size 4")  # with 2 tensor-parallel ranks, 8 shares
    check_weights(settings, 2 * GIB)
    with pytest.raises(ValueError, match=r"1\.28e\+10 parameters, of which a process would hold 1\.61e\+09"):
        check_weights(settings, GIB)


@pytest.mark.parametrize("name", ["train-iters", "eval-iters"])
def test_the_order_of_the_data_fits_into_the_machine(name):
    settings = flags(f"{TINY} --train-iters 5 --eval-iters 0 --{name} 1000")
    check_data_order(settings, 1, 2000 * ORDER_BYTES)
    with pytest.raises(ValueError, match=rf"--{name} 1000 reads 2e\+03 sequences, .* lower it, or --global-batch-size 2"):
        check_data_order(settings, 1, 2000 * ORDER_BYTES - 1)
