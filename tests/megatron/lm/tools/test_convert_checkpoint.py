"""The commands, on checkpoints of known weights."""

import itertools
import json
import shlex
import sys
from types import ModuleType

import pytest
import torch
from safetensors import safe_open

from helpers import dist, numerics, tiny
from helpers.hf_models import MODELS, agree, config, our_logits, random_weights, their_logits
from helpers.tiny import VOCABULARY
from megatron.lm.checkpoint.reader import CheckpointReader
from megatron.lm.config.cli import config_to_dict, parse_args
from megatron.lm.hugging_face.folder import Tensors
from megatron.lm.tools import convert_checkpoint
from megatron.lm.tools.convert.layouts import EMBEDDING
from msamp.numerics.formats import E4M3
from msamp.numerics.tensor import ScalingTensor


class Known:
    """What `CheckpointReader` answers for a checkpoint at O3: linear weights in FP8, masters with the values."""

    def __init__(self, settings, folder):
        self.weights = random_weights(settings)
        counts = {"version": 3, "processes": 1, "vocab_size": VOCABULARY, "iteration": 7, "consumed_samples": 28}
        self.info = counts | {"config": config_to_dict(settings)}
        self.config, self.folder = settings, folder

    def names(self):
        return list(self.weights)

    def separate_experts(self):
        return self

    def values(self, name):
        return self.weights[name]

    def weight(self, name):
        x = self.weights[name]
        # fc2 as if tensor-parallel ranks had saved it, each with a scale of its own.
        if name.endswith("fc2.weight"):
            return x.bfloat16().float()
        return ScalingTensor.quantize(x, E4M3) if "linear_" in name and x.dim() == 2 else x.bfloat16()

    def format(self, name):
        x = self.weights[name]
        fp8 = "linear_" in name and x.dim() == 2
        return torch.float8_e4m3fn if fp8 else torch.bfloat16, x.shape, (1 + name.endswith("fc2.weight")) if fp8 else 0


@pytest.fixture
def known(monkeypatch, tmp_path):
    """(kind of model, settings) -> the checkpoint that --load `here` finds from now on."""

    def make(name, **settings):
        saved = Known(config(name, precision="O3", **settings), tmp_path / "iter_0000007")

        def read(load):
            if str(load) != "here":
                raise ValueError(f"{load} holds no checkpoint")
            return saved

        reader = ModuleType("megatron.lm.checkpoint.reader")
        reader.CheckpointReader = read
        monkeypatch.setitem(sys.modules, "megatron.lm.checkpoint.reader", reader)
        return saved

    return make


def run(*words):
    return convert_checkpoint.main([str(word) for word in words])


def test_bf16_is_the_default_and_refusals_write_nothing(known, tmp_path, capsys):
    known("gpt2")
    out = tmp_path / "hf"
    assert run("to-hf", "--load", "here", "--output", out) == 0
    assert {x.dtype for x in Tensors(out).values()} == {torch.bfloat16}
    before = {path: path.read_bytes() for path in out.iterdir()}
    assert run("to-hf", "--load", "here", "--output", out) == 2
    assert "nothing is overwritten" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in out.iterdir()} == before
    other = tmp_path / "other"
    for words, message in (
        (("to-hf", "--load", "nowhere"), "nowhere holds no checkpoint"),
        (("export-fp8", "--load", "here"), "use to-hf"),
        (("to-hf", "--load", "here", "--vocab-file", "x"), "add --tokenizer-type"),
        (("to-hf", "--load", "here", "--tokenizer-type", "HuggingFaceTokenizer"), "--tokenizer-model is missing"),
        (("from-hf", "--load", tmp_path), "config.json cannot be read"),
        (("from-hf", "--load", out, "--make-vocab-size-divisible-by", "0"), "--make-vocab-size-divisible-by 0: give a number"),
    ):
        assert run(*words, "--output", other) == 2
        assert message in capsys.readouterr().err
        assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]
    known("gpt2", swiglu=True)
    assert run("to-hf", "--load", "here", "--output", other) == 2
    assert "--swiglu True" in capsys.readouterr().err


def test_export_bf16_keeps_our_names_and_the_configuration(known, tmp_path):
    saved = known("gpt2", swiglu=True)  # which Hugging Face does not have
    out = tmp_path / "plain"
    assert run("export-bf16", "--load", "here", "--output", out) == 0
    tensors = Tensors(out)
    assert set(tensors) == set(saved.weights)
    assert tensors[EMBEDDING].shape[0] == 64  # padded, as the model is
    assert all(torch.equal(x, saved.weights[name].bfloat16()) for name, x in tensors.items())
    with safe_open(out / "model.safetensors", "pt") as opened:
        metadata = opened.metadata()
    assert json.loads(metadata["config"]) == saved.info["config"]
    assert (metadata["vocab_size"], metadata["iteration"]) == ("60", "7")


def test_export_fp8_writes_blocks_or_refuses_before_it_writes(known, tmp_path, capsys):
    known("llama")
    out, other = tmp_path / "fp8", tmp_path / "other"
    assert run("export-fp8", "--load", "here", "--layout", "deepseek", "--output", out) == 0
    assert Tensors(out)["model.layers.0.mlp.down_proj.weight_scale_inv"].shape == (1, 1)
    about = json.loads((out / "config.json").read_text())["quantization_config"]
    assert about["quant_method"] == "fp8"
    assert about["weight_block_size"] == [128, 128]
    known("llama", ffn_hidden_size=192)
    assert run("export-fp8", "--load", "here", "--layout", "block", "--output", other) == 2
    assert "gate_proj.weight is 192 x 32, which blocks of 128 x 128 do not divide" in capsys.readouterr().err
    assert not other.exists()


def test_inspect_lists_what_is_there(known, capsys):
    saved = known("llama")
    assert run("inspect", "--load", "here") == 0
    text = capsys.readouterr().out
    for line in ("iter_0000007: whole", "version: 3", "iteration: 7", "precision: O3", "grid: TP 1 x PP 1 x DP 1"):
        assert line in text
    rows = {line.split()[0]: line for line in text.splitlines() if line}
    scale = saved.weight("decoder.layers.0.mlp.linear_fc1.weight").scale_inv.item()
    assert rows["decoder.layers.0.mlp.linear_fc1.weight"].split()[1:] == ["128", "x", "32", "float8_e4m3fn", "4,096", f"{scale:g}"]
    assert rows["decoder.layers.0.mlp.linear_fc2.weight"].endswith("2 scales")
    assert rows["decoder.final_layernorm.weight"].split()[1:] == ["32", "bfloat16", "64", "-"]
    parameters = sum(x.numel() for x in saved.weights.values())
    assert f"{len(saved.weights)} tensors, {parameters:,} parameters" in text


@pytest.mark.parametrize("level", ["O3", pytest.param("O0", marks=pytest.mark.nightly)])
def test_a_trained_checkpoint_goes_to_transformers_and_back(tmp_path, level, capsys):
    pytest.importorskip("transformers")
    trained, hf, fp8, imported = (tmp_path / name for name in ("trained", "hf", "fp8", "imported"))
    shape = MODELS["llama"] | {"make_vocab_size_divisible_by": 32}
    prefix = tiny.write_data(tmp_path)
    tiny.run(tiny.config(prefix, opt_level=level, train_iters=3, save=str(trained), **shape))
    saved = CheckpointReader(trained)
    values = {name: saved.values(name) for name in saved.names()}
    ours = our_logits(config("llama"), VOCABULARY, values)
    assert run("to-hf", "--load", trained, "--output", hf, "--dtype", "float32") == 0
    assert agree(their_logits(hf), ours, numerics.HF_LOGITS)

    assert run("from-hf", "--load", hf, "--output", imported, "--make-vocab-size-divisible-by", 32) == 0
    back = CheckpointReader(imported)
    assert all(torch.equal(back.values(name)[:VOCABULARY], x[:VOCABULARY]) for name, x in values.items())
    flags = {"precision": "fp32", "load": str(imported), "finetune": True, "train_iters": 1}
    with tiny.trainer(tiny.config(prefix, **flags, **shape)) as trainer:
        weights = {name: p.detach().clone() for name, p in trainer.training.model.named_parameters()}
    assert agree(our_logits(config("llama"), VOCABULARY, weights), ours, numerics.HF_LOGITS)

    assert run("export-fp8", "--load", trained, "--output", fp8) == 0
    name = "decoder.layers.0.mlp.linear_fc2.weight"
    payload = Tensors(fp8)["model.layers.0.mlp.down_proj.weight"].view(torch.uint8)
    weight = saved.weight(name) if level == "O3" else ScalingTensor.quantize(values[name], E4M3)
    assert torch.equal(payload, weight.payload.view(torch.uint8))
    capsys.readouterr()
    assert run("inspect", "--load", trained) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith(name))
    assert ("float8_e4m3fn" in row) == (level == "O3")


@pytest.mark.parametrize("level", ["O2", *(pytest.param(level, marks=pytest.mark.nightly) for level in ("O0", "O1", "O3"))])
def test_trained_experts_go_to_transformers_and_back_and_train_in_fp8(tmp_path, level, capsys):
    pytest.importorskip("transformers")
    trained, hf, fp8, imported = (tmp_path / name for name in ("trained", "hf", "fp8", "imported"))
    shape = MODELS["olmoe"] | {"make_vocab_size_divisible_by": 32}
    prefix = tiny.write_data(tmp_path)
    tiny.run(tiny.config(prefix, opt_level=level, train_iters=3, save=str(trained), **shape))
    saved = CheckpointReader(trained).separate_experts()
    values = {name: saved.values(name) for name in saved.names()}
    assert run("to-hf", "--load", trained, "--output", hf, "--dtype", "float32") == 0
    assert run("from-hf", "--load", hf, "--output", imported, "--make-vocab-size-divisible-by", 32) == 0
    flags = shlex.split(capsys.readouterr().out.split("--finetune ")[1])
    assert parse_args([*flags, "--lr", "1", "--train-iters", "1", "--micro-batch-size", "1"]).model == tiny.config(prefix, **shape).model
    joined = CheckpointReader(imported)
    weight = "decoder.layers.0.mlp.experts.fc1_weight"
    assert joined.format(weight)[1] == (4, 48, 32)
    back = joined.separate_experts()
    assert all(torch.equal(back.values(name)[:VOCABULARY], x[:VOCABULARY]) for name, x in values.items())
    ours = our_logits(config("olmoe"), VOCABULARY, {name: joined.values(name) for name in joined.names()})
    assert agree(their_logits(hf), ours, numerics.HF_LOGITS)
    with tiny.trainer(tiny.config(prefix, opt_level="O2", load=str(imported), finetune=True, **shape)) as trainer:
        weights = dict(trainer.training.model.named_parameters())
    best = ScalingTensor.quantize(values[f"{weight}.3"], weights[f"{weight}.3"].format)
    assert torch.equal(weights[f"{weight}.3"].dequantize(torch.float32), best.dequantize(torch.float32))

    assert run("export-fp8", "--load", trained, "--output", fp8) == 0
    stored, own = Tensors(fp8), saved.weight(f"{weight}.2")
    whole = own if isinstance(own, ScalingTensor) and own.format == E4M3 else ScalingTensor.quantize(values[f"{weight}.2"], E4M3)
    for half, part in zip(("gate", "up"), whole.payload.view(torch.uint8).chunk(2), strict=True):
        name = f"model.layers.0.mlp.experts.2.{half}_proj.weight"
        assert torch.equal(stored[name].view(torch.uint8), part)
        assert stored[f"{name}_scale"] == whole.scale_inv
    about = json.loads((fp8 / "config.json").read_text())
    assert "model.layers.1.mlp.gate" in about["quantization_config"]["ignore"]
    assert run("to-megatron", "--load", trained, "--output", tmp_path / "megatron") == 2
    assert "to-megatron does not support a model with --num-experts 4" in capsys.readouterr().err


def train(prefix, folder):
    """A rank of a small grid at O3."""
    shape = MODELS["llama"] | {"make_vocab_size_divisible_by": 32, "tensor_model_parallel_size": 2, "sequence_parallel": True}
    tiny.run(tiny.config(prefix, opt_level="O3", train_iters=2, save=folder, **shape))


@pytest.mark.nightly
def test_a_checkpoint_of_a_grid_converts_as_one_process(tmp_path):
    pytest.importorskip("transformers")
    trained, hf, fp8 = (tmp_path / name for name in ("trained", "hf", "fp8"))
    dist.run(train, 2, str(tiny.write_data(tmp_path)), str(trained))
    saved = CheckpointReader(trained)
    values = {name: saved.values(name) for name in saved.names()}
    assert run("to-hf", "--load", saved.folder, "--output", hf, "--dtype", "float32") == 0
    assert agree(their_logits(hf), our_logits(config("llama"), VOCABULARY, values), numerics.HF_LOGITS)

    # Each rank's part has a scale of its own: where they differ the whole is quantised anew, with one.
    assert run("export-fp8", "--load", trained, "--output", fp8) == 0
    stored = Tensors(fp8)
    modules = (("mlp.linear_fc2", "mlp.down_proj"), ("self_attention.linear_proj", "self_attn.o_proj"))
    for number, (ours, theirs) in itertools.product((0, 1), modules):
        name = f"decoder.layers.{number}.{ours}.weight"
        assert saved.format(name)[2] == 2
        whole = saved.weight(name)
        if not isinstance(whole, ScalingTensor):
            whole = ScalingTensor.quantize(values[name], E4M3)
        assert torch.equal(stored[f"model.layers.{number}.{theirs}.weight"].view(torch.uint8), whole.payload.view(torch.uint8))
        assert stored[f"model.layers.{number}.{theirs}.weight_scale"] == whole.scale_inv
