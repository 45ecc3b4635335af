import argparse
import csv
import json
import sys

import pytest
from megatron.core import parallel_state

from helpers import dist
from megatron.lm.build import build_training
from megatron.lm.processes import process_groups
from megatron.lm.step import train_step
from msamp.numerics.tensor import ScalingTensor
from tools.bench import bench_data_parallel, bench_step

TINY = "--seq-length 16 --num-layers 2 --hidden-size 32 --num-attention-heads 2 --lr-warmup-iters 1"
OPTIONS = argparse.Namespace(preset="125m", micro_batch_size=2, flags=TINY)
CASES = ("O0 --use-distributed-optimizer", "O2", "O3", "O2 --use-distributed-optimizer", "O1 --grad-exchange nccl")
RESULTS = ("zero", "exchange", "wire_linear_bytes_param")


def sent_in_a_step() -> list[tuple[int, int, float, int]]:
    """By case: bytes that this rank sent in one step, those of payloads, what all payloads are by the formula; parameters."""
    process_groups.initialize(bench_data_parallel.configuration("O0", OPTIONS, 2))
    found = []
    for case in CASES:
        config = bench_data_parallel.configuration(case, OPTIONS, 2)
        training = build_training(config, 64)
        sync = training.grad_sync
        train_step(training, bench_step.random_batches(config, 64, process_groups.device()))
        if config.precision.recipe.fp8:
            assert bench_data_parallel.linear_weights(sync) == {p for p in sync.names if isinstance(p, ScalingTensor)}
        elements = sum(p.numel() for p in sync.names)
        payloads = sum(size for (_, collective), size in sync.sent.rows().items() if collective != "all-reduce")
        formula = bench_data_parallel.wire_bytes_per_parameter(sync, set(sync.names)) * elements
        found.append((sync.sent.total("weight"), payloads, formula, elements))
    parallel_state.destroy_model_parallel()
    return found


def measure_all(folder: str) -> list[tuple[int, int, float, int]]:
    found = sent_in_a_step()
    arguments = ["--preset", "125m", "--micro-batch-size", "2", "--vocab-size", "64", "--warm-up", "1", "--steps", "2"]
    arguments += [f"--flags={TINY}", "--csv", f"{folder}/rows.csv", "--commit", "abc1234", "--cases", *CASES]
    assert bench_data_parallel.main([*arguments, "--peer", f"{sys.executable} {folder}/bench_peer.py"]) == 0
    return found


@pytest.mark.nightly
def test_two_processes_measure_every_case_and_a_peer(tmp_path):
    printed = json.dumps({"case": "bf16", "ms": 1.5, "tokens_s_gpu": 7, "gpus": 2, "peak_gib": 3.5})
    (tmp_path / "bench_peer.py").write_text(f"print({printed!r})\n")
    first, second = dist.run(measure_all, 2, str(tmp_path))
    for (_, payloads, formula, _), (_, theirs, _, _) in zip(first, second, strict=True):
        assert payloads + theirs == pytest.approx(formula, rel=0.011)  # mu of nccl also sends six counts a tensor
    with (tmp_path / "rows.csv").open(newline="") as stream:
        *ours, peer = csv.DictReader(stream)
    assert tuple(peer)[5:] == bench_data_parallel.COLUMNS
    assert [row["case"] for row in ours] == list(CASES)
    assert [tuple(row[name] for name in RESULTS) for row in ours] == [
        ("on", "fp32-sum", "6.0"),
        ("off", "fp32-sum", "2.0"),
        ("on", "fp32-sum", "2.0"),
        ("on", "fp32-sum", "3.0"),
        ("off", "nccl", "2.0"),
    ]
    for row, (sent, *_, parameters), (theirs, *_) in zip(ours, first, second, strict=True):
        assert (row["gpus"], row["p2p"], row["level"]) == ("2", "on", row["case"][:2])
        assert float(row["ms_p20"]) <= float(row["ms"]) <= float(row["ms_p80"])
        assert int(row["tokens_s_gpu"]) == pytest.approx(2 * 16 / (float(row["ms"]) / 1e3), rel=0.05)
        assert float(row["wire_mib"]) == pytest.approx((sent + theirs) / 2 / 2**20, abs=5e-4)
        assert float(row["wire_bytes_param"]) == pytest.approx((sent + theirs) / parameters, abs=5e-5)
        assert (row["peak_gib_max"], row["exposed_ms"], row["exposed_share"]) == ("", "", "")
        assert float(row["no_comm_ms"]) > 0
        assert float(row["communication_share"]) == pytest.approx(1 - float(row["no_comm_ms"]) / float(row["ms"]), abs=0.02)
        assert 3.0 < float(row["loss"]) < 5.0
    assert (peer["case"], peer["gpus"], peer["ms"], peer["peak_gib_max"], peer["wire_mib"]) == ("peer bf16", "2", "1.5", "3.5", "")


@pytest.mark.parametrize(
    ("communication", "compute", "alone"),
    [
        ([], [(0, 4)], 0),
        ([(1, 3)], [], 2),
        ([(1, 3)], [(0, 4)], 0),
        ([(0, 10)], [(2, 3), (5, 7)], 7),
        ([(0, 2), (1, 4)], [(3, 5)], 3),  # two buckets at once count once
        ([(4, 6), (0, 1)], [(5, 8), (4, 5.5), (20, 30)], 1),  # unsorted, compute in parallel streams
        ([(0, 2)], [(2, 4)], 2),  # touching is not covering
    ],
)
def test_exposed_is_communication_that_no_compute_covers(communication, compute, alone):
    assert bench_data_parallel.exposed(communication, compute) == alone


def test_device_intervals_takes_kernels_and_copies_only():
    names = [
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "kernel", 9000, 500),
        ("gemm", "kernel", 1000, 2000),
        ("Memcpy DtoD (Device -> Device)", "gpu_memcpy", 500, 250),
        ("Memset (Device)", "gpu_memset", 0, 1),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "kernel", 4000, 1000),
        ("nccl:all_to_all", "gpu_user_annotation", 0, 90000),
        ("Optimizer.step#FP8AdamW.step", "gpu_user_annotation", 0, 90000),
        ("cudaLaunchKernel", "cuda_runtime", 0, 90000),
    ]
    events = [{"name": name, "cat": cat, "ts": ts, "dur": dur} for name, cat, ts, dur in names]
    communication, compute = bench_data_parallel.device_intervals({"traceEvents": [{"ph": "M", "name": "process_name"}, *events]})
    assert communication == [(4.0, 5.0), (9.0, 9.5)]
    assert compute == [(0.0, 0.001), (0.5, 0.75), (1.0, 3.0)]


def test_a_case_is_a_level_and_flags_that_override_those_of_all_cases():
    config = bench_data_parallel.configuration("O3 --ddp-bucket-size 99 --grad-exchange nccl", OPTIONS, 4)
    assert config.precision.name == "O3"
    assert config.communication.bucket_size == 99
    assert config.communication.grad_exchange == "nccl"
    assert config.model.num_layers == 2
    assert config.global_batch_size(4) == 8
    assert config.num_micro_batches(4) == 1
    accumulating = argparse.Namespace(**vars(OPTIONS) | {"flags": TINY + " --global-batch-size 32"})
    assert bench_data_parallel.configuration("O1", accumulating, 4).num_micro_batches(4) == 4
