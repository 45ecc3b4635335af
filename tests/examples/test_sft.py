"""examples/sft: it learns at every level, goes on bit for bit, and its model loads in transformers."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from helpers import post_runs
from megatron.lm.post import chat, conversations, packing, saved
from megatron.lm.post.losses import answer_loss
from megatron.lm.post.schedule import drawn, learning_rate

ROOT = Path(__file__).resolve().parents[2]
STEPS, SEQUENCE = 6, 64


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sft")
    post_runs.toy(folder / "toy")
    post_runs.sums(folder / "sums.jsonl")
    return folder


def flags(made, save, **settings):
    given = {"load": made / "toy", "data": made / "sums.jsonl", "save": save, "dtype": "fp32", "seq_length": SEQUENCE, "lr": 3e-3,
             "train_iters": STEPS, "micro_batch_size": 2, "log_interval": 2} | settings  # fmt: skip
    words = []
    for name, value in given.items():
        words += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return words


def run(made, save, **settings):
    return post_runs.example("sft/train.py").main(flags(made, save, **settings))


@pytest.mark.parametrize("level", ["O0", *(pytest.param(level, marks=pytest.mark.nightly(20)) for level in ("O1", "O2")), "O3"])
def test_it_learns_and_transformers_reads_the_model(made, tmp_path, level, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rows = tmp_path / "rows.csv"
    assert run(made, tmp_path / "run", opt_level=level, valid_rows=4, rows=rows) == 0
    found = post_runs.metrics(tmp_path / "run")
    assert found[-1]["loss"] < 0.9 * found[0]["loss"]
    assert found[-1]["valid_loss"] < 0.9 * found[0]["valid_loss"]
    assert "tokens/s" in capsys.readouterr().out
    header, row = (line.split(",") for line in rows.read_text().splitlines())
    assert dict(zip(header, row, strict=True))["recipe"] == level
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run/model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run/model")
    assert tokenizer.chat_template
    messages = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "it is 2"}]
    example = chat.encode(tokenizer, messages, "this")
    batch = packing.batch([[example]], SEQUENCE, tokenizer.pad_token_id)
    loss = answer_loss(model(input_ids=batch["input_ids"]).logits, batch["input_ids"], batch["answer"]) / batch["answer"].sum()
    assert loss.item() < 0.95 * math.log(len(tokenizer))


@pytest.mark.parametrize("level", ["O0", pytest.param("O2", marks=pytest.mark.nightly(3)), "O3"])
def test_a_bf16_export_that_loses_small_changes_is_told_and_fp32_keeps_them(made, tmp_path, level, capsys):
    """At a learning rate of 1e-6 most weights move by less than half a step of BF16."""
    exports = {}
    for dtype, given in (("bf16", {}), ("fp32", {"export_dtype": "fp32"})):
        assert run(made, tmp_path / dtype, opt_level=level, dtype="bf16", lr=1e-6, **given) == 0
        told = capsys.readouterr().out
        assert ("% of what training changed in the weights is left in it, --export-dtype fp32 keeps the rest" in told) == (dtype == "bf16")
        exports[dtype] = load_file(tmp_path / dtype / "model/model.safetensors")
        config = json.loads((tmp_path / dtype / "model/config.json").read_text())
        assert config.get("dtype", config.get("torch_dtype")) == {"bf16": "bfloat16", "fp32": "float32"}[dtype]
    start, name = load_file(made / "toy/model.safetensors"), "model.layers.0.mlp.up_proj.weight"
    moved = [(exports[dtype][name].float() - start[name].bfloat16().float()).abs().mean() for dtype in ("bf16", "fp32")]
    assert 0 < moved[0] < 0.5 * moved[1]
    assert exports["bf16"].keys() == exports["fp32"].keys()
    for key, value in exports["fp32"].items():
        assert value.dtype is torch.float32
        assert value.bfloat16().equal(exports["bf16"][key])


def test_o0_is_a_plain_loop_of_torch_bit_for_bit(made, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert run(made, tmp_path / "run", opt_level="O0", clip_grad=0) == 0
    tokenizer = AutoTokenizer.from_pretrained(made / "toy")
    model = AutoModelForCausalLM.from_pretrained(made / "toy")
    rows = [conversations.conversation(row, "row") for row in conversations.rows(made / "sums.jsonl")]
    sequences = packing.packed([chat.encode(tokenizer, row, "row") for row in rows], SEQUENCE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    losses = []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps=STEPS, warmup=0, peak=3e-3)
        chosen = packing.batch([sequences[row] for row in drawn(step, 4, len(sequences), 1234)], SEQUENCE, tokenizer.pad_token_id)
        answers, loss = int(chosen["answer"].sum()), 0.0
        for at in (0, 2):
            tokens, positions, answer = (chosen[name][at : at + 2] for name in ("input_ids", "position_ids", "answer"))
            part = answer_loss(model(input_ids=tokens, position_ids=positions, use_cache=False).logits, tokens, answer) / answers
            part.backward()
            loss += part.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    assert [row["loss"] for row in post_runs.metrics(tmp_path / "run")] == losses
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "run/model").state_dict()
    assert all(torch.equal(x, trained[name]) for name, x in model.state_dict().items())


@pytest.mark.parametrize("level", [pytest.param("O0", marks=pytest.mark.nightly(2)), "O3"])
def test_it_goes_on_bit_for_bit(made, tmp_path, level, monkeypatch):
    assert run(made, tmp_path / "whole", opt_level=level) == 0
    write = saved.save

    def killed(folder, step, *rest):
        write(folder, step, *rest)
        if step == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(saved, "save", killed)
    signals = signal.getsignal(signal.SIGINT)
    assert run(made, tmp_path / "part", opt_level=level, save_interval=2) == 130
    signal.signal(signal.SIGINT, signals)
    monkeypatch.undo()
    assert run(made, tmp_path / "part", opt_level=level, save_interval=2) == 0
    assert post_runs.metrics(tmp_path / "part") == post_runs.metrics(tmp_path / "whole")
    first, second = ((tmp_path / name / "model/model.safetensors").read_bytes() for name in ("part", "whole"))
    assert first == second
    assert run(made, tmp_path / "part", opt_level=level, save_interval=2) == 0  # with nothing left to do
    assert (tmp_path / "part/model/model.safetensors").read_bytes() == second


@pytest.mark.nightly(60)
def test_a_killed_process_goes_on_to_the_same_end(made, tmp_path):
    """SIGKILL at some moment of a real process; the same command, then the model of an undisturbed run."""
    assert run(made, tmp_path / "whole", train_iters=40, save_interval=3) == 0
    command = [sys.executable, str(ROOT / "examples/sft/train.py"), *flags(made, tmp_path / "part", train_iters=40, save_interval=3)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    while child.poll() is None and len(saved.checkpoints(tmp_path / "part")) < 2:
        time.sleep(0.01)
    child.kill()
    child.wait()
    assert not (tmp_path / "part/model").exists()
    assert subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False).returncode == 0
    assert (tmp_path / "part/model/model.safetensors").read_bytes() == (tmp_path / "whole/model/model.safetensors").read_bytes()


def examples(made):
    tokenizer = post_runs.example("toy_chat.py").tokenizer()
    rows = [conversations.conversation(row, "row") for row in conversations.rows(made / "sums.jsonl")]
    return [chat.encode(tokenizer, row, "row") for row in rows]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"data": "none.jsonl"}, "none.jsonl"),
        ({"load": "none"}, "has no config.json"),
        ({"seq_length": 16}, "--seq-length is 16: give --seq-length"),
        ({"seq_length": 1024}, "has positions for 512 tokens"),
        ({"opt_level": "O9"}, "precision 'O9' is unknown"),
        ({"valid_rows": 24}, "leaves no training data"),
        ({"lr": -1}, "learning rate"),
        ({"global_batch_size": 3}, "is not a multiple of --micro-batch-size 2"),
        ({"train_iters": 0}, "give 1 to"),
    ],
)
def test_bad_input_is_one_line_and_code_2_before_anything_is_written(made, tmp_path, capsys, settings, said):
    post_runs.assert_refused(lambda: run(made, tmp_path / "run", **settings), tmp_path / "run", capsys, re.escape(said))
