"""What `msamp.initialize` says of the layers that it converts, and the models that it refuses."""

import warnings

import pytest
import torch
from numerics import make
from torch import nn

import msamp


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 16))


@pytest.mark.parametrize("inside", [False, True])
def test_a_model_that_fsdp_has_cut_is_refused_by_name(tmp_path, inside):
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for kind, cut in (
            ("FullyShardedDataParallel", lambda m: FullyShardedDataParallel(m, device_id="cpu")),
            ("FSDPModule", fully_shard),
        ):
            model = cut(mlp())
            model = nn.ModuleDict({"inner": model}) if inside else model
            where = r" \(around inner\)" if inside else ""
            with pytest.raises(ValueError, match=rf"{kind}{where} cannot hold FP8 weights; give the model before it is cut.*zero=True"):
                msamp.initialize(model, torch.optim.AdamW(model.parameters()))
    finally:
        torch.distributed.destroy_process_group()


def test_what_became_fp8_is_logged_and_little_or_nothing_is_warned_of(caplog):
    with caplog.at_level("INFO", logger="msamp"), warnings.catch_warnings():
        warnings.simplefilter("error")
        msamp.initialize(mlp(), opt_level="O2")
    assert "3 of 3 layers with weights are in FP8: 98.1% of the parameters, 100.0% of the FLOPs" in caplog.text
    with pytest.warns(UserWarning, match=r"recipe 'O2' has changed no layer.*\n0 of 1 .*\n.*a convolution: 0"):
        msamp.initialize(nn.Sequential(nn.Conv2d(3, 8, 3)))
    with pytest.warns(
        UserWarning, match=r"less than half of the model's products.*\n1 of 2 .* 33\.3% of the FLOPs(.*\n)+.*a convolution: 0"
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
