import gc

import pytest
import torch
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.attention import SDPBackend

from helpers import tiny
from megatron.lm.build import build_training
from megatron.lm.model.attention import (
    _TABLES,
    MASKED_BACKENDS,
    Attention,
    FP8CoreAttention,
    SDPAttention,
    cos_sin,
    document_mask,
    prepare_fp8,
)
from megatron.lm.model.gpt import build_model
from megatron.lm.processes import process_groups
from msamp.comm.collectives import Peers
from msamp.comm.counters import WireBytes
from msamp.numerics.recipe import FP32, O3

pytestmark = pytest.mark.usefixtures("one_process")

HEADS, CHANNELS = 4, 8


def attention(
    groups: int = HEADS,
    dropout: float = 0.0,
    scale: float | None = None,
    backend: str = "auto",
    kind: AttnMaskType = AttnMaskType.causal,
) -> SDPAttention:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HEADS * CHANNELS,
        num_attention_heads=HEADS,
        num_query_groups=groups,
        attention_dropout=dropout,
    )
    return SDPAttention(config, 1, kind, softmax_scale=scale, backend=backend)


def tensors(groups: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(6, 3, heads, CHANNELS) for heads in (HEADS, groups, groups)]
    return [torch.randn(s, generator=generator).to(process_groups.device(), dtype).requires_grad_() for s in shapes]


def explicit(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    repeats = query.shape[2] // key.shape[2]
    q = query.double()
    k, v = (x.double().repeat_interleave(repeats, dim=2) for x in (key, value))
    scores = torch.einsum("sbhd,tbhd->bhst", q, k) * scale
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    weights = scores.masked_fill(future, -torch.inf).softmax(-1)
    return torch.einsum("bhst,tbhd->sbhd", weights, v).flatten(2)


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-6)])
def test_value_and_gradient(groups: int, dtype: torch.dtype, tolerance: float):
    q, k, v = tensors(groups, dtype)
    y = attention(groups)(q, k, v, None, attn_mask_type=AttnMaskType.causal)
    reference = explicit(q, k, v, CHANNELS**-0.5)
    assert y.shape == (6, 3, HEADS * CHANNELS)
    assert y.dtype is dtype
    torch.testing.assert_close(y.double(), reference, rtol=tolerance, atol=tolerance)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    for mine, theirs in zip(torch.autograd.grad(y, (q, k, v), grad), torch.autograd.grad(reference, (q, k, v), grad.double()), strict=True):
        torch.testing.assert_close(mine.double(), theirs.double(), rtol=tolerance, atol=tolerance)


def test_dropout_only_while_training_and_reproducible():
    q, k, v = tensors(HEADS, torch.float32)
    module, plain = attention(dropout=0.5), attention()(q, k, v)
    first = module(q, k, v)
    assert not torch.allclose(first, plain)
    assert not torch.equal(module(q, k, v), first)
    process_groups.seed_all(1234)
    assert torch.equal(module(q, k, v), first)
    assert torch.equal(module.eval()(q, k, v), plain)


@pytest.mark.parametrize("groups", [4, 2])
def test_padding_is_not_seen_and_gets_no_gradient(groups: int):
    q, k, v = tensors(groups, torch.float32)
    module, lengths = attention(groups, kind=AttnMaskType.no_mask), (6, 4, 1)
    hidden = torch.tensor([[at >= length for at in range(6)] for length in lengths], device=q.device)[:, None, None, :]
    y = module(q, k, v, hidden)
    for row, length in enumerate(lengths):
        alone = module(*(x[:length, row : row + 1] for x in (q, k, v)))
        torch.testing.assert_close(y[:length, row : row + 1], alone, rtol=1e-5, atol=1e-5)
    for grad in torch.autograd.grad(y.sum(), (k, v)):
        assert all(bool((grad[length:, row] == 0).all()) for row, length in enumerate(lengths))
        assert all(bool((grad[:length, row] != 0).any()) for row, length in enumerate(lengths) if length > 1)


@pytest.mark.parametrize("backend", ["auto", "math"])
def test_a_mask_of_documents_keeps_them_apart_in_value_and_gradient(backend: str):
    q, k, v = tensors(2, torch.float32)
    numbers = torch.tensor([[0, 0, 0, 1, 1, 2], [0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]], device=q.device)
    additive = document_mask(numbers, causal=True, dtype=torch.float32)
    y = attention(2, backend=backend)(q, k, v, additive)
    assert torch.equal(y, attention(2, backend=backend)(q, k, v, additive == -torch.inf))
    parts = [
        [explicit(*(x[row == n, at : at + 1] for x in (q, k, v)), CHANNELS**-0.5) for n in row.unique()] for at, row in enumerate(numbers)
    ]
    reference = torch.cat([torch.cat(part) for part in parts], dim=1)
    torch.testing.assert_close(y.double(), reference, rtol=1e-5, atol=1e-5)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    for mine, theirs in zip(torch.autograd.grad(y, (q, k, v), grad), torch.autograd.grad(reference, (q, k, v), grad.double()), strict=True):
        torch.testing.assert_close(mine.double(), theirs.double(), rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_documents_of_grouped_queries_run_memory_efficient_attention(monkeypatch: pytest.MonkeyPatch):
    q, k, v = (x.bfloat16() for x in tensors(2, torch.float32))
    mask = document_mask(torch.tensor([[0, 0, 0, 1, 1, 2]] * 3, device=q.device), causal=True, dtype=torch.bfloat16)
    expected = attention(2, backend="math")(q, k, v, mask)
    monkeypatch.setitem(MASKED_BACKENDS, "auto", [SDPBackend.EFFICIENT_ATTENTION])  # without a kernel to fall back to
    torch.testing.assert_close(attention(2)(q, k, v, mask), expected, rtol=2**-6, atol=2**-6)


@pytest.mark.gpu
@pytest.mark.parametrize("groups", [16, 4])
@pytest.mark.parametrize("backend", ["auto", "cudnn", "flash"])
def test_gpu_kernels(backend: str, groups: int):
    config = TransformerConfig(num_layers=1, hidden_size=1024, num_attention_heads=16, num_query_groups=groups, attention_dropout=0.0)
    module = SDPAttention(config, 1, AttnMaskType.causal, backend=backend)
    q, k, v = (torch.randn(256, 2, heads, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for heads in (16, groups, groups))
    y, reference = module(q, k, v), explicit(q, k, v, 0.125)
    torch.testing.assert_close(y.double(), reference, rtol=2**-6, atol=2**-6)
    grad = torch.randn_like(y)
    for mine, theirs in zip(torch.autograd.grad(y, (q, k, v), grad), torch.autograd.grad(reference, (q, k, v), grad.double()), strict=True):
        torch.testing.assert_close(mine.double(), theirs.double(), rtol=2**-5, atol=2**-5)


def fp8_core(channels: int = 16, dropout: float = 0.0) -> FP8CoreAttention:
    config = TransformerConfig(num_layers=1, hidden_size=2 * channels, num_attention_heads=2, attention_dropout=dropout)
    return FP8CoreAttention(config, 1, AttnMaskType.causal, gemm=O3.gemm)


def test_fp8_attention_refuses_what_its_kernel_has_not():
    with pytest.raises(ValueError, match="heads have 24 channels; FP8 attention requires a multiple of 16 up to 128"):
        fp8_core(24)
    with pytest.raises(ValueError, match=r"FP8 attention does not support dropout \(0.1\)"):
        fp8_core(dropout=0.1)
    core, x = fp8_core(), torch.ones(4, 1, 2, 16, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="FP8 attention got a mask"):
        core(x, x, x, torch.zeros(1, 1, 1, 4, dtype=torch.bool))
    assert core(x, x, x).shape == (4, 1, 32)
    assert core.scale == 0.25


def test_a_mask_of_split_sequences_is_that_of_whole_ones():
    core, x = attention(), tensors(HEADS, torch.float32)[0]
    core.context = Peers(None, WireBytes())
    with pytest.raises(ValueError, match="p2p, a ring of parts of sequences, does not support a mask: pass None, or use a2a"):
        core(x, x, x, torch.zeros(3, 1, 6, 6, dtype=torch.bool))
    core.by_heads = True
    with pytest.raises(ValueError, match=r"a mask of split sequences is \(3, 1, 3, 3\); expected a whole one, \[b, 1, s or 1, 6\]"):
        core(x, x, x, torch.zeros(3, 1, 3, 3, dtype=torch.bool))
    mask = torch.ones(3, 1, 6, 6, dtype=torch.bool).triu(1)
    assert torch.equal(core(x, x, x, mask), attention()(x, x, x, mask))


def test_a_machine_without_fp8_attention_is_refused_before_there_is_a_model(monkeypatch: pytest.MonkeyPatch):
    settings = tiny.config("corpus", precision="O3", attention_precision="fp8")
    prepare_fp8(settings.model, settings.parallel, 4)
    monkeypatch.setattr(process_groups, "device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "card")
    with pytest.raises(ValueError, match=r"--attention-precision fp8: card .* has no FP8 attention, which requires 9.0 or later"):
        prepare_fp8(settings.model, settings.parallel, 4)
    with pytest.raises(ValueError, match="--attention-precision fp8: card"):
        build_training(settings, tiny.VOCABULARY)


MODELS = {
    "heads": {},
    "groups": {"group_query_attention": True, "num_query_groups": 1},
    "half of the channels": {"rotary_percent": 0.5},
    "recomputed": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "attention recomputed": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "dropout": {"hidden_dropout": 0.1},
    "norms of queries and keys": {"qk_layernorm": True},
}


@pytest.mark.parametrize("name", MODELS)
def test_the_rotation_is_megatron_core_s(name: str, monkeypatch: pytest.MonkeyPatch):
    """In FP32, where neither rounds to fewer bits; loss and gradient of every weight."""

    def trained() -> list[Tensor]:
        torch.manual_seed(0)
        model = build_model(*tiny.parts(tiny.config("unread", precision="fp32", **MODELS[name])), FP32, tiny.VOCABULARY)
        tokens = torch.arange(32, device=process_groups.device()).view(2, 16)
        torch.manual_seed(1)
        loss = model(tokens, tokens % 16, None, labels=tokens.roll(1, -1)).mean()
        loss.backward()
        assert all(module._angles is None for module in model.modules() if isinstance(module, Attention))
        return [loss.detach(), *(p.grad for p in model.parameters())]

    ours = trained()
    for method in ("forward", "get_query_key_value_tensors"):
        monkeypatch.setattr(Attention, method, getattr(SelfAttention, method))
    for mine, theirs in zip(ours, trained(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_a_model_that_was_evaluated_in_inference_mode_trains():
    """The tables of the rotation are kept from one forward to the next."""
    model = build_model(*tiny.parts(tiny.config("unread", precision="fp32", seq_length=24)), FP32, tiny.VOCABULARY)
    tokens = torch.arange(48, device=process_groups.device()).view(2, 24)
    with torch.inference_mode():
        before = model(tokens, tokens % 24, None, labels=tokens.roll(1, -1))
    loss = model(tokens, tokens % 24, None, labels=tokens.roll(1, -1))
    assert torch.equal(loss, before)
    loss.mean().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_the_tables_of_a_model_stay_where_they_are_when_megatron_core_forgets_its_angles():
    """It keeps those of 32 calls: a stage of more chunks, or models beside each other, would have graphs read freed memory."""
    model = build_model(*tiny.parts(tiny.config("unread", precision="fp32")), FP32, tiny.VOCABULARY)
    tokens, seen = torch.arange(32, device=process_groups.device()).view(2, 16), []
    for _ in range(2):
        model.hidden_states(tokens, tokens % 16)
        seen.append([table.data_ptr() for angles in model._angles.values() for table in cos_sin(angles)])
        type(model.rotary_pos_emb).forward.cache_clear()
        gc.collect()
    assert seen[0] == seen[1]
    (kept,) = model._angles.values()
    assert kept in _TABLES
