"""TRL's trainers over ours (msamp.integrations.transformers.Trainer), and its number for DPO's loss beside ours.

TRL brings datasets, pandas and pyarrow and is in no extra: where it is not installed these are skipped.
"""

import json

import pytest
import torch

from helpers import hosts, post_runs
from megatron.lm.post import conversations, models
from megatron.lm.post.losses import dpo_loss
from msamp.nn.linear import FP8Linear

hosts.need("accelerate")
trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def classes():
    from msamp.integrations.transformers import Trainer

    return type("SFTTrainer", (Trainer, trl.SFTTrainer), {}), type("DPOTrainer", (Trainer, trl.DPOTrainer), {})


def said(role, text):
    return [{"role": role, "content": text}]


@pytest.fixture
def rows(tmp_path):
    pairs = [
        {"prompt": said("user", f"{n}+{n}="), "chosen": said("assistant", str(2 * n)), "rejected": said("assistant", f"no {n}")}
        for n in range(8)
    ]
    given = {"pairs": pairs, "answers": [{"prompt": row["prompt"], "completion": row["chosen"]} for row in pairs]}
    found = {}
    for name, listed in given.items():
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in listed))
        found[name] = datasets.load_dataset("json", data_files=str(file), split="train", cache_dir=str(tmp_path / "cache"))
    return found


@pytest.fixture
def tokenizer(tmp_path):
    post_runs.toy(tmp_path / "toy")
    found = models.load_tokenizer(tmp_path / "toy")
    found.chat_template = TEMPLATE
    return found


def policy(tmp_path):
    return models.load_model(tmp_path / "toy", "AutoModelForCausalLM", torch.float32, "cpu")


COMMON = {"use_cpu": True, "report_to": [], "logging_steps": 1, "bf16": False, "per_device_train_batch_size": 8}


def test_its_sft_trainer_trains_in_fp8(tmp_path, rows, tokenizer):
    settings = trl.SFTConfig(str(tmp_path / "run"), max_steps=8, learning_rate=3e-3, max_length=64, **COMMON)
    trainer = classes()[0](policy(tmp_path), settings, train_dataset=rows["answers"], processing_class=tokenizer, recipe="O3")
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert losses[-1] < 0.9 * losses[0]
    assert sum(isinstance(m, FP8Linear) for m in trainer.model.modules()) == 14


def test_its_dpo_loss_is_ours(tmp_path, rows, tokenizer):
    settings = trl.DPOConfig(str(tmp_path / "run"), max_steps=1, beta=0.3, disable_dropout=False, **COMMON)
    post_runs.toy(tmp_path / "other", seed=5)
    other = models.load_model(tmp_path / "other", "AutoModelForCausalLM", torch.float32, "cpu")
    example = post_runs.example("rlhf/dpo.py")
    from megatron.lm.post import chat

    pairs = []
    for row in conversations.rows(tmp_path / "pairs.jsonl"):
        asked = conversations.preference(row, "row")
        pairs.append(tuple(chat.encode_answer(tokenizer, asked.prompt, text, "row") for text in (asked.chosen, asked.rejected)))
    with torch.no_grad():
        of = [example.answers(model, pairs, tokenizer.pad_token_id, torch.device("cpu")) for model in (policy(tmp_path), other)]
        want = dpo_loss(*of[0], *of[1], beta=0.3)[0].mean().item()
    trainer = classes()[1](
        policy(tmp_path), ref_model=other, args=settings, train_dataset=rows["pairs"], processing_class=tokenizer, recipe="O0"
    )
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(want, rel=1e-4)
