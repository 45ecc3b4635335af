"""The twin of the Collage update: what it reads and writes, and that the optimizer computes the same."""

import math

import pytest
import torch

from helpers.adamw_inputs import adamw_batch
from helpers.numerics import bits
from msamp.kernels.reference.adamw import Hyper
from msamp.kernels.reference.collage import VARIANTS, collage, power
from msamp.optim import updates
from msamp.optim.collage import collage_adamw

HYPER = Hyper(lr=3e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1)
UPDATES = [name for name, variant in VARIANTS.items() if variant.dtype is torch.bfloat16]


# Collage, Table 2, and pairs with 8 bits: option -> what stands beside weight and second moment, one byte an element in "fp8".
BESIDE = {
    "a": {},
    "kahan": {"weight_remainder": "bf16"},
    "light": {"weight_remainder": "bf16"},
    "plus": {"weight_remainder": "bf16", "exp_avg_sq_remainder": "bf16"},
    "light-published": {"weight_remainder": "bf16"},
    "plus-published": {"weight_remainder": "bf16", "exp_avg_sq_remainder": "bf16"},
    "fp8": {"weight_remainder": "remainder-e4m3", "exp_avg_sq_remainder": "remainder-e4m3"},
}


@pytest.mark.parametrize(("update", "beside"), BESIDE.items())
def test_each_option_keeps_what_the_table_says(update, beside):
    assert {state.key: str(state.format) for state in updates.by_name(update).states if state.remainder_of} == beside
    assert VARIANTS[update].pair_v == ("exp_avg_sq_remainder" in beside)
    assert set(BESIDE) == set(UPDATES)


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("clip", [None, 1.0, 0.3])
def test_many_tensors_at_once_as_the_optimizer(update, clip):
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator).bfloat16()) for shape in ((12, 8), (), (5,))]
    weights = [p.detach().clone() for p in params]

    keys = {state.key: state.format for state in updates.by_name(update).states if state.remainder_of}

    def zeros(key: str = "") -> list[torch.Tensor]:
        dtype = keys[key].dtype if key in keys else torch.bfloat16
        return [torch.zeros_like(w, dtype=dtype) for w in weights] if not key or key in keys else []

    beside = {"weight_remainders": zeros("weight_remainder"), "v_remainders": zeros("exp_avg_sq_remainder")}
    batch = adamw_batch(zeros(), zeros(), zeros(), weights, **beside)
    alone = collage_adamw(params, HYPER.lr, HYPER[1:3], HYPER.eps, HYPER.weight_decay, variant=update)
    for _ in range(6):
        for p, g in zip(params, batch.grads, strict=True):
            g.copy_(torch.randn(p.shape, generator=generator) * 0.1)
            p.grad = g if clip is None else (g.float() * torch.tensor(clip)).bfloat16()
        alone.step()
        coefficient = None if clip is None else torch.tensor(clip)
        collage(None, batch, torch.tensor(HYPER, dtype=torch.float64), update, coefficient, torch.tensor(True))
    assert [float(step) for step in batch.steps] == [6.0] * 3
    for i, p in enumerate(params):
        assert bits(weights[i]).equal(bits(p.detach()))
        for key, column in batch.states.items():
            assert bits(column[i]).equal(bits(alone.state[p][key])), key


def test_as_published_eps_is_below_the_root_and_v_is_added_by_fast_two_sum():
    """One step from v = 2^-10 with squares of 1 x (1 - beta2): beta2 1/2 and a power of two for eps keep every number exact but the sum."""
    v, g, hyper = 2.0**-10, 1.0, Hyper(lr=1.0, beta1=0.5, beta2=0.5, eps=0.25, weight_decay=0.0)
    found = {}
    for update in ("plus", "plus-published"):
        one = [torch.tensor([x], dtype=torch.bfloat16) for x in (g, 0.0, v, 0.0, 0.0, 0.0)]
        batch = adamw_batch(*([x] for x in one[:4]), weight_remainders=[one[4]], v_remainders=[one[5]])
        collage(None, batch, torch.tensor(hyper, dtype=torch.float64), update, None, torch.tensor(True))
        found[update] = float(one[3]), float(one[2]), float(one[5])
    total = 0.5 * v + 0.5 * g
    assert found["plus"][1] + found["plus"][2] == total
    assert found["plus-published"][1:] == (0.5, 0.0)  # Fast2Sum of a smaller first number loses the error
    root = torch.tensor(2 * 0.5 + 0.25).bfloat16().sqrt()  # v is corrected by 1 - beta2
    assert found["plus-published"][0] == -float((torch.tensor(0.5 / 0.5).bfloat16() / root).bfloat16())
    assert found["plus"][0] == -float((torch.tensor(1.0).bfloat16() / torch.tensor(1.25).bfloat16()).bfloat16())


def test_a_step_that_is_not_usable_reads_and_writes_nothing():
    weight = torch.ones(4, dtype=torch.bfloat16)
    batch = adamw_batch([weight.clone()], [weight.clone()], [weight.clone()], [weight], step=3.0)
    collage(None, batch, torch.tensor(HYPER, dtype=torch.float64), "a", None, torch.tensor(False))
    assert weight.eq(1).all()
    assert batch.ms[0].eq(1).all()
    assert batch.steps[0] == 3


@pytest.mark.parametrize("base", [0.0, 0.9, 0.95, 0.999, 0.5])
def test_powers(base):
    for exponent in (0, 1, 2, 9, 1000, 10**6, 2**24):
        assert math.isclose(power(base, exponent), base**exponent, rel_tol=1e-9, abs_tol=0.0)
