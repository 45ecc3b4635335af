import argparse

import pytest
from megatron.core import parallel_state

from helpers import dist
from megatron.lm.build import build_training
from megatron.lm.processes import process_groups
from megatron.lm.step import train_step
from tools.bench import bench_grid, bench_step
from tools.reproduce import table7
from tools.reproduce.entry import paper

LAYERS, HIDDEN, SEQUENCE, MICRO_BATCH, MICRO_BATCHES = 3, 48, 20, 2, 2
TINY = f"--seq-length {SEQUENCE} --num-layers {LAYERS} --hidden-size {HIDDEN} --num-attention-heads 2 --lr-warmup-iters 1"
GATHERED = "--tp-saved-input gathered"
CASES = {
    "O0": table7.scheme("O0"),
    "O1": table7.scheme("O1"),
    "O3": table7.scheme("O3"),
    "O3 --tp-wire fp8": table7.scheme("O3", tp_wire="fp8"),
    f"O3 {GATHERED}": table7.scheme("O3", saved_input="gathered"),
}


def sent_in_a_step() -> list[dict[str, int]]:
    """By case: bytes that this rank sent in one step, by role."""
    found = []
    options = argparse.Namespace(preset="125m", micro_batch_size=MICRO_BATCH, micro_batches=MICRO_BATCHES, flags=TINY)
    for case in CASES:
        config = bench_grid.configuration(f"{case} --tensor-model-parallel-size 2 --sequence-parallel", options, 2)
        process_groups.initialize(config)
        training = build_training(config, 64)
        train_step(training, bench_step.random_batches(config, 64, process_groups.device()))
        sent = dict.fromkeys(bench_grid.ACTIVATIONS, 0)
        for (kind, collective), size in training.grad_sync.sent.rows().items():
            if kind == "activation":
                sent[bench_grid.role(collective)] += size
        found.append(sent)
        parallel_state.destroy_model_parallel()
    return found


@pytest.mark.nightly
def test_what_is_computed_is_counted_to_the_byte():
    for rank in dist.run(sent_in_a_step, 2):
        for sent, wire in zip(rank, CASES.values(), strict=True):
            scope, everything = table7.volume(LAYERS, HIDDEN, SEQUENCE * MICRO_BATCH, 2, wire)
            assert sum(sent[name] for name in bench_grid.TABLE7) == scope * MICRO_BATCHES
            assert sum(sent[name] for name in (*bench_grid.TABLE7, "output", "grad_output")) == everything * MICRO_BATCHES
            assert [sent[name] > 0 for name in ("input_gather_again", "head", "pipeline")] == [wire.input_again > 0, True, False]


def test_a_small_volume_by_hand():
    assert table7.volume(1, 4, 6, 3, table7.Scheme(1, 2, 4, 8, 16)) == (2 * (2 * 2 * 4) * 7, 2 * (2 * 2 * 4) * 31)
    assert table7.volume(1, 4, 6, 3, table7.Scheme(1, 1, 2, None, 1)) == (2 * (2 * 2 * 4) * 4, None)


@pytest.mark.parametrize("model", ["13b", "175b"])
def test_the_papers_volumes_come_out_to_the_digits_it_prints(model):
    for case, gb in paper("fp8lm.table7")[model].items():
        assert table7.of_model(model)[case] / 2**30 == pytest.approx(gb, abs=0.05)
