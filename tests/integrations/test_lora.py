"""examples/sft with adapters of PEFT on FP8 base weights."""

import pytest
import torch

import msamp
from helpers import hosts, post_runs
from megatron.lm.post import models
from megatron.lm.post.memory import stored
from msamp.nn.linear import FP8Linear

peft = hosts.need("peft")


def run(folder, save, **settings):
    given = {"load": folder / "toy", "data": folder / "sums.jsonl", "save": save, "dtype": "bf16", "seq_length": 64, "lr": 1e-2,
             "train_iters": 8, "lora_rank": 4, "micro_batch_size": 4} | settings  # fmt: skip
    words = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return post_runs.example("sft/train.py").main(words)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    post_runs.toy(folder / "toy")
    post_runs.sums(folder / "sums.jsonl")
    return folder


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_the_base_has_one_byte_and_only_adapters_have_states(made, level):
    recipe = msamp.recipes.by_name(level)
    base = models.load_model(made / "toy", "AutoModelForCausalLM", torch.bfloat16, "cpu")
    model = models.with_lora(base, recipe, 4, seed=0)
    trained = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = msamp.initialize(model, torch.optim.AdamW(trained, lr=1e-2), recipe)
    layers = {name: m.weight for name, m in model.named_modules() if isinstance(m, FP8Linear)}
    assert len(layers) == 14
    assert all(weight.payload.dtype == torch.float8_e4m3fn for weight in layers.values())
    before = {name: weight.payload.view(torch.uint8).clone() for name, weight in layers.items()}
    tokens = torch.arange(40).view(2, 20)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    assert all(weight.payload.view(torch.uint8).equal(before[name]) for name, weight in layers.items())
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    adapters = sum(p.numel() for p in trained)
    # As of all plain matrices: m in E4M3, v in FP16, and a scale of four bytes for each; FP32 adapters are their own masters.
    assert stored(model, optimizer).moments == 3 * adapters + 8 * len(trained)
    assert stored(model, optimizer).masters == 0


@pytest.mark.parametrize("level", ["O0", "O3"])
def test_it_learns_goes_on_bit_for_bit_and_its_adapters_load(made, tmp_path, level):
    from transformers import AutoModelForCausalLM

    assert run(made, tmp_path / "whole", opt_level=level) == 0
    found = post_runs.metrics(tmp_path / "whole")
    assert found[-1]["loss"] < 0.97 * found[0]["loss"]
    assert run(made, tmp_path / "part", opt_level=level, save_interval=4) == 0
    (tmp_path / "part/step_00000008.pt").unlink()
    whole = (tmp_path / "part/model/adapter_model.safetensors").read_bytes()
    for path in (tmp_path / "part/model").iterdir():
        path.unlink()
    (tmp_path / "part/model").rmdir()
    assert run(made, tmp_path / "part", opt_level=level, save_interval=4) == 0
    assert (tmp_path / "part/model/adapter_model.safetensors").read_bytes() == whole
    assert post_runs.metrics(tmp_path / "part") == found
    base = AutoModelForCausalLM.from_pretrained(made / "toy")
    model = peft.PeftModel.from_pretrained(base, tmp_path / "part/model")
    tokens = torch.arange(40).view(2, 20)
    assert not torch.equal(model(tokens).logits, AutoModelForCausalLM.from_pretrained(made / "toy")(tokens).logits)
