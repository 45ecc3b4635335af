"""COAT's moments in the trainer: they train as FP32 ones do, resume to the bit, and are converted from and to other formats."""

from pathlib import Path
from typing import Any

import pytest

from helpers import tiny
from megatron.lm.checkpoint import CheckpointReader, iteration_folder
from megatron.lm.run.trainer import Trainer

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
