"""LowPrecisionOptimizer: torch's AdamW in FP32, the golden vectors in FP8, and every row of Table 6."""

import copy
import itertools

import pytest
import torch
from torch import nn

import msamp
from helpers.choices import each_value
from helpers.fp8_adamw import TABLE6, parameter, snapshot
from helpers.numerics import codes, floats, golden, make, same
from msamp.fp16.scaler import LossScaler
from msamp.numerics.formats import BF16, E4M3, E5M2, FP16, FP32
from msamp.numerics.recipe import FP32_STATES, O1, O2, O3, StateFormats
from msamp.numerics.tensor import ScalingTensor
from msamp.optim.clip import clip_
from msamp.optim.optimizer import LowPrecisionOptimizer

ANY = (FP32, BF16, FP16, E4M3, E5M2)
ONE_CHANGED = {f"{field} {fmt}": O2.states.varied(**{field: fmt}) for field, fmt in itertools.product(("master", "grad", "m", "v"), ANY)}


def value(p: torch.Tensor) -> torch.Tensor:
    return p.detach().dequantize(torch.float32) if isinstance(p, ScalingTensor) else p.detach().float()


# --------------------------------------------------------------------------------------------------------- FP32 and golden


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.Adam])
def test_fp32_formats_equal_torch_bit_for_bit_over_50_steps(cls):
    def groups() -> list[dict]:
        ps = [nn.Parameter(make("normal", s, seed=i)) for i, s in enumerate([(33, 17), (5,), (8, 3, 2), (64,), ()])]
        return [
            {"params": ps[:2]},
            {"params": ps[2:4], "lr": 1e-2, "weight_decay": 0.3, "betas": (0.8, 0.95), "eps": 1e-6},
            {"params": ps[4:], "weight_decay": 0.0},
        ]

    ours, theirs = groups(), groups()
    theirs_optimizer = cls(theirs, lr=3e-3, weight_decay=0.1)
    ours_optimizer = LowPrecisionOptimizer(ours, lr=3e-3, weight_decay=0.1, formats=FP32_STATES, decoupled=cls is torch.optim.AdamW)
    for step in range(50):
        for i, (a, b) in enumerate(zip(*([p for g in gs for p in g["params"]] for gs in (ours, theirs)), strict=True)):
            g = None if (step + i) % 4 == 3 or (i == 1 and step < 7) else make("log-normal", a.shape, seed=100 * step + i)
            a.grad, b.grad = g, None if g is None else g.clone()
        for optimizer in (ours_optimizer, theirs_optimizer):
            for group in optimizer.param_groups:
                group["lr"] *= 0.99
            optimizer.step()
    for a, b in zip(*([p for g in gs for p in g["params"]] for gs in (ours, theirs)), strict=True):
        assert a.equal(b)
        for name in ("step", "exp_avg", "exp_avg_sq"):
            assert ours_optimizer.state[a][name].equal(theirs_optimizer.state[b][name]), name


def test_golden_fp8_steps(device):
    vectors = golden("adamw_fp8")
    hyper = vectors["hyper"]
    p = nn.Parameter(ScalingTensor.quantize(floats(vectors["weight"]).to(device), FP16))
    names = ("lr", "eps", "weight_decay", "clip_grad")
    nearest = O2.with_rounding(master="nearest", moments="nearest").states
    optimizer = LowPrecisionOptimizer([p], betas=tuple(hyper["betas"]), formats=nearest, **{n: hyper[n] for n in names})
    for step in vectors["steps"]:
        p.grad = floats(step["grad"]).to(device)
        assert 1 / ScalingTensor.quantize(p.grad, E4M3).scale_inv == step["grad_scale"]
        optimizer.step()
        coefficient = min(1.0, hyper["clip_grad"] / (optimizer.grad_norm.item() + 1e-6))
        assert coefficient == pytest.approx(step["clip_coef"], rel=1e-6)
        state = optimizer.state[p]
        for name, tensor in (("m", state["exp_avg"]), ("v", state["exp_avg_sq"]), ("master", p.detach())):
            assert 1 / tensor.scale_inv == step[f"{name}_scale"], name
            wrong = (codes(tensor.payload) != torch.tensor(step[name])).float().mean()
            assert wrong <= (0 if device.type == "cpu" else 0.01), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_scale_of_an_fp8_weight_follows_the_largest_step(device, dtype):
    """At a rate of 0 no code moves, as a frozen copy expects, and a weight is never larger than its scale can store."""
    weight = (model := nn.Linear(64, 64, bias=False, device=device, dtype=dtype)).weight
    weight.data[0, 0] = 0.21876  # in FP16 and BF16 0.21875, whose scale would be another
    _, optimizer = msamp.initialize(model, torch.optim.AdamW([weight], lr=0.0, betas=(0.9, 0.8), weight_decay=0.1), "O3")
    start, scale = codes(weight.payload), float(weight.scale_inv)
    for step in range(40):
        weight.grad = make("log-normal", (64, 64), seed=step).to(device, dtype)
        optimizer.step()
        if step == 1:
            assert (codes(weight.payload).tolist(), float(weight.scale_inv)) == (start.tolist(), scale)
            optimizer.param_groups[0] |= {"lr": 0.1, "betas": (0.9, 0.95)}
        master = optimizer.state[weight]["master"].dequantize(torch.float32)
        assert ((weight.dequantize(torch.float32) - master).abs() <= master.abs() / 16 + float(weight.scale_inv) * 2**-10).all()
    assert float(weight.scale_inv) > scale


# ---------------------------------------------------------------------------------------------------------------- formats


def descend(formats: StateFormats, weight=FP16, steps=40) -> tuple[float, float]:
    """First and last loss of a linear regression."""
    torch.manual_seed(0)
    x, target = torch.randn(256, 24), torch.randn(24, 16)
    p = parameter(weight=weight)
    optimizer = LowPrecisionOptimizer([p], lr=0.05, betas=(0.9, 0.95), weight_decay=0.0, formats=formats, clip_grad=100.0)
    losses = []
    for _ in range(steps):
        error = x @ (value(p) - target)
        losses.append(error.square().mean().item())
        p.grad = (2 * x.t() @ error / error.numel()).to(p.dtype)
        optimizer.step()
    return losses[0], losses[-1]


@pytest.mark.parametrize("name", [*TABLE6, *ONE_CHANGED])
def test_every_format_runs_and_descends(name):
    first, last = descend({**TABLE6, **ONE_CHANGED}[name], weight=BF16 if name == "#1" else FP16)
    assert last < (0.5 if name == "master fp8-e5m2" else 0.3) * first  # two mantissa bits: updates below an eighth are lost


def nbytes(t: torch.Tensor) -> int:
    return t.payload.nbytes if isinstance(t, ScalingTensor) else t.nbytes


@pytest.mark.parametrize(
    ("level", "want"),
    [
        (O1, {"weight": 2, "grad": 1, "exp_avg": 4, "exp_avg_sq": 4}),
        (O2, {"weight": 2, "grad": 1, "exp_avg": 1, "exp_avg_sq": 2}),
        (O3, {"weight": 1, "grad": 1, "master": 2, "exp_avg": 1, "exp_avg_sq": 2}),
    ],
    ids=lambda v: getattr(v, "name", ""),
)
def test_bytes_per_parameter(level, want):
    p = parameter((64, 32), level.weight)
    optimizer = LowPrecisionOptimizer([p], formats=level.states)
    p.grad = ScalingTensor.quantize(make("normal", (64, 32), seed=1), level.states.grad)
    optimizer.step()
    state = {k: v for k, v in optimizer.state[p].items() if k != "step"}
    measured = {k: nbytes(v) / p.numel() for k, v in {"weight": p, "grad": p.grad, **state}.items()}
    assert measured == want
    assert sum(want.values()) == {"O1": 11, "O2": 6, "O3": 7}[level.name]


def test_the_master_starts_from_given_values():
    values = make("normal", (24, 16))
    p = nn.Parameter(ScalingTensor.quantize(values, E4M3))
    optimizer = LowPrecisionOptimizer([p], lr=0.0, formats=O3.states)
    optimizer.init_masters([(p, values)])
    assert (optimizer.state[p]["master"].dequantize() - values).norm() < 1e-3 * values.norm()
    with pytest.raises(ValueError, match=r"shape \(2, 2\) is not in this optimizer; add its group first"):
        optimizer.init_masters([(parameter((2, 2)), values)])


@pytest.mark.gpu
@pytest.mark.parametrize("level", [O1, O2, O3], ids=lambda r: r.name)
def test_on_the_gpu_as_on_the_cpu(level):
    states = []
    for device in ("cpu", "cuda"):
        p = parameter((512, 256), level.weight, device=device)
        optimizer = LowPrecisionOptimizer([p], formats=level.states, clip_grad=1.0)
        for step in range(5):
            p.grad = make("normal", p.shape, seed=step, device=device)
            optimizer.step()
        states.append({"weight": p.detach(), **{k: v for k, v in optimizer.state[p].items() if k != "step"}})
    for name, on_cpu in states[0].items():
        on_gpu = states[1][name]
        assert on_gpu.is_cuda
        if isinstance(on_cpu, ScalingTensor):
            assert on_gpu.scale_inv.cpu().equal(on_cpu.scale_inv), name
            assert (codes(on_gpu.payload) != codes(on_cpu.payload)).float().mean() <= 0.01, name
        difference = (value(on_gpu).cpu() - value(on_cpu)).norm() / value(on_cpu).norm()
        assert difference < 3e-3, name


# --------------------------------------------------------------------------------------------------- skipping and clipping


BAD = {
    "nan": lambda g: g.index_fill(0, torch.tensor([3]), float("nan")),
    "inf": lambda g: g.index_fill(0, torch.tensor([3]), float("inf")),
    "-inf": lambda g: g.index_fill(0, torch.tensor([3]), -float("inf")),
    "poisoned fp8": lambda g: ScalingTensor.quantize(g.index_fill(0, torch.tensor([3]), float("nan")), E4M3),
    "overflowed fp8": lambda g: ScalingTensor.quantize(g.index_fill(0, torch.tensor([3]), float("inf")), E5M2),
}


@each_value(bad=BAD, formats=[O1.states, O2.states, FP32_STATES, TABLE6["coat"]])
def test_a_step_with_a_gradient_that_is_not_finite_is_skipped_and_counted(bad, formats):
    def run(with_bad_steps: bool) -> LowPrecisionOptimizer:
        ps = [parameter(weight=formats.master), nn.Parameter(torch.ones(7))]
        optimizer = LowPrecisionOptimizer(
            [{"params": ps[:1]}, {"params": ps[1:], "formats": FP32_STATES}], lr=0.01, formats=formats, clip_grad=1.0
        )
        for step in range(6):
            good = [make("normal", p.shape, seed=10 * step + i) for i, p in enumerate(ps)]
            if with_bad_steps and step in (0, 3):
                ps[0].grad, ps[1].grad = BAD[bad](good[0]), good[1]
                before = snapshot(optimizer)
                optimizer.step()
                assert same(snapshot(optimizer), before)
                assert not optimizer.grad_norm.isfinite()
            ps[0].grad, ps[1].grad = good
            optimizer.step()
        return optimizer

    skipping, plain = run(True), run(False)
    assert (skipping.skipped_steps, plain.skipped_steps) == (2, 0)
    assert same(snapshot(skipping), snapshot(plain)), "a skipped step leaves no trace, in the bias correction neither"


@pytest.mark.parametrize("fp8", [True, False])
def test_clipping_inside_the_step_is_clipping_before_it(fp8):
    def run(inside: bool) -> LowPrecisionOptimizer:
        ps = [parameter(seed=0), parameter((8, 8), seed=1)]
        optimizer = LowPrecisionOptimizer(ps, formats=O2.states, clip_grad=0.5 if inside else None)
        for step in range(4):
            for i, p in enumerate(ps):
                g = ScalingTensor.quantize(make("normal", p.shape, seed=10 * step + i), E4M3)
                p.grad = g if fp8 else g.dequantize()
                if not inside and not fp8:
                    p.grad = ScalingTensor.quantize(p.grad, E4M3)
            if not inside:
                clip_([p.grad for p in ps if p.grad is not None], 0.5)
            optimizer.step()
        return optimizer

    assert same(snapshot(run(True)), snapshot(run(False)))


# ---------------------------------------------------------------------------------------------------------------- refusing


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"lr": -1e-3}, r"lr is -0\.001; it must be in \[0\.0, inf\)"),
        ({"lr": float("nan")}, r"lr is nan"),
        ({"betas": (1.0, 0.9)}, r"betas\[0\] is 1\.0; it must be in \[0\.0, 1\.0\)"),
        ({"betas": (0.9, -0.1)}, r"betas\[1\] is -0\.1"),
        ({"eps": -1e-8}, r"eps is -1e-08"),
        ({"weight_decay": -0.1}, r"weight_decay is -0\.1"),
        ({"clip_grad": 0.0}, r"clipping norm is 0\.0; it must be greater than 0"),
        ({"clip_grad": -1.0}, r"clipping norm is -1\.0"),
    ],
)
def test_hyper_parameters_out_of_range_are_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        LowPrecisionOptimizer([parameter()], **setting)
    if "clip_grad" not in setting:
        with pytest.raises(ValueError, match=message):
            LowPrecisionOptimizer([{"params": [parameter()], **setting}])


SHAPES = [(33, 17), (5,), (64, 48)]


def pair(scaler: LossScaler | None, device, clip_grad: float | None = 0.5) -> tuple[LowPrecisionOptimizer, LowPrecisionOptimizer]:
    """FP16 weights with a loss scale, and FP32 weights of the same values without."""
    values = [make("normal", s, seed=i, device=device).half() for i, s in enumerate(SHAPES)]
    narrow, wide = ([nn.Parameter(x.to(dtype)) for x in values] for dtype in (torch.float16, torch.float32))
    settings = {"lr": 0.02, "formats": FP32_STATES, "clip_grad": clip_grad}
    return LowPrecisionOptimizer(narrow, loss_scale=scaler, **settings), LowPrecisionOptimizer(wide, **settings)


def params(optimizer: LowPrecisionOptimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


@pytest.mark.parametrize("clip_grad", [None, 0.5])
def test_the_masters_are_what_fp32_weights_become(clip_grad, device):
    """Gradients are multiples of a power of two, so that the loss scale leaves every bit of them."""
    scaler = LossScaler(growth_interval=2, in_place=True)
    ours, theirs = pair(scaler, device, clip_grad)
    for step in range(5):
        scale = scaler.scale(torch.device(device)).clone()
        for i, (p, q) in enumerate(zip(params(ours), params(theirs), strict=True)):
            q.grad = (make("normal", p.shape, seed=10 * step + i, device=device) * 2**-12).half().float()
            p.main_grad = q.grad * scale
        ours.step()
        theirs.step()
        assert ours.grad_norm == theirs.grad_norm
        assert ours.grad_amaxes.equal(theirs.grad_amaxes)
    for p, q in zip(params(ours), params(theirs), strict=True):
        assert p.dtype is torch.float16
        assert p.equal(ours.state[p]["master"].half())
        # Clipping and unscaling are one factor, rounded once.
        assert ours.state[p]["master"].equal(q) if clip_grad is None else torch.allclose(ours.state[p]["master"], q, rtol=1e-5, atol=1e-6)
    assert scaler.state_dict()["loss_scale"] == 2.0**18


def test_an_overflow_skips_the_step_and_halves_the_scale(device):
    scaler = LossScaler(init_scale=1024.0, hysteresis=2, in_place=True)
    optimizer, _ = pair(scaler, device)
    memory = scaler.scale(torch.device(device))
    before = [p.detach().clone() for p in params(optimizer)]
    for p in params(optimizer):
        p.grad = torch.full_like(p, 60000.0) * 2  # infinite in FP16
    found = []
    for _ in range(3):
        optimizer.step()
        found.append(float(memory))
    assert found == [1024.0, 512.0, 256.0]
    assert optimizer.skipped_steps == 3
    assert bool(optimizer.skipped())
    assert all(p.equal(q) for p, q in zip(params(optimizer), before, strict=True))
    for p in params(optimizer):
        p.grad = torch.full_like(p, 60000.0)
    optimizer.step()
    assert float(optimizer.grad_norm) == pytest.approx(60000.0 / 256 * sum(p.numel() for p in params(optimizer)) ** 0.5, rel=1e-3)
    assert not optimizer.skipped()


def test_copies_keep_the_loss_scale():
    optimizer, _ = pair(LossScaler(8), "cpu")
    assert copy.deepcopy(optimizer).loss_scale.scale(torch.device("cpu")).item() == 8.0


@pytest.mark.parametrize("grouped", [False, True])
def test_plain_fp16_weights_want_an_fp32_master(grouped):
    p, message = nn.Parameter(torch.ones(2, 2).half()), r"torch.float16 and its master fp16; .* requires an fp32 master \(recipe fp16-amp\)"
    with pytest.raises(ValueError, match=message):
        LowPrecisionOptimizer([{"params": [p], "formats": O2.states}] if grouped else [p])
