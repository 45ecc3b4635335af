"""Runs over 1, 2 and 4 gloo processes with one global batch: the same losses, the same weights on every rank, and what is sent.

One start of processes serves all runs of a size; the tests look at what it returns.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import dist, tiny
from megatron.lm.config import Config
from megatron.lm.step import train_step

# Largest relative difference of a training loss from one process's over 20 steps: the noise of the rounding, four times what is found.
LIMITS = {"fp32": 1e-6, "fp16-amp": 2e-4, "bf16": 5e-4, "O1": 3e-3, "O2": 3e-3, "O3": 3e-3}
LEVELS = tuple(LIMITS)
STEPS = tiny.BOTH_PHASES
SHARED = {"global_batch_size": 8, "train_iters": STEPS, "ddp_bucket_size": 5000}  # several buckets, and rows of one tensor on several ranks
ZERO = {"use_distributed_optimizer": True}
LATE = {"overlap_grad_reduce": False, "overlap_param_gather": False}
NCCL = {"grad_exchange": "nccl"}
ACCUMULATION = ("fp8", "fp8-sr", "bf16", "fp32")
TWO_MICRO_BATCHES = {"micro_batch_size": 2, "train_iters": 10}
SHORT = {"exit_interval": 6}  # of runs that do not ask for the phases of delayed scaling
EVALUATION = {"eval_iters": 2, "eval_interval": 5}

# What two processes run.
TWO: dict[str, dict[str, Any]] = {
    "O2": {"precision": "O2", **EVALUATION},
    "O2 ZeRO": {"precision": "O2", "ddp_bucket_size": None, **EVALUATION, **ZERO},  # nor may the size of the buckets matter
    "nccl": {"precision": "O2", **SHORT, **NCCL},
    "bf16": {"precision": "bf16", **SHORT},
    "bf16 ZeRO": {"precision": "bf16", **SHORT, **ZERO},
}
TWO_SLOW: dict[str, dict[str, Any]] = {
    **{level: {"precision": level} for level in ("fp32", "O3")},
    "fp16-amp": {"precision": "fp16-amp"},
    "fp16-amp ZeRO": {"precision": "fp16-amp", **ZERO},
    "O1": {"precision": "O1"},
    "O1 ZeRO": {"precision": "O1", **ZERO},
    "O3 late": {"precision": "O3", **LATE},
    "nccl ZeRO": {"precision": "O2", **SHORT, **NCCL, **ZERO},
    "micro": {"precision": "fp32", "micro_batch_size": 2},
    **{f"accumulated {kind}": {"precision": "O2", "grad_accum_dtype": kind, **TWO_MICRO_BATCHES} for kind in ACCUMULATION},
    "owner": {"precision": "O2", "grad_accum_on": "owner", **TWO_MICRO_BATCHES},
    "owner ZeRO": {"precision": "O2", "grad_accum_on": "owner", **TWO_MICRO_BATCHES, **ZERO},
    "owner late": {"precision": "O2", "grad_accum_on": "owner", **TWO_MICRO_BATCHES, **LATE},
    "accumulated fp8-sr ZeRO": {"precision": "O2", "grad_accum_dtype": "fp8-sr", **TWO_MICRO_BATCHES, **ZERO},
}
FOUR: dict[str, dict[str, Any]] = {**{level: {"precision": level} for level in LEVELS}, "O2 ZeRO": {"precision": "O2", **ZERO}}
ALONE = {**FOUR, "O2": {"precision": "O2", **EVALUATION}}
SAME_BITS = [("bf16", "bf16 ZeRO"), ("O2", "O2 ZeRO")]
SAME_BITS_SLOW = [
    ("fp16-amp", "fp16-amp ZeRO"),
    ("O1", "O1 ZeRO"),
    ("O3", "O3 late"),
    ("nccl", "nccl ZeRO"),
    ("accumulated fp8-sr", "accumulated fp8-sr ZeRO"),
    ("owner", "owner ZeRO"),
    ("owner", "owner late"),
]


def trained(settings: Config) -> dict[str, Any]:
    """Rows of the metrics (rank 0 has them) and the bits of the weights after a run."""
    rows: list[dict[str, Any]] = []
    with tiny.trainer(settings) as made:
        made.metrics.write = rows.append  # type: ignore[method-assign]
        made.run()
        return {"rows": rows, "weights": tiny.bits(made.training.model.parameters())}


def settings_of(prefix: str, processes: int, flags: dict[str, Any]) -> Config:
    return tiny.config(prefix, **{"micro_batch_size": 8 // processes, **SHARED, **flags})


def all_runs(prefix: str, runs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    processes = torch.distributed.get_world_size()
    return {name: trained(settings_of(prefix, processes, flags)) for name, flags in runs.items()}


def sent_by_kind(prefix: str, flags: dict[str, Any]) -> dict[str, int]:
    """Bytes that this rank sends in one step, by collective."""
    with tiny.trainer(settings_of(prefix, 2, flags)) as made:
        stream = made.data.batches(made.training, made.data.train, 0)
        train_step(made.training, stream)
        made.training.grad_sync.sent.take()
        train_step(made.training, stream)
        return {f"{kind} {collective}": sent for (kind, collective), sent in made.training.grad_sync.sent.take().items()}


def two_processes(prefix: str) -> dict[str, Any]:
    runs = all_runs(prefix, TWO)
    return {"runs": runs, "sent": {"O2": sent_by_kind(prefix, TWO["O2 ZeRO"]), "O3": sent_by_kind(prefix, {"precision": "O3", **ZERO})}}


@pytest.fixture(scope="module")
def one(gloo_prefix: Path) -> dict[str, dict[str, Any]]:
    """Runs on one process, made when first asked for."""

    class Runs(dict):
        def __missing__(self, name: str) -> dict[str, Any]:
            self[name] = trained(settings_of(str(gloo_prefix), 1, ALONE[name]))
            return self[name]

    return Runs()


@pytest.fixture(scope="module")
def pair(gloo_prefix: Path) -> list[dict[str, Any]]:
    return dist.run(two_processes, 2, str(gloo_prefix), timeout=850)


@pytest.fixture(scope="module")
def two(pair: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [rank["runs"] for rank in pair]


@pytest.fixture(scope="module")
def two_all(two: list[dict[str, Any]], gloo_prefix: Path) -> list[dict[str, Any]]:
    return [rank | more for rank, more in zip(two, dist.run(all_runs, 2, str(gloo_prefix), TWO_SLOW, timeout=850), strict=True)]


@pytest.fixture(scope="module")
def four(gloo_prefix: Path) -> list[dict[str, Any]]:
    return dist.run(all_runs, 4, str(gloo_prefix), FOUR, timeout=850)


def losses(run: dict[str, Any]) -> list[float]:
    return tiny.losses(run["rows"])


@pytest.mark.parametrize(
    ("ranks", "level"),
    [
        ("two", "O2"),
        *(pytest.param("two_all", level, marks=pytest.mark.nightly) for level in LEVELS if level in TWO_SLOW),
        *(pytest.param("four", level, marks=pytest.mark.nightly) for level in LEVELS),
    ],
)
def test_several_processes_train_as_one(request: pytest.FixtureRequest, one: dict, ranks: str, level: str):
    ranks = request.getfixturevalue(ranks)
    found, expected = losses(ranks[0][level]), losses(one[level])
    assert len(found) == STEPS
    assert found[-1] < found[0] - 0.15
    assert found == pytest.approx(expected, rel=LIMITS[level])


@pytest.mark.parametrize("ranks", ["two", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("two_all", "four"))])
def test_the_ranks_hold_the_same_weights(request: pytest.FixtureRequest, ranks: str):
    first, *others = request.getfixturevalue(ranks)
    assert [name for name in first if not all(tiny.same(first[name]["weights"], rank[name]["weights"]) for rank in others)] == []


@pytest.mark.parametrize(
    ("ranks", "plain", "other"),
    [*(("two", *pair) for pair in SAME_BITS), *(pytest.param("two_all", *pair, marks=pytest.mark.nightly) for pair in SAME_BITS_SLOW)],
)
def test_what_must_not_change_a_bit(request: pytest.FixtureRequest, ranks: str, plain: str, other: str):
    """ZeRO, overlap, the size of the buckets."""
    first = request.getfixturevalue(ranks)[0]
    assert losses(first[other]) == losses(first[plain])
    assert tiny.same(first[other]["weights"], first[plain]["weights"])


@pytest.mark.nightly
def test_zero_changes_no_bit_on_one_process_nor_on_four(one: dict, four: list[dict]):
    for runs in (one, four[0]):
        assert losses(runs["O2 ZeRO"]) == losses(runs["O2"])
        assert tiny.same(runs["O2 ZeRO"]["weights"], runs["O2"]["weights"])


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_step_sends_each_gradient_and_each_weight_once(pair: list[dict], level: str):
    """Of N ranks each sends (N - 1) / N of a tensor: a linear weight 1 byte an element there and (O3: 1, O2: 2) back."""
    linear, embedding, vectors = 2 * 12 * 32 * 32, 64 * 32, 2 * 13 * 32 + 2 * 32
    share = 1 / 2
    mean = {kind: sum(rank["sent"][level][kind] for rank in pair) / 2 for kind in pair[0]["sent"][level]}
    assert mean["weight all-to-all"] == share * (1 * linear + 2 * embedding + 4 * vectors)
    weight_bytes = {"O2": 2, "O3": 1}[level]
    assert mean["weight all-gather"] == share * (weight_bytes * linear + 2 * embedding + 2 * vectors)
    assert set(mean) == {"weight all-to-all", "weight all-gather", "weight all-reduce"}
