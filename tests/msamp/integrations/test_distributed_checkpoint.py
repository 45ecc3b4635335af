"""torch.distributed.checkpoint saves and loads what `msamp.initialize` and FSDP2 return: the run continues with the same bits."""

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import msamp
from helpers import dist
from helpers.numerics import make
from msamp.integrations import fsdp
from msamp.numerics.tensor import fp32_values

LEVELS = ("O2", "O3", pytest.param("O1", marks=pytest.mark.nightly(5)), "coat", "fp32")


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 48), nn.LayerNorm(48), nn.GELU(), nn.Linear(48, 33), nn.Linear(33, 32))


def plain(level: str, seed: int = 0, **options):
    model = net(seed)
    return msamp.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), recipe=level, **options)


def sharded(level: str, seed: int = 0):
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model = fsdp.prepare(net(seed), recipe=level)
    for layer in model:
        if isinstance(layer, nn.Linear | msamp.FP8Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, fsdp.optimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-2), recipe=level)


def train(pair: Any, steps: range) -> list[float]:
    model, optimizer = pair
    losses = []
    for step in steps:
        x = make("normal", (8, 32), step)
        loss = (model(x) - x.roll(1, 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses + [float(x.sum()) for x in model.buffers()]  # histories too: a lost one need not change the first losses


def states(pair: Any, **options: bool) -> dict[str, Any]:
    model, optim = get_state_dict(*pair, options=StateDictOptions(**options))
    return {"model": model, "optim": optim}


def load(pair: Any, folder: str, **options: bool) -> Any:
    state = states(pair, **options)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(*pair, model_state_dict=state["model"], optim_state_dict=state["optim"], options=StateDictOptions(**options))
    return pair


@pytest.mark.promise(
    "Checkpoints", "torch.distributed.checkpoint saves and loads models of `msamp.initialize`, ZeRO and FSDP2 bit for bit."
)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("level", LEVELS)
def test_a_run_continues_with_the_same_bits_on_one_process(level, tmp_path: Path):
    pair = plain(level)
    train(pair, range(17))
    dcp.save(states(pair), checkpoint_id=tmp_path / "sync")
    dcp.save(states(pair), checkpoint_id=tmp_path / "second call")
    waiting = dcp.async_save(states(pair), checkpoint_id=tmp_path / "async") if torch.distributed.is_initialized() else None
    full = copy.deepcopy(states(pair, full_state_dict=True))
    file = io.BytesIO()
    torch.save(pickle.loads(pickle.dumps(full)) if level != "coat" else full, file)  # plain pickle cannot read float8
    here = train(pair, range(17, 20))
    assert waiting is None or waiting.result()
    for folder in ("sync", "second call"):
        assert train(load(plain(level, 5), str(tmp_path / folder)), range(17, 20)) == here
    file.seek(0)
    for whole in (full, torch.load(file, weights_only=False)):
        other = plain(level, 5)
        options = StateDictOptions(full_state_dict=True)
        set_state_dict(*other, model_state_dict=whole["model"], optim_state_dict=whole["optim"], options=options)
        assert train(other, range(17, 20)) == here
    if level != "coat":  # a plain model reads the files too
        state = {"model": net(7).state_dict()}
        dcp.load(state, checkpoint_id=tmp_path / "sync", planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
        want = load(plain(level, 5), str(tmp_path / "sync"))[0]
        for name, value in state["model"].items():
            assert torch.allclose(value, fp32_values(want.get_parameter(name)), rtol=1e-6, atol=0)


def each_way(level: str, folder: str) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, begin in {"plain": lambda seed: plain(level, seed, zero=False), "zero": lambda seed: plain(level, seed, zero=True)}.items():
        found |= {f"{name}, {key}": value for key, value in one_way(begin, f"{folder}/{name}").items()}
    if level != "fp32":
        found |= {f"fsdp, {key}": value for key, value in one_way(lambda seed: sharded(level, seed), f"{folder}/fsdp").items()}
    return found


def one_way(begin: Any, folder: str) -> dict[str, object]:
    pair, found = begin(0), {}
    train(pair, range(17))
    dcp.save(states(pair), checkpoint_id=f"{folder}/sync")
    dcp.async_save(states(pair), checkpoint_id=f"{folder}/async").result()
    full = copy.deepcopy(states(pair, full_state_dict=True))  # plain weights alias the model's
    here = train(pair, range(17, 20))
    for way in ("sync", "async"):
        found[way] = train(load(begin(5), f"{folder}/{way}"), range(17, 20)) == here
    other, options = begin(5), StateDictOptions(full_state_dict=True)
    if "fsdp" in folder:
        with pytest.raises(ValueError, match=r"fsdp\.load_model"):
            set_state_dict(*other, model_state_dict=full["model"], optim_state_dict=full["optim"], options=options)
        fsdp.load_model(other[0], full["model"])
        set_optimizer_state_dict(*other, full["optim"], options=options)
    else:
        set_state_dict(*other, model_state_dict=full["model"], optim_state_dict=full["optim"], options=options)
    found["full"] = train(other, range(17, 20)) == here
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("level", ["O3", *(pytest.param(level, marks=pytest.mark.nightly(30)) for level in ("O2", "coat"))])
def test_so_it_does_on_two_processes_with_zero_and_fsdp2(level, tmp_path: Path):
    for found in dist.run(each_way, 2, level, str(tmp_path), timeout=280):
        assert found == dict.fromkeys(found, True)


def whole(model: nn.Module) -> list[torch.Tensor]:
    """What `full_state_dict=True` returns; on one rank it aliases the weights."""
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return [state[name].clone() for name, _ in model.named_parameters()]


def saved(level: str, folder: str) -> list[torch.Tensor]:
    pair = sharded(level)
    train(pair, range(2))
    dcp.save(states(pair), checkpoint_id=folder)
    return whole(pair[0])


def loaded(level: str, folder: str) -> list[torch.Tensor]:
    pair = load(sharded(level, 5), folder)
    weights = whole(pair[0])
    train(pair, range(1))
    return weights


@pytest.mark.filterwarnings("ignore")
def test_another_number_of_ranks_reads_the_same_weights(tmp_path: Path):
    want = dist.run(saved, 2, "O3", str(tmp_path))[0]
    for ranks in (1, 3):
        for rank in dist.run(loaded, ranks, "O3", str(tmp_path)):
            assert all(torch.equal(a, b) for a, b in zip(rank, want, strict=True))
    with pytest.raises(CheckpointException, match=r"load it into the model before msamp\.initialize, or after .*fsdp\.prepare"):
        load(plain("O3", 5), str(tmp_path))
    state = {"model": net(5).state_dict()}  # as that says
    dcp.load(state, checkpoint_id=tmp_path)
    assert all(torch.equal(state["model"][name], fp32_values(x)) for (name, _), x in zip(net(5).named_parameters(), want, strict=True))


def broadcast(kind: str, key: str) -> str:
    """What loading of rank 0's state says there."""
    pair = sharded("O3") if kind == "fsdp" else plain("O3", zero=True)
    train(pair, range(1))
    full = copy.deepcopy(states(pair, full_state_dict=True))[key]
    full = full if torch.distributed.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    with pytest.raises(RuntimeError) as error:  # on other ranks that the first one has gone
        set_model_state_dict(pair[0], full, options=options) if key == "model" else set_optimizer_state_dict(*pair, full, options=options)
    return str(error.value)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "key"), [("fsdp", "model"), ("zero", "optim")])
def test_the_state_of_one_rank_is_not_broadcast_and_the_error_says_what_to_do(kind, key):
    assert "broadcast_from_rank0 sends it: pass the whole state on every rank" in dist.run(broadcast, 2, kind, key)[0]
