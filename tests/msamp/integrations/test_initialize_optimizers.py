"""`msamp.initialize` with SGD and Muon: what torch's own do, states in low precision, copies, checkpoints, refusals."""

import copy
import pickle

import pytest
import torch
from torch import nn

import msamp
from helpers import dist
from helpers.choices import each_value
from msamp.numerics import recipe
from msamp.numerics.formats import FP32
from msamp.numerics.tensor import ScalingTensor, fp32_values

needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon is of torch 2.9")
OPTIMIZERS = ("sgd", "nesterov", "plain", pytest.param("muon", marks=needs_muon))
every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.LayerNorm(48), nn.Linear(48, 16))


def of_torch(name: str, model: nn.Module) -> list[torch.optim.Optimizer]:
    if name == "muon":
        matrices, others = ([p for p in model.parameters() if (p.dim() == 2) == is_matrix] for is_matrix in (True, False))
        return [torch.optim.Muon(matrices, lr=0.02, adjust_lr_fn="match_rms_adamw"), torch.optim.AdamW(others, lr=2e-3)]
    options = {"sgd": {"momentum": 0.9, "weight_decay": 0.01}, "nesterov": {"momentum": 0.9, "nesterov": True}, "plain": {}}[name]
    return [torch.optim.SGD(model.parameters(), lr=0.05, foreach=False, **options)]


def train(model: nn.Module, optimizers: list[torch.optim.Optimizer], steps: int = 4, seed: int = 1) -> list[float]:
    generator, losses = torch.Generator().manual_seed(seed), []
    for _ in range(steps):
        x = torch.randn(64, 32, generator=generator)
        loss = (model(x) - x[:, :16].tanh()).square().mean()
        for each in optimizers:
            each.zero_grad()
        loss.backward()
        for each in optimizers:
            each.step()
        losses.append(loss.item())
    return losses


def started(name: str, of: str | recipe.Recipe = "O2") -> tuple[nn.Module, torch.optim.Optimizer]:
    model = mlp()
    return msamp.initialize(model, of_torch(name, model), of)


@every_optimizer
def test_in_fp32_it_is_torch_s_bit_for_bit(name):
    plain, (low, optimizer) = mlp(), started(name, "fp32")
    assert train(plain, of_torch(name, plain)) == train(low, [optimizer])
    assert all(p.equal(q) for p, q in zip(plain.parameters(), low.parameters(), strict=True))


@each_value(name=OPTIMIZERS, level=["O1", "O2", "O3"])
def test_in_low_precision_it_follows_it(name, level):
    plain, (low, optimizer) = mlp(), started(name, level)
    want, got = train(plain, of_torch(name, plain), 8), train(low, [optimizer], 8)
    assert want[-1] < want[0]
    assert got == pytest.approx(want, rel=0.05)
    state = optimizer.state[low[0].weight]
    assert ("master" in state) == (level == "O3")
    assert ("momentum_buffer" in state) == (name != "plain")
    if name != "plain":
        assert isinstance(state["momentum_buffer"], ScalingTensor) == (level != "O1")


@every_optimizer
def test_copies_and_resumed_runs_go_on_bit_for_bit(name):
    low, optimizer = started(name, "O3")
    train(low, [optimizer])
    copied, pickled = copy.deepcopy((low, optimizer)), pickle.loads(pickle.dumps((low, optimizer)))
    resumed = started(name, "O3")
    saved = copy.deepcopy((low.state_dict(), optimizer.state_dict()))
    resumed[1].load_state_dict(saved[1])
    resumed[0].load_state_dict(saved[0])
    want = train(low, [optimizer], seed=2)
    for model, its in (copied, pickled, resumed):
        assert train(model, [its], seed=2) == want


@needs_muon
def test_muon_and_adamw_make_one_optimizer_with_options_of_their_own():
    model = mlp()
    given = of_torch("muon", model)
    schedule = torch.optim.lr_scheduler.StepLR(given[0], 1, gamma=0.5)
    low, optimizer = msamp.initialize(model, given)
    muon, adamw = optimizer.param_groups
    assert "betas" not in muon
    assert "momentum" not in adamw
    assert muon["adjust_lr_fn"] == "match_rms_adamw"
    train(low, [optimizer], 1)
    schedule.step()
    assert (muon["lr"], adamw["lr"]) == (0.01, 2e-3)
    with pytest.raises(ValueError, match=r"was replaced by msamp\.initialize"):
        given[1].step()


@needs_muon
def test_what_cannot_be_is_refused_before_a_layer_is_converted():
    model = mlp()
    muon, adamw = of_torch("muon", model)
    sgd, bf16 = of_torch("sgd", model), mlp().bfloat16()
    hooked = {name: of_torch("plain", model)[0] for name in dir(torch.optim.Optimizer) if name.startswith("register_")}
    for name, own in hooked.items():
        getattr(own, name)(print)
    assert len(hooked) > 5
    cases = [
        (model, muon, "O2", r"torch.optim.Muon leaves out 4 parameters \(0.bias, .*pass their optimizer too"),
        (model, [muon, adamw, *sgd], "O2", "a parameter is in two of the given optimizers"),
        (model, [], "O2", "an empty list"),
        (model, sgd, "coat", "m is coat-e4m3, which has no scale per tensor, but .* requires one for momentum"),
        (bf16, of_torch("sgd", bf16), "collage-plus", "requires AdamW with BF16 arithmetic, but the optimizer is a SGD"),
        (model, torch.optim.SGD(model.parameters(), maximize=True), "O2", "optimizer option maximize=True"),
        *((model, own, "O2", "has hooks, .*; register them on the optimizer that is returned") for own in hooked.values()),
    ]
    for module, given, of, message in cases:
        with pytest.raises(ValueError, match=message):
            msamp.initialize(module, given, of)
        assert type(module[0]) is nn.Linear
    model[0].weight.tensor_model_parallel = True
    with pytest.raises(ValueError, match=r"is sharded .*orthogonalizes whole matrices"):
        msamp.initialize(model, [muon, adamw])


def two_processes() -> dict[str, object]:
    low, optimizer = msamp.initialize(model := mlp(), of_torch("muon", model), "O3", zero=True)
    losses = train(low, [optimizer])
    saved = optimizer.state_dict()
    matrices = [holding for holding in optimizer.holdings() if holding.formats["update"] == "muon"]
    return {
        "losses": losses,
        "whole": [holding.rows is None for holding in matrices],
        "weights": [fp32_values(p).detach().clone() for p in low.parameters()],
        "states": sorted(saved["state"]),
    }


@needs_muon
def test_on_two_processes_zero_keeps_muon_s_matrices_whole():
    first, second = dist.run(two_processes, 2)
    assert [*first["whole"], *second["whole"]] == [True, True]
    assert all(p.equal(q) for p, q in zip(first["weights"], second["weights"], strict=True))
    assert first["losses"] == second["losses"]
    assert first["losses"][-1] < first["losses"][0]
    assert (first["states"], second["states"]) == (list(range(6)), [])


def alike(seen: str) -> dict[tuple[str, str, bool], list[bytes]]:
    """Weights after four steps: every rank with the same examples, or with its part of them."""
    found = {}
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    rank = torch.distributed.get_rank() if ranks > 1 else 0
    # Every update at one level, and the one with the most of its own at all.
    levels = {
        "sgd": ["O2"],
        "nesterov": ["O3"],
        "plain": ["fp32"],
        **({"muon": ["fp32", "O2", "O3"]} if hasattr(torch.optim, "Muon") else {}),
    }
    for name, own in levels.items():
        for level in own if seen == "the same" else ("fp32",):
            for zero in (False, True) if ranks > 1 else (False,):
                low, optimizer = msamp.initialize(model := mlp(), of_torch(name, model), level, zero=zero, clip_grad=float("inf"))
                for step in range(4):
                    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(step))
                    x = x if seen == "the same" else x.chunk(ranks)[rank]
                    (low(x) - x[:, :16].tanh()).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                found[name, level, zero] = [fp32_values(p).detach().clone() for p in low.parameters()]
    return found


@pytest.mark.parametrize("seen", ["the same", pytest.param("its part", marks=pytest.mark.nightly(3))])
def test_two_processes_are_one(seen):
    """With the same examples on every rank to the bit: their average is what each has. With halves of them sums are in another order,
    which Muon's products in BF16 magnify."""
    (want,) = dist.run(alike, 1, seen, init=False)  # with one thread, as the ranks have: a CPU's product splits its sum by threads
    ranks = dist.run(alike, 2, seen)
    assert len(ranks[0]) == 2 * len(want)
    for found in ranks:
        for (name, level, zero), weights in found.items():
            for got, one in zip(weights, want[name, level, False], strict=True):
                near = {"rtol": 1e-5, "atol": 5e-3 if name == "muon" else 1e-6}
                assert got.equal(one) if seen == "the same" else torch.allclose(got, one, **near), (name, level, zero)


def cut() -> str:
    params = [nn.Parameter(torch.ones(64, 16)), nn.Parameter(torch.ones(8, 16))]
    model = nn.ParameterList(params)
    sync = msamp.grad_sync(model, dict.fromkeys(params, FP32), torch.distributed.group.WORLD, shard=True)
    try:
        msamp.LowPrecisionOptimizer(params, formats=recipe.StateFormats(update="muon"), shard=msamp.ZeRO(sync))
    except ValueError as error:
        return str(error)
    return ""


def test_a_matrix_that_zero_would_cut_is_refused_for_an_update_of_whole_ones():
    for told in dist.run(cut, 2):
        assert "is cut over several ranks, but update 'muon' requires whole parameters; build the synchronizer with whole=[" in told
