"""Tensors that other packages saved: checkpoints of Microsoft's MS-AMP, optimizer states of torchao and bitsandbytes, at every level."""

import io
import subprocess
import sys
import types
from typing import Any

import pytest
import torch
from torch import nn

import msamp
from helpers.numerics import through_a_file
from msamp.numerics.formats import E4M3, E5M2, FP16

LEVELS = ["O1", "O2", "O3", "coat", "fp32"]
NUMBERS = {E4M3: 5, E5M2: 6, FP16: 3}


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> float:
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    loss = (model(x) - x.roll(1, 1)).square().mean()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


@pytest.fixture
def ms_amp(monkeypatch):
    """MS-AMP's classes by name, as they are while MS-AMP writes a file; reading happens without them."""
    names = {
        "tensor": ("msamp.common.tensor.tensor", "ScalingTensor"),
        "parameter": ("msamp.nn.parameter", "ScalingParameter"),
        "meta": ("msamp.common.tensor.meta", "ScalingMeta"),
        "hooks": ("msamp.common.tensor.hook", "HookManager"),
        "qtype": ("msamp.common.dtype.dtypes", "QType"),
    }
    classes = {key: type(name, (), {"__module__": module}) for key, (module, name) in names.items()}
    found = types.SimpleNamespace(**classes)

    def write(content: Any) -> bytes:
        with monkeypatch.context() as patched:
            for key, (module, name) in names.items():
                stand_in = types.ModuleType(module)
                setattr(stand_in, name, classes[key])
                patched.setitem(sys.modules, module, stand_in)
            file = io.BytesIO()
            torch.save(content, file)
        return file.getvalue()

    def scaled(values: torch.Tensor, fmt: msamp.formats.Format, cls: Any = None, **other: Any) -> Any:
        x, meta, qtype, hooks = (cls or found.tensor)(), found.meta(), found.qtype(), found.hooks()
        own = msamp.ScalingTensor.quantize(values, fmt)
        qtype.__dict__.update(name="kFloat", value=NUMBERS[fmt])
        hooks.__dict__.update(hooks={}, history_counter=0)
        meta.__dict__.update(qtype=qtype, scale=1 / own.scale_inv, scale_inv=own.scale_inv, amax=values.abs().max().reshape(1), group=None)
        meta.__dict__.update(amax_counter=torch.zeros((), dtype=torch.int32), window_size=1, locked=False)
        payload = own.payload if fmt is FP16 else own.payload.view(torch.uint8)
        x.__dict__.update(value=payload, meta=meta, _grad=None, _backward_post_hooks=hooks, _requires_grad=True)
        for key, value in other.items():
            (x if key == "value" else meta).__dict__[key] = value
        return x

    found.write, found.scaled = write, scaled
    return found


def checkpoint(ms_amp, weights: msamp.formats.Format = FP16) -> tuple[bytes, dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    """A checkpoint as MS-AMP writes it after some steps, the weights' values and the states of torch's AdamW that it was made from."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for seed in range(5):
        step(model, optimizer, seed)
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    states = [{key: x.clone() for key, x in optimizer.state[p].items()} for p in model.parameters()]
    stored = {name: ms_amp.scaled(x, weights) if x.dim() > 1 else x for name, x in values.items()}
    packed = [{"step": 5, "exp_avg": ms_amp.scaled(s["exp_avg"], E4M3), "exp_avg_sq": ms_amp.scaled(s["exp_avg_sq"], FP16)} for s in states]
    group = {
        "lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "amsgrad": False, "maximize": False, "params": [0, 1, 2, 3],
    }  # fmt: skip
    return ms_amp.write({"model": stored, "optimizer": {"state": dict(enumerate(packed)), "param_groups": [group]}}), values, states


@pytest.mark.parametrize("level", LEVELS)
def test_a_checkpoint_of_ms_amp_opens_at_every_level(ms_amp, level: str):
    written, values, states = checkpoint(ms_amp)
    read = torch.load(io.BytesIO(written))
    model, optimizer = msamp.initialize(*(lambda m: (m, torch.optim.AdamW(m.parameters())))(mlp()), recipe=level)
    model.load_state_dict(read["model"])
    optimizer.load_state_dict(read["optimizer"])
    for (name, p), state in zip(model.named_parameters(), states, strict=True):
        torch.testing.assert_close(msamp.fp32_values(p), values[name], rtol=2**-3 if level in ("O3", "coat") else 2**-7, atol=2e-3)
        assert optimizer.state[p]["step"] == 5, name
        if level in ("O1", "O2"):  # one scale per tensor: the loaded moments differ from the saved ones by E4M3's rounding alone
            torch.testing.assert_close(msamp.fp32_values(optimizer.state[p]["exp_avg"]), state["exp_avg"], rtol=2**-3, atol=1e-4)
    assert optimizer.param_groups[0]["weight_decay"] == 0.1
    assert step(model, optimizer, 5) < 1.3


def test_payload_and_scale_of_ms_amp_are_read_bit_for_bit(ms_amp):
    x = torch.randn(64, 32)
    for fmt in (FP16, E4M3, E5M2):
        for cls in (ms_amp.tensor, ms_amp.parameter):
            read = torch.load(io.BytesIO(ms_amp.write(ms_amp.scaled(x, fmt, cls))))
            own = msamp.ScalingTensor.quantize(x, fmt)
            assert type(read) is msamp.ScalingTensor
            assert read.format == fmt
            assert torch.equal(read.payload.view(torch.uint8), own.payload.view(torch.uint8))
            assert torch.equal(read.scale_inv, own.scale_inv)
            assert torch.equal(through_a_file(read, weights_only=True).dequantize(), own.dequantize())


def test_a_plain_model_takes_the_values_of_ms_amps_weights(ms_amp):
    written, values, _ = checkpoint(ms_amp, E4M3)
    model = mlp()
    model.load_state_dict(torch.load(io.BytesIO(written))["model"])
    for name, p in model.named_parameters():
        wanted = msamp.ScalingTensor.quantize(values[name], E4M3).dequantize() if p.dim() > 1 else values[name]
        assert torch.equal(p, wanted), name


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"qtype": 2}, "qtype"),
        ({"qtype": "kFloat16"}, "qtype"),
        ({"qtype": None}, "qtype"),
        ({"value": torch.zeros(4, 4)}, "float32"),
        ({"value": [1.0]}, "list"),
        ({"scale_inv": torch.tensor(float("nan"))}, "scale_inv"),
        ({"scale_inv": torch.ones(2)}, "scale_inv"),
        ({"scale_inv": 1.0}, "scale_inv"),
    ],
    ids=str,
)
def test_a_damaged_tensor_of_ms_amp_is_refused(ms_amp, changed: dict[str, Any], named: str):
    with pytest.raises(ValueError, match=f"MS-AMP.*{named}"):
        torch.load(io.BytesIO(ms_amp.write(ms_amp.scaled(torch.randn(4, 4), FP16, **changed))))


def test_other_classes_in_a_checkpoint_of_ms_amp_stay_refused(ms_amp):
    with pytest.raises(Exception, match="Unsupported"):
        torch.load(io.BytesIO(ms_amp.write({"x": ms_amp.scaled(torch.randn(4, 4), FP16), "other": subprocess.Popen})))


def test_unrestricted_unpickling_of_ms_amp_is_refused_by_name(ms_amp):
    for cls in (ms_amp.tensor, ms_amp.parameter):
        with pytest.raises(ImportError, match="weights_only=True"):
            torch.load(io.BytesIO(ms_amp.write(ms_amp.scaled(torch.randn(4, 4), FP16, cls))), weights_only=False)


class OptimStateFp8(torch.Tensor):
    """torchao's form of a quantized state: FP8 codes and a scale for each block of 256 elements."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> "OptimStateFp8":
        x = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)
        x.codes, x.scale = codes, scale
        return x

    def dequantize(self, output_dtype: torch.dtype | None = None) -> torch.Tensor:
        return (self.codes.float().view(-1, 256) * self.scale.view(-1, 1)).view(self.codes.shape)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        raise NotImplementedError(str(func))


def as_torchao(x: torch.Tensor) -> torch.Tensor:
    blocks = x.reshape(-1, 256)
    scale = blocks.abs().amax(-1).clip(1e-12) / 448
    return OptimStateFp8((blocks / scale.view(-1, 1)).to(torch.float8_e4m3fn).view(x.shape), scale)


def as_bitsandbytes(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    own: dict[str, Any] = {}
    for number, key in (("1", "exp_avg"), ("2", "exp_avg_sq")):
        x = state[key]
        table = torch.linspace(-1, 1, 256)
        if x.dim() == 1:
            own |= {f"state{number}": x}
            continue
        blocks = x.reshape(-1, 256)
        largest = blocks.abs().amax(-1)
        codes = ((blocks / largest.view(-1, 1)).view((*x.shape, 1)) - table).abs().argmin(-1).to(torch.uint8)
        own |= {f"state{number}": codes, f"qmap{number}": table, f"absmax{number}": largest}
    return {"step": 5, "__bnb_optimizer_quant_state__": own}


def trained() -> tuple[nn.Sequential, list[dict[str, torch.Tensor]], dict[str, Any]]:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for seed in range(5):
        step(model, optimizer, seed)
    return model, [dict(optimizer.state[p]) for p in model.parameters()], optimizer.state_dict()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("package", ["torchao", "bitsandbytes"])
def test_quantized_states_of_other_optimizers_are_taken_over(package: str, level: str):
    model, states, saved = trained()
    for i, state in enumerate(states):
        if package == "bitsandbytes":
            saved["state"][i] = as_bitsandbytes(state)
        elif state["exp_avg"].dim() > 1:  # torchao quantizes large parameters alone
            saved["state"][i] = {key: as_torchao(x) if x.dim() else x for key, x in state.items()}
    saved["param_groups"][0] = {"lr": torch.tensor(1e-2), **{k: v for k, v in saved["param_groups"][0].items() if k in ("betas", "params")}}
    model, optimizer = msamp.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), recipe=level)
    optimizer.load_state_dict(saved)
    for p, state in zip(model.parameters(), states, strict=True):
        assert optimizer.state[p]["step"] == 5
        if level == "fp32":
            assert float((optimizer.state[p]["exp_avg"] - state["exp_avg"]).abs().max()) <= 2**-4 * float(state["exp_avg"].abs().max())
    assert step(model, optimizer, 5) < 1.3


@pytest.mark.parametrize("package", ["torchao.AdamW8bit", "torchao.AdamWFp8", "bitsandbytes.AdamW8bit"])
@pytest.mark.parametrize("level", ["O2", "fp32"])
def test_the_packages_own_states_are_taken_over(package: str, level: str):
    name, cls = package.split(".")
    optim = pytest.importorskip(f"{name}.optim")
    model = mlp()
    other = getattr(optim, cls)(model.parameters(), lr=1e-2)
    for seed in range(5):
        step(model, other, seed)
    saved = other.state_dict()
    model, optimizer = msamp.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), recipe=level)
    optimizer.load_state_dict(saved)
    if name == "bitsandbytes" and level == "fp32":
        own = saved["state"][0]["__bnb_optimizer_quant_state__"]
        theirs = pytest.importorskip("bitsandbytes.functional").dequantize_blockwise(
            own["state1"], absmax=own["absmax1"], code=own["qmap1"], blocksize=256
        )
        assert torch.equal(optimizer.state[next(model.parameters())]["exp_avg"], theirs.float())
    assert step(model, optimizer, 5) < 1.3


@pytest.mark.parametrize(
    "changed", [{"state1": torch.zeros(3, 3)}, {"state1": None}, {"qmap1": torch.zeros(16)}, {"absmax1": torch.zeros(7)}]
)
def test_damaged_states_of_bitsandbytes_are_refused(changed: dict[str, Any]):
    model, states, saved = trained()
    saved["state"] = {i: as_bitsandbytes(state) for i, state in enumerate(states)}
    saved["state"][0]["__bnb_optimizer_quant_state__"] |= changed
    model, optimizer = msamp.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), recipe="O2")
    del saved["param_groups"][0]["amsgrad"]
    with pytest.raises(ValueError, match="bitsandbytes"):
        optimizer.load_state_dict(saved)
