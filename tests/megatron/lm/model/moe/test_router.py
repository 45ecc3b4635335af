"""The router against megatron-core's, whose product needs Transformer Engine and is replaced here; and what it counts."""

from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, get_default_pg_collection
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from helpers import tiny
from megatron.lm.config.sections.precision import build_recipe
from megatron.lm.model.gpt import transformer_config
from megatron.lm.model.moe.router import AUX, ENTROPY, MICRO_BATCHES, Router, Z, scale_losses

pytestmark = pytest.mark.usefixtures("one_process")

KINDS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "pre-softmax": {"moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 2.5},
    "sequences": {"moe_router_load_balancing_type": "seq_aux_loss"},
    "sigmoid": {"moe_router_score_function": "sigmoid"},
    "bias and groups": {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
    },
    "top 1": {"moe_router_score_function": "sigmoid", "moe_router_topk": 1},
}


class CoreRouter(TopKRouter):
    def gating(self, input: Tensor) -> Tensor:
        return input.float() @ self.weight.float().t()


def made(kind: type, **settings: Any) -> Any:
    given = {"num_experts": 8, "swiglu": True, "disable_bias_linear": True, "moe_aux_loss_coeff": 0.3, "moe_z_loss_coeff": 0.1}
    config = tiny.config("corpus", **given | settings)
    core = transformer_config(config.model, config.parallel, config.training, build_recipe(config.precision))
    router = kind(core, get_default_pg_collection())
    with torch.no_grad():
        router.weight.copy_(torch.randn(router.weight.shape, generator=torch.Generator().manual_seed(1)))
        if router.expert_bias is not None:
            router.expert_bias.copy_(torch.linspace(-0.4, 0.4, 8).flip(0))
    return router


def inputs() -> Tensor:
    """Hidden states of 3 sequences."""
    return torch.randn(6, 3, 32, generator=torch.Generator().manual_seed(2)).bfloat16().requires_grad_()


@pytest.mark.parametrize("kind", KINDS)
def test_probabilities_choices_and_gradients_are_those_of_megatron_core(kind: str):
    ours, theirs = made(Router, **KINDS[kind]), made(CoreRouter, **KINDS[kind])
    x, same = inputs(), inputs()
    scale_losses(4)
    probs, experts = ours(x)
    dense, chosen = theirs(same)
    rows = torch.zeros(18, 8).scatter(1, experts, probs)
    assert torch.equal(torch.zeros(18, 8, dtype=torch.bool).scatter(1, experts, True), chosen)
    torch.testing.assert_close(rows, dense)
    grad = torch.randn(18, 8, generator=torch.Generator().manual_seed(3))
    rows.backward(grad)
    dense.backward(grad)
    torch.testing.assert_close(x.grad, same.grad, rtol=1e-2, atol=1e-5)
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad, rtol=1e-2, atol=1e-5)
    assert probs.dtype == torch.float32


def test_the_losses_start_with_the_given_scale_and_only_in_training():
    router = made(Router, moe_aux_loss_coeff=0.5, moe_z_loss_coeff=None)
    gradients = {}
    for micro_batches in (1, 4):
        scale_losses(micro_batches, lambda one: 8 * one)
        x = inputs()
        (router(x)[0] * 0).sum().backward()
        gradients[micro_batches] = x.grad
    assert gradients[1].abs().max() > 0
    torch.testing.assert_close(gradients[1], 4 * gradients[4], rtol=1e-2, atol=0)
    router.eval()
    x = inputs()
    (router(x)[0] * 0).sum().backward()
    assert not x.grad.any()
    assert float(MoEAuxLossAutoScaler.main_loss_backward_scale) == 2.0
    scale_losses(4, context=2)
    assert float(MoEAuxLossAutoScaler.main_loss_backward_scale) == 0.5


def test_the_load_is_that_of_the_choices_and_balanced_experts_have_a_loss_of_one():
    router = made(Router)
    with torch.no_grad():
        _, experts = router(inputs())  # as the first forward of recomputed layers
    assert not router.tokens_per_expert.any()
    router(inputs())
    assert torch.equal(router.tokens_per_expert, torch.bincount(experts.flatten(), minlength=8))
    assert router.sums[MICRO_BATCHES] == 1
    router.sums.zero_()
    router.routing(torch.eye(8) * 20)  # token i to expert i, and to whichever comes second
    assert router.sums[ENTROPY] < 1e-6
    assert float(router.sums[Z]) == pytest.approx(400, rel=1e-6)
    router.sums.zero_()
    even = torch.eye(8) + torch.eye(8).roll(1, 0)
    router.routing(even)
    assert float(router.sums[AUX]) == pytest.approx(1, rel=1e-6)
