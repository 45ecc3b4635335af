"""Context parallelism in whole runs on text: it learns as one process, accumulates, evaluates, resumes with another number of processes."""

import os
from pathlib import Path
from typing import Any

import pytest

from helpers import dist, tiny
from megatron.lm.config import Config
from msamp.comm.collectives import Peers

CP = {"context_parallel_size": 2}
FP8_ATTENTION = {"attention_precision": "fp8"}
LEVELS: dict[str, dict[str, Any]] = {
    "O0": {"opt_level": "O0"},
    "O1": {"opt_level": "O1"},
    "O2": {"opt_level": "O2"},
    "O3": {"opt_level": "O3"} | FP8_ATTENTION,
    "coat": {"precision": "coat"} | FP8_ATTENTION,
}
HEADS = {"cp_comm_type": "a2a"}
EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 32, "swiglu": True, "disable_bias_linear": True}
DOCUMENTS = {"reset_attention_mask": True, "attention_precision": "bf16"}
# The level of a run, and what it has beside on one process and on several.
RUNS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {level: (level, {}, {}) for level in LEVELS} | {
    "O2": ("O2", {}, {"cp_wire": "fp8"}),
    "O0, documents": ("O0", DOCUMENTS, HEADS),
    "O3, documents": ("O3", DOCUMENTS, HEADS | {"cp_wire": "fp8"}),
    "coat, documents": ("coat", DOCUMENTS | {"qk_layernorm": True}, HEADS),
    "O2, experts, FP8 heads": ("O2", FP8_ATTENTION | EXPERTS, HEADS),
    "O3, norms, FP8 heads": ("O3", {"qk_layernorm": True}, HEADS),
    "O1, FP8 heads": ("O1", FP8_ATTENTION, HEADS),
    "O2, FP8 heads": ("O2", FP8_ATTENTION, HEADS),
    "O3, FP8 heads": ("O3", {}, HEADS),
    "coat, FP8 heads": ("coat", {}, HEADS),
}
FOUR_HEADS = {"num_attention_heads": 4}
GRIDS: dict[str, dict[str, Any]] = {
    "dp2": CP,
    "tp2": CP | {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": CP | {"pipeline_model_parallel_size": 2},
    "again": CP | {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "attention again": CP | {"recompute_granularity": "selective", "recompute_modules": ("core_attn",)},
    "heads": CP | HEADS | {"cp_wire": "fp8", "attention_precision": "bf16"},
    "FP8 heads, dp2": CP | HEADS,
    "FP8 heads, tp2": CP | HEADS | {"tensor_model_parallel_size": 2, "sequence_parallel": True} | FOUR_HEADS,
    "documents, tp2": CP | HEADS | {"tensor_model_parallel_size": 2} | FOUR_HEADS | DOCUMENTS,
    "FP8 heads, pp2": CP | HEADS | {"pipeline_model_parallel_size": 2},
    "FP8 heads, attention again": CP | HEADS | {"recompute_granularity": "selective", "recompute_modules": ("core_attn",)},
}
WITHIN = {True: 1e-3, False: 0.02}  # losses by whether the level is O0


def settings(prefix: str, level: str, **changes: Any) -> Config:
    """Two micro-batches per step on one data-parallel process, and an evaluation after every second step."""
    base = {"micro_batch_size": 2, "global_batch_size": 4, "train_iters": 5, "eval_interval": 2, "eval_iters": 1, "kv_channels": 16}
    return tiny.config(prefix, **base | LEVELS[level] | changes)


def logged(prefix: str, level: str, changes: dict[str, Any]) -> list[tuple[str, int, float]]:
    """Losses of training and evaluation by iteration, as rank 0 logs them."""
    rows = tiny.run(settings(prefix, level, **changes))
    return [(row["kind"], row["iteration"], row["loss"]) for row in rows if row["kind"] in ("train", "valid", "test")]


def on(processes: int, *arguments: Any) -> list[tuple[str, int, float]]:
    return dist.run(logged, processes, *arguments, init=False)[0]


def assert_close(found: list[tuple[str, int, float]], expected: list[tuple[str, int, float]], within: float) -> None:
    assert [row[:2] for row in found] == [row[:2] for row in expected]
    assert [row[2] for row in found] == pytest.approx([row[2] for row in expected], abs=within)


DEFAULT = ("O3, FP8 heads",)  # not nightly; the ring: test_context_parallel.py of model


@pytest.mark.parametrize("run", [*DEFAULT, *(pytest.param(name, marks=pytest.mark.nightly(5)) for name in RUNS if name not in DEFAULT)])
def test_two_processes_train_and_evaluate_as_one(tmp_path: Path, run: str):
    prefix, (level, always, shared) = str(tiny.write_data(tmp_path)), RUNS[run]
    alone, together = on(1, prefix, level, always), on(2, prefix, level, CP | always | shared)
    assert {kind for kind, *_ in alone} == {"train", "valid", "test"}
    assert_close(together, alone, WITHIN[level == "O0"])


@pytest.mark.nightly(15)
@pytest.mark.parametrize("run", [*LEVELS, "O3, documents", "O3, FP8 heads", "O2, experts, FP8 heads"])
def test_a_run_that_ends_early_resumes_with_another_number_of_processes(tmp_path: Path, run: str):
    level, always, shared = RUNS[run]
    prefix, within, two = str(tiny.write_data(tmp_path)), WITHIN[level == "O0"], CP | always | shared
    parts, whole = str(tmp_path / "parts"), str(tmp_path / "whole")
    together = on(2, prefix, level, two)
    first = on(2, prefix, level, two | {"save": parts, "exit_interval": 3})
    assert first + on(2, prefix, level, two | {"load": parts}) == together
    assert_close(first + on(1, prefix, level, always | {"load": parts}), together, within)
    assert_close(on(1, prefix, level, always | {"save": whole, "exit_interval": 3}), first, within)
    assert_close(first + on(2, prefix, level, two | {"load": whole}), together, within)


@pytest.mark.nightly(9)
@pytest.mark.parametrize("grid", GRIDS)
def test_grids_of_four_processes_train_as_one(tmp_path: Path, grid: str):
    prefix = str(tiny.write_data(tmp_path))
    model = {name: value for name, value in GRIDS[grid].items() if name in FOUR_HEADS | DOCUMENTS}
    assert_close(on(4, prefix, "O3", GRIDS[grid]), on(1, prefix, "O3", model), WITHIN[False])


def lost(prefix: str, folder: str) -> None:
    """The last rank goes during its ninth hop, in backward of the first step; the others write what they raise."""
    hops, start = iter(range(9)), Peers.start_ring

    def last_hop(self: Peers, *arguments: Any) -> Any:
        if self.rank == 1 and next(hops, None) is None:
            os._exit(0)
        return start(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Peers, "start_ring", last_hop)
        try:
            tiny.run(settings(prefix, "O3", **CP))
        except RuntimeError as error:
            Path(folder, "raised").write_text(str(error))
    os._exit(0)  # without the other rank the process group cannot be taken down in order


@pytest.mark.nightly(9)
def test_a_process_that_is_lost_in_the_ring_is_named(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="result_"):
        dist.run(lost, 2, str(tiny.write_data(tmp_path)), str(tmp_path), init=False)
    message = (tmp_path / "raised").read_text()
    assert message.startswith("rank 0: the ring of ")
    assert "keys and values failed: rank 1 does not answer (" in message
