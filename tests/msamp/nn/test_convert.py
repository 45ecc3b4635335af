"""Conversion of all sorts of module trees."""

import copy
import pickle
import re

import pytest
import torch
from torch import nn

import msamp
from helpers.moe_model import KEEP, Mixture
from helpers.numerics import make
from msamp.nn.convert import convert
from msamp.nn.expert_matrices import ExpertMatrices
from msamp.nn.filters import DEFAULT, all_of, exclude_names, include_names, min_features
from msamp.nn.linear import FP8Linear
from msamp.nn.survey import survey
from msamp.numerics import recipe
from msamp.numerics.metrics import sqnr_db
from msamp.numerics.tensor import ScalingTensor

every_level = pytest.mark.parametrize("level", [recipe.O1, recipe.O2, recipe.O3], ids=lambda r: r.name)


class Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.experts = nn.ModuleDict({"a": nn.Linear(size, size), "b": nn.Linear(size, size, bias=False)})
        self.extra = nn.ModuleList([nn.Linear(size, 8), nn.Linear(size, size)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        return self.extra[1](self.experts["a"](x) + self.experts["b"](x))


class Tree(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(32), Block(32))
        self.lm_head = nn.Linear(32, 100)
        self.nothing = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.blocks(x))


def converted(model: nn.Module) -> list[str]:
    return [name for name, m in model.named_modules() if isinstance(m, FP8Linear)]


@every_level
def test_a_nested_tree_in_place(level):
    model = Tree()
    x = make("normal", (4, 32))
    want = model(x)
    assert convert(model, level) is model
    assert converted(model) == [f"blocks.{i}.{n}" for i in range(2) for n in ("experts.a", "experts.b", "extra.1")]
    assert type(model.lm_head) is nn.Linear
    assert type(model.blocks[0].norm) is nn.LayerNorm
    assert sqnr_db(want, model(x)) > 18
    assert model.blocks[0].experts["b"].bias is None
    model(x).sum().backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if "extra.0" not in n)


@pytest.mark.parametrize(
    ("accept", "want"),
    [
        (include_names(r"^blocks\.1.*experts"), ["blocks.1.experts.a", "blocks.1.experts.b"]),
        (exclude_names("blocks"), ["lm_head"]),
        (min_features(33), []),
        (lambda name, layer: layer.out_features == 8, ["blocks.0.extra.0", "blocks.1.extra.0"]),
    ],
)
def test_filters_decide_by_name_and_shape(accept, want):
    assert converted(convert(Tree(), recipe.O2, accept)) == want


@every_level
def test_a_model_that_is_itself_a_linear(level):
    plain = nn.Linear(32, 48)
    low = convert(plain, level)
    assert isinstance(low, FP8Linear)
    assert low.bias is plain.bias
    kept = nn.Linear(32, 8)
    assert convert(kept, level) is kept


@pytest.mark.parametrize("bad", [float("nan"), -float("inf")])
def test_a_weight_that_is_not_finite_is_refused_by_name_and_nothing_is_converted(bad):
    model = Tree()
    with torch.no_grad():
        model.blocks[1].extra[1].weight[0, 0] = bad
    before = {name: id(p) for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match=r"blocks\.1\.extra\.1\.weight holds 1 values that are NaN or infinite"):
        convert(model, recipe.O2)
    assert converted(model) == []
    assert {name: id(p) for name, p in model.named_parameters()} == before


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 64), nn.ReLU(),
        nn.Linear(64, 16),
    )  # fmt: skip


def bright_patches(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """8 x 8 images with a bright patch in one of 16 places, and the place."""
    where = torch.randint(0, 16, (count,))
    patch = nn.functional.one_hot(where, 16).view(count, 1, 4, 4).float()
    return nn.functional.interpolate(patch, scale_factor=2) * 3 + torch.randn(count, 1, 8, 8) * 0.3, where


@every_level
def test_a_convolution_net_passes_through_and_trains(level):
    model = convert(net(), level)
    assert converted(model) == ["5", "7"]
    assert type(model[0]) is nn.Conv2d
    losses = []
    for _ in range(40):
        x, where = bright_patches(64)
        loss = nn.functional.cross_entropy(model(x), where)
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():  # plain SGD: a low-precision weight is overwritten with what it should be
                value = p.dequantize() if isinstance(p, ScalingTensor) else p
                p.copy_(value - 0.3 * p.grad)
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


@pytest.mark.promise("Optimizer states", "Python attributes of a weight survive conversion, copies and pickles.")
def test_attributes_of_a_weight_survive_the_conversion_and_copies():
    model = nn.Sequential(nn.Linear(32, 32))
    model[0].weight._no_weight_decay, model[0].weight.sequence_parallel = True, [1]
    low = convert(model, recipe.O2)
    for each in (low, copy.deepcopy(low), pickle.loads(pickle.dumps(low))):
        assert isinstance(each[0].weight, ScalingTensor)
        assert isinstance(each[0].weight, nn.Parameter)
        assert (each[0].weight._no_weight_decay, each[0].weight.sequence_parallel) == (True, [1])


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(4, 32, 64))
        self.mix = nn.Linear(32, 32)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 32)
        self.image = nn.Conv2d(3, 32, 3)
        self.experts = Experts()
        self.own = nn.utils.parametrizations.weight_norm(nn.Linear(32, 32))
        self.rnn = nn.LSTM(32, 32)
        self.narrow = nn.Linear(32, 8)
        self.lm_head = nn.Linear(32, 10, bias=False)
        self.lm_head.weight = self.embedding.weight
        self.fc = nn.Linear(32, 64)


@pytest.mark.promise("Conversion", "`msamp.survey` names every unconverted module with weights, and why.")
def test_a_survey_names_what_stays_as_it_is_and_why():
    model = Mixed()
    found = survey(model, accept=all_of(min_features(16), exclude_names(r"mix$")))
    assert found.converted == ["fc"]
    want = {
        "image": "a convolution",
        "experts": r"Experts reads its own parameters \(up \(4, 32, 64\)\)",
        "experts.mix": "its name is excluded",
        "own": None,
        "own.parametrizations.weight": "reads its own parameters",
        "rnn": r"LSTM reads its own parameters \(weight_ih_l0 \(128, 32\)",
        "narrow": "it has fewer than 16 features",
        "lm_head": "another module holds the same weight",
    }
    assert list(found.left) == [name for name, why in want.items() if why]
    assert all(re.search(why, found.left[name]) for name, why in want.items() if why)
    assert survey(model, recipe.BF16).converted == []
    convert(model, recipe.O2, exclude_names("mix", "narrow"))
    assert survey(model, accept=lambda name, layer: False).converted == ["fc"]


def test_a_survey_of_a_converted_model_says_what_each_layer_is_with_whatever_filter():
    def made():
        return nn.ModuleDict({"body": nn.Linear(64, 64), "router": nn.Linear(64, 64), "lm_head": nn.Linear(64, 64)})

    keep = all_of(DEFAULT, exclude_names("router"))
    low = convert(made(), "O2", keep)
    assert survey(made(), "O2", keep).converted == ["body"]
    assert survey(made()).converted == ["body", "router"]
    for accept, whys in (
        (DEFAULT, ("it was left out of the conversion", "its name is excluded")),
        (keep, ("its name is excluded", "its name is excluded")),
        (lambda name, layer: True, ("it was left out of the conversion",) * 2),
        (lambda name, layer: False, ("accept= leaves it out",) * 2),
    ):
        found = survey(low, accept=accept)
        assert found.converted == ["body"]
        assert found.left == dict(zip(("router", "lm_head"), whys, strict=True))
    assert survey(copy.deepcopy(low)).converted == ["body"]
    assert type(convert(low, recipe.O2)["router"]) is FP8Linear  # a second conversion takes what the first has left
    assert survey(low).converted == ["body", "router"]


def test_a_transformer_encoder_in_evaluation_takes_no_fused_path():
    torch.manual_seed(0)
    plain = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2).eval()
    low = convert(copy.deepcopy(plain), recipe.O2)
    assert len(survey(low).converted) == 6
    x, padding = make("normal", (3, 5, 64)), torch.zeros(3, 5, dtype=torch.bool)
    padding[0, -2:] = True
    with torch.no_grad():
        assert sqnr_db(plain(x, src_key_padding_mask=padding)[padding.logical_not()], low(x, src_key_padding_mask=padding)[~padding]) > 20


def test_experts_are_divided_and_the_whole_weight_is_empty():
    model = Mixture()
    whole = model.experts.fc1_weight
    assert survey(model, accept=KEEP).converted == ["up", "down", "experts"]
    convert(model, recipe.O2, KEEP)
    assert whole.numel() == 0
    assert survey(model).converted == ["up", "down", "experts.fc1_weight", "experts.fc2_weight"]
    assert convert(model, recipe.O2, KEEP) is model  # a second time


@pytest.mark.parametrize(
    ("change", "how", "why"),
    [
        (lambda m: None, recipe.O2.with_gemm(recipe.GEMMS["blockwise"]), "experts need one scale per tensor, from its amax"),
        (lambda m: None, recipe.BF16, "recipe bf16 has no FP8 GEMM"),
        (lambda m: setattr(m.experts, "forward", lambda *args: args[0]), recipe.O2, "its forward was replaced"),
        (lambda m: m.experts.fc1_weight.register_hook(lambda g: g), recipe.O2, "fc1_weight has gradient hooks, which E separate matrices"),
        (lambda m: setattr(m, "experts", msamp.Experts(4, 32, 40)), recipe.O2, r"fc2_weight is \[32, 40\] per expert"),
        (lambda m: setattr(m, "experts", nn.ModuleDict({"base_layer": m.experts})), recipe.O2, r"PEFT adapts .* \(target_parameters\)"),
        (lambda m: setattr(m, "again", SharedExperts(m.experts.fc1_weight)), recipe.O2, "another module holds the same weight"),
        (
            lambda m: nn.utils.parametrize.register_parametrization(m.experts, "fc1_weight", nn.Identity()),
            recipe.O2,
            "reads its own|computed",
        ),
    ],
)
def test_experts_that_stay_in_16_bits(change, how, why):
    model = Mixture()
    change(model)
    assert re.search(why, next(said for name, said in survey(model, how, KEEP).left.items() if name.startswith("experts")))
    convert(model, how, KEEP)
    assert not any(isinstance(m, ExpertMatrices) for m in model.modules())


class SharedExperts(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


def accepted(accept, name="blocks.0.fc1", sizes=(32, 32)) -> bool:
    return accept(name, nn.Linear(*sizes, device="meta"))


def test_names_are_searched_as_regular_expressions():
    accept = exclude_names(r"fc2$", r"^head")
    assert [accepted(accept, n) for n in ("blocks.0.fc1", "blocks.0.fc2", "head", "blocks.head")] == [True, False, False, True]


@pytest.mark.parametrize(("sizes", "want"), [((64, 64), True), ((63, 64), False), ((64, 63), False), ((1000, 10), False)])
def test_narrow_layers_are_refused(sizes, want):
    assert accepted(min_features(64), sizes=sizes) is want


def test_all_of_wants_every_filter():
    accept = all_of(include_names("fc"), min_features(16))
    assert accepted(accept)
    assert not accepted(accept, name="qkv")
    assert not accepted(accept, sizes=(8, 32))
    assert accepted(all_of())


@pytest.mark.parametrize("name", ["lm_head", "output_layer", "gpt_neox.embed_out", "lm_head.base_layer", "lm_head.modules_to_save.x"])
def test_by_default_the_lm_head_stays(name):
    assert not accepted(DEFAULT, name)
