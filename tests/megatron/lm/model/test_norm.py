import pytest
import torch
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.lm.model.norm import LayerNorm, RMSNorm, head_norm, norm_class


def config(sequence_parallel: bool = False, dtype: torch.dtype = torch.float32) -> TransformerConfig:
    size = 2 if sequence_parallel else 1
    return TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        tensor_model_parallel_size=size,
        sequence_parallel=sequence_parallel,
        params_dtype=dtype,
    )


def expected(norm: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = x.double()
    if isinstance(norm, LayerNorm):
        x = x - x.mean(-1, keepdim=True)
    y = x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight
    return y + norm.bias if isinstance(norm, LayerNorm) else y


@pytest.mark.parametrize("cls", [LayerNorm, RMSNorm])
def test_value_and_gradient(cls: type):
    torch.manual_seed(0)
    norm = cls(config(), 8, eps=1e-3)
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(5, 3, 8, device=norm.weight.device, requires_grad=True)
    y = norm(x)
    torch.testing.assert_close(y.double(), expected(norm, x), rtol=1e-5, atol=1e-5)
    wrt = [x, *norm.parameters()]
    for mine, reference in zip(
        torch.autograd.grad(y.sin().sum(), wrt), torch.autograd.grad(expected(norm, x).sin().sum(), wrt), strict=True
    ):
        torch.testing.assert_close(mine, reference.to(mine.dtype), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_norms_of_heads_are_summed_over_the_ranks_that_have_some_of_them(ranks: int, sequence_parallel: bool):
    settings = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, tensor_model_parallel_size=ranks)
    settings.sequence_parallel = sequence_parallel
    for kind, parameters in (("LayerNorm", 2), ("RMSNorm", 1)):
        norm = build_module(head_norm(kind, 1), config=settings, hidden_size=4)
        assert [p.sequence_parallel for p in norm.parameters()] == [ranks > 1] * parameters
        assert isinstance(norm, norm_class(kind))
    with pytest.raises(ValueError, match=r"BatchNorm.*LayerNorm, RMSNorm"):
        head_norm("BatchNorm", 1)


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_a_norm_of_the_projection_is_one_norm_of_all_heads(kind: str):
    norm = build_module(head_norm(kind, 3), config=config(), hidden_size=4, eps=1e-3)
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(5, 2, 3, 4, device=norm.weight.device)
    whole = expected(norm, x.flatten(2)).float()
    torch.testing.assert_close(norm(x), whole.view(5, 2, 3, 4), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(norm(x.view(5, 2, 3, 2, 2)), whole.view(5, 2, 3, 2, 2), rtol=1e-5, atol=1e-5)
    assert norm.weight.shape == (12,)
