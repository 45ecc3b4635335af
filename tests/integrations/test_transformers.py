"""Models of transformers: what becomes FP8 of them, and how they are saved."""

import functools
import warnings

import pytest
import torch

import msamp
from helpers import host_loops, hosts
from msamp.nn.linear import FP8Conv1D, FP8Linear
from msamp.numerics.metrics import sqnr_db

transformers = hosts.need("transformers")
TOKENS = torch.arange(32).view(2, 16) % 60


def gpt2(layers: int = 2) -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=32, n_embd=64, n_layer=layers, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    return transformers.GPT2LMHeadModel(config)


def initialized(model: torch.nn.Module, level: str = "O2", **options) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    return msamp.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-3), level, **options)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    loss = model(input_ids=TOKENS, labels=TOKENS).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def test_conv1d_becomes_fp8_and_computes_the_same():
    plain, model = gpt2().eval(), gpt2()
    model, optimizer = initialized(model)
    layers = [name for name, m in model.named_modules() if isinstance(m, FP8Conv1D)]
    assert len(layers) == 8
    assert model.transformer.h[0].attn.c_attn.weight.shape == (192, 64)
    assert sqnr_db(plain(TOKENS).logits, model.eval()(TOKENS).logits) > 20
    model.train()
    first = step(model, optimizer)
    assert [step(model, optimizer) for _ in range(4)][-1] < first


def test_the_gradients_of_conv1d_are_those_of_the_plain_model():
    plain = gpt2()
    model = msamp.convert(gpt2(), msamp.recipes.O2)
    for each in (plain, model):
        each(input_ids=TOKENS, labels=TOKENS).loss.backward()
    want, got = (each.transformer.h[1].mlp.c_fc.weight.grad for each in (plain, model))
    assert sqnr_db(want.t(), got) > 15


@pytest.mark.promise("Conversion", "`save_pretrained`, the Trainer and accelerate save plain weights.")
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_save_pretrained_writes_what_from_pretrained_reads(level, tmp_path):
    model, optimizer = initialized(gpt2(), level)
    step(model, optimizer)
    model.save_pretrained(tmp_path)
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    want = msamp.plain_state_dict(model, optimizer)
    assert list(again.state_dict()) == list(want)
    assert all(x.equal(want[name]) for name, x in again.state_dict().items())
    assert sqnr_db(again.eval()(TOKENS).logits, model.eval()(TOKENS).logits) > 20


@pytest.mark.promise("Conversion", "GPT-2's Conv1D becomes FP8 and keeps the host's layout in every state dict.")
@pytest.mark.parametrize("square", ["c_proj", "c_attn"])
def test_a_conv1d_loads_its_own_states_and_plain_ones(square):
    source = gpt2()
    with torch.no_grad():
        for p in source.parameters():
            p.mul_(2)
    plain = source.state_dict()
    model = msamp.convert(gpt2(), msamp.recipes.O2)
    model.load_state_dict(plain, strict=True)
    name = f"transformer.h.0.attn.{square}.weight"
    assert torch.allclose(msamp.fp32_values(model.get_parameter(name)).t(), plain[name], rtol=1e-3, atol=1e-6)
    for state in (model.state_dict(), msamp.fp8_state_dict(model), msamp.plain_state_dict(model)):
        other = msamp.convert(gpt2(), msamp.recipes.O2)
        other.load_state_dict(state, strict=True)
        assert torch.equal(other.get_parameter(name).detach(), model.get_parameter(name).detach())


SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
MIXTURES = {
    "Mixtral": {"intermediate_size": 64, "num_local_experts": 4},
    "Olmoe": {"intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2, "eos_token_id": 1},
    "Qwen3Moe": {"intermediate_size": 64, "moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
}


def mixture(kind: str, **options) -> torch.nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SMALL, **(MIXTURES.get(kind, {}) | options))
    return getattr(transformers, f"{kind}ForCausalLM")(config)


@pytest.mark.promise("Conversion", "Experts of transformers' Mixtral, OLMoE and Qwen3-MoE train in FP8 and save plain weights.")
@pytest.mark.parametrize("kind", list(MIXTURES))
def test_experts_train_in_fp8_and_reload_plain(kind, tmp_path):
    losses = []
    for level in ("fp32", "O2"):
        model, optimizer = initialized(mixture(kind), level)
        losses.append([step(model, optimizer) for _ in range(12)][-1])
    assert losses[1] == pytest.approx(losses[0], rel=0.015)
    assert losses[1] < 4.1, "the first loss is 4.2"
    experts = [p for name, p in model.named_parameters() if "experts" in name]
    assert len(experts) == 8
    assert all(isinstance(p, msamp.ScalingTensor) for p in experts)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    want = msamp.plain_state_dict(model, optimizer)
    assert list(again.state_dict()) == list(want) == list(mixture(kind).state_dict())
    assert all(x.equal(want[name]) for name, x in again.state_dict().items())
    assert sqnr_db(again.eval()(TOKENS).logits, model.eval()(TOKENS).logits) > 20


def test_vit_is_converted_but_for_its_convolution():
    config = transformers.ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, image_size=32)
    model = transformers.ViTModel(config, add_pooling_layer=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, _ = initialized(model)
    left = msamp.survey(model).left
    assert sum(isinstance(m, FP8Linear) for m in model.modules()) == 6
    assert "a convolution" in left.values()


def test_the_trainer_saves_plain_checkpoints_and_resumes(tmp_path):
    hosts.need("accelerate")
    rows = [{"input_ids": row, "labels": row} for row in TOKENS]

    def trainer(steps: int) -> object:
        model, optimizer = initialized(gpt2(), "O3")
        settings = transformers.TrainingArguments(
            str(tmp_path), max_steps=steps, save_steps=1, logging_steps=1, report_to=[], use_cpu=True, per_device_train_batch_size=2
        )
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        return transformers.Trainer(model, settings, train_dataset=rows, optimizers=(optimizer, schedule))

    trainer(2).train()
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "checkpoint-2")
    assert again(input_ids=TOKENS, labels=TOKENS).loss.isfinite()
    resumed = trainer(3)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.state.global_step == 3


def loss_of_tokens(model: torch.nn.Module, step: int, rows: int) -> torch.Tensor:
    tokens = (TOKENS + step + 7 * rows) % 60
    return model(input_ids=tokens, labels=tokens).loss


@pytest.mark.nightly(20)
def test_a_compiled_model_trains_alike():
    host_loops.check_the_compiled_model_trains_alike(functools.partial(gpt2, layers=1), loss_of_tokens)
