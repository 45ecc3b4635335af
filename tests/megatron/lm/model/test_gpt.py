"""The model against a plain PyTorch GPT written out below."""

import pytest
import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor
from torch.nn import functional

from megatron.lm.config import Config, ModelConfig, OptimizerConfig, ParallelConfig, TrainingConfig
from megatron.lm.model.gpt import GPT, assemble, mean_loss, transformer_config
from megatron.lm.model.spec import LayerOptions, block_spec
from megatron.lm.processes import process_groups
from msamp.numerics.recipe import BF16, FP32, Recipe

pytestmark = pytest.mark.usefixtures("one_process")

VOCABULARY = 60  # padded to 64
COLUMN = dict.fromkeys(("linear_qkv", "linear_fc1", "output_layer"), ColumnParallelLinear)
LINEARS = COLUMN | dict.fromkeys(("linear_proj", "linear_fc2"), RowParallelLinear)

GPT2_LIKE = {"position_embedding_type": "learned_absolute"}
GPT_ROPE = {"rotary_percent": 0.5}
LLAMA_LIKE = {
    "swiglu": True,
    "normalization": "RMSNorm",
    "group_query_attention": True,
    "num_query_groups": 2,
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
}


def config(model: dict | None = None, parallel: dict | None = None, training: dict | None = None) -> Config:
    return Config(
        model=ModelConfig(
            num_layers=2,
            hidden_size=32,
            num_attention_heads=4,
            seq_length=16,
            make_vocab_size_divisible_by=32,
            init_method_std=0.1,
            **(model or {}),
        ),
        optimizer=OptimizerConfig(lr=1e-3),
        training=TrainingConfig(micro_batch_size=3, train_iters=1, **(training or {})),
        parallel=ParallelConfig(distributed_backend="auto", **(parallel or {})),
    )


def plain_model(settings: Config, recipe: Recipe) -> GPT:
    """A GPT with megatron-core's linear layers."""
    core = transformer_config(settings.model, settings.parallel, settings.training, recipe)
    options = LayerOptions(settings.model.attention_backend)
    return assemble(settings.model, core, block_spec(core, LINEARS, options), VOCABULARY, seed=settings.training.seed)


def new_model(settings: Config, recipe: Recipe = FP32) -> GPT:
    model = plain_model(settings, recipe)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "layernorm" in name:  # constants at the start: a mistake in them would not show
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator).to(parameter)
    return model


def batch(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(0, VOCABULARY, (3, 17), generator=generator)
    mask = (torch.rand(3, 16, generator=generator) < 0.8).float()
    fields = {
        "tokens": text[:, :-1].contiguous(),
        "labels": text[:, 1:].contiguous(),
        "loss_mask": mask,
        "position_ids": torch.arange(16).expand(3, 16),
    }
    return {name: tensor.to(process_groups.device()) for name, tensor in fields.items()}


def token_losses(model: GPT, data: dict[str, Tensor]) -> Tensor:
    """[b, s], from all logits at once."""
    return model(data["tokens"], data["position_ids"], None, labels=data["labels"])


def loss_sum(model: GPT, data: dict[str, Tensor]) -> Tensor:
    """What the trainer asks for."""
    return model(data["tokens"], data["position_ids"], None, labels=data["labels"], loss_mask=data["loss_mask"])


def loss_of(model: GPT, data: dict[str, Tensor]) -> Tensor:
    return mean_loss(loss_sum(model, data), data["loss_mask"])[0]


# A GPT in plain PyTorch, batch first, over the same named weights.


def plain_norm(weights: dict[str, Tensor], name: str, x: Tensor, config: ModelConfig) -> Tensor:
    if config.normalization == "RMSNorm":
        return weights[f"{name}.weight"] * x * (x.square().mean(-1, keepdim=True) + config.norm_epsilon).rsqrt()
    return functional.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], config.norm_epsilon)


def plain_linear(weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return functional.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def plain_rotation(x: Tensor, config: ModelConfig) -> Tensor:
    """x [b, heads, s, d]: rotate pairs (i, i + r/2) of the first r = rotary_percent d channels by position * base^(-2i/r)."""
    rotated = int(x.shape[-1] * config.rotary_percent)
    frequencies = config.rotary_base ** (-torch.arange(0, rotated, 2, device=x.device) / rotated)
    if config.use_rope_scaling:
        frequencies = stretched(frequencies, config.rope_scaling_factor)
    positions = torch.arange(x.shape[-2], device=x.device) / (config.rotary_seq_len_interpolation_factor or 1)
    angles = positions[:, None] * frequencies
    real, imaginary = x[..., : rotated // 2], x[..., rotated // 2 : rotated]
    turned = [real * angles.cos() - imaginary * angles.sin(), imaginary * angles.cos() + real * angles.sin()]
    return torch.cat([*turned, x[..., rotated:]], -1)


def stretched(frequencies: Tensor, factor: float) -> Tensor:
    """Llama 3.1: wavelengths of more than 8192 positions are `factor` times as long, those of less than 2048 stay, with a ramp between."""
    kept = ((8192 * frequencies / (2 * torch.pi) - 1) / (4 - 1)).clamp(0, 1)
    return kept * frequencies + (1 - kept) * frequencies / factor


def plain_attention(weights: dict[str, Tensor], name: str, x: Tensor, config: ModelConfig) -> Tensor:
    b, s, _ = x.shape
    groups, per_group, d = config.query_groups, config.num_attention_heads // config.query_groups, config.head_size
    qkv = plain_linear(weights, f"{name}.linear_qkv", x).view(b, s, groups, per_group + 2, d)
    q = qkv[:, :, :, :per_group].reshape(b, s, -1, d).transpose(1, 2)
    k, v = (qkv[:, :, :, per_group + i].repeat_interleave(per_group, dim=2).transpose(1, 2) for i in (0, 1))
    if config.qk_layernorm:
        q, k = (plain_norm(weights, f"{name}.{one}_layernorm", part, config) for one, part in (("q", q), ("k", k)))
    if config.position_embedding_type == "rope":
        q, k = plain_rotation(q, config), plain_rotation(k, config)
    scores = q @ k.transpose(-1, -2) / d**0.5
    future = torch.ones(s, s, dtype=torch.bool, device=x.device).triu(1)
    context = scores.masked_fill(future, -torch.inf).softmax(-1) @ v
    return plain_linear(weights, f"{name}.linear_proj", context.transpose(1, 2).reshape(b, s, -1))


def plain_mlp(weights: dict[str, Tensor], name: str, x: Tensor, config: ModelConfig) -> Tensor:
    h = plain_linear(weights, f"{name}.linear_fc1", x)
    if config.swiglu:
        gate, up = h.chunk(2, -1)
        h = functional.silu(gate) * up
    elif config.squared_relu:
        h = functional.relu(h).square()
    else:
        h = functional.gelu(h, approximate="tanh")
    return plain_linear(weights, f"{name}.linear_fc2", h)


def plain_loss(weights: dict[str, Tensor], data: dict[str, Tensor], config: ModelConfig) -> Tensor:
    embedding = weights["embedding.word_embeddings.weight"]
    x = embedding[data["tokens"]]
    if config.position_embedding_type == "learned_absolute":
        x = x + weights["embedding.position_embeddings.weight"][data["position_ids"]]
    for i in range(config.num_layers):
        layer = f"decoder.layers.{i}"
        x = x + plain_attention(weights, f"{layer}.self_attention", plain_norm(weights, f"{layer}.input_layernorm", x, config), config)
        x = x + plain_mlp(weights, f"{layer}.mlp", plain_norm(weights, f"{layer}.pre_mlp_layernorm", x, config), config)
    x = plain_norm(weights, "decoder.final_layernorm", x, config)
    head = weights["output_layer.weight"] if config.untie_embeddings_and_output_weights else embedding
    losses = functional.cross_entropy((x @ head.t()).flatten(0, 1), data["labels"].flatten(), reduction="none")
    mask = data["loss_mask"].flatten()
    return (losses * mask).sum() / mask.sum()


SHAPES = {
    "gelu-tied-learned": GPT2_LIKE,
    "gelu-tied-rope": GPT_ROPE,
    "swiglu-rms-gqa-untied": LLAMA_LIKE,
    "qk-norm": LLAMA_LIKE | {"qk_layernorm": True, "kv_channels": 16},
    "qk-layernorm": {"qk_layernorm": True},
    "squared-relu-no-positions": {"squared_relu": True, "position_embedding_type": "none"},
    "qkv-bias": LLAMA_LIKE | {"add_qkv_bias": True},
    "llama-3.1": LLAMA_LIKE | {"use_rope_scaling": True, "rope_scaling_factor": 32.0, "rotary_base": 5e4, "kv_channels": 16},
    "interpolated": {"rotary_seq_len_interpolation_factor": 3.0},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_equals_a_plain_gpt(shape: dict):
    settings = config(shape)
    model = new_model(settings)
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    loss, expected = loss_of(model, batch()), plain_loss(weights, batch(), settings.model)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    loss.backward()
    expected.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, weights[name].grad, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


def gradients(model: GPT, loss: Tensor) -> dict[str, Tensor]:
    names, weights = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, weights), strict=True))


def all_logits_loss(model: GPT, data: dict[str, Tensor]) -> Tensor:
    return mean_loss((token_losses(model, data) * data["loss_mask"]).sum(), data["loss_mask"])[0]


@pytest.mark.parametrize("untied", [False, True])
def test_the_sum_in_chunks_is_that_of_all_logits(untied: bool):
    model, data = new_model(config({"untie_embeddings_and_output_weights": untied})), batch()
    mine, theirs = loss_of(model, data), all_logits_loss(model, data)
    assert (mine.shape, mine.dtype) == ((), torch.float32)
    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
    expected = gradients(model, theirs)
    for name, grad in gradients(model, mine).items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")
    with torch.no_grad():
        assert torch.equal(loss_of(model, data), mine)


def test_every_precision_starts_from_the_same_numbers():
    def parameters(recipe: Recipe) -> dict[str, Tensor]:
        process_groups.seed_all(7)
        return dict(plain_model(config(), recipe).named_parameters())

    fp32, bf16 = parameters(FP32), parameters(BF16)
    assert all(p.dtype is torch.bfloat16 and torch.equal(p, fp32[name].bfloat16()) for name, p in bf16.items())
    assert fp32["decoder.layers.0.mlp.linear_fc1.weight"].std().item() == pytest.approx(0.1, rel=0.05)
    assert fp32["decoder.layers.0.mlp.linear_fc2.weight"].std().item() == pytest.approx(0.1 / 4**0.5, rel=0.05)  # 1 / sqrt(2 layers)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_recomputation_gives_the_same_gradients(dropout: float):
    shape = {"hidden_dropout": dropout, "attention_dropout": dropout}
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    gradients = []
    for training in (None, recompute):
        process_groups.seed_all(7)
        model = new_model(config(shape, training=training))
        loss_of(model, batch()).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, grad in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], grad, rtol=1e-5, atol=1e-6)
