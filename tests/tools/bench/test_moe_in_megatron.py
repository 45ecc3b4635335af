import itertools

import pytest
import torch

from tools.bench import bench_moe_baselines as bench
from tools.bench.moe_in_megatron import MegatronTrainer, started

WORK = bench.Work(micro_batch=2, micro_batches=2, seq_length=16)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "num_experts": 8}


def test_it_learns_with_fp32_masters():
    batches = list(itertools.islice(bench.token_rows(None, 64, WORK, DEVICE), 2))
    with started():
        trainer = MegatronTrainer(bench.olmoe(2, num_experts_per_tok=2, **SHAPE), DEVICE, lr=1e-2)
        losses = [trainer.step(batches).item() for _ in range(8)]
        weights = dict(trainer.model.named_parameters())
        masters = trainer.optimizer.state_dict()["fp32_from_fp16_params"]
        count = sum(p.numel() for p in weights.values())
    assert losses[0] == pytest.approx(4.16, rel=0.02)
    assert losses[-1] < losses[0] - 0.3
    assert all(p.dtype is torch.bfloat16 and p.main_grad.dtype is torch.float32 for p in weights.values())
    assert sum(x.numel() for group in masters for x in group) == count
    experts = 2 * 8 * 3 * 32 * 16  # layers, experts, matrices
    assert count == experts + 2 * (4 * 32 * 32 + 2 * 32 + 8 * 32) + 2 * 64 * 32 + 32
