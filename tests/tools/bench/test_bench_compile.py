import csv
from pathlib import Path

import pytest

from tools.bench import bench_compile

TINY = "--layers 1 --hidden 32 --heads 2 --seq-length 16 --micro-batch-size 2 --warm-up 2 --steps 2 --backend aot_eager"


def test_a_row_for_each_case_as_it_is_and_compiled(tmp_path: Path):
    assert bench_compile.main([*TINY.split(), "--cases", "O2", "--csv", str(tmp_path / "rows.csv")]) == 0
    with (tmp_path / "rows.csv").open() as stream:
        found = list(csv.DictReader(stream))
    assert [row["case"] for row in found] == ["O2", "O2 compiled"]
    plain, compiled = found
    assert float(compiled["loss"]) == pytest.approx(float(plain["loss"]), rel=0.02)
    assert float(plain["loss"]) < float(plain["first_loss"])


@pytest.mark.gpu
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_graphs_of_torch_train_as_an_eager_loop_does(level: str, tmp_path: Path):
    """With mode="reduce-overhead" torch replays CUDA graphs, which write amaxes and read weights where they have always stood."""
    flags = "--layers 2 --hidden 256 --heads 4 --seq-length 128 --micro-batch-size 2 --warm-up 30 --steps 4 --ways eager reduce-overhead"
    assert bench_compile.main([*flags.split(), "--cases", level, "--csv", str(tmp_path / "rows.csv")]) == 0
    with (tmp_path / "rows.csv").open() as stream:
        eager, graphs = csv.DictReader(stream)
    assert graphs["case"] == f"{level} compiled, reduce-overhead"
    assert float(graphs["loss"]) == pytest.approx(float(eager["loss"]), rel=0.02)
    assert float(eager["loss"]) < float(eager["first_loss"])


def test_another_backend_makes_no_graphs(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert bench_compile.main([*TINY.split(), "--ways", "reduce-overhead", "--csv", str(tmp_path / "rows.csv")]) == 2
    assert "--backend aot_eager --ways reduce-overhead: only inductor" in capsys.readouterr().err
    assert not (tmp_path / "rows.csv").exists()
