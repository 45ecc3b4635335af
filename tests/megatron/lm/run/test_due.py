"""What is due after a step."""

import pytest

from helpers import tiny
from megatron.lm.run.due import Due

NOTHING = Due(iteration=7, last=False, evaluation=False, save=False, save_non_persistent=False, leave=False, comparison=False)


@pytest.mark.parametrize(
    ("settings", "changed", "judged"),
    [
        ({"eval_interval": 2}, {}, False),
        ({"train_iters": 7, "eval_interval": 2}, {"last": True}, True),
        ({"eval_interval": 7}, {"evaluation": True}, True),
        ({"save": "there", "save_interval": 7}, {"save": True}, True),
        ({"save": "there", "non_persistent_save_interval": 7}, {"save_non_persistent": True}, True),
        ({"save": "there", "save_interval": 7, "non_persistent_save_interval": 1}, {"save": True}, True),
        ({"exit_interval": 7}, {"leave": True}, True),
        ({"check_weight_hash_across_dp_replicas_interval": 7}, {"comparison": True}, False),
    ],
    ids=["nothing", "the end", "evaluation", "save", "non-persistent save", "one save of both", "exit", "comparison of weights"],
)
def test_each_interval_makes_its_own_due(settings: dict, changed: dict, judged: bool):
    config = tiny.config("unread", **{"train_iters": 8, "eval_interval": 5, **settings})
    due = Due.after(7, config, config.iterations(1))
    assert due == NOTHING._replace(**changed)
    assert due.verdict is judged
