"""The benchmark of outlier channels, whole, on a tiny model: what it holds, its rows, and the difference that it is there to show."""

import csv

import pytest
import torch

from helpers import dist
from tools.bench import bench_outliers

TINY = (
    "--seq-length 32 --num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 2 --fp8-min-gain 0 "
    "--make-vocab-size-divisible-by 32"
)
SHORT = ["--vocab-size", "64", "--followers", "4", f"--flags={TINY}", "--commit", "abc1234"]


def measured(folder: str, *arguments: str) -> list[dict[str, str]]:
    """In a process of its own: the benchmark makes the process groups."""
    assert bench_outliers.main([*SHORT, *arguments, "--csv", f"{folder}/o.csv"]) == 0
    with open(f"{folder}/o.csv", newline="") as stream:
        return list(csv.DictReader(stream))


def test_rows_are_compared_with_the_first_case(tmp_path):
    steps = ["--steps", "10", "--at", "4", "--growth", "2", "--micro-batch-size", "1", "--factor", "1024"]
    ((row, other),) = dist.run(measured, 1, str(tmp_path), *steps, "--cases", "bf16", "O3 --smooth-swiglu", init=False)
    assert (row["commit"], row["case"], row["factor"], row["rate"], row["from_first"]) == ("abc1234", "bf16", "1024", "4", "0.0")
    assert other["case"] == "O3 --smooth-swiglu"
    assert float(other["from_first"]) == pytest.approx(100 * (float(other["loss"]) / float(row["loss"]) - 1), abs=1e-2)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = torch.nn.Module()
        self.mlp.linear_fc1, self.mlp.linear_fc2 = torch.nn.Linear(8, 12, bias=False), torch.nn.Linear(6, 8, bias=False)


def test_the_channel_grows_by_the_factor_and_the_function_stays():
    model = torch.nn.Module()
    model.decoder = torch.nn.Module()
    model.decoder.layers = torch.nn.ModuleList([Layer()])
    mlp, x = model.decoder.layers[0].mlp, 50 * torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    outliers, channels, outputs = bench_outliers.Outliers(model, 1, 2.0**20, 10), [], []
    for step in (4, 9, 20):
        outliers.hold(step)
        gate, up = mlp.linear_fc1(x).chunk(2, -1)
        assert gate[:, 0].equal(up[:, 0])
        a = torch.nn.functional.silu(gate) * up
        channels.append(a[:, 0].detach().abs().max())
        outputs.append(mlp.linear_fc2(a).detach())
    assert float(channels[1] / channels[0]) == pytest.approx(2.0**10, rel=0.01)
    assert channels[2] == channels[1]
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-3, atol=1e-3 * float(outputs[0].abs().max()))
    outliers.end = 20
    outliers.hold(20)
    assert mlp.linear_fc1.weight[0].equal(outliers.held[0][2][0]), "as before it grew"


@pytest.mark.nightly(60)
def test_plain_o3_fails_and_o3_with_channel_scales_learns(tmp_path):
    steps = ["--steps", "120", "--at", "40", "--growth", "10", "--factor", str(2.0**20)]
    cases = ("bf16", "O3", "O3 --grad-format bf16", "O3 --grad-format bf16 --smooth-swiglu")
    (found,) = dist.run(measured, 1, str(tmp_path), *steps, "--cases", *cases, init=False)
    _, plain, wide, smooth = (float(row["from_first"]) for row in found)
    assert float(found[0]["loss"]) < 0.7 * float(found[0]["before"])
    assert min(plain, wide) > 10
    assert smooth < 2


@pytest.mark.nightly(140)
def test_o3_with_a_guard_learns_raises_a_quarter_and_all_return(tmp_path):
    """The second layers of the MLPs, a quarter of the linear layers; without outliers none. O3 itself ends 1 % above BF16 here."""
    guard = "--fp8-guard --fp8-guard-interval 4"
    cases = ("bf16", "O3 --grad-format bf16", f"O3 --grad-format bf16 {guard}", f"O3 --grad-format bf16 --smooth-swiglu {guard}")
    steps = ["--steps", "160", "--at", "40", "--growth", "10", "--until", "100", "--factor", str(2.0**20)]
    (found,) = dist.run(measured, 1, str(tmp_path), *steps, "--cases", *cases, init=False)
    _, plain, guarded, both = (float(row["from_first"]) for row in found)
    assert plain > 10
    assert guarded < 2
    assert both < 2
    assert (found[1]["raised"], found[2]["raised"], found[2]["layers"], found[2]["still_raised"]) == ("", "2", "8", "0")
    assert int(found[3]["raised"]) <= 2
    assert found[3]["still_raised"] == "0"
    (tmp_path / "o.csv").unlink()
    (calm,) = dist.run(measured, 1, str(tmp_path), *steps[:-1], "1", "--cases", cases[2], init=False)
    assert (calm[0]["raised"], calm[0]["still_raised"]) == ("0", "0")
