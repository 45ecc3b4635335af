"""Adam's arithmetic against torch's, bit for bit, and against the textbook in FP64."""

import pytest
import torch

from helpers.adamw_inputs import adamw_batch
from helpers.choices import every_value
from helpers.numerics import make
from msamp.kernels.reference.adamw import Batch, Hyper, adam_, adamw
from msamp.numerics.formats import COAT_E4M3, E4M3, FP16
from msamp.numerics.quantize import quantize
from msamp.numerics.range_expand import quantize_expanded
from msamp.numerics.tensor import ScalingTensor


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_bit_for_bit_what_torch_computes(decoupled, weight_decay):
    p = make("normal", (33, 17))
    reference = torch.nn.Parameter(p.clone())
    cls = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = cls([reference], lr=3e-3, betas=(0.8, 0.99), eps=1e-6, weight_decay=weight_decay)
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    for step in range(1, 21):
        g = make("log-normal", (33, 17), seed=step)
        reference.grad = g.clone()
        optimizer.step()
        g = g if decoupled else torch.add(g, p, alpha=weight_decay)  # Adam's decay is the gradient's
        adam_([p], [m], [v], [g], [step], Hyper(3e-3, 0.8, 0.99, 1e-6, weight_decay if decoupled else 0.0))
    assert p.equal(reference)
    assert m.equal(optimizer.state[reference]["exp_avg"])
    assert v.equal(optimizer.state[reference]["exp_avg_sq"])


def test_one_step_of_the_textbook():
    p, g = torch.tensor([1.0, -2.0], dtype=torch.float64), torch.tensor([0.5, 0.25], dtype=torch.float64)
    m, v = torch.tensor([0.1, 0.2], dtype=torch.float64), torch.tensor([0.3, 0.4], dtype=torch.float64)
    want_m, want_v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g**2
    m_hat, v_hat = want_m / (1 - 0.9**3), want_v / (1 - 0.99**3)
    want = p * (1 - 0.01 * 0.1) - 0.01 * m_hat / (v_hat.sqrt() + 1e-8)
    adam_([p], [m], [v], [g], [3], Hyper(0.01, 0.9, 0.99, 1e-8, 0.1))
    for got, expected in ((p, want), (m, want_m), (v, want_v)):
        assert torch.allclose(got, expected, rtol=1e-12)


def test_each_tensor_has_its_own_step():
    def alone(step: int) -> torch.Tensor:
        p = torch.ones(4)
        adam_([p], [torch.zeros(4)], [torch.zeros(4)], [torch.full((4,), 0.3)], [step], Hyper(0.1, 0.9, 0.999, 1e-8, 0.0))
        return p

    ps = [torch.ones(4), torch.ones(4)]
    zeros = [[torch.zeros(4), torch.zeros(4)] for _ in range(2)]
    adam_(ps, *zeros, [torch.full((4,), 0.3) for _ in range(2)], [1, 100], Hyper(0.1, 0.9, 0.999, 1e-8, 0.0))
    assert ps[0].equal(alone(1))
    assert ps[1].equal(alone(100))


def test_a_weight_midway_between_two_codes_does_not_jump_by_an_update_that_its_master_does_not_take():
    """1.0625 is midway between 1 and 1.125, E4M3's neighbours; the even one, 1, is its cast, and that of every smaller master."""
    p = torch.full((4, 16), 1.0625)
    master, weight = ScalingTensor.quantize(p, FP16), ScalingTensor.quantize(p, E4M3)
    batch = adamw_batch([-torch.ones_like(p)], [torch.zeros_like(p)], [torch.zeros_like(p)], [master], weights=[weight])
    amaxes, hyper = torch.tensor([[1.0], [0.0], [0.0], [1.0625]]), torch.tensor(Hyper(1e-5, 0.9, 0.999, 1e-8, 0.0), dtype=torch.float64)
    adamw(None, batch, hyper, amaxes, torch.zeros(3, 1), None, torch.tensor(True), decoupled=True)
    assert master.dequantize(torch.float32).eq(1.0625).all()  # half a unit in FP16's last place is 5e-4
    assert weight.dequantize(torch.float32).eq(1.0).all()
    assert quantize(p + 1e-5, 1 / weight.scale_inv, E4M3).float().mul(weight.scale_inv).eq(1.125).all()  # of the unrounded master


def batch(**columns) -> Batch:
    """Two parameters of 16 elements, with `columns` in place of some lists."""
    return adamw_batch(**({name: [torch.ones(16), torch.ones(16)] for name in ("grads", "ms", "vs", "masters")} | columns))


@pytest.mark.parametrize(
    ("column", "name"), [("grads",) * 2, ("ms", "exp_avg"), ("vs", "exp_avg_sq"), ("steps",) * 2, ("indices",) * 2, ("places",) * 2]
)
def test_lists_of_unequal_length_are_refused(column, name):
    lists = {"steps": batch().steps, "indices": [0, 1], "places": [0, 1], column: getattr(batch(), column)[:1]}
    with pytest.raises(ValueError, match=f"2 masters were passed with 1 {name}; pass the same number"):
        batch(**lists)


@pytest.mark.promise("Optimizer states", "No fused update runs if gradients, states and parameters do not match.")
@every_value
@pytest.mark.parametrize("column", ["grads", "ms", "vs", "masters", "weights", "weight_remainders", "v_remainders"])
@pytest.mark.parametrize("other", [torch.ones(1024), torch.ones(4, 4), torch.ones(16, device="meta")], ids=["length", "shape", "device"])
def test_a_state_of_another_shape_or_device_than_its_gradient_is_refused(column, other):
    """1,008 elements behind a state of 16 would be written."""
    with pytest.raises(ValueError, match="a parameter, its gradient and its states must have the same shape and device"):
        batch(**{column: [torch.ones(16), other]})


@pytest.mark.parametrize(
    "other",
    [torch.ones(16).bfloat16(), ScalingTensor.quantize(torch.ones(16), FP16), quantize_expanded(torch.ones(16), COAT_E4M3)],
    ids=["dtype", "scale", "groups"],
)
def test_a_list_in_two_formats_is_refused(other):
    with pytest.raises(ValueError, match=r"exp_avg have several formats .*; put tensors of one format in a batch"):
        batch(ms=[torch.ones(16), other])
