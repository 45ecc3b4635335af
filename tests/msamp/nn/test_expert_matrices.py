"""Each expert's matrix is a weight of its own, though the products read one tensor of them all."""

import copy
import pickle

import pytest
import torch

import msamp
from helpers.moe_model import EXPERTS, HIDDEN, WIDTH, Mixture, batch, initialized, train
from helpers.numerics import through_a_file
from msamp.kernels import ops
from msamp.nn import expert_matrices
from msamp.nn.expert_matrices import ExpertMatrices
from msamp.nn.scaling_state import LinearScaling
from msamp.numerics.recipe import O2, O3
from msamp.numerics.tensor import ScalingTensor


def made(recipe=O2) -> tuple[torch.nn.Parameter, ExpertMatrices]:
    """A weight whose experts differ in magnitude, and its matrices."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(EXPERTS, 32, 16) * torch.tensor([1.0, 8.0, 64.0, 1e-3]).view(-1, 1, 1))
    weight.grad, weight._no_weight_decay = torch.ones_like(weight), True
    return weight, ExpertMatrices(weight, recipe, LinearScaling(recipe.gemm), "layer.fc1")


def joined(matrices: ExpertMatrices) -> bool:
    """Whether the payloads are the slices of one tensor, in order."""
    payloads = [p.payload for p in matrices.matrices]
    size = payloads[0].nbytes
    return [p.data_ptr() for p in payloads] == [payloads[0].data_ptr() + e * size for e in range(len(payloads))]


@pytest.mark.parametrize("recipe", [O2, O3], ids=["O2", "O3"])
def test_every_matrix_has_its_own_scale_in_one_payload(recipe):
    weight, matrices = made(recipe)
    assert joined(matrices)
    assert [name for name, _ in matrices.named_parameters()] == ["0", "1", "2", "3"]
    for e, p in enumerate(matrices.matrices):
        want = ScalingTensor.quantize(weight[e], recipe.weight)
        assert p.scale_inv.equal(want.scale_inv)
        assert p.dequantize().equal(want.dequantize())
        assert (p.label, p._no_weight_decay, p.grad.shape) == (f"layer.fc1.{e}", True, (32, 16))
    assert len({float(p.scale_inv) for p in matrices.matrices}) == EXPERTS
    _, operands = matrices()
    values = operands.rows.float() * operands.scale_inv.view(-1, 1, 1)
    assert ((values - weight).flatten(1).norm(dim=1) < 0.03 * weight.flatten(1).norm(dim=1)).all()
    assert operands.columns.float().equal(operands.rows.float().transpose(1, 2))


def test_weights_are_cast_once_per_step(monkeypatch):
    calls = []
    original = ops.expert_cast
    monkeypatch.setattr(expert_matrices.ops, "expert_cast", lambda *args: calls.append(1) or original(*args))
    model, optimizer = initialized()
    x, target = batch()
    for step in range(2):
        with optimizer.no_sync():
            (model(x) - target).square().mean().backward()
        (model(x) - target).square().mean().backward()
        with torch.no_grad():
            model(x)
        assert len(calls) == 2 * (step + 1)  # FC1 and FC2
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model(x)
        assert len(calls) == 6
        model.experts.fc1_weight.matrices[2].mul_(0.5)
        model(x)
    assert len(calls) == 7


def test_one_launch_updates_the_matrices_of_all_experts():
    model, optimizer = initialized()
    train(model, optimizer, 1)
    ready = [h for h in optimizer.holdings() if h.param in set(model.experts.parameters())]
    for holding in ready:
        holding.grad = torch.zeros_like(holding.param)
    assert len(ready) == 2 * EXPERTS
    assert len(list(optimizer.batches(ready))) == 1


def copies(model: Mixture):
    yield "deep copy", copy.deepcopy(model)
    yield "pickle", pickle.loads(pickle.dumps(model))
    yield "torch.save", through_a_file(model)
    yield "moved", copy.deepcopy(model).to(torch.bfloat16).to(torch.float32)


def test_copies_keep_one_payload_and_the_values():
    model, optimizer = initialized("O3")
    train(model, optimizer, 3)
    x, _ = batch()
    want = model.eval()(x)
    for how, other in copies(model):
        fc1 = other.experts.fc1_weight
        assert joined(fc1), how
        assert fc1.matrices[0].payload.data_ptr() != model.experts.fc1_weight.matrices[0].payload.data_ptr(), how
        if how != "moved":
            assert other.eval()(x).equal(want), how
    assert len(pickle.dumps(model.experts)) < 2.5 * EXPERTS * 3 * WIDTH * HIDDEN, "every slice is written once"
    again = Mixture()
    msamp.convert(again, O3, lambda name, layer: "router" not in name)
    again.load_state_dict(model.state_dict(), assign=True)
    assert again.eval()(x).equal(want)
    assert joined(again.experts.fc1_weight)
