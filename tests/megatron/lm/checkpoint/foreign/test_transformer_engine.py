"""The trainer starts from a checkpoint of megatron-core with Transformer Engine's layers, which a process without our code has written."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import megatron_checkpoints, tiny
from helpers.megatron_checkpoints import OF_LLAMA, SHAPE, UNTIED
from helpers.megatron_jobs import job
from megatron.lm.checkpoint.foreign.torch_dist import read_common
from megatron.lm.config import Config

pytestmark = pytest.mark.gpu

# FP32 with masters and moments; and FP8 with delayed scaling, whose scales and amax histories are in `_extra_state`.
WRITTEN: dict[str, dict[str, Any]] = {
    "gpt2": {"spec": "te", "positions": "learned_absolute"},
    "llama": {"spec": "te", "tied": False, **megatron_checkpoints.LLAMA},
    "fp8": {"spec": "te", "tied": False, "dtype": "bfloat16", "fp8": "hybrid", **megatron_checkpoints.LLAMA},
}
OURS = {"gpt2": SHAPE | {"position_embedding_type": "learned_absolute"}, "llama": OF_LLAMA | UNTIED, "fp8": OF_LLAMA | UNTIED}
# Transformer Engine fuses a norm into the linear layer behind it.
NAMES = {"self_attention.linear_qkv.layer_norm_": "input_layernorm.", "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm."}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = importlib.util.find_spec("transformer_engine")
    if found is None or found.origin is None:
        pytest.skip("needs Transformer Engine")
    folder = tmp_path_factory.mktemp("written")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NVIDIA_TF32_OVERRIDE", "0")
        job("write", folder, WRITTEN, site=str(Path(found.origin).parents[1]))
    return folder


def settings(prefix: Path, folder: Path, case: str, **more: Any) -> Config:
    lengths = {"micro_batch_size": 4, "global_batch_size": 4, "train_iters": 12}
    return tiny.config(prefix, **lengths | OURS[case] | {"load": f"{folder}/{case}", "precision": "fp32", "cuda_graph": "none"} | more)


def held(folder: Path, case: str) -> Mapping[str, Tensor]:
    """What the process that wrote the checkpoint held, under our names."""
    found = torch.load(folder / case / "write_0.pt")["held"]
    for theirs, ours in NAMES.items():
        found = {key.replace(theirs, ours): x for key, x in found.items()}
    return found  # type: ignore[no-any-return]


@pytest.mark.parametrize("case", WRITTEN)
def test_every_weight_arrives_bit_for_bit(written: Path, prefix: Path, case: str):
    assert any("_extra_state" in key for key in (written / case / "iter_0000010" / ".metadata").read_bytes().decode("latin1").split("\n"))
    assert read_common(written / case / "iter_0000010")["iteration"] == 10
    precision = "bf16" if case == "fp8" else "fp32"  # of a checkpoint with masters, an FP32 run takes these
    with tiny.trainer(settings(prefix, written, case, finetune=True, precision=precision)) as made:
        ours = {f"model/{name}": p.detach().cpu() for name, p in made.training.model.named_parameters()}
    theirs = {key: x for key, x in held(written, case).items() if key.startswith("model/")}
    assert ours.keys() == theirs.keys()
    for key, x in ours.items():
        assert torch.equal(x, theirs[key]), key


@pytest.mark.parametrize("case", ["gpt2", "llama"])
def test_logits_are_transformer_engines(written: Path, prefix: Path, case: str):
    text = megatron_checkpoints.tokens().cuda()
    with tiny.trainer(settings(prefix, written, case, finetune=True)) as made, torch.no_grad():
        found = made.training.model(text, torch.arange(16, device="cuda").repeat(2, 1), None).float().cpu()
    expected = megatron_checkpoints.logits(written, case)
    assert expected.abs().amax() > 0.01
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("case", "precision"), [("llama", "fp32"), ("fp8", "O2"), ("fp8", "O3")])
def test_a_run_resumes_with_masters_and_moments(written: Path, prefix: Path, case: str, precision: str):
    expected = held(written, case)
    with tiny.trainer(settings(prefix, written, case, precision=precision)) as made:
        training = made.training
        assert training.iteration == 10
        names = {p: name for name, p in training.model.named_parameters()}
        states = [(names[holding.param], training.optimizer.state[holding.weight]) for holding in training.optimizer.holdings()]
        assert len(states) == len(names)
        for name, state in states:
            for key in ("exp_avg", "exp_avg_sq"):
                kept = state[key].dequantize() if hasattr(state[key], "dequantize") else state[key]
                error = (kept.float().cpu() - expected[f"{key}/{name}"]).abs().amax() / expected[f"{key}/{name}"].abs().amax()
                assert error <= (0 if precision == "fp32" else 2.0**-4), (name, key)
        made.run()
        assert training.iteration == 12
