import math

import pytest

from megatron.lm.config import ModelConfig
from megatron.lm.config.presets import PRESETS, parameter_count
from msamp.comm.partition import Piece
from tools.reproduce import table8


@pytest.mark.parametrize("model", table8.DATA_PARALLEL)
def test_the_shapes_are_those_of_the_trainers_model(model):
    size = PRESETS[model]
    layers, hidden, heads = size["num_layers"], size["hidden_size"], size["num_attention_heads"]
    config = ModelConfig(num_layers=layers, hidden_size=hidden, num_attention_heads=heads, seq_length=2048)
    shapes, _ = table8.stage_tensors(layers, hidden, 1)
    assert sum(map(math.prod, shapes)) == parameter_count(config, table8.VOCABULARY)


def test_tensor_parallelism_shares_weights_and_repeats_norms_and_row_biases():
    whole, shared = (table8.stage_tensors(1, 64, tp, embedding=False, final_norm=False) for tp in (1, 4))
    linear = 12 * 64 * 64
    assert sum(math.prod(s) for s, kind in zip(*whole, strict=True) if kind == "linear") == linear
    assert sum(math.prod(s) for s, kind in zip(*shared, strict=True) if kind == "linear") == linear // 4
    assert sum(math.prod(s) for s, kind in zip(*shared, strict=True) if kind == "small") == (4 + 3) * 64 // 4 + 6 * 64
    embedding = table8.stage_tensors(1, 64, 4).shapes[-1]
    assert embedding == (50688 // 4, 64)  # 50,304 up to a multiple of 128 x 4


def test_bytes_of_a_small_case_by_hand():
    tensors = table8.Tensors([(8, 4), (10, 2), (3,)], ["linear", "embedding", "small"])
    pieces = [Piece(0, 0, 5, 0), Piece(0, 5, 3, 1), Piece(1, 0, 10, 1), Piece(2, 0, 3, 0)]
    replicated = 32 * 1 + 20 * 2 + 3 * 2
    assert table8.rank_bytes(tensors, pieces, 3) == [replicated + 20 * 6 + 3 * 16, replicated + 12 * 6 + 20 * 7, replicated]
    assert table8.divide(tensors, 2, "zero-bf16") == ([55 * 6 + 28 * 12] * 2, 0.0, 2)
    assert sum(table8.divide(tensors, 2, "greedy-cut")[0]) == 2 * replicated + 32 * 6 + 20 * 7 + 3 * 16


def test_every_method_counts_the_same_bytes_over_all_ranks():
    tensors = table8.stage_tensors(2, 128, 1)
    whole, cut = (table8.divide(tensors, 8, method) for method in ("greedy-whole", "greedy-cut"))
    assert sum(whole[0]) == sum(cut[0])
    assert max(cut[0]) < max(whole[0])
    assert cut[1] <= 0.05 < whole[1]
