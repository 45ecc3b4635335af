"""A checkpoint of one grid loaded on another: the same model to the bit, or within the stated rounding; and training goes on as if it had
stayed.

One start of processes does all the moves of a table; the tests read the checkpoints it leaves. By default 2 processes and the grids that
differ most; 4 processes, of which on 2 cores a start takes a minute, are nightly.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import dist, tiny
from megatron.lm import checkpoint
from megatron.lm.checkpoint import CheckpointReader, iteration_folder
from megatron.lm.checkpoint.place import places
from megatron.lm.checkpoint.values import StoredTensor
from megatron.lm.config import Config
from msamp.numerics.formats import of_dtype
from msamp.optim import updates

pytestmark = pytest.mark.timeout(3000)
STATES = tuple(state.key for state in updates.by_name("fp32").states)
TP, PP = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
CP = {"context_parallel_size": 2}
GRIDS: dict[str, dict[str, Any]] = {
    "dp4": {},
    "zero": {"use_distributed_optimizer": True},  # DP 4
    "cp2": CP,  # and DP 2 on four
    "tp2cp2": {**TP, **CP, "sequence_parallel": True},
    "tp2dp2": {**TP, "sequence_parallel": True},
    "tp2zero": {**TP, "sequence_parallel": True, "use_distributed_optimizer": True},
    "tp2pp2": {**TP, **PP},
    "pp2": PP,
    "pp2vpp2": {**PP, "num_layers_per_virtual_pipeline_stage": 1},
    "ep2": {"expert_model_parallel_size": 2},
}
# Small buckets cut tensors among the owners; embedding and LM head are tied, so that two pipeline stages hold them.
SHARED: dict[str, Any] = {"num_layers": 2, "micro_batch_size": 2, "global_batch_size": 8, "train_iters": 8, "ddp_bucket_size": 5000}
SHARED |= {"disable_bias_linear": True, "normalization": "RMSNorm"}
LLAMA = {"num_layers": 4, "swiglu": True, "num_attention_heads": 4, "group_query_attention": True, "num_query_groups": 2}
GPT2 = {"disable_bias_linear": False, "normalization": "LayerNorm", "position_embedding_type": "learned_absolute"}
GPT2 |= {"untie_embeddings_and_output_weights": True}
# Weights whose amaxes are about where their scale jumps, so that tensor-parallel shards have different ones; and mu on the wire.
APART = {"swiglu": True, "init_method_std": 0.0215, "grad_exchange": "nccl"}
# Flags, and the grids: two steps on the first, then from each to the next.
MOVES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "O3": ({"precision": "O3", **LLAMA}, ["dp4", "tp2pp2", "pp2vpp2", "tp2dp2", "dp4"]),
    "O3 from TP": ({"precision": "O3", **APART}, ["tp2dp2", "dp4"]),
    "O2 ZeRO off and on": ({"precision": "O2"}, ["dp4", "zero", "dp4"]),
    "padding": ({"precision": "O3", "make_vocab_size_divisible_by": 25}, ["dp4", "tp2dp2", "dp4"]),  # 75 rows, 100, 75
}
EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 24, "swiglu": True, "moe_router_score_function": "sigmoid"}
EXPERTS |= {"moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 0.1}
ON_TWO: dict[str, tuple[dict[str, Any], list[str]]] = {
    "O3 on two": ({"precision": "O3"}, ["cp2", "tp2dp2", "zero"]),
    "O3 experts": ({"precision": "O3", **EXPERTS}, ["ep2", "zero"]),
}
# Largest relative difference of the next step's loss after a move from that of staying: sums in another order, which activations in BF16
# and FP8 round otherwise. Largest seen: fp32 6e-8, others 7e-5.
LOSS = {"fp32": 1e-6, "bf16": 2e-4, "O1": 2e-4, "O2": 2e-4, "O3": 2e-4}


def settings(prefix: str, flags: Mapping[str, Any], grid: str, **more: Any) -> Config:
    return tiny.config(prefix, **{**SHARED, **flags, **GRIDS[grid], **more})


def move(prefix: str, root: str, moves: Mapping[str, tuple[dict[str, Any], list[str]]]) -> dict[str, list[Any]]:
    """For every move, on the grid of the start and on each of the others: the losses of the steps from there (rank 0 has them), and where
    what this rank holds stands."""
    seen: dict[str, list[Any]] = {}
    for name, (flags, grids) in moves.items():
        seen[name] = []
        for number, grid in enumerate(grids):
            here = Path(root, name, str(number))
            way = {"save": str(here), "save_interval": 2} if number == 0 else {"load": str(here.with_name(str(number - 1))), "ckpt_step": 2}
            rows: list[dict[str, Any]] = []
            with tiny.trainer(settings(prefix, flags, grid, exit_interval=3, **way)) as made:
                if number:
                    checkpoint.save(made.training, here)  # what was loaded, as it came
                made.metrics.write = rows.append  # type: ignore[method-assign]
                made.run()
                seen[name].append((tiny.losses(rows), [place for parts in places(made.training.model).values() for place in parts]))
    return seen


class Moved:
    """What the moves left: `seen` by rank, and the checkpoints."""

    def __init__(self, seen: list[dict[str, list[Any]]], root: Path) -> None:
        self.seen, self.root = seen, root

    def saved(self, name: str, number: int) -> CheckpointReader:
        return CheckpointReader(iteration_folder(self.root / name / str(number), 2))

    def losses(self, name: str) -> list[float]:
        """Of the third step: staying, then after each move."""
        return [losses[-1] for losses, _ in self.seen[0][name]]


def tensors(saved: CheckpointReader, prefixes: tuple[str, ...] = ("model", *STATES)) -> dict[str, StoredTensor]:
    """Weights and states by key."""
    names = saved.names()
    keys = [(prefix, name) for prefix in prefixes for name in names if f"{prefix}/{name}" in saved.stored.tensors]
    return {f"{prefix}/{name}": saved._find(prefix, name) for prefix, name in keys}


def bits(found: StoredTensor) -> list[Tensor]:
    """Payload and the one scale."""
    assert not found.scales or found.scale_inv is not None, f"{found.key} has several scales"
    return tiny.bits([found.payload, *([] if found.scale_inv is None else [found.scale_inv])])


def assert_same(before: dict[str, StoredTensor], after: dict[str, StoredTensor]) -> None:
    assert before.keys() == after.keys()
    assert [key for key in before if not tiny.same(bits(before[key]), bits(after[key]))] == []


def starts_in_parts(name: str, moves: Mapping[str, tuple[dict[str, Any], list[str]]]) -> bool:
    return "tensor_model_parallel_size" in GRIDS[moves[name][1][0]]


def check_bits(moved: Moved, name: str, moves: Mapping[str, tuple[dict[str, Any], list[str]]]) -> None:
    flags, grids = moves[name]
    first = tensors(moved.saved(name, 0))
    assert any(key.startswith("exp_avg_sq/") for key in first)
    # A start in tensor-parallel parts leaves FP8 and FP16 tensors with several scales, which the first whole grid makes one.
    start = 1 if starts_in_parts(name, moves) and flags["precision"].startswith("O") else 0
    whole = first if start == 0 else tensors(moved.saved(name, start))
    for number in range(start + 1, len(grids)):
        assert_same(whole, tensors(moved.saved(name, number)))
    for number in range(len(grids)):
        saved = moved.saved(name, number)
        steps = [float(saved.stored.tensor(key)) for key in saved.stored.tensors if key.startswith("step/")]
        assert steps == [2.0] * sum(not key.endswith(".expert_bias") for key in saved.names())


def check_losses(moved: Moved, name: str, level: str) -> None:
    stayed, *others = moved.losses(name)
    assert others == pytest.approx([stayed] * len(others), rel=LOSS[level])


@pytest.fixture(scope="module")
def moved(gloo_prefix: Path, tmp_path_factory: pytest.TempPathFactory) -> Moved:
    root = tmp_path_factory.mktemp("moves")
    return Moved(dist.run(move, 4, str(gloo_prefix), str(root), MOVES, timeout=800), root)


@pytest.fixture(scope="module")
def moved_on_two(gloo_prefix: Path, tmp_path_factory: pytest.TempPathFactory) -> Moved:
    root = tmp_path_factory.mktemp("two")
    return Moved(dist.run(move, 2, str(gloo_prefix), str(root), ON_TWO, timeout=400), root)


@pytest.mark.parametrize("name", ON_TWO)
def test_owners_tensor_parallel_shards_stages_and_ranks_with_experts_hold_the_same_model(moved_on_two: Moved, name: str):
    check_bits(moved_on_two, name, ON_TWO)
    check_losses(moved_on_two, name, ON_TWO[name][0]["precision"])


@pytest.mark.parametrize("number", [0, 1])
def test_every_expert_is_stored_once(moved_on_two: Moved, number: int):
    saved = moved_on_two.saved("O3 experts", number)
    names = [name for name in saved.names() if ".experts." in name]
    assert len(names) == 2 * 2 * 4
    assert all(len(saved.stored.tensors[f"model/{name}"].chunks) == 1 for name in names)


@pytest.mark.nightly(5)
@pytest.mark.parametrize("name", [name for name in MOVES if "padding" not in name])
def test_weights_states_and_scales_keep_their_bits(moved: Moved, name: str):
    check_bits(moved, name, MOVES)


@pytest.mark.nightly(5)
@pytest.mark.parametrize("name", [name for name in MOVES if "padding" not in name])
def test_the_next_step_has_the_loss_of_staying(moved: Moved, name: str):
    check_losses(moved, name, MOVES[name][0]["precision"])


@pytest.mark.nightly(5)
@pytest.mark.parametrize("number", range(len(MOVES["O3"][1])), ids=MOVES["O3"][1])
def test_every_element_is_stored_by_one_rank(moved: Moved, number: int):
    """Over the model-parallel ranks, of which data-parallel copies are equal: those that hold a copy agree who is first."""
    counts: dict[str, Tensor] = {}
    for places_of_rank in {tuple(rank["O3"][number][1]) for rank in moved.seen}:
        for place in places_of_rank:
            count = counts.setdefault(place.name, torch.zeros(place.shape, dtype=torch.int32))
            if place.first:
                count[tuple(slice(o, o + s) for o, s in zip(place.offset, place.sizes, strict=True))] += 1
    assert len(counts) > 50
    assert [name for name, count in counts.items() if not count.eq(1).all()] == []


# From tensor-parallel shards, whose scales are their own, to whole tensors


@pytest.mark.nightly(5)
def test_only_tensors_whose_shards_had_different_scales_are_requantised(moved: Moved):
    before, after = tensors(moved.saved("O3 from TP", 0)), tensors(moved.saved("O3 from TP", 1))
    assert before.keys() == after.keys()
    several = {key for key, found in before.items() if found.scales and found.scale_inv is None}
    assert several
    assert any(key.startswith("model/") for key in several)
    for key, found in before.items():
        error = (after[key].values() - found.values()).abs()
        if key not in several:
            assert tiny.same(bits(found), bits(after[key]))
            continue
        coarsest = max(float(scale) for _, scale in found.scales)
        assert after[key].scale_inv is not None
        assert float(after[key].scale_inv) <= coarsest  # a weight with a master is cast from that, with the scale of its amax
        assert error.max() <= 0.5 * of_dtype(found.payload.dtype).smallest * coarsest
        if not key.startswith("model/"):
            assert float(after[key].scale_inv) == coarsest
            of_the_coarsest = [part for part, scale in found.scales if float(scale) == coarsest]
            assert not any(error[part].any() for part in of_the_coarsest)


# A vocabulary padded to a multiple of another number


# All of it
