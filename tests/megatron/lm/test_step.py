"""One training step: against a plain PyTorch loop, over micro-batches, with a gradient that is not finite; and one evaluation."""

import functools
import gc
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import tiny
from megatron.lm.build import build_training
from megatron.lm.config import Config
from megatron.lm.model.gpt import build_model, mean_loss
from megatron.lm.processes import process_groups
from megatron.lm.step import evaluate, train_step
from megatron.lm.training.state import Batches, StepResult, Training
from msamp.nn.scaling_state import LinearScaling
from msamp.numerics.recipe import FP32
from msamp.numerics.tensor import ScalingTensor

pytestmark = pytest.mark.usefixtures("one_process")

DELAYED = tiny.WINDOW + 1  # steps after which delayed scaling is on
NIGHTLY = functools.partial(pytest.param, marks=pytest.mark.nightly)
LEVELS = ("fp32", "bf16", "O1", "O2", "O3", "fp16-amp")


def training(**settings: Any) -> Training:
    config = tiny.config("corpus", **settings)
    process_groups.seed_all(config.training.seed)
    return build_training(config, tiny.VOCABULARY)


def batch(config: Config, number: int) -> dict[str, Tensor]:
    """Micro-batch `number` of an endless stream; every fourth token does not count."""
    generator = torch.Generator().manual_seed(number)
    text = torch.randint(0, 8, (config.training.micro_batch_size, config.model.seq_length + 1), generator=generator).cumsum(1) % 59
    mask = (torch.rand(text[:, 1:].shape, generator=generator) < 0.75).float()
    positions = torch.arange(config.model.seq_length).expand_as(mask)
    fields = {"tokens": text[:, :-1], "labels": text[:, 1:], "loss_mask": mask, "position_ids": positions}
    return {name: tensor.contiguous().to(process_groups.device()) for name, tensor in fields.items()}


def stream(config: Config, first: int = 0) -> Batches:
    return (batch(config, number) for number in itertools.count(first))


def steps(made: Training, count: int, first: int = 0) -> list[StepResult]:
    batches = stream(made.config, first)
    return [train_step(made, batches) for _ in range(count)]


def mean_losses(results: list[StepResult]) -> list[float]:
    return [float(result.loss_sum / result.tokens) for result in results]


def bits(made: Training) -> list[Tensor]:
    """Every bit that the next step depends on: weights, optimizer states, scales."""
    tensors: list[Tensor] = []
    for name, value in made.model.state_dict().items():
        if isinstance(value, torch.Tensor) and not name.endswith("_extra_state"):
            tensors.append(value)
    for state in made.optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return tiny.bits(tensors)


def rate(config: Config, iteration: int) -> float:
    """Learning rate of the step with this number, from 0, by the formula."""
    optim = config.optimizer
    if iteration < optim.lr_warmup_iters:
        return optim.lr * iteration / optim.lr_warmup_iters
    share = (iteration - optim.lr_warmup_iters) / (config.training.train_iters - optim.lr_warmup_iters)
    return optim.min_lr + 0.5 * (optim.lr - optim.min_lr) * (1 + math.cos(math.pi * share))


def plain_loop(config: Config, count: int) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, gradient norms and final weights of the same model under torch.optim.AdamW, written out."""
    process_groups.seed_all(config.training.seed)
    model = build_model(*tiny.parts(config), FP32, tiny.VOCABULARY)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": config.optimizer.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(config.optimizer.adam_beta1, config.optimizer.adam_beta2))
    losses, norms = [], []
    micro_batches = config.num_micro_batches(1)
    batches = stream(config)
    for iteration in range(count):
        optimizer.zero_grad()
        sums = torch.zeros(2)
        for _ in range(micro_batches):
            data = next(batches)
            each = model(data["tokens"], data["position_ids"], None, labels=data["labels"])
            loss, report = mean_loss((each * data["loss_mask"]).sum(), data["loss_mask"])
            (loss / micro_batches).backward()
            sums += torch.stack([report["loss_sum"], report["tokens"]]).cpu()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_grad)))
        for group in optimizer.param_groups:
            group["lr"] = rate(config, iteration)
        optimizer.step()
        losses.append(float(sums[0] / sums[1]))
    return losses, norms, {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("shape", [{}, {"global_batch_size": 12}, {"clip_grad": 0.3, "untie_embeddings_and_output_weights": True}], ids=str)
def test_fp32_equals_a_plain_loop_with_torch_adamw(shape: dict[str, Any]):
    made = training(precision="fp32", **shape)
    results = steps(made, 10)
    losses, norms, weights = plain_loop(made.config, 10)
    assert mean_losses(results) == pytest.approx(losses, rel=1e-6)
    assert [float(result.grad_norm) for result in results] == pytest.approx(norms, rel=1e-5)
    assert [result.lr for result in results] == pytest.approx([rate(made.config, i) for i in range(10)])
    for name, p in made.model.named_parameters():
        torch.testing.assert_close(p, weights[name], rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")
    assert losses[-1] < losses[0] - 0.15


def test_what_a_step_reports_and_counts():
    made = training(opt_level="O2", global_batch_size=8)
    result = train_step(made, stream(made.config))
    counted = batch(made.config, 0)["loss_mask"].sum() + batch(made.config, 1)["loss_mask"].sum()
    assert float(result.tokens) == float(counted)
    assert made.micro_batches == 2
    assert (made.iteration, made.consumed_samples) == (1, 8)
    assert result.grad_norm.dtype is torch.float64
    assert not result.skipped
    assert result.loss_sum.device == process_groups.device()  # nothing is fetched from the device in a step


@pytest.mark.parametrize("level", ["fp32", "O2"])
def test_micro_batches_of_two_equal_one_of_eight(level: str):
    """The same eight sequences at once or two at a time: every token counts here, so the means are over equal counts."""

    def losses(micro_batch_size: int) -> list[float]:
        made = training(precision=level, micro_batch_size=micro_batch_size, global_batch_size=8)
        found = []
        for i in range(10):
            whole = batch(tiny.config("corpus", micro_batch_size=8), i) | {"loss_mask": torch.ones(8, 16, device=process_groups.device())}
            parts = [dict(zip(whole, part, strict=True)) for part in zip(*(t.split(micro_batch_size) for t in whole.values()), strict=True)]
            result = train_step(made, iter(parts))
            found.append(float(result.loss_sum / result.tokens))
        return found

    assert losses(2) == pytest.approx(losses(8), rel=1e-5 if level == "fp32" else 5e-3)


@pytest.mark.parametrize("level", LEVELS)
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(level: str):
    made = training(precision=level, lr_warmup_iters=0)
    steps(made, 2)
    weights, rates = bits(made), [group["lr"] for group in made.optimizer.param_groups]
    weight = made.model.decoder.layers[0].mlp.linear_fc1.bias
    handle = weight.register_hook(lambda g: torch.full_like(g, float("nan")))
    (result,) = steps(made, 1, first=2)
    handle.remove()
    assert result.skipped
    assert not bool(result.grad_norm.isfinite())
    assert made.optimizer.skipped_steps == 1
    assert [group["lr"] for group in made.optimizer.param_groups] == rates
    assert [name for name, a, b in zip(names(made), weights, bits(made), strict=True) if not torch.equal(a, b)] == []
    assert (made.iteration, made.consumed_samples) == (3, 12)
    (after,) = steps(made, 1, first=3)
    assert not after.skipped
    assert after.lr == pytest.approx(rates[0])
    assert all(
        bool(p.dequantize().isfinite().all() if isinstance(p, ScalingTensor) else p.isfinite().all()) for p in made.model.parameters()
    )


def names(made: Training) -> list[str]:
    """Names beside `bits`."""
    found = []
    for name, value in made.model.state_dict().items():
        if isinstance(value, torch.Tensor) and not name.endswith("_extra_state"):
            found += [name, name] if isinstance(value, ScalingTensor) else [name]
    for state in made.optimizer.state.values():
        found += [key for key, x in state.items() for _ in range(2 if isinstance(x, ScalingTensor) else 1)]
    return found


class Spoil:
    """Forward hook: `value` everywhere in the layer's grad_output."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __call__(self, layer: torch.nn.Module, args: tuple[Tensor, ...], output: tuple[Tensor, Tensor | None]) -> None:
        output[0].register_hook(lambda g: torch.full_like(g, self.value))


@pytest.mark.parametrize(
    ("value", "when", "scaling"),
    [
        *((math.nan, DELAYED, "delayed"), (math.inf, 3, "delayed"), (math.nan, 3, "tensorwise")),
        *(NIGHTLY(*case) for case in ((math.nan, 3, "delayed"), (math.inf, DELAYED, "delayed"), (math.inf, 3, "tensorwise"))),
        *(NIGHTLY(value, DELAYED, "tensorwise") for value in (math.nan, math.inf)),
    ],
)
def test_a_grad_output_that_is_not_finite_is_not_hidden_by_the_cast(value: float, when: int, scaling: str):
    made = training(opt_level="O2", fp8_recipe=scaling)
    steps(made, when)
    handle = made.model.decoder.layers[1].mlp.linear_fc1.register_forward_hook(Spoil(value))
    (result,) = steps(made, 1, first=when)
    handle.remove()
    assert result.skipped


SKIPS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "O1": {},
    "O2": {"global_batch_size": 8},
    "O3": {},
    "coat": {},
    "O2, tensorwise": {"fp8_recipe": "tensorwise"},
    "O2, mu": {"grad_exchange": "nccl", "grad_scaling": "auto"},
}


@pytest.mark.parametrize(
    ("name", "when"),
    [
        (name, when) if (name, when) in (("O2", DELAYED + 2), ("O2, mu", 1)) else NIGHTLY(name, when)
        for name in SKIPS
        for when in (1, DELAYED + 2)
    ],
)
def test_a_run_with_a_skipped_step_is_the_run_that_never_saw_its_data(name: str, when: int):
    """With finite amaxes thirty orders too large in the layers before the one whose gradient is not finite."""

    def run(struck: bool) -> tuple[list[float], list[Tensor], dict[str, Any]]:
        made = training(precision=name.split(",")[0], lr_warmup_iters=0, train_iters=20, **SKIPS[name])
        size = made.micro_batches
        results = steps(made, when)
        if struck:
            layers = made.model.decoder.layers
            hooks = [layers[1].mlp.linear_fc1.register_forward_hook(Spoil(1e25))]
            hooks.append(layers[0].mlp.linear_fc1.bias.register_hook(lambda g: torch.full_like(g, float("nan"))))
            (result,) = steps(made, 1, first=when * size)
            assert result.skipped
            for hook in hooks:
                hook.remove()
        results += steps(made, DELAYED + 3, first=(when + 1) * size)
        return mean_losses(results), bits(made), made.grad_sync.state_dict()["mu"]

    (losses, after, mu), (want, clean, clean_mu) = run(True), run(False)
    assert losses == want
    assert tiny.same(after, clean)
    assert mu.keys() == clean_mu.keys()
    assert all(mu[name].equal(clean_mu[name]) for name in mu)
    assert bool(mu) == ("mu" in name)


@pytest.mark.parametrize("level", [level if level == "O3" else NIGHTLY(level) for level in LEVELS])
def test_evaluation_changes_nothing(level: str):
    made = training(precision=level, hidden_dropout=0.1, attention_dropout=0.1)
    steps(made, DELAYED)
    before, random = bits(made), torch.get_rng_state()
    first, again = (evaluate(made, stream(made.config, 100), 3) for _ in range(2))
    assert first == again  # no dropout
    assert tiny.same(before, bits(made))
    assert torch.equal(random, torch.get_rng_state())
    assert (made.iteration, made.consumed_samples) == (DELAYED, 4 * DELAYED)
    steps(made, 1, first=DELAYED)
    assert made.model.training


def test_evaluation_is_the_mean_over_all_counted_tokens():
    made = training(precision="fp32", global_batch_size=8)
    total = torch.zeros(2, dtype=torch.float64)
    for number in range(4):  # two global batches of two micro-batches
        data = batch(made.config, number)
        with torch.no_grad():
            losses = made.model.eval()(data["tokens"], data["position_ids"], None, labels=data["labels"])
        total += torch.stack([(losses * data["loss_mask"]).sum(), data["loss_mask"].sum()]).double().cpu()
    assert evaluate(made, stream(made.config), 2) == pytest.approx(float(total[0] / total[1]), rel=1e-6)


def test_histories_roll_once_a_step_whatever_the_micro_batches():
    made = training(opt_level="O2", global_batch_size=12)
    steps(made, 2)
    layers = [module for module in made.model.modules() if isinstance(module, LinearScaling)]
    assert [layer.steps for layer in layers] == [2] * 8
    assert all(int(layer.seen) == 2 for layer in layers)
    assert all(bool((layer.history[:, -2:] > 0).all()) and not bool(layer.history[:, :-2].any()) for layer in layers)


@pytest.mark.gpu
@pytest.mark.parametrize("level", LEVELS)
def test_one_step_of_each_level_on_the_gpu(level: str):
    made = training(precision=level, hidden_size=256, num_attention_heads=4, seq_length=128, lr_warmup_iters=0)
    (first,) = steps(made, 1)
    assert next(made.model.parameters()).is_cuda
    assert not first.skipped
    assert mean_losses([first]) == pytest.approx([math.log(64)], rel=0.05)
    found = mean_losses(steps(made, 20, first=1))
    assert found[-1] < found[0] - 0.3


@pytest.mark.gpu
def test_memory_of_the_states_falls_with_the_level():
    def resident(level: str) -> int:
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        made = training(precision=level, hidden_size=1024, num_attention_heads=8)
        steps(made, 1)
        made.grad_sync.clear()
        return torch.cuda.memory_allocated() - before

    sizes = [resident(level) for level in LEVELS]
    assert sizes[3] < 0.6 * sizes[1]  # O2: weight 2, m 1, v 2 bytes, against 2 + 4 + 4 + 4
