import csv

import pytest
import torch

from msamp.numerics.recipe import by_name
from msamp.numerics.tensor import ScalingTensor
from tools.bench import bench_optimizer

TINY = {"hidden_size": 8, "num_layers": 2, "seq_length": 4}


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_optimizer, "PRESETS", {"125m": TINY, "1.3b": TINY})


@pytest.mark.parametrize(
    ("level", "linear", "matrix"),
    # Gradient twice; m, v and master there and back; the weight beside a master once.
    [("O1", 2 + 2 * (4 + 4 + 2), 4 + 2 * (4 + 4 + 2) + 2), ("O2", 2 + 2 * (1 + 2 + 2), 16), ("O3", 2 + 2 * (1 + 2 + 2) + 1, 16)],
)
def test_bytes_by_hand(level, linear, matrix):
    model = bench_optimizer.Weights("125m", by_name(level), 16, "cpu")
    linears, matrices, vectors = 2 * 12 * 64, 20 * 8, 8 * 14 + 2 * 7 * 8
    assert [sum(p.numel() for p in group["params"]) for group in model.groups()] == [linears, matrices, vectors]
    assert all(isinstance(p, ScalingTensor) for p in model.groups()[0]["params"])
    step, quantisation = model.bytes()
    assert step == linear * linears + matrix * matrices + (8 + 24 + 2) * vectors
    assert quantisation == 5 * linears + 4 * matrices + 6 * vectors


def test_without_a_gpu_there_is_nothing_to_measure(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench_optimizer.main([]) == 1
    assert "measures a GPU" in capsys.readouterr().err


def test_one_repeat_is_refused(capsys):
    with pytest.raises(SystemExit):
        bench_optimizer.main(["--repeats", "1"])
    assert "percentiles want at least 2" in capsys.readouterr().err


@pytest.mark.gpu
def test_a_table_of_a_tiny_model(tmp_path):
    file = tmp_path / "optimizer.csv"
    assert bench_optimizer.main(["--preset", "125m", "--levels", "O3", "--repeats", "3", "--csv", str(file), "--commit", "abc"]) == 0
    with file.open(newline="") as stream:
        table = list(csv.DictReader(stream))
    assert [row["case"] for row in table] == ["quantisation", "step", "step in a graph"]
    assert all(float(row["ms"]) > 0 and row["level"] == "O3" for row in table)
