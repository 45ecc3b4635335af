"""The synchroniser over 2 and 4 ranks against the same average computed on one process. What the wires do is in test_exchange.py."""

import contextlib
import datetime
import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers import dist
from helpers.numerics import KINDS, make
from helpers.synced import merged, model_of, stamp, synced, synchronized_right
from msamp.comm.accumulate import ACCUMULATORS
from msamp.comm.grad_scaling import NOT_FINITE, exceeds, next_mu
from msamp.comm.grad_sync import GradSync
from msamp.numerics.formats import ALL, BF16, E4M3, E5M2, FP16, FP32, Format, by_name
from msamp.numerics.quantize import quantize
from msamp.numerics.scaling import scale_from_amax
from msamp.numerics.tensor import ScalingTensor, fp32_values
from msamp.parallel.data_parallel import grad_sync

INF, NAN = float("inf"), float("nan")
WORLDS = (2, pytest.param(4, marks=pytest.mark.nightly))


def give(model: nn.ParameterDict, gradients: dict[str, Tensor | None], turned: bool = False) -> None:
    """One backward that brings these gradients, in the order of the names or turned round."""
    names = [name for name, g in gradients.items() if g is not None]
    terms = [(model[name] * gradients[name].to(model[name].dtype)).sum() for name in (reversed(names) if turned else names)]
    if terms:
        sum(terms).backward()


def averages(sync: GradSync, model: nn.Module) -> dict[str, dict[int, tuple]]:
    """By name and first row: the averages that this rank has."""
    found: dict[str, dict[int, tuple]] = {}
    for name, p in model.named_parameters():
        assert p.grad is None
        pieces = [(piece.row, piece.grad) for piece in sync.owned(p) if piece.grad is not None]
        assert not (pieces and p.main_grad is not None)
        assert all(synchronized_right(g) for g in [p.main_grad, *(g for _, g in pieces)] if g is not None), name
        found[name] = {row: stamp(g) for row, g in ([(0, p.main_grad)] if p.main_grad is not None else pieces)}
    return found


def shared_scale(present: list[Tensor], fmt: Format) -> Tensor:
    scales = [scale_from_amax(g.float().abs().amax(), fmt.max) for g in present if g.any()]
    return torch.stack(scales).amin() if scales else torch.tensor(1.0)


def averaged(parts: list[Tensor | None], fmt: Format, dtype: torch.dtype) -> tuple | None:
    """The stamp of quantise -> FP32 sum in rank order -> quantise."""
    present = [g for g in parts if g is not None]
    if not present:
        return None
    filled = [torch.zeros_like(present[0]) if g is None else g for g in parts]
    shared = shared_scale(present, fmt) if fmt.scaled else torch.tensor(1.0)
    total = functools.reduce(torch.add, [quantize(g, shared, fmt).float() for g in filled])
    mean = total / (shared * len(parts))
    return stamp(ScalingTensor.quantize(mean, fmt, dtype=dtype) if fmt.scaled else mean.to(fmt.dtype))


# What several ranks do. One spawn a world size serves all tests of `ranks`.

SHAPES = ((33,), (3, 5, 7), (), (40, 9))
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"shard": False, "overlap": True},
    {"shard": True, "overlap": True, "bucket_elements": 120},
    {"shard": False, "overlap": False, "bucket_elements": 120},
    {"shard": True, "overlap": False},
)
EVERY = {f"{fmt}_{i}": shape for i, shape in enumerate(SHAPES) for fmt in ALL}


def gradient(step: int, rank: int, place: int, shape: tuple[int, ...]) -> Tensor | None:
    """Step 0: all there, of magnitudes far apart; 1: absent on some ranks or all, zero on some or all; 2: step 0 once more."""
    if step == 1 and (place % 7 == 0 or (place + rank) % 3 == 0):
        return None
    g = make(KINDS[place % 3], shape or (1,), 1000 * rank + place).view(shape) * 30.0 ** ((rank + place) % 5 - 2)
    return g * 0 if step == 1 and (place % 7 == 1 or (place + rank) % 3 == 1) else g


def exchanged(group, layout: dict[str, Any], dtype: torch.dtype) -> list:
    model = model_of(EVERY, dtype)
    sync = synced(model, group, **layout)
    rank, found = torch.distributed.get_rank(), []
    for step in range(3):
        give(model, {name: gradient(step, rank, i, shape) for i, (name, shape) in enumerate(EVERY.items())}, bool(rank % 2))
        sync.finish()
        found.append(averages(sync, model))
        sync.clear()
    return found


@dataclass(frozen=True)
class Scenario:
    """A parameter, and the gradients that it gets.

    Attributes:
        format: in which its gradient is sent.
        shape: of the parameter.
        gradient: (step or micro-batch, rank, normal numbers) -> the gradient; None: it has none.
    """

    format: Format
    shape: tuple[int, ...]
    gradient: Callable[[int, int, Tensor], Tensor | None] = lambda step, rank, g: g


def named(scenarios: dict[str, Scenario]) -> dict[str, Scenario]:
    """By the names of their parameters, from which `synced` reads the formats."""
    return {f"{scenario.format}_{name}": scenario for name, scenario in scenarios.items()}


def one_nan(g: Tensor) -> Tensor:
    g[3, 3] = NAN
    return g


FIFTH = torch.tensor(5)
MU_STEPS = 7
AT_THE_MAXIMUM = 448.0 * 2.0**-12
MU = named({
    "hot": Scenario(E4M3, (50, 40), lambda step, rank, g: torch.full_like(g, AT_THE_MAXIMUM) if step in (1, 2, 3) else g),
    "cold": Scenario(E5M2, (300,)),
    "gone": Scenario(FP16, (7, 7), lambda step, rank, g: None if step == 3 else one_nan(g) if (step, rank) == (4, 1) else g),
    "lone": Scenario(E4M3, (64,), lambda step, rank, g: torch.full_like(g, 1e-3).index_fill(0, FIFTH, 448.0)),
    "opposed": Scenario(E4M3, (8, 8), lambda step, rank, g: torch.full_like(g, (-1.0) ** rank * AT_THE_MAXIMUM)),  # two ranks: a sum of 0
    "plain": Scenario(BF16, (9,)),
})  # fmt: skip
MU_SHAPES = {name: scenario.shape for name, scenario in MU.items()}
SCALINGS: tuple[dict[str, Any], ...] = ({}, {"scaling": "pre"}, {"scaling": "post"}, {"mu_rule": "paper", "shard": True})


def overflowing(step: int, rank: int, name: str) -> Tensor | None:
    """The gradient of a parameter of `MU`."""
    return MU[name].gradient(step, rank, make("normal", MU_SHAPES[name], 100 * step + 10 * rank + list(MU).index(name)))


def scaled_by_mu(group, options: dict[str, Any]) -> tuple[list, dict]:
    model = model_of(MU_SHAPES)
    sync = synced(model, group, exchange="nccl", bucket_elements=2100, **options)
    found = []
    for step in range(MU_STEPS):
        give(model, {name: overflowing(step, torch.distributed.get_rank(), name) for name in MU_SHAPES})
        sync.finish()
        mu = {name: float(value) for name, value in sync.state_dict()["mu"].items()}
        found.append((averages(sync, model), mu, sync.statistics.shares(sync.peers)))
        sync.clear()
    return found, sync.state_dict()


PAIRS = {f"{fmt}_{i}": (5, 6) for fmt in (E4M3, BF16, FP32) for i in range(2)}
FAULTY = [name for name in PAIRS if name.endswith("0")]


def not_finite(group, **options: Any) -> dict[tuple[int, str], tuple]:
    """By the rank with the fault and the tensor: names whose average is not finite here, names that differ from a clean step's,
    names whose own gradient was not finite on this rank."""
    model = model_of(PAIRS)
    sync = synced(model, group, **options)
    found, clean = {}, {}
    for rank, faulty in [(-1, "before"), *itertools.product(range(sync.peers.ranks), FAULTY), (-1, "after")]:
        gradients = {name: make("normal", shape, sync.peers.rank * 10 + i) for i, (name, shape) in enumerate(PAIRS.items())}
        if rank == sync.peers.rank:
            gradients[faulty][3, 4] = (NAN, INF, -INF)[(rank + FAULTY.index(faulty)) % 3]
        give(model, gradients)
        sync.finish()
        now = averages(sync, model)
        clean = clean or now
        parts = {name: [p.main_grad, *(slot.grad for slot in sync.owned(p))] for name, p in model.named_parameters()}
        bad = {name for name, gs in parts.items() if any(not fp32_values(g).isfinite().all() for g in gs if g is not None)}
        own = {sync.names[p] for p, slot in zip(sync.params, sync.own_proposals.tolist(), strict=True) if slot == NOT_FINITE}
        found[rank, faulty] = (bad, {name for name in now if now[name] != clean[name]}, own)
        sync.clear()
    return found


USES: dict[str, Callable[[int, int], bool]] = {  # (micro-batch of three, rank) -> whether a parameter has a gradient in it
    "all": lambda i, rank: True,
    "early": lambda i, rank: i == 0,
    "mixed": lambda i, rank: i == (1 if rank % 2 else 2),
    "never": lambda i, rank: False,
}
MICRO_USES = {f"{fmt}_{use}": has for fmt in (E4M3, BF16) for use, has in USES.items()}
MICRO = dict.fromkeys(MICRO_USES, (6, 9))


def micro_batch(i: int, rank: int) -> dict[str, Tensor | None]:
    """The gradients of one of three."""
    g = {name: make("normal", shape, 100 * rank + 10 * i + place) for place, (name, shape) in enumerate(MICRO.items())}
    return {name: x if MICRO_USES[name](i, rank) else None for name, x in g.items()}


def accumulated(group, accumulate: str, **options: Any) -> list:
    """Averages of two steps of three micro-batches."""
    model = model_of(MICRO)
    sync = synced(model, group, accumulate=accumulate, bucket_elements=60, **options)
    found = []
    for _ in range(2):
        for i in range(3):
            with sync.no_sync() if i < 2 else contextlib.nullcontext():
                give(model, micro_batch(i, sync.peers.rank))
        sync.finish()
        found.append(averages(sync, model))
        sync.clear()
    return found


SAME = {"fp8-e4m3_a": (3,), "fp8-e4m3_b": (4,)}
OTHERS: dict[str, tuple[dict[str, tuple[int, ...]], torch.dtype]] = {
    "shape": ({"fp8-e4m3_a": (3,), "fp8-e4m3_b": (2, 2)}, torch.float32),
    "name": ({"fp8-e4m3_a": (3,), "fp8-e4m3_c": (4,)}, torch.float32),
    "order": ({"fp8-e4m3_b": (4,), "fp8-e4m3_a": (3,)}, torch.float32),
    "format": ({"fp8-e4m3_a": (3,), "fp8-e5m2_b": (4,)}, torch.float32),
    "fewer": ({"fp8-e4m3_a": (3,)}, torch.float32),
    "more": ({**SAME, "bf16_c": (5,)}, torch.float32),
    "dtype": (SAME, torch.bfloat16),
}


def refusal(build) -> str:
    try:
        build()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def different_models(group) -> dict[str, str]:
    last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
    found = {}
    for what, (shapes, dtype) in OTHERS.items():
        model = model_of(shapes, dtype) if last else model_of(SAME)
        found[what] = refusal(functools.partial(synced, model, group))
    model = model_of(SAME)
    few = torch.distributed.new_group(timeout=datetime.timedelta(seconds=3))
    known = {p: E4M3 for name, p in model.items() if not (last and name.endswith("b"))}
    found["without format"] = refusal(lambda: grad_sync(model, known, few))
    return found


def bytes_sent(group, **options: Any) -> dict:
    model = model_of({**{f"fp8-e4m3_{i}": (16,) for i in range(4)}, "fp32_n": (8,)})
    sync = synced(model, group, **options)
    assert sync.sent.rows() == {}
    give(model, {name: torch.ones_like(p) for name, p in model.items()})
    sync.finish()
    return sync.sent.rows()


def several_ranks() -> dict:
    group = torch.distributed.group.WORLD
    return {
        "exchanged": [exchanged(group, layout, dtype) for layout in LAYOUTS for dtype in (torch.float32, torch.bfloat16)],
        "mu": [scaled_by_mu(group, options) for options in SCALINGS],
        "not finite": [not_finite(group), not_finite(group, exchange="nccl", scaling="post"), not_finite(group, shard=True)],
        "micro": {name: [accumulated(group, name, overlap=overlap) for overlap in (True, False)] for name in ACCUMULATORS},
        "different": different_models(group),
        "bytes": [bytes_sent(group), bytes_sent(group, shard=True), bytes_sent(group, shard=True, exchange="nccl")],
    }


@pytest.fixture(scope="module", params=WORLDS)
def ranks(request) -> list[dict]:
    return dist.run(several_ranks, request.param)


@pytest.mark.parametrize("case", range(2 * len(LAYOUTS)))
def test_every_layout_gives_the_average_of_one_process_bit_for_bit(ranks, case):
    dtype = (torch.float32, torch.bfloat16)[case % 2]
    for step, (i, (name, shape)) in itertools.product(range(3), enumerate(EVERY.items())):
        parts = [gradient(step, rank, i, shape) for rank in range(len(ranks))]
        found = merged([rank["exchanged"][case][step] for rank in ranks], name)
        want = averaged([g if g is None else g.to(dtype) for g in parts], by_name(name.split("_")[0]), dtype)
        assert found == want, (name, step, LAYOUTS[case // 2])
        if case // 2 in (0, 2):  # not sharded: every rank has all that there is
            assert all(bool(rank["exchanged"][case][step][name]) == (want is not None) for rank in ranks)


@pytest.mark.parametrize("case", range(len(SCALINGS)))
def test_nccl_over_gloo_follows_mu(ranks, case):
    """The sum in the format itself, in rank order; mu by the counts of it."""
    rule, scaling = SCALINGS[case].get("mu_rule", "halve"), SCALINGS[case].get("scaling", "auto")
    n = len(ranks)
    mu = dict.fromkeys([name for name, scenario in MU.items() if scenario.format.scaled], torch.ones(1, dtype=torch.float64))
    for step, name in itertools.product(range(MU_STEPS), list(mu)):
        fmt = MU[name].format
        found = [rank["mu"][case][0][step] for rank in ranks]
        average = merged([x[0] for x in found], name)
        parts = [overflowing(step, rank, name) for rank in range(n)]
        if parts[0] is None:
            assert average is None
        elif not all(g.isfinite().all() for g in parts):
            assert torch.frombuffer(bytearray(average[4]), dtype=torch.float32).isnan()
        else:
            times = mu[name].float() if scaling == "auto" else torch.tensor(1 / n if scaling == "pre" else 1.0)
            factor = shared_scale(parts, fmt) * times
            payloads = [quantize(g, factor, fmt) for g in parts]
            total = functools.reduce(lambda a, b: quantize(a.float() + b.float(), 1.0, fmt), payloads)
            assert average[3:] == stamp(ScalingTensor(total, 1 / (factor * n)))[3:], (name, step)
            full = [(x.float().abs() == fmt.max).sum() for x in (*payloads, total)]
            size = torch.tensor([total.numel()])
            over = exceeds(torch.stack(full[:-1]).amax().view(1), size) | exceeds(full[-1].view(1), size)
            mu[name] = next_mu(mu[name], over, n, rule)
        if scaling == "auto":
            assert all(x[1][name] == mu[name].item() for x in found), (name, step)
        else:
            assert all(x[1] == {} for x in found)
    if scaling == "auto":
        assert min(x[1]["fp8-e4m3_hot"] for x in found) < 0.6  # the overflow was one
        assert found[0][1]["fp8-e4m3_lone"] > 1
        assert found[0][1]["fp8-e4m3_opposed"] < 0.6  # each rank saturates, and no sum does


@pytest.mark.parametrize("case", [0, 1, 2])
def test_a_fault_of_one_rank_is_in_that_tensor_on_every_rank_and_in_no_other(ranks, case):
    for rank, name in itertools.product(range(len(ranks)), FAULTY):
        for found in (x["not finite"][case][rank, name] for x in ranks):
            if case < 2:
                assert found[:2] == ({name}, {name}), rank
            else:  # sharded: on its owners
                assert found[0] == found[1] <= {name}, rank
        assert [x["not finite"][case][rank, name][2] for x in ranks] == [{name} if i == rank else set() for i in range(len(ranks))]
        assert any(x["not finite"][case][rank, name][0] for x in ranks)
    assert all(x["not finite"][case][-1, "after"] == (set(), set(), set()) for x in ranks)


def total_of(name: str, rank: int, accumulate: str) -> Tensor | None:
    """The micro-batches of a parameter added up in order, as the flag says; what comes with the last one only is left as it is."""
    fmt = by_name(name.split("_")[0])
    total: Tensor | None = None
    for i, g in enumerate(micro_batch(i, rank)[name] for i in range(3)):
        if g is None or (i == 2 and total is None):
            total = g if total is None else total
        elif accumulate == "fp8" and fmt.scaled and i < 2:  # the last sum is rounded by the exchange
            total = ScalingTensor.quantize(g if total is None else total + g, fmt).dequantize()
        else:
            dtype = torch.float32 if accumulate == "fp32" or (accumulate == "fp8" and fmt.scaled) else torch.bfloat16
            total = g.to(dtype) if total is None else (total.float() + g).to(dtype)
    return total


@pytest.mark.parametrize("accumulate", [name for name in ACCUMULATORS if name != "fp8-sr"])
def test_micro_batches_add_up_and_are_averaged_once(ranks, accumulate):
    for overlap, name in itertools.product((0, 1), MICRO):
        runs = [rank["micro"][accumulate][overlap] for rank in ranks]
        want = averaged([total_of(name, rank, accumulate) for rank in range(len(ranks))], by_name(name.split("_")[0]), torch.float32)
        assert (want is None) == name.endswith("never")
        assert merged([run[0] for run in runs], name) == merged([run[1] for run in runs], name) == want, (name, overlap)


def test_different_models_are_refused_on_every_rank(ranks):
    last = len(ranks) - 1
    a, b = "fp8-e4m3_a (3,) torch.float32, gradient fp8-e4m3", "fp8-e4m3_b (4,) torch.float32, gradient fp8-e4m3"
    first = {
        "shape": (b, "fp8-e4m3_b (2, 2) torch.float32, gradient fp8-e4m3"),
        "name": (b, "fp8-e4m3_c (4,) torch.float32, gradient fp8-e4m3"),
        "order": (a, b),
        "format": (b, "fp8-e5m2_b (4,) torch.float32, gradient fp8-e5m2"),
        "fewer": (b, "nothing"),
        "more": ("nothing", "bf16_c (5,) torch.float32, gradient bf16"),
        "dtype": (a, "fp8-e4m3_a (3,) torch.bfloat16, gradient fp8-e4m3"),
    }
    for what, (mine, theirs) in first.items():
        want = (
            f"ValueError: the ranks' models differ: where rank 0 has {mine}, rank {last} has {theirs}; build the same model on every rank"
        )
        assert [rank["different"][what] for rank in ranks] == [want] * len(ranks)


def test_bytes_on_the_wire(ranks):
    """64 elements in E4M3 and 8 in FP32: (N - 1) / N of them a rank each way; 5 scales of 4 bytes, and 4 amaxes where all round."""
    n = len(ranks)
    wire = (n - 1) * (64 + 4 * 8)
    for case, (slots, gathered) in enumerate([(36, wire), (20, 0), (20, n * (n - 1) * 6 * 4 * 8)]):
        rows = [rank["bytes"][case] for rank in ranks]
        assert sum(row["weight", "all-to-all"] for row in rows) == wire
        assert [row["weight", "all-reduce"] for row in rows] == [2 * (n - 1) * slots // n] * n
        assert sum(row.get(("weight", "all-gather"), 0) for row in rows) == gathered
        assert {kind for row in rows for kind, _ in row} == {"weight"}
