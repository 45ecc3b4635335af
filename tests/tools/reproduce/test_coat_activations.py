"""The table of what kept activations lose and save: of inputs made by hand, and of a checkpoint that a tiny run wrote."""

import pytest
import torch
from numerics import make

from megatron.lm.cpu_home import cpu_home
from msamp.nn.saved import AS_IT_IS, COAT, GroupedFP8
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


@pytest.mark.parametrize("what", ["norm input", "activation input"])
def test_a_second_rounding_costs_the_weight_gradient_less_than_2_db(what):
    row = error_row([make("normal", (256, 64))], COAT, what, "gelu")
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
