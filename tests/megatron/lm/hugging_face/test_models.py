"""Models from folders against `from_pretrained`, and what a folder may have besides.

Attacks are in tests/attack/test_hugging_face_folders.py.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers import hf_models, post_runs, tiny
from helpers.choices import every_value
from megatron.lm.hugging_face.folder import write_json, write_tensors
from megatron.lm.hugging_face.models import check_vocabulary, load_model, load_tokenizer

transformers = pytest.importorskip("transformers")
CAUSAL = "AutoModelForCausalLM"


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    return post_runs.toy(tmp_path / "toy")


@every_value
@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, "auto"])
def test_weights_are_those_that_from_pretrained_loads(tmp_path: Path, kind: str, dtype: torch.dtype | str):
    about, tensors = hf_models.to_hf(hf_models.config(kind), tiny.VOCABULARY, hf_models.random_weights(hf_models.config(kind)))
    write_tensors(tmp_path, tensors.items(), shard_bytes=10_000)
    write_json(tmp_path / "config.json", about)
    ours = load_model(tmp_path, CAUSAL, dtype=dtype)
    theirs = getattr(transformers, CAUSAL).from_pretrained(tmp_path, dtype=dtype)
    assert type(ours) is type(theirs)
    assert not ours.training
    assert ours.config.to_dict() == theirs.config.to_dict()
    for (name, x), (same, y) in zip(ours.state_dict().items(), theirs.state_dict().items(), strict=True):
        assert (name, x.dtype) == (same, y.dtype)
        assert torch.equal(x, y)
    tokens = hf_models.tokens()
    assert torch.equal(ours(tokens).logits, theirs(tokens).logits)


def test_masks_and_frequencies_of_older_versions_are_not_left_over(toy: Path):
    tensors = load_file(toy / "model.safetensors")
    save_file(tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}, toy / "model.safetensors")
    load_model(toy, CAUSAL)
    save_file(tensors | {"model.layers.0.mlp.more": torch.ones(8)}, toy / "model.safetensors")
    with pytest.raises(ValueError, match=r"has 1 tensors that a LlamaForCausalLM of its config.json does not have .*mlp.more"):
        load_model(toy, CAUSAL)


def test_a_tokenizer_with_more_ids_than_embeddings_is_refused(toy: Path):
    model, words = load_model(toy, CAUSAL), load_tokenizer(toy)
    check_vocabulary(model, words)
    words.add_tokens(["<|new|>"])
    with pytest.raises(ValueError, match="has 262 tokens but the model has 261 embeddings"):
        check_vocabulary(model, words)


def test_fp8_weights_with_a_smaller_last_block_are_refused(tmp_path: Path):
    """transformers 5.24 divides the weight by its grid of scales: 200 rows become blocks of 100."""
    name = "model.layers.0.mlp.up_proj.weight"
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    write_json(tmp_path / "config.json", {"model_type": "llama", "quantization_config": quantization})
    write_tensors(tmp_path, {name: torch.ones(200, 64).to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(2, 1)}.items())
    with pytest.raises(ValueError, match=r"up_proj.weight is 200 x 64, which blocks of \[128, 128\] do not divide"):
        load_model(tmp_path, CAUSAL, quantized=("fp8",))
