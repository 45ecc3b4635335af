"""The twin of the kernel with COAT's moments: `adamw`'s arithmetic between the definition's loads and stores."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from helpers.adamw_inputs import adamw_batch
from helpers.numerics import bits, make
from msamp.kernels.reference import adamw
from msamp.kernels.reference.adamw import Batch, Hyper, adam_
from msamp.kernels.reference.coat_adamw import coat_adamw
from msamp.numerics.formats import E4M3, E5M2, FP16
from msamp.numerics.range_expand import Expanded, quantize_expanded
from msamp.numerics.tensor import ScalingTensor

HYPER = Hyper(0.02, 0.9, 0.95, 1e-8, 0.1)
SHAPES = [(6, 200), (300,), ()]


def batch(v: Callable[[torch.Tensor], Any] = lambda x: quantize_expanded(x, E5M2)) -> Batch:
    made = [[make("normal", shape or (1,), seed=10 * i + j).view(shape) for j, shape in enumerate(SHAPES)] for i in range(4)]
    ms, vs = [quantize_expanded(x, E4M3) for x in made[1]], [v(x.square()) for x in made[2]]
    return adamw_batch(made[0], ms, vs, made[3], step=4.0)


def run(x: Batch, usable: bool = True, kept: torch.Tensor | None = None) -> Batch:
    kept = torch.zeros(3, 3) if kept is None else kept
    table = torch.ones(5, 3) * 4
    coat_adamw(None, x, torch.tensor(HYPER, dtype=torch.float64), table, kept, torch.tensor(0.5), torch.tensor(usable), decoupled=True)
    return x


def same(a: Expanded, b: Expanded) -> bool:
    return all(bits(getattr(a, name)).equal(bits(getattr(b, name))) for name in ("payload", "max", "k"))


def test_it_is_adam_between_load_and_store():
    x, old = batch(), batch()
    run(x)
    for i in range(len(SHAPES)):
        p, m, v = old.masters[i].clone(), old.ms[i].dequantize(), old.vs[i].dequantize()
        adam_([p], [m], [v], [old.grads[i] * 0.5], [5], HYPER, HYPER.largest_step)
        assert x.masters[i].equal(p)
        assert same(x.ms[i], quantize_expanded(m, E4M3))
        assert same(x.vs[i], quantize_expanded(v, E5M2))
        assert x.steps[i] == 5


def test_a_moment_in_another_format_is_stored_as_ever():
    kept = torch.zeros(3, 3)
    x = run(batch(v=lambda x: ScalingTensor.quantize(x, FP16, dtype=torch.float32)), kept=kept)
    assert all(isinstance(m, Expanded) and isinstance(v, ScalingTensor) for m, v in zip(x.ms, x.vs, strict=True))
    assert kept[0].tolist() == [0, 0, 0]
    assert kept[1].tolist() == [float(v.dequantize().abs().max()) for v in x.vs]


def test_a_step_that_is_not_usable_changes_nothing():
    x = batch()
    old = copy.deepcopy(x)
    run(x, usable=False)
    assert all(same(a, b) for a, b in zip((*x.ms, *x.vs), (*old.ms, *old.vs), strict=True))
    assert all(a.equal(b) for a, b in zip((*x.masters, *x.steps), (*old.masters, *old.steps), strict=True))


def test_states_stay_in_their_memory_and_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch):
    x, other = batch(), batch()
    places = [t.data_ptr() for s in (*x.ms, *x.vs) for t in (s.payload, s.max, s.k)]
    run(x)
    assert places == [t.data_ptr() for s in (*x.ms, *x.vs) for t in (s.payload, s.max, s.k)]
    monkeypatch.setattr(adamw, "CHUNK", 1)
    run(other)
    assert all(same(a, b) for a, b in zip((*x.ms, *x.vs), (*other.ms, *other.vs), strict=True))
