"""The schedule of a resume: the saved one, or a refusal that names what differs."""

import pytest

from helpers import tiny
from megatron.lm.config.saved_schedule import differing_schedule, take_schedule

DIFFER = [
    ({"train_iters": 20}, ["--lr-decay-iters 20 (saved: 10)"]),
    ({"lr": 1e-2, "weight_decay": 0.2}, ["--lr 0.01 (saved: 0.005)", "--weight-decay 0.2 (saved: 0.1)"]),
    ({"lr_warmup_fraction": 0.5, "lr_warmup_iters": 0}, ["--lr-warmup-iters 5.0 (saved: 2)"]),
    ({"lr_decay_style": "WSD", "lr_wsd_decay_iters": 4}, ["--lr-decay-style WSD (saved: cosine)", "--lr-wsd-decay-iters 4 (saved: None)"]),
    ({"decoupled_lr": 1e-3}, ["--decoupled-lr 0.001 (saved: None)"]),
    ({"train_samples": 40, "lr_warmup_samples": 8}, ["--lr-decay-samples 40 (saved: None)", "--lr-decay-iters None (saved: 10)"]),
]


@pytest.mark.parametrize(("change", "named"), DIFFER)
def test_another_schedule_is_named_with_both_values(change, named):
    saved = tiny.config("corpus")
    differing = differing_schedule(tiny.config("corpus", **change), saved)
    assert all(any(text.startswith(name) for text in differing) for name in named), differing
    assert "--override-opt-param-scheduler" in differing[-1]
    assert differing_schedule(tiny.config("corpus", **change, override_opt_param_scheduler=True), saved) == []


def test_the_same_schedule_by_other_flags_is_the_same():
    saved = tiny.config("corpus")
    assert differing_schedule(tiny.config("corpus", train_iters=20, lr_decay_iters=10), saved) == []
    constant = tiny.config("corpus", lr_decay_style="constant")
    assert differing_schedule(tiny.config("corpus", lr_decay_style="constant", train_iters=20), constant) == []


def test_the_checkpoint_s_schedule_takes_the_place_of_the_flags():
    saved = tiny.config("corpus", lr=1e-2, train_iters=12)
    now = tiny.config("corpus", train_iters=20, weight_decay=0.3, lr_warmup_iters=4, use_checkpoint_opt_param_scheduler=True)
    taken = take_schedule(now, (saved.optimizer, saved.training))
    assert differing_schedule(taken, saved) == []
    assert (taken.optimizer.lr, taken.schedule_steps.decay, taken.training.train_iters) == (1e-2, 12, 20)
    assert take_schedule(now, None) == now
    assert take_schedule(tiny.config("corpus", train_iters=20), (saved.optimizer, saved.training)).schedule_steps.decay == 20


def test_a_schedule_in_another_unit_is_not_taken():
    now = tiny.config("corpus", use_checkpoint_opt_param_scheduler=True)
    with pytest.raises(ValueError, match="schedule counts --train-samples, and this run's does not: give --train-samples, or"):
        take_schedule(now, (now.optimizer, tiny.config("corpus", train_samples=40).training))


@pytest.mark.parametrize(("broken", "told"), [({"lr": -1.0}, "--lr -1.0"), ({"min_lr": 1.0}, "--min-lr 1 is above --lr")])
def test_an_invalid_saved_schedule_is_not_taken(broken: dict[str, float], told: str):
    saved = tiny.config("corpus", **broken)
    with pytest.raises(ValueError, match=f"the checkpoint's schedule is invalid for this run: {told}"):
        take_schedule(tiny.config("corpus", use_checkpoint_opt_param_scheduler=True), (saved.optimizer, saved.training))
