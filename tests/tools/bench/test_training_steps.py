"""bench_step and bench_grid: a row per case from tiny models on CPUs, and a baseline's."""

import argparse
import csv
import json
import sys
from collections.abc import Iterator

import pytest
import torch

from helpers import dist
from helpers.refusals import code
from megatron.lm.processes import process_groups
from tools.bench import bench_grid, bench_step, training_steps

TINY = "--seq-length 16 --num-layers 2 --hidden-size 32 --num-attention-heads 2 --lr-warmup-iters 1"
OPTIONS = argparse.Namespace(preset="13b", micro_batch_size=2, micro_batches=None, vocab_size=64, flags=TINY)
COMMON = ["--micro-batch-size", "2", "--vocab-size", "64", "--warm-up", "1", "--steps", "2", "--commit", "abc1234"]
SPLIT = "--tensor-model-parallel-size 2 --sequence-parallel"


def measured(folder: str, tool: str, cases: list[str], flags: str, preset: str) -> int:
    """In a process of its own: the benchmark makes the process groups."""
    program = {"step": bench_step, "grid": bench_grid}[tool]
    words = ["--levels" if tool == "step" else "--cases", *cases, "--preset", preset, f"--flags={flags}", *COMMON]
    return program.main([*words, "--csv", f"{folder}/rows.csv", "--peer", f"{sys.executable} {folder}/bench_peer.py"])


def table(folder, tool: str, cases: list[str], ranks: int, flags: str = TINY, preset: str = "125m") -> Iterator[dict[str, str]]:
    printed = [{"case": "bf16", "ms": 1.5, "tokens_s_gpu": 7, "tp": 2, "mbs": 8, "nmb": 3, "peak_gib": 3.5}, {"case": "te", "error": "OOM"}]
    (folder / "bench_peer.py").write_text("print('chatter')\n" + "".join(f"print({json.dumps(json.dumps(row))})\n" for row in printed))
    assert dist.run(measured, ranks, str(folder), tool, cases, flags, preset, init=False) == [0] * ranks
    with (folder / "rows.csv").open(newline="") as stream:
        *ours, peer, failed = csv.DictReader(stream)
    assert (peer["case"], peer["ms"], peer["tokens_s_gpu"], peer["commit"]) == ("peer bf16", "1.5", "7", "abc1234")
    assert peer["peak_gib" if tool == "step" else "peak_gib_max"] == "3.5"
    assert (failed["case"], failed["ms"]) == ("peer te (OOM)", "")
    if tool == "grid":
        assert [peer[name] for name in ("tp", "pp", "dp", "micro_batch", "micro_batches")] == ["2", "1", "1", "8", "3"]
    for row in ours:
        batches = int(row.get("micro_batches", 1))
        assert row["gpus"] == str(ranks)
        assert float(row["ms_p20"]) <= float(row["ms"]) <= float(row["ms_p80"])
        per_rank = 2 * 16 if tool == "step" else 2 * 16 * batches * int(row["dp"]) / ranks
        assert int(row["tokens_s_gpu"]) == pytest.approx(per_rank / (float(row["ms"]) / 1e3), rel=0.05)
        assert 3.0 < float(row["loss"]) < 6.5
        yield row


def test_a_precision_has_a_row_with_the_flags_of_all_cases(tmp_path):
    (row,) = table(tmp_path, "step", ["O2 --adam-beta2 0.9"], 1)
    assert (row["case"], row["preset"], row["params_m"]) == ("O2 --adam-beta2 0.9", f"125m {TINY} --vocab-size 64", "0.0")


@pytest.mark.nightly
def test_a_grid_of_copies_counts_what_each_exchange_sends(tmp_path):
    linear, tables, vectors = 2 * 12 * 32**2, 32 * (128 + 16), 2 * 13 * 32 + 2 * 32  # parameters
    sent = {"O0 --use-distributed-optimizer": (6, 6, 6), "O2": (2, 4, 8), "O3": (2, 4, 8), "O2 --use-distributed-optimizer": (3, 4, 8)}
    sent |= {"O1 --grad-exchange nccl": (2, 4, 8)}  # bytes of each
    for row, (of_linear, of_tables, of_vectors) in zip(table(tmp_path, "grid", list(sent), 2), sent.values(), strict=True):
        mib = (linear * of_linear + tables * of_tables + vectors * of_vectors) / 2 / 2**20
        assert float(row["weight_mib"]) == pytest.approx(mib, abs=1e-3), row["case"]


@pytest.mark.nightly
def test_a_grid_counts_the_collectives_of_its_layers(tmp_path):
    cases = [f"O0 {SPLIT}", f"O3 {SPLIT}", f"O3 {SPLIT} --tp-wire fp8", "O2 --tensor-model-parallel-size 2"]
    cases.append("O3 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1")
    flags = TINY.replace("--num-layers 2", "--num-layers 4")
    ours = list(table(tmp_path, "grid", cases, 2, flags, "13b"))
    assert [row["case"] for row in ours] == [f"{case} {flags}" for case in cases]
    columns = ("level", "tp", "pp", "vpp", "dp", "sp", "tp_wire", "micro_batches")
    assert [" ".join(row[name] or "-" for name in columns) for row in ours] == [
        "O0 2 1 1 1 on bf16 1",
        "O3 2 1 1 1 on bf16 1",
        "O3 2 1 1 1 on fp8 1",
        "O2 2 1 1 1 off bf16 1",
        "O3 1 2 2 1 off - 8",
    ]
    unit = 2 * 16 * 32 / 2**20  # MiB of one activation, a byte an element; a rank sends half of it, twice a layer
    counted = ("input_gather", "input_gather_again", "grad_input", "output", "grad_output", "pipeline")
    for row, expected in zip(
        ours,
        [
            [8, 8, 8, 8, 8, 0],
            [4, 4, 4, 8, 4, 0],
            [4, 4, 4, 4, 4, 0],
            [0, 0, 16, 16, 0, 0],  # all-reduces in BF16
            [0, 0, 0, 0, 0, 2 * 3 * 8],  # BF16, of 8 micro-batches, 3 times onward and 3 times back, mean over 2 ranks
        ],
        strict=True,
    ):
        assert [float(row[f"{name}_mib"]) / unit for name in counted] == pytest.approx(expected, abs=0.6)
        parts = [float(row[f"{name}_mib"]) for name in bench_grid.ACTIVATIONS]
        assert float(row["activation_mib"]) == pytest.approx(sum(parts), abs=5e-3)
        assert float(row["table7_mib"]) == pytest.approx(sum(parts[:3]), abs=2e-3)


def test_random_batches_repeat_and_shift_the_labels_by_one():
    stream = training_steps.random_batches(training_steps.configuration("O0", OPTIONS), 64, torch.device("cpu"))
    first, second = next(stream), next(stream)
    assert first is second
    assert first["tokens"].shape == (2, 16)
    assert torch.equal(first["tokens"][:, 1:], first["labels"][:, :-1])
    assert int(first["tokens"].max()) < 64


def test_the_case_names_the_grid_whatever_the_preset_has():
    plain = bench_grid.configuration("O0", OPTIONS, 4)
    sizes = {"tp": 1, "pp": 1, "vpp": 1, "dp": 4, "sp": "off", "tp_wire": "", "micro_batch": 2, "micro_batches": 1}
    assert bench_grid.grid(plain, 4) == sizes
    piped = bench_grid.configuration("O3 --pipeline-model-parallel-size 2 --micro-batch-size 3", OPTIONS, 4)
    assert bench_grid.grid(piped, 4) == sizes | {"pp": 2, "dp": 2, "micro_batch": 3, "micro_batches": 8}
    fixed = argparse.Namespace(**vars(OPTIONS) | {"micro_batches": 5})
    assert bench_grid.configuration(f"O3 {SPLIT}", fixed, 4).global_batch_size(4) == 2 * 2 * 5
    own = bench_grid.configuration("O3 --num-layers 3 --grad-exchange nccl", OPTIONS, 4)
    assert (own.model.num_layers, own.communication.grad_exchange, own.num_micro_batches(4)) == (3, "nccl", 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "1"], "--steps"),
        (["--cases", "O4"], "O4"),
        (["--cases", "O0"], None),
        (["--cases", f"O3 {SPLIT}"], "--tensor-model-parallel-size"),
        (["--micro-batch-size", "0"], "--micro-batch-size"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_starts(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(process_groups, "initialize", lambda config: sys.exit(7))
    assert code(bench_grid.main, arguments) == (2 if message else 7)
    assert (message or "") in capsys.readouterr().err


@pytest.mark.parametrize(
    ("communication_at", "compute_at", "alone"),
    [
        ([], [(0, 4)], 0),
        ([(0, 10)], [(2, 3), (5, 7)], 7),
        ([(0, 2), (1, 4)], [(3, 5)], 3),  # two buckets at once count once
        ([(4, 6), (0, 1)], [(5, 8), (4, 5.5), (20, 30)], 1),  # unsorted, compute in parallel streams
    ],
)
def test_exposed_is_communication_that_no_compute_covers(communication_at, compute_at, alone):
    assert bench_grid.exposed(communication_at, compute_at) == alone
