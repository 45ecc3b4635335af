"""Models from folders: what is loaded, frozen in one byte, and refused."""

import json
import sys

import pytest
import torch

import msamp
from helpers import post_runs
from megatron.lm.post import models
from msamp.kernels import ops
from msamp.nn.linear import FP8Linear
from msamp.numerics.metrics import sqnr_db
from msamp.numerics.tensor import ScalingTensor

BF16, CPU = torch.bfloat16, torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return post_runs.toy(tmp_path_factory.mktemp("toy"))


def policy(folder, dtype=torch.float32):
    return models.load_model(folder, "AutoModelForCausalLM", dtype, CPU)


def test_a_tokenizer_pads_on_the_left(folder):
    tokenizer = models.load_tokenizer(folder)
    assert tokenizer.padding_side == "left"
    assert tokenizer.pad_token == "<|pad|>"


@pytest.mark.parametrize("level", ["O2", "O3", "coat"])
def test_a_frozen_model_has_one_byte_a_linear_weight_and_no_gradient(folder, level):
    model = models.freeze(policy(folder), msamp.recipes.by_name(level))
    layers = [m for m in model.modules() if isinstance(m, FP8Linear)]
    assert len(layers) == 14
    assert all(isinstance(m.weight, ScalingTensor) and m.weight.payload.itemsize == 1 for m in layers)
    assert not any(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("level", ["O2", "O3"])
@torch.no_grad()
def test_a_reference_computes_what_the_policy_computes_at_its_start(folder, level):
    recipe = msamp.recipes.by_name(level)
    reference = models.freeze(policy(folder, BF16), recipe)
    trained, _ = msamp.initialize(policy(folder, BF16), recipe=recipe)
    tokens = torch.arange(40).view(2, 20)
    assert torch.equal(trained(tokens).logits, reference(tokens).logits)


@pytest.mark.parametrize("level", ["O2", "O3"])
@torch.no_grad()
def test_logits_of_the_cache_are_those_of_training_and_stored_weights_are_multiplied(folder, level, monkeypatch):
    """A cast just in time takes its scale over one token with the cache and over all without: a power of two, so little differs."""
    model, _ = msamp.initialize(policy(folder), recipe=level)
    places = {m.weight.payload.data_ptr() for m in model.modules() if isinstance(m, FP8Linear)}
    multiply, seen, steps, cache, tokens = ops.scaled_mm, set(), [], None, torch.arange(24)[None]
    whole = model.eval()(tokens, use_cache=False).logits[0]
    monkeypatch.setattr(ops, "scaled_mm", lambda a, b, *rest, **k: seen.add(b.untyped_storage().data_ptr()) or multiply(a, b, *rest, **k))
    for place in range(24):
        out = model(tokens[:, place : place + 1], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        steps.append(out.logits[0, 0])
    assert sqnr_db(whole, torch.stack(steps)) > 100
    assert level == "O2" or seen == places


def test_a_model_of_which_a_part_is_missing_is_refused(folder, tmp_path):
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ValueError, match=r"is missing 1 tensors of a LlamaForCausalLM \(model.layers.1.mlp.up_proj.weight\)"):
        policy(tmp_path)


def test_folders_without_model_or_tokenizer_are_refused(folder, tmp_path):
    with pytest.raises(ValueError, match=r"has no config.json: give the folder"):
        models.load_tokenizer(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    with pytest.raises(ValueError, match=r"msamp convert to-hf --load"):
        models.load_model(tmp_path, "AutoModelForCausalLM", BF16, CPU)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ValueError, match=r"has no tokenizer that transformers can load|must be a fast one"):
        models.load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match=r"contains neither model.safetensors nor model.safetensors.index.json"):
        models.load_model(tmp_path, "AutoModelForCausalLM", BF16, CPU)


def test_a_pickled_model_is_not_read(folder, tmp_path):
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    torch.save(policy(folder).state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pickled files \(pytorch_model.bin\) are not read"):
        models.load_model(tmp_path, "AutoModelForCausalLM", BF16, CPU)


def test_a_tokenizer_without_an_end_of_text_is_refused(folder, tmp_path):
    words = models.load_tokenizer(folder)
    words.save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    kept = {name: value for name, value in json.loads(path.read_text()).items() if name != "eos_token"}
    path.write_text(json.dumps(kept))
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ValueError, match="must be a fast one with an eos_token"):
        models.load_tokenizer(tmp_path)


def test_a_package_that_is_missing_is_named_with_its_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(ValueError, match=r"trl is not installed .*: pip install trl"):
        models.need("trl")
