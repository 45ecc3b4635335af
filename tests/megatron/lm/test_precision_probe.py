"""Samples of underflow, saturation and SQNR: against the definitions, on the iterations asked for, with hardly a trace in the run."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

from megatron.lm import process_groups
from megatron.lm.model.gpt import GPT, build_model
from megatron.lm.model.linear import FP8Gemm
from megatron.lm.precision_probe import probing, sample
from msamp.nn.scaling_state import LinearScaling, ScalingState
from msamp.numerics.formats import E4M3, E5M2
from msamp.numerics.metrics import saturation_frac, sqnr_db, underflow_frac
from msamp.numerics.quantize import dequantize, quantize
from msamp.numerics.recipe import BF16, O2, Cast, Recipe
from msamp.numerics.scaling import scale_from_amax

X = torch.tensor([1.0, -448.0, 2.0**-12, 0.0, 3.0, 500.0])


@pytest.fixture(autouse=True)
def one_process() -> Iterator[None]:
    with tiny.started(tiny.config("corpus")):
        yield


def test_sample_by_hand():
    found = sample(X, Cast(E4M3), torch.tensor(1.0))
    assert found["underflow"] == pytest.approx(1 / 5)  # 2^-12 is below half of E4M3's smallest, 2^-9
    assert found["saturation"] == pytest.approx(2 / 6)  # -448 itself and 500
    assert found["sqnr_db"] == pytest.approx(sqnr_db(X, torch.tensor([1.0, -448.0, 0.0, 0.0, 3.0, 448.0])))


@pytest.mark.parametrize("fmt", [E4M3, E5M2])
def test_without_a_scale_it_is_just_in_time(fmt: Any):
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).bfloat16() * 1e-4
    scale = scale_from_amax(x.abs().amax().float(), fmt.max)
    payload = quantize(x, scale, fmt)
    values = dequantize(payload, 1 / scale)
    assert sample(x, Cast(fmt), None) == {
        "underflow": underflow_frac(x.float(), values),
        "saturation": saturation_frac(payload, fmt),
        "sqnr_db": sqnr_db(x.float(), values),
    }


def model(recipe: Recipe = O2, **settings: Any) -> GPT:
    process_groups.seed_all(7)
    return build_model(tiny.config("corpus", **settings), recipe, tiny.VOCABULARY)


def forward_backward(made: GPT, seed: int = 0) -> Tensor:
    tokens = torch.randint(0, 60, (2, 16), generator=torch.Generator().manual_seed(seed)).to(process_groups.device())
    positions = torch.arange(16, device=tokens.device).expand(2, 16)
    loss = made(tokens, positions, None, labels=tokens.roll(1, 1)).mean()
    loss.backward()
    return loss.detach()


def test_every_linear_reports_its_three_tensors_once():
    made = model()
    rows: list[dict[str, Any]] = []
    with probing(made, 7, rows.append):
        forward_backward(made)
        forward_backward(made, seed=1)  # a second micro-batch
    layers = [name for name, module in made.named_modules() if isinstance(module, FP8Gemm)]
    assert len(layers) == 8
    assert sorted((row["layer"], row["tensor"]) for row in rows) == sorted(
        (layer, tensor) for layer in layers for tensor in ("input", "weight", "grad_output")
    )
    for row in rows:
        assert row["kind"] == "underflow"
        assert row["iteration"] == 7
        assert 0 <= row["underflow"] < 0.2
        assert 0 <= row["saturation"] < 0.05
        low = 20 if row["tensor"] == "grad_output" else 28  # two and three bits of mantissa
        assert low < row["sqnr_db"] < 60, row


def test_afterwards_nothing_is_reported():
    made = model()
    rows: list[dict[str, Any]] = []
    with probing(made, 1, rows.append):
        pass
    forward_backward(made)
    assert rows == []
    with pytest.raises(RuntimeError, match="stop"), probing(made, 1, rows.append):
        raise RuntimeError("stop")
    forward_backward(made)
    assert rows == []


def test_evaluation_is_not_sampled():
    made = model()
    rows: list[dict[str, Any]] = []
    with probing(made, 1, rows.append), torch.no_grad():
        tokens = torch.zeros(1, 16, dtype=torch.int64, device=process_groups.device())
        made(tokens, tokens, None)
    assert rows == []


def test_without_fp8_there_is_nothing_to_report():
    made = model(BF16)
    rows: list[dict[str, Any]] = []
    with probing(made, 1, rows.append):
        forward_backward(made)
    assert rows == []


def test_delayed_scales_are_judged_as_they_are():
    """A scale that is far too small for what comes underflows, and one that is too large saturates: it must show."""
    found = {}
    for name, factor in (("small", 2.0**-20), ("large", 2.0**20)):
        made = model()
        state = ScalingState(made)
        for _ in range(16):
            forward_backward(made)
            state.roll()
        for module in made.modules():
            if isinstance(module, LinearScaling):
                assert module.delayed
                module.scale.mul_(factor)
                module.scale_inv.div_(factor)
        rows: list[dict[str, Any]] = []
        with probing(made, 1, rows.append):
            forward_backward(made)
        found[name] = next(row for row in rows if row["layer"] == "decoder.layers.0.self_attention.linear_qkv" and row["tensor"] == "input")
    assert found["small"]["underflow"] > 0.9
    assert found["large"]["saturation"] > 0.9


def seen(probe: bool, **settings: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Loss, amaxes and gradients of one forward and backward."""
    made = model(**settings)
    with probing(made, 1, lambda row: None) if probe else torch.enable_grad():
        loss = forward_backward(made)
    amaxes = torch.stack([module.amax for module in made.modules() if isinstance(module, LinearScaling)])
    return loss, amaxes, [p.grad for p in made.parameters() if p.grad is not None]


def test_losses_gradients_and_histories_are_close_to_those_without():
    loss, amaxes, gradients = seen(probe=True)
    expected_loss, expected_amaxes, expected = seen(probe=False)
    torch.testing.assert_close(loss, expected_loss, rtol=0, atol=1e-2)
    torch.testing.assert_close(amaxes, expected_amaxes, rtol=0.1, atol=0)
    assert min(sqnr_db(b.float(), a.float()) for a, b in zip(gradients, expected, strict=True)) > 12


def test_of_unfused_layers_they_are_those_without():
    loss, amaxes, gradients = seen(probe=True, hidden_dropout=0.1)
    expected_loss, expected_amaxes, expected = seen(probe=False, hidden_dropout=0.1)
    assert torch.equal(loss, expected_loss)
    assert torch.equal(amaxes, expected_amaxes)
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))


def test_recomputed_layers_report_too():
    made = model(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    rows: list[dict[str, Any]] = []
    with probing(made, 1, rows.append):
        forward_backward(made)
    assert len(rows) == 8 * 3
    assert all(math.isfinite(row["sqnr_db"]) for row in rows)
