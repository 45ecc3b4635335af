"""Our linear layers in megatron-core's classes: against msamp's FP8Linear, the weight as drawn, marks, bytes sent, `print(model)`."""

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from helpers import dist, tiny
from megatron.lm.config.sections.precision import build_recipe
from megatron.lm.model import linear
from megatron.lm.model.gpt import build_model, transformer_config
from megatron.lm.model.linear import layer_linears
from megatron.lm.processes import process_groups
from msamp.comm.counters import WireBytes, all_gather_sent, all_reduce_sent
from msamp.nn.linear import FP8Linear
from msamp.nn.scaling_state import ScalingState
from msamp.numerics.recipe import BF16, O1, O2, O3, Recipe
from msamp.numerics.scaling import Delayed

pytestmark = pytest.mark.usefixtures("one_process")

IN, OUT = 32, 48
normal_ = functools.partial(nn.init.normal_, std=0.1)


def make(kind: str, recipe: Recipe) -> nn.Module:
    """One column- or row-parallel layer [OUT, IN] as the specification's slots construct them, with the bias kept apart."""
    settings = tiny.config("corpus")
    core = transformer_config(settings.model, settings.parallel, settings.training, recipe)
    common = {"config": core, "init_method": normal_, "bias": True, "skip_bias_add": True}
    if kind == "column":
        return layer_linears(recipe)["linear_fc1"](IN, OUT, gather_output=False, is_expert=False, **common)
    return layer_linears(recipe)["linear_fc2"](IN, OUT, input_is_parallel=True, is_expert=False, **common)


def random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(process_groups.device(), torch.bfloat16)


def twin_of(layer: nn.Module, recipe: Recipe) -> FP8Linear:
    """msamp's layer with the very payload of ours."""
    twin = FP8Linear(IN, OUT, bias=False, recipe=recipe, device=process_groups.device(), dtype=torch.bfloat16)
    with torch.no_grad():
        twin.weight.copy_(layer.weight)
    return twin


@pytest.mark.parametrize("kind", ["column", "row"])
@pytest.mark.parametrize("recipe", [recipe.with_scaling(Delayed(window=3)) for recipe in (O1, O2, O3)], ids=lambda r: r.name)
def test_equals_fp8_linear_over_a_window_and_beyond(kind: str, recipe: Recipe):
    ours = make(kind, recipe)
    twin = twin_of(ours, recipe)
    states = [ScalingState(layer) for layer in (ours, twin)]
    for step in range(5):  # just in time, then delayed
        x = [((1 + step) * random(8, 2, IN, seed=step)).requires_grad_() for _ in range(2)]
        g = random(8, 2, OUT, seed=100 + step) * 1e-3
        (y, bias), expected = ours(x[0]), twin(x[1])
        assert y.dtype is torch.bfloat16
        assert torch.equal(y, expected)
        assert bias is ours.bias  # the layer behind adds it, in its own fused way
        y.backward(g)
        expected.backward(g)
        assert torch.equal(x[0].grad, x[1].grad)
        assert torch.equal(ours.weight.grad, twin.weight.grad)
        ours.weight.grad = twin.weight.grad = None
        for state in states:
            state.roll()
    assert ours.scaling.delayed
    assert torch.equal(ours.scaling.history, twin.scaling.history)


def drawn(recipe: Recipe, kind: str) -> nn.Module:
    process_groups.seed_all(3)
    return make(kind, recipe)


@pytest.mark.parametrize("kind", ["column", "row"])
def test_wide_gemm_rounds_the_fp32_product_once(kind: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(linear, "native_bf16", lambda device: False)
    layer = make(kind, BF16)
    x = random(64, 2, IN).requires_grad_()
    y, _ = layer(x)
    exact = functional.linear(x.double(), layer.weight.double())
    assert y.dtype is torch.bfloat16
    assert (y != exact.bfloat16()).float().mean() < 0.01  # the FP32 sum seldom crosses a rounding boundary of BF16
    torch.testing.assert_close(y.double(), exact, rtol=2**-8, atol=1e-6)
    g = random(64, 2, OUT, seed=2)
    y.backward(g)
    expected = g.double().flatten(0, 1).t() @ x.detach().double().flatten(0, 1)
    assert layer.weight.grad.dtype is torch.bfloat16
    torch.testing.assert_close(layer.weight.grad.double(), expected, rtol=2**-8, atol=1e-4)
    torch.testing.assert_close(x.grad.double(), g.double() @ layer.weight.double(), rtol=2**-8, atol=1e-5)


# Bytes on the wire, on 2 processes

TP = {"tensor_model_parallel_size": 2}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
WIRES: dict[str, dict[str, Any]] = {
    f"{level}{' SP' if sequence else ''}{' recomputed' if recompute else ''}": {
        "opt_level": level,
        "num_layers": 1,
        "sequence_parallel": sequence,
        **TP,
        **(RECOMPUTE if recompute else {}),
    }
    for level in ("O0", "O2")
    for sequence in (False, True)
    for recompute in (False, True)
}


def watch(passed: dict[str, int]) -> None:
    """From here on, bytes that this process's groups are given to send, by collective, whatever function of torch they come through."""

    def spy(method: str, collective: str, sent: Any) -> None:
        original = getattr(torch.distributed.ProcessGroup, method, None)
        if original is None:  # torch 2.13 has renamed some
            return

        def counting(group: Any, *args: Any) -> Any:
            passed[collective] = passed.get(collective, 0) + sent(group.size(), *args)
            return original(group, *args)

        setattr(torch.distributed.ProcessGroup, method, counting)

    for method in ("_allgather_base", "all_gather_single"):
        spy(method, "all-gather", lambda ranks, output, x, *_: all_gather_sent(x.nbytes, ranks))
    for method in ("_reduce_scatter_base", "reduce_scatter_single"):
        spy(method, "reduce-scatter", lambda ranks, output, x, *_: all_gather_sent(output.nbytes, ranks))
    for method in ("alltoall_base", "all_to_all_single"):
        spy(method, "all-to-all", lambda ranks, output, x, *_: x.nbytes // ranks * (ranks - 1))
    spy("allreduce", "all-reduce", lambda ranks, xs, *_: sum(all_reduce_sent(x.nbytes, ranks) for x in xs))


def passed_and_counted(flags: dict[str, Any], passed: dict[str, int]) -> dict[str, dict[str, int]]:
    """Forward and backward of the block's one layer, then of the LM head: bytes by collective."""
    config, sent = tiny.config("corpus", **flags), WireBytes()
    found = {}
    with tiny.started(config):
        model = build_model(*tiny.parts(config), build_recipe(config.precision), tiny.VOCABULARY, sent=sent)
        tokens = 8 if flags["sequence_parallel"] else 16
        x = random(tokens, 4, 32).requires_grad_()

        def layer() -> Tensor:
            return model.decoder(hidden_states=x, attention_mask=None, rotary_pos_emb=model.rotary_pos_emb(16))

        def head() -> Tensor:
            return model.output_layer(x, weight=model.shared_embedding_or_output_weight())[0]

        for name, work in {"layer": layer, "head": head}.items():
            passed.clear()
            work().sum().backward()
            found[name] = {"passed": dict(passed), "counted": {collective: size for (_, collective), size in sent.take().items()}}
    return found


def on_the_wire() -> dict[str, dict[str, dict[str, int]]]:
    passed: dict[str, int] = {}
    watch(passed)
    return {name: passed_and_counted(flags, passed) for name, flags in WIRES.items()}


@pytest.fixture(scope="module")
def wires() -> list[dict[str, dict[str, dict[str, int]]]]:
    if torch.cuda.is_available():
        pytest.skip("several processes on one GPU")
    return dist.run(on_the_wire, 2)


@pytest.mark.nightly
@pytest.mark.parametrize("name", WIRES)
def test_counted_bytes_are_those_that_go_through_the_process_groups(wires: list[Any], name: str):
    for rank, part in itertools.product(wires, ("layer", "head")):
        counted, passed = rank[name][part]["counted"], rank[name][part]["passed"]
        assert all(collective.startswith("LM head ") == (part == "head") for collective in counted)
        assert sum(counted.values()) == sum(passed.values()) > 0
        if part == "layer" and WIRES[name]["opt_level"] != "O0":
            continue  # fused layers over gloo exchange and add slices themselves, which sends as much as the collective they are counted as
        of_kind = dict.fromkeys(passed, 0)
        for collective, size in counted.items():
            of_kind[next(kind for kind in ("all-gather", "reduce-scatter", "all-reduce") if kind in collective)] += size
        assert of_kind == passed
        assert ("all-reduce" in passed) != WIRES[name]["sequence_parallel"]
