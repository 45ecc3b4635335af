"""The router of a mixture of experts: which experts a token goes to, with which weights, and the losses that keep the experts balanced.

megatron-core's router needs Transformer Engine for its product, and returns dense [tokens, experts] maps, from which the experts would have
to compute a token's choices again. This one returns the choices. Its scores, groups and losses are megatron-core's, all in FP32:

    logits = x W^T                                         W [E, h] in the model's dtype, the product in FP32
    softmax:                 p = softmax of the top-k logits
    softmax, pre-softmax:    p = the top-k of softmax(logits)
    sigmoid:                 s = sigmoid(logits), chosen by s + expert bias, p = s / sum of the chosen s
    auxiliary loss           c E sum over e of f_e P_e     f_e the share of the choices, P_e the mean score (Switch Transformer, equation 4)
    z loss                   c mean of logsumexp(logits)^2 (ST-MoE, equation 5)

The losses are not added to the model's loss, which only the last pipeline stage has. `MoEAuxLossAutoScaler` passes the probabilities
through and starts their gradient in backward, where it must be scaled like the model's loss: by the loss scale of FP16 and 1 / the
number of micro-batches. A rank that routes a part of a sequence has its part of the losses. Gradients are summed over tensor-parallel ranks
but averaged over context-parallel ones, so their number is a factor of the scale too. megatron-core's schedules set this scale; the graphs
of a step, which have no schedule, call `scale_losses`.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, group_limited_topk, switch_load_balancing_loss_func, z_loss_func
from megatron.core.transformer.moe.router import Router as CoreRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron.lm.processes.process_groups import device

AUX, Z, ENTROPY, MICRO_BATCHES = range(4)  # entries of `Router.sums`


class Router(CoreRouter):
    """The top-k router of one layer.

    Attributes:
        parts, parts_group: the ranks that route parts of the same sequences, and their number.
        weight: [E, h].
        expert_bias: FP32 [E], added to the scores that select a token's experts; None without `--moe-router-enable-expert-bias`. It has no
            gradient and is part of checkpoints: `ExpertLoad` changes it after each step.
        tokens_per_expert: int64 [E], choices of each expert by this rank's tokens since `ExpertLoad` read them. Neither recomputation nor
            evaluation counts.
        sums: FP32 [4], sums over the same micro-batches: auxiliary loss and z loss, both without their coefficients, entropy of the scores
            in nats, and the number of micro-batches.
    """

    expert_bias: Tensor | None
    tokens_per_expert: Tensor
    sums: Tensor

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection) -> None:
        super().__init__(config, pg_collection)
        self.to(device())  # megatron-core creates the weight on the CPU
        assert config.num_moe_experts is not None
        experts, here = config.num_moe_experts, device()
        self.register_buffer("expert_bias", torch.zeros(experts, device=here) if config.moe_router_enable_expert_bias else None)
        self.register_buffer("tokens_per_expert", torch.zeros(experts, dtype=torch.int64, device=here), persistent=False)
        self.register_buffer("sums", torch.zeros(4, device=here), persistent=False)
        # Each context-parallel rank routes its part of a sequence. With sequence parallelism each tensor-parallel rank routes a part of
        # that, else all route the same tokens.
        self.parts_group = self.tp_cp_group if config.sequence_parallel else self.cp_group
        self.parts = self.parts_group.size()

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """input [s, b, h] -> (probabilities FP32 [s b, k], experts int64 [s b, k])."""
        logits = self.gating(input)
        return self.routing(logits.flatten(0, 1), input.shape[1])

    def gating(self, input: Tensor) -> Tensor:
        """input [s, b, h] -> logits FP32 [s, b, E]."""
        return _Gating.apply(input, self.weight)

    def routing(self, logits: Tensor, batch: int = 1) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """logits FP32 [s b, E] of `batch` sequences -> (probabilities FP32 [s b, k], experts int64 [s b, k])."""
        # Without gradients there is no loss: in evaluation, and in the first forward of recomputed layers, whose second one counts.
        trains, coefficient = self.training and torch.is_grad_enabled(), self.config.moe_z_loss_coeff
        if trains and coefficient:
            loss = z_loss_func(logits, 1 / self.parts)
            self.sums[Z] += loss.detach()
            logits = MoEAuxLossAutoScaler.apply(logits, loss * coefficient)
        probs, experts = self._choose(logits)
        if trains:
            probs = self._with_aux_loss(probs, logits, batch)
            self._count(logits.detach(), experts)
        return probs, experts

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        config, top_k = self.config, self.config.moe_router_topk
        if config.moe_router_score_function == "sigmoid":
            scores = torch.sigmoid(logits)
            _, experts = self._best(scores if self.expert_bias is None else scores + self.expert_bias)
            probs = scores.gather(1, experts)
            if top_k > 1:
                probs = probs / (probs.sum(-1, keepdim=True) + 1e-20)
        elif config.moe_router_pre_softmax:
            probs, experts = self._best(torch.softmax(logits, -1))
        else:
            best, experts = self._best(logits)
            probs = torch.softmax(best, -1)
        factor = config.moe_router_topk_scaling_factor
        return probs if factor is None else probs * factor, experts

    def _best(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return the top-k scores of each token and their experts, only of the token's best groups if there are groups."""
        config = self.config
        if config.moe_router_group_topk:
            return group_limited_topk(
                scores, config.moe_router_topk, *scores.shape, config.moe_router_num_groups, config.moe_router_group_topk
            )
        return scores.topk(config.moe_router_topk, dim=1)

    def _scores(self, logits: Tensor) -> Tensor:
        """Return the scores of all experts, which sum to 1 for each token."""
        if self.config.moe_router_score_function == "softmax":
            return torch.softmax(logits, -1)
        scores = torch.sigmoid(logits)
        return scores / (scores.sum(-1, keepdim=True) + 1e-20)

    def _with_aux_loss(self, probs: Tensor, logits: Tensor, batch: int) -> Tensor:
        """Attach the auxiliary loss to `probs`. Balanced experts have a loss of 1, before the coefficient.

        As in megatron-core, this loss takes its choices from the scores alone, without groups and expert bias.
        """
        config, kind = self.config, self.config.moe_router_load_balancing_type
        coefficient, top_k = config.moe_aux_loss_coeff, config.moe_router_topk
        if kind == "none" or not coefficient:
            return probs
        scores = self._scores(logits)
        chosen = torch.zeros_like(scores).scatter_(1, scores.detach().topk(top_k, dim=1).indices, 1.0)
        sequences = batch if kind == "seq_aux_loss" else 1
        if sequences > 1:  # [s b, E] -> [s, b E]: the sum over E b experts is the sum of the sequences' losses
            scores, chosen = scores.reshape(-1, sequences * scores.shape[1]), chosen.reshape(-1, sequences * chosen.shape[1])
        counts = chosen.sum(0)
        if self.parts > 1:
            dist.all_reduce(counts, group=self.parts_group)
        tokens = scores.shape[0] * self.parts
        loss = switch_load_balancing_loss_func(scores, counts, tokens, top_k, config.num_moe_experts, 1.0) / sequences
        self.sums[AUX] += loss.detach()
        return MoEAuxLossAutoScaler.apply(probs, loss * coefficient)

    @torch.no_grad()
    def _count(self, logits: Tensor, experts: Tensor) -> None:
        """Count the load of a micro-batch."""
        chosen = experts.flatten()
        self.tokens_per_expert.scatter_add_(0, chosen, torch.ones_like(chosen))
        scores = self._scores(logits)
        self.sums[ENTROPY] += -torch.xlogy(scores, scores).sum(-1).mean()
        self.sums[MICRO_BATCHES] += 1


class _Gating(torch.autograd.Function):
    """(x [.., h], weight [E, h]) -> x weight^T in FP32 [.., E]. Saves x in its own dtype, where autograd would save an FP32 copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, weight)
        return x.float() @ weight.float().t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        grad_x = (grad @ weight.float()).to(x.dtype) if ctx.needs_input_grad[0] else None
        grad_weight = (grad.flatten(0, -2).t() @ x.flatten(0, -2).float()).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight


def routers(model: nn.Module) -> Iterator[Router]:
    """Iterate over the routers of a model, in the order of its layers."""
    yield from (module for module in model.modules() if isinstance(module, Router))


def scale_losses(micro_batches: int, multiply: Callable[[Tensor], Tensor] | None = None, context: int = 1) -> None:
    """Set the scale of the gradients of all routers' losses, as megatron-core's schedules do.

    Args:
        micro_batches: of a step, over which gradients are averaged.
        multiply: multiplies by FP16's loss scale; None without one.
        context: number of ranks that share each sequence (context parallelism).
    """
    one = torch.ones(1, device=device())
    MoEAuxLossAutoScaler.set_loss_scale((one if multiply is None else multiply(one)) * context / micro_batches)
