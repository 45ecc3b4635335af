"""Greedy ZeRO: the bits of LowPrecisionOptimizer at any number of ranks, and no state held twice.

Each number of ranks is one run of `everything` (a start of processes takes seconds); the tests look at what it returns.
"""

import contextlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from helpers import dist
from helpers.numerics import bits, make
from msamp.numerics.formats import BF16, COAT_E4M3, COAT_E5M2, E4M3, FP32
from msamp.numerics.recipe import FP32_STATES, StateFormats, by_name
from msamp.numerics.tensor import ScalingTensor, fp32_values
from msamp.optim.optimizer import LowPrecisionOptimizer
from msamp.parallel.data_parallel import grad_sync
from msamp.parallel.greedy_zero import ZeRO

WORLDS = (2, pytest.param(4, marks=pytest.mark.nightly))
LEVELS = ("fp32", "fp16-amp", "bf16", "collage-plus", "collage-fp8", "O1", "O2", "O3")
FEW = ("fp16-amp", "bf16", "collage-fp8", "O3")  # each kind of gradient, master and moment
BUCKET = 1200  # elements: several buckets of several tensors, and rows of one tensor on several ranks
# Odd numbers of rows, a single row, one to three dimensions and none; the last is never used.
LINEAR = {"first": (33, 24), "cube": (5, 4, 6), "row": (1, 50), "other": (7, 40), "idle": (3, 8)}
VECTORS = {"gain": (41,), "shift": ()}
VARIANTS: dict[str, dict[str, Any]] = {
    "clipped": {},
    "Adam's decay, micro-batches": {"clip_grad": None, "decoupled": False, "micro_batches": 3},
    "summed as in the paper": {"exchange": "nccl"},
}
# Every level, and every variant with gradients in one scaled format and in none.
CASES = [(level, variant) for level in LEVELS for variant in VARIANTS if variant == "clipped" or level in ("bf16", "O3")]
CASES += [("O2", "written from outside")]  # whose weights are their own masters
VARIANTS["written from outside"] = {"written": True}
POISONED = dict(zip(FEW, ("shift", "table", "row", "cube"), strict=True))
# Of a GPT with 4 layers of width 48 and 500 tokens.
GPT = [(500, 48), *[(144, 48), (48, 48), (192, 48), (48, 192), (48,), (48,)] * 4]
Bits = dict[str, torch.Tensor]


class Weights(nn.Module):
    """A table of embeddings, weights in the recipe's format, and vectors."""

    def __init__(self, level: str) -> None:
        super().__init__()
        recipe = by_name(level)
        for i, (name, shape) in enumerate({"table": (37, 24), **LINEAR, **VECTORS}.items()):
            x = (make("normal", shape, seed=i) * 0.1).to(FP32.dtype if name in VECTORS else recipe.compute_dtype)
            x = ScalingTensor.quantize(x, recipe.weight) if name in LINEAR and recipe.fp8 else x
            self.register_parameter(name, nn.Parameter(x))


class Loop:
    """A model, its synchroniser and its optimizer, sharded or not, on the ranks that there are."""

    def __init__(self, level: str, zero: bool, micro_batches: int = 1, *, written: bool = False, **options: Any) -> None:
        self.model, self.micro_batches, self.written = Weights(level), micro_batches, written
        self.names = {p: name for name, p in self.model.named_parameters()}
        self.distributed = torch.distributed.is_initialized()
        self.rank = torch.distributed.get_rank() if self.distributed else 0
        settings = {"clip_grad": options.pop("clip_grad", 0.5), "decoupled": options.pop("decoupled", True) or level.startswith("collage")}
        groups = self.groups(by_name(level))
        formats = {p: group["formats"].grad for group in groups for p in group["params"]}
        ranks = torch.distributed.group.WORLD if self.distributed else None
        self.sync = grad_sync(self.model, formats, ranks, bucket_elements=BUCKET, shard=zero, **options)
        self.optimizer = LowPrecisionOptimizer(groups, lr=0.01, weight_decay=0.1, shard=ZeRO(self.sync) if zero else None, **settings)

    def groups(self, recipe: Any) -> list[dict[str, Any]]:
        """Four groups in three sorts of formats, in an order that is not the model's."""
        named = dict(self.model.named_parameters())
        table = replace(recipe.states, grad=BF16) if recipe.fp8 else recipe.states
        other = StateFormats(BF16, E4M3, BF16, E4M3) if recipe.fp8 else recipe.states
        linear = replace(recipe.states, m=COAT_E4M3, v=COAT_E5M2) if recipe.name == "bf16" else recipe.states
        return [
            {"params": [named[name] for name in VECTORS], "formats": FP32_STATES, "weight_decay": 0.0},
            {"params": [named["other"]], "formats": other, "betas": (0.8, 0.95)},
            {"params": [named[name] for name in LINEAR if name != "other"], "formats": linear},
            {"params": [named["table"]], "formats": table, "lr": 0.02},
        ]

    def step(self, number: int, same: bool = False, without: tuple[str, ...] = (), poison: str = "") -> None:
        """One step with made-up gradients.

        same: the ranks' gradients are equal, and their average exact; poison: one NaN in a gradient of the last rank.
        """
        if self.written and number == 1:  # three times the weights, with other scales
            with torch.no_grad():
                for p in [p for p, name in self.names.items() if name != "idle"]:
                    x = 3 * fp32_values(p)
                    p.copy_(ScalingTensor.quantize(x, p.format) if isinstance(p, ScalingTensor) else x)
        last = self.rank == (torch.distributed.get_world_size() if self.distributed else 1) - 1
        for micro in range(self.micro_batches):
            with self.sync.no_sync() if micro < self.micro_batches - 1 else contextlib.nullcontext():
                for i, (name, p) in reversed(list(enumerate(self.model.named_parameters()))):
                    if name == "idle" or name in without or (name == "cube" and self.micro_batches - 1 == micro > 0):
                        continue
                    x = make("log-normal", p.shape, seed=10_000 * number + 1_000 * micro + 100 * (not same) * self.rank + i)
                    if name == poison and last:
                        x.view(-1)[-1] = float("nan")
                    p.grad = x.bfloat16().to(p.dtype)  # few digits: sums of equal gradients are exact in FP32
                    self.sync.take(p)
        self.sync.finish()
        self.optimizer.step()
        self.sync.clear()

    def run(self, steps: range, **settings: Any) -> "Loop":
        for number in steps:
            self.step(number, **settings)
        return self

    def load(self, saved: dict[str, Any]) -> None:
        with torch.no_grad():
            for p, q in zip(self.names, saved["weights"], strict=True):
                p.copy_(q)
        self.optimizer.load_state_dict(dist.read(saved["saved"]))

    def weights(self) -> Bits:
        return flat({name: p.detach() for p, name in self.names.items()})

    def held(self) -> Bits:
        """The weights, and the states that this process has, wherever they are."""
        states = {
            f"{self.names[x.param]} {x.rows} {k}": v for x in self.optimizer.holdings() for k, v in self.optimizer.state[x.weight].items()
        }
        return {**self.weights(), **flat(states)}

    def whole(self) -> Bits:
        """The weights, and on the first rank all states."""
        return {**self.weights(), **flat({f"{i} {k}": v for i, s in self.optimizer.state_dict()["state"].items() for k, v in s.items()})}


def flat(tensors: dict[str, torch.Tensor]) -> Bits:
    parts = {}
    for name, x in tensors.items():
        if isinstance(x, ScalingTensor):
            parts |= {name: bits(x.payload).clone(), f"{name} scale_inv": bits(x.scale_inv).clone()}
        else:
            parts[name] = bits(x).clone()
    return parts


def differences(a: Bits, b: Bits) -> list[str]:
    """Names of what differs; what only one side has counts on the first rank, which alone has the states."""
    first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    return [
        name
        for name in (a.keys() | b.keys() if first else a.keys() & b.keys())
        if name not in a or name not in b or not a[name].equal(b[name])
    ]


# ------------------------------------------------------------------------------------------ what runs on each number of ranks


def on_and_off(level: str, variant: str) -> dict[str, Any]:
    on, off = (Loop(level, zero, **VARIANTS[variant]).run(range(2)) for zero in (True, False))
    norms = [float(x.optimizer.grad_norm) for x in (on, off)]
    cut = any(bucket.cut for bucket in on.sync.buckets)
    a, b, start = on.whole(), off.whole(), Loop(level, False).weights()
    moved = [name for name in start if not name.endswith("scale_inv") and not start[name].equal(a[name])]
    return {"differences": differences(a, b), "norms": norms, "weights": on.weights(), "moved": moved, "compared": len(a), "cut": cut}


def same_gradients(level: str, reference: dict[str, Any]) -> dict[str, Any]:
    """Three steps and what is saved then; two more; the same two after loading what one process saved."""
    loop = Loop(level, True).run(range(3), same=True)
    result: dict[str, Any] = {"saved": dist.written(loop.optimizer.state_dict()), "straight": loop.run(range(3, 5), same=True).whole()}
    loaded = Loop(level, True).run(range(9, 10), same=True)
    loaded.load(reference)
    result["loaded"] = loaded.run(range(3, 5), same=True).whole()
    return result


def fp32_against_torch(clip_grad: float | None) -> float:
    """Largest difference from torch's AdamW after torch's clipping, in units of the learning rate."""
    loop = Loop("fp32", True, clip_grad=clip_grad)
    twins = {p: nn.Parameter(p.detach().clone()) for p in loop.names}
    settings = [{k: v for k, v in group.items() if k in ("lr", "betas", "weight_decay")} for group in loop.optimizer.param_groups]
    groups = zip(loop.optimizer.param_groups, settings, strict=True)
    theirs = torch.optim.AdamW([{"params": [twins[p] for p in group["params"]], **own} for group, own in groups])
    ranks = torch.distributed.get_world_size() if loop.distributed else 1
    for number in range(6):
        loop.step(number)
        for i, (p, twin) in enumerate(twins.items()):
            if loop.names[p] != "idle":
                each = [make("log-normal", p.shape, seed=10_000 * number + 100 * rank + i).bfloat16().double() for rank in range(ranks)]
                twin.grad = (sum(each) / ranks).float()
        if clip_grad is not None:
            norm = torch.nn.utils.clip_grad_norm_(twins.values(), clip_grad)
            assert abs(float(loop.optimizer.grad_norm) / float(norm) - 1) < 1e-5
        theirs.step()
    return max(float((p - twin).detach().abs().max()) for p, twin in twins.items()) / 0.01


def skipping(level: str, poison: str) -> dict[str, Any]:
    """Two steps, with and without two more whose gradients are not finite on the last rank: before anything else, and between them."""
    with_bad, plain = Loop(level, True), Loop(level, True)
    changed = []
    for number in range(2):
        before = with_bad.held()
        with_bad.step(100 + number, poison=poison)
        changed += differences(with_bad.held(), before)
        with_bad.step(number)
        plain.step(number)
    return {"changed": changed, "later": differences(with_bad.held(), plain.held()), "skipped": with_bad.optimizer.skipped_steps}


def unused(level: str) -> dict[str, Any]:
    """`first` has a gradient on no rank in step 1, `other` and `table` only on rank 0 in step 2."""
    loops = [Loop(level, zero) for zero in (True, False)]
    for loop in loops:
        loop.step(0)
        before = loop.held()
        loop.step(1, without=("first",))
        left_alone = not any(name.startswith("first") for name in differences(loop.held(), before))
        loop.step(2, without=("other", "table") if loop.rank > 0 else ())
        assert left_alone
    return {"differences": differences(loops[0].whole(), loops[1].whole()), "weights": loops[0].weights()}


def memory(level: str) -> tuple[int, int]:
    """Bytes of the states that this rank holds, and of all of them on one rank, without scales and step counts."""

    def measure(zero: bool) -> int:
        recipe = by_name(level)
        model = nn.ParameterList([nn.Parameter(ScalingTensor.quantize(make("normal", shape), recipe.weight)) for shape in GPT])
        group = torch.distributed.group.WORLD if torch.distributed.is_initialized() else None
        sync = grad_sync(model, dict.fromkeys(model, recipe.states.grad), group, shard=zero)
        optimizer = LowPrecisionOptimizer(model, formats=recipe.states, shard=ZeRO(sync) if zero else None)
        for p in model:
            p.grad = torch.ones_like(p)
            sync.take(p)
        sync.finish()
        optimizer.step()
        states = [x for state in optimizer.state.values() for key, x in state.items() if key != "step"]
        return sum(x.payload.nbytes if isinstance(x, ScalingTensor) else x.nbytes for x in states)

    return measure(True), measure(False)


def of_a_cut_vector() -> str:
    model = nn.ParameterList([nn.Parameter(torch.ones(4096))])
    sync = grad_sync(model, dict.fromkeys(model, FP32), torch.distributed.group.WORLD, shard=True)
    with pytest.raises(ValueError, match="vector") as caught:
        LowPrecisionOptimizer(model, formats=replace(FP32_STATES, m=COAT_E4M3, v=COAT_E4M3), shard=ZeRO(sync))
    return str(caught.value)


def everything(references: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """All that the tests look at, on this number of ranks: this rank's view."""
    return {
        "on and off": {(level, variant): on_and_off(level, variant) for level, variant in CASES},
        "same gradients": {level: same_gradients(level, references[level]) for level in FEW},
        "torch": {clip: fp32_against_torch(clip) for clip in (None, 0.5)},
        "skipping": {level: skipping(level, name) for level, name in POISONED.items()},
        "unused": {level: unused(level) for level in ("bf16", "O3")},
        "memory": {level: memory(level) for level in ("O1", "O2", "O3")},
        "cut vector": of_a_cut_vector(),
    }


# ------------------------------------------------------------------------------------------------------------------ the tests


def reference(level: str) -> dict[str, Any]:
    """LowPrecisionOptimizer on one process after three and after five steps."""
    loop = Loop(level, False).run(range(3), same=True)
    saved = {"weights": [p.detach().clone() for p in loop.names], "saved": dist.written(loop.optimizer.state_dict())}
    return {**saved, "straight": loop.run(range(3, 5), same=True).whole()}


@pytest.fixture(scope="module")
def references() -> dict[str, dict[str, Any]]:
    return {level: reference(level) for level in FEW}


@pytest.fixture(scope="module", params=WORLDS, ids=("DP 2", "DP 4"))
def seen(request: pytest.FixtureRequest, references: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """What every rank has seen."""
    return dist.run(everything, request.param, references, timeout=600)


def agree(all_weights: list[Bits]) -> bool:
    return all(not differences(all_weights[0], other) for other in all_weights)


@pytest.mark.parametrize(("level", "variant"), CASES)
def test_on_and_off_are_the_same_bits(seen, level, variant):
    ranks = [rank["on and off"][level, variant] for rank in seen]
    assert [rank["differences"] for rank in ranks] == [[]] * len(ranks)
    assert len({norm for rank in ranks for norm in rank["norms"]}) == 1
    assert agree([rank["weights"] for rank in ranks])
    assert sorted(ranks[0]["moved"]) == sorted({"table", *LINEAR, *VECTORS} - {"idle"})
    assert [rank["cut"] for rank in ranks] == [True] * len(ranks)
    assert ranks[0]["compared"] > 4 * len(ranks[0]["moved"]), "states are compared, too"


@pytest.mark.parametrize("level", FEW)
def test_the_same_gradients_give_the_same_weights_and_states_at_any_number_of_ranks(seen, references, level):
    assert differences(seen[0]["same gradients"][level]["straight"], references[level]["straight"]) == []


@pytest.mark.parametrize("level", FEW)
def test_a_state_of_one_process_goes_on_at_any_number_of_ranks(seen, references, level):
    assert differences(seen[0]["same gradients"][level]["loaded"], references[level]["straight"]) == []


@pytest.mark.parametrize("level", FEW)
def test_what_any_number_of_ranks_saves_is_what_one_process_saves_and_goes_on_there(seen, references, level):
    file = seen[0]["same gradients"][level]["saved"]
    saved, want = dist.read(file), dist.read(references[level]["saved"])
    assert saved["param_groups"] == want["param_groups"]
    assert [list(state) for state in saved["state"].values()] == [list(state) for state in want["state"].values()]
    assert [dist.read(rank["same gradients"][level]["saved"])["state"] for rank in seen[1:]] == [{}] * (len(seen) - 1)
    for zero in (True, False):
        loop = Loop(level, zero)
        loop.load({**references[level], "saved": file})
        assert differences(loop.run(range(3, 5), same=True).whole(), references[level]["straight"]) == []


@pytest.mark.parametrize("clip_grad", [None, 0.5])
def test_fp32_is_torch_s_adamw_after_torch_s_clipping(seen, clip_grad):
    assert max(rank["torch"][clip_grad] for rank in seen) < 1e-4


@pytest.mark.parametrize("level", FEW)
def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(seen, level):
    for rank in seen:
        assert rank["skipping"][level] == {"changed": [], "later": [], "skipped": 2}


def test_a_vector_that_is_cut_across_groups_of_moments_is_refused(seen):
    assert "is a vector cut over several ranks, across groups of COAT's moments; use other formats" in seen[0]["cut vector"]


@pytest.mark.parametrize("level", ["bf16", "O3"])
def test_unused_parameters(seen, level):
    assert [rank["unused"][level]["differences"] for rank in seen] == [[]] * len(seen)
    assert agree([rank["unused"][level]["weights"] for rank in seen])


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_nothing_is_held_twice_and_no_rank_holds_much_more_than_another(seen, level):
    held, (total, *_) = zip(*(rank["memory"][level] for rank in seen), strict=True)
    assert sum(held) == total
    row = 4 * 48 * total / sum(torch.Size(shape).numel() for shape in GPT)
    assert max(held) <= 1.05 * total / len(held) + row
