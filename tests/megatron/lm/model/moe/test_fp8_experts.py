"""The trainer's experts in FP8: from which weights they start, and in which layers they are."""

from typing import Any

import pytest
import torch

from helpers import tiny
from megatron.lm.build import build_training
from megatron.lm.model.moe.layer import TrainedMatrices
from megatron.lm.processes import process_groups
from megatron.lm.step import train_step
from msamp.numerics.tensor import fp32_values

pytestmark = pytest.mark.usefixtures("one_process")
EXPERTS: dict[str, Any] = {"num_experts": 4, "moe_ffn_hidden_size": 24, "swiglu": True, "disable_bias_linear": True}


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_masters_start_from_the_weights_before_rounding(level: str):
    made = build_training(tiny.config("corpus", **EXPERTS, opt_level=level), tiny.VOCABULARY)
    plain = build_training(tiny.config("corpus", **EXPERTS, opt_level="O0"), tiny.VOCABULARY)
    experts, wanted = (training.model.decoder.layers[1].mlp.experts for training in (made, plain))
    for name in experts.weight_names:
        matrices = getattr(experts, name)
        assert isinstance(matrices, TrainedMatrices)
        for p, values in zip(matrices.matrices, getattr(wanted, name), strict=True):
            assert p.sequence_parallel is False
            master = made.optimizer.state[p]["master"] if level == "O3" else p
            steps = (fp32_values(master) - values.detach().float()).abs() / values.detach().float().abs()
            assert steps.max() < 2**-10  # scaled FP16
        assert matrices.take_initial_weights() == []


RECOMPUTED: dict[str, dict[str, Any]] = {
    "FC1": {"recompute_granularity": "selective", "recompute_modules": ("mlp",)},
    "whole": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


@pytest.mark.parametrize("level", ["O1", "O3"])
@pytest.mark.parametrize("shared", [None, 16])
def test_recomputed_layers_change_no_bit_and_count_each_token_once(level: str, shared: int | None):
    settings = {**EXPERTS, "opt_level": level, "num_layers": 1, "micro_batch_size": 2, "global_batch_size": 4, "moe_aux_loss_coeff": 0.1}
    settings["moe_shared_expert_intermediate_size"] = shared

    def trained(how: dict[str, Any]) -> tuple[list[torch.Tensor], dict[str, float], list[tuple[bool, bool]]]:
        config = tiny.config("corpus", **settings, **how)
        process_groups.seed_all(config.training.seed)
        made, stream = build_training(config, tiny.VOCABULARY), tiny.micro_batches(config)
        for _ in range(2):
            train_step(made, stream)
        kinds = [(layer.recompute_mlp, layer.mlp.experts.recompute_fc1) for layer in made.model.decoder.layers]
        return tiny.bits([*made.model.parameters(), *made.model.buffers()]), made.experts.values(), kinds

    bits, load, kinds = trained({})
    assert kinds == [(False, False)]
    for name, how in RECOMPUTED.items():
        again, counted, kinds = trained(how)
        assert kinds == [(False, False) if name == "whole" else (shared is not None, shared is None)]
        assert tiny.same(bits, again), name
        assert counted == load
