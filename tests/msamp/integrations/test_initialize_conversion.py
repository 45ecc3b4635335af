"""What `msamp.initialize` says of the layers that it converts, and the models that it refuses."""

import re
import warnings

import pytest
import torch
from torch import nn

import msamp
from helpers import dist
from helpers.numerics import make


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 16))


@pytest.mark.promise("Conversion", "A model in DistributedDataParallel or sharded by FSDP is refused by name.")
@pytest.mark.parametrize("inside", [False, True])
def test_a_model_that_fsdp_has_cut_is_refused_by_name(tmp_path, inside):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for kind, cut in (
            ("FullyShardedDataParallel", lambda m: FullyShardedDataParallel(m, device_id="cpu")),
            ("FSDPModule", fully_shard),
        ):
            model = cut(mlp())
            model = nn.ModuleDict({"inner": model}) if inside else model
            where = r" \(around inner\)" if inside else ""
            with pytest.raises(ValueError, match=rf"{kind}{where} does not support FP8 weights; pass the unsharded model.*zero=True"):
                msamp.initialize(model, torch.optim.AdamW(model.parameters()))
        model, mesh = mlp(), init_device_mesh("cpu", (1,))
        model[0].weight = torch.nn.Parameter(distribute_tensor(model[0].weight.detach(), mesh, [Shard(0)]))
        with pytest.raises(ValueError, match=r"0\.weight is a DTensor; pass the unsharded model.*fsdp\.prepare\(model\) before"):
            msamp.initialize(model, torch.optim.AdamW(model.parameters()))
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.promise("Hosts", "DDP, FSDP1, `fully_shard` and DTensor over converted weights are refused with the fix.")
def test_what_would_cut_or_join_weights_that_are_fp8_already_is_refused_with_the_way_out(tmp_path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    way = (
        r"do not support this one: use the model of msamp\.initialize without a wrapper.*"
        r"or call msamp\.integrations\.fsdp\.prepare\(model\) before"
    )
    mesh = init_device_mesh("cpu", (1,))
    try:
        for wrap in (
            nn.parallel.DistributedDataParallel,
            lambda m: FullyShardedDataParallel(m, device_id="cpu"),
            lambda m: fully_shard(m, mesh=mesh),
            lambda m: distribute_tensor(m[0][0].weight, mesh, [Shard(0)]),
        ):
            outer = nn.Sequential(msamp.initialize(mlp())[0], nn.Linear(16, 4))
            with pytest.raises(RuntimeError, match=way):
                wrap(outer)
    finally:
        torch.distributed.destroy_process_group()


def refusals() -> dict[str, str]:
    """What each of two ranks is told by each wrapper, before the conversion and after; and that the ranks go on together."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    mesh = init_device_mesh("cpu", (2,))
    wrappers = {
        "DistributedDataParallel": nn.parallel.DistributedDataParallel,
        "FullyShardedDataParallel": lambda m: FullyShardedDataParallel(m, device_id=torch.device("cpu")),
        "FSDPModule": lambda m: fully_shard(m, mesh=mesh),
    }
    found = {}

    def told(name: str, call) -> None:
        try:
            call()
        except (ValueError, RuntimeError) as error:
            found[name] = str(error)
        told_all = torch.ones(())
        torch.distributed.all_reduce(told_all)
        assert told_all == 2

    for kind, wrap in wrappers.items():
        cut = wrap(mlp())
        told(f"{kind} before", lambda cut=cut: msamp.initialize(cut, torch.optim.AdamW(cut.parameters())))
        low, _ = msamp.initialize(mlp())
        told(f"{kind} after", lambda low=low, wrap=wrap: wrap(low))
        outer = nn.Sequential(msamp.initialize(mlp())[0], nn.Linear(16, 4))
        told(f"{kind} around", lambda outer=outer, wrap=wrap: wrap(outer))
    return found


def test_each_wrapper_is_refused_on_two_processes_in_both_orders():
    way = (
        r"do not support this one: use the model of msamp\.initialize without a wrapper.*"
        r"or call msamp\.integrations\.fsdp\.prepare\(model\) before"
    )
    first, second = dist.run(refusals, 2)
    assert first.keys() == second.keys()
    assert len(first) == 9
    for found in (first, second):
        for name, text in found.items():
            kind, _, when = name.partition(" ")
            if when == "before":
                assert re.match(rf"{kind} does not support FP8 weights; pass ", text)
            elif name == "DistributedDataParallel after":
                assert "averages the gradients itself; use the model without a wrapper" in text
            else:
                assert re.search(way, text)


@pytest.mark.promise("Conversion", "`msamp.initialize` logs the FP8 share of layers, parameters and FLOPs, and warns below half.")
def test_what_became_fp8_is_logged_and_little_or_nothing_is_warned_of(caplog):
    with caplog.at_level("INFO", logger="msamp"), warnings.catch_warnings():
        warnings.simplefilter("error")
        msamp.initialize(mlp(), opt_level="O2")
    assert "3 of 3 layers with weights are in FP8: 98.1% of the parameters, 100.0% of the FLOPs" in caplog.text
    with pytest.warns(UserWarning, match=r"recipe 'O2' converted no layer.*\n0 of 1 .*\n.*a convolution: 0"):
        msamp.initialize(nn.Sequential(nn.Conv2d(3, 8, 3)))
    with pytest.warns(
        UserWarning, match=r"less than half of the model's weight GEMMs.*\n1 of 2 .* 33\.3% of the FLOPs(.*\n)+.*a convolution: 0"
    ):
        msamp.initialize(nn.Sequential(nn.Conv1d(32, 32, 2), nn.Linear(32, 32)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        msamp.initialize(nn.Sequential(nn.Conv2d(3, 8, 3)), recipe="bf16")


def test_attention_is_trained_from_its_own_masters():
    model = nn.MultiheadAttention(32, 2)
    values = model.in_proj_weight.detach().clone()
    low, optimizer = msamp.initialize(model, torch.optim.AdamW(model.parameters()), "O3")
    master = optimizer.state[low.in_proj_weight]["master"].dequantize()
    assert (master - values).norm() < 1e-3 * values.norm()
    x, before = make("normal", (4, 2, 32)), low.in_proj_weight.dequantize()
    low(x, x, x)[0].square().sum().backward()
    optimizer.step()
    assert not low.in_proj_weight.dequantize().equal(before)
