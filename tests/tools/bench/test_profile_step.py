import csv

import pytest

from tools.bench import profile_step
from tools.bench.profile_step import by_kind, idle, kind, longest

# Names as the profiler gives them on Hopper, and microseconds.
FOUND = [
    ("nvjet_qqtst_128x256_128x6_2x1_v_bz_TNT", 100.0, 2000.0),
    ("_adamw_kernel", 2600.0, 500.0),
    ("nvjet_qqtst_128x256_128x6_2x1_v_bz_TNT", 2000.0, 400.0),
    ("ncclDevKernel_AllReduce_Sum_f32", 2050.0, 100.0),
]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "attention"),
        ("_adamw_kernel", "optimizer"),
        ("_cross_entropy_kernel", "loss"),
        ("_normalize_backward", "norm"),
        ("_activate_backward", "activation"),
        ("_rotary", "rotary"),
        ("_cast_transpose", "cast"),
        ("nvjet_qqtst_128x256_128x6_2x1_v_bz_TNT", "GEMM FP8"),
        ("nvjet_sm90_qrtst_128x128_128x6_2x1_v_bz_coopA_algo2_TNT", "GEMM FP8"),
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_NTN", "GEMM"),
        ("ncclDevKernel_AllGather_RING_LL", "NCCL"),
        ("Memset (Device)", "memory"),
        ("reduce_kernel", "other"),
    ],
)
def test_kind_of_a_kernel(name, expected):
    assert kind(name) == expected


def test_idle_is_what_no_kernel_covers():
    assert idle(FOUND) == 200.0  # 2400 to 2600; the third begins inside the first, the fourth lies inside the third
    assert idle(FOUND[:1]) == idle([]) == 0.0


def test_kinds_by_time():
    assert by_kind(FOUND) == [
        {"kind": "GEMM FP8", "ms": 2.4, "launches": 2},
        {"kind": "optimizer", "ms": 0.5, "launches": 1},
        {"kind": "NCCL", "ms": 0.1, "launches": 1},
    ]


def test_the_longest_kernels():
    lines = longest(FOUND, 2)
    assert [line.split() for line in lines] == [
        ["2.40", "ms", "2", "GEMM", "FP8", "nvjet_qqtst_128x256_128x6_2x1_v_bz_TNT"],
        ["0.50", "ms", "1", "optimizer", "_adamw_kernel"],
    ]


@pytest.mark.gpu
def test_a_profile_of_a_small_step(tmp_path):
    file = tmp_path / "profile.csv"
    small = "--num-layers 2 --hidden-size 256 --num-attention-heads 2 --seq-length 256"
    arguments = ["--preset", "125m", "--micro-batch-size", "1", "--vocab-size", "512", "--warm-up", "2", "--flags", small]
    assert profile_step.main([*arguments, "--csv", str(file), "--commit", "abc"]) == 0
    with file.open(newline="") as stream:
        table = {row["kind"]: float(row["ms"]) for row in csv.DictReader(stream)}
    assert table.get("GEMM FP8", 0.0) + table.get("GEMM", 0.0) > 0
    assert {"attention", "optimizer", "idle"} <= table.keys()
