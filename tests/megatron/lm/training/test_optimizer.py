"""The trainer's optimizer: groups and formats of every level, decay, schedule, and the bytes it says against those it takes."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers import tiny
from megatron.lm.config.sections.precision import build_recipe
from megatron.lm.model.gpt import GPT, build_model
from megatron.lm.training.optimizer import build_optimizer, build_schedule, bytes_per_parameter, rounding_keys
from msamp.comm.grad_sync import GradSync
from msamp.numerics import formats
from msamp.numerics.formats import Format
from msamp.numerics.stochastic_rounding import tensor_key
from msamp.numerics.tensor import ScalingTensor
from msamp.optim.device_copy import DeviceCopy
from msamp.optim.optimizer import FP8AdamW
from msamp.parallel.greedy_zero import ZeRO

pytestmark = pytest.mark.usefixtures("one_process")

ZERO = {"opt_level": "O0", "use_distributed_optimizer": True}
FP32 = {"master": "fp32", "grad": "fp32", "m": "fp32", "v": "fp32"}
STATES = {
    "fp32": FP32,
    "bf16": FP32,
    "O1": {"master": "fp16", "grad": "fp8-e4m3", "m": "fp32", "v": "fp32"},
    "O2": {"master": "fp16", "grad": "fp8-e4m3", "m": "fp8-e4m3", "v": "fp16"},
    "O3": {"master": "fp16", "grad": "fp8-e4m3", "m": "fp8-e4m3", "v": "fp16"},
}
# Table 6 of FP8-LM: how each row is asked for, and (linear weight, master, m, v); None: the weight is its own master.
TABLE_6: dict[str, tuple[dict[str, Any], tuple[str, str | None, str, str]]] = {
    "#0": ({"precision": "fp32"}, ("fp32", None, "fp32", "fp32")),
    "#1": ({"opt_level": "O0"}, ("bf16", "fp32", "fp32", "fp32")),
    "#2a": ({"opt_level": "O2"}, ("fp16", None, "fp8-e4m3", "fp16")),
    "#2b": ({"opt_level": "O2", "master_format": "bf16"}, ("fp16", "bf16", "fp8-e4m3", "fp16")),
    "#3": ({"opt_level": "O2", "master_format": "fp8-e4m3"}, ("fp16", "fp8-e4m3", "fp8-e4m3", "fp16")),
    "#4": ({"opt_level": "O2", "exp_avg_sq_format": "fp8-e4m3"}, ("fp16", None, "fp8-e4m3", "fp8-e4m3")),
}
# Collage, Table 2: bytes a parameter.
OPTIONS = {"bf16-a": 8, "bf16-kahan": 10, "collage-light": 10, "collage-plus": 12, "collage-fp8": 10, "bf16-dmw": 12, "bf16-d": 16}


def schedule_of(optimizer, config):
    return build_schedule(optimizer, config.optimizer, config.schedule_steps)


def build(**settings: Any) -> tuple[GPT, FP8AdamW, GradSync]:
    config = tiny.config("corpus", **settings)
    kind = build_recipe(config.precision)
    model = build_model(*tiny.parts(config), kind, tiny.VOCABULARY)
    sync = tiny.synchronizer(model, config, kind)
    return model, build_optimizer(model, config.optimizer, kind, sync, seed=config.training.seed, overlap_param_gather=True), sync


def test_keys_of_stochastic_rounding_follow_from_the_names_in_the_whole_model():
    model, optimizer, _ = build(opt_level="O2", seed=3)
    keys = rounding_keys(model, 3)
    assert len(set(keys.values())) == len(keys) == len(list(model.parameters()))
    assert keys[model.decoder.layers[1].mlp.linear_fc2.weight] == tensor_key(3, "decoder.layers.1.mlp.linear_fc2.weight", 0)
    assert keys[model.embedding.word_embeddings.weight] == tensor_key(3, "embedding.word_embeddings.weight", 0)
    held = {p: key for group in optimizer.param_groups for p, key in zip(group["params"], group["keys"], strict=True)}
    assert held == keys
    assert rounding_keys(nn.ModuleDict({"inner": model, "head": nn.Linear(2, 2)}), 3).items() >= keys.items()


def step(optimizer: FP8AdamW, sync: GradSync, scale: float = 1.0) -> None:
    """One update from made-up gradients of this magnitude, left there until the next."""
    generator = torch.Generator().manual_seed(1)
    sync.clear()
    for p in sync.names:
        p.grad = scale * torch.randn(p.shape, generator=generator).to(p.device, p.dtype)
        sync.take(p)
    sync.finish()
    optimizer.step()


def gradient_formats(optimizer: FP8AdamW) -> dict[Tensor, Format]:
    return {p: formats.by_name(group["formats"]["grad"]) for group in optimizer.param_groups for p in group["params"]}


def format_of(x: Tensor) -> str:
    return (x.format if isinstance(x, ScalingTensor) else formats.of_dtype(x.dtype)).name


def size_of(x: Tensor) -> int:
    stored = x.payload if isinstance(x, ScalingTensor) else x
    return stored.numel() * stored.element_size()


@pytest.mark.parametrize("level", list(STATES))
def test_groups_and_formats_of_a_level(level: str):
    model, optimizer, sync = build(precision=level)
    names = {p: name for name, p in model.named_parameters()}
    groups = {frozenset(names[p] for p in group["params"]): group for group in optimizer.param_groups}
    linear = {name for name in names.values() if ".linear_" in name and name.endswith("weight")}
    vectors = {name for name in names.values() if name.endswith("bias") or "layernorm" in name}
    rest = set(names.values()) - linear - vectors
    assert rest == {"embedding.word_embeddings.weight"}
    assert len(linear) == 8
    if level in ("fp32", "bf16"):
        expected = {frozenset(linear | rest): (STATES[level], 0.1), frozenset(vectors): (FP32, 0.0)}
    else:
        embedding = {**STATES[level], "grad": "bf16"}
        expected = {frozenset(linear): (STATES[level], 0.1), frozenset(rest): (embedding, 0.1), frozenset(vectors): (FP32, 0.0)}
    assert set(groups) == set(expected)
    schedule_of(optimizer, tiny.config("corpus"))  # sets each group's decay
    for members, (states, decay) in expected.items():
        rounding = {name: value for name, value in groups[members]["formats"].items() if name.endswith("_rounding")}
        assert groups[members]["formats"] == {**states, "update": "fp32", **rounding}
        assert len(rounding) == 2
        assert groups[members]["weight_decay"] == pytest.approx(decay)
    assert gradient_formats(optimizer) == {p: sync.bucket_of(p).format for p in names}
    assert isinstance(optimizer.shard, ZeRO) == sync.shard == (level == "O3")


@pytest.mark.parametrize("row", list(TABLE_6))
def test_rows_of_table_6(row: str):
    flags, (weight, master, m, v) = TABLE_6[row]
    model, optimizer, sync = build(**flags)
    step(optimizer, sync)
    layer = model.decoder.layers[0].mlp.linear_fc1.weight
    state = optimizer.state[layer]
    assert format_of(layer) == weight
    assert ("master" in state) == (master is not None)
    if master is not None:
        assert format_of(state["master"]) == master
    assert (format_of(state["exp_avg"]), format_of(state["exp_avg_sq"])) == (m, v)
    norm = optimizer.state[model.decoder.final_layernorm.weight]
    assert (format_of(norm["exp_avg"]), format_of(norm["exp_avg_sq"])) == ("fp32", "fp32")


def gradients(p: Tensor, sync: GradSync) -> list[Tensor]:
    return [segment.grad for segment in sync.owned(p)] if sync.shard else [p.main_grad]


def measured(model: nn.Module, optimizer: FP8AdamW, sync: GradSync) -> dict[str, float]:
    """Bytes a parameter, from the tensors that are there after a step."""
    params = list(model.parameters())
    states = [optimizer.state[p] for p in params]
    sizes = {
        "weight": sum(map(size_of, params)),
        "master": sum(size_of(state[key]) for state in states for key in ("master", "weight_remainder") if key in state),
        "grad": sum(size_of(g) for p in params for g in gradients(p, sync)),
        "m": sum(size_of(state["exp_avg"]) for state in states),
        "v": sum(size_of(state[key]) for state in states for key in ("exp_avg_sq", "exp_avg_sq_remainder") if key in state),
    }
    count = sum(p.numel() for p in params)
    return {key: size / count for key, size in sizes.items()}


@pytest.mark.parametrize(
    "flags", [{"precision": level} for level in (*STATES, *OPTIONS)] + [flags for flags, _ in TABLE_6.values()] + [ZERO], ids=str
)
def test_bytes_per_parameter_are_those_of_the_tensors(flags: dict[str, Any]):
    model, optimizer, sync = build(**flags)
    foretold = bytes_per_parameter(optimizer)
    step(optimizer, sync)
    assert bytes_per_parameter(optimizer) == foretold == pytest.approx(measured(model, optimizer, sync))


def test_the_schedule_moves_on_by_steps_that_count_as_soon_as_it_is_told():
    _, optimizer, _ = build()
    schedule = schedule_of(optimizer, tiny.config("corpus"))

    def flag(value: bool) -> DeviceCopy:
        return DeviceCopy(torch.tensor(value))

    schedule.advance_unless(False, 8)
    schedule.advance_unless(True, 8)
    assert schedule.num_steps == 1
    schedule.advance_unless(flag(False), 8)
    assert schedule.num_steps == 1
    schedule.apply_pending()
    schedule.apply_pending()
    assert schedule.num_steps == 2
    schedule.advance_unless(flag(True), 8)
    assert schedule.state_dict()["num_steps"] == 2
    schedule.advance_unless(flag(False), 8)
    assert schedule.state_dict()["num_steps"] == 3, "a checkpoint sees the step before it"


def lrs(steps: int, **settings: Any) -> list[float]:
    """Learning rate of each of the first steps."""
    _, optimizer, _ = build(**settings)
    schedule = schedule_of(optimizer, tiny.config("corpus", **settings))
    found = []
    for _ in range(steps):
        rates = {group["lr"] for group in optimizer.param_groups}
        assert len(rates) == 1
        found.append(rates.pop())
        schedule.advance_unless(False, 8)
    return found


def test_warm_up_and_cosine():
    found = lrs(25, lr=1e-3, min_lr=1e-4, lr_warmup_iters=4, lr_decay_style="cosine", train_iters=20)
    assert found[:5] == pytest.approx([0, 0.25e-3, 0.5e-3, 0.75e-3, 1e-3])
    assert found[12] == pytest.approx(5.5e-4)  # half-way of the decay
    for i in (7, 9, 18):
        assert found[i] == pytest.approx(1e-4 + 0.5 * 9e-4 * (1 + math.cos(math.pi * (i - 4) / 16)))
    assert found[20:] == pytest.approx([1e-4] * 5)


def shape(style: str, x: float) -> float:
    """WSD's decay after a share x of it, from 1 to 0, as Megatron-LM's help describes it."""
    by_name = {"linear": 1 - x, "cosine": (1 + math.cos(math.pi * x)) / 2, "exponential": 2 * 0.5**x - 1, "minus_sqrt": 1 - math.sqrt(x)}
    return by_name[style]


@pytest.mark.parametrize("style", ["linear", "cosine", "exponential", "minus_sqrt"])
def test_wsd_stays_and_then_decays(style: str):
    flags: dict[str, Any] = {"lr": 1e-3, "min_lr": 1e-4, "lr_warmup_iters": 4, "lr_decay_style": "WSD", "lr_wsd_decay_iters": 8}
    found = lrs(25, **flags, lr_wsd_decay_style=style, train_iters=20)
    assert found[4:13] == pytest.approx([1e-3] * 9)
    assert found[12:21] == pytest.approx([1e-4 + 9e-4 * shape(style, i / 8) for i in range(9)])
    assert found[21:] == pytest.approx([1e-4] * 4)


@pytest.mark.parametrize("untied", [False, True])
def test_decoupled_learning_rates_of_embedding_and_head(untied: bool):
    flags = {"lr": 1e-3, "min_lr": 1e-4, "decoupled_lr": 1e-2, "decoupled_min_lr": 1e-3, "untie_embeddings_and_output_weights": untied}
    model, optimizer, _ = build(opt_level="O2", position_embedding_type="learned_absolute", **flags)
    schedule = schedule_of(optimizer, tiny.config("corpus", **flags))
    apart = {model.embedding.word_embeddings.weight} | ({model.output_layer.weight} if untied else set())
    for steps, rate, decoupled in ((2, 1e-3, 1e-2), (8, 1e-4, 1e-3)):
        schedule.step(steps)
        found = {p: group["lr"] for group in optimizer.param_groups for p in group["params"]}
        assert len(found) == len(list(model.parameters()))
        assert {p for p, lr in found.items() if lr == pytest.approx(decoupled)} == apart
        assert {p for p, lr in found.items() if lr == pytest.approx(rate)} == found.keys() - apart
