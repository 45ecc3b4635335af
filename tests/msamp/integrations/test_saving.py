"""The three forms in which a converted model is saved, and the way back into converted and unconverted models."""

import copy
import gc
import itertools
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

import msamp
from helpers import moe_model
from helpers.numerics import make
from msamp.integrations.saving import exact_state_dict, fp8_state_dict, plain_state_dict, save_plain
from msamp.numerics import recipe
from msamp.numerics.tensor import ScalingTensor

every_level = pytest.mark.parametrize("level", ["O1", "O2", "O3"])


def plain_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(16, 32), nn.MultiheadAttention(32, 2), nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)))


def run(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = model[0](x)
    return model[2](model[1](y, y, y)[0])


def trained(level: str, steps: int = 2, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = plain_model().to(dtype)
    model, optimizer = msamp.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), level)
    for _ in range(steps):
        run(model, torch.arange(16).view(4, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.promise("Conversion", "`msamp.plain_state_dict` has the unconverted model's keys and values, at O3 from the masters.")
@every_level
def test_a_plain_state_has_the_keys_and_the_values_of_the_unconverted_model(level):
    model, _ = trained(level)
    state = plain_state_dict(model)
    other = plain_model()
    assert list(state) == list(other.state_dict())
    for saved in (state, msamp.fp8_state_dict(model)):  # the versions, without which quantized modules load nothing
        assert saved._metadata.items() >= other.state_dict()._metadata.items()
    assert all(type(x) is torch.Tensor and x.dtype == torch.float32 for x in state.values())
    other.load_state_dict(state, strict=True)
    weights = dict(model.named_parameters())
    assert all(p.equal(msamp.fp32_values(weights[name])) for name, p in other.named_parameters())


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_a_plain_state_of_another_dtype_is_rounded_once_from_the_masters(level):
    """BF16's half step is more than what three steps at 1e-6 move."""
    model = plain_model().bfloat16()
    model[2][2].weight = model[2][0].weight  # tied
    start = {name: x.clone() for name, x in model.state_dict().items()}
    model, optimizer = msamp.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0), level)
    for _ in range(3):
        (model[0](torch.arange(16).view(4, 4)) @ model[2][0].weight.T).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    narrow, wide = plain_state_dict(model, optimizer), plain_state_dict(model, optimizer, torch.float32)
    assert list(wide) == list(narrow) == list(start)
    assert all(x.dtype is torch.float32 and x.bfloat16().equal(narrow[name]) for name, x in wide.items())
    assert wide["2.0.weight"] is wide["2.2.weight"]
    moved = [(state["2.0.weight"].float() - start["2.0.weight"].float()).abs().mean() for state in (narrow, wide)]
    assert moved[0] < 0.5 * moved[1]


@every_level
@pytest.mark.parametrize("way", ["copied", "assigned to meta", "copied to what to_empty left"])
def test_a_converted_model_loads_a_plain_state_and_its_scales_start_anew(level, way):
    model, _ = trained(level)
    source = plain_model()
    with torch.no_grad():
        for p in source.parameters():
            p.mul_(2)
    assert model[2][0].scaling.seen == 2
    if way != "copied":
        model = copy.deepcopy(model).to("meta")
        assert "scale_inv=unknown" in str(model[2][0].weight)
        model = model.to_empty(device="cpu") if "to_empty" in way else model
    model.load_state_dict(source.state_dict(), strict=True, assign="meta" in way)
    assert (int(model[2][0].scaling.seen), model[2][0].scaling.steps) == (0, 0)
    want = ScalingTensor.quantize(source[2][0].weight.detach(), model[2][0].weight.format)
    assert torch.equal(model[2][0].weight.detach(), want)
    assert model.load_state_dict({"2.0.bias": torch.zeros(64)}, strict=False).missing_keys  # nothing of a weight: its scales stay
    (model := trained(level)[0]).load_state_dict({key: x for key, x in fp8_state_dict(model).items() if ".scaling." not in key})
    assert (int(model[2][0].scaling.seen), model[2][0].scaling.steps) == (0, 0)


def test_a_plain_state_that_is_not_finite_is_refused_by_name():
    model, _ = trained("O2", steps=0)
    state = plain_model().state_dict()
    state["2.2.weight"][0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"2\.2\.weight holds 1 values that are NaN or infinite"):
        model.load_state_dict(state)


@pytest.mark.promise("Conversion", "`msamp.fp8_state_dict` round-trips through safetensors at one byte per FP8 element.")
@every_level
def test_the_fp8_form_is_exact_and_of_plain_tensors(level, tmp_path):
    from safetensors.torch import load_file, save_file

    model, _ = trained(level)
    state = fp8_state_dict(model)
    assert all(type(x) is torch.Tensor for x in state.values())
    assert state["2.0.weight"].itemsize == (1 if level == "O3" else 2)
    save_file(state, tmp_path / "model.safetensors")
    again = msamp.convert(plain_model(), recipe.by_name(level))
    again.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=True)
    before, after = model.state_dict(), again.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_a_model_that_saves_plain_says_so_until_it_is_told_otherwise():
    model, optimizer = trained("O3")
    handle = save_plain(model, optimizer)
    state = model.state_dict()
    want = plain_state_dict(model, optimizer)
    assert list(state) == list(plain_model().state_dict())
    assert all(state[key].equal(want[key]) for key in want)
    wrapped, another = nn.ModuleDict({"inner": model}).state_dict(), nn.ReLU().state_dict(prefix="0.")
    parts = [model[2].state_dict(prefix="2.", destination=another), model[2][0].state_dict(prefix="2.0.")]
    assert list(wrapped) == [f"inner.{key}" for key in want] == list(model.state_dict(destination={}, prefix="inner."))
    assert all(len(part) > 1 and all(x.equal(want[key]) for key, x in part.items()) for part in parts)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert list(other.state_dict()) == list(want)
    del optimizer
    gc.collect()
    assert model.state_dict()["2.0.weight"].equal(model[2][0].weight.dequantize())
    exact = exact_state_dict(model)
    assert isinstance(exact["2.0.weight"], ScalingTensor)
    assert "2.0.weight_scale_inv" in fp8_state_dict(model)
    handle.remove()
    assert list(model.state_dict()) == list(exact)
    assert isinstance(model.state_dict()["2.0.weight"], ScalingTensor)


@pytest.mark.promise("Conversion", "An average in `msamp.float_copy(model)` loses nothing; one kept in FP8 is warned about.")
def test_a_float_copy_averages_what_fp8_would_round_away():
    model, _ = trained("O3", steps=0, dtype=torch.bfloat16)
    average = torch.optim.swa_utils.AveragedModel(msamp.float_copy(model), multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.999))
    average.update_parameters(model)
    start = [msamp.fp32_values(p).clone() for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(msamp.fp32_values(p) + make("normal", p.shape))
    average.update_parameters(model)
    for p, before, found in zip(model.parameters(), start, average.parameters(), strict=True):
        assert torch.allclose(found, torch.lerp(before, msamp.fp32_values(p), 0.001), rtol=1e-5, atol=1e-6)
    assert run(average.module, torch.arange(4).view(2, 2)).isfinite().all()
    msamp.save_plain(average.module)  # as a model of transformers does
    average.load_state_dict(average.state_dict())


def shared() -> nn.Sequential:
    torch.manual_seed(0)
    layer = nn.Linear(64, 64)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), layer)


def shared_states(level: str) -> list[bool]:
    """Whether the plain states of a model that uses one layer three times load into the unconverted one, after a step."""
    model = shared()
    model, optimizer = msamp.initialize(model, torch.optim.AdamW(model.parameters()), recipe=level, clip_grad=float("inf"))
    model(torch.ones(2, 64)).square().mean().backward()
    optimizer.step()
    state = msamp.plain_state_dict(model, optimizer)
    other = copy.deepcopy(model)
    msamp.save_plain(model, optimizer)
    plain = [each for each in (state, model.state_dict(), msamp.plain_state_dict(other)) if each]
    for each in plain:
        shared().load_state_dict(each)
    return [each.keys() == shared().state_dict().keys() for each in plain]


@pytest.mark.parametrize("level", ["O1", "O3", "coat"])
def test_a_layer_under_several_names_has_a_plain_state_without_scales(level):
    assert shared_states(level) == [True] * 3


RECIPES = [("O2", None), ("O2", "tensorwise"), ("O2", "blockwise"), ("O3", None), ("coat", None)]


@pytest.mark.promise("Conversion", "An exact state of another FP8 recipe loads, and its windows restart.")
@pytest.mark.parametrize(("first", "second"), [*itertools.pairwise(RECIPES), *itertools.pairwise(RECIPES[::-1])])
def test_an_exact_state_of_another_fp8_recipe_loads_and_restarts_the_windows(first, second):
    models = []
    for name, fp8_recipe in (first, second):
        torch.manual_seed(len(models))
        model = nn.Sequential(nn.Linear(128, 128))
        model, optimizer = msamp.initialize(model, torch.optim.AdamW(model.parameters()), recipe=name, fp8_recipe=fp8_recipe)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 128)).square().mean().backward()
            optimizer.step()
        models.append(model)
    saved, loaded = models
    loaded.load_state_dict(saved.state_dict())
    assert torch.allclose(loaded[0].weight.dequantize(), saved[0].weight.dequantize(), rtol=2.0**-4, atol=1e-4)
    same_window = loaded[0].scaling.history.shape == saved[0].scaling.history.shape
    assert loaded[0].scaling.steps == (saved[0].scaling.steps if same_window else 0)
    assert loaded(torch.ones(2, 128)).isfinite().all()


@every_level
def test_experts_are_saved_in_every_form_and_loaded_bit_for_bit(level, tmp_path):
    model, optimizer = moe_model.initialized(level)
    moe_model.train(model, optimizer, 2)
    x, _ = moe_model.batch()
    save_file = pytest.importorskip("safetensors.torch").save_file
    save_file(fp8_state_dict(model), tmp_path / "fp8")
    for state in (exact_state_dict(model), pytest.importorskip("safetensors.torch").load_file(tmp_path / "fp8")):
        again, other = moe_model.initialized(level)
        again.load_state_dict(state)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert again(x).equal(model(x))
    assert moe_model.train(again, other, 1) == moe_model.train(model, optimizer, 1)
    plain = plain_state_dict(model, optimizer)
    unconverted = moe_model.Mixture()
    assert list(plain) == list(unconverted.state_dict())
    unconverted.load_state_dict(plain)
    again, _ = moe_model.initialized(level)
    again.load_state_dict(plain)
    assert torch.allclose(again.experts.fc1_weight.stacked(), unconverted.experts.fc1_weight, rtol=0.07, atol=1e-4)
    assert not again.experts.fc1_weight.scaling.seen
    narrow = plain_state_dict(model, optimizer, torch.bfloat16)["experts.fc2_weight"]
    assert narrow.equal(plain["experts.fc2_weight"].bfloat16())


@pytest.mark.promise("Hosts", "torch.jit.trace and ONNX export of a converted model are refused and name `msamp.plain_state_dict`.")
def test_exports_without_fp8_weights_name_the_plain_model(tmp_path: Path):
    model, _ = msamp.initialize(nn.Sequential(nn.Linear(32, 32), nn.MultiheadAttention(32, 2)))
    x = torch.randn(4, 32)
    linear = model.eval()[0]
    for export in (
        lambda: torch.jit.trace(linear, x),
        lambda: torch.onnx.export(linear, (x,), tmp_path / "model.onnx", dynamo=False),
        lambda: torch.jit.trace(model[1], (x, x, x)),
    ):
        with pytest.raises(ValueError, match=r"msamp\.plain_state_dict"):
            export()
    assert torch.export.export(linear, (x,)).module()(x).equal(linear(x))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("torch.onnx._internal.exporter._flags._is_onnx_exporting", True)  # as with dynamo=True, which requires onnx
        with pytest.raises(ValueError, match=r"msamp\.plain_state_dict"):
            torch.export.export(linear, (x,))
    assert linear(x).isfinite().all()
