"""Our linear layers in megatron-core's classes: against msamp's FP8Linear, the weight as drawn, marks, bytes sent, `print(model)`."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from helpers import dist, tiny
from megatron.lm.config.sections.precision import build_recipe
from megatron.lm.model import linear
from megatron.lm.model.gpt import build_model, transformer_config
from megatron.lm.model.linear import FP8Gemm, column_linear, output_linear, row_linear
from megatron.lm.processes import process_groups
from msamp.comm.counters import WireBytes, all_gather_sent, all_reduce_sent
from msamp.nn.linear import FP8Linear
from msamp.nn.scaling_state import ScalingState
from msamp.numerics import formats
from msamp.numerics.recipe import BF16, FP32, O1, O2, O3, Recipe
from msamp.numerics.scaling import Delayed
from msamp.numerics.tensor import ScalingTensor

pytestmark = pytest.mark.usefixtures("one_process")

IN, OUT = 32, 48
normal_ = functools.partial(nn.init.normal_, std=0.1)


def make(kind: str, recipe: Recipe) -> nn.Module:
    """One column- or row-parallel layer [OUT, IN] as the specification's slots construct them, with the bias kept apart."""
    core = transformer_config(tiny.config("corpus"), recipe)
    common = {"config": core, "init_method": normal_, "bias": True, "skip_bias_add": True}
    if kind == "column":
        return column_linear(recipe)(IN, OUT, gather_output=False, is_expert=False, **common)
    return row_linear(recipe)(IN, OUT, input_is_parallel=True, is_expert=False, **common)


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


def test_bias_that_is_added_here():
    core = transformer_config(tiny.config("corpus"), O2)
    layer = column_linear(O2)(IN, OUT, config=core, init_method=normal_, bias=True, gather_output=False)
    with torch.no_grad():
        layer.bias.copy_(random(OUT))
    x = random(4, 2, IN)
    y, none = layer(x)
    assert none is None
    torch.testing.assert_close(y, twin_of(layer, O2)(x) + layer.bias)


def drawn(recipe: Recipe, kind: str) -> nn.Module:
    process_groups.seed_all(3)
    return make(kind, recipe)


@pytest.mark.parametrize("kind", ["column", "row"])
def test_o3_hands_the_weight_as_drawn_out_once(kind: str):
    layer, plain = drawn(O3, kind), drawn(BF16, kind)
    assert layer.weight.format is formats.E4M3
    values = layer.take_initial_weight()
    assert torch.equal(values, plain.weight)
    assert not torch.equal(layer.weight.dequantize(), plain.weight)
    assert layer.take_initial_weight() is None


@pytest.mark.parametrize("kind", ["column", "row"])
@pytest.mark.parametrize("recipe", [O1, O2], ids=lambda r: r.name)
def test_where_the_weight_is_its_own_master_nothing_is_kept(recipe: Recipe, kind: str):
    layer, plain = drawn(recipe, kind), drawn(BF16, kind)
    assert layer.weight.format is formats.FP16
    assert torch.equal(layer.weight.dequantize(), plain.weight)  # BF16's 8 bits of significand fit into FP16's 11
    assert layer.take_initial_weight() is None


@pytest.mark.parametrize("master", [formats.FP32, formats.BF16, formats.E4M3])
def test_a_master_of_another_format_starts_from_the_weight_as_drawn(master: formats.Format):
    recipe = O2.with_states(master=master)
    assert torch.equal(drawn(recipe, "column").take_initial_weight(), drawn(BF16, "column").weight)


@pytest.mark.parametrize("kind", ["column", "row"])
def test_marks_of_megatron_core_stay_on_the_weight(kind: str):
    ours, plain = make(kind, O2), make(kind, BF16)
    for name in ("tensor_model_parallel", "partition_dim", "partition_stride", "allreduce"):
        assert getattr(ours.weight, name) == getattr(plain.weight, name), name
    assert isinstance(ours.weight, nn.Parameter)
    assert isinstance(ours.weight, ScalingTensor)
    assert ours.weight.requires_grad


@pytest.mark.parametrize("kind", ["column", "row"])
@pytest.mark.parametrize("recipe", [O1, O2, O3], ids=lambda r: r.name)
def test_a_layer_started_anew_keeps_its_marks_and_nothing_of_its_old_weight(recipe: Recipe, kind: str):
    layer, values = make(kind, recipe), 100 * random(OUT, IN, seed=3)
    before = {name: mark for name, mark in vars(layer.weight).items() if name not in ("payload", "scale_inv")}
    assert before["tensor_model_parallel"]
    layer.start_from(values)
    expected = ScalingTensor.quantize(values, recipe.weight)
    assert torch.equal(layer.weight.dequantize(), expected.dequantize())
    assert torch.equal(layer.weight.payload.view(torch.uint8), expected.payload.view(torch.uint8))
    assert torch.equal(layer.weight.scale_inv, expected.scale_inv)
    assert before.items() <= vars(layer.weight).items()
    assert isinstance(layer.weight, nn.Parameter)
    assert next(layer.parameters()) is layer.weight
    handed = layer.take_initial_weight()
    assert handed is None if recipe is not O3 else torch.equal(handed, values)


@pytest.mark.parametrize("recipe", [FP32, BF16], ids=lambda r: r.name)
def test_without_fp8_the_weights_are_plain(recipe: Recipe):
    for kind in ("column", "row"):
        layer = make(kind, recipe)
        assert not isinstance(layer, FP8Gemm)
        assert type(layer.weight) is nn.Parameter
        assert layer.weight.dtype is recipe.compute_dtype


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


@pytest.mark.parametrize("kind", ["column", "row"])
@pytest.mark.parametrize(("recipe", "native"), [(FP32, False), (BF16, False), (BF16, True)])
def test_on_one_rank_the_gemm_adds_the_bias(kind: str, recipe: Recipe, native: bool, monkeypatch: pytest.MonkeyPatch):
    """In BF16 it is rounded once, where megatron-core would round, add and round again."""
    monkeypatch.setattr(linear, "native_bf16", lambda device: native)
    layer, x = make(kind, recipe), random(64, 2, IN).to(recipe.compute_dtype)
    torch.nn.init.normal_(layer.bias)
    y, left = layer(x)
    assert left is None
    exact = functional.linear(x.double(), layer.weight.double(), layer.bias.double())
    torch.testing.assert_close(y.double(), exact, rtol=2**-8 if recipe is BF16 else 1e-5, atol=1e-5)
    y.backward(torch.ones_like(y))
    assert torch.equal(layer.bias.grad, torch.full_like(layer.bias, 128))


def test_the_head_stays_in_the_compute_dtype():
    assert not issubclass(output_linear(O2), FP8Gemm)
    model = build_model(tiny.config("corpus", opt_level="O2"), O2, tiny.VOCABULARY)
    assert not isinstance(model.output_layer, FP8Gemm)
    assert model.shared_embedding_or_output_weight().dtype is torch.bfloat16
    assert sum(isinstance(layer, FP8Gemm) for layer in model.modules()) == 8  # qkv, proj, fc1, fc2 of two layers


@pytest.mark.parametrize("recipe", [FP32, BF16, O1, O2, O3], ids=lambda r: r.name)
def test_printing_the_model_shows_the_precision_of_every_linear(recipe: Recipe):
    lines = str(build_model(tiny.config("corpus"), recipe, tiny.VOCABULARY)).splitlines()
    stored = {"O1": "weight fp16", "O2": "weight fp16", "O3": "weight fp8-e4m3"}.get(recipe.name, f"weight and GEMM {recipe.name}")
    for slot in ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"):
        found = [line for line in lines if f"({slot})" in line]
        assert found  # equal layers are printed once
        for line in found:
            assert stored in line
            if recipe.fp8:
                assert "GEMM fp8-e4m3 x fp8-e4m3, grad_output fp8-e5m2, scaling delayed(16)" in line
    head = next(line for line in lines if "(output_layer)" in line)
    assert f"GEMM {'fp32' if recipe is FP32 else 'bf16'}" in head


def test_linears_of_one_recipe_share_a_class():
    assert column_linear(O2) is column_linear(O2)
    assert column_linear(O2) is not column_linear(O3)
    assert column_linear(O2).__name__ == "FP8ColumnParallelLinear"
    assert row_linear(O3).__name__ == "FP8RowParallelLinear"


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
        model = build_model(config, build_recipe(config.precision), tiny.VOCABULARY, sent=sent)
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
@pytest.mark.parametrize("part", ["layer", "head"])
@pytest.mark.parametrize("name", WIRES)
def test_counted_bytes_are_those_that_go_through_the_process_groups(wires: list[Any], name: str, part: str):
    for rank in wires:
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
