"""A command line of Megatron-LM in the trainer's own flags."""

import pytest

from megatron.lm.config.cli import known_flags
from megatron.lm.config.megatron_flags.apply import apply


def applied(line: str, preset=None):
    return apply(line.split(), known_flags(), preset or {})


def test_the_trainers_own_flags_pass_as_they_are():
    line = "--num-layers 2 --data-path 0.3 a 0.7 b --opt-level O2 stray"
    result = applied(line)
    assert (" ".join(result.argv), result.lines) == (line, ())


def test_underscores_serve_for_hyphens():
    assert applied("--micro_batch_size 2 --use_flash_attn --override_data").argv == ("--micro-batch-size", "2", "--override-data")


def test_a_value_may_follow_an_equals_sign():
    assert applied("--layernorm-epsilon=1e-6 --tensorboard-queue-size=1 --seed=3").argv == ("--norm-epsilon", "1e-6", "--seed", "3")


def test_what_is_dropped_or_translated_is_named_with_its_reason():
    result = applied("--use-flash-attn --no-rope-fusion --no-bias-gelu-fusion --attention-backend fused --seed 1")
    assert result.argv == ("--attention-backend", "cudnn", "--seed", "1")
    assert result.lines[0] == "--attention-backend fused means --attention-backend cudnn here"
    assert result.lines[1].startswith("--use-flash-attn dropped: attention runs PyTorch's")
    assert result.lines[2].startswith("--no-rope-fusion, --no-bias-gelu-fusion dropped: fusions only change speed")


def test_a_stray_word_behind_a_dropped_flag_is_left_for_argparse():
    assert applied("--use-flash-attn stray --tensorboard-queue-size 5 6").argv == ("stray", "6")


@pytest.mark.promise("Megatron flags", "All unknown and refused flags of a command line are named in one message.")
def test_all_unknown_and_refused_flags_are_named_in_one_message():
    with pytest.raises(ValueError, match="nothing was started") as refusal:
        applied(
            "--moe-expert-capacity-factor 8 --use-flash-attn --trian-iters 4 --moe-input-jitter-eps 2 --spec a b --xyzzy 1 "
            "--timing-log-level"
        )
    head, *problems = str(refusal.value).split("\n- ")
    assert head == "6 flags are refused, nothing was started:"
    for problem, words in zip(
        problems,
        (
            "--moe-expert-capacity-factor 8: experts have no capacity here",
            "unknown flag --trian-iters (did you mean --train-iters?)",
            "--moe-input-jitter-eps 2: this variant of a mixture of experts",
            "--spec a b: ",
            "unknown flag --xyzzy",
            "--timing-log-level is missing a value",
        ),
        strict=True,
    ):
        assert problem.startswith(words)


def test_a_flag_of_this_trainer_is_not_one_of_a_family():
    assert applied("--moe-wire bf16 --moe-router-topk 4").argv == ("--moe-wire", "bf16", "--moe-router-topk", "4")


def test_one_problem_is_one_line():
    with pytest.raises(ValueError, match=r"^unknown flag --xyzzy$"):
        applied("--xyzzy")


def test_a_refused_flag_is_no_hint():
    with pytest.raises(ValueError, match=r"^unknown flag --kv-lora-ran$"):
        applied("--kv-lora-ran 8")
