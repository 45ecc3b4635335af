"""What `msamp.initialize` says of the layers that it converts, and the models that it refuses."""

import warnings

import pytest
import torch
from torch import nn

import msamp


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


@pytest.mark.promise("Conversion", "`msamp.initialize` logs the FP8 share of layers, parameters and FLOPs, and warns below half.")
def test_what_became_fp8_is_logged_and_little_or_nothing_is_warned_of(caplog):
    with caplog.at_level("INFO", logger="msamp"), warnings.catch_warnings():
        warnings.simplefilter("error")
        msamp.initialize(mlp(), opt_level="O2")
    assert "3 of 3 layers with weights are in FP8: 98.1% of the parameters, 100.0% of the FLOPs" in caplog.text
    with pytest.warns(match="inv_freq is in 16 bits"), pytest.warns(match=r"'O2' converted no layer.*\n0 of 1 .*\n.*a convolution: 0"):
        msamp.initialize(nn.Sequential(nn.Conv2d(3, 8, 3)).apply(lambda m: m.register_buffer("inv_freq", torch.ones(2))).bfloat16())
    with pytest.warns(
        UserWarning, match=r"less than half of the model's weight GEMMs.*\n1 of 2 .* 33\.3% of the FLOPs(.*\n)+.*a convolution: 0"
    ):
        msamp.initialize(nn.Sequential(nn.Conv1d(32, 32, 2), nn.Linear(32, 32)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        msamp.initialize(nn.Sequential(nn.Conv2d(3, 8, 3)), recipe="bf16")
