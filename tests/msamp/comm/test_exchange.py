"""Exchanges by name, and the three wires: bit for bit over 2 and 4 ranks what one process computes from their definition.

The definition here shares no code with the library but the order of its operations: scales are searched in FP64, casts are torch's.
"""

import functools
import itertools
import math

import pytest
import torch
from torch import Tensor

from helpers import dist
from helpers.choices import each_value
from helpers.numerics import KINDS, SMALL, bits, codes, floats, golden, make
from msamp.comm import exchange as exchanges
from msamp.comm.bucket import Bucket
from msamp.comm.collectives import Peers
from msamp.comm.counters import WireBytes
from msamp.comm.exchange import Exchange, FP32SumWire, NCCLWire, PlainWire, pack_scaled, sum_in_rank_order
from msamp.comm.partition import Piece, plan_buckets
from msamp.numerics.formats import BF16, E4M3, E5M2, FP16, FP32, Format, by_name

SCALED = (E4M3, E5M2, FP16)
SHAPES = [(7,), (3, 5, 7), (), (65, 33), (0, 4), (130, 3), (1,), SMALL]
WORLDS = (2, pytest.param(4, marks=pytest.mark.nightly))
MAGNITUDES = (1.0, 1e-3, 300.0, 1e-6)  # of the ranks, in this order and turned by one from tensor to tensor
FACTORS = {"post": lambda ranks: 1.0, "pre": lambda ranks: 1 / ranks, "auto": lambda ranks: 4.0 ** (1 / 3), "quarter": lambda ranks: 0.25}


@functools.cache
def gradients(kind: str, rank: int) -> list[Tensor]:
    """One a shape: magnitudes far apart but for the last; the second is zero on rank 0, the third zero everywhere."""
    made = [MAGNITUDES[(rank + i) % 4] * make(kind, shape or (1,), 100 * rank + i).view(shape) for i, shape in enumerate(SHAPES)]
    made[1] *= rank != 0
    made[2] *= 0
    made[-1] = make(kind, SHAPES[-1], rank)
    return made


def scale_of(amax: float, limit: float) -> float:
    """The largest power of two with amax * scale <= limit; 1 without an amax."""
    scale = 2.0 ** math.floor(math.log2(limit / amax)) if amax else 1.0
    return scale / 2 if amax * scale > limit else scale


def shared_scale(parts: list[Tensor], fmt: Format) -> float:
    return min((scale_of(float(g.abs().max()), fmt.max) for g in parts if g.any()), default=1.0)


def cast(x: Tensor, fmt: Format) -> Tensor:
    return x.clamp(-fmt.max, fmt.max).to(fmt.dtype) if fmt.scaled else x.to(fmt.dtype)


def fp32_sum(parts: list[Tensor], fmt: Format) -> tuple[Tensor, float, Tensor]:
    """Payload and scale of the averaged gradient, and the FP32 mean that it was rounded from, times the shared scale."""
    shared = shared_scale(parts, fmt)
    total, *others = [cast(g.float() * shared, fmt).float() for g in parts]
    for payload in others:
        total = total + payload
    mean = total / (shared * len(parts))
    scale = scale_of(float(mean.abs().max()) if mean.numel() else 0.0, fmt.max)
    return cast(mean * scale, fmt), scale, mean * shared


def fp8_sum(parts: list[Tensor], fmt: Format, mu: float) -> tuple[Tensor, Tensor]:
    """Payload and scale_inv of the sum in the format itself, rank after rank."""
    factor = torch.tensor(shared_scale(parts, fmt)) * torch.tensor(mu)
    total, *others = [cast(g.float() * factor, fmt) for g in parts]
    for payload in others:
        total = cast(total.float() + payload.float(), fmt)
    return total, 1 / (factor * len(parts))


def bucket_of(shapes, fmt: Format, peers: Peers, limit: float, device="cpu") -> Bucket:
    (plan,) = plan_buckets(shapes, [0] * len(shapes), peers.ranks, 10**9, bucket_limit=limit, limit=limit).buckets
    params = [torch.zeros(shape, device=device) for shape in shapes]
    return Bucket(params, [str(i) for i in range(len(shapes))], fmt, plan.pieces, peers.ranks, peers.rank)


def exchange(wire, fmt: Format, grads: list[Tensor], factor: Tensor, peers: Peers, shard: bool, limit: float = 0.05) -> dict:
    """Pack, reduce, and put back together: by (tensor, row) the payload, and what this rank knows of the scales."""
    device = grads[0].device
    bucket = bucket_of([g.shape for g in grads], fmt, peers, limit, device)
    flat = wire.pack(bucket, grads, factor.to(device))
    payloads = bucket.unflatten(flat.clone())
    reduced = wire.reduce(bucket, flat, factor.to(device), peers, shard)
    pieces, reference = {}, reduced.reference()
    for piece in bucket.owned:
        start = piece.start - bucket.own.start
        place = slice(start, start + piece.elements)
        pieces[piece.index, piece.row] = (bits(reduced.own[place]), bits(reference[place]))
    return {
        "pieces": pieces,
        "dtypes": (reduced.own.dtype, reference.dtype),
        "scale_inv": None if reduced.scale_inv is None else reduced.scale_inv.cpu(),
        "cut": bucket.cut,
        "flat": None if reduced.flat is None else bits(reduced.flat),
        "payloads": [bits(x) for x in payloads],
    }


def alone(g: Tensor, fmt: Format, ranks: int = 1) -> Bucket:
    return Bucket([g], ["alone"], fmt, [Piece(0, 0, g.shape[0] if g.dim() else 1, 0)], ranks, 0)


def factors_of(kind: str, fmt: Format, ranks: int, mu: float) -> Tensor:
    parts = zip(*(gradients(kind, rank) for rank in range(ranks)), strict=True)
    return torch.tensor([shared_scale(list(tensors), fmt) for tensors in parts]) * torch.tensor(mu)


def several_ranks() -> dict:
    peers = Peers(torch.distributed.group.WORLD, WireBytes())
    found = {}
    for kind in KINDS:
        grads = gradients(kind, peers.rank)
        for fmt in SCALED:
            one = factors_of(kind, fmt, peers.ranks, 1.0)
            for shard, limit in itertools.product((False, True), (0.05, math.inf)):
                found["fp32-sum", fmt.name, kind, shard, limit] = exchange(FP32SumWire(fmt), fmt, grads, one, peers, shard, limit)
            for name, mu in FACTORS.items():
                factor = factors_of(kind, fmt, peers.ranks, mu(peers.ranks))
                found["nccl", fmt.name, kind, name] = exchange(NCCLWire(fmt), fmt, grads, factor, peers, False)
        for fmt in (BF16, FP32):
            found["plain", fmt.name, kind] = exchange(PlainWire(fmt), fmt, grads, torch.ones(len(SHAPES)), peers, True)
    vectors = golden("exchange_fp32_sum")
    if peers.ranks == len(vectors["ranks"]):
        factor = torch.tensor([vectors["shared"]])
        found["golden"] = exchange(FP32SumWire(E4M3), E4M3, [floats(vectors["ranks"][peers.rank])], factor, peers, False)
    return found


@pytest.fixture(scope="module", params=WORLDS)
def ranks(request) -> list[dict]:
    return dist.run(several_ranks, request.param)


def whole(ranks: list[dict], key, tensor: int, which: int = 0) -> Tensor:
    """A tensor from its owners' pieces, flat: the payload, or the reference values of its underflow."""
    pieces = {row: x[which] for rank in ranks for (i, row), x in rank[key]["pieces"].items() if i == tensor}
    return torch.cat([pieces[row] for row in sorted(pieces)]).view(ranks[0][key]["dtypes"][which])


def parts_of(ranks: list[dict], kind: str, tensor: int) -> list[Tensor]:
    return [gradients(kind, rank)[tensor] for rank in range(len(ranks))]


@each_value(kind=KINDS, fmt=SCALED)
def test_fp32_sum_is_quantise_sum_quantise_on_one_process(ranks, fmt, kind):
    for shard, limit in itertools.product((False, True), (0.05, math.inf)):
        key = ("fp32-sum", fmt.name, kind, shard, limit)
        assert ranks[0][key]["cut"] == (limit < 1)
        for i in range(len(SHAPES)):
            payload, scale, mean = fp32_sum(parts_of(ranks, kind, i), fmt)
            assert bits(whole(ranks, key, i)).equal(bits(payload)), (key, SHAPES[i])
            assert whole(ranks, key, i, 1).eq(mean.flatten()).all(), (key, SHAPES[i])
            holders = [rank for rank in ranks if not shard or any(piece[0] == i for piece in rank[key]["pieces"])]
            assert {float(rank[key]["scale_inv"][i]) for rank in holders} == {1 / scale}, (key, SHAPES[i])


@each_value(scaling=FACTORS, fmt=SCALED)
def test_nccl_over_gloo_is_the_sum_in_the_format_in_rank_order(ranks, fmt, scaling):
    for kind, i in itertools.product(KINDS, range(len(SHAPES))):
        key = ("nccl", fmt.name, kind, scaling)
        payload, scale_inv = fp8_sum(parts_of(ranks, kind, i), fmt, FACTORS[scaling](len(ranks)))
        assert bits(whole(ranks, key, i)).equal(bits(payload)), (key, SHAPES[i])
        assert {float(rank[key]["scale_inv"][i]) for rank in ranks} == {float(scale_inv)}, (key, SHAPES[i])


@each_value(kind=KINDS, fmt=[BF16, FP32])
def test_plain_gradients_are_summed_in_fp32_and_rounded_once(ranks, fmt, kind):
    for i in range(len(SHAPES)):
        total = torch.zeros(SHAPES[i])
        for g in parts_of(ranks, kind, i):
            total = total + g.to(fmt.dtype).float()
        want = (total / len(ranks)).to(fmt.dtype)
        assert whole(ranks, ("plain", fmt.name, kind), i).eq(want.flatten()).all()
        assert all(rank["plain", fmt.name, kind]["scale_inv"] is None for rank in ranks)


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [4], indirect=True)
def test_golden_exchange_on_4_processes(ranks):
    vectors = golden("exchange_fp32_sum")
    for rank, found in enumerate(ranks):
        assert found["golden"]["payloads"][0].tolist() == vectors["payload"][rank]
        assert found["golden"]["scale_inv"].tolist() == [1 / vectors["out_scale"]]
    assert codes(whole(ranks, "golden", 0)).tolist() == vectors["out"]
    assert whole(ranks, "golden", 0, 1).equal(floats(vectors["mean"]) * vectors["shared"])


def test_golden_exchange_on_one_process():
    vectors = golden("exchange_fp32_sum")
    parts = [floats(g) for g in vectors["ranks"]]
    shared = torch.tensor(vectors["shared"])
    for rank, g in enumerate(parts):
        bucket = alone(g, E4M3)
        assert codes(FP32SumWire(E4M3).pack(bucket, [g], shared[None])).tolist() == vectors["payload"][rank]
        assert codes(NCCLWire(E4M3).pack(bucket, [g], shared[None] * 0.5)).tolist() == vectors["payload_mu_half"][rank]
    total = sum_in_rank_order(torch.stack([pack_scaled(g, shared, E4M3).view(-1) for g in parts])).view_as(parts[0])
    assert (total / (4 * shared)).equal(floats(vectors["mean"]))
    payload, scale, mean = fp32_sum(parts, E4M3)
    assert codes(payload).tolist() == vectors["out"]
    assert scale == vectors["out_scale"]
    assert mean.equal(floats(vectors["mean"]) * shared)


def test_an_exchange_is_known_by_its_name():
    assert exchanges.names()[:2] == ("fp32-sum", "nccl")
    fp32_sum, nccl = map(exchanges.by_name, ("fp32-sum", "nccl"))
    assert (fp32_sum.name, fp32_sum.scalings, fp32_sum.can_overflow, fp32_sum.sums_in_fp32) == ("fp32-sum", (), False, True)
    assert (nccl.name, nccl.scalings, nccl.can_overflow, nccl.sums_in_fp32) == ("nccl", ("auto", "pre", "post"), True, False)
    assert (type(fp32_sum.wire(E4M3)), type(nccl.wire(E4M3))) == (FP32SumWire, NCCLWire)
    with pytest.raises(ValueError, match="gradient exchange 'mpi' is unknown; choose one of fp32-sum, nccl"):
        exchanges.by_name("mpi")


def test_an_exchange_says_which_scalings_it_takes():
    nccl, fp32_sum = exchanges.by_name("nccl"), exchanges.by_name("fp32-sum")
    half = Exchange(name="half", wire=NCCLWire, sums_in_fp32=False, scalings=("post", "pre"))
    assert [nccl.scaling(name).name for name in (None, "auto", "pre", "post")] == ["auto", "auto", "pre", "post"]
    assert nccl.scaling(mu_rule="paper").name == "auto"
    assert fp32_sum.scaling().name == half.scaling().name == "post"
    for exchange, arguments, message in (
        (fp32_sum, ("post",), "'post' is not for gradient exchange 'fp32-sum', which cannot overflow; drop it, or .* 'nccl'"),
        (half, ("auto",), "'auto' is not for gradient exchange 'half', which takes post, pre; drop it, or choose exchange 'nccl'"),
        (nccl, ("both",), "gradient scaling 'both' is unknown; choose one of auto, pre, post"),
        (
            fp32_sum,
            (None, "halve"),
            "mu rule 'halve' is not for gradient exchange 'fp32-sum', which cannot overflow; drop it, or .* 'nccl'",
        ),
        (nccl, ("pre", "halve"), "mu rule 'halve' belongs to gradient scaling 'auto', not 'pre'; drop one of the two"),
        (half, (None, "paper"), "mu rule 'paper' is not for gradient exchange 'half', which takes post, pre; drop it, or .* 'nccl'"),
    ):
        with pytest.raises(ValueError, match=message):
            exchange.scaling(*arguments)


def two_gpus() -> dict:
    peers = Peers(torch.distributed.group.WORLD, WireBytes())
    assert peers.nccl
    found = {}
    for kind, fmt, shard in itertools.product(KINDS, SCALED, (False, True)):
        grads = [g.cuda() for g in gradients(kind, peers.rank)]
        for wire in (FP32SumWire(fmt), NCCLWire(fmt)):
            factor = factors_of(kind, fmt, peers.ranks, 1.0).cuda()
            found[type(wire).__name__, fmt.name, kind, shard] = exchange(wire, fmt, grads, factor, peers, shard)
    return found


@pytest.mark.multi_gpu
def test_two_gpus():
    """fp32-sum as on one process, to the bit; NCCL's sum within the rounding of its one hop, and the same on both ranks."""
    ranks = dist.on_gpus(two_gpus, 2)
    for name, form, kind, shard in ranks[0]:
        key, fmt = (name, form, kind, shard), by_name(form)
        if name == "NCCLWire" and not shard:
            assert ranks[0][key]["flat"].equal(ranks[1][key]["flat"])
        for i in range(len(SHAPES)):
            parts, found = parts_of(ranks, kind, i), whole(ranks, key, i)
            if name == "FP32SumWire":
                assert bits(found).equal(bits(fp32_sum(parts, fmt)[0])), (key, SHAPES[i])
                continue
            shared = shared_scale(parts, fmt)
            exact = sum(cast(g * shared, fmt).float().flatten() for g in parts).clamp(-fmt.max, fmt.max)
            room = exact.abs() * 2.0 ** -(fmt.mantissa_bits + 1) + fmt.smallest / 2
            assert ((found.float() - exact).abs() <= room).all(), (key, SHAPES[i])
