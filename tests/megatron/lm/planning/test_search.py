"""Grids that fit: all of them divide, more memory never leaves fewer, and what is listed is what the dry run says."""

import dataclasses
import time

import pytest

from megatron.lm.config.cli import parse_args
from megatron.lm.config.rules.check import check
from megatron.lm.planning import memory
from megatron.lm.planning.fits import check_fits
from megatron.lm.planning.rates import Cluster, rates_of
from megatron.lm.planning.search import best, candidates, planned

RATES = rates_of("h100")
BATCH = ("micro_batch_size",)  # fixed, at 1: a quarter of the grids
COMMON = ["--use-distributed-optimizer", "--fp8-min-gain", "0", "--dry-run"]


def config(*flags: str):
    return parse_args([*flags, *COMMON])


def machines(gpus: int) -> Cluster:
    return Cluster(gpus=gpus, per_host=8, link=320e9, network=40e9, latency=45e-6)


@pytest.mark.promise("Tools", "A plan's memory is the dry run's, to the byte.")
def test_grids_that_are_found_divide_fit_and_are_what_the_dry_run_says():
    model = config("--preset", "13b", "--precision", "O3", "--global-batch-size", "256")
    found = best(model, machines(8), RATES, 79 * memory.GIB, BATCH, 8)
    assert len(found) == 8
    assert [one.step.total for one in found] == sorted(one.step.total for one in found)
    for one in found:
        check(one.config, 8)
        assert one.ranks == memory.plan(one.config, 8)
        check_fits(one.config, 8, 79 * memory.GIB)
        assert one.fullest.total == max(rank.total for rank in one.ranks)


def test_more_memory_never_leaves_fewer_grids():
    model = config("--preset", "7b", "--precision", "O3", "--global-batch-size", "16")
    counts, fastest = [], []
    for gib in (20, 30, 50, 80):
        found = best(model, machines(4), RATES, gib * memory.GIB, BATCH, 1000)
        counts.append(len(found))
        fastest.append(found[0].step.total)
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]
    assert fastest == sorted(fastest, reverse=True)


def test_what_is_fixed_stays():
    model = config("--preset", "13b", "--tensor-model-parallel-size", "4", "--micro-batch-size", "2")
    found = list(candidates(model, machines(16), ("tensor_model_parallel_size", "micro_batch_size", "recompute_granularity")))
    assert {one.parallel.tensor_model_parallel_size for one in found} == {4}
    assert {one.training.micro_batch_size for one in found} == {2}
    assert {one.training.recompute_granularity for one in found} == {None}
    modes = {(one.parallel.pipeline_model_parallel_size, one.training.cuda_graph) for one in found}
    assert modes == {(1, None), (2, None), (2, "none"), (4, None), (4, "none")}  # eager steps of a pipeline need less memory


def test_long_sequences_are_divided_between_processes_of_a_host():
    words = "--preset llama3-8b --seq-length 131072 --max-position-embeddings 131072 --global-batch-size 4 --micro-batch-size 1"
    long = config(*words.split())
    sizes = {(one.parallel.tensor_model_parallel_size, one.parallel.context_parallel_size) for one in candidates(long, machines(16))}
    assert sizes == {(tp, cp) for tp in (1, 2, 4, 8) for cp in (1, 2, 4, 8) if tp * cp <= 8}
    one_stage = ("micro_batch_size", "pipeline_model_parallel_size")
    found = best(long, machines(16), RATES, 79 * memory.GIB, one_stage, 3)
    assert found[0].config.parallel.context_parallel_size > 1  # four sequences and sixteen cards
    for one in found:
        check(one.config, 16)
        assert one.ranks == memory.plan(one.config, 16)
    fixed = candidates(long, machines(16), ("context_parallel_size",))
    assert {one.parallel.context_parallel_size for one in fixed} == {1}
    assert {one.parallel.context_parallel_size for one in candidates(config("--preset", "llama3-8b"), machines(16))} == {1}


def test_mixtures_of_experts_share_them_among_processes_and_run_in_graphs():
    flags = "--preset olmoe-1b-7b --num-layers 2 --precision O3 --global-batch-size 16 --micro-batch-size 4"
    small = config(*flags.split())
    fixed = ("micro_batch_size", "pipeline_model_parallel_size")
    found = best(small, machines(2), RATES, 79 * memory.GIB, fixed, 100)
    assert {(one.config.parallel.expert_model_parallel_size, one.config.training.recompute_modules) for one in found} == {
        (size, modules) for size in (1, 2) for modules in ((), ("mlp",))
    }
    for one in found:
        check(one.config, 2)
        assert one.step.captured
        assert one.ranks == memory.plan(one.config, 2)
    eager = dataclasses.replace(small, training=dataclasses.replace(small.training, cuda_graph="none"))
    with pytest.raises(ValueError, match="--cuda-graph none"):
        best(eager, machines(2), RATES, 79 * memory.GIB, (*fixed, "cuda_graph"))


def test_a_rough_judgement_never_leaves_out_what_fits():
    """Every grid of a small case, exactly: `best` finds just those that fit."""
    model, cluster, capacity = config("--preset", "1.3b", "--precision", "O2", "--global-batch-size", "8"), machines(2), 11 * memory.GIB
    fits = 0
    for one in candidates(model, cluster):
        try:
            check(one, 2)
        except ValueError:
            continue
        fits += planned(one, cluster, RATES).fullest.total + memory.RESERVED <= capacity
    assert 0 < fits == len(best(model, cluster, RATES, capacity, (), 1000))


def test_what_does_not_fit_or_divide_is_refused_with_a_remedy():
    model = config("--preset", "175b", "--precision", "bf16")
    with pytest.raises(ValueError, match="use more --gpus"):
        best(model, machines(8), RATES, 79 * memory.GIB)
    with pytest.raises(ValueError, match="--global-batch-size"):
        best(model, machines(7), RATES, 79 * memory.GIB)
    odd = dataclasses.replace(model, parallel=dataclasses.replace(model.parallel, tensor_model_parallel_size=5))
    with pytest.raises(ValueError, match="--num-attention-heads"):
        best(odd, machines(20), RATES, 79 * memory.GIB, ("tensor_model_parallel_size",))


@pytest.mark.nightly(30)
def test_a_thousand_gpus_take_seconds():
    start = time.process_time()
    (found,) = best(config("--preset", "175b", "--precision", "O3"), machines(1024), RATES, 79 * memory.GIB, (), 1)
    assert time.process_time() - start < 60  # 5 on an idle core
    assert found.config.data_parallel_size(1024) * found.config.parallel.tensor_model_parallel_size >= 8
