"""The decoder against the model's own forward, with and without its cache; sequences side by side against each alone."""

import copy
from typing import Any

import pytest
import torch

from helpers import hf_models, tiny
from megatron.lm.config.sections.precision import build_recipe
from megatron.lm.evaluation.decoding import Decoder
from megatron.lm.model.gpt import build_model
from msamp.numerics.tensor import ScalingTensor

LEVELS = ("fp32", "bf16", "O1", "O3", "coat")
# FP32 but for the order of sums. In FP8 the decoder's casts have other scales than a forward's: 2^-4 of single values.
SHARE = {"fp32": 2e-6, "bf16": 2**-7}


class Tiny:
    """A tiny model on its device, in its process groups, and the decoder of it."""

    def __init__(self, name: str, precision: str, capacity: int = 16, **settings: Any) -> None:
        self.config = hf_models.config(name, precision=precision, **settings)
        self.model = build_model(self.config, build_recipe(self.config.precision), tiny.VOCABULARY)
        with torch.no_grad():
            draw = torch.Generator().manual_seed(1)
            for parameter in self.model.parameters():
                if not isinstance(parameter, ScalingTensor) and parameter.dim() == 1:  # biases and norms that do something
                    parameter.add_(0.2 * torch.randn(parameter.shape, generator=draw).to(parameter))
        self.decoder = Decoder(self.model, capacity)
        self.x = torch.randint(tiny.VOCABULARY, (3, 12), generator=torch.Generator().manual_seed(3))

    def forward(self) -> torch.Tensor:
        x = self.x.to(self.decoder.device)
        with torch.no_grad():
            return self.model.eval()(x, torch.arange(12, device=x.device).expand_as(x), None).float().cpu()


@pytest.mark.parametrize(
    ("name", "level"),
    [
        *((name, "fp32") for name in hf_models.MODELS),
        *(("llama", level) for level in LEVELS[1:]),
        ("mixtral", "O3"),
        *(
            pytest.param(name, level, marks=pytest.mark.nightly(3))
            for name in hf_models.MODELS
            for level in LEVELS[1:]
            if name != "llama" and (name, level) != ("mixtral", "O3")
        ),
    ],
)
def test_logits_are_those_of_the_model(name: str, level: str):
    with tiny.started(hf_models.config(name, precision=level)):
        assert_logits(Tiny(name, level), level)


@pytest.mark.parametrize("level", ["fp32", pytest.param("O3", marks=pytest.mark.nightly(3))])
def test_logits_with_squared_relu_and_without_positions_are_those_of_the_model(level: str):
    settings = {"squared_relu": True, "position_embedding_type": "none", "disable_bias_linear": True, "add_qkv_bias": True}
    with tiny.started(hf_models.config("gpt_neox", precision=level, **settings)):
        assert_logits(Tiny("gpt_neox", level, **settings), level)


def assert_logits(made: Tiny, level: str) -> None:
    expected = made.forward()
    found = torch.stack(made.decoder.logits(made.x.tolist(), [range(12)] * 3)).cpu()
    assert hf_models.agree(found, expected, SHARE.get(level, 0.05))
    if level in SHARE:
        first = made.decoder.prefill([made.x[0, :5].tolist(), made.x[1, :8].tolist(), made.x[2, :2].tolist()])
        steps = [first] + [made.decoder.step(torch.stack([made.x[0, 5 + i], made.x[1, 8 + i], made.x[2, 2 + i]])) for i in range(4)]
        for row, begin in enumerate((5, 8, 2)):
            cached = torch.stack([step[row] for step in steps]).cpu()
            assert hf_models.agree(cached, expected[row, begin - 1 : begin + 4], SHARE[level])


def test_a_model_trained_with_fp8_attention_is_decoded_in_the_compute_dtype():
    found = []
    for way in ("fp8", "bf16"):
        with tiny.started(hf_models.config("llama", precision="O3")):
            made = Tiny("llama", "O3", attention_precision=way, kv_channels=16)
            found.append(made.decoder.logits(made.x.tolist(), [range(12)] * 3)[0])
    assert found[0].equal(found[1])


@pytest.mark.parametrize("level", LEVELS)
def test_a_sequence_has_the_logits_that_it_has_alone(level: str):
    with tiny.started(hf_models.config("llama", precision=level)):
        decoder = Tiny("llama", level).decoder
        prompts = [[5], [1, 2, 3, 4, 5, 6, 7, 8, 9], [7, 7, 8]]
        followers = torch.tensor([[3, 1, 4], [1, 5, 9]])

        def run(rows: list[int]) -> torch.Tensor:
            first = decoder.prefill([prompts[row] for row in rows])
            return torch.stack([first] + [decoder.step(tokens[rows]) for tokens in followers])

        together = run([0, 1, 2])
        for row in range(3):
            assert hf_models.agree(run([row])[:, 0], together[:, row], 1e-5 if level == "fp32" else 2**-6)
            alone = decoder.logits([prompts[row]], [[-1]])[0][0]
            assert hf_models.agree(alone, together[0, row], 1e-5 if level == "fp32" else 2**-6)


def test_one_whose_values_are_large_leaves_the_others_as_they_are():
    """One scale for the batch would drown the small rows."""
    with tiny.started(hf_models.config("gpt2", precision="O3")):
        made = Tiny("gpt2", "O3")
        with torch.no_grad():
            made.model.embedding.word_embeddings.weight[9] *= 1e4
        alone = made.decoder.logits([[1, 2, 3]], [range(3)])[0]
        beside = made.decoder.logits([[1, 2, 3], [9, 9, 9]], [range(3)] * 2)[0]
        assert hf_models.agree(beside, alone, 2**-6)


def test_fp8_weights_stay_where_they_are_and_the_model_as_it_was():
    with tiny.started(hf_models.config("llama", precision="O3")):
        made = Tiny("llama", "O3")
        made.model.train()
        before = {name: tiny.bits([x]) for name, x in made.model.state_dict().items() if isinstance(x, torch.Tensor)}
        held = [p for p in made.model.parameters() if isinstance(p, ScalingTensor)]
        kept = {p.payload.data_ptr() for p in held}
        decoder = Decoder(made.model, 8)
        linears = [linear for layer in decoder._layers for linear in (layer._qkv, layer._proj, *layer._mlp._linears)]
        used = {linear.gemm.weight.codes.data_ptr() for linear in linears}
        assert used == kept
        decoder.prefill([[1, 2]])
        decoder.step(torch.tensor([3]))
        assert made.model.training
        assert all(tiny.same(tiny.bits([x]), before[name]) for name, x in made.model.state_dict().items() if name in before)


def test_a_copied_decoder_goes_on_by_itself():
    with tiny.started(hf_models.config("llama", precision="fp32")):
        decoder = Tiny("llama", "fp32").decoder
        decoder.prefill([[1, 2, 3]])
        other = copy.copy(decoder)
        other._layers = [copy.copy(layer) for layer in decoder._layers]
        for layer in other._layers:
            layer._cache = layer._cache.clone()
        expected = decoder.step(torch.tensor([4]))
        decoder.step(torch.tensor([5]))
        assert torch.equal(other.step(torch.tensor([4])), expected)


def test_a_second_prefill_forgets_the_first():
    with tiny.started(hf_models.config("llama", precision="fp32")):
        decoder = Tiny("llama", "fp32").decoder
        decoder.prefill([[1, 2, 3, 4, 5], [3, 4]])
        decoder.step(torch.tensor([4, 5]))
        again = decoder.prefill([[9, 8], [7]])
        assert decoder.lengths.tolist() == [2, 1]
        after = decoder.step(torch.tensor([1, 1]))
        fresh = Decoder(decoder._model, 16)
        assert torch.equal(fresh.prefill([[9, 8], [7]]), again)
        assert torch.equal(fresh.step(torch.tensor([1, 1])), after)


def test_what_cannot_be_decoded_is_refused():
    with tiny.started(hf_models.config("gpt2", precision="fp32")):
        made = Tiny("gpt2", "fp32", capacity=4)
        with pytest.raises(ValueError, match=r"capacity 17 must be at least 1 and at most 16, the model's learned positions"):
            Decoder(made.model, 17)
        with pytest.raises(ValueError, match="capacity 0"):
            Decoder(made.model, 0)
        for sequences, message in (
            ([], "must have 1 to 4 tokens, but there are none"),
            ([[1], []], "there are 0 to 1 tokens"),
            ([[1] * 5], "there are 5 to 5 tokens"),
            ([[64]], r"token ids 64 to 64 must be in \[0, 64\)"),
            ([[-1]], "token ids -1"),
        ):
            with pytest.raises(ValueError, match=message):
                made.decoder.prefill(sequences)
        with pytest.raises(ValueError, match=r"shape \[1\], expected \[0\]"):
            made.decoder.step(torch.tensor([1]))
        made.decoder.prefill([[1, 2, 3]])
        made.decoder.step(torch.tensor([1]))
        with pytest.raises(ValueError, match="has reached the capacity of 4 tokens"):
            made.decoder.step(torch.tensor([1]))


def test_a_model_in_parts_is_refused():
    with tiny.started(hf_models.config("gpt2", precision="fp32")):
        made = Tiny("gpt2", "fp32")
        made.model.config.tensor_model_parallel_size = 2
        with pytest.raises(ValueError, match="does not support 2 tensor-parallel and 1 pipeline ranks: load the checkpoint on one process"):
            Decoder(made.model, 4)
        made.model.config.tensor_model_parallel_size, made.model.config.expert_model_parallel_size = 1, 2
        with pytest.raises(ValueError, match="does not support 2 expert-parallel ranks: load the checkpoint on one process"):
            Decoder(made.model, 4)


@pytest.mark.gpu
@pytest.mark.parametrize("level", ["bf16", "O2", "O3"])
def test_on_a_gpu_cached_steps_are_those_without(level: str):
    settings = {"hidden_size": 256, "ffn_hidden_size": 512, "num_attention_heads": 4, "num_query_groups": 2}
    with tiny.started(hf_models.config("llama", precision=level, **settings)):
        made = Tiny("llama", level, **settings)
        first = made.decoder.prefill([row[:4].tolist() for row in made.x])
        steps = torch.stack([first] + [made.decoder.step(made.x[:, 4 + i]) for i in range(4)], dim=1)
        whole = torch.stack(made.decoder.logits(made.x.tolist(), [range(3, 8)] * 3))
        assert hf_models.agree(steps, whole, 0.03)
