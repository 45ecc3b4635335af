"""Whose a checkpoint is: identity, parents, adoption; and that it survives being written."""

import json

from megatron.lm.training import identity
from megatron.lm.training.identity import Parent, Run


def of(run: Run, iteration: int = 4) -> dict:
    """What `checkpoint.json` of a checkpoint of this run says, as JSON gives it back."""
    return json.loads(json.dumps({"run": run.entry(), "iteration": iteration, "seal": "5ea1"}))


UNNAMED = {"iteration": 4, "seal": "5ea1"}


def test_each_run_has_an_identity_of_its_own_that_is_kept_in_checkpoints():
    mine = Run()
    assert mine.id != Run().id
    assert identity.of(of(mine)) == mine
    assert mine.holds(of(mine))
    assert not Run().holds(of(mine))


def test_a_run_that_resumes_is_the_same_one():
    mine = Run().child_of(of(Run()), finetune=False)
    assert Run().resumed(of(mine)) == mine


def test_a_checkpoint_without_identity_is_adopted():
    mine = Run()
    assert not mine.holds(UNNAMED)
    adopted = mine.resumed(UNNAMED)
    assert adopted.id == mine.id
    assert adopted.holds(UNNAMED)
    assert identity.of(of(adopted)) == adopted


def test_a_child_names_its_parent():
    parent = Run()
    child = Run().child_of(of(parent, 6), finetune=True)
    assert child.parent == Parent(parent.id, 6, True)
    assert not child.holds(of(parent))
    assert identity.of(of(child)) == child
    assert Run().child_of(UNNAMED, finetune=False).parent == Parent("5ea1", 4, False)
