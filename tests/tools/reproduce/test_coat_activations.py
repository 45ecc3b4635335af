"""What saved activations lose, by granularity: of inputs made by hand, and of a random Llama."""

import pytest
import torch

from helpers.numerics import make
from megatron.lm.processes.cpu_home import cpu_home
from msamp.nn.saved_activations import GroupedFP8
from tools.reproduce import coat, coat_activations
from tools.reproduce.coat_activations import KEPT, WAYS, OneScale, layer_rows, losses, outliers


def test_one_scale_is_a_group_of_the_whole_tensor():
    x = make("normal", (4, 32))
    assert (
        OneScale()
        .restore(OneScale().keep(x), x.dtype)
        .equal(GroupedFP8(size=128).restore(GroupedFP8(size=128).keep(x.view(1, -1)), x.dtype).view(4, 32))
    )


def llama(folder=None, peak=1.0, **settings):
    """A random Llama of 2 layers, whose norms see channel 5 `peak` times as large; with `folder` it is saved, with a tokenizer of words."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = {"vocab_size": 16, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**shape, num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.5, **settings)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 5] *= peak
    if folder:
        from tokenizers import Tokenizer, models, pre_tokenizers

        words = Tokenizer(models.WordLevel({str(i): i for i in range(15)} | {"end": 15}, unk_token="0"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="end").save_pretrained(folder)
        model.save_pretrained(folder)
    return model.to(torch.bfloat16).eval()


def tokens():
    return torch.randint(15, (3, 8), generator=torch.Generator().manual_seed(1))


def test_every_input_of_every_layer_has_its_rows_and_they_are_measured_on_it():
    """The first norm reads the embeddings, which need no hook to be had."""
    model = llama()
    found = {(line["what"], line["layer"], line["kept"]): line for line in layer_rows(model, tokens())}
    assert len(found) == (len(KEPT) + 1) * 2 * (len(WAYS) + 2)
    x = model.model.embed_tokens(tokens()).flatten(0, 1).detach()
    for kept, way in {**WAYS, "token": GroupedFP8(size=32)}.items():
        line = found["attention norm input", 0, kept]
        assert {name: line[name] for name in losses(x, way)} == losses(x, way)
    assert found["attention norm input", 0, "BF16"]["peak_over_rms"] == outliers(x, 8)["peak_over_rms"]
    again = layer_rows(model, tokens())
    assert again == list(found.values())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_swiglu_and_the_down_projection_fit_each_other():
    """silu of the first half times the second is what the down projection reads."""
    seen = {}
    coat_activations.watch(llama(), tokens(), lambda what, layer, x: seen.update({(what, layer): x}))
    for layer in (0, 1):
        gate, up = seen["SwiGLU input", layer].chunk(2, 1)
        assert torch.equal(torch.nn.functional.silu(gate) * up, seen["down projection input", layer])
        assert seen["down projection input", layer].shape == (24, 48)


def test_a_model_of_transformers_reads_a_text_and_what_does_not_serve_is_refused(tmp_path):
    llama(tmp_path / "model")
    (tmp_path / "text").write_text(" ".join(["3", "5", "7"] * 30))
    (tmp_path / "short").write_text("3 5 7")
    with cpu_home():
        for model, text, length, message in (
            ("none", "text", 8, "has no config.json: give the folder of a transformers model"),
            ("model", "short", 8, "has 3 tokens, but 8 are needed: give a longer one"),
            ("model", "text", 80, "^length is 80, but LlamaForCausalLM has positions for 64 tokens"),
        ):
            with pytest.raises(ValueError, match=message):
                coat_activations.read_model(tmp_path / model, tmp_path / text, 1, length)
        found = coat_activations.read_model(tmp_path / "model", tmp_path / "text", 2, 16)
    assert len(found) == (len(KEPT) + 1) * 2 * (len(WAYS) + 2)
    assert {finding.quantity for finding in coat.of_layers(found)} >= {coat.GAIN}
