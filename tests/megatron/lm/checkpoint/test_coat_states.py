"""COAT's moments in the trainer: they train as FP32 ones do, resume to the bit, and are converted from and to other formats."""

from pathlib import Path
from typing import Any

import pytest

from helpers import tiny
from megatron.lm import checkpoint
from megatron.lm.checkpoint import CheckpointReader, iteration_folder
from megatron.lm.run.trainer import Trainer
from msamp.numerics.formats import E4M3, FP16
from msamp.numerics.metrics import sqnr_db
from msamp.numerics.range_expand import quantize_expanded
from msamp.numerics.tensor import ScalingTensor

SAVED, LAST = 4, 8
WEIGHT = "decoder.layers.1.mlp.linear_fc1.weight"


def train(made: Trainer) -> tuple[list[float], list[Any]]:
    rows: list[dict[str, Any]] = []
    made.metrics.write = rows.append  # type: ignore[method-assign]
    made.run()
    optimizer = made.training.optimizer
    states = [x for holding in optimizer.holdings() for _, x in sorted(optimizer.state[holding.weight].items())]
    return tiny.losses(rows), tiny.bits([*made.training.model.parameters(), *states])


def run(prefix: Path, precision: str, **settings: Any) -> tuple[list[float], list[Any]]:
    with tiny.trainer(tiny.config(prefix, precision=precision, swiglu=True, train_iters=LAST, **settings)) as made:
        return train(made)


@pytest.mark.parametrize("precision", [pytest.param("bf16", marks=pytest.mark.nightly(2)), "O2"])
def test_it_goes_on_bit_for_bit(prefix: Path, tmp_path: Path, precision: str):
    coat = {"optimizer_state": "coat", "exp_avg_sq_format": "coat-e5m2" if precision == "O2" else None}
    straight = run(prefix, precision, save=str(tmp_path), save_interval=SAVED, **coat)
    again = run(prefix, precision, load=str(tmp_path), ckpt_step=SAVED, **coat)
    assert again[0] == straight[0][SAVED:]
    assert tiny.same(again[1], straight[1])
    stored = CheckpointReader(iteration_folder(tmp_path, LAST)).stored
    rows, columns = stored.tensors[f"exp_avg/{WEIGHT}"].shape
    assert {str(entry.dtype) for key, entry in stored.tensors.items() if key.startswith(f"exp_avg/{WEIGHT}")} == {
        "torch.float8_e4m3fn",
        "torch.float32",
    }
    numbers = [entry.shape for key, entry in stored.tensors.items() if key.startswith((f"exp_avg/{WEIGHT}.max@", f"exp_avg/{WEIGHT}.k@"))]
    assert {size[1] for size in numbers} == {-(-columns // 128)}
    assert sum(size[0] for size in numbers) == 2 * rows


def test_it_trains_as_fp32_moments_do(prefix: Path):
    exact, coat = (run(prefix, "O1", optimizer_state=state)[0] for state in (None, "coat"))
    assert exact != coat
    assert coat == pytest.approx(exact, rel=2e-3)


def test_other_formats_become_coat_s_and_back(prefix: Path, tmp_path: Path):
    run(prefix, "O2", save=str(tmp_path / "O2"), exit_interval=SAVED)
    settings = {"swiglu": True, "train_iters": LAST}
    with tiny.trainer(tiny.config(prefix, precision="O2", optimizer_state="coat", load=str(tmp_path / "O2"), **settings)) as made:
        checkpoint.save(made.training, tmp_path / "coat")
    with tiny.trainer(tiny.config(prefix, precision="O2", load=str(tmp_path / "coat"), **settings)) as made:
        checkpoint.save(made.training, tmp_path / "back")
    was, coat, back = (CheckpointReader(iteration_folder(tmp_path / name, SAVED)) for name in ("O2", "coat", "back"))
    for name in was.names():
        for key, fmt in (("exp_avg", E4M3), ("exp_avg_sq", FP16)):
            before, between, after = (saved._find(key, name) for saved in (was, coat, back))
            if between.groups is None:  # a vector, whose moments are FP32
                assert before.payload.equal(after.payload)
                continue
            assert between.values().equal(quantize_expanded(before.values(), E4M3).dequantize())
            assert after.values().equal(ScalingTensor.quantize(between.values(), fmt).dequantize(before.values().dtype))
            assert sqnr_db(before.values(), between.values()) > 30
