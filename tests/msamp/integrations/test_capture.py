"""`msamp.capture`: without a GPU its steps have the bits of a plain loop and say what a graph could not repeat; with one its graphs do."""

import contextlib
import copy
import logging
import pickle
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import msamp
from helpers import dist
from helpers.fsdp_nets import message
from msamp.integrations import capture, fsdp
from msamp.integrations.replay_checks import Probe
from msamp.nn.scaling_state import ScalingState
from msamp.numerics.recipe import by_name
from msamp.numerics.scaling import Delayed
from msamp.optim.updates import Update

GPU = torch.cuda.is_available()


def net(level: str = "O2", clip_grad: float | None = None, zero: bool | None = None, dropout: float = 0.0):
    torch.manual_seed(0)
    device = "cuda" if GPU else "cpu"
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Dropout(dropout), nn.Linear(128, 64), nn.LayerNorm(64)).to(device)
    recipe = by_name(level).with_scaling(Delayed(window=6)) if level in ("O1", "O2") else by_name(level)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return msamp.initialize(model, optimizer, recipe, accept=lambda name, layer: True, clip_grad=clip_grad, zero=zero)


def batch(step: int, rows: int = 32) -> torch.Tensor:
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(100 * step + rank)).to("cuda" if GPU else "cpu")


def loop(captured: bool, level: str, steps: int = 14, between: Callable[..., Any] | None = None, **options: Any):
    """Train with two micro-batches per step, clipping, a schedule and two shapes; return losses, averages of the weights, and the step."""
    model, optimizer = net(level, **options)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
    average = [p.detach().float().clone() for p in model.parameters()]

    def forward_backward(x: torch.Tensor, *, parts: int) -> torch.Tensor:
        first, last = x.chunk(parts)
        with optimizer.no_sync():
            (model(first) - first.roll(1, 1)).square().mean().backward()
        loss = (model(last) - last.roll(1, 1)).square().mean()
        loss.backward()
        if optimizer.clip_grad is None:
            msamp.clip_grad_norm_(model.parameters(), 0.3)
        return loss

    step, losses = msamp.capture(model, optimizer, forward_backward), []
    for number in range(steps):
        if between is not None:
            between(number, model, optimizer)
        x = batch(number, 16 if number in (7, 9, 13) else 32)
        if captured:
            loss = step(x, parts=2)
        else:
            loss = forward_backward(x, parts=2).detach()
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
        for kept, p in zip(average, model.parameters(), strict=True):
            kept.lerp_(p.detach().float(), 0.1)
    return losses, [x.double().sum().item() for x in average], step


def reloaded(number: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if number == 8:
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])


def rate_of_dropout(number: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model[2].p = 0.1 if number < 6 else 0.3
    model.train(number != 10)


@pytest.mark.gpu
@pytest.mark.parametrize("level", ["O1", "O2", "O3", "coat"])
def test_graphs_have_the_bits_of_eager_steps(level):
    for options in ({}, {"clip_grad": 0.3, "between": reloaded}, {"dropout": 0.1, "between": rate_of_dropout}):
        torch.cuda.manual_seed(5)
        plain = loop(False, level, **options)
        torch.cuda.manual_seed(5)
        losses, average, step = loop(True, level, **options)
        assert (losses, average) == plain[:2]
        assert step.obstacle is None
        assert step.captured >= 2
        step.release()


@pytest.mark.parametrize(("level", "options"), [("O1", {}), ("O2", {"clip_grad": 0.3}), ("O3", {}), ("coat", {"between": reloaded})])
def test_without_a_gpu_steps_are_those_of_a_plain_loop(level, options):
    losses, average, step = loop(True, level, **options)
    assert (losses, average) == loop(False, level, **options)[:2]
    assert step.obstacle is None
    seen = weakref.ref(step)
    del step
    assert seen() is None  # at once, with its graphs: NCCL cannot destroy a group before them


class PretendedGraph:
    """Stands for a CUDA graph where there is no GPU: its capture leaves all tensors as they were, and its replay runs the step again."""

    now: "PretendedGraph | None" = None
    resets = 0

    def run(self, step: capture.CapturedStep, *args: Any) -> Any:
        self.step, self.args = step, args
        self.result = STEP(step, *args)
        return self.result

    def replay(self) -> None:
        with mock.patch.object(ScalingState, "count"):
            new = STEP(self.step, *self.args)
        self.result.copy_(new)

    def reset(self) -> None:
        PretendedGraph.resets += 1


STEP = capture.CapturedStep._step


def tensors_of(step: capture.CapturedStep) -> list[torch.Tensor]:
    optimizer: Any = step.optimizer
    held = [*step.model.parameters(), *step.model.buffers(), *(x for state in optimizer.state.values() for x in state.values())]
    held += [optimizer._norm, optimizer._skips, optimizer._usable, optimizer._kept.table, optimizer._grad_amaxes]
    return [part.data for x in held for part in ((x.payload, x.scale_inv) if isinstance(x, msamp.ScalingTensor) else (x,))]


@contextlib.contextmanager
def pretending(graph: PretendedGraph, *, watch: Any, **_: Any):
    def run(step: capture.CapturedStep, *args: Any) -> Any:
        held = tensors_of(step)
        before = [x.clone() for x in held]
        PretendedGraph.now = graph
        try:
            return graph.run(step, *args)
        finally:
            PretendedGraph.now = None
            for x, kept in zip(held, before, strict=True):
                x.copy_(kept)

    measured = AssertionError("what is measured again is looked up by a list, which the host would copy to the GPU")
    measures = mock.patch.object(Update, "stored_amaxes", side_effect=measured)
    with mock.patch.object(capture.CapturedStep, "_step", run), mock.patch.object(ScalingState, "count"), measures, watch:
        yield


@pytest.fixture
def pretended_gpu(monkeypatch):
    monkeypatch.setattr(capture, "_graphs_on", lambda device: True)
    monkeypatch.setattr(capture, "capturing", pretending)
    stream = mock.MagicMock()
    for name in ("synchronize", "empty_cache", "graph_pool_handle", "Stream", "stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", PretendedGraph)
    monkeypatch.setattr(PretendedGraph, "resets", 0)


@pytest.mark.parametrize(("level", "more"), [("O2", {"between": reloaded}), ("O3", {"clip_grad": 0.3, "between": reloaded}), ("coat", {})])
def test_captures_and_replays_have_the_bits_of_a_plain_loop(level, more, pretended_gpu):
    losses, average, step = loop(True, level, **more)
    assert (losses, average) == loop(False, level, **more)[:2]
    assert step.obstacle is None
    # The fourth step; at O2 the second after loading, since the windows were full, else the second shape; both again after loading.
    assert step.captured == {"O2": 3, "O3": 3, "coat": 2}[level]


def test_a_change_between_steps_is_captured_again_and_too_many_shapes_are_eager(pretended_gpu, caplog):
    model, optimizer = net("O3")

    def forward_backward(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss

    step = msamp.capture(model, optimizer, forward_backward, graphs=2)
    for number in range(4):
        step(batch(number))
    assert step.captured == 1
    model[2].p = 0.5
    step(batch(5))
    assert "module '2' changed since" in caplog.text
    assert (step.captured, PretendedGraph.resets) == (1, 1)
    step(batch(6))
    model[3].bias.requires_grad_(False)
    model[3].register_forward_hook(print)
    for number in range(3):
        step(batch(number))
    assert "print of module '3'" in step.obstacle
    model[3]._forward_hooks.clear()
    for number, rows in enumerate((8, 16, 8, 16, 24, 24)):
        step(batch(number, rows))
    assert ("more than 2 shapes" in caplog.text, len(step._graphs)) == (True, 2)
    step.release()
    model[1].approximate = "tanh"
    step(batch(1))
    assert ("module '1' changed since" in caplog.text, step._graphs) == (True, {}), "if it changes in every step, none is captured"
    for options, seen in (({"lr": 1e-3, "weight_decay": 0.3, "betas": (0.8, 0.9)}, False), ({"decoupled": False}, True)):
        optimizer.param_groups[0] |= options
        step(batch(2))
        assert ("the optimizer's groups changed since" in caplog.text) == seen


def test_a_capture_that_fails_leaves_nothing_behind(pretended_gpu, caplog):
    model, optimizer = net("O3")

    def forward_backward(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        if PretendedGraph.now is not None:
            raise RuntimeError("operation not permitted when stream is capturing")
        return loss

    plain = net("O3")
    step = msamp.capture(model, optimizer, forward_backward)
    for number in range(6):
        loss = step(batch(number))
        expected = plain[0](batch(number)).square().mean()
        expected.backward()
        plain[1].step()
        plain[1].zero_grad()
        assert loss.item() == expected.item()
    assert "operation not permitted" in step.obstacle
    assert step.captured == 0


class Counting(nn.Linear):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


def steps_of(model: nn.Module, optimizer: torch.optim.Optimizer, forward_backward: Callable[..., Any], steps: int = 7) -> Any:
    step = msamp.capture(model, optimizer, forward_backward)
    for number in range(steps):
        step(batch(number))
    return step


def test_what_a_graph_would_not_repeat_is_said_once_and_the_steps_are_eager(caplog):
    def reading(model: nn.Module, what: Callable[..., Any]) -> Callable[..., Any]:
        def forward_backward(x: torch.Tensor) -> Any:
            loss = model(x).square().mean()
            loss.backward()
            return what(loss, x)

        return forward_backward

    cases = {
        "test_capture.py:": lambda loss, x: loss if loss.item() < 1e9 else x,
        "(aten.index.Tensor)": lambda loss, x: x[x > 0].mean(),
        "(aten.nonzero)": lambda loss, x: x.nonzero().sum(),
        "returns a float": lambda loss, x: {"loss": loss, "scale": 1.0},
    }
    for word, what in cases.items():
        caplog.clear()
        model, optimizer = net()
        assert word in steps_of(model, optimizer, reading(model, what)).obstacle
        assert [record.levelno for record in caplog.records if "msamp.capture" in record.message] == [logging.WARNING]

    def returned(loss: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return loss

    model, optimizer = net()
    model[0].register_forward_hook(lambda *_: None)
    assert "hook" in steps_of(model, optimizer, reading(model, returned)).obstacle
    model, optimizer = net()
    model.append(Counting(64, 64, device=batch(0).device))
    assert "'calls' of module '5'" in steps_of(model, optimizer, reading(model, returned)).obstacle


def test_what_is_wrong_is_refused_by_name():
    model, optimizer = net()

    def forward_backward(x: torch.Tensor, fail: bool = False) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        if fail:
            raise KeyError("data")
        return loss

    step = msamp.capture(model, optimizer, forward_backward)
    for number in range(3):
        step(batch(number))
    assert "cannot be copied or pickled" in message(lambda: copy.deepcopy(step))
    assert "cannot be copied or pickled" in message(lambda: pickle.dumps(step))
    assert "no tensors" in message(step)
    assert "set" in message(lambda: step({1}))
    assert "requires a gradient" in message(lambda: step(batch(0).requires_grad_()))
    assert "graphs is 0" in message(lambda: msamp.capture(model, optimizer, forward_backward, graphs=0))
    assert "not in this model" in message(lambda: msamp.capture(nn.Linear(2, 2), optimizer, forward_backward))
    plain = torch.optim.AdamW(model.parameters())
    assert "capturable=True" in message(lambda: msamp.capture(model, plain, forward_backward))
    with mock.patch.object(capture, "unregistrable", return_value="NCCL cannot register buffers"):
        assert "NCCL" in message(lambda: msamp.capture(model, optimizer, forward_backward))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(KeyError, match="data"):
        step(batch(3), fail=True)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items() if "scaling" not in name)
    step(batch(3))  # the gradients of the failed step are gone
    model(batch(4)).sum().backward()
    assert "parameter 0.weight has a gradient" in message(lambda: step(batch(4)))
    optimizer.zero_grad()
    model.load_state_dict(model.state_dict(), assign=True)
    model[0].bias = nn.Parameter(model[0].bias.detach().clone())
    assert "assign=True" in message(lambda: step(batch(5)))


def test_a_model_of_torch_and_a_step_without_gradients():
    model = nn.Linear(64, 64, device=batch(0).device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2, device=batch(0).device), capturable=True)
    step = msamp.capture(model, optimizer, lambda x: model(x).detach().mean())
    before = model.weight.detach().clone()
    for number in range(5):
        assert step(batch(number)).shape == ()
    assert torch.equal(model.weight, before)


def on_two_processes(zero: bool) -> Any:
    plain = loop(False, "O3", steps=7, clip_grad=0.3, zero=zero)
    losses, average, step = loop(True, "O3", steps=7, clip_grad=0.3, zero=zero)
    step.release()
    return (losses, average) == plain[:2], step.obstacle


@pytest.mark.parametrize("zero", [False, True])
def test_several_processes(zero):
    for same, obstacle in dist.run(on_two_processes, 2, zero):
        assert same
        assert obstacle is None


def sharded(device: str, level: str = "O2", rate: float = 1e-2):
    """A model of two blocks and a head, its optimizer and a step's forward and backward; at O2 delayed scales after 2 steps."""
    torch.manual_seed(0)
    recipe = by_name(level).with_scaling(Delayed(window=2)) if level == "O2" else by_name(level)
    blocks = [nn.Sequential(nn.Linear(64, 128, bias=False), nn.GELU(), nn.Linear(128, 64, bias=False)) for _ in range(2)]
    model = fsdp.prepare(nn.Sequential(*blocks, nn.LayerNorm(64), nn.Linear(64, 48)).to(device), recipe, accept=lambda name, layer: True)
    mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for part in (*blocks, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    optimizer = fsdp.optimizer(model, torch.optim.AdamW(model.parameters(), lr=rate), recipe, clip_grad=0.5)

    def forward_backward(x: torch.Tensor) -> torch.Tensor:
        loss = (model(x).float() - x[:, :48]).square().mean()
        loss.backward()
        return loss

    return model, optimizer, forward_backward


def run_sharded(device: str, steps: range, level: str, captured: bool, trained: Any = None) -> tuple[list[float], Any, Any]:
    model, optimizer, forward_backward = sharded(device, level) if trained is None else trained
    step = msamp.capture(model, optimizer, forward_backward)
    losses = []
    for number in steps:
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + number)
        if captured:
            loss = step(batch(number))
        else:
            loss = forward_backward(batch(number)).detach()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        with torch.no_grad():
            model(batch(number))  # an evaluation, which leaves gathered weights
    return losses, step, (model, optimizer, forward_backward)


def fsdp_on_the_cpu() -> Any:
    losses, step, (model, optimizer, _) = run_sharded("cpu", range(6), "O2", captured=True)
    model.reshard()
    probe, shard = Probe(model, optimizer, optimizer), model[2].weight
    before, shard._local_tensor = probe.changed(), shard._local_tensor.clone()  # FSDP2 does that when a module is moved
    return losses == run_sharded("cpu", range(6), "O2", captured=False)[0], step.obstacle, before, probe.changed()


def test_fsdp2_without_a_gpu():
    assert dist.run(fsdp_on_the_cpu, 2) == [(True, None, None, "the memory of parameters, buffers or optimizer states")] * 2


def sharded_and_resumed(level: str, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {"eager": run_sharded("cuda", range(16), level, captured=False)[0]}
    losses, step, trained = run_sharded("cuda", range(8), level, captured=True)
    found["captured"] = [step.captured]
    step.release()
    model, optimizer, _ = trained
    saved = fsdp.model_state(model), optimizer.state_dict()
    if torch.distributed.get_rank() == 0:
        torch.save(saved, f"{folder}/saved.pt")  # pickle cannot read the float8 tensors of COAT's moments
    torch.distributed.barrier()
    weights, states = torch.load(f"{folder}/saved.pt")
    fsdp.load_model(model, weights)
    optimizer.load_state_dict(states)
    more, step, _ = run_sharded("cuda", range(8, 16), level, captured=True, trained=trained)
    found["losses"] = losses + more
    found["captured"].append(step.captured)
    step.release()
    return found


def on_two_gpus(folder: str) -> tuple[dict[str, Any], list[Any]]:
    return {level: sharded_and_resumed(level, folder) for level in ("O2", "coat")}, [on_two_processes(zero) for zero in (False, True)]


@pytest.mark.multi_gpu
def test_a_graph_has_the_losses_of_eager_steps_on_two_gpus(tmp_path):
    for levels, processes in dist.on_gpus(on_two_gpus, 2, str(tmp_path)):
        for level, found in levels.items():
            assert found["losses"] == found["eager"], level
            assert min(found["captured"]) >= 1, level
        assert processes == [(True, None)] * 2
