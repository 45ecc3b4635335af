"""Conversion keeps Parameter objects, with what hangs on them, or refuses before it has changed anything."""

import pytest
import torch
from torch import nn

import msamp
from msamp.integrations import fsdp
from msamp.nn.convert import convert
from msamp.nn.linear import FP8Conv1D
from msamp.nn.parameter_swap import check_swappable, swap_contents_
from msamp.numerics import recipe
from msamp.numerics.tensor import ScalingTensor
from msamp.parallel.sharded_weight import ShardedWeight

Conv1D = type("Conv1D", (nn.Module,), {"__module__": "transformers.pytorch_utils"})


def conv1d() -> nn.Module:
    layer = Conv1D()
    torch.manual_seed(0)
    layer.weight, layer.bias = nn.Parameter(torch.randn(32, 48)), nn.Parameter(torch.zeros(48))
    return layer


def net() -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({"fc": nn.Linear(32, 48), "attention": nn.MultiheadAttention(32, 2, batch_first=True), "conv": conv1d()})


def loss_of(model: nn.ModuleDict) -> torch.Tensor:
    x = torch.randn(2, 4, 32, generator=torch.Generator().manual_seed(1))
    conv = model["conv"]
    by_conv = conv(x) if isinstance(conv, FP8Conv1D) else x @ conv.weight + conv.bias
    return model["fc"](x).square().mean() + model["attention"](x, x, x)[0].square().mean() + by_conv.square().mean()


WEIGHTS = ("fc.weight", "attention.in_proj_weight", "attention.out_proj.weight", "conv.weight")


def state_of(model: nn.Module) -> dict[str, object]:
    """All of a model that a conversion may change."""
    found: dict[str, object] = {name: type(module) for name, module in model.named_modules()}
    for name, x in [*model.named_parameters(), *model.named_buffers()]:
        found |= {f"{name} {what}": value for what, value in (("id", id(x)), ("type", type(x)), ("vars", dict(vars(x))))}
        found |= {f"{name} values": x.detach().clone(), f"{name} version": x._version, f"{name} hooks": dict(x._backward_hooks or {})}
    return found


def assert_same(before: dict[str, object], after: dict[str, object]) -> None:
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert value.equal(after[name]) if isinstance(value, torch.Tensor) else value == after[name], name


@pytest.mark.promise("Conversion", "Parameters stay the same objects, with hooks, attributes and gradients.")
@pytest.mark.parametrize("how", ["O1", "O3", "coat", "fsdp"])
def test_parameters_stay_the_objects_that_they_are_with_what_hangs_on_them(how):
    model = net()
    loss_of(model).backward()
    params, gradients = dict(model.named_parameters()), {name: p.grad for name, p in model.named_parameters()}
    fired: dict[str, int] = {}
    handles = []

    def count(name):
        return lambda *_: fired.__setitem__(name, fired.get(name, 0) + 1)

    for name, p in params.items():
        p.mark, p.order = name, [1]
        handles += [p.register_hook(count(f"{name} hook")), p.register_post_accumulate_grad_hook(count(f"{name} post"))]
    if how == "fsdp":
        assert fsdp.prepare(model, recipe="O2") is model
    else:
        convert(model, recipe.by_name(how))
    for name, p in model.named_parameters():
        assert p is params[name]
        assert isinstance(p, nn.Parameter)
        sharded = how == "fsdp" and "in_proj" not in name
        assert type(p) is ((ShardedWeight if sharded else ScalingTensor) if name in WEIGHTS else nn.Parameter)
        assert (p.mark, p.order) == (name, [1])
        assert p.grad.data_ptr() == gradients[name].data_ptr()
        assert p.grad.shape == p.shape
    loss_of(model).backward()
    assert fired == {f"{name} {kind}": 1 for name in params for kind in ("hook", "post")}
    for handle in handles:
        handle.remove()
    loss_of(model).backward()
    assert set(fired.values()) == {1}


@pytest.mark.promise("Conversion", "A live view of a weight is refused before the conversion.")
@pytest.mark.parametrize("recorded", [True, False])
def test_a_live_view_is_refused_and_nothing_has_changed(recorded):
    for weight in WEIGHTS:
        model = net()
        before = state_of(model)
        with torch.set_grad_enabled(recorded):
            flat = model.get_parameter(weight).view(-1)
        for call in (lambda m: convert(m, recipe.O2), lambda m: msamp.initialize(m, recipe="O3"), lambda m: fsdp.prepare(m, recipe="O2")):
            with pytest.raises(ValueError, match=f"{weight} .* a view of it"):
                call(model)
            assert_same(before, state_of(model))
        del flat
        convert(model, recipe.O2)


def test_a_held_autograd_node_is_refused_since_its_hooks_would_be_lost():
    model = net()
    weight = model["fc"].weight
    nodes = [weight.expand_as(weight).grad_fn.next_functions[0][0]]
    with pytest.raises(ValueError, match=r"fc\.weight .* its autograd node"):
        convert(model, recipe.O2)
    nodes.clear()
    convert(model, recipe.O2)


def test_a_graph_of_a_forward_before_the_conversion_raises_in_its_backward():
    model = net()
    before, again = loss_of(model), loss_of(model)
    again.backward()
    model.zero_grad()
    convert(model, recipe.O2)
    loss_of(model).backward()
    expected = model["fc"].weight.grad.clone()
    with pytest.raises(RuntimeError, match="this graph is from a forward before msamp converted the model"):
        before.backward()
    assert model["fc"].weight.grad.equal(expected)


@pytest.mark.promise("Conversion", "Weights in common memory stay unconverted, so that they stay tied.")
def test_weights_that_share_memory_stay_as_they_are():
    model = nn.ModuleDict(
        {"embedding": nn.Embedding(64, 32), "head": nn.Linear(32, 64), "qkv": nn.Linear(32, 96), "query": nn.Linear(32, 32)}
    )
    model["fc"] = nn.Linear(32, 32)
    model["head"].weight.data = model["embedding"].weight.data  # tied by memory, and two Parameters
    model["query"].weight = nn.Parameter(model["qkv"].weight.detach()[32:64])  # one of three that are fused
    found = msamp.survey(model)
    assert found.converted == ["fc"]
    assert {found.left[name] for name in ("head", "qkv", "query")} == {"another module holds the same weight"}
    convert(model, recipe.O2)
    with torch.no_grad():
        model["embedding"].weight.add_(1.0)
    assert model["head"].weight.equal(model["embedding"].weight)


def test_swap_contents_keeps_the_attributes_of_the_new_contents():
    p, new = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.ones(3, 2))
    p.mine, p.both, new.both = 1, "old", "new"
    check_swappable({"p": p})
    swap_contents_(p, new, transposed=True)
    assert (p.mine, p.both) == (1, "new")
    assert p.equal(torch.ones(3, 2))
    assert new.equal(torch.zeros(2, 3))
