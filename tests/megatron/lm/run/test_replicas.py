"""Runs whose copies of the weights are compared now and then."""

from pathlib import Path

import pytest
import torch

from helpers import dist, tiny
from megatron.lm.errors import RunStopped
from msamp.numerics.tensor import ScalingTensor


def damaged(prefix: Path, folder: str, interval: int | None) -> tuple[int, str]:
    """A run that compares before its saves, and by `interval`; rank 1 flips a bit of a weight after iteration 3. Where it ends, and why."""
    settings = tiny.config(
        prefix,
        opt_level="O2",
        train_iters=5,
        check_weight_hash_across_dp_replicas_interval=interval,
        save=folder,
        save_interval=5 if interval else 2,
    )
    with tiny.trainer(settings) as made:
        training, watch = made.training, made.step_watch
        look = watch.look

        def flip(result, iteration, now):
            if iteration == 3 and torch.distributed.get_rank() == 1:
                p = training.model.decoder.layers[1].self_attention.linear_proj.weight
                assert isinstance(p, ScalingTensor)
                p.payload.view(torch.uint8)[0, 0] ^= 1
            return look(result, iteration, now)

        watch.look = flip
        try:
            made.run()
        except RunStopped as stopped:
            return training.iteration, str(stopped)
        return training.iteration, ""


@pytest.mark.promise("Checkpoints", "Copies of the weights that differ between ranks stop a run before it saves them.")
@pytest.mark.parametrize("interval", [None, pytest.param(2, marks=pytest.mark.nightly(3))])
def test_a_flipped_bit_of_one_rank_stops_all_and_nothing_is_saved_after_it(prefix: Path, tmp_path: Path, interval: int | None):
    ends = dist.run(damaged, 2, prefix, str(tmp_path), interval)
    named = (
        "damaged after iteration 4: decoder.layers.1.self_attention.linear_proj.weight differs between rank 0 and rank 1. No checkpoint was"
    )
    assert [(iteration, named in why) for iteration, why in ends] == [(4, True), (4, True)]
    saved = sorted(path.name for path in tmp_path.glob("iter_*"))
    assert saved == ([] if interval else ["iter_0000002"])
