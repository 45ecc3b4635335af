"""Layers that gain nothing from FP8 in your own loop compute in BF16 from the second step on, alike on all ranks and after a resume."""

import copy
import logging

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import msamp
from helpers import dist
from msamp.nn import layer_gains
from msamp.nn.layer_gains import Half, Shape, Times
from msamp.numerics.metrics import sqnr_db

X = torch.randn(48, 32, generator=torch.Generator().manual_seed(0))
GAINS = {96: 2.0, 32: 0.5}  # by outputs


def made_up(shape: Shape, recipe: msamp.recipes.Recipe) -> Times:
    return Times(GAINS[shape.outputs], 1.0)


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(layer_gains, "default_measure", lambda: made_up)
    monkeypatch.setattr(layer_gains.decide, "__defaults__", (lambda shape, recipe: 0.25,))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 96), nn.GELU(), nn.Linear(96, 32))


def begin(level: str = "O2", **options):
    model = net()
    return msamp.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-3), level, **options)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int = 1) -> list[float]:
    losses = []
    for _ in range(count):
        loss = (model(X) - X).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "coat"])
def test_a_layer_that_gains_nothing_computes_in_bf16_from_the_second_step_on(level, caplog):
    model, optimizer = begin(level)
    with caplog.at_level(logging.INFO, "msamp"):
        steps(model, optimizer)
    assert caplog.messages[-1] == "timed, 1 linear layers compute in FP8 and 1 in BF16 (fp8_min_gain 1)"
    assert list(optimizer.in_bf16) == ["2"]
    found = msamp.survey(model)
    assert (found.converted, list(found.left)) == (["0"], ["2"])
    assert "computed in BF16, since FP8 has a gain of 0.50 at 48 x 96 x 32 (fp8_min_gain 1)" in str(found)
    x = torch.randn(48, 96, requires_grad=True)
    y = model[2](x)
    y.sum().backward()
    w = model[2].weight.dequantize(torch.float32)
    assert sqnr_db(x.detach() @ w.t() + model[2].bias, y) > 45
    assert sqnr_db(torch.ones(48, 32) @ w, x.grad) > 45
    optimizer.zero_grad()
    assert model[2].scaling.seen == 0
    assert steps(model, optimizer, 20)[-1] < 1
    assert (model[0].scaling.seen, model[2].scaling.seen) == (21 if model[0].scaling.window else 0, 0)


def test_a_gain_of_zero_measures_nothing(monkeypatch):
    monkeypatch.setattr(layer_gains, "default_measure", lambda: 1 / 0)
    model, optimizer = begin(fp8_min_gain=0)
    steps(model, optimizer)
    assert optimizer.in_bf16 is None
    assert msamp.survey(model).converted == ["0", "2"]
    with pytest.raises(ValueError, match="fp8_min_gain is -1; it must be"):
        begin(fp8_min_gain=-1)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("emulated", "this hardware has no FP8, which is emulated"),
        ("deterministic", "measured times are not reproducible"),
        ("compiled", "none ran outside of torch.compile in the first step"),
        ("out of memory", "CUDA out of memory"),
    ],
)
def test_what_is_not_timed_stays_in_fp8_and_that_is_said(how, why, monkeypatch, caplog):
    def fails(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    model, optimizer = begin()
    if how == "emulated":
        monkeypatch.setattr(layer_gains, "default_measure", lambda: None)
    if how == "deterministic":
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    if how == "compiled":
        model.compile(backend="aot_eager")
    if how == "out of memory":
        monkeypatch.setattr(layer_gains, "default_measure", lambda: fails)
    with caplog.at_level(logging.INFO, "msamp"):
        steps(model, optimizer)
    assert caplog.messages[-1].startswith("linear layers are in FP8, and their shapes were not timed: " + why)
    assert optimizer.in_bf16 == {}


def test_a_host_that_is_slower_than_the_kernels_is_said(monkeypatch, caplog):
    monkeypatch.setattr(layer_gains.decide, "__defaults__", (lambda shape, recipe: 2.0,))
    with caplog.at_level(logging.INFO, "msamp"):
        steps(*begin())
    assert caplog.messages[-1].endswith(
        "the host takes 2.7 times as long to launch their kernels as the GPU to run them: capture the step (msamp.capture)"
    )


def test_a_resumed_run_and_a_copy_keep_the_choice(monkeypatch):
    model, optimizer = begin("O3")
    steps(model, optimizer, 3)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    pair = copy.deepcopy((model, optimizer))
    want = steps(model, optimizer, 3)
    monkeypatch.setattr(layer_gains, "default_measure", lambda: 1 / 0)
    resumed = begin("O3")
    resumed[0].load_state_dict(saved[0])
    resumed[1].load_state_dict(saved[1])
    assert steps(*resumed, 3) == want
    assert steps(*pair, 3) == want
    forced = begin("O3", fp8_min_gain=0)
    forced[1].load_state_dict(saved[1])
    assert msamp.survey(forced[0]).converted == ["0", "2"]
    with pytest.raises(ValueError, match=r"the state's layers in BF16 are \{'9': 'x'\}; they must be"):
        resumed[1].load_state_dict({**saved[1], "layers_in_bf16": {"9": "x"}})
    again, other = msamp.initialize(resumed[0], None, "O3", fp8_min_gain=0)
    assert msamp.survey(again).converted == ["0", "2"]
    assert steps(again, other)


@pytest.mark.filterwarnings("ignore")
def test_torchs_distributed_checkpoint_leaves_the_choice_out_and_says_so(caplog):
    pair, resumed = begin("O3"), begin("O3")
    steps(*pair)
    model, optim = get_state_dict(*pair)
    assert "leaves out which layers are in BF16: a run that loads it starts in FP8 and times them again" in caplog.text
    set_state_dict(*resumed, model_state_dict=model, optim_state_dict=optim)
    assert resumed[1].in_bf16 is None
    steps(*resumed)
    assert resumed[1].in_bf16 == pair[1].in_bf16


def test_a_guard_leaves_them_alone(monkeypatch):
    monkeypatch.setitem(GAINS, 96, 0.5)
    model, optimizer = begin()
    guard = msamp.PrecisionGuard(model, optimizer, every=1)
    for _ in range(3):
        steps(model, optimizer)
        assert guard.step() == []


@pytest.mark.parametrize(
    "shape", [Shape(24, 32, 48), Half("MLP", 24, 32, 96), Half("attention", 24, 32, 64), Half("attention", 24, 32, 192)]
)
def test_what_is_timed_runs_in_both_precisions(shape):
    before = torch.get_rng_state()
    run, state = layer_gains._with_stored_weights(shape, msamp.recipes.O3)
    assert all(layer.delayed for layer in state.layers.values())
    state.compute_in_bf16(dict.fromkeys(state.linears, "computed in BF16"))
    run()
    assert not state.layers
    assert torch.get_rng_state().equal(before)


def _on_ranks(sharded: bool, folder: str) -> list[str]:
    import os

    from torch.distributed.fsdp import fully_shard

    from msamp.integrations import fsdp

    os.environ["XDG_CACHE_HOME"] = folder
    rank = torch.distributed.get_rank()
    layer_gains.default_measure = lambda: lambda shape, recipe: Times(GAINS[shape.outputs] if rank == 0 else 9.0, 1.0)
    layer_gains.decide.__defaults__ = (lambda shape, recipe: 0.25,)
    if sharded:
        model = fsdp.prepare(net(), "O2")
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        optimizer = fsdp.optimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-3), "O2")
    else:
        model, optimizer = begin("O3")
    losses = steps(model, optimizer, 3)
    return [*optimizer.in_bf16, str(losses)]


@pytest.mark.parametrize("sharded", [False, True], ids=["ZeRO", "FSDP2"])
def test_the_first_of_two_processes_decides(sharded, tmp_path):
    first, second = dist.run(_on_ranks, 2, sharded, str(tmp_path))
    assert first == second
    assert first[:-1] == ["2"]
