"""Collage by the one optimizer: NumPy's BF16 bit for bit, torch's AdamW where FP32 is kept, and what BF16 alone loses."""

import ml_dtypes
import numpy as np
import pytest
import torch

from msamp.kernels.reference.collage import VARIANTS
from msamp.numerics import mcf
from msamp.numerics.formats import E4M3
from msamp.numerics.tensor import ScalingTensor
from msamp.optim.collage import collage_adamw, update_quality
from msamp.optim.optimizer import LowPrecisionOptimizer
from msamp.optim.update_error import lost_updates

IN_BF16 = ("a", "light", "plus", "fp8", "kahan")
PAIRED = ("light", "plus", "fp8", "light-published", "plus-published", "kahan")
HYPER = {"lr": 3e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
every_variant = pytest.mark.parametrize("variant", VARIANTS)


def parameters(seed: int = 0, shapes=((12, 8), (8,))) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).bfloat16()) for shape in shapes]


def give_gradients(params: list[torch.nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = (torch.randn(p.shape, generator=generator) * 0.1).to(p.dtype)


def train(optimizer: torch.optim.Optimizer, steps: range) -> torch.optim.Optimizer:
    for seed in steps:
        give_gradients([p for group in optimizer.param_groups for p in group["params"]], 100 + seed)
        optimizer.step()
    return optimizer


def tensors(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Weights and states by name."""
    found = {}
    for number, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        found |= {f"{number} weight": p.detach(), **{f"{number} {key}": x for key, x in optimizer.state[p].items()}}
    return found


def value(optimizer: LowPrecisionOptimizer, p: torch.Tensor) -> torch.Tensor:
    """What a weight stands for, FP64."""
    state = optimizer.state[p]
    x, y = mcf.load_pair(p.detach(), state.get("weight_remainder", torch.zeros_like(p)))
    return state["master"].double() if "master" in state else x.double() + y.double()


# ------------------------------------------------------------------------------------------------- independent definitions


def fast(a, b):
    x = a + b
    return x, b - (x - a)


def two(a, b):
    x = a + b
    from_b = x - a
    return x, (a - (x - from_b)) + (b - from_b)


def grown(pair, a, add):
    u, v = add(pair[0], a)
    return fast(u, pair[1] + v)


def eight_bits(x, y):
    """`y` in E4M3, in units of which half of x's last place has 256, no further than where `x` is x + y rounded."""
    unit = np.ldexp(1.0, np.frexp(x.astype(np.float64))[1] - 1 - 8 - 8)
    limit = 256.0 - 16.0 * (x.view(np.uint16) % 2)
    units = np.clip(y.astype(np.float64) / unit, -limit, limit).astype(ml_dtypes.float8_e4m3fn)
    return (units.astype(np.float64) * unit).astype(ml_dtypes.bfloat16)


def by_numpy(variant, theta, grads, *, lr, betas, eps, weight_decay):
    """Algorithm 2 with arrays of ml_dtypes.bfloat16, each of whose operations is rounded: (theta, remainder, m, v, remainder of v)."""
    bf16 = ml_dtypes.bfloat16
    lr, decay, eps = bf16(-lr), bf16(weight_decay), bf16(eps)
    rest, m, v, v_rest = (np.zeros_like(theta) for _ in range(4))
    beta2 = bf16(betas[1]), bf16(betas[1] - float(bf16(betas[1])))
    for t, g in enumerate(grads, 1):
        m = bf16(betas[0]) * m + bf16(1 - betas[0]) * g
        squares = bf16(1 - betas[1]) * (g * g)
        if variant in ("plus", "fp8"):
            p = beta2[0] * v
            e = (np.float64(beta2[0]) * v.astype(np.float64) - p.astype(np.float64)).astype(bf16)
            v, v_rest = grown(fast(p, e + (beta2[0] * v_rest + v * beta2[1])), squares, two)
        else:
            v = beta2[0] * v + squares
        m_hat, v_hat = m / bf16(1 - betas[0] ** t), v / bf16(1 - betas[1] ** t)
        delta = lr * (m_hat / (np.sqrt(v_hat) + eps) + decay * theta)
        if variant == "a":
            theta = theta + delta
        elif variant == "kahan":  # as it is usually written, with the sign of the compensation turned
            wanted = delta + rest
            new = theta + wanted
            theta, rest = new, wanted - (new - theta)
        else:
            theta, rest = grown((theta, rest), delta, fast)
        if variant == "fp8":
            rest, v_rest = eight_bits(theta, rest), eight_bits(v, v_rest)
    return theta, rest, m, v, v_rest


@pytest.mark.parametrize("variant", IN_BF16)
def test_every_operation_is_rounded_to_bf16(variant):
    p = parameters(shapes=[(64, 8)])[0]
    with torch.no_grad():
        p[:8] = 0
        p[8:16] *= 2**-12  # smaller than an update, where Fast2Sum loses digits
    start = p.detach().clone()
    optimizer = collage_adamw([p], **HYPER, variant=variant)
    grads = []
    for seed in range(12):
        give_gradients([p], seed)
        grads.append(p.grad.float().numpy().astype(ml_dtypes.bfloat16))
        optimizer.step()
    want = by_numpy(variant, start.float().numpy().astype(ml_dtypes.bfloat16), grads, **HYPER)
    state = optimizer.state[p]
    zero = torch.zeros_like(p)
    rest = mcf.load_pair(p, state.get("weight_remainder", zero))[1]
    v_rest = mcf.load_pair(state["exp_avg_sq"], state.get("exp_avg_sq_remainder", zero))[1]
    got = (p.detach(), rest, state["exp_avg"], state["exp_avg_sq"], v_rest)
    for name, mine, his in zip(("theta", "remainder", "m", "v", "remainder of v"), got, want, strict=True):
        assert np.array_equal(mine.float().numpy(), his.astype(np.float32)), name


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_variant_d_is_torchs_adamw_on_its_master(weight_decay):
    params = parameters()
    reference = [torch.nn.Parameter(p.detach().float()) for p in params]
    ours = collage_adamw(params, **{**HYPER, "weight_decay": weight_decay}, variant="d")
    torchs = torch.optim.AdamW(reference, **{**HYPER, "weight_decay": weight_decay})
    for seed in range(50):
        give_gradients(params, seed)
        for p, q in zip(params, reference, strict=True):
            q.grad = p.grad.float()
        ours.step()
        torchs.step()
    for p, q in zip(params, reference, strict=True):
        torch.testing.assert_close(ours.state[p]["master"], q.detach(), rtol=1e-5, atol=1e-6)
        assert p.detach().equal(ours.state[p]["master"].bfloat16())


# ------------------------------------------------------------------------------------------------------------ EDQ and memory


@every_variant
def test_edq_of_an_update_that_bf16_cannot_see(variant):
    p = torch.nn.Parameter(torch.full((50,), 200.0, dtype=torch.bfloat16))
    optimizer = collage_adamw([p], lr=0.1, betas=(0.0, 0.0), weight_decay=0.0, variant=variant)
    p.grad = torch.zeros_like(p)
    optimizer.step()  # which leaves the weights as they are
    p.grad = torch.ones_like(p)
    quality = update_quality(optimizer)
    optimizer.step()
    kept = variant in (*PAIRED, "d")
    assert quality.edq == pytest.approx(0.1 * 50**0.5 if kept else 0.0, rel=2.0**-5 if variant == "fp8" else 2.0**-7)
    assert (quality.lost_frac, quality.norm) == (0.0 if kept else 1.0, pytest.approx(0.1 * 50**0.5, rel=2.0**-7))
    assert value(optimizer, p) == pytest.approx(200.0 - 0.1 * kept, abs=2e-3)


@pytest.mark.parametrize(("variant", "left"), [("a", 1.0), ("fp8", 0.9963), ("light", 0.9048), ("kahan", 0.9048), ("d", 0.9048)])
def test_what_is_left_of_a_weight_after_a_thousand_decays_of_1e_4_and_that_the_loss_is_reported(variant, left):
    """docs/reference/numbers.md: in FP32 (1 - 1e-4)^1000; a pair with a remainder in E4M3 stalls."""
    p = torch.nn.Parameter(torch.linspace(0.5, 1.5, 512).bfloat16())
    optimizer, start = collage_adamw([p], lr=1e-3, weight_decay=0.1, variant=variant), p.double().sum().item()
    p.grad = torch.zeros_like(p)
    for _ in range(1000):
        optimizer.step()
    assert float(value(optimizer, p).sum()) / start == pytest.approx(left, abs=3e-4)
    assert list(lost_updates(optimizer).values()) == pytest.approx([float(left > 0.99)], abs=0.02)


def test_an_unknown_variant_and_parameters_that_are_not_plain_bf16_are_refused():
    with pytest.raises(
        ValueError, match="variant 'b' is unknown; choose one of a, kahan, light, plus, fp8, light-published, plus-published, d-mw, d"
    ):
        collage_adamw(parameters(), variant="b")
    optimizer = collage_adamw(parameters())
    for p, kind in ((torch.zeros(4, 2), "torch.float32"), (ScalingTensor.quantize(torch.ones(4, 2).bfloat16(), E4M3), "a ScalingTensor")):
        with pytest.raises(ValueError, match=rf"is {kind}; update 'plus' requires plain torch.bfloat16"):
            optimizer.add_param_group({"params": [torch.nn.Parameter(p)]})
    assert len(optimizer.param_groups) == 1
    train(optimizer, range(1))
