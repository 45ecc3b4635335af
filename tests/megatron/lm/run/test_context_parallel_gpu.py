"""Context parallelism on two GPUs over NCCL: it trains as one GPU, and whole steps in CUDA graphs have the losses of eager ones."""

from pathlib import Path
from typing import Any

import pytest

from helpers import dist, tiny

FP8 = {"attention_precision": "fp8"}
RUNS: dict[str, dict[str, Any]] = {
    "O0": {"opt_level": "O0"},
    "O0, documents": {"opt_level": "O0", "reset_attention_mask": True},
    "O3": {"opt_level": "O3"},
    "O3, FP8 attention": {"opt_level": "O3"} | FP8,
}
CP2 = {"context_parallel_size": 2}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {  # run, and what it adds
    "O0 ring": ("O0", CP2),
    "O0 heads": ("O0", CP2 | {"cp_comm_type": "a2a"}),
    "O3 ring": ("O3", CP2 | {"cp_wire": "fp8"}),
    "O3 heads": ("O3", CP2 | {"cp_comm_type": "a2a", "cp_wire": "fp8"}),
    "O3 FP8 ring": ("O3, FP8 attention", CP2),
    "O3 FP8 heads": ("O3, FP8 attention", CP2 | {"cp_comm_type": "a2a"}),
    "O0 documents": ("O0, documents", CP2 | {"cp_comm_type": "a2a"}),
}
ALONE: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in RUNS}


def settings(prefix: str, way: tuple[str, dict[str, Any]], graph: str) -> Any:
    run, added = way
    shape = {"seq_length": 512, "kv_channels": 128, "hidden_size": 128, "num_attention_heads": 4, "num_layers": 2}
    return tiny.config(prefix, micro_batch_size=2, global_batch_size=4, train_iters=12, cuda_graph=graph, **shape, **RUNS[run], **added)


def train_all(prefix: str, ways: dict[str, tuple[str, dict[str, Any]]], graphs: tuple[str, ...]) -> dict[str, list[float]]:
    """Losses of each run on rank 0; those of the other ranks are empty."""
    return {f"{name} {graph}": tiny.losses(tiny.run(settings(prefix, way, graph))) for name, way in ways.items() for graph in graphs}


@pytest.mark.multi_gpu
def test_two_gpus_that_share_sequences_train_as_one(tmp_path: Path):
    pytest.importorskip("cudnn")
    (alone,), (together, _) = dist.side_by_side(
        lambda: dist.on_gpus(train_all, 1, str(tiny.write_data(tmp_path, "one")), ALONE, ("none",)),
        lambda: dist.on_gpus(train_all, 2, str(tiny.write_data(tmp_path, "two")), WAYS, ("none", "step")),
    )
    for name, (run, _) in WAYS.items():
        for graph in ("none", "step"):
            assert together[f"{name} {graph}"] == pytest.approx(alone[f"{run} none"], rel=1e-2 if run == "O0" else 2e-2), (name, graph)
        # dQ of cuDNN's FP8 kernels is a sum in any order.
        assert together[f"{name} step"] == pytest.approx(together[f"{name} none"], rel=1e-3 if "FP8" in name else 0), name
