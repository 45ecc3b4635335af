"""Decoder layers of transformers in `msamp.initialize`: fused and as they are, they compute the same, and nothing else can tell."""

import copy
import functools
import pickle

import pytest
import torch
import torch.distributed
from torch import nn

import msamp
from helpers import dist, hosts
from helpers.late_weights import late
from helpers.numerics import through_a_file
from msamp.nn import decoder_families, decoder_layer
from msamp.nn.linear import transposed_weights
from msamp.numerics.metrics import sqnr_db

transformers = hosts.need("transformers")
SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FAMILIES = {
    "llama": ("LlamaConfig", {"num_key_value_heads": 4}),
    "mistral": ("MistralConfig", {"sliding_window": 5}),
    "qwen2": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "smollm3": ("SmolLM3Config", {"no_rope_layers": [1, 0], "num_key_value_heads": 1}),
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.0}
FAMILIES_OF_EXPERTS = {
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen3_moe": ("Qwen3MoeConfig", MOE | {"moe_intermediate_size": 32, "head_dim": 16, "mlp_only_layers": [1]}),
    "olmoe": ("OlmoeConfig", MOE | {"num_key_value_heads": 4, "intermediate_size": 32}),
}
IN_PARTS = {  # layers of which single parts are fused -> as above, and how many parts
    "gpt2": ("GPT2Config", {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}, 2),
    "olmo2": ("Olmo2Config", {}, 9),
}
every_family = pytest.mark.parametrize("family", FAMILIES | IN_PARTS)
TOKENS = torch.randint(3, 96, (3, 16), generator=torch.Generator().manual_seed(0))
PADDED = (torch.arange(16) < torch.tensor([[16], [9], [12]])).long()


def build(family: str = "llama", dtype: torch.dtype = torch.bfloat16, **changes) -> nn.Module:
    torch.manual_seed(0)
    kind, own, *_ = (FAMILIES | FAMILIES_OF_EXPERTS | IN_PARTS)[family]
    config = getattr(transformers, kind)(**{**SIZES, **own, **changes})
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)  # .to(dtype) would round rotary angles


def begin(model: nn.Module, level: str = "O3", **options) -> tuple[nn.Module, torch.optim.Optimizer]:
    return msamp.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-3), level, **options)


def layers(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if type(m).__name__.endswith("DecoderLayer")]


def fused_halves(model: nn.Module) -> int:
    return sum(not half.why for half in msamp.survey(model).halves)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {n: p.grad.dequantize() if hasattr(p.grad, "held") else p.grad for n, p in model.named_parameters() if p.grad is not None}
    return found | {n: found[n].t() for n in transposed_weights(model) if n in found}


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int = 3, **inputs) -> list[float]:
    found = []
    for step in range(count):
        tokens = TOKENS.roll(step, 0)
        loss = model(input_ids=tokens, labels=tokens, **inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def no_worse(plain: torch.Tensor, fused: torch.Tensor, unfused: torch.Tensor, by: float = 3.0) -> bool:
    """Whether the fused result has the same distance from the FP32 model's as the unfused one, in dB."""
    return sqnr_db(plain, fused) > min(sqnr_db(plain, unfused) - by, 40.0)


@pytest.mark.parametrize(("family", "level"), [*((family, "O3") for family in FAMILIES | IN_PARTS), ("qwen3", "O2")])
def test_forward_gradients_and_steps(family, level):
    plain = build(family, torch.float32)
    (fused, low), (unfused, other) = begin(build(family), level), begin(build(family), level, fuse=False)
    assert (fused_halves(fused), fused_halves(unfused)) == (4 * (family in FAMILIES), 0)
    assert family in FAMILIES or sum(isinstance(part, decoder_layer._Fused) for part in fused.modules()) == IN_PARTS[family][2]
    for inputs in ({}, {"attention_mask": PADDED}):
        outputs = [model(input_ids=TOKENS, labels=TOKENS, **inputs) for model in (plain, fused, unfused)]
        logits = [output.logits[PADDED.bool()] for output in outputs]
        assert no_worse(*logits)
        assert outputs[1].loss.item() == pytest.approx(outputs[2].loss.item(), rel=2e-3)
        for output in outputs:
            output.loss.backward()
        found = [gradients(model) for model in (plain, fused, unfused)]
        assert found[1].keys() == found[0].keys()
        assert all(no_worse(*(each[name] for each in found)) for name in found[0])
        for model in (plain, low, other):
            model.zero_grad()
    assert steps(fused, low) == pytest.approx(steps(unfused, other), rel=2e-3)


@pytest.mark.parametrize(("family", "autocast"), [*((family, True) for family in FAMILIES), ("qwen2", False)])
def test_halves_that_gain_nothing_in_fp8_are_fused_in_bf16(family, autocast):
    """As close to FP32 as BF16 is, with the weights that O2 stores in FP16."""
    plain, own = build(family, torch.float32), build(family, torch.float32 if autocast else torch.bfloat16)
    model, optimizer = begin(own, "O2", fp8_min_gain=0)
    optimizer.scaling.compute_in_bf16(dict.fromkeys(optimizer.scaling.linears, "computed in BF16"))
    assert fused_halves(model) == 4
    assert not msamp.survey(model).converted
    found = plain(input_ids=TOKENS, labels=TOKENS, attention_mask=PADDED)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        outputs = model(input_ids=TOKENS, labels=TOKENS, attention_mask=PADDED)
    assert sqnr_db(found.logits[PADDED.bool()], outputs.logits[PADDED.bool()]) > 40
    for output in (found, outputs):
        output.loss.backward()
    want, own = gradients(plain), gradients(model)
    assert want.keys() == own.keys()
    assert all(sqnr_db(want[name], own[name]) > 27 for name in want)
    optimizer.step()
    with model.model.layers[1].mlp.down_proj.register_forward_hook(lambda *_: None):
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    optimizer.scaling.linears["model.layers.0.mlp.up_proj"].in_bf16 = ""
    assert {half.why for half in msamp.survey(model).halves} == {"", "one product inside it computes in BF16"}


@pytest.mark.parametrize("family", FAMILIES_OF_EXPERTS)
def test_mixtures_of_experts(family):
    plain = build(family, torch.float32)
    (fused, low), (unfused, other) = begin(build(family)), begin(build(family), fuse=False)
    dense = family == "qwen3_moe"
    assert fused_halves(fused) == 2 + dense
    assert {half.why for half in msamp.survey(fused).halves} == {"", "its experts run as they are"}
    outputs = [model(input_ids=TOKENS, labels=TOKENS, attention_mask=PADDED) for model in (plain, fused, unfused)]
    assert no_worse(*(output.logits[PADDED.bool()] for output in outputs))
    for output in outputs[1:]:
        output.loss.backward()
    found = [gradients(model) for model in (fused, unfused)]
    assert found[0].keys() == found[1].keys()
    assert all(sqnr_db(found[1][name], found[0][name]) > 8 for name in found[0] if "layers.1.self_attn" in name and "norm" not in name)
    for optimizer in (low, other):
        optimizer.zero_grad()
    assert steps(fused, low) == pytest.approx(steps(unfused, other), rel=5e-3)
    captured = msamp.capture(fused, low, lambda ids: fused(input_ids=ids, labels=ids).loss.backward())
    for _ in range(4):
        captured(TOKENS)
    assert captured.obstacle is None


@pytest.mark.parametrize("family", ["llama", "qwen3", *IN_PARTS])
def test_autocast(family):
    (fused, low), (unfused, other) = begin(build(family, torch.float32), "O2"), begin(build(family, torch.float32), "O2", fuse=False)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = [model(input_ids=TOKENS, labels=TOKENS) for model in (fused, unfused)]
    assert outputs[0].logits.dtype == outputs[1].logits.dtype
    assert sqnr_db(outputs[1].logits, outputs[0].logits) > 20
    for output in outputs:
        output.loss.backward()
    found = [gradients(model) for model in (fused, unfused)]
    assert {name: g.dtype for name, g in found[0].items()} == {name: g.dtype for name, g in found[1].items()}
    assert all(sqnr_db(found[1][name], found[0][name]) > 15 for name in found[0])
    for optimizer in (low, other):
        optimizer.step()


@every_family
def test_evaluation_and_generation(family):
    fused, unfused = begin(build(family, torch.float32))[0].eval(), begin(build(family, torch.float32), fuse=False)[0].eval()
    for inputs in ({"use_cache": False}, {}, {"attention_mask": PADDED.flip(-1)}):
        with torch.no_grad():
            logits = [model(input_ids=TOKENS, **inputs).logits for model in (fused, unfused)]
        assert sqnr_db(logits[1], logits[0]) > 25
    told = [model.generate(TOKENS[:1], max_new_tokens=6, do_sample=False) for model in (fused, unfused)]
    assert told[0].equal(told[1])


def test_a_cache_with_gradients():
    """A forward that continues another through its cache: the gradient flows back through the keys and values."""
    found = []
    for options in ({}, {"fuse": False}):
        model, _ = begin(build("llama", torch.float32), **options)
        first = model(input_ids=TOKENS[:, :8], use_cache=True)
        name = "cache" if "cache" in first else "past_key_values"
        model(input_ids=TOKENS[:, 8:], labels=TOKENS[:, 8:], **{name: first[name]}).loss.backward()
        found.append(gradients(model))
    assert all(sqnr_db(found[1][name], found[0][name]) > 20 for name in found[1])


def test_positions_of_each_row_and_packed_documents():
    positions = torch.stack([torch.arange(16), torch.arange(16) % 9, torch.arange(16) % 5])
    fused, unfused = begin(build(dtype=torch.float32))[0], begin(build(dtype=torch.float32), fuse=False)[0]
    logits = [model(input_ids=TOKENS, position_ids=positions).logits for model in (fused, unfused)]
    assert sqnr_db(logits[1], logits[0]) > 30
    assert not logits[0].equal(fused(input_ids=TOKENS).logits)


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "coat"])
def test_every_recipe(level):
    fused, unfused = (steps(*begin(build(dtype=torch.float32), level, fuse=fuse), count=2) for fuse in (True, False))
    assert fused == pytest.approx(unfused, rel=2e-3)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    found = []
    for checkpointed in (True, False):
        model, optimizer = begin(build("qwen3"))
        if checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        found.append(steps(model.train(), optimizer))
        assert fused_halves(model) == 4
    assert found[0] == found[1]


def test_copies_and_pickles_train_on_alike():
    model, optimizer = begin(build())
    steps(model, optimizer)
    pairs = [copied((model, optimizer)) for copied in (copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair)), through_a_file)]
    want = steps(model, optimizer)
    for pair in pairs:
        assert fused_halves(pair[0]) == 4
        assert all(copied is not layer for copied, layer in zip(layers(pair[0]), layers(model), strict=True))
        assert steps(*pair) == want


def test_names_states_classes_and_files_are_the_models_own(tmp_path):
    plain, (model, optimizer) = build(), begin(build())
    steps(model, optimizer)
    assert [name for name, _ in model.named_modules() if ".scaling" not in name] == [name for name, _ in plain.named_modules()]
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert isinstance(layers(model)[0], type(layers(plain)[0]))
    assert repr(type(layers(model)[0])) == repr(type(layers(plain)[0]))
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert sqnr_db(again(TOKENS).logits, model(TOKENS).logits) > 20


def test_a_hook_inside_a_half_runs_and_unfuses_that_half():
    model, _ = begin(build())
    seen = []
    handle = layers(model)[0].self_attn.k_proj.register_forward_hook(lambda *_: seen.append("k_proj"))
    layers(model)[1].register_forward_hook(lambda *_: seen.append("layer"))
    layers(model)[1].self_attn.o_proj.register_forward_hook(lambda *_: seen.append("o_proj"))
    model(input_ids=TOKENS)
    assert seen == ["k_proj", "o_proj", "layer"]
    assert {half.name: half.why for half in msamp.survey(model).halves if half.why} == {
        "model.layers.0 attention": "a linear layer inside it has a hook"
    }
    handle.remove()
    assert fused_halves(model) == 4


def test_adapters_in_one_half_keep_the_other_fused():
    peft = hosts.need("peft")
    found = []
    for fuse in (True, False):
        torch.manual_seed(0)
        model = build(dtype=torch.float32)
        model, _ = begin(model, fuse=fuse)
        model.requires_grad_(False)
        torch.manual_seed(1)
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
        assert fused_halves(model) == 2 * fuse
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        found.append(gradients(model))
    assert found[0].keys() == found[1].keys()
    assert all("lora" in name for name in found[0])
    assert all(sqnr_db(found[1][name], found[0][name]) > 20 for name in found[0])


def test_attention_weights_and_hidden_states_are_returned():
    fused, unfused = (begin(build(dtype=torch.float32, attn_implementation="eager"), fuse=fuse)[0] for fuse in (True, False))
    outputs = [model(input_ids=TOKENS, output_attentions=True, output_hidden_states=True) for model in (fused, unfused)]
    assert [len(output.attentions) for output in outputs] == [2, 2]
    assert all(sqnr_db(b, a) > 30 for a, b in zip(*(output.hidden_states for output in outputs), strict=True))
    assert all(sqnr_db(b, a) > 30 for a, b in zip(*(output.attentions for output in outputs), strict=True))
    assert fused_halves(fused) == 4  # the hooks that captured them are idle
    hidden = [model(input_ids=TOKENS, output_hidden_states=True).hidden_states for model in (fused, unfused)]
    assert all(sqnr_db(b, a) > 30 for a, b in zip(*hidden, strict=True))


class _Doubled(type(layers(build())[0])):
    def forward(self, hidden_states, **arguments):
        return 2 * super().forward(hidden_states, **arguments)


def test_layers_that_compute_something_else_stay_as_they_are(monkeypatch):
    model = build()
    model.model.layers[0].__class__ = _Doubled
    model.model.layers[1].mlp.act_fn = nn.GELU()
    model, _ = begin(model)
    assert {half.name: half.why for half in msamp.survey(model).halves} == {
        "model.layers.0 attention": "_Doubled is a subclass of LlamaDecoderLayer with another forward",
        "model.layers.0 MLP": "_Doubled is a subclass of LlamaDecoderLayer with another forward",
        "model.layers.1 attention": "",
        "model.layers.1 MLP": "its activation is not SiLU",
    }
    monkeypatch.setitem(decoder_families._KNOWN, "MLP", "down_proj act_fn gate_proj")
    decoder_families._unknown.cache_clear()
    model = build()
    assert set(msamp.survey(model).halves[0][1:]) == {"this version of transformers has another LlamaMLP.forward"}
    assert not any(isinstance(layer, decoder_layer.FusedDecoderLayer) for layer in layers(begin(model)[0]))
    decoder_families._unknown.cache_clear()


def test_the_survey_says_which_kinds_of_layers_are_not_fused():
    gpt2, olmo2, gemma = build("gpt2"), build("olmo2"), transformers.AutoModelForCausalLM.from_config(transformers.GemmaConfig(**SIZES))
    torchs = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128), 2)
    own_loss = transformers.GPT2DoubleHeadsModel(gpt2.config)
    olmo2.__class__ = type("Own", (type(olmo2),), {"forward": functools.partialmethod(type(olmo2).forward, use_cache=False)})
    for model, why in ((gpt2, "GPT-2's"), (own_loss, "GPT-2's"), (olmo2, "OLMo2's"), (gemma, "its family"), (torchs, "torch's")):
        before, found = msamp.survey(model), msamp.survey(begin(model)[0])
        assert before.fused_loss == found.fused_loss == (model in (gpt2, olmo2))
        assert [half.why.startswith(why) for half in found.halves] == [True] * 4
        assert "0 of 4 halves of decoder layers (attention, MLP) run fused" in str(found)
    copied = pickle.loads(pickle.dumps(gpt2)).transformer.h[0].mlp
    assert type(copied.act) is type(gpt2.transformer.h[0].mlp.act)
    decoder_layer.unfuse(copied)
    assert type(copied.act) is transformers.activations.NewGELUActivation


def test_the_survey_before_and_after():
    model = build()
    before, after = msamp.survey(model), msamp.survey(begin(model)[0])
    assert "4 of 4 halves of decoder layers (attention, MLP) run fused\nthe loss makes no FP32 copy of the logits" in str(before)
    assert (after.halves, after.fused_loss) == (before.halves, before.fused_loss)
    assert msamp.survey(model, accept=msamp.filters.exclude_names("k_proj")).halves == before.halves
    assert msamp.survey(build(), accept=msamp.filters.exclude_names("k_proj")).halves[0].why == "a linear layer inside it is not in FP8"


def test_the_loss_is_transformers_own():
    logits = torch.randn(3, 16, 96, generator=torch.Generator().manual_seed(1))
    labels = TOKENS.masked_fill(PADDED == 0, -100)
    for options in ({}, {"num_items_in_batch": torch.tensor(7)}, {"num_items_in_batch": 5}, {"shift_labels": labels}):
        found = []
        for function in (decoder_layer.causal_lm_loss, transformers.loss.loss_utils.ForCausalLMLoss):
            x = logits.clone().requires_grad_()
            (3 * (loss := function(x, labels, vocab_size=96, **options))).backward()
            assert x.equal(logits)
            found.append((loss.detach(), x.grad))
        torch.testing.assert_close(*found)


def _on_ranks(sharded: bool) -> list[float]:
    from torch.distributed.fsdp import fully_shard

    from msamp.integrations import fsdp

    rank = torch.distributed.get_rank()
    found = []
    for fuse in (True, False):
        model = build("qwen2", torch.float32)
        if sharded:
            model = fsdp.prepare(model, "O3", fuse=fuse)
            for layer in layers(model):
                fully_shard(layer)
            fully_shard(model)
            optimizer = fsdp.optimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-3), "O3", clip_grad=float("inf"))
        else:
            model, optimizer = begin(model, fuse=fuse, clip_grad=float("inf"))
        assert fused_halves(model) == 4 * fuse
        for step in range(3):
            tokens = TOKENS.roll(step, 0)[rank : rank + 1]
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(float(model(input_ids=TOKENS, labels=TOKENS).loss))
    return found


def _data_parallel_and_fsdp() -> list[list[float]]:
    return [_on_ranks(sharded) for sharded in (False, True)]


def test_two_processes():
    for rank in dist.run(_data_parallel_and_fsdp, 2):
        for fused, unfused in rank:
            assert fused == pytest.approx(unfused, rel=2e-3)


def _under_zero() -> list[list[float]]:
    found = []
    for zero in (False, True):
        with late():
            model, optimizer = begin(build(), zero=zero)
            found.append(steps(model, optimizer, 4))
            each = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model]  # while weights arrive
            optimizer.wait()
        sums = [[p.detach().float().double().sum().item() for p in one.parameters()] for one in each]
        assert (sums[:2], [fused_halves(one) for one in each]) == ([sums[2]] * 2, [4, 4, 4])
        found[-1] += sums[2]
    return found


def test_zero_changes_no_bit_and_unfuses_nothing():
    """ZeRO's hooks, which wait for weights in front of every module, are not hooks of the loop."""
    assert all(plain == zero for plain, zero in dist.run(_under_zero, 2))


@pytest.mark.gpu
@every_family
def test_on_a_gpu(family):
    plain = build(family, torch.float32).cuda()
    (fused, low), (unfused, other) = begin(build(family).cuda()), begin(build(family).cuda(), fuse=False)
    tokens, padding = TOKENS.cuda(), PADDED.cuda()
    outputs = [model(input_ids=tokens, labels=tokens, attention_mask=padding) for model in (plain, fused, unfused)]
    assert no_worse(*(output.logits[padding.bool()] for output in outputs))
    for output in outputs:
        output.loss.backward()
    found = [gradients(model) for model in (plain, fused, unfused)]
    assert all(no_worse(*(each[name] for each in found)) for name in found[0])
    for _ in range(3):
        for model, optimizer in ((fused, low), (unfused, other)):
            optimizer.zero_grad()
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
    losses = [model(input_ids=tokens, labels=tokens).loss.item() for model in (fused, unfused)]
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)


@pytest.mark.parametrize("fuse", [True, False])
def test_compiled_layers_have_no_graph_break(fuse):
    """Two fused layers share a graph; unfused, the whole model is one."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, optimizer = begin(build(use_cache=False, num_hidden_layers=1 + fuse), fuse=fuse)
    for module in layers(model) if fuse else [model]:
        module.compile(backend="aot_eager")
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    optimizer.step()
    assert not torch._dynamo.utils.counters["graph_break"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_compiled_model_is_one_graph_with_the_bits_of_an_eager_one():
    want = steps(*begin(build(num_hidden_layers=1)), use_cache=False, count=2)
    torch._dynamo.reset()
    model, optimizer = begin(build(num_hidden_layers=1))
    model.compile(backend="aot_eager", fullgraph=True)
    assert steps(model, optimizer, use_cache=False, count=2) == want
