"""Other people's loops and public bug reports, each a loop of 40 steps that must end within 1.5 % of its loss in FP32."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import msamp
from helpers import dist
from helpers.choices import each_once
from helpers.numerics import make, through_a_file

Step = Callable[[nn.Sequential, torch.optim.Optimizer, Tensor, int, dict[str, Any]], Tensor]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32))


def loss_after(step: Step, recipe: str | None, steps: int = 40) -> float:
    """The mean of the last five losses; None is torch's own FP32."""
    model = net()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if recipe is not None:
        model, optimizer = msamp.initialize(model, optimizer, recipe)
    kept: dict[str, Any] = {}
    losses = [float(step(model, optimizer, make("normal", (16, 32), i), i, kept)) for i in range(steps)]
    return sum(losses[-5:]) / 5


def error(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x).square().mean()


def step_of(optimizer: torch.optim.Optimizer, loss: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def forwards_before_a_step(model, optimizer, x, i, kept):
    """Transformer Engine #1047: from the second micro-batch on, a forward gave something else."""
    ys = [model(x) for _ in range(3)]
    assert all(y.equal(ys[0]) for y in ys[1:])
    return step_of(optimizer, sum((y - x).square().mean() for y in ys) / 3)


def recomputed_micro_batches(model, optimizer, x, i, kept):
    """Transformer Engine #539: NaN with recomputation, several micro-batches and a forward without gradients before them."""
    optimizer.zero_grad()
    total = x.new_zeros(())
    for reentrant, part in enumerate(x.chunk(2)):
        part = part.clone().requires_grad_()
        with torch.no_grad():
            model(part)
        loss = (checkpoint(model, part, use_reentrant=bool(reentrant)) - part.detach()).square().mean() / 2
        loss.backward()
        total += loss.detach()
    optimizer.step()
    return total


def another_loss(model, optimizer, x, i, kept):
    """Transformer Engine #764: a model of replaced linear layers did not converge."""
    return step_of(optimizer, nn.functional.huber_loss(model(x), x.tanh()))


def padding(model, optimizer, x, i, kept):
    """torchao #3356: rows of zeros had an infinite scale."""
    x = x * (torch.arange(16)[:, None] < 4) * (i % 7 != 0)
    return step_of(optimizer, error(model, x))


def amaxes_beside_powers_of_two(model, optimizer, x, i, kept):
    """torchao #3171: rounding of the scale let the largest value overflow."""
    return step_of(optimizer, error(model, x / x.abs().amax() * 448 * 2.0 ** (i % 5 - 2) * (1 + 2**-20 * (i % 3 - 1)) / 100))


def eight_micro_batches(model, optimizer, x, i, kept):
    """axolotl #2262 and #3196: the loss depended on how a batch was cut."""
    optimizer.zero_grad()
    losses = [error(model, part) / 8 for part in x.chunk(8)]
    for loss in losses:
        loss.backward()
    optimizer.step()
    return torch.stack(losses).sum().detach()


def mixed_reference(model, optimizer, x, i, kept):
    """TRL #1843: a reference that moves towards the policy (TR-DPO) did not."""
    reference = kept.setdefault("reference", copy.deepcopy(model).requires_grad_(False))
    before = reference(x).detach()
    loss = step_of(optimizer, error(model, x) + 0.1 * (model(x) - before).square().mean())
    if i % 5 == 4:
        for old, new in zip(reference.parameters(), model.parameters(), strict=True):
            old.data.copy_(0.5 * new.data + 0.5 * old.data)
        assert not reference(x).equal(before)
    return loss


def resumed(model, optimizer, x, i, kept):
    """finetrainers #246 and bitsandbytes #782: a resumed run was worse, or did not start."""
    if i == 25:
        states = through_a_file([model.state_dict(), optimizer.state_dict()], weights_only=True)
        for p in model.parameters():
            p.data.zero_()
        model.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])
    return step_of(optimizer, error(model, x))


def flat_gradients(model, optimizer, x, i, kept):
    """MS-AMP #180: code of a partitioned optimizer that views and narrows gradients."""
    optimizer.zero_grad()
    loss = error(model, x)
    loss.backward()
    for p in model.parameters():
        flat = p.grad.view(-1)
        p.grad = flat.narrow(0, 0, flat.numel()).clone().view(p.shape)
    optimizer.step()
    return loss.detach()


def cast_in_mid_run(model, optimizer, x, i, kept):
    """Transformer Engine #1687: after a cast to BF16 the weights wanted no gradient."""
    if i == 20:
        model.bfloat16().float()
        assert all(p.requires_grad for p in model.parameters())
    return step_of(optimizer, error(model, x))


def lookahead(model, optimizer, x, i, kept):
    slow = kept.setdefault("slow", [p.detach().float().clone() for p in model.parameters()])
    loss = step_of(optimizer, error(model, x))
    if i % 5 == 4:
        with torch.no_grad():
            for p, own in zip(model.parameters(), slow, strict=True):
                p.copy_(own.lerp_(p.detach().float(), 0.5))
    return loss


def sharpness_aware(model, optimizer, x, i, kept):
    params = list(model.parameters())
    optimizer.zero_grad()
    loss = error(model, x)
    loss.backward()
    before = [p.detach().clone() for p in params]
    with torch.no_grad():
        norm = torch.sqrt(sum(p.grad.float().square().sum() for p in params))
        for p in params:
            p.add_(p.grad * (0.05 / norm))
    optimizer.zero_grad()
    error(model, x).backward()
    with torch.no_grad():
        for p, own in zip(params, before, strict=True):
            p.copy_(own)
    optimizer.step()
    return loss.detach()


def changed_gradients(change: Callable[[nn.Parameter, int], None]) -> Step:
    def step(model, optimizer, x, i, kept):
        optimizer.zero_grad()
        loss = error(model, x)
        loss.backward()
        for p in model.parameters():
            change(p, i)
        optimizer.step()
        return loss.detach()

    return step


def center(p: nn.Parameter, i: int) -> None:
    if p.dim() > 1:
        p.grad.sub_(p.grad.mean(1, keepdim=True))


def add_noise(p: nn.Parameter, i: int) -> None:
    p.grad.add_(make("normal", tuple(p.shape), i).to(p.grad.dtype) * 1e-4)


def clip_values(p: nn.Parameter, i: int) -> None:
    nn.utils.clip_grad_value_([p], 1e-3)


def largest_norm(model, optimizer, x, i, kept):
    """Rows of weights are projected into a ball."""
    loss = step_of(optimizer, error(model, x))
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_((0.5 / p.norm(dim=1, keepdim=True)).clamp(max=1))
    return loss


def anchored(model, optimizer, x, i, kept):
    """A penalty on the distance from the first weights (EWC)."""
    anchor = kept.setdefault("anchor", [p.detach().float().clone() for p in model.parameters()])
    penalty = sum((p - own.to(p.dtype)).square().sum() for p, own in zip(model.parameters(), anchor, strict=True))
    return step_of(optimizer, error(model, x) + 1e-2 * penalty)


def stochastic_depth(model, optimizer, x, i, kept):
    hidden = model[1](model[0](x))
    hidden = hidden if i % 3 == 0 else hidden + model[3](model[2](hidden))
    return step_of(optimizer, (model[4](hidden) - x).square().mean())


def one_cycle(model, optimizer, x, i, kept):
    """A scheduler that changes the betas too."""
    if not kept:
        kept["schedule"] = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=60)
    loss = step_of(optimizer, error(model, x))
    kept["schedule"].step()
    return loss


def per_example(model, optimizer, x, i, kept):
    """Gradients of every example by torch.func, averaged by hand; FP8 layers compute them in the weight's dtype."""
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def of_one(weights, row):
        return (torch.func.functional_call(model, weights, (row[None],)) - row).square().mean()

    grads = torch.func.vmap(torch.func.grad(of_one), in_dims=(None, 0))(weights, x)
    loss = error(model, x).detach()
    for name, p in model.named_parameters():
        p.grad = grads[name].mean(0)
    optimizer.step()
    return loss


def fast_weights(model, optimizer, x, i, kept):
    """A step of MAML: the loss of weights after one inner step."""
    weights = dict(model.named_parameters())
    grads = torch.autograd.grad(error(model, x), list(weights.values()))
    fast = {name: p - 0.05 * grad for (name, p), grad in zip(weights.items(), grads, strict=True)}
    return step_of(optimizer, (torch.func.functional_call(model, fast, (x.flip(0),)) - x.flip(0)).square().mean())


def weights_as_features(model, optimizer, x, i, kept):
    """A decoder tied to the encoder by hand, beside penalties on weights themselves."""
    weight = model[0].weight
    tied = nn.functional.linear(nn.functional.gelu(model[0](x)), weight.t())
    penalty = 1e-4 * sum(p.abs().sum() for p in model.parameters()) + (weight.t() @ weight - torch.eye(32)).square().mean()
    return step_of(optimizer, (tied - x).square().mean() + error(model, x) + penalty)


def projected_gradients(model, optimizer, x, i, kept):
    """Two tasks whose gradients are made not to conflict (PCGrad)."""
    y, params = model(x), list(model.parameters())
    losses = (y - x).square().mean(), (y - x.tanh()).abs().mean()
    first = torch.autograd.grad(losses[0], params, retain_graph=True)
    second = torch.autograd.grad(losses[1], params)
    dot, norm = (sum((a * b).sum() for a, b in zip(first, each, strict=True)) for each in (second, first))
    for p, a, b in zip(params, first, second, strict=True):
        p.grad = a + b - min(float(dot / norm), 0.0) * a
    optimizer.step()
    return sum(losses).detach()


def silent_inputs(model, optimizer, x, i, kept):
    """unsloth-zoo #962: where the gradient is always 0, a quantized first moment was not, and the weight ran away."""
    x = x * (torch.arange(32) >= 4)
    first = kept.setdefault("first", msamp.fp32_values(model[0].weight)[:, :4].clone())
    loss = step_of(optimizer, error(model, x))
    assert torch.allclose(msamp.fp32_values(model[0].weight)[:, :4], first * (1 - 1e-5) ** (i + 1), rtol=0.07, atol=1e-3)
    return loss


def rate_in_a_tensor(model, optimizer, x, i, kept):
    """PyTorch #126854 and #163103, torchao #2574: schedules multiplied a rate in a tensor again and again, or refused a float."""
    if not kept:
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(1e-3)
        kept["schedule"] = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 + step % 2)
    loss = step_of(optimizer, error(model, x))
    kept["schedule"].step()
    return loss


REPORTS = [
    forwards_before_a_step, recomputed_micro_batches, another_loss, padding, amaxes_beside_powers_of_two, eight_micro_batches,
    mixed_reference, resumed, flat_gradients, cast_in_mid_run, silent_inputs, rate_in_a_tensor,
]  # fmt: skip
SITUATIONS = {
    "lookahead": lookahead, "sharpness-aware": sharpness_aware, "centered gradients": changed_gradients(center),
    "noise": changed_gradients(add_noise), "clipped values": changed_gradients(clip_values), "largest norm": largest_norm,
    "anchored": anchored, "stochastic depth": stochastic_depth, "one cycle": one_cycle,
    "per-example gradients": per_example, "fast weights": fast_weights, "weights as features": weights_as_features,
    "projected gradients": projected_gradients,
}  # fmt: skip
CASES = {step.__name__: step for step in REPORTS} | SITUATIONS
O3_COPIES = 0.03  # at O3 a copy_ into a weight is rounded to E4M3, and its master with it


@each_once(0.5, recipe=["O1", "O2", "O3"], name=list(CASES))
@pytest.mark.filterwarnings("ignore")
def test_a_loop_ends_where_it_ends_in_fp32(recipe, name):
    within = O3_COPIES if (recipe, name) == ("O3", "lookahead") else 0.015
    assert loss_after(CASES[name], recipe) == pytest.approx(loss_after(CASES[name], None), rel=within)


def on_this_rank(names: list[str]) -> list[tuple[float, float]]:
    return [(loss_after(CASES[name], "O2"), loss_after(CASES[name], "fp32")) for name in names]


@pytest.mark.filterwarnings("ignore")
def test_so_do_two_processes():
    for found in dist.run(on_this_rank, 2, ["stochastic depth"]):
        for loss, want in found:
            assert loss == pytest.approx(want, rel=0.015)
