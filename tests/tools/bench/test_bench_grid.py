import argparse
import csv
import json
import sys
import weakref
from unittest import mock

import pytest

from helpers import dist
from helpers.refusals import code
from tools.bench import bench_grid

TINY = "--seq-length 16 --num-layers 4 --hidden-size 32 --num-attention-heads 2 --lr-warmup-iters 1"
OPTIONS = argparse.Namespace(preset="13b", micro_batch_size=2, micro_batches=None, flags=TINY)
SPLIT = "--tensor-model-parallel-size 2 --sequence-parallel"
CASES = (
    f"O0 {SPLIT}",
    f"O3 {SPLIT}",
    f"O3 {SPLIT} --tp-wire fp8",
    "O2 --tensor-model-parallel-size 2",
    "O3 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
)
COUNTED = ("input_gather", "input_gather_again", "grad_input", "output", "grad_output", "pipeline")


def measure_all(folder: str) -> list[int]:
    """How many earlier models were alive when each was built."""
    build, models, alive = bench_grid.build_training, [], []

    def watched(*args: object) -> object:
        alive.append(sum(model() is not None for model in models))
        training = build(*args)
        models.append(weakref.ref(training.model))
        return training

    arguments = ["--preset", "13b", "--micro-batch-size", "2", "--vocab-size", "64", "--warm-up", "1", "--steps", "2"]
    arguments += [f"--flags={TINY}", "--csv", f"{folder}/rows.csv", "--commit", "abc1234", "--cases", *CASES]
    with mock.patch.object(bench_grid, "build_training", watched):
        assert bench_grid.main([*arguments, "--peer", f"{sys.executable} {folder}/bench_peer.py"]) == 0
    return alive


@pytest.mark.nightly
def test_two_processes_measure_every_grid_and_a_peer(tmp_path):
    printed = json.dumps({"case": "bf16", "ms": 1.5, "gpus": 2, "tp": 2, "mbs": 8, "nmb": 3, "peak_gib": 3.5})
    (tmp_path / "bench_peer.py").write_text(f"print({printed!r})\n")
    assert dist.run(measure_all, 2, str(tmp_path)) == [[0] * len(CASES)] * 2
    with (tmp_path / "rows.csv").open(newline="") as stream:
        *ours, peer = csv.DictReader(stream)
    assert tuple(peer)[5:] == bench_grid.COLUMNS
    assert [row["case"] for row in ours] == [f"{case} {TINY}" for case in CASES]
    assert [tuple(row[name] for name in ("level", "tp", "pp", "vpp", "dp", "sp", "tp_wire", "micro_batches")) for row in ours] == [
        ("O0", "2", "1", "1", "1", "on", "bf16", "1"),
        ("O3", "2", "1", "1", "1", "on", "bf16", "1"),
        ("O3", "2", "1", "1", "1", "on", "fp8", "1"),
        ("O2", "2", "1", "1", "1", "off", "bf16", "1"),
        ("O3", "1", "2", "2", "1", "off", "", "8"),
    ]
    for row in ours:
        assert (row["gpus"], row["micro_batch"], row["peak_gib_max"], row["exposed_share"]) == ("2", "2", "", "")
        assert float(row["ms_p20"]) <= float(row["ms"]) <= float(row["ms_p80"])
        assert int(row["tokens_s_gpu"]) == pytest.approx(16 * int(row["micro_batches"]) / (float(row["ms"]) / 1e3), rel=0.05)
        assert 4.0 < float(row["loss"]) < 6.5
        parts = [float(row[f"{name}_mib"]) for name in bench_grid.ACTIVATIONS]
        assert float(row["activation_mib"]) == pytest.approx(sum(parts), abs=5e-3)
        assert float(row["table7_mib"]) == pytest.approx(sum(parts[:3]), abs=2e-3)
    unit = 2 * 16 * 32 / 2**20  # MiB of one activation, a byte an element; a rank sends half of it, twice a layer
    shares = [[float(row[f"{name}_mib"]) / unit for name in COUNTED] for row in ours]
    for found, expected in zip(
        shares,
        [
            [8, 8, 8, 8, 8, 0],
            [4, 4, 4, 8, 4, 0],
            [4, 4, 4, 4, 4, 0],
            [0, 0, 16, 16, 0, 0],  # all-reduces in BF16
            [0, 0, 0, 0, 0, 2 * 3 * 8],  # BF16, of 8 micro-batches, 3 times onward and 3 times back, mean over 2 ranks
        ],
        strict=True,
    ):
        assert found == pytest.approx(expected, abs=0.6)
    assert ours[0]["params_m"] == "0.1"
    assert [peer[name] for name in ("pp", "vpp", "dp")] == ["1", "1", "1"]
    assert tuple(peer[name] for name in ("case", "tp", "micro_batch", "micro_batches", "ms", "peak_gib_max", "table7_mib")) == (
        "peer bf16",
        "2",
        "8",
        "3",
        "1.5",
        "3.5",
        "",
    )


def test_the_case_names_the_grid_whatever_the_preset_has():
    plain = bench_grid.configuration("O0", OPTIONS, 4)
    assert bench_grid.grid(plain, 4) == {
        "tp": 1,
        "pp": 1,
        "vpp": 1,
        "dp": 4,
        "sp": "off",
        "tp_wire": "",
        "micro_batch": 2,
        "micro_batches": 1,
    }
    assert plain.global_batch_size(4) == 8
    piped = bench_grid.configuration("O3 --pipeline-model-parallel-size 2 --micro-batch-size 3", OPTIONS, 4)
    assert bench_grid.grid(piped, 4) == bench_grid.grid(plain, 4) | {"pp": 2, "dp": 2, "micro_batch": 3, "micro_batches": 8}
    fixed = argparse.Namespace(**vars(OPTIONS) | {"micro_batches": 5})
    assert bench_grid.configuration(f"O3 {SPLIT}", fixed, 4).global_batch_size(4) == 2 * 2 * 5


@pytest.mark.parametrize(
    ("collective", "role"),
    [
        ("grad_input all-reduce", "grad_input"),
        ("output all-reduce", "output"),
        ("LM head grad_input reduce-scatter", "head"),
        ("LM head input all-gather", "head"),
        ("amax all-reduce", "other_activation"),
    ],
)
def test_roles_of_collectives(collective, role):
    assert bench_grid.role(collective) == role


def test_warm_up_fills_the_window_of_delayed_scaling():
    cases = ("O0", "O1", "O3", "O3 --fp8-recipe tensorwise")
    assert [bench_grid.warm_up(bench_grid.configuration(case, OPTIONS, 1)) for case in cases] == [
        3,
        17,
        17,
        3,
    ]  # without a GPU, where no graph is captured


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "1"], "give 2"),
        (["--cases", "O4"], "O3"),
        (["--cases", "O0"], None),
        (["--cases", f"O3 {SPLIT}"], "1 processes do not fit --tensor-model-parallel-size 2"),
        (["--cases", "O0", "--micro-batch-size", "0"], "argument --micro-batch-size: 0 is out of range"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_starts(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(bench_grid.process_groups, "initialize", lambda config: sys.exit(7))
    assert code(bench_grid.main, arguments) == (2 if message else 7)
    assert (message or "") in capsys.readouterr().err
