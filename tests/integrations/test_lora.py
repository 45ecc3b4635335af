"""Adapters of PEFT on a model that `megatron.lm.post.models.freeze` froze in FP8."""

from pathlib import Path

import pytest
import torch

import msamp
from helpers import hosts, post_runs
from megatron.lm.post import models
from msamp.nn.linear import FP8Linear

peft = hosts.need("peft")


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_the_base_has_one_byte_and_only_adapters_have_states(tmp_path: Path, level: str):
    recipe = msamp.recipes.by_name(level)
    base = models.freeze(models.load_model(post_runs.toy(tmp_path), "AutoModelForCausalLM", torch.bfloat16, "cpu"), recipe).train()
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"))
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
    assert {id(p) for p in trained} == {id(p) for p, state in optimizer.state.items() if state}
