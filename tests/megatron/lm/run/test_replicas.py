"""Runs whose copies of the weights are compared now and then."""

from pathlib import Path

import pytest
import torch

from helpers import dist, tiny
from megatron.lm.errors import RunStopped
from megatron.lm.run.replicas import check_replicas
from msamp.numerics.tensor import ScalingTensor


def damaged(prefix: Path, folder: str) -> tuple[int, str]:
    """A run that compares after every second iteration; rank 1 flips a bit of a weight after iteration 3. Where it ends, and why."""
    settings = tiny.config(
        prefix, opt_level="O2", train_iters=5, check_weight_hash_across_dp_replicas_interval=2, save=folder, save_interval=1
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


@pytest.mark.nightly(3)
def test_a_flipped_bit_of_one_rank_stops_all_and_nothing_is_saved_after_it(prefix: Path, tmp_path: Path):
    ends = dist.run(damaged, 2, prefix, str(tmp_path))
    named = "damaged after iteration 4: decoder.layers.1.self_attention.linear_proj.weight differs between rank 0 and rank 1. Nothing was"
    assert [(iteration, named in why) for iteration, why in ends] == [(4, True), (4, True)]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "3"


def test_one_process_looks_for_weights_that_are_not_finite(prefix: Path):
    with tiny.trainer(tiny.config(prefix, opt_level="O2", train_iters=1)) as made:
        check_replicas(made.training, 1)
        weight = made.training.model.embedding.word_embeddings.weight
        with torch.no_grad():
            weight[3, 3] = float("inf")
        message = r"damaged after iteration 7: embedding\.word_embeddings\.weight holds NaN or infinity on rank 0\. Nothing was saved"
        with pytest.raises(RunStopped, match=message):
            check_replicas(made.training, 7)
