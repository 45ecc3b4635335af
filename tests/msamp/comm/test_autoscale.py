"""mu against the golden vectors and a trace computed by hand."""

import pytest
import torch
from numerics import golden

from msamp.comm.autoscale import MU_RULES, AutoScale, exceeds, next_mu

MILLION = 10**6
OVERFLOWS = (100, *range(600, 603), *range(700, 706))
# Step -> log4 of mu before it, at 4 ranks (least mu 4^-2): a quiet step adds 1/1000, halving takes 1/2, 1/2 itself is 4^-0.5.
BY_HAND = {
    "halve": {
        0: 0.0,
        100: 0.1,
        101: -0.4,
        600: 0.099,
        601: -0.401,
        602: -0.901,
        603: -1.401,
        700: -1.304,
        701: -1.804,
        702: -2.0,
        706: -2.0,
        707: -1.999,
        1199: -1.507,
    },
    "paper": {0: 0.0, 100: 0.1, 101: -0.5, 600: -0.001, 601: -0.5, 603: -0.5, 700: -0.403, 701: -0.5, 706: -0.5, 707: -0.499, 1199: -0.007},
}
QUIET = {0: 0.0, 1: 0.001, 250: 0.25, 500: 0.5, 501: 0.5, 1199: 0.5}


def counts(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


@pytest.mark.parametrize("rule", MU_RULES)
def test_golden_mu(rule):
    vectors = golden("mu")
    scale = AutoScale([vectors["n"]], vectors["ranks"], rule)
    before = []
    for step in range(vectors["steps"][-1] + 1):
        before.append(scale.mu.item())
        scale.update(counts(vectors["saturated"].get(str(step), 0)), counts(0), torch.tensor([True]))
    assert [before[step] for step in vectors["steps"]] == pytest.approx(vectors[rule], rel=1e-6)


@pytest.mark.parametrize("rule", MU_RULES)
def test_1200_steps_with_planted_overflow_follow_the_trace_by_hand(rule, device):
    """Overflow in the payload, overflow in the sum, none, and a tensor that never has a valid gradient."""
    scale = AutoScale([MILLION] * 4, 4, rule, device)
    memory, valid = scale.mu.data_ptr(), torch.tensor([True, True, True, False], device=device)
    trace = []
    for step in range(1200):
        trace.append(scale.mu.clone())
        planted = 11 if step in OVERFLOWS else 10
        scale.update(counts(planted, 0, 10, planted).to(device), counts(0, planted, 10, planted).to(device), valid)
    assert scale.mu.data_ptr() == memory
    for step, exponent in BY_HAND[rule].items():
        assert trace[step][:2].tolist() == pytest.approx([4.0**exponent] * 2, rel=1e-12), step
    for step, exponent in QUIET.items():
        assert trace[step][2].item() == pytest.approx(4.0**exponent, rel=1e-12), step
    assert all(mu[3] == 1 for mu in trace)


def test_the_share_is_counted_in_integers():
    numel = counts(MILLION, MILLION, 1, 10, 10, 199_999, 200_000, 300_000, 2**33, 2**33)
    at_max = counts(10, 11, 1, 1, 2, 2, 2, 3, 85_899, 85_900)
    assert exceeds(at_max, numel).tolist() == [False, True, False, False, True, True, False, False, False, True]


def test_one_rank_halves_down_to_a_quarter():
    mu = torch.ones(1, dtype=torch.float64)
    for want in (0.5, 0.25, 0.25):
        mu = next_mu(mu, torch.tensor([True]), ranks=1)
        assert mu.item() == want


def test_a_saved_mu_goes_on_where_it_was():
    a, b = AutoScale([MILLION, 8], 2), AutoScale([MILLION, 8], 2)
    valid, none = torch.tensor([True, True]), counts(0, 0)
    a.update(counts(500, 1), none, valid)
    state = a.state_dict()
    a.update(none, none, valid)
    b.load_state_dict(state)
    b.update(none, none, valid)
    assert a.mu.equal(b.mu)
    assert state["mu"].equal(torch.tensor([0.5, 4.0**0.001], dtype=torch.float64))


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="'double' is unknown; choose one of halve, paper"):
        AutoScale([1], 1, "double")
    with pytest.raises(ValueError, match="'double' is unknown; choose one of halve, paper"):
        next_mu(torch.ones(1), torch.tensor([False]), 1, "double")
    three = AutoScale([1, 2, 3], 1)
    with pytest.raises(ValueError, match=r"shape \(2,\), this model needs \(3,\)"):
        three.load_state_dict(AutoScale([1, 2], 1).state_dict())
    assert three.mu.eq(1).all()
