"""The registry of updates: what the built-in ones declare, what each refuses, and what cannot be registered."""

import pytest
import torch
from torch import nn

from msamp.numerics.formats import BF16, COAT_E4M3, E4M3, FP16
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
    formats = StateFormats(update="b")
    with pytest.raises(ValueError, match=r"update 'b' is unknown; choose one of fp32, sgd, sgd-momentum, muon, a, .*, or register it"):
        LowPrecisionOptimizer([nn.Parameter(torch.ones(2))], formats=formats)


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


@pytest.mark.parametrize(
    ("update", "problem"),
    [
        (Nothing("new", (TRACE, TRACE)), "trace is declared twice; two states use column trace"),
        (Nothing("new", (State("step", "m", "m"),)), "the key step is reserved for the step count"),
        (Nothing("new", (State("a/b", "m", "m"),)), "a/b: a key must not contain"),
        (Nothing("new", (TRACE, State("other", "v", "trace"))), "two states use column trace"),
        (Nothing("new", (State("trace", "w", "trace"),)), "trace has format 'w'; choose a Format, or one of master, m, v"),
        (Nothing("new", (State("trace", "master", "trace", copy=True),)), "trace is a copy of the parameter; only master can be one"),
        (Nothing("new", (State("rest", BF16, "m", remainder_of="trace"),)), "rest is the remainder of trace, which is not among"),
        (
            Nothing("new", (TRACE, State("weight_remainder", BF16, "m", remainder_of="trace"))),
            "weight_remainder is the remainder of weight in another update; choose another key",
        ),
        (Nothing("new", (TRACE,), kept=("trail",)), "kept has trail, which is not among the states"),
        (Nothing("new", (MASTER, TRACE), kept=("master",)), "kept has master, whose amax every update gets"),
        (Nothing("new", (TRACE,), in_fp32="never"), "update 'never' is unknown"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_states_that_contradict_each_other_are_refused(update: Update, problem: str):
    with pytest.raises(ValueError, match=problem):
        updates.register(update)
    with pytest.raises(ValueError, match="update 'new' is unknown"):
        updates.by_name("new")


def test_a_kept_state_has_one_scale():
    updates.register(Nothing("new", (MASTER, TRACE), kept=("trace",)))
    with pytest.raises(ValueError, match=r"m is coat-e4m3, which has no scale per tensor, but .* requires one for trace"):
        LowPrecisionOptimizer([nn.Parameter(torch.ones(2))], formats=StateFormats(m=COAT_E4M3, update="new"))


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
