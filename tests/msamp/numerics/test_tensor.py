"""ScalingTensor as a tensor, a Parameter, a gradient, a thing in files and in other processes."""

import copy
import pickle

import pytest
import torch
from torch import nn

import msamp
from helpers.choices import each_value
from helpers.numerics import bits, codes, make, through_a_file
from msamp.numerics.formats import E4M3, E5M2, FP16
from msamp.numerics.pickled_float8 import AsBytes, packed, unpacked
from msamp.numerics.quantize import quantize
from msamp.numerics.tensor import ScalingTensor
from msamp.numerics.tensor_ops import keeping_format

FORMATS = (E4M3, E5M2, FP16)
every_format = pytest.mark.parametrize("fmt", FORMATS, ids=str)


def tensor(fmt=E4M3, shape=(6, 10), dtype=torch.bfloat16, device="cpu") -> ScalingTensor:
    return ScalingTensor.quantize(make("normal", shape, device=device), fmt, dtype=dtype)


def assert_same(a: torch.Tensor, b: torch.Tensor) -> None:
    """Payload bits, scale and outer dtype."""
    assert isinstance(a, ScalingTensor)
    assert isinstance(b, ScalingTensor)
    assert a.dtype == b.dtype
    assert a.payload.dtype == b.payload.dtype
    assert codes(a.payload).equal(codes(b.payload))
    assert bits(a.scale_inv).equal(bits(b.scale_inv))


@every_format
def test_it_looks_like_its_outer_dtype_over_a_small_payload(fmt, device):
    x = tensor(fmt, device=device)
    assert (x.shape, x.dtype, x.device.type) == ((6, 10), torch.bfloat16, device.type)
    assert x.format is fmt
    assert x.payload.dtype == fmt.dtype
    assert x.payload.element_size() == fmt.bytes
    assert x.scale_inv.shape == ()
    assert not x.requires_grad


@every_format
def test_its_value_is_payload_times_scale_inv(fmt):
    values = make("log-normal", (50, 3))
    x = ScalingTensor.quantize(values, fmt)
    assert x.dtype == torch.float32
    assert x.dequantize().equal(x.payload.float() * x.scale_inv)
    assert x.dequantize(torch.bfloat16).equal((x.payload.float() * x.scale_inv).bfloat16())
    assert 2.0 ** torch.log2(x.scale_inv).round() == x.scale_inv


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@every_format
def test_values_that_are_not_finite_poison_the_scale(fmt, bad):
    x = ScalingTensor.quantize(torch.tensor([1.0, bad, 2.0]), fmt)
    assert x.scale_inv.isnan()
    assert x.dequantize().isnan().all()


@every_format
def test_a_conversion_to_a_dtype_gives_plain_values_unless_a_model_is_converted(fmt):
    x = tensor(fmt)
    want = x.dequantize(torch.float32)
    for y in (x.float(), x.clone().double(), x.half(), x.bfloat16(), x.to(torch.bfloat16, copy=True), x.to("cpu", torch.float32)):
        assert type(y) is torch.Tensor
        assert y.equal(want.to(y.dtype))
    assert type(x.type(torch.float64)) is type(x.to(want)) is type(x.long()) is torch.Tensor
    assert type(x.to("cpu", copy=True)) is ScalingTensor
    p = nn.Parameter(x)
    (p.float() * want).sum().backward()
    assert p.grad.float().equal(want.bfloat16().float())
    with keeping_format():
        for dtype in (torch.float32, torch.float16):
            y = x.to(dtype)
            assert y.dtype == dtype
            assert codes(y.payload).equal(codes(x.payload))
            assert y.scale_inv == x.scale_inv
        assert x.bfloat16() is x


@every_format
def test_clone_and_deepcopy_share_nothing(fmt):
    x = tensor(fmt)
    for y in (x.clone(), copy.deepcopy(x)):
        assert_same(x, y)
        assert y.payload.data_ptr() != x.payload.data_ptr()
        assert y.scale_inv.data_ptr() != x.scale_inv.data_ptr()


@every_format
def test_saved_and_loaded_with_weights_only(fmt, tmp_path):
    x = tensor(fmt, (256, 512))
    file = tmp_path / "x.pt"
    torch.save({"x": x, "p": nn.Parameter(x)}, file)
    loaded = torch.load(file, weights_only=True)
    assert_same(loaded["x"], x)
    assert_same(loaded["p"], x)
    assert isinstance(loaded["p"], nn.Parameter)
    assert not isinstance(loaded["x"], nn.Parameter)
    assert file.stat().st_size < x.numel() * fmt.bytes * 1.05 + 4096, "an element takes more bytes in the file than in memory"


@each_value(fmt=FORMATS, protocol=range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickle(fmt, protocol):
    x = tensor(fmt)
    assert_same(pickle.loads(pickle.dumps(x, protocol)), x)
    parameter = pickle.loads(pickle.dumps(nn.Parameter(x), protocol))
    assert isinstance(parameter, nn.Parameter)
    assert parameter.requires_grad


class Use(torch.autograd.Function):
    """x times the values of w, elementwise, with the gradients of both."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w.payload, w.scale_inv)
        return x * w.dequantize(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, payload, scale_inv = ctx.saved_tensors
        return grad * (payload.float() * scale_inv).to(grad.dtype), (grad * x).bfloat16()


class Holder(nn.Module):
    def __init__(self, fmt) -> None:
        super().__init__()
        self.weight = nn.Parameter(tensor(fmt, (4, 8)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Use.apply(x, self.weight)


@every_format
def test_a_parameter_takes_gradients_of_its_outer_dtype(fmt):
    holder = Holder(fmt)
    assert isinstance(holder.weight, ScalingTensor)
    assert isinstance(holder.weight, nn.Parameter)
    x = make("normal", (4, 8), seed=1)
    holder(x).sum().backward()
    holder(x).sum().backward()
    assert holder.weight.grad.dtype == torch.bfloat16
    assert holder.weight.grad.equal(x.bfloat16() + x.bfloat16())


@every_format
def test_it_sits_in_grad(fmt):
    for p in (nn.Parameter(torch.randn(6, 10)), nn.Parameter(tensor(FP16, dtype=torch.float32))):
        p.grad = tensor(fmt, dtype=torch.float32)
        assert isinstance(p.grad, ScalingTensor)
        assert p.grad.payload.element_size() == fmt.bytes
        p.grad.zero_()
        assert p.grad.dequantize().eq(0).all()


@every_format
def test_store_overwrites_in_place(fmt):
    x = tensor(fmt, dtype=torch.float32)
    payload, values = x.payload, make("normal", (6, 10), seed=3) * 100
    version = payload._version
    x.store_(values)
    assert x.payload is payload
    assert payload._version > version
    assert_same(x, ScalingTensor.quantize(values, fmt))
    x.store_(values, torch.tensor(0.5))
    assert x.scale_inv == 2
    assert codes(x.payload).equal(codes(quantize(values, 0.5, fmt)))


@every_format
def test_compiles_as_a_parameter_of_a_model(fmt):
    model = Holder(fmt)
    x = make("normal", (4, 8), seed=4).requires_grad_()
    want = model(x)
    want.sum().backward()
    wanted = [model.weight.grad.clone(), x.grad.clone()]
    model.zero_grad()
    x.grad = None
    torch._dynamo.reset()
    got = torch.compile(model, backend="aot_eager")(x)
    got.sum().backward()
    assert got.equal(want)
    assert model.weight.grad.equal(wanted[0])
    assert x.grad.equal(wanted[1])


@pytest.mark.parametrize("source", FORMATS, ids=str)
@pytest.mark.parametrize("target", FORMATS, ids=str)
def test_state_dict_between_formats(source, target):
    a, b = Holder(source), Holder(target)
    with torch.no_grad():
        b.weight.zero_()
    b.load_state_dict(through_a_file(a.state_dict(), weights_only=True))
    assert b.weight.format is target
    values = a.weight.dequantize(torch.float32)
    if source is target:
        assert_same(b.weight.detach(), a.weight.detach())
    else:
        assert_same(b.weight.detach(), ScalingTensor.quantize(values, target, dtype=torch.bfloat16))


def test_state_dict_from_and_into_plain_weights():
    low, plain = Holder(E4M3), nn.ParameterDict({"weight": torch.randn(4, 8)})
    low.load_state_dict(plain.state_dict())
    assert_same(low.weight.detach(), ScalingTensor.quantize(plain["weight"], E4M3, dtype=torch.bfloat16))
    plain.load_state_dict(low.state_dict())
    assert plain["weight"].equal(low.weight.dequantize(torch.float32))


def test_what_is_assigned_to_data_is_copied_in():
    p = torch.nn.Parameter(ScalingTensor.quantize(make("normal", (4, 6)), E4M3))
    payload, values = p.payload, make("normal", (4, 6), seed=1)
    p.data = values
    assert p.payload is payload
    assert torch.equal(p.detach(), ScalingTensor.quantize(values, E4M3))
    other = ScalingTensor.quantize(values * 7, E4M3)
    p.data = other
    assert torch.equal(p.detach(), other)
    assert p.scale_inv is not other.scale_inv
    with pytest.raises(ValueError, match=r"values of shape \(6, 4\) for a weight of shape \(4, 6\)"):
        p.data = values.t()
    assert torch.equal(p.detach(), other)


def measured(tally: torch.Tensor) -> ScalingTensor:
    x = tensor()
    return ScalingTensor(x.payload, x.scale_inv, x.dtype, tally=tally)


def test_what_was_measured_of_a_payload_holds_until_it_changes():
    tally = torch.tensor([1, 2, 3])
    assert tensor().tally is None
    x = measured(tally)
    assert x.tally is tally
    for other in (x.clone(), copy.deepcopy(x), pickle.loads(pickle.dumps(x)), x.detach(), x.to("cpu", copy=True)):
        assert other.tally is None
    x.payload.view(torch.uint8).view(-1)[0] = 0  # by a view
    assert x.tally is None
    assert copy.deepcopy(x).tally is None
    x = measured(tally)
    x.store_(x.dequantize(torch.float32))
    assert x.tally is None
    x = measured(tally)
    x.payload = x.payload.clone()
    assert x.tally is None


# States with plain float8 tensors survive pickle, deepcopy, copy and torch.save.


WAYS = {"pickle": lambda pair: pickle.loads(pickle.dumps(pair)), "deepcopy": copy.deepcopy, "torch.save": through_a_file}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> list[torch.Tensor]:
    x = make("normal", (16, 32), seed).to(next(model.parameters()).dtype)
    optimizer.zero_grad()
    (model(x) - x).float().square().mean().backward()
    optimizer.step()
    return [msamp.fp32_values(p).clone() for p in model.parameters()]


@pytest.mark.promise("Hosts", "A pickle of model and optimizer trains on bit for bit, with COAT and Collage in FP8 too.")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("recipe", ["coat", "collage-fp8", "O3"])
@pytest.mark.filterwarnings("ignore")
def test_an_optimizer_with_float8_states_trains_on_bit_for_bit(recipe, way):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).to(torch.bfloat16 if recipe == "collage-fp8" else torch.float32)
    pair = msamp.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), recipe)
    step(*pair, 0)
    other = WAYS[way](WAYS[way](pair))  # twice
    for seed in (1, 2):
        assert all(a.equal(b) for a, b in zip(step(*other, seed), step(*pair, seed), strict=True))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_only_float8_is_packed_and_unpacked(dtype):
    x, wide = make("normal", (4, 16)).to(dtype), torch.ones(2)
    held = {"state": {0: {"m": x, "step": wide}, 1: {}}, "param_groups": [1]}
    told = packed(held)
    assert isinstance(told["state"][0]["m"], AsBytes)
    assert told["state"][0]["step"] is wide
    assert held["state"][0]["m"] is x
    assert unpacked(told)["state"][0]["m"] is x
    restored = pickle.loads(pickle.dumps(told))["state"][0]["m"]
    assert restored.dtype == dtype
    assert codes(restored).equal(codes(x))


def test_a_state_without_parameters_is_left_alone():
    assert unpacked({"seed": 1}) == {"seed": 1}
