"""What each recipe means in a plain loop with `msamp.initialize`, on one process and on two."""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.distributed
from torch import nn

import msamp
from helpers import dist
from helpers.numerics import bytes_of, same, through_a_file
from msamp import formats, recipes
from msamp.optim.updates import format_names
from msamp.parallel.greedy_zero import ZeRO

COLLAGE = {
    "bf16-a": "a",
    "bf16-kahan": "kahan",
    "bf16-dmw": "d-mw",
    "bf16-d": "d",
    "collage-light": "light",
    "collage-plus": "plus",
    "collage-fp8": "fp8",
}  # name of a recipe -> the variant of collage_adamw
LEVELS = ("O1", "O2", "O3")
OTHERS = ("coat", "bf16", "fp32", *COLLAGE)
WAYS = ("blockwise", "blockwise-power-of-two", "mxfp8")
STEPS = 20
MINE = replace(recipes.O2, name="o2-with-fp32-v", states=replace(recipes.O2.states, v=formats.FP32))


class Net(nn.Module):
    """Of a token, 5 times it and 3: an embedding, linear layers of which all but the head can be FP8, a norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(48, 32)
        self.body = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 32))
        self.lm_head = nn.Linear(32, 48, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.body(self.embedding(tokens)))


def net(recipe: str) -> Net:
    return Net().bfloat16() if recipe in COLLAGE else Net()


def adamw(model: nn.Module, **options) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), **{"lr": 1e-2, **options})


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    """Of this rank's share of a step's 64 tokens."""
    rank, ranks = dist.place()
    tokens = torch.randint(48, (64,), generator=torch.Generator().manual_seed(step)).chunk(ranks)[rank]
    return nn.functional.cross_entropy(model(tokens).float(), (tokens * 5 + 3) % 48)


def go(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> torch.Tensor:
    """Losses [steps] of an ordinary loop, over all ranks."""
    losses = []
    for step in steps:
        loss = loss_of(model, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    total = torch.stack(losses)
    if dist.place()[1] > 1:
        torch.distributed.all_reduce(total)
    return total / dist.place()[1]


def values(model: nn.Module) -> list[torch.Tensor]:
    return bytes_of(model.state_dict().values())


def trained(recipe: str, steps: int = STEPS, **options) -> dict:
    """A whole run: losses, what the model and the optimizer's states have become, and in which format each gradient travelled."""
    model = net(recipe)
    model, optimizer = msamp.initialize(model, adamw(model), recipe, **options)
    losses, sync = go(model, optimizer, range(steps)), optimizer.grad_sync
    state = optimizer.state_dict()["state"]
    return {
        "losses": losses,
        "model": values(model),
        "state": bytes_of(state[i][key] for i in sorted(state) for key in sorted(state[i])),
        "sent": {} if sync is None else {name: sync.bucket_of(p).format.name for p, name in sync.names.items()},
        "zero": isinstance(optimizer.shard, ZeRO),
    }


# ------------------------------------------------------------------------------------------------------------- one process


@pytest.fixture(scope="module")
def alone() -> dict[str, dict]:
    return {name: trained(name) for name in (*LEVELS, *OTHERS)}


@pytest.mark.parametrize("name", [*LEVELS, *OTHERS])
def test_the_loss_follows_the_fp32_curve(alone, name):
    want, got = alone["fp32"]["losses"], alone[name]["losses"]
    assert want[-1] < 0.3 * want[0]
    assert torch.allclose(got, want, rtol=0.15, atol=0.05)


def test_fp32_is_torch_s_adamw_bit_for_bit(alone):
    model = Net()
    assert go(model, adamw(model), range(STEPS)).equal(alone["fp32"]["losses"])
    assert same(values(model), alone["fp32"]["model"])


@pytest.mark.parametrize("name", COLLAGE)
def test_collage_s_options_are_those_of_its_own_optimizer(alone, name):
    model = net(name)
    losses = go(model, msamp.collage_adamw(model.parameters(), lr=1e-2, variant=COLLAGE[name]), range(STEPS))
    if recipes.by_name(name).states.m == formats.BF16:
        assert losses.equal(alone[name]["losses"])
        assert same(values(model), alone[name]["model"])
    else:  # both compute in FP32, in different orders of operations
        assert torch.allclose(losses, alone[name]["losses"], rtol=0.02)


@pytest.mark.parametrize("name", ["coat", "collage-plus"])
def test_saved_with_weights_only_and_loaded_it_goes_on_bit_for_bit(name):
    model, other = net(name), net(name)
    low, optimizer = msamp.initialize(model, adamw(model), name)
    go(low, optimizer, range(4))
    saved = through_a_file({"model": low.state_dict(), "optimizer": optimizer.state_dict()}, weights_only=True)
    other, other_optimizer = msamp.initialize(other, adamw(other, lr=1.0), name)
    other.load_state_dict(saved["model"])
    other_optimizer.load_state_dict(saved["optimizer"])
    assert go(low, optimizer, range(4, 8)).equal(go(other, other_optimizer, range(4, 8)))
    assert same(values(low), values(other))


# ---------------------------------------------------------------------------------------------------- how a recipe is named


@pytest.mark.parametrize(("level", "way"), [
    pytest.param(level, way, marks=() if LEVELS.index(level) == WAYS.index(way) else pytest.mark.nightly(2))
    for level, way in itertools.product(LEVELS, WAYS)
])  # fmt: skip
def test_fp8_gemms_cast_in_another_way(alone, level, way):
    model = Net()
    low, optimizer = msamp.initialize(model, adamw(model), opt_level=level, fp8_recipe=way)
    assert [low.body[i].scaling.gemm for i in (0, 3)] == [recipes.GEMMS[way]] * 2
    assert low.body[0].weight.format == recipes.by_name(level).weight
    weight = next(holding for holding in optimizer.holdings() if holding.param is low.body[0].weight)
    assert weight.formats == format_names(recipes.by_name(level).states)
    losses = go(low, optimizer, range(STEPS))
    assert torch.allclose(losses, alone["fp32"]["losses"], rtol=0.15, atol=0.05)
    assert not losses.equal(alone[level]["losses"])


# ------------------------------------------------------------------------------------------------------------ two processes

FEW = 5  # steps
ZEROS = ("coat", "collage-plus", "bf16")  # with the optimizer spread over the ranks too


def every_case() -> dict:
    """What the tests below look at, from one set of processes."""
    cases = {name: trained(name, FEW) for name in OTHERS}
    cases |= {(name, "zero"): trained(name, FEW, zero=True) for name in ZEROS}
    cases |= {("O3", way): trained("O3", FEW, fp8_recipe=way) for way in WAYS}
    cases["default"] = {name: trained(name, 1)["zero"] for name in LEVELS}
    return cases


@pytest.fixture(scope="module")
def ranks() -> list[dict]:
    return dist.run(every_case, 2, timeout=400)


@pytest.mark.parametrize("name", OTHERS)
def test_ranks_stay_equal_and_train_as_one_process_does(ranks, alone, name):
    first, second = (rank[name] for rank in ranks)
    assert same(first["model"], second["model"])
    assert torch.allclose(first["losses"], alone[name]["losses"][:FEW], rtol=0.05)
    assert not first["zero"]


@pytest.mark.parametrize("name", ZEROS)
def test_zero_is_the_same_to_the_bit(ranks, name):
    off, on = ranks[0][name], ranks[0][name, "zero"]
    assert (off["zero"], on["zero"]) == (False, True)
    assert off["losses"].equal(on["losses"])
    assert same(off["model"], on["model"])
    assert same(off["state"], on["state"])
    assert same(ranks[1][name, "zero"]["model"], on["model"])


# ----------------------------------------------------------------------------------------------------------------- refusals


def assert_untouched(model: nn.Module, before: list[torch.Tensor]) -> None:
    assert same(values(model), before)
    assert not any(isinstance(m, msamp.FP8Linear) for m in model.modules())


@pytest.mark.parametrize(("model", "options", "text"), [
    (Net, {"recipe": "O4"}, r"precision 'O4' is unknown; choose one of fp32, .*O1, O2, O3 \(O0 is bf16\)"),
    (Net, {"opt_level": "o2"}, r"precision 'o2' is unknown; choose one of fp32"),
    (Net, {"recipe": ""}, r"precision '' is unknown"),
    (Net, {"recipe": 2}, r"precision 2 is unknown"),
    (Net, {"recipe": "coat", "opt_level": "O2"}, r"recipe is 'coat' and opt_level is 'O2'; .*pass only one of them"),
    (Net, {"recipe": MINE, "opt_level": "O2"}, r"recipe is 'o2-with-fp32-v' and opt_level is 'O2'"),
    (Net, {"recipe": "fp16-amp"}, r"recipe 'fp16-amp' scales the loss.*use msamp\.amp\.initialize"),
    (Net, {"fp8_recipe": "rowwise"}, r"fp8_recipe is 'rowwise'; it must be one of delayed, tensorwise, blockwise"),
    (Net, {"recipe": "bf16", "fp8_recipe": "mxfp8"}, r"fp8_recipe is 'mxfp8', but recipe 'bf16' has no FP8 GEMM; drop it"),
    *((Net, {"recipe": name}, rf"float32; recipe '{name}' requires a model in torch\.bfloat16 \(model\.bfloat16\(\)") for name in COLLAGE),
    (lambda: Net().bfloat16(), {"recipe": "fp32"}, r"torch\.bfloat16; recipe 'fp32' requires a model in torch\.float32 \(model\.float\(\)"),
    *((lambda: Net().half(), {"recipe": name}, rf"float16; recipe '{name}' requires .*32 or .*bfloat16") for name in ("O2", "bf16")),
])  # fmt: skip
def test_what_does_not_go_together_is_refused_by_name(model, options, text):
    made = model()
    before = values(made)
    with pytest.raises(ValueError, match=text):
        msamp.initialize(made, adamw(made), **options)
    assert_untouched(made, before)
