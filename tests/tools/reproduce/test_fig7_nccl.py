"""Gradients summed over gloo processes against the sum that one process simulates."""

import contextlib
import csv
import io
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers import dist, tiny
from helpers.refusals import code
from megatron.lm.config.cli import to_argv
from msamp.comm.collectives import Peers
from msamp.comm.counters import WireBytes
from msamp.comm.exchange import FP32SumWire
from msamp.numerics.formats import E4M3
from tools.reproduce import fig7, fig7_nccl
from tools.reproduce.sum_orders import CHAIN, OrderedWire


def measured(folder: str, prefix: Path, csv: str = "sums.csv") -> str:
    settings = tiny.config(prefix, opt_level="O2", train_iters=5, num_layers=1)
    flags = to_argv(replace(settings, data=replace(settings.data, data_cache_path=f"{folder}/cache")))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert fig7_nccl.main(["--csv", f"{folder}/{csv}", "--commit", "abc1234", "--mu-steps", "20", *flags]) == 0
    return printed.getvalue()


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_over_gloo_every_sum_is_the_chain_in_rank_order(ranks):
    with tempfile.TemporaryDirectory() as folder:
        printed, *others = dist.run(measured, ranks, folder, tiny.write_data(Path(folder)), init=False)
        with open(f"{folder}/sums.csv", newline="") as stream:
            table = list(csv.DictReader(stream))
    assert len(table) == 2 * 2 * len(fig7.PAPER)  # formats, collectives, strategies
    assert all((row["chain"], row["some_chain"]) == ("1.0", "1.0") for row in table)
    assert all(row["tree"] == "1.0" for row in table if ranks == 2 or row["strategy"] == "fp32-sum")
    if ranks > 2:
        assert min(float(row["tree"]) for row in table) < 1
    common = {"model": "gpt-1x32", "ranks": str(ranks), "backend": "gloo", "commit": "abc1234", "train_iters": "5"}
    assert all(common.items() <= row.items() for row in table)
    by_place = {(row["block"], row["format"], row["strategy"], row["collective"]): float(row["snr_db"]) for row in table}
    assert all(by_place[*place, "all-reduce"] == by_place[*place, "reduce-scatter"] for *place, _ in by_place)
    assert by_place["0", "fp8-e4m3", "fp32-sum", "all-reduce"] > by_place["0", "fp8-e5m2", "fp32-sum", "all-reduce"]
    assert "fp8-e5m2" in printed
    assert not any("fp8-e5m2" in text for text in others)


def alike(folder: str) -> list[tuple[bool, bool]]:
    """On one of 3 ranks: whether both wires return what one process simulates, over rows that do not divide evenly."""
    gradients = torch.randn(3, 7, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    factor, found = torch.tensor(64.0), []
    for shard in (False, True):
        for wire in (FP32SumWire(E4M3), OrderedWire(E4M3, CHAIN)):
            sums = fig7_nccl.RealSums(Peers(torch.distributed.group.WORLD, WireBytes()), shard)
            reduced, payloads = sums.reduce(wire, gradients, factor)
            simulated, same = fig7.exchange(wire, gradients, factor)
            assert reduced.scale_inv is not None
            assert simulated.scale_inv is not None
            equal = tiny.same(tiny.bits([reduced.own, *payloads]), tiny.bits([simulated.own, *same]))
            found.append((equal, reduced.scale_inv.item() == simulated.scale_inv.item()))
            assert sums.shares[0][1]["chain"] == 1
    return found


def test_a_real_sum_is_the_simulated_one():
    assert dist.run(alike, 3, "") == [[(True, True)] * 4] * 3


def test_runs_are_equal_only_as_a_whole():
    equal = torch.ones(fig7_nccl.RUN_LENGTH + 3, dtype=torch.bool)
    assert fig7_nccl._runs(equal).tolist() == [True, True]
    equal[-1] = False
    assert fig7_nccl._runs(equal).tolist() == [True, False]


def test_the_table_can_be_printed_again(tmp_path, capsys):
    row = dict.fromkeys(fig7_nccl.COLUMNS, "1") | {"strategy": "pre", "format": "fp8-e4m3", "snr_db": "27.5"}
    with (tmp_path / "rows.csv").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, fig7_nccl.COLUMNS)
        writer.writeheader()
        writer.writerow(row)
    assert fig7_nccl.main(["--rows", str(tmp_path / "rows.csv")]) == 0
    assert "27.5" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mu-steps", "-1"], "argument --mu-steps: -1 is out of range: give 0"),
        (["--rows", __file__], "give the fig7_nccl.csv of an earlier run"),
        (["--rows", __file__, "--lr", "1"], "--lr 1: --rows trains nothing"),
        ([], "1 process(es): start 2 to 4"),
    ],
)
def test_bad_input_is_refused_with_what_to_do(arguments, message, capsys):
    assert code(fig7_nccl.main, arguments) == 2
    assert message in capsys.readouterr().err
