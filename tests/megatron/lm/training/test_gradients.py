"""How the flags reach the gradient synchroniser, whose work is tests/msamp/comm's; a rank's chunks; bytes between pipeline stages."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers import tiny
from megatron.lm.config.sections.precision import build_recipe
from megatron.lm.model.gpt import GPT, build_model
from megatron.lm.training.gradients import count_pipeline_traffic
from msamp.comm.counters import WireBytes
from msamp.comm.grad_sync import GradSync
from msamp.numerics.formats import BF16, E4M3, E5M2, FP32, Format
from msamp.numerics.tensor import ScalingTensor

pytestmark = pytest.mark.usefixtures("one_process")


def build(**settings: Any) -> tuple[GPT, GradSync]:
    config = tiny.config("corpus", **settings)
    recipe = build_recipe(config.precision)
    model = build_model(*tiny.parts(config), recipe, tiny.VOCABULARY)
    return model, tiny.synchronizer(model, config, recipe)


@pytest.mark.parametrize(
    ("flags", "linear", "other"),
    [
        ({"precision": "fp32"}, FP32, FP32),
        ({"opt_level": "O0"}, FP32, FP32),
        ({"opt_level": "O1"}, E4M3, BF16),
        ({"opt_level": "O2"}, E4M3, BF16),
        ({"opt_level": "O2", "grad_format": "fp8-e5m2"}, E5M2, BF16),
        ({"opt_level": "O2", "grad_format": "bf16"}, BF16, BF16),
        ({"opt_level": "O3"}, E4M3, BF16),
        ({"precision": "coat"}, BF16, BF16),
    ],
    ids=str,
)
def test_formats_of_the_gradients(flags: dict[str, Any], linear: Format, other: Format):
    model, sync = build(**flags)
    for name, p in model.named_parameters():
        matrix = linear if isinstance(p, ScalingTensor) else other
        assert sync.bucket_of(p).format is (matrix if p.dim() > 1 else FP32), name


def test_all_micro_batches_but_the_last_stay_on_the_rank():
    """megatron-core's schedule asks the model for the context in which nothing is sent."""
    model, sync = build(opt_level="O2", ddp_bucket_size=1)
    p = model.decoder.layers[0].mlp.linear_fc1.weight
    with model.config.no_sync_func():
        p.grad = torch.ones_like(p, dtype=torch.bfloat16)
        sync.take(p)
    assert not sync.bucket_of(p).sent
    assert p.grad is None
    sync.finish()
    assert torch.equal(p.main_grad.dequantize(torch.float32), torch.ones(p.shape, device=p.device))


# Bytes between pipeline stages

PP = {"pipeline_model_parallel_size": 2, "num_layers": 4, "num_attention_heads": 4, "micro_batch_size": 2, "global_batch_size": 8}
VPP = {"num_layers_per_virtual_pipeline_stage": 1}
SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
BF16_BYTES = 16 * 2 * 32 * 2  # sequence x micro-batch x hidden size x 2 bytes
FIRST, MIDDLE, LAST = (True, False), (False, False), (False, True)


@pytest.mark.parametrize(
    ("flags", "dtype", "parts", "transfers"),
    [
        (PP, torch.bfloat16, [FIRST], 4),
        (PP, torch.bfloat16, [LAST], 4),
        (PP, torch.bfloat16, [MIDDLE], 8),
        (PP | VPP, torch.bfloat16, [FIRST, MIDDLE], 12),
        (PP | VPP, torch.bfloat16, [MIDDLE, LAST], 12),
        (PP | SP, torch.bfloat16, [FIRST], 2),  # of half the sequence each
        (PP | {"tensor_model_parallel_size": 2}, torch.bfloat16, [FIRST], 4),
        (PP, torch.float32, [FIRST], 8),  # of twice the bytes
    ],
)
def test_pipeline_traffic_by_hand(flags: dict[str, Any], dtype: torch.dtype, parts: list[tuple[bool, bool]], transfers: int):
    """4 micro-batches: each activation onward but from the last chunk, each gradient back but from the first."""
    core = SimpleNamespace(pipeline_dtype=dtype)
    held: Any = [SimpleNamespace(pre_process=first, post_process=last, config=core) for first, last in parts]
    sent = WireBytes()
    settings = tiny.config("corpus", **flags)
    hidden = (settings.parallel.rows(settings.model.seq_length), settings.training.micro_batch_size, settings.model.hidden_size)
    count_pipeline_traffic(sent, hidden, held, 4)
    assert sent.rows() == {("activation", "pipeline send"): transfers * BF16_BYTES}
