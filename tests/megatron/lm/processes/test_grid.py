"""Grids of tensor, sequence, pipeline and data parallelism: runs on them as on one process, gradient by gradient, alike on all ranks;
and at the end of the file what `Grid` answers.

One start of processes serves all runs of a size; the tests look at what it returns. By default 2 processes and two grids, one
of tensor and one of pipeline parallelism; what TP, ZeRO and the wire do to the bit, tests/msamp/parallel shows. The nightly tests add the
rest of the table and 4 processes.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor

from helpers import dist, tiny
from megatron.lm.config import Config
from megatron.lm.model.initial import named_globally
from megatron.lm.step import train_step
from megatron.lm.training.gradients import chunks
from megatron.lm.training.state import Training
from msamp.numerics.metrics import sqnr_db
from msamp.numerics.tensor import fp32_values

STEPS = tiny.BOTH_PHASES
SHARED: dict[str, Any] = {
    "num_layers": 4,
    "num_attention_heads": 4,
    "micro_batch_size": 2,
    "global_batch_size": 8,
    "train_iters": STEPS,
    "make_vocab_size_divisible_by": 16,
}
TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
SP, VPP = {"sequence_parallel": True}, {"num_layers_per_virtual_pipeline_stage": 1}
ZERO = {"use_distributed_optimizer": True}
UNTIED = {"untie_embeddings_and_output_weights": True}
LLAMA = {"swiglu": True, "group_query_attention": True, "num_query_groups": 2, "normalization": "RMSNorm", "disable_bias_linear": True}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
LEARNED = {"position_embedding_type": "learned_absolute"}
# Largest relative difference of a loss from one process's over the steps; least SQNR in dB of a parameter's gradient in the first.
LIMITS = {
    "fp32": (1e-5, 100.0),
    "bf16": (5e-3, 30.0),
    "fp16-amp": (1e-3, 45.0),
    "collage-plus": (5e-3, 30.0),
    "collage-fp8": (5e-3, 30.0),
    "coat": (1e-2, 12.0),
    "O1": (1e-2, 12.0),
    "O2": (1e-2, 12.0),
    "O3": (1e-2, 12.0),
}

# Model settings by name: each is trained on one process too.
QWEN = LLAMA | UNTIED | {"qk_layernorm": True}
MODELS: dict[str, dict[str, Any]] = {"gpt": {}, "llama": LLAMA | UNTIED, "learned": LEARNED, "qwen": QWEN}
MODELS["unusual"] = {"squared_relu": True, "disable_bias_linear": True, "add_qkv_bias": True, "use_rope_scaling": True}
Case = tuple[str, str, dict[str, Any]]  # recipe, model, grid
TWO: dict[str, Case] = {
    "fp32 TP+SP": ("fp32", "gpt", TP2 | SP),
    "O3 interleaved": ("O3", "gpt", PP2 | VPP),
    "fp32 qwen TP": ("fp32", "qwen", TP2),
    "fp32 unusual TP+SP": ("fp32", "unusual", TP2 | SP),
}
# Of recipes between FP32 and O3 the grids that differ most.
TWO_SLOW: dict[str, Case] = {
    **{
        f"{recipe} {name}": (recipe, "gpt", grid)
        for recipe in LIMITS
        for name, grid in {"DP": {}, "TP+SP": TP2 | SP, "PP": PP2, "TP": TP2, "interleaved": PP2 | VPP}.items()
        if f"{recipe} {name}" not in TWO and (recipe in ("fp32", "O3") or name in ("DP", "TP+SP", "PP"))
    },
    "fp32 qwen TP+SP": ("fp32", "qwen", TP2 | SP),
    "O3 qwen TP+SP": ("O3", "qwen", TP2 | SP),
    "O3 unusual TP+SP": ("O3", "unusual", TP2 | SP),
    "O3 qwen PP": ("O3", "qwen", PP2),
    "O3 TP+SP again": ("O3", "gpt", TP2 | SP),
    "O3 TP+SP recomputed": ("O3", "gpt", TP2 | SP | RECOMPUTE),
    "O3 TP recomputed": ("O3", "gpt", TP2 | RECOMPUTE),
    "O3 PP recomputed": ("O3", "gpt", PP2 | RECOMPUTE),
    "O3 TP+SP fp8 wire": ("O3", "gpt", TP2 | SP | {"tp_wire": "fp8"}),
    "O3 TP fp8 wire": ("O3", "gpt", TP2 | {"tp_wire": "fp8"}),
    "O3 TP+SP gathered": ("O3", "gpt", TP2 | SP | {"tp_saved_input": "gathered"}),
    "O3 TP+SP current": ("O3", "gpt", TP2 | SP | {"fp8_recipe": "tensorwise"}),
    **{f"{recipe} llama TP+SP": (recipe, "llama", TP2 | SP) for recipe in ("fp32", "bf16", "O3")},
    **{f"{recipe} llama interleaved": (recipe, "llama", PP2 | VPP) for recipe in ("fp32", "O3")},
    "fp32 learned TP+SP": ("fp32", "learned", TP2 | SP),
    "fp32 learned PP": ("fp32", "learned", PP2),
    "O1 PP ZeRO": ("O1", "gpt", PP2 | ZERO),
    **{f"{recipe} DP ZeRO": (recipe, "gpt", ZERO) for recipe in ("collage-plus", "collage-fp8")},
    "coat DP ZeRO": ("coat", "gpt", ZERO),
}
FOUR: dict[str, Case] = {
    f"{recipe} {name}": (recipe, "gpt", grid)
    for recipe in ("fp32", "O3")
    for name, grid in {
        "TP 4 + SP": {"tensor_model_parallel_size": 4} | SP,
        "PP 4": {"pipeline_model_parallel_size": 4},
        "TP+SP x PP": TP2 | SP | PP2,
        "TP+SP x interleaved": TP2 | SP | PP2 | VPP,
        "DP x TP": TP2,
        "DP x TP+SP ZeRO": TP2 | SP | ZERO,
        "DP x PP": PP2,
        "DP x PP ZeRO": PP2 | ZERO,
        "DP x interleaved": PP2 | VPP,
    }.items()
} | {
    f"{recipe} {name}": (recipe, "gpt", grid)
    for recipe in ("O1", "O2", "fp16-amp")
    for name, grid in {"TP+SP x PP": TP2 | SP | PP2, "DP x TP+SP ZeRO": TP2 | SP | ZERO}.items()
}
# Over NCCL; the GPU's FP32 sums are in another order, and rounded otherwise.
GPUS: dict[str, Case] = {
    **{f"{recipe} TP+SP": (recipe, "gpt", TP2 | SP) for recipe in ("fp32", "bf16", "fp16-amp", "O2", "O3")},
    **{f"{recipe} PP": (recipe, "gpt", PP2) for recipe in ("fp32", "fp16-amp", "O3")},
    "fp32 interleaved": ("fp32", "gpt", PP2 | VPP),
    "O3 interleaved": ("O3", "gpt", PP2 | VPP),
    "O3 TP": ("O3", "gpt", TP2),
    "O3 TP+SP again": ("O3", "gpt", TP2 | SP),
    "O3 TP+SP recomputed": ("O3", "gpt", TP2 | SP | RECOMPUTE),
    "O3 TP+SP fp8 wire": ("O3", "gpt", TP2 | SP | {"tp_wire": "fp8"}),
    "O3 llama TP+SP": ("O3", "llama", TP2 | SP),
}
GPU_LIMITS = {"fp32": (1e-4, 60.0), "bf16": (1e-2, 25.0), "fp16-amp": (2e-3, 40.0), "O2": (2e-2, 10.0), "O3": (2e-2, 10.0)}
SAME_BITS = [("O3 TP+SP", "O3 TP+SP again"), ("O3 TP+SP", "O3 TP+SP recomputed")]
SAME_BITS_SLOW = [
    *SAME_BITS,
    ("O3 TP", "O3 TP recomputed"),
    ("O3 PP", "O3 PP recomputed"),
    ("O3 TP+SP", "O3 TP+SP gathered"),
    ("O1 PP", "O1 PP ZeRO"),
    *((f"{recipe} DP", f"{recipe} DP ZeRO") for recipe in ("collage-plus", "collage-fp8")),
    ("coat DP", "coat DP ZeRO"),
]
SAME_BITS_FOUR = [(f"{recipe} DP x PP", f"{recipe} DP x PP ZeRO") for recipe in ("fp32", "O3")]


def steps_of(recipe: str) -> int:
    """A few, and where scaling is delayed both of its phases."""
    return STEPS if recipe.startswith("O") else 3


def settings_of(prefix: str, case: Case) -> Config:
    recipe, model, grid = case
    return tiny.config(prefix, **{"precision": recipe, **SHARED, **MODELS[model], **grid})


def gradients(training: Training) -> list[tuple[str, int | None, int, Tensor]]:
    """What this rank has of the averaged gradients: name on one process, dimension that is cut, first row in this rank's part, values."""
    found = []
    sync = training.grad_sync
    for chunk in chunks(training.model):
        for name, module in named_globally(chunk):
            for key, p in module.named_parameters(recurse=False):
                cut = p.partition_dim if getattr(p, "tensor_model_parallel", False) else None
                for row, g in [(segment.row, segment.grad) for segment in sync.owned(p)] if sync.shard else [(0, p.main_grad)]:
                    found.append((f"{name}.{key}", cut, row, fp32_values(g).cpu()))
    return found


def trained(settings: Config) -> dict[str, Any]:
    """What this rank saw of a run of `STEPS` steps."""
    with tiny.trainer(settings) as made:
        training = made.training
        stream = made.data.batches(made.training, made.data.train, 0)
        losses, norms = [], []
        first: list[tuple[str, int | None, int, Tensor]] = []
        for _ in range(steps_of(settings.precision.name)):
            result = train_step(training, stream)
            total = torch.stack([result.loss_sum, result.tokens])
            torch.distributed.all_reduce(total)
            losses.append(float(total[0] / total[1]))
            norms.append(float(result.grad_norm))
            first = first or gradients(training)
        alike = {
            f"{name}.{key}": tiny.bits([p])
            for chunk in chunks(training.model)
            for name, module in named_globally(chunk)
            for key, p in module.named_parameters(recurse=False)
            if not getattr(p, "tensor_model_parallel", False) or name == "embedding.word_embeddings"
        }
        return {
            "losses": losses,
            "norms": norms,
            "gradients": first,
            "alike": alike,
            "weights": tiny.bits(training.model.parameters()),
            "place": (parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()),
        }


def all_runs(prefix: str, cases: dict[str, Case]) -> dict[str, dict[str, Any]]:
    return {name: trained(settings_of(prefix, case)) for name, case in cases.items()}


@pytest.fixture(scope="module")
def one(gloo_prefix: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Runs on one process, made when first asked for."""

    class Runs(dict):
        def __missing__(self, key: tuple[str, str]) -> dict[str, Any]:
            self[key] = trained(settings_of(str(gloo_prefix), (*key, {})))
            return self[key]

    return Runs()


def runs_of(cases: dict[str, Case], ranks: int, timeout: float) -> Any:
    """A fixture: what each of so many ranks saw of the cases, which are run once, at the first test that asks."""

    @pytest.fixture(scope="module")
    def runs(gloo_prefix: Path) -> list[dict[str, Any]]:
        return dist.run(all_runs, ranks, str(gloo_prefix), cases, timeout=timeout)

    return runs


two = runs_of(TWO, 2, 850)
two_slow = runs_of(TWO_SLOW, 2, 2500)
four = runs_of(FOUR, 4, 2500)


def check(
    ranks: list[dict[str, Any]], name: str, case: Case, one: dict[tuple[str, str], dict[str, Any]], limits: dict[str, Any] = LIMITS
) -> None:
    """A run against one process: losses, gradients, and what must be alike on several ranks."""
    recipe, model, _ = case
    runs, alone = [rank[name] for rank in ranks], one[recipe, model]
    limit, least = limits[recipe]
    for run in runs:
        assert run["losses"] == runs[0]["losses"]
        assert run["norms"] == runs[0]["norms"], "the global norm decides on every rank alike"
        assert run["losses"] == pytest.approx(alone["losses"], rel=limit)
        assert run["norms"][0] == pytest.approx(alone["norms"][0], rel=10 * limit)
    expected = {name: g for name, _, _, g in alone["gradients"]}
    seen: set[str] = set()
    for run in runs:
        rank, size = run["place"]
        for key, cut, row, g in run["gradients"]:
            whole = expected[key]
            if cut is not None:
                strips = whole.chunk(2 if MODELS[model].get("swiglu") and "linear_fc1" in key else 1, cut)
                whole = torch.cat([strip.chunk(size, cut)[rank] for strip in strips], cut)
            assert sqnr_db(whole[row : row + g.shape[0]], g) >= least, key
            seen.add(key)
    assert seen == set(expected)
    for key in {key for run in runs for key in run["alike"]}:
        for rank in {run["place"][0] for run in runs}:  # the embedding is cut over tensor-parallel ranks, and has a copy a stage
            same = [run["alike"][key] for run in runs if key in run["alike"] and (run["place"][0] == rank or "word_emb" not in key)]
            assert all(tiny.same(same[0], other) for other in same), key


@pytest.mark.multi_gpu
def test_two_gpus_train_as_one(tmp_path: Path):
    alone = {(recipe, model): (recipe, model, {}) for recipe, model, _ in GPUS.values()}
    (one,), two = dist.side_by_side(
        lambda: dist.on_gpus(all_runs, 1, str(tiny.write_data(tmp_path, "one")), alone),
        lambda: dist.on_gpus(all_runs, 2, str(tiny.write_data(tmp_path, "two")), GPUS),
    )
    for name, case in GPUS.items():
        check(two, name, case, one, GPU_LIMITS)
    for a, b in SAME_BITS:
        assert all(tiny.same(rank[a]["weights"], rank[b]["weights"]) for rank in two), (a, b)


@pytest.mark.parametrize("name", TWO)
def test_two_processes_train_as_one(two, one, name: str):
    check(two, name, TWO[name], one)


@pytest.mark.nightly(6)
@pytest.mark.timeout(2700)  # of all runs, which the first test starts
@pytest.mark.parametrize("recipe", LIMITS)
def test_every_recipe_on_two_processes(two_slow, one, recipe: str):
    for name, case in TWO_SLOW.items():
        if case[0] == recipe:
            check(two_slow, name, case, one)


@pytest.mark.nightly
@pytest.mark.parametrize(("a", "b"), SAME_BITS_SLOW, ids=str)
def test_bits_do_not_depend_on_the_run_nor_on_recomputation(two, two_slow, a: str, b: str):
    for rank, more in zip(two, two_slow, strict=True):
        runs = rank | more
        assert runs[a]["losses"] == runs[b]["losses"]
        assert tiny.same(runs[a]["weights"], runs[b]["weights"])


@pytest.mark.nightly(12)
@pytest.mark.timeout(2700)
@pytest.mark.parametrize("recipe", LIMITS)
def test_every_recipe_on_four_processes(four, one, recipe: str):
    for name, case in FOUR.items():
        if case[0] == recipe:
            check(four, name, case, one)


@pytest.mark.nightly
@pytest.mark.parametrize(("a", "b"), SAME_BITS_FOUR, ids=str)
def test_zero_changes_no_bit_in_a_grid(four, a: str, b: str):
    for rank in four:
        assert tiny.same(rank[a]["weights"], rank[b]["weights"])
