"""FSDP2 with FP8 weights: torch's `fully_shard` over a prepared model trains as one process does."""

import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import msamp
from helpers import dist, guide_blocks
from helpers.fsdp_nets import Counted, Net, everything, message, one_thread, trained, wanting
from msamp.integrations import fsdp
from msamp.numerics.recipe import by_name
from msamp.numerics.scaling import Delayed
from msamp.numerics.tensor import ScalingTensor
from msamp.optim.states import local

STEPS = 5
WINDOW = 2  # of delayed scaling: both of its phases are seen


def recipe(level: str) -> msamp.recipes.Recipe:
    return by_name(level).with_scaling(Delayed(window=WINDOW))


def batch(step: int, share: slice = slice(None), dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step + 2))[share].to(dtype)
    return x, torch.tanh(x[:, :1])


def sharded(level: str, dtype: torch.dtype = torch.float32, clip_grad: float | None = None, **options):
    model = fsdp.prepare(Net(dtype=dtype), recipe(level), accept=everything)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model, fsdp.optimizer(model, wanting(model), recipe(level), clip_grad=clip_grad)


def train(model, optimizer, steps, share=slice(None), dtype=torch.float32) -> list[float]:
    return trained(model, optimizer, (batch(step, share, dtype) for step in steps))


def unsharded_run(level: str, dtype: torch.dtype, clip_grad: float | None = None):
    with one_thread():
        model = Net(dtype=dtype)
        model, optimizer = msamp.initialize(model, wanting(model), recipe(level), accept=everything, clip_grad=clip_grad)
        losses = train(model, optimizer, range(STEPS), dtype=dtype)
        return losses, model.state_dict(), optimizer.state_dict()


def same(a, b) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return isinstance(a, ScalingTensor) == isinstance(b, ScalingTensor) and torch.equal(a, b)


def trained_alike(level: str, dtype: torch.dtype, clip_grad: float):
    """Every rank has the same batch, so that the average is each one's gradient and nothing may differ."""
    model, optimizer = sharded(level, dtype, clip_grad)
    losses = train(model, optimizer, range(STEPS), dtype=dtype)
    return losses, fsdp.model_state(model), optimizer.state_dict()["state"]


@pytest.mark.promise("FSDP2", "At O1 and O2 sharded training has one process's losses, weights and states, bit for bit.")
@pytest.mark.parametrize(("level", "dtype"), [("O1", torch.float32), ("O2", torch.bfloat16), ("O3", torch.bfloat16)])
def test_sharded_training_has_the_bits_of_one_process(level, dtype):
    (losses, weights, states), (again, *_) = dist.run(trained_alike, 2, level, dtype, 0.5)
    expected, expected_weights, packed = unsharded_run(level, dtype, 0.5)
    assert losses == again == expected
    assert same(weights, dict(expected_weights))
    assert same(states, packed["state"])


def compiled_alike() -> list[list[float]]:
    """Losses as it is, with each block compiled, and with the whole model compiled."""
    found = []
    for compiled in (lambda model: [], lambda model: model.blocks, lambda model: [model]):
        model, optimizer = sharded("O2", torch.bfloat16)
        for module in compiled(model):
            module.compile(backend="aot_eager")
        found.append(train(model, optimizer, range(STEPS), slice(torch.distributed.get_rank(), None, 2), torch.bfloat16))
    return found


@pytest.mark.promise("FSDP2", "Compiled, the model has the losses that it has uncompiled.")
@pytest.mark.nightly(10)
def test_compiled_it_trains_with_the_same_losses():
    for plain, blocks, whole in dist.run(compiled_alike, 2):
        assert plain == blocks == whole
        assert len(set(plain)) == STEPS


def gathered_bytes() -> list[tuple[torch.dtype, int]]:
    model = fsdp.prepare(nn.Sequential(nn.Linear(64, 48, bias=False), nn.Linear(48, 64, bias=False)), "O2")
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)), reshard_after_forward=True)
    model.set_custom_all_gather(counted := Counted())
    model(torch.ones(16, 64)).sum().backward()
    return counted.sent


def several(folder: str) -> dict[str, Any]:
    """What two ranks with batches of their own do, in one start of processes."""
    rank = torch.distributed.get_rank()
    share, found = slice(16 * rank, 16 * rank + 16), {"sent": gathered_bytes()}
    model, optimizer = sharded("O2")
    found["losses"] = train(model, optimizer, range(STEPS), share)
    weights, states = fsdp.model_state(model), optimizer.state_dict()
    if rank == 0:
        torch.save((weights, states), f"{folder}/saved.pt")
    torch.distributed.barrier()

    again, other = sharded("O2")
    train(again, other, range(1), share)  # what this step leaves has to go
    weights, states = torch.load(f"{folder}/saved.pt")
    fsdp.load_model(again, weights)
    other.load_state_dict(states)
    more = range(STEPS, STEPS + 2)
    found["resumed"] = [(train(m, o, more, share), fsdp.model_state(m)) for m, o in ((again, other), (model, optimizer))]

    with mock.patch("msamp.parallel.sharded_weight.Peers", side_effect=AssertionError("a weight was measured by itself")):
        model(batch(0)[0])
    model(batch(0)[0] * (float("nan") if rank else 1.0)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    found["skipped"] = optimizer.skipped_steps, fsdp.model_state(model)

    model(batch(0, share)[0]).sum().backward()
    found["norms"] = [msamp.clip_grad_norm_(model.parameters(), 0.25).item() for _ in range(2)]
    optimizer.step()
    found["norms"].append(optimizer.grad_norm.item())
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("fsdp")
    return folder, dist.run(several, 2, str(folder))


@pytest.mark.promise("FSDP2", "FP8 weights are gathered at one byte per element.")
def test_weights_are_gathered_at_one_byte_an_element(ranks):
    for found in ranks[1]:
        assert found["sent"] == [(torch.uint8, 2 * 64 * 48)] * 2  # forward, backward


def test_batches_of_several_ranks_train_like_one_process_with_all(ranks):
    losses = torch.tensor([found["losses"] for found in ranks[1]]).mean(0)
    expected = torch.tensor(unsharded_run("O2", torch.float32)[0])
    assert torch.allclose(losses, expected, rtol=0.02)
    assert not torch.allclose(losses[0], losses, rtol=0.05)


@pytest.mark.promise("FSDP2", "A run resumes bit for bit from `fsdp.model_state` and `optimizer.state_dict()`.")
def test_a_resumed_run_has_the_bits_of_one_that_went_on(ranks):
    for found in ranks[1]:
        (losses, weights), (expected, expected_weights) = found["resumed"]
        assert losses == expected
        assert same(weights, expected_weights)


@pytest.mark.promise("FSDP2", "A non-finite gradient on one rank skips the step on all.")
def test_a_step_of_which_one_rank_has_no_finite_gradient_is_skipped_on_all(ranks):
    for found in ranks[1]:
        skipped, weights = found["skipped"]
        assert skipped == 1
        kept = found["resumed"][1][1]
        assert all(torch.equal(weights[name], kept[name]) for name in kept if ".scaling." not in name)


@pytest.mark.promise("FSDP2", "`msamp.clip_grad_norm_` clips by the norm over all ranks and returns it.")
def test_clip_grad_norm_clips_what_all_ranks_hold(ranks):
    (before, *after), others = (found["norms"] for found in ranks[1])
    assert [before, *after] == others
    assert before > 0.5
    assert after == pytest.approx([0.25, 0.25], rel=0.02)


def refusals() -> list[str]:
    rank, mesh = torch.distributed.get_rank(), init_device_mesh("cpu", (2,))

    def shard(model: nn.Module) -> nn.Module:
        return fully_shard(model, mesh=mesh)

    def unlike() -> None:
        model = Net()
        with torch.no_grad():
            model.blocks[1].weight.mul_(1 + 7 * rank)
        fsdp.optimizer(shard(fsdp.prepare(model)))

    def before() -> None:
        model = fsdp.prepare(Net())
        early = wanting(model)
        fsdp.optimizer(shard(model), early)

    def by_hand() -> None:
        model = shard(fsdp.prepare(Net()))
        model.load_state_dict({name: torch.zeros_like(x) for name, x in model.state_dict().items()})

    def load(name: str, x: torch.Tensor | None) -> None:
        model = shard(fsdp.prepare(Net()))
        state = {**model.state_dict(), name: x}
        fsdp.load_model(model, {key: value for key, value in state.items() if value is not None})

    return [
        message(call)
        for call in (
            unlike,
            before,
            by_hand,
            lambda: load("blocks.1.weight", torch.zeros(33, 64)),
            lambda: load("blocks.1.weight", None),
            lambda: fsdp.prepare(shard(Net())),
            lambda: fsdp.prepare(msamp.convert(Net(), msamp.recipes.O2)),
            lambda: fsdp.optimizer(fsdp.prepare(Net())),
            lambda: fsdp.optimizer(shard(Net())),
            lambda: fsdp.optimizer(shard(fsdp.prepare(Net())), recipe="O2", fp8_recipe="tensorwise", clip_grad=-1.0),
            lambda: fsdp.optimizer(fully_shard(fsdp.prepare(nn.Linear(64, 64)), mesh=mesh, shard_placement_fn=_columns)),
        )
    ]


def _columns(p: nn.Parameter) -> Any:
    from torch.distributed.tensor import Shard

    return Shard(1) if p.dim() > 1 else None


@pytest.mark.promise("FSDP2", "Other orders of `prepare`, `fully_shard` and the optimizer are refused by name.")
def test_other_orders_are_refused_by_name():
    expected = (
        "ranks have different models \\(blocks.1.weight\\)",
        "build it from model.parameters\\(\\) after fully_shard",
        "load the model before fully_shard, or with msamp.integrations.fsdp.load_model",
        "blocks.1.weight is torch.float16 with a scale .*, but the state has torch.float32",
        "missing or unknown names: blocks.1.weight",
        "is already a DTensor; call .*prepare\\(model\\) before fully_shard",
        "is already a ScalingTensor",
        "is not sharded; call torch.distributed.fsdp.fully_shard",
        "no sharded FP8 weight; call msamp.integrations.fsdp.prepare",
        "clipping norm is -1.0",
        "sharded along dim 0",
    )
    for messages in dist.run(refusals, 2):
        for found, pattern in zip(messages, expected, strict=True):
            assert re.search(pattern, found), (found, pattern)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"recipe": "coat", "fp8_recipe": "mxfp8"}, "one scale per tensor; use fp8_recipe 'delayed'"),
        ({"recipe": "bf16"}, "'bf16' has no FP8 GEMM; use torch's fully_shard"),
        ({"recipe": "O2", "fp8_recipe": "blockwise"}, "one scale per tensor; use fp8_recipe 'delayed'"),
    ],
)
def test_recipes_without_a_sharded_form_are_refused(options, wanted):
    model = Net()
    with pytest.raises(ValueError, match=wanted):
        fsdp.prepare(model, **options)
    assert type(model.head) is nn.Linear


def as_printed() -> list[float]:
    found = {block.heading: block for block in guide_blocks.blocks("own_loop.md") if block.takes}
    names: dict[str, Any] = {"model": Net()}
    for heading, takes in (("FSDP2", ("model",)), ("A step in one CUDA graph", ("model", "optimizer"))):
        assert found[heading].takes == takes
        exec(compile(found[heading].code, f"own_loop.md, {heading}", "exec"), names)
    return [*train(names["model"], names["optimizer"], range(2)), *(names["step"](*batch(number)).item() for number in (2, 3))]


def test_the_guide_s_blocks_run_as_printed():
    first, second = dist.run(as_printed, 2)
    assert first == second
    assert len(set(first)) == 4


# -------------------------------------------------------------------------------------------------------------- skipped steps


def state_of(model: nn.Module, optimizer) -> list[torch.Tensor]:
    """This rank's bits: rows of weights, buffers, states."""
    tensors = [local(x) for x in [*model.parameters(), *model.buffers()]]
    tensors += [local(x) for state in optimizer.state.values() for x in state.values()]
    parts = [part for x in tensors for part in ((x.payload, x.scale_inv) if isinstance(x, ScalingTensor) else (x,))]
    return [x.detach().reshape(-1).contiguous().view(torch.uint8).clone() for x in parts]


def skipping(how: str, bad: int | None) -> list[torch.Tensor]:
    """The bits after six steps; the second rank's batch `bad` spoils the step, which `how` skips. None: that step never was."""
    model, optimizer = sharded("O2")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=10**6)
    for step in range(7):
        if step == 4 and bad is None:
            continue
        x, y = batch(step)
        loss = (model(x) - y).square().mean() * (1e38 if step == bad and torch.distributed.get_rank() else 1.0)
        optimizer.zero_grad()
        (scaler.scale(loss) if how == "GradScaler" else loss).backward()
        if how == "own loop" and step == bad:
            optimizer.zero_grad()
        elif how == "GradScaler":
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == 2.0 ** (9 if step == bad else 10)
            scaler.update(2.0**10)
        else:
            optimizer.step()
    assert optimizer.skipped_steps == (how != "own loop" and bad is not None)
    return state_of(model, optimizer)


def skipped_each_way() -> dict[str, bool]:
    return {
        how: all(a.equal(b) for a, b in zip(skipping(how, 4), skipping(how, None), strict=True))
        for how in ("optimizer", "own loop", "GradScaler")
    }


@pytest.mark.promise("Optimizer states", "A skipped step changes no weight, state, amax history, scale or mu, bit for bit.")
def test_a_skipped_step_leaves_no_trace_on_any_rank():
    for found in dist.run(skipped_each_way, 2):
        assert found == {"optimizer": True, "own loop": True, "GradScaler": True}
