#!/bin/bash
# transformers' Trainer with bf16_full_eval=True rounds the model to BF16 in evaluate(), and leaves it so: what is saved or trained next is BF16.
#
# Seen with transformers 5.24.0, accelerate 1.15.0 and torch 2.13.0 on a CPU, Linux x86-64; fp16_full_eval and predict() are the same. The docstring
# says "Only applies during evaluation". Evaluations within train() do leave FP32 weights alone (they run in mixed precision if anything), but
# evaluate() outside of it casts the model in place and nobody casts it back. So train, evaluate, save_model, the order of transformers' example
# scripts with a save behind, writes a BF16 file of a model that was trained in FP32, and evaluate, train, to have a baseline, trains BF16 weights
# with BF16 moments: at a rate of 1e-5 most never move (see trainer_bf16_has_no_fp32_weights.sh). Nothing is reported. Right: save before
# evaluate(), and bf16=True for a faster evaluation, which rounds a copy.
#
# Exit code 0: as described; 1: the behaviour has changed. It needs a minute, and gigabytes where pip has no build of torch for CPUs.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet "${TORCH:-torch==2.13.0}" "${TRANSFORMERS:-transformers==5.24.0}" accelerate==1.15.0 numpy==2.4.6
cat > evaluated.py <<'PROGRAM'
import contextlib
import sys

import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

sizes = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
torch.manual_seed(0)
data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 256, (160, 64))]


def run(calls: str, **options: bool) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    weight = model.model.layers[0].mlp.up_proj.weight
    settings = {"max_steps": 20, "per_device_train_batch_size": 8, "learning_rate": 1e-5, "lr_scheduler_type": "constant", **options}
    silent = {"use_cpu": True, "report_to": "none", "logging_strategy": "no", "save_strategy": "no", "disable_tqdm": True}
    trainer = Trainer(model=model, args=TrainingArguments("out", **settings, **silent), train_dataset=data, eval_dataset=data[:8])
    for call in calls.split(", "):
        before = weight.detach().clone()
        with contextlib.redirect_stdout(sys.stderr):
            getattr(trainer, call)(*(data[:8],) * (call == "predict"))
        changed = 5 * round(20 * float((weight != before).float().mean()))
        print(f"{options or 'default'}: {call} changes {changed} % of a projection, leaves {str(weight.dtype)[6:]}")
    trainer.save_model("saved")
    dtypes = {str(tensor.dtype)[6:] for tensor in load_file("saved/model.safetensors").values()}
    print(f"{options or 'default'}: saved as {', '.join(dtypes)}")


run("train, evaluate")
run("train, evaluate", bf16_full_eval=True)
run("train, predict", fp16_full_eval=True)
run("evaluate, train", bf16_full_eval=True)
run("train, evaluate", bf16=True)
PROGRAM
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 venv/bin/python -W ignore evaluated.py 2> log | tee seen || { cat log; exit 1; }
diff seen - <<'EXPECTED' || { echo "changed: see the lines above"; exit 1; }
default: train changes 100 % of a projection, leaves float32
default: evaluate changes 0 % of a projection, leaves float32
default: saved as float32
{'bf16_full_eval': True}: train changes 100 % of a projection, leaves float32
{'bf16_full_eval': True}: evaluate changes 100 % of a projection, leaves bfloat16
{'bf16_full_eval': True}: saved as bfloat16
{'fp16_full_eval': True}: train changes 100 % of a projection, leaves float32
{'fp16_full_eval': True}: predict changes 100 % of a projection, leaves float16
{'fp16_full_eval': True}: saved as float16
{'bf16_full_eval': True}: evaluate changes 100 % of a projection, leaves bfloat16
{'bf16_full_eval': True}: train changes 15 % of a projection, leaves bfloat16
{'bf16_full_eval': True}: saved as bfloat16
{'bf16': True}: train changes 100 % of a projection, leaves float32
{'bf16': True}: evaluate changes 0 % of a projection, leaves float32
{'bf16': True}: saved as float32
EXPECTED
