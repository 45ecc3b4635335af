"""The table of what kept activations lose and save: of inputs made by hand, and of a checkpoint that a tiny run wrote."""

import math

import pytest
import torch
from numerics import make

from megatron.lm.cpu_home import cpu_home
from msamp.nn.saved import AS_IT_IS, IN_GROUPS, GroupedFP8
from tools.reproduce import coat_activations
from tools.reproduce.coat_activations import WAYS, OneScale, error_row, table


def test_one_scale_is_a_group_of_the_whole_tensor():
    x = make("normal", (4, 32))
    assert (
        OneScale()
        .restore(OneScale().keep(x), x.dtype)
        .equal(GroupedFP8(size=128).restore(GroupedFP8(size=128).keep(x.view(1, -1)), x.dtype).view(4, 32))
    )


@pytest.mark.parametrize("what", ["norm input", "activation input"])
def test_what_is_kept_as_it_is_loses_nothing_and_gives_the_weight_gradient_of_the_kept_operand(what):
    row = error_row([make("normal", (64, 32)), make("normal", (64, 32), seed=1)], AS_IT_IS, what, "gelu")
    assert (row["sqnr_db"], row["underflow"], row["saturation"]) == ("inf", "0", "0")
    assert row["weight_again_db"] == row["weight_kept_db"]


def test_each_row_is_measured_on_what_its_way_keeps():
    """By hand, with a channel in 32 that is 50 times as large: one scale for the tensor, and one for 16 channels, which serves it alone."""
    xs = [make("channel-outlier", (64, 32)), make("channel-outlier", (64, 32), seed=1)]
    found = {line["kept"]: line for line in table({"norm input": xs, "activation input": xs}, "gelu") if line["what"] == "norm input"}
    assert list(found) == list(WAYS)
    for kept, sets in (("tensor", (1, 64 * 32)), ("groups of 16 channels", (64 * 2, 16)), ("groups of 32 channels", (64, 32))):
        backs = []
        for x in xs:
            groups = x.reshape(sets)
            scale = 2.0 ** torch.floor(torch.log2(448 / groups.abs().amax(1, keepdim=True)))
            backs.append(((groups * scale).to(torch.float8_e4m3fn).float() / scale).reshape(64, 32))
        signal, noise = (
            sum(x.double().square().sum() for x in xs),
            sum((x - b).double().square().sum() for x, b in zip(xs, backs, strict=True)),
        )
        assert float(found[kept]["sqnr_db"]) == pytest.approx(10 * math.log10(signal / noise), abs=0.006), kept
        worst = min(
            float(x.square().sum() / (x - b).square().sum()) for rows in zip(xs, backs, strict=True) for x, b in zip(*rows, strict=True)
        )
        assert float(found[kept]["worst_token_db"]) == pytest.approx(10 * math.log10(worst), abs=0.006), kept
    assert [found[kept]["bytes"] for kept in ("tensor", "groups of 16 channels", "groups of 32 channels")] == ["1", "1.062", "1.031"]


@pytest.mark.parametrize("what", ["norm input", "activation input"])
def test_a_second_rounding_costs_the_weight_gradient_less_than_2_db(what):
    row = error_row([make("normal", (256, 64))], IN_GROUPS, what, "gelu")
    assert row["bytes"] == "1.062"
    assert float(row["weight_kept_db"]) > 23
    assert 0 < float(row["weight_kept_db"]) - float(row["weight_again_db"]) < 2


def test_large_tokens_swallow_their_neighbours_in_groups_of_tokens_alone():
    found = {"norm input": [make("normal", (128, 64))], "activation input": [make("normal", (128, 64), seed=1)]}
    lines = {(line["what"], line["kept"]): line for line in table(found, "gelu")}
    assert len(lines) == 4 * len(WAYS)
    large = {kept: float(line["worst_token_db"]) for (what, kept), line in lines.items() if what == "norm input, large tokens"}
    assert large["groups of 16 channels"] > 29
    assert large["groups of 16 tokens"] < large["groups of 16 channels"] - 3


def test_the_command_reads_a_checkpoint(tmp_path, capsys):
    import checkpoints
    import tiny

    folder = checkpoints.saved(tiny.write_data(tmp_path), tmp_path / "saved", opt_level="O2")
    (tmp_path / "text").write_text(" ".join(["3", "5", "7"] * 30))
    command = ["--load", str(folder), "--text", str(tmp_path / "text")]
    with cpu_home():  # else this process would stay in it
        assert coat_activations.main([*command, "--csv", str(tmp_path / "rows.csv")]) == 0
    written = (tmp_path / "rows.csv").read_text().splitlines()
    assert len(written) == 1 + 4 * len(WAYS) + 4
    assert any('"O2, bytes a token and layer",coat' in line for line in written)
    with cpu_home():
        assert coat_activations.main([*command, "--sequences", "50"]) == 2
    assert "has 90 tokens, and 800 are needed" in capsys.readouterr().err
    assert torch.distributed.is_initialized() is False
