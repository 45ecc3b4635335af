#!/bin/bash
# transformers 5: TrainingArguments(bf16=True), "mixed precision", trains a BF16 file loaded by default without any FP32 weights.
#
# Seen with transformers 5.24.0, accelerate 1.15.0 and torch 2.13.0 on a CPU, Linux x86-64. Version 4's default was to load FP32 weights, which
# bf16=True rounds for the GEMMs; version 5 loads the file's dtype (documented), and bf16=True changes nothing of that, without a warning. Weights,
# moments and updates are BF16: of 20 steps at 1e-5, 85 % of a projection's weights and all of a norm's see nothing, since an update below half a
# unit of a weight's last place is lost. Right: from_pretrained(..., dtype=torch.float32) with bf16=True, or an optimizer that keeps what is lost,
# such as `msamp`'s.
#
# Exit code 0: as described; 1: the behaviour has changed. It needs a minute, and gigabytes where pip has no build of torch for CPUs.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet "${TORCH:-torch==2.13.0}" "${TRANSFORMERS:-transformers==5.24.0}" accelerate==1.15.0 numpy==2.4.6
cat > trained.py <<'PROGRAM'
import contextlib
import sys

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

torch.manual_seed(0)
sizes = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
LlamaForCausalLM(LlamaConfig(**sizes)).bfloat16().save_pretrained("model")
data = [{"input_ids": torch.randint(0, 256, (64,)), "labels": torch.randint(0, 256, (64,))} for _ in range(160)]
for how, options in (("default", {}), ("dtype=torch.float32", {"dtype": torch.float32})):
    model = AutoModelForCausalLM.from_pretrained("model", **options)
    weights = {"projection": model.model.layers[0].mlp.up_proj.weight, "norm": model.model.norm.weight}
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    settings = {"max_steps": 20, "per_device_train_batch_size": 8, "learning_rate": 1e-5, "lr_scheduler_type": "constant", "bf16": True}
    arguments = TrainingArguments("out", **settings, use_cpu=True, report_to="none", logging_strategy="no", save_strategy="no", disable_tqdm=True)
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    with contextlib.redirect_stdout(sys.stderr):
        trainer.train()
    moments = {str(state["exp_avg"].dtype)[6:] for state in trainer.optimizer.state.values()}
    still = {name: 5 * round(20 * float((weight == before[name]).float().mean())) for name, weight in weights.items()}
    print(f"from_pretrained, {how}, bf16=True: weights {str(model.dtype)[6:]}, moments {', '.join(moments)};", end=" ")
    print(f"unmoved after 20 steps at 1e-5: {still['projection']} % of a projection, {still['norm']} % of a norm")
PROGRAM
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 venv/bin/python -W ignore trained.py 2> log | tee seen || { cat log; exit 1; }
diff seen - <<'EXPECTED' || { echo "changed: see the lines above"; exit 1; }
from_pretrained, default, bf16=True: weights bfloat16, moments bfloat16; unmoved after 20 steps at 1e-5: 85 % of a projection, 100 % of a norm
from_pretrained, dtype=torch.float32, bf16=True: weights float32, moments float32; unmoved after 20 steps at 1e-5: 0 % of a projection, 0 % of a norm
EXPECTED
