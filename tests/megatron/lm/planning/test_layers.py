"""The layers of a stage, and the two kinds of a model that keeps its ends in BF16."""

import pytest

from helpers import tiny
from megatron.lm.config import LINEARS
from megatron.lm.config.cli import parse_args
from megatron.lm.config.presets import PRESETS, parameter_count
from megatron.lm.planning import wire
from megatron.lm.planning.layers import counted, of_layers, stage_chunks, stage_layers, stage_parameters, vocabulary

ENDS = {"opt_level": "O2", "num_layers": 8, "first_last_layers_bf16": True, "num_layers_at_end_in_bf16": 3}


def test_a_stage_has_its_chunks_in_turn():
    config = tiny.config("unread", num_layers=8, pipeline_model_parallel_size=2)
    assert [stage_layers(config, stage) for stage in (0, 1)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    config = tiny.config("unread", num_layers=8, pipeline_model_parallel_size=2, num_layers_per_virtual_pipeline_stage=2)
    assert stage_chunks(config, 1) == [range(2, 4), range(6, 8)]


def test_each_layer_has_the_configuration_of_its_kind():
    config = tiny.config("unread", **ENDS)
    kinds = of_layers(config, range(8))
    assert [kind.precision.bf16_linears for kind in kinds] == [LINEARS, None, None, None, None, LINEARS, LINEARS, LINEARS]
    assert [kind.fuses_layers for kind in kinds] == [False, *[True] * 4, *[False] * 3]
    assert sorted(count for _, count in counted(kinds)) == [4, 4]
    plain = tiny.config("unread", opt_level="O2")
    assert counted(of_layers(plain, range(2))) == [(plain, 2)]


def test_layers_in_bf16_send_bf16():
    grid = ENDS | {"opt_level": "O3", "tensor_model_parallel_size": 2, "sequence_parallel": True}
    mixed = wire.tensor_parallel(tiny.config("unread", **grid), 0)["input gather"]
    plain = wire.tensor_parallel(tiny.config("unread", **grid | {"first_last_layers_bf16": False}), 0)["input gather"]
    assert mixed.calls == plain.calls
    assert mixed.size == pytest.approx(1.5 * plain.size)


@pytest.mark.parametrize("size", PRESETS)
def test_the_ranks_of_a_grid_hold_the_model_and_copies_of_what_is_not_split(size):
    config = parse_args(["--preset", size])
    model, tp, pp = config.model, config.parallel.tensor_model_parallel_size, config.parallel.pipeline_model_parallel_size
    held = tp * sum(p.size for stage in range(pp) for p in stage_parameters(config, stage))
    vectors = 1 if model.normalization == "RMSNorm" else 2
    norms = ((2 * model.num_layers + 1) * model.hidden_size + 2 * model.qk_layernorm * model.num_layers * model.head_size) * vectors
    row_biases = 0 if model.disable_bias_linear else model.num_layers * 2 * model.hidden_size
    tied_copy = vocabulary(config) * model.hidden_size if pp > 1 and not model.untie_embeddings_and_output_weights else 0
    assert held == parameter_count(model, vocabulary(config)) + (tp - 1) * (norms + row_biases) + tied_copy
