#!/bin/bash
# TRL's DPO, GRPO and RLOO take their reference model from the file that the model once came from, and not from the model that they are given.
#
# Seen with trl 1.16.0, transformers 5.24.0 and torch 2.13.0 on a CPU, Linux x86-64, without ref_model and without PEFT. DPOTrainer's docstring
# promises "the initial policy corresponding to `model`, i.e. the model state before DPO training starts". The trainers load
# config._name_or_path again instead. A model that was fine-tuned, merged with its LoRA adapter, extended by weights in memory, or rounded to a
# lower precision, and was not saved and loaded in between, is compared with the one of before: the first loss is not log 2, here 0.0 to 0.1, so that
# pairs which the fine-tuning separated have next to no gradient, and GRPO's KL pulls back to the base. Nothing is reported. With
# precompute_ref_log_probs=True DPOTrainer is right, which changes the loss of the same call. Weights that are rounded to E4M3's digits are such a
# case too. No issue of TRL's was found that says so. Right: ref_model=copy.deepcopy(model) for DPO; for GRPO and RLOO, save and load the model.
#
# Exit code 0: as described; 1: the behaviour has changed. It needs a minute, and gigabytes where pip has no build of torch for CPUs.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet "${TORCH:-torch==2.13.0}" "${TRL:-trl==1.16.0}" "${TRANSFORMERS:-transformers==5.24.0}" accelerate==1.15.0 \
    datasets==5.2.0 numpy==2.4.6
cat > reference.py <<'PROGRAM'
import contextlib
import copy
import sys

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

WORDS = ["[PAD]", "[EOS]", "[UNK]", *"abcdefghijklmnop"]
words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", eos_token="[EOS]", unk_token="[UNK]")
pairs = Dataset.from_dict({"prompt": ["a b c d "] * 8, "chosen": ["e f g h i"] * 8, "rejected": ["j k l m n"] * 8})
common = {"use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "per_device_train_batch_size": 4}


def load() -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained("base", dtype=torch.float32)


def tuned() -> LlamaForCausalLM:
    model = load()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = tokenizer("a b c d e f g h i", return_tensors="pt")["input_ids"]
    for _ in range(20):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@torch.no_grad()
def rounded() -> LlamaForCausalLM:
    model = load()
    for weight in model.parameters():
        weight.copy_((64 * weight).to(torch.float8_e4m3fn).float() / 64)
    return model


def first_loss(model: LlamaForCausalLM, reference: LlamaForCausalLM | None, **options: bool) -> str:
    arguments = DPOConfig("out", max_steps=1, learning_rate=0.0, logging_steps=1, **common, **options)
    trainer = DPOTrainer(model, reference, args=arguments, train_dataset=pairs, processing_class=tokenizer)
    trainer.train()
    return f"{next(row['loss'] for row in trainer.state.log_history if 'loss' in row):.1f}"


def same(trainer: type, arguments: GRPOConfig | RLOOConfig) -> bool:
    model = tuned()
    made = trainer(model, lambda completions, **_: [0.0] * len(completions), arguments, pairs, processing_class=tokenizer)
    states = made.ref_model.state_dict()
    return all(torch.equal(weight, states[name]) for name, weight in model.state_dict().items())


results = []
with contextlib.redirect_stdout(sys.stderr):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=32, pad_token_id=0, eos_token_id=1, **sizes)).save_pretrained("base")
    results.append(f"DPO of a loaded model: first loss {first_loss(load(), None)}")
    results.append(f"DPO of a model that was tuned in memory: first loss {first_loss(tuned(), None)}")
    results.append(f"the same, precompute_ref_log_probs=True: first loss {first_loss(tuned(), None, precompute_ref_log_probs=True)}")
    model = tuned()
    results.append(f"the same, ref_model=copy.deepcopy(model): first loss {first_loss(model, copy.deepcopy(model))}")
    arguments = DPOConfig("out", max_steps=1, learning_rate=0.0, logging_steps=1, **common)
    trainer = DPOTrainer(rounded(), args=arguments, train_dataset=pairs, processing_class=tokenizer)
    moved = any(not torch.equal(a, b) for a, b in zip(trainer.model.parameters(), trainer.ref_model.parameters(), strict=True))
    results.append(f"DPO of a model rounded to E4M3 in memory: its reference is {'another' if moved else 'the same'}")
    settings = {"beta": 0.1, "num_generations": 4, **common}
    for trainer, configured in ((GRPOTrainer, GRPOConfig), (RLOOTrainer, RLOOConfig)):
        equal = same(trainer, configured("out", **settings))
        results.append(f"{trainer.__name__} of a model that was tuned in memory: its reference is {'the same' if equal else 'another'}")
print("\n".join(results))
PROGRAM
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 venv/bin/python -W ignore reference.py 2> log | tee seen || { cat log; exit 1; }
diff seen - <<'EXPECTED' || { echo "changed: see the lines above"; exit 1; }
DPO of a loaded model: first loss 0.7
DPO of a model that was tuned in memory: first loss 0.0
the same, precompute_ref_log_probs=True: first loss 0.7
the same, ref_model=copy.deepcopy(model): first loss 0.7
DPO of a model rounded to E4M3 in memory: its reference is another
GRPOTrainer of a model that was tuned in memory: its reference is another
RLOOTrainer of a model that was tuned in memory: its reference is another
EXPECTED
