"""A transformer block for own models: plain torch as built, fused after conversion, with the same values up to FP8's rounding."""

import copy
import pickle

import pytest
import torch

import msamp
from helpers.fsdp_nets import everything
from msamp.nn.saved_activations import AS_IT_IS, IN_GROUPS
from msamp.nn.transformer_block import TransformerBlock
from msamp.numerics.recipe import by_name

S, B, H = 8, 2, 64


def block(**options) -> TransformerBlock:
    torch.manual_seed(0)
    return TransformerBlock(H, 4, 96, **options)


def angles() -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.outer(torch.arange(S).float(), 0.5 ** torch.arange(4)).repeat(1, 2)
    return angle.cos(), angle.sin()


def run(model: TransformerBlock, *rotary: torch.Tensor) -> list[torch.Tensor]:
    """Output, gradient of the input, gradients of the parameters."""
    x = torch.randn(S, B, H, generator=torch.Generator().manual_seed(1)).requires_grad_()
    y = model(x, *rotary)
    (y * torch.linspace(-1, 1, H)).sum().backward()
    grads = [p.grad.held.dequantize() if hasattr(p.grad, "held") else p.grad for p in model.parameters()]
    return [y.detach(), x.grad, *grads]


CASES = [
    ({}, False),
    ({"groups": 2, "activation": "gelu", "rms": False, "bias": True}, True),
    ({"activation": "squared-relu", "bias": True}, True),
]


@pytest.mark.parametrize(("options", "rotary"), CASES)
def test_converted_it_runs_fused_near_plain_torch_and_near_its_own_modules(options, rotary):
    turned = angles() if rotary else ()
    plain = block(**options)
    converted = msamp.convert(copy.deepcopy(plain), by_name("O2"), everything)
    unfused = copy.deepcopy(converted)
    unfused.fc1.register_forward_hook(lambda *_: None)
    assert (plain.fused, converted.fused, unfused.fused) == (False, True, False)
    for want, fused, own in zip(run(plain, *turned), run(converted, *turned), run(unfused, *turned), strict=True):
        size = want.norm()
        assert (fused - want).norm() < 0.12 * size
        assert (own - want).norm() < 0.12 * size
        assert (fused - own).norm() < 0.06 * size


def bytes_for_backward(model: TransformerBlock) -> int:
    sizes: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (sizes.append(x.nbytes), x)[1], lambda x: x):
        model(torch.ones(S, B, H, dtype=torch.bfloat16))
    return sum(sizes)


def test_with_coat_s_groups_it_computes_the_same_output_and_saves_less():
    kept, grouped = (msamp.convert(block(saved=saved), by_name("coat"), everything) for saved in (AS_IT_IS, IN_GROUPS))
    (y, *gradients), (same, *others) = run(kept), run(grouped)
    assert torch.equal(y, same)
    assert all(0 < (a - b).norm() < 0.1 * a.norm() for a, b in zip(gradients, others, strict=True))
    kept, grouped = kept.bfloat16(), grouped.bfloat16()
    stream, inner = 2 * S * B * H, S * B * 2 * 96  # inputs of two norms and of SwiGLU: 2 bytes per element, then 1 and a sixteenth
    assert bytes_for_backward(kept) - bytes_for_backward(grouped) == (stream + inner) * 15 // 16


def test_it_trains_in_an_own_loop():
    model, optimizer = msamp.initialize(block(), recipe="O3", accept=everything)
    losses = []
    for _ in range(12):
        x = torch.randn(S, B, H, generator=torch.Generator().manual_seed(1))
        loss = (model(x) - x.flip(0)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert model.fused
    assert losses[-1] < 0.9 * losses[0]


def test_copied_and_pickled_it_stays_fused_and_its_plain_state_loads_into_plain_torch():
    converted = msamp.convert(block(), by_name("O2"), everything)
    x = torch.randn(S, B, H, generator=torch.Generator().manual_seed(1))
    expected = converted(x)
    for other in (copy.deepcopy(converted), pickle.loads(pickle.dumps(converted))):
        assert other.fused
        assert torch.equal(other(x), expected)
    assert pickle.loads(b"cmsamp.nn.saved_activations\nAsItIs\n)R.") == AS_IT_IS, "a block of an earlier commit"
    plain = block()
    plain.load_state_dict(msamp.plain_state_dict(converted))
    assert not plain.fused
    torch.testing.assert_close(plain(x), expected, rtol=0.1, atol=0.1)
