"""Gradients that are added up over ranks outside the average's group first, against the same sums and averages computed by hand."""

import contextlib
import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import dist
from helpers.choices import each_value
from helpers.numerics import bits, make
from helpers.synced import formats_of, model_of, synced
from msamp.comm.collectives import Peers
from msamp.comm.counters import WireBytes
from msamp.comm.grad_sync import GradSync
from msamp.numerics.tensor import fp32_values

NAN = float("nan")
SHAPES = {"bf16_tied": (6, 5), "bf16_other": (3, 4), "fp32_norm": (7,), "fp32_bias": (2, 3), "fp32_other": (4,), "fp8-e4m3_weight": (8, 4)}
# As in the trainer: copies of an embedding on other stages, norms of other tensor-parallel ranks.
TIED, NORMS = ["bf16_tied"], ["fp32_norm", "fp32_bias"]
SUMMED = {*TIED, *NORMS}
# World size -> ranks of each average, ranks of each sum.
GRIDS = {2: ([[0], [1]], [[0, 1]]), 4: ([[0, 1], [2, 3]], [[0, 2], [1, 3]])}
LAYOUTS: tuple[dict[str, Any], ...] = ({}, {"overlap": False}, {"shard": True}, {"bucket_elements": 10})
# Which gradients come on which rank in which micro-batch.
CASES = ("one", "three", "lacking", "nan", "again")


def gradient(case: str, rank: int, micro: int, name: str) -> Tensor | None:
    place = list(SHAPES).index(name)
    if case == "lacking" and name in SUMMED and (rank + place) % 2:
        return None
    g = make("normal", SHAPES[name], 100 * rank + 10 * micro + place) * 3.0 ** (rank - place)
    if case == "nan" and rank == 1 and name in ("bf16_tied", "fp32_bias"):
        g[1, 2] = NAN
    return g.to(torch.bfloat16 if name.startswith("bf16") else torch.float32)


def micro_batches(case: str) -> int:
    return 3 if case == "three" else 1


def my_group(rows: list[list[int]]) -> torch.distributed.ProcessGroup:
    made = [torch.distributed.new_group(row) for row in rows]  # every rank takes part in making each
    return next(group for group, row in zip(made, rows, strict=True) if torch.distributed.get_rank() in row)


def make_sync(groups: tuple[Any, Any], **options: Any) -> tuple[torch.nn.ParameterDict, GradSync]:
    model, sent = model_of(SHAPES), WireBytes()
    peers = Peers(groups[1], sent)
    return model, synced(
        model,
        groups[0],
        sums=[(peers, [model[name] for name in names]) for names in (TIED, NORMS)],
        sent=sent,
        accumulate="fp32",
        **options,
    )


def step(model: torch.nn.ParameterDict, sync: GradSync, case: str) -> dict[str, Any]:
    """Averages by name, from whole copies or this rank's pieces; which buckets had left before `finish`; bytes by collective."""
    sync.clear()
    sync.sent.take()
    for micro in range(micro_batches(case)):
        with sync.no_sync() if micro < micro_batches(case) - 1 else contextlib.nullcontext():
            for name in reversed(SHAPES):
                g = gradient(case, torch.distributed.get_rank(), micro, name)
                if g is not None:
                    model[name].grad = g.float()
                    sync.take(model[name])
    left = {name for bucket in sync.buckets if bucket.sent for name in bucket.names}
    sync.finish()
    found = {
        name: {piece.row: fp32_values(piece.grad) for piece in sync.owned(p) if piece.grad is not None}
        if sync.shard
        else {0: fp32_values(p.main_grad)}
        for name, p in model.items()
    }
    return {"averages": found, "left": left, "sent": sync.sent.rows()}


def all_layouts() -> list[dict[str, Any]]:
    groups = tuple(my_group(rows) for rows in GRIDS[torch.distributed.get_world_size()])
    seen = []
    for options in LAYOUTS:
        model, sync = make_sync(groups, **options)
        seen.append({"buckets": [bucket.names for bucket in sync.buckets], **{case: step(model, sync, case) for case in CASES}})
    return seen


@pytest.fixture(scope="module", params=GRIDS)
def ranks(request: pytest.FixtureRequest) -> list[list[dict[str, Any]]]:
    return dist.run(all_layouts, request.param)


def total(parts: list[Tensor]) -> Tensor:
    return functools.reduce(torch.add, parts)


def expected(world: int, rank: int, case: str, name: str) -> Tensor:
    """FP32: micro-batches added up, then what the sum's ranks have, rounded to the format once, then the average, rounded once."""
    rows, columns = GRIDS[world]
    averaged = next(row for row in rows if rank in row)
    summed = [next(column for column in columns if member in column) if name in SUMMED else [member] for member in averaged]
    dtype = torch.bfloat16 if name.startswith("bf16") else torch.float32

    def of(member: int) -> Tensor:
        parts = [gradient(case, member, micro, name) for micro in range(micro_batches(case))]
        return total([torch.zeros(SHAPES[name]) if g is None else g.float() for g in parts]).to(dtype).float()

    sums = [total([of(member) for member in members]).to(dtype).float() for members in summed]
    return (total(sums) / len(sums)).to(dtype).float()


def whole(found: list[dict[int, Tensor]], name: str) -> Tensor:
    pieces = {row: g for part in found for row, g in part.items()}
    return torch.cat([pieces[row].reshape(-1) for row in sorted(pieces)]).view(SHAPES[name])


@each_value(case=CASES, layout=range(len(LAYOUTS)))
def test_sums_then_averages(ranks: list[list[dict[str, Any]]], layout: int, case: str):
    """On 2 ranks each is a group of its own for the average, on 4 the grid is 2 x 2."""
    world = len(ranks)
    for rank in range(world):
        row = next(row for row in GRIDS[world][0] if rank in row)
        sources = row if LAYOUTS[layout].get("shard") else [rank]
        for name in SHAPES:
            if name.startswith("fp8") or (case == "nan" and name in ("bf16_tied", "fp32_bias")):
                continue
            g = whole([ranks[r][layout][case]["averages"][name] for r in sources], name)
            assert torch.equal(bits(g), bits(expected(world, rank, case, name))), (rank, name)


def test_what_is_not_finite_on_one_rank_is_so_on_all(ranks: list[list[dict[str, Any]]]):
    for rank in ranks:
        averages = rank[0]["nan"]["averages"]
        assert {name for name, g in averages.items() if not g[0].isfinite().all()} == {"bf16_tied", "fp32_bias"}
        assert averages["bf16_tied"][0][1, 2].isnan()


@pytest.mark.parametrize("layout", range(len(LAYOUTS)), ids=[str(layout) for layout in LAYOUTS])
def test_what_is_summed_leaves_last_in_buckets_of_its_own(ranks: list[list[dict[str, Any]]], layout: int):
    for rank in ranks:
        seen = rank[layout]
        kinds = [{name in SUMMED for name in names} for names in seen["buckets"]]
        assert all(len(kind) == 1 for kind in kinds)
        assert kinds == sorted(kinds, key=lambda kind: True in kind)
        overlap = LAYOUTS[layout].get("overlap", True)
        for case in CASES:
            assert seen[case]["left"] == (set(SHAPES) - SUMMED if overlap else set())


def test_what_cannot_be_added_up_is_refused():
    model = model_of(SHAPES)
    others = Peers(None, WireBytes())
    for params, message in (
        ([model["fp8-e4m3_weight"]], r"fp8-e4m3_weight is fp8-e4m3 .*make both FP32 or both BF16"),
        ([model["fp32_norm"], model["bf16_tied"]], r"bf16_tied is bf16 and is summed together with fp32_norm, fp32"),
        ([torch.zeros(3)], r"of shape \(3,\) is listed in sums but requires no gradient"),
    ):
        with pytest.raises(ValueError, match=message):
            GradSync(model, formats_of(model), (), sums=[(others, params)])
