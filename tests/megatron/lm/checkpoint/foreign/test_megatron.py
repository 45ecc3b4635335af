"""The trainer starts from checkpoints of plain megatron-core: the same logits, the states quantized, and a place in the run."""

import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

from helpers import dist, megatron_checkpoints, tiny
from helpers.megatron_checkpoints import SETTINGS
from megatron.lm.checkpoint.files.storage import Item
from megatron.lm.checkpoint.foreign.megatron import _loss_scale, read_megatron, schedule
from megatron.lm.checkpoint.foreign.pickled import plain_of_zip
from megatron.lm.checkpoint.foreign.torch_dist import read_common
from megatron.lm.checkpoint.foreign.write_torch_dist import write
from megatron.lm.checkpoint.place import places
from megatron.lm.config import Config
from megatron.lm.run.trainer import Trainer

LOGITS = 1e-5  # largest difference from megatron-core's own forward in FP32
DEFAULTS: dict[str, Any] = {
    "vocab_size": 60,
    "tokenizer_type": "NullTokenizer",
    "micro_batch_size": 4,
    "global_batch_size": 4,
    "train_iters": 12,
}


def settings(prefix: Path | str, folder: Path | str, case: str, **more: Any) -> Config:
    return tiny.config(prefix, **DEFAULTS | SETTINGS[case] | {"load": f"{folder}/{case}", "precision": "fp32"} | more)


def logits(made: Trainer) -> torch.Tensor:
    text = megatron_checkpoints.tokens()
    with torch.no_grad():
        found = made.training.model(text, torch.arange(16).repeat(2, 1), None)
        return gather_from_tensor_model_parallel_region(found.float())


def on_two(prefix: str, folder: str, cases: list[str]) -> list[torch.Tensor]:
    """The logits of checkpoints that a grid of TP 2 has loaded."""
    found = []
    for case in cases:
        with tiny.trainer(
            settings(prefix, folder, case, finetune=True, tensor_model_parallel_size=2, make_vocab_size_divisible_by=16)
        ) as made:
            found.append(logits(made))
    return found


@pytest.mark.promise(
    "Checkpoints of Megatron-LM", "FP32 logits after `--load` are within 1e-5 of those of the process that wrote the checkpoint."
)
@pytest.mark.parametrize("case", ["gpt2", "llama", "tied", "squared", "stretched"])
def test_logits_are_megatron_cores(written: Path, prefix: Path, case: str):
    with tiny.trainer(settings(prefix, written, case, finetune=True)) as made:
        found = logits(made)
        assert made.training.iteration == 0
    expected = megatron_checkpoints.logits(written, case)
    assert expected.abs().amax() > 0.01
    torch.testing.assert_close(found, expected, rtol=0, atol=LOGITS)


def test_logits_on_a_grid_of_two_are_megatron_cores(written: Path, prefix: Path):
    cases = ["gpt2", "llama", "tied"]  # written at TP 1, 2, 2
    for case, found in zip(cases, dist.run(on_two, 2, str(prefix), str(written), cases)[0], strict=True):
        torch.testing.assert_close(found, megatron_checkpoints.logits(written, case), rtol=0, atol=LOGITS)


@pytest.mark.parametrize(("case", "precision"), [("bf16", "O2"), ("bf16", "O3"), ("stages", "bf16"), ("llama", "fp32")])
def test_a_run_resumes_with_masters_and_moments_in_its_own_formats(written: Path, prefix: Path, case: str, precision: str):
    expected = megatron_checkpoints.whole(written, case)
    with tiny.trainer(settings(prefix, written, case, precision=precision)) as made:
        training = made.training
        assert (training.iteration, training.consumed_samples, training.schedule.num_steps) == (10, 40, 10)
        names = {p: name for name, p in training.model.named_parameters()}
        states = [(names[holding.param], training.optimizer.state[holding.weight]) for holding in training.optimizer.holdings()]
        assert len(states) == len(names)
        for name, state in states:
            assert state["step"].item() == 3
            for key, bits in (("exp_avg", 3), ("exp_avg_sq", 3)):
                kept = state[key].dequantize() if hasattr(state[key], "dequantize") else state[key]
                error = (kept.float() - expected[f"{key}/{name}"]).abs().amax() / expected[f"{key}/{name}"].abs().amax()
                assert error <= (0 if precision == "fp32" else 2.0 ** -(bits + 1)), (name, key)
        made.run()  # 2 more steps
        assert training.iteration == 12


SCHEDULE = {"lr": 1e-2, "min_lr": 0.0, "lr_decay_style": "cosine", "override_opt_param_scheduler": False}
IN_ITERATIONS = {"lr_warmup_iters": 2, "lr_decay_iters": 20}
IN_SAMPLES = {"train_iters": None, "train_samples": 48, "lr_warmup_samples": 8, "lr_decay_samples": 80}


@pytest.mark.parametrize(("length", "steps"), [(IN_ITERATIONS, 10), (IN_SAMPLES, 40)], ids=["iterations", "samples"])
def test_the_schedule_of_the_checkpoint_is_that_of_the_run_or_refused(written: Path, prefix: Path, length: dict[str, Any], steps: int):
    with tiny.trainer(settings(prefix, written, "llama", **SCHEDULE, **length)) as made:
        assert made.training.schedule.num_steps == steps
        lr = made.training.optimizer.param_groups[0]["lr"]
    said = refused(settings(prefix, written, "llama", **SCHEDULE | {"lr": 1e-3} | length))
    assert "--lr 0.001 (saved: 0.01) (or give --override-opt-param-scheduler" in said
    others = {"lr": 1.0, "min_lr": 0.0, "override_opt_param_scheduler": False, "use_checkpoint_opt_param_scheduler": True}
    others |= {name: value for name, value in length.items() if name.startswith("train")}
    with tiny.trainer(settings(prefix, written, "llama", **others)) as made:
        assert made.training.optimizer.param_groups[0]["lr"] == lr == pytest.approx(5e-3 * (1 + math.cos(math.pi * 32 / 72)))


@pytest.mark.parametrize(
    "record",
    [
        {"opt_param_scheduler": {"max_lr": "high"}},
        {"opt_param_scheduler": {"lr_warmup_steps": [1], "lr_decay_steps": 80}},
        {"opt_param_scheduler": {"lr_warmup_steps": 1, "lr_decay_steps": -80}},
        {"args": {"rampup_batch_size": 4}},
        {"args": {"lr_wsd_decay_iters": "two"}},
    ],
)
def test_an_impossible_schedule_is_named(tmp_path: Path, record: dict[str, Any]):
    run = settings("corpus", tmp_path, "llama")
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path} has an invalid schedule")):
        schedule(tmp_path, {"iteration": 10} | record, run.optimizer, run.training)


def refused(config: Config) -> str:
    with pytest.raises(ValueError, match=r"checkpoint|weights|dp_reshardable") as caught, tiny.trainer(config) as made:
        made.run()
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def test_moments_of_dp_reshardable_are_refused_with_the_fix_and_its_weights_are_taken(written: Path, prefix: Path):
    said = refused(settings(prefix, written, "dp_reshardable"))
    for told in ("dp_reshardable", "--dist-ckpt-optim-fully-reshardable", "--no-load-optim"):
        assert told in said
    with tiny.trainer(settings(prefix, written, "dp_reshardable", no_load_optim=True)) as made:
        assert made.training.iteration == 10


def test_another_activation_bias_or_stretch_is_named_and_a_stretch_is_free_with_finetune(written: Path, prefix: Path):
    said = refused(settings(prefix, written, "squared", finetune=True, squared_relu=False, add_qkv_bias=False))
    assert "--squared-relu False (saved: True)" in said
    assert "--add-qkv-bias False (saved: True)" in said
    other = {"use_rope_scaling": False, "rotary_seq_len_interpolation_factor": None}
    said = refused(settings(prefix, written, "stretched", **other))
    assert "--use-rope-scaling False (saved: True); --rotary-seq-len-interpolation-factor None (saved: 2)" in said
    with tiny.trainer(settings(prefix, written, "stretched", finetune=True, **other)) as made:
        assert made.training.iteration == 0


def test_names_of_transformer_engines_spec_with_layers_apart(written: Path, prefix: Path, tmp_path: Path):
    """Made by hand: the norm under the fused layer's name, a weight per layer, and `_extra_state` of FP8 layers beside them."""
    fused = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_", "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
    items = []
    for key, x in megatron_checkpoints.whole(written, "llama").items():
        prefix_of, _, name = key.partition("/")
        for ours, theirs in fused.items():
            name = name.replace(ours, theirs)
        items += [Item.whole(name, x)] if prefix_of == "model" else []
    assert {"decoder.layers.1.self_attention.linear_qkv.layer_norm_weight", "decoder.layers.0.mlp.linear_fc1.layer_norm_weight"} <= {
        item.key for item in items
    }
    linears = (
        "self_attention.linear_qkv",
        "self_attention.linear_proj",
        "mlp.linear_fc1",
        "mlp.linear_fc2",
        "self_attention.core_attention",
    )
    objects = [f"decoder.layers.{layer}.{linear}._extra_state/shard_0_1" for layer in range(2) for linear in linears]
    folder = tmp_path / "llama" / "iter_0000010"
    folder.mkdir(parents=True)
    write(folder, items, read_common(written / "llama" / "iter_0000010") | {"optimizer": None}, objects, None)
    (tmp_path / "llama" / "latest_checkpointed_iteration.txt").write_text("10")
    with tiny.trainer(settings(prefix, tmp_path, "llama", finetune=True)) as made:
        torch.testing.assert_close(logits(made), megatron_checkpoints.logits(written, "llama"), rtol=0, atol=LOGITS)


def flattened(key: str, x: torch.Tensor) -> list[Item]:
    """A state as the layout `fully_sharded_model_space` has it: two shards along the rows, each in two pieces of one data-parallel rank."""
    shards = list(x.chunk(2)) if x.shape[0] % 2 == 0 else [x]
    counts, length = (len(shards), *[1] * (x.dim() - 1)), shards[0].numel()
    found = []
    for number, shard in enumerate(shards):
        for part in (slice(0, length // 3), slice(length // 3, length)):
            data = shard.flatten()[part].view(*[1] * x.dim(), -1)
            found.append(Item(key, data, (*counts, length), (number, *[0] * (x.dim() - 1), part.start)))
    return found


def test_a_run_resumes_from_the_layout_of_former_versions(written: Path, prefix: Path, tmp_path: Path):
    """`fully_sharded_model_space`, which megatron-core 0.14 was the last to write."""
    expected = megatron_checkpoints.whole(written, "llama")
    kinds = {"master": "optimizer.state.fp32_param.", "exp_avg": "optimizer.state.exp_avg.", "exp_avg_sq": "optimizer.state.exp_avg_sq."}
    items = []
    for key, x in expected.items():
        kind, _, name = key.partition("/")
        items += [Item.whole(name, x)] if kind == "model" else flattened(kinds[kind] + name, x)
    folder = tmp_path / "llama" / "iter_0000010"
    folder.mkdir(parents=True)
    write(folder, items, read_common(written / "llama" / "iter_0000010"), (), None)
    (tmp_path / "llama" / "latest_checkpointed_iteration.txt").write_text("10")
    with tiny.trainer(settings(prefix, tmp_path, "llama")) as made:
        names = {p: name for name, p in made.training.model.named_parameters()}
        for holding in made.training.optimizer.holdings():
            state, name = made.training.optimizer.state[holding.weight], names[holding.param]
            for key in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(state[key], expected[f"{key}/{name}"]), (key, name)


def on_two_stages(prefix: str, folder: str) -> dict[str, torch.Tensor]:
    """What a grid of PP 2 holds after it has resumed, by the names of the whole model."""
    found = {}
    with tiny.trainer(settings(prefix, folder, "llama", pipeline_model_parallel_size=2)) as made:
        training = made.training
        where, names = places(training.model), {p: name for name, p in training.model.named_parameters()}
        for holding in training.optimizer.holdings():
            name = where[names[holding.param]][0].name
            found[f"model/{name}"] = holding.param.detach().clone()
            found |= {f"{key}/{name}": training.optimizer.state[holding.weight][key].clone() for key in ("exp_avg", "exp_avg_sq")}
        assert training.iteration == 10
    return found


def test_two_stages_resume_from_two_shards(written: Path, prefix: Path):
    parts = dist.run(on_two_stages, 2, str(prefix), str(written))
    expected = megatron_checkpoints.whole(written, "llama")
    assert {key for part in parts for key in part} == {key for key in expected if not key.startswith("master/")}
    for part in parts:
        for key, x in part.items():
            assert torch.equal(x, expected[key]), key


def test_a_release_gives_its_weights_alone(written: Path, prefix: Path, tmp_path: Path):
    shutil.copytree(written / "gpt2" / "iter_0000010", tmp_path / "gpt2" / "release")
    (tmp_path / "gpt2" / "latest_checkpointed_iteration.txt").write_text("release\n")
    with tiny.trainer(settings(prefix, tmp_path, "gpt2", finetune=True)) as made:
        torch.testing.assert_close(logits(made), megatron_checkpoints.logits(written, "gpt2"), rtol=0, atol=LOGITS)
    assert "has no iteration: load its weights with --finetune" in refused(settings(prefix, tmp_path, "gpt2"))


@pytest.mark.parametrize(
    "wrong",
    [{"iteration": -1}, {"iteration": "ten"}, {"args": {"consumed_train_samples": 2**70}}, {"opt_param_scheduler": [1]}],
    ids=str,
)
def test_an_impossible_count_is_refused_by_name(written: Path, prefix: Path, tmp_path: Path, wrong: dict[str, Any]):
    folder = tmp_path / "iter_0000010"
    shutil.copytree(written / "gpt2" / "iter_0000010", folder)
    torch.save({"iteration": 10} | wrong, folder / "common.pt")
    with pytest.raises(ValueError, match=r"has an invalid count .*; load an older checkpoint"):
        read_megatron(folder, 60, in_samples=False, finetune=False)


def test_the_loss_scale_of_fp16_is_taken(tmp_path: Path):
    scaler = {"scale": torch.tensor([4096.0]), "growth_tracker": 7, "hysteresis_tracker": 2}
    torch.save({"optimizer": {"grad_scaler": scaler}}, tmp_path / "common.pt")
    common = plain_of_zip((tmp_path / "common.pt").read_bytes())
    assert _loss_scale(common) == {"loss_scale": 4096.0, "unskipped": 7, "overflows_left": 2}
    assert _loss_scale({"optimizer": None}) is None
