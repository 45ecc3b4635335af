"""`--log-params-norm` and `--log-num-zeros-in-grad`: the same numbers on every grid, and those of the tensors themselves."""

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import dist, tiny
from megatron.lm.run.reports import norms
from msamp.numerics.tensor import ScalingTensor, fp32_values

# 256 rows of an embedding that no text of 60 tokens reaches: gradients that are zero.
BOTH: dict[str, Any] = {
    "log_params_norm": True,
    "log_num_zeros_in_grad": True,
    "untie_embeddings_and_output_weights": True,
    "train_iters": 4,
    "make_vocab_size_divisible_by": 256,
    "micro_batch_size": 2,
    "global_batch_size": 8,
    "log_interval": 2,
    "eval_interval": 2,
}


def rows(settings: dict[str, Any], prefix: str) -> list[dict[str, Any]]:
    found = [row for row in tiny.run(tiny.config(prefix, **settings)) if row["kind"] == "train"]
    return [{name: row[name] for name in ("iteration", "params_norm", "num_zeros_in_grad")} for row in found]


@pytest.mark.parametrize("level", ["fp32", "O2", "O3", pytest.param("coat", marks=pytest.mark.nightly(2)), "collage-plus"])
def test_the_numbers_are_those_of_the_tensors(prefix: Path, level: str):
    kind = {"opt_level": level} if level.startswith("O") else {"precision": level}
    seen: list[int] = []

    class Counts(norms.ZerosInGradients):
        def before_update(self) -> None:
            super().before_update()
            zeros = 0
            for holding in self.training.optimizer.ready():
                grad = holding.grad.dequantize(torch.float32) if isinstance(holding.grad, ScalingTensor) else holding.grad
                zeros += int((grad == 0).sum())
            seen.append(zeros)

    written: list[dict[str, Any]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(norms, "ZerosInGradients", Counts)
        with tiny.trainer(tiny.config(prefix, **BOTH | kind)) as made:
            made.metrics.write = written.append
            made.run()
            state = made.training.optimizer.state
            weights = [fp32_values(state[p].get("master", p)) for group in made.training.optimizer.param_groups for p in group["params"]]
    trained = [row for row in written if row["kind"] == "train"]
    assert [row["iteration"] for row in trained] == [2, 4]
    assert [row["num_zeros_in_grad"] for row in trained] == [seen[1], seen[3]]
    assert seen[-1] >= 190 * 32
    norm = torch.cat([x.flatten() for x in weights]).double().norm()
    assert trained[-1]["params_norm"] == pytest.approx(float(norm), rel=1e-3 if level == "collage-plus" else 1e-9)


GRIDS: dict[str, dict[str, Any]] = {
    "data": {},
    "ZeRO": {"use_distributed_optimizer": True, "ddp_bucket_size": 3000},
    "tensor": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "make_vocab_size_divisible_by": 128},
    "pipeline": {"pipeline_model_parallel_size": 2},
}


def on_two_ranks(prefix: str) -> dict[str, list[dict[str, Any]]]:
    return {name: rows(BOTH | grid | {"precision": "fp32"}, prefix) for name, grid in GRIDS.items()}


@pytest.mark.promise("Megatron flags", "The norm of parameters and the zeros among gradients are the same on every grid.")
def test_a_grid_has_the_numbers_of_one_process(gloo_prefix: Path):
    alone = rows(BOTH | {"precision": "fp32"}, str(gloo_prefix))
    for name, found in dist.run(on_two_ranks, 2, str(gloo_prefix))[0].items():
        assert [row["num_zeros_in_grad"] for row in found] == [row["num_zeros_in_grad"] for row in alone], name
        assert [row["params_norm"] for row in found] == pytest.approx([row["params_norm"] for row in alone], rel=1e-6), name
