"""The registry of updates: what the built-in ones declare, and what each refuses."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from msamp.numerics.formats import BF16, E4M3, FP16, FP32
from msamp.numerics.recipe import O2, StateFormats
from msamp.numerics.tensor import ScalingTensor
from msamp.optim import updates
from msamp.optim.optimizer import LowPrecisionOptimizer
from msamp.optim.updates import MASTER, State, Update


class Nothing(Update):
    """Leaves everything as it is."""

    def run(self, tables, batch, inputs) -> None:
        pass


def test_an_unknown_update_is_refused_where_the_optimizer_is_built():
    with pytest.raises(ValueError, match=r"update 'b' is unknown; choose one of fp32, sgd, sgd-momentum, muon, a, .*, or register it"):
        LowPrecisionOptimizer([nn.Parameter(torch.ones(2))], formats=StateFormats(update="b"))


def test_a_registered_update_is_known_and_the_same_once_more_changes_nothing():
    mine = Nothing("nothing", (MASTER, State("trace", "m", "trace")), kept=("trace",))
    assert updates.register(mine) is mine
    assert updates.register(Nothing("nothing", mine.states, mine.kept)) is mine
    assert updates.by_name("nothing") is mine
    with pytest.raises(ValueError, match="another update is registered as 'nothing'"):
        updates.register(Nothing("nothing", mine.states))
    with pytest.raises(ValueError, match="another update is registered as 'fp32'"):
        updates.register(Nothing("fp32", mine.states))


TRACE = State("trace", "m", "trace")


def test_groups_of_several_updates_share_one_optimizer():
    """The tables of amaxes are as high as the update that keeps most wants them; each takes its own rows."""
    updates.register(Nothing("nothing", (MASTER, TRACE), kept=("trace",)))

    def made(*more: dict) -> tuple[nn.Parameter, LowPrecisionOptimizer]:
        torch.manual_seed(0)
        p = nn.Parameter(ScalingTensor.quantize(torch.randn(8, 8), FP16))
        return p, LowPrecisionOptimizer([*more, {"params": [p], "formats": O2.states, "keys": [5]}], lr=0.1)

    other = nn.Parameter(torch.ones(4, 4))
    p, together = made({"params": [other], "formats": StateFormats(m=E4M3, update="nothing")})
    q, alone = made()
    for _ in range(3):
        g = torch.randn(8, 8)
        p.grad, q.grad, other.grad = g.clone(), g.clone(), torch.full((4, 4), 100.0)
        together.step()
        alone.step()
    assert p.payload.equal(q.payload)
    assert p.scale_inv.equal(q.scale_inv)
    assert together.state[other].keys() == {"step", "trace"}
    assert other.eq(1).all()


FOUR_BF16 = StateFormats(BF16, BF16, BF16, BF16, "plus")


def test_an_update_in_bf16_takes_nothing_else():
    p = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    with pytest.raises(
        ValueError, match="update 'plus' computes in BF16, but the formats are master bf16, grad bf16, m bf16, v fp32; set all four"
    ):
        LowPrecisionOptimizer([p], formats=replace(FOUR_BF16, v=FP32))


def built(update: str, p: torch.Tensor, **options) -> LowPrecisionOptimizer:
    formats = StateFormats(FP32, FP32, FP32, FP32, update)
    return LowPrecisionOptimizer([nn.Parameter(p)], **{"lr": 0.5, "weight_decay": 0.0, "formats": formats, **options})


OPTIONS: list[dict[str, bool]] = [{"maximize": True}, {"amsgrad": True}, {"decoupled_weight_decay": False}, {"decoupled": False}]


@pytest.mark.parametrize("update", ["plus", "muon"])
@pytest.mark.parametrize("option", OPTIONS, ids=str)
def test_an_option_that_would_be_ignored_is_refused_in_a_new_group_by_hand_and_in_a_saved_one(update, option):
    formats = FOUR_BF16 if update == "plus" else StateFormats(FP32, FP32, FP32, FP32, update)
    other, optimizer = (built(update, torch.ones(2, 2).to(formats.master.dtype), formats=formats, weight_decay=0.1) for _ in range(2))
    (p,) = optimizer.param_groups[0]["params"]
    optimizer.param_groups[0] |= option
    p.grad, new = torch.ones_like(p), {"params": [nn.Parameter(p.detach().clone())], **option}
    for attempt in (lambda: optimizer.add_param_group(new), optimizer.step, lambda: other.load_state_dict(optimizer.state_dict())):
        with pytest.raises(ValueError, match=rf"{next(iter(option))}(=True| is False)"):
            attempt()
    assert p.eq(1).all()


@pytest.mark.parametrize("update", ["sgd", "sgd-momentum"])
def test_a_step_that_is_not_usable_changes_nothing(update):
    optimizer = built(update, torch.ones(3))
    (p,) = optimizer.param_groups[0]["params"]
    p.grad = torch.tensor([1.0, float("nan"), 1.0])
    optimizer.step()
    assert p.tolist() == [1.0] * 3
    assert optimizer.skipped_steps == 1


@pytest.mark.parametrize(
    ("update", "options", "message"),
    [
        ("sgd", {"momentum": 0.9}, "update 'sgd' has no momentum state"),
        ("sgd-momentum", {"nesterov": True, "dampening": 0.1}, "it requires a momentum above 0 and dampening 0"),
        ("muon", {"ns_steps": 100}, r"ns_steps is 100; it must be in \[0, 100\)"),
    ],
)
def test_options_out_of_range_are_refused(update, options, message):
    with pytest.raises(ValueError, match=message):
        built(update, torch.ones(4, 4), **options)
