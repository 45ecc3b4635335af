"""A gradient exchange of one's own, through public seams alone: it trains the toy GPT, resumes, is measured and counted like the others.

FP8 gradients travel in BF16, their owner adds them up in FP32 and rounds the average once, to FP8. That costs twice the bytes of
"fp32-sum" and saves one of its two roundings. What such an exchange needs is in this file: a wire, an `Exchange` and `register`.
"""

import contextlib
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import dist, tiny
from helpers.checkpoints import everything
from helpers.numerics import make, measure
from helpers.synced import model_of, synced
from megatron.lm.run.trainer import Trainer
from msamp.comm.bucket import Bucket
from msamp.comm.collectives import Peers
from msamp.comm.exchange import Exchange, Reduced, by_name, names, register, sum_in_rank_order
from msamp.comm.grad_sync import GradSync
from msamp.numerics.formats import BF16, E4M3, Format
from msamp.numerics.quantize import quantize
from msamp.numerics.scaling import inverse, scale_from_amax
from msamp.numerics.tensor import fp32_values

RANKS, STEPS, SAVED = 2, 10, 5
LEVELS = [pytest.param("O2", marks=pytest.mark.nightly(10)), "O3"]  # every rank gets the averages; owners alone do (ZeRO)
LINEAR = "decoder.layers.1.mlp.linear_fc1"
AMAX, UNDERFLOW, SATURATION, SQNR_DB, EXPONENT = range(5)  # of a line of the recorder
SHAPES = {"fp8-e4m3_whole": (64, 48), "fp8-e4m3_other": (33, 16), "fp8-e4m3_vector": (7,), "fp32_bias": (5,)}


class BF16Wire:
    """BF16 payloads, which need no scale: their factor is 1."""

    format = BF16

    def __init__(self, fmt: Format) -> None:
        self.average = fmt

    def pack(self, bucket: Bucket, gradients: Sequence[Tensor], factor: Tensor) -> Tensor:
        return bucket.packed.pack(gradients, BF16, factor)

    def reduce(self, bucket: Bucket, flat: Tensor, factor: Tensor, peers: Peers, shard: bool) -> Reduced:
        return self.store(bucket, self.mean(bucket, flat, peers), factor, peers, shard)

    def mean(self, bucket: Bucket, flat: Tensor, peers: Peers) -> Tensor:
        return sum_in_rank_order(peers.all_to_all(flat, bucket.sizes, f"the gradients of {bucket}")) / peers.ranks

    def store(self, bucket: Bucket, mean: Tensor, factor: Tensor, peers: Peers, shard: bool) -> Reduced:
        amax = torch.zeros_like(factor)
        for piece in bucket.owned:
            if piece.elements:
                amax[piece.index] = torch.maximum(amax[piece.index], bucket.part(piece, mean).abs().amax())
        peers.all_reduce(amax, torch.distributed.ReduceOp.MAX, f"the amax of the gradients of {bucket}")
        scale = scale_from_amax(amax, self.average.max)
        own = torch.empty_like(mean, dtype=self.average.dtype)
        for piece in bucket.owned:
            bucket.part(piece, own).copy_(quantize(bucket.part(piece, mean), scale[piece.index], self.average))
        return Reduced(own, None, inverse(scale), mean)


BF16_SUM = Exchange(name="bf16-sum", wire=BF16Wire, sums_in_fp32=True)


def settings(prefix: str, level: str, exchange: str, **more: Any) -> Any:
    shared = {"train_iters": STEPS, "micro_batch_size": 4, "global_batch_size": 8, "ddp_bucket_size": 5000}
    return tiny.config(prefix, precision=level, grad_exchange=exchange, **shared, **more)


def train(config: Any) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    with tiny.started(config), contextlib.redirect_stdout(io.StringIO()) as printed:
        made = Trainer(config)
        made.metrics.write = rows.append  # type: ignore[method-assign]
        made.run()
        sync = made.training.grad_sync
        to_others = {bucket: sum(bucket.sizes) - bucket.sizes[sync.peers.rank] for bucket in sync.buckets}
        return {
            "losses": tiny.losses(rows),
            "rows": [row for row in rows if row["kind"] == "train"],
            "weights": tiny.bits(made.training.model.parameters()),
            "everything": everything(made),
            "printed": printed.getvalue(),
            "fp8 elements to others": sum(count for bucket, count in to_others.items() if bucket.format.scaled),
        }


def spoiled(group: torch.distributed.ProcessGroup | None, bad: float) -> list[bool]:
    """Whether the averages of two parameters are finite, one of which has a gradient that is not, on the last rank."""
    model = model_of({"fp8-e4m3_a": (3, 4), "fp8-e4m3_b": (2,)})
    sync = synced(model, group, exchange=BF16_SUM)
    gradient = torch.ones(3, 4)
    if sync.peers.rank == sync.peers.ranks - 1:
        gradient[1, 2] = bad
    ((model["fp8-e4m3_a"] * gradient).sum() + model["fp8-e4m3_b"].sum()).backward()
    sync.finish()
    return [bool(fp32_values(p.main_grad).isfinite().all()) for p in model.values()]


def averaged(exchange: str, **options: Any) -> dict[str, Any]:
    """One step of small gradients on every rank: what came out, and the bytes that this rank has sent."""
    rank = torch.distributed.get_rank()
    model = model_of(SHAPES)
    sync: GradSync = synced(model, torch.distributed.group.WORLD, exchange=exchange, bucket_elements=3000, **options)
    gradients = {name: (rank + 1) * make("normal", shape, 10 * rank + i) for i, (name, shape) in enumerate(SHAPES.items())}
    sum((model[name] * g).sum() for name, g in gradients.items()).backward()
    sync.finish()
    averages = {name: fp32_values(p.main_grad) for name, p in model.named_parameters()}
    scaled = averages["fp8-e4m3_whole"], model["fp8-e4m3_whole"].main_grad.payload.float()
    return {"gradients": gradients, "averages": averages, "scaled": scaled, "sent": sync.sent.rows(), "said": str(sync)}


def on_every_rank(prefix: str, folder: str, level: str) -> dict[str, Any]:
    register(BF16_SUM)
    found: dict[str, Any] = {"known": names()}
    found["spoiled"] = [spoiled(torch.distributed.group.WORLD, bad) for bad in (math.inf, math.nan)]
    found["other"] = train(settings(prefix, level, "fp32-sum"))
    saved = f"{folder}/{level}"
    recorded = {"record_precision": f"{saved}.jsonl", "record_interval": STEPS}
    found["own"] = train(settings(prefix, level, BF16_SUM.name, save=saved, save_interval=SAVED, **recorded))
    found["again"] = train(settings(prefix, level, BF16_SUM.name, load=saved, ckpt_step=SAVED))
    found["owner"] = averaged(BF16_SUM.name, accumulate="owner")
    return found | {exchange: averaged(exchange) for exchange in (BF16_SUM.name, "fp32-sum")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("own-exchange")


@pytest.fixture(scope="module", params=LEVELS)
def level(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def ranks(folder: Path, level: str) -> list[dict[str, Any]]:
    if torch.cuda.is_available():
        pytest.skip("several processes on one GPU")
    return dist.run(on_every_rank, RANKS, str(tiny.write_data(folder)), str(folder), level, timeout=600)


def test_it_is_known_where_it_is_registered(ranks: list[dict[str, Any]]):
    assert all(rank["known"] == (*names(), BF16_SUM.name) for rank in ranks)
    with pytest.raises(ValueError, match=r"gradient exchange 'bf16-sum' is unknown; choose one of fp32-sum, nccl"):
        by_name(BF16_SUM.name)


def test_it_trains(ranks: list[dict[str, Any]]):
    own, other = (ranks[0][run] for run in ("own", "other"))
    assert own["losses"][-1] < own["losses"][0] - 0.3
    assert own["losses"] == pytest.approx(other["losses"], rel=1e-2)
    assert not tiny.same(own["weights"], other["weights"])
    assert tiny.same(own["weights"], ranks[1]["own"]["weights"])


def test_it_resumes_bit_for_bit(ranks: list[dict[str, Any]]):
    for rank in ranks:
        assert tiny.same(rank["again"]["everything"], rank["own"]["everything"])
    straight, again = (ranks[0][run] for run in ("own", "again"))
    assert (len(straight["losses"]), again["losses"]) == (STEPS, straight["losses"][SAVED:])
    assert "resumed from" in again["printed"]


def test_it_stands_in_the_log_where_exchanges_do(ranks: list[dict[str, Any]]):
    assert "buckets (fp8-e4m3, bf16-sum)" in ranks[0]["own"]["printed"]
    assert "buckets (fp8-e4m3, fp32-sum)" in ranks[0]["other"]["printed"]
    assert "buckets (fp8-e4m3, bf16-sum)" in ranks[0][BF16_SUM.name]["said"]


def test_its_average_is_compared_with_the_sum_in_fp32(ranks: list[dict[str, Any]], folder: Path, level: str):
    """The recorder asks whether there is such a sum, and not for a name."""
    last = json.loads((folder / f"{level}.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    assert last["iteration"] == STEPS
    sent, reduced = (last["casts"][LINEAR][tensor] for tensor in ("grad", "grad_reduced"))
    assert sent[UNDERFLOW:] == [0, 0, None, 0]  # nothing is lost: backward gives BF16
    assert 28 < reduced[SQNR_DB] < 36
    assert 0 <= reduced[UNDERFLOW] < 0.05
    assert 0 <= reduced[SATURATION] < 0.01
    assert 224 < reduced[AMAX] * 2 ** reduced[EXPONENT] <= 448
    row = ranks[0]["own"]["rows"][-1]
    assert (row["grad_saturation"], row["grad_underflow"]) == (0, 0)
    assert 0 < row["grad_underflow_reduced"] < 0.05
    assert "mu_min" not in row


def test_it_is_nearer_to_the_mean_than_two_roundings(ranks: list[dict[str, Any]]):
    found = {}
    for exchange in (BF16_SUM.name, "fp32-sum"):
        mean = torch.stack([rank[exchange]["gradients"]["fp8-e4m3_whole"] for rank in ranks]).mean(0)
        values, payload = ranks[0][exchange]["scaled"]
        found[exchange] = measure(mean, values, payload, E4M3)
        for name in SHAPES:
            assert ranks[0][exchange]["averages"][name].equal(ranks[1][exchange]["averages"][name])
            assert ranks[0][BF16_SUM.name]["averages"][name].equal(ranks[0]["owner"]["averages"][name]), "it has `mean` and `store`"
    own, other = found[BF16_SUM.name], found["fp32-sum"]
    assert own.sqnr_db > other.sqnr_db + 1, (own, other)
    assert own.underflow <= other.underflow
    assert own.saturation <= other.saturation


def test_a_gradient_that_is_not_finite_is_seen_on_every_rank(ranks: list[dict[str, Any]]):
    assert [rank["spoiled"] for rank in ranks] == [[[False, True]] * 2] * RANKS


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_one_process_needs_no_registration_and_sees_it_too(bad: float):
    assert spoiled(None, bad) == [False, True]


def test_its_bytes_are_counted(ranks: list[dict[str, Any]]):
    """Of N ranks each sends (N - 1) / N of a gradient: 2 bytes an element, and 4 of a bias in FP32."""
    elements = sum(torch.Size(shape).numel() for name, shape in SHAPES.items() if name.startswith("fp8"))
    for exchange, size in ((BF16_SUM.name, 2), ("fp32-sum", 1)):
        sent = sum(rank[exchange]["sent"]["weight", "all-to-all"] for rank in ranks)
        assert sent == (RANKS - 1) * (size * elements + 4 * 5)
    own, other = (ranks[0][run] for run in ("own", "other"))
    more = own["rows"][0]["sent_bytes"]["weight all-to-all"] - other["rows"][0]["sent_bytes"]["weight all-to-all"]
    assert more == own["fp8 elements to others"] > 0
