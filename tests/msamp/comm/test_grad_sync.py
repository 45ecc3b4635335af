"""The synchroniser on one process: what a step leaves behind, odd parameters, refusals. Several ranks: test_grad_sync_ranks.py."""

import contextlib
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.choices import each_value
from helpers.numerics import make
from helpers.synced import model_of, stamp, synced, synchronized_right
from msamp.comm.accumulate import ACCUMULATORS
from msamp.comm.grad_sync import GradSync
from msamp.kernels import ops
from msamp.numerics.formats import ALL, BF16, E4M3, E5M2, FP16, FP32, Format
from msamp.numerics.tensor import ScalingTensor, fp32_values
from msamp.optim.optimizer import LowPrecisionOptimizer
from msamp.parallel.data_parallel import grad_sync

INF, NAN = float("inf"), float("nan")
formats = pytest.mark.parametrize("fmt", ALL, ids=str)


def one(fmt: Format, dtype: torch.dtype = torch.bfloat16, **options: Any) -> tuple[nn.Parameter, GradSync]:
    model = model_of({f"{fmt}_p": (4, 8)}, dtype)
    sync = synced(model, **options)
    sync.keep_alive = model  # type: ignore[attr-defined]  # it holds its model weakly
    return next(model.parameters()), sync


def give(model: nn.ParameterDict, gradients: dict[str, Tensor]) -> None:
    """One backward that brings these gradients."""
    sum((model[name] * g).sum() for name, g in gradients.items()).backward()


def back(p: nn.Parameter, g: Tensor) -> None:
    (p * g.to(p.dtype)).sum().backward()


@each_value(fmt=ALL, shard=[False, True], dtype=[torch.float32, torch.bfloat16])
def test_one_micro_batch_is_quantised_once(dtype, shard, fmt):
    p, sync = one(fmt, dtype, shard=shard)
    g = make("normal", (4, 8)).to(dtype)
    back(p, g)
    sync.finish()
    found = sync.owned(p)[0].grad if shard else p.main_grad
    assert stamp(found) == stamp(ScalingTensor.quantize(g, fmt) if fmt.scaled else g.to(fmt.dtype))
    assert shard == (p.main_grad is None)
    sync.clear()
    assert p.main_grad is None
    assert sync.owned(p)[0].grad is None
    assert sync.sent.rows() == {}


@pytest.mark.parametrize("shard", [False, True])
def test_frozen_and_unused_parameters_are_left_out(shard):
    model = model_of({"fp8-e4m3_used": (4, 8), "fp8-e4m3_unused": (4, 8), "fp8-e4m3_frozen": (4, 8), "fp32_empty": (0, 3)})
    used, unused, frozen, empty = model.values()
    frozen.requires_grad_(False)
    sync = synced(model, shard=shard)
    give(model, {"fp8-e4m3_used": make("normal", (4, 8)), "fp32_empty": torch.zeros(0, 3)})
    sync.finish()
    found = {p: sync.owned(p)[0].grad if shard else p.main_grad for p in (used, unused, empty)}
    assert found[unused] is None
    assert found[empty].shape == (0, 3)
    assert stamp(found[used]) == stamp(ScalingTensor.quantize(make("normal", (4, 8)), E4M3))
    assert sync.owned(frozen) == []
    assert not hasattr(frozen, "main_grad")


def test_buckets_leave_in_their_order_whatever_order_they_fill_in():
    model = model_of({f"fp8-e4m3_{i}": (4, 8) for i in range(3)})
    first, second, third = reversed(list(model.values()))
    sync = synced(model, bucket_elements=32)
    assert [bucket.params for bucket in sync.buckets] == [[first], [second], [third]]
    back(second, torch.ones(4, 8))
    assert [bucket.sent for bucket in sync.buckets] == [False, False, False]
    back(first, torch.ones(4, 8))
    assert [bucket.sent for bucket in sync.buckets] == [True, True, False]
    assert first.main_grad is not None
    sync.finish()
    assert [bucket.sent for bucket in sync.buckets] == [True, True, True]
    assert third.main_grad is None
    later = synced(model_of({"fp8-e4m3_0": (4, 8)}), overlap=False)
    back(later.buckets[0].params[0], torch.ones(4, 8))
    assert not later.buckets[0].sent


@each_value(accumulate=ACCUMULATORS, bad=[NAN, INF, -INF], fmt=[E4M3, FP16, BF16, FP32], when=[0, 1])
def test_a_gradient_that_is_not_finite_skips_the_step_and_is_gone_in_the_next(when, fmt, bad, accumulate):
    p, sync = one(fmt, accumulate=accumulate)
    optimizer = LowPrecisionOptimizer([p])
    for step in range(2):
        for i in range(2):
            g = make("normal", (4, 8), i)
            g[1, 2] = bad if (step, i) == (0, when) else 1.0
            with sync.no_sync() if i == 0 else contextlib.nullcontext():
                back(p, g)
        sync.finish()
        optimizer.step()
        assert fp32_values(p.main_grad).isfinite().all() == bool(step)
        assert (optimizer.skipped_steps, bool(p.any())) == (1, bool(step))
        sync.clear()


def test_stochastic_rounding_goes_on_where_it_was_saved():
    def step(p: nn.Parameter, sync: GradSync) -> tuple:
        sync.clear()
        for i in range(3):
            with sync.no_sync() if i < 2 else contextlib.nullcontext():
                back(p, make("normal", (4, 8), i))
        sync.finish()
        return stamp(p.main_grad)

    p, sync = one(E4M3, accumulate="fp8-sr", seed=7)
    found = [step(p, sync) for _ in range(3)]
    assert len(set(found)) == 3
    q, resumed = one(E4M3, accumulate="fp8-sr", seed=7)
    resumed.load_state_dict({"steps": 2, "mu": {}})
    assert step(q, resumed) == found[2]
    assert step(*one(E4M3, accumulate="fp8-sr", seed=8)) != found[0]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("between", [False, True])
def test_a_second_gradient_is_refused(between, overlap):
    p, sync = one(E4M3, overlap=overlap)
    back(p, torch.ones(4, 8))
    if between:
        sync.finish()
    with pytest.raises(ValueError, match=r"fp8-e4m3_p got a second gradient in one step .* run every backward .* under no_sync\(\)"):
        back(p, torch.ones(4, 8))
    assert p.grad is None


@pytest.mark.parametrize("how", ["added", "thawed"])
def test_a_parameter_that_came_later_is_refused(how):
    model = model_of({"fp8-e4m3_a": (4, 8), "fp8-e4m3_late": (3,)})
    late = model["fp8-e4m3_late"].requires_grad_(False)
    sync = synced(model)
    if how == "added":
        model["fp8-e4m3_new"] = nn.Parameter(torch.zeros(2))
    else:
        late.requires_grad_()
    name = "fp8-e4m3_new" if how == "added" else "fp8-e4m3_late"
    with pytest.raises(ValueError, match=f"{name} was not in the model when.*was built.*build a new synchronizer"):
        sync.finish()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exchange": "mpi"}, "gradient exchange 'mpi' is unknown; choose one of fp32-sum, nccl"),
        ({"exchange": "nccl", "scaling": "both"}, "gradient scaling 'both' is unknown; choose one of auto, pre, post"),
        ({"exchange": "nccl", "mu_rule": "third"}, "mu rule 'third' is unknown; choose one of halve, paper"),
        ({"scaling": "auto"}, "gradient scaling 'auto' is not for gradient exchange 'fp32-sum', .* drop it, or choose exchange 'nccl'"),
        ({"mu_rule": "halve"}, "mu rule 'halve' is not for gradient exchange 'fp32-sum', .* drop it, or choose exchange 'nccl'"),
        ({"exchange": "nccl", "scaling": "post", "mu_rule": "paper"}, "mu rule 'paper' belongs to gradient scaling 'auto', not 'post'"),
        ({"accumulate": "fp16"}, "gradient accumulation 'fp16' is unknown; choose one of fp8, fp8-sr, bf16, fp32"),
        ({"bucket_elements": 0}, "bucket_elements is 0; it must be at least 1"),
    ],
)
def test_unknown_choices_are_refused(options, message):
    model = model_of({"fp8-e4m3_p": (4, 8)})
    with pytest.raises(ValueError, match=message):
        synced(model, **options)
    back(model["fp8-e4m3_p"], torch.ones(4, 8))
    assert model["fp8-e4m3_p"].grad is not None  # nothing was hooked


def test_a_synchroniser_dies_with_its_last_reference():
    """Hooks hang in autograd's graph, out of the collector's sight: they must not keep model and gradients alive."""
    model = model_of({"fp8-e4m3_p": (4, 8)})
    sync = weakref.ref(synced(model))
    gc.collect()
    assert sync() is None
    back(model["fp8-e4m3_p"], torch.ones(4, 8))
    assert model["fp8-e4m3_p"].grad is not None


@pytest.mark.gpu
@pytest.mark.parametrize("exchange", ["fp32-sum", "nccl"])
@pytest.mark.parametrize("accumulate", ACCUMULATORS)
def test_a_step_never_waits_for_the_host(accumulate, exchange):
    model = model_of({f"{fmt}_{i}": (64, 32) for fmt in (E4M3, E5M2, FP16, BF16, FP32) for i in range(2)}).cuda()
    sync = synced(model, exchange=exchange, accumulate=accumulate, bucket_elements=3000)
    for step in range(3):
        torch.cuda.set_sync_debug_mode("error" if step else "default")  # the first compiles kernels
        try:
            for i in range(2):
                with sync.no_sync() if i == 0 else contextlib.nullcontext():
                    give(model, {name: p.detach() + 1 for name, p in model.items()})
            sync.finish()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for p in model.values():  # mu grows from step to step, and with it 2 stands between two FP8 codes
            tolerance = 2.0**-3 if exchange == "nccl" and step else 0.0
            assert (fp32_values(p.main_grad) - 2).abs().max() <= 2 * tolerance
        sync.clear()


@pytest.mark.promise("Hosts", "A gradient set by hand, or after a late `model.to()` of a plain module, is averaged too.")
def test_a_gradient_that_passes_the_hooks_by_is_averaged():
    """As it does of a low-precision weight after `model.to`, which would otherwise be updated by this rank's own gradient."""
    model = nn.ParameterList([nn.Parameter(ScalingTensor.quantize(make("normal", (16, 16)), E4M3)), nn.Parameter(torch.ones(4))])
    sync = grad_sync(model, {model[0]: E4M3, model[1]: FP32})
    model.to("cpu")
    model[0].mul(2.0).sum().backward()
    model[1].grad = torch.full((4,), 3.0)
    sync.finish()
    assert model[0].main_grad.dequantize().equal(torch.full((16, 16), 2.0))
    assert model[1].main_grad.equal(torch.full((4,), 3.0))
    assert model[1].grad is None


@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize("exchange", ["fp32-sum", "nccl"])
def test_gradients_of_one_rank_are_told_of_and_equal_those_without_a_guess(exchange, shard, monkeypatch):
    """Over steps with amaxes that rise, stay and vanish; with one read of each gradient, but where mu adapts."""
    p, sync = one(E4M3, exchange=exchange, shard=shard)
    for step, factor in enumerate((1.0, 1.0, 1000.0, 1000.0, 0.0, 1e-6, INF, 1.0)):
        g = factor * make("normal", (4, 8), seed=step).bfloat16()
        sync.clear()
        with monkeypatch.context() as patched:
            patched.setattr(ops, "grad_stats", refuse if sync.autoscale is None else ops.grad_stats)
            back(p, g)
            sync.finish()
        found = sync.owned(p)[0].grad if shard else p.main_grad
        if factor == INF:
            assert found.scale_inv.isnan()
        elif factor and sync.autoscale is None:
            assert stamp(found) == stamp(ScalingTensor.quantize(g, E4M3))
        assert (found.tally is None) == (sync.autoscale is not None)
        assert synchronized_right(found)


def refuse(*args: Any, **flags: Any) -> Any:
    raise AssertionError("a gradient is read once more")
