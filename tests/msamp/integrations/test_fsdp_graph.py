"""A training step under FSDP2 as one CUDA graph: without a GPU it stays eager, with two GPUs it has the bits of eager steps."""

import copy
import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from helpers import dist
from helpers.fsdp_nets import message
from msamp.integrations import fsdp, fsdp_graph
from msamp.integrations.fsdp_graph import GraphedStep
from msamp.numerics.recipe import by_name
from msamp.numerics.scaling import Delayed

STEPS = 8


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


def batch(step: int, device: str) -> torch.Tensor:
    seed = 100 * step + torch.distributed.get_rank()
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(seed)).to(device)


def eagerly(device: str, steps: int, level: str = "O2") -> list[float]:
    _, optimizer, forward_backward = sharded(device, level)
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + step)
        losses.append(forward_backward(batch(step, device)).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def graphed(device: str, steps: int, level: str = "O2") -> tuple[list[float], GraphedStep, Any]:
    model, optimizer, forward_backward = sharded(device, level)
    step = GraphedStep(model, optimizer, forward_backward)
    losses = []
    for number in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + number)
        losses.append(step(batch(number, device)).item())
    return losses, step, model


def on_the_cpu() -> dict[str, Any]:
    losses, step, model = graphed("cpu", 4)
    plain = torch.optim.AdamW(model.parameters())
    with mock.patch.object(fsdp_graph, "unregistrable", return_value="NCCL cannot register buffers"):
        unregistered = message(lambda: GraphedStep(model, plain, print))
    return {
        "unregistered": unregistered,
        "same": losses == eagerly("cpu", 4),
        "captured": step.captured,
        "whole": message(lambda: GraphedStep(nn.Linear(2, 2), plain, print)),
        "plain": message(lambda: GraphedStep(model, plain, print)),
        "numbers": message(lambda: step(1.0)),
        "copy": message(lambda: copy.deepcopy(step)),
        "others": message(lambda: GraphedStep(model, torch.optim.AdamW(nn.Linear(2, 2).parameters()), print)),
    }


def test_without_a_gpu_steps_are_eager_and_what_cannot_be_captured_is_refused():
    for found in dist.run(on_the_cpu, 2):
        assert found["same"]
        assert found["captured"] == 0
        assert "a Linear that is not sharded; call fully_shard(model) before GraphedStep" in found["whole"]
        assert found["unregistered"] == "a step cannot be captured in a CUDA graph: NCCL cannot register buffers"
        assert "AdamW reads its learning rate 0.001 on the host; pass lr=torch.tensor(...) and capturable=True" in found["plain"]
        assert "inputs are float; pass tensors" in found["numbers"]
        assert "an optimizer of sharded parameters cannot be copied or pickled" in found["copy"]
        assert "parameters that are not in this model" in found["others"]


def on_two_gpus(level: str, folder: str) -> dict[str, Any]:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl")
    found: dict[str, Any] = {"eager": eagerly("cuda", 2 * STEPS, level)}
    losses, step, model = graphed("cuda", STEPS, level)
    found["captured"] = [step.captured]
    saved = fsdp.model_state(model), step.optimizer.state_dict()
    if torch.distributed.get_rank() == 0:
        torch.save(saved, f"{folder}/saved.pt")  # pickle cannot read the float8 tensors of COAT's moments
    torch.distributed.barrier()
    weights, states = torch.load(f"{folder}/saved.pt")
    with torch.no_grad():
        found["evaluated"] = model(batch(0, "cuda")).float().norm().item()
    fsdp.load_model(model, weights)
    step.optimizer.load_state_dict(states)
    with torch.no_grad():
        found["evaluated again"] = model(batch(0, "cuda")).float().norm().item()
    for number in range(STEPS, 2 * STEPS):
        for group in step.optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + number)
        losses.append(step(batch(number, "cuda")).item())
    found["losses"] = losses
    found["captured"].append(step.captured)
    found["shapes"] = message(lambda: step(batch(0, "cuda")[:16]))
    step.release()
    torch.distributed.destroy_process_group()
    return found


@pytest.mark.multi_gpu
@pytest.mark.parametrize("level", ["O2", "coat"])
def test_a_graph_has_the_losses_of_eager_steps_also_after_loading(level, tmp_path):
    for found in dist.run(on_two_gpus, 2, level, str(tmp_path), init=False):
        assert found["losses"] == found["eager"]
        assert found["captured"] == [1, 2]
        assert found["evaluated"] == found["evaluated again"]
        assert "but the graph was captured with" in found["shapes"]
