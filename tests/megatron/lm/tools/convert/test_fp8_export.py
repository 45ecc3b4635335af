"""FP8 layouts as transformers reads them: one byte per weight, and the values that payload and scales stand for."""

import pytest
import torch

from helpers import hosts, numerics
from helpers.hf_models import agree, config, our_logits, random_weights, their_logits, to_hf, tokens
from helpers.tiny import VOCABULARY
from megatron.lm.hugging_face.folder import write_json, write_tensors
from megatron.lm.hugging_face.models import load_model
from megatron.lm.tools.convert.fp8_export import check_blocks, fp8_tensors, quantization_config, routers
from megatron.lm.tools.convert.hugging_face import hf_config, hf_rules
from msamp.numerics.formats import E4M3, FP16
from msamp.numerics.tensor import ScalingTensor

KINDS = ["llama", "llama tied, wide heads, biases", "gpt_neox", "gpt_neox tied, half rotated"]


WIDE = {"hidden_size": 256, "ffn_hidden_size": 384, "kv_channels": 64}  # several blocks per matrix, and one of 128 rows


def is_linear(name, x):
    return ".layers." in name and x.dim() == 2


def exported(name, saved=None):
    """(settings, our FP32 weights, their tensors by name) of a random model whose weights were saved as `saved` makes them."""
    settings = config(name)
    weights = random_weights(settings)
    rules = hf_rules(settings.model, VOCABULARY, list(weights))
    return settings, weights, dict(fp8_tensors(rules, weights.__getitem__, lambda key: saved(weights[key]) if saved else weights[key]))


@pytest.mark.parametrize("name", [name if i % 3 == 0 else pytest.param(name, marks=pytest.mark.nightly) for i, name in enumerate(KINDS)])
def test_transformers_computes_with_the_dequantised_weights(name, tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    settings, weights, theirs = exported(name)
    write_tensors(tmp_path, theirs.items())
    about = hf_config(settings.model, VOCABULARY, torch.bfloat16, 59)
    about["quantization_config"] = quantization_config(about["model_type"])
    write_json(tmp_path / "config.json", about)
    ours, fp8 = our_logits(settings, VOCABULARY, weights), their_logits(tmp_path)
    assert 0 < (fp8 - ours).norm() / ours.norm() < numerics.FP8_LOGITS

    # Without the rounding of the activations the logits are those of the stored values.
    del about["quantization_config"]["config_groups"]["group_0"]["input_activations"]
    write_json(tmp_path / "config.json", about)
    stored = {
        key: ScalingTensor.quantize(x, E4M3).dequantize(torch.float32) if is_linear(key, x) else x.bfloat16().float()
        for key, x in weights.items()
    }
    assert agree(their_logits(tmp_path), our_logits(settings, VOCABULARY, stored), numerics.HF_LOGITS)


@pytest.mark.parametrize("name", KINDS)
def test_what_cuts_one_tensor_shares_its_scale(name):
    _, weights, theirs = exported(name)
    linear = [key for key in theirs if f"{key}_scale" in theirs]
    _, plain = to_hf(config(name), VOCABULARY, weights)
    assert set(plain) == {key for key in theirs if not key.endswith("_scale")}
    assert set(linear) == {key for key, x in plain.items() if is_linear(key, x)}
    for key, x in theirs.items():
        assert x.dtype == (torch.float8_e4m3fn if key in linear else torch.float32 if key.endswith("_scale") else torch.bfloat16), key
        if not key.endswith("_scale"):
            assert x.shape == plain[key].shape
    for group in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
        scales = {theirs[f"model.layers.1.{one}.weight_scale"].item() for one in group if f"model.layers.1.{one}.weight_scale" in theirs}
        assert len(scales) == ("llama" in name)
    for key in linear:
        scale = theirs[f"{key}_scale"]
        assert scale.shape == (1,)
        assert torch.allclose(theirs[key].float() * scale, plain[key], rtol=2**-4, atol=2**-10 * scale.item())


def test_a_weight_that_is_fp8_is_taken_over_bit_for_bit():
    """As at O3: the payload and its scale are what was trained with, not a second rounding of the master."""

    def saved(x):
        return ScalingTensor.quantize(0.9 * x, E4M3, scale=torch.tensor(16.0))

    _, weights, theirs = exported("llama", saved)
    weight = saved(weights["decoder.layers.0.mlp.linear_fc1.weight"])
    payload = torch.cat([theirs[f"model.layers.0.mlp.{one}_proj.weight"].view(torch.uint8) for one in ("gate", "up")])
    assert torch.equal(payload, weight.payload.view(torch.uint8))
    assert theirs["model.layers.0.mlp.gate_proj.weight_scale"].item() == 1 / 16


def test_a_weight_in_fp16_is_quantised_from_the_best_copy():
    _, weights, theirs = exported("gpt_neox", lambda x: ScalingTensor.quantize(0.5 * x, FP16))
    best = ScalingTensor.quantize(weights["decoder.layers.0.self_attention.linear_proj.weight"], E4M3)
    assert torch.equal(theirs["gpt_neox.layers.0.attention.dense.weight"].view(torch.uint8), best.payload.view(torch.uint8))


def separate(weights):
    """Weights with one tensor per expert, as a checkpoint has them."""
    return {
        key if number is None else f"{key}.{number}": part
        for key, x in weights.items()
        for number, part in (enumerate(x) if x.dim() == 3 else [(None, x)])
    }


def spread(scales, shape):
    """The scale of every element of a matrix."""
    return scales if scales.numel() == 1 else scales.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]]


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama", "block"),
        ("gpt_neox", "block"),
        ("llama", "deepseek"),
        ("gpt_neox", "deepseek"),
        ("mixtral", "deepseek"),
        ("olmoe", "deepseek"),
    ],
)
def test_transformers_computes_with_the_values_of_blocks(name, layout, tmp_path):
    pytest.importorskip("transformers")
    hosts.need("compressed_tensors" if layout == "block" else "accelerate", "eval")
    settings = config(name, **(WIDE if name != "gpt_neox" else {"hidden_size": 256, "ffn_hidden_size": 384, "num_attention_heads": 4}))
    whole = {key: x if "norm.weight" in key else x / 4 for key, x in random_weights(settings).items()}
    weights = separate(whole)
    rules = hf_rules(settings.model, VOCABULARY, list(weights))
    check_blocks(rules, ())
    theirs = dict(fp8_tensors(rules, weights.__getitem__, weights.__getitem__, (), layout))
    suffix = "_scale_inv" if layout == "deepseek" else "_scale"
    kept = {key for key in theirs if f"{key}{suffix}" in theirs}
    assert kept == {name for rule in rules if rule.linear for name in rule.theirs}
    assert any(theirs[f"{key}{suffix}"].shape == (3, 2) for key in kept)
    values = {key: x.float() * spread(theirs[f"{key}{suffix}"], x.shape) if key in kept else x.float() for key, x in theirs.items()}
    for rule in rules:
        if rule.linear:  # E4M3 rounds to 3 bits after the point, and below 2^-6 of a block's scale to 2^-9 of it
            for key, part in zip(rule.theirs, rule.split(weights[rule.ours]), strict=True):
                assert theirs[key].float().abs().amax() == 448
                assert torch.allclose(values[key], part, rtol=2**-4, atol=1e-4)
    stored = {rule.ours: rule.join([values[key] for key in rule.theirs]) for rule in rules}
    joined = {key: torch.stack([stored[f"{key}.{i}"] for i in range(len(x))]) if x.dim() == 3 else stored[key] for key, x in whole.items()}
    padded = {key: torch.cat([x, whole[key][len(x) :]]) if x.dim() == 2 else x for key, x in joined.items()}  # rows of the vocabulary

    write_tensors(tmp_path, theirs.items())
    about = hf_config(settings.model, VOCABULARY, torch.bfloat16, 59)
    about["quantization_config"] = quantization_config(about["model_type"], routers(rules), layout)
    write_json(tmp_path / "config.json", about)
    ours = our_logits(settings, VOCABULARY, padded)
    if layout == "block":
        assert 0 < (their_logits(tmp_path) - ours).norm() / ours.norm() < numerics.FP8_LOGITS
        del about["quantization_config"]["config_groups"]["group_0"]["input_activations"]
        write_json(tmp_path / "config.json", about)
    model = load_model(tmp_path, "AutoModelForCausalLM", dtype=torch.float32, quantized=("compressed-tensors", "fp8"))
    with torch.no_grad():
        assert agree(model.eval()(tokens(VOCABULARY)).logits, ours, numerics.HF_LOGITS)


def test_the_scales_of_blocks_survive_a_reader_that_loads_them_in_bf16():
    settings = config("llama", **WIDE)
    weights = separate(random_weights(settings))
    rules = hf_rules(settings.model, VOCABULARY, list(weights))
    theirs = dict(fp8_tensors(rules, weights.__getitem__, weights.__getitem__, (), "block"))
    scales = {key: x for key, x in theirs.items() if key.endswith("_scale")}
    assert scales
    for key, x in scales.items():
        assert x.bfloat16().float().equal(x), key
        weight = theirs[key.removesuffix("_scale")]
        assert weight.float().abs().amax() == 448
        exact = dict(fp8_tensors(rules, weights.__getitem__, weights.__getitem__, (), "deepseek"))[f"{key}_inv"]
        assert (x >= exact).all()
        assert (x <= exact * (1 + 2**-7)).all()


def test_weights_that_blocks_do_not_divide_are_refused():
    settings = config("llama", **(WIDE | {"ffn_hidden_size": 192}))
    rules = hf_rules(settings.model, VOCABULARY, list(random_weights(settings)))
    with pytest.raises(
        ValueError, match=r"layers.0.mlp.gate_proj.weight is 192 x 256, which blocks of 128 x 128 do not .* --layout tensor"
    ):
        check_blocks(rules, ())


def test_what_has_no_fp8_layout_and_what_is_not_finite_is_refused():
    with pytest.raises(ValueError, match=r"learned_absolute is a gpt2 .* use to-hf"):
        quantization_config("gpt2")
    with pytest.raises(ValueError, match=r"linear_qkv.weight contains NaN or Inf"):
        exported("llama", lambda x: ScalingTensor.quantize(x / 0, E4M3))
