#!/bin/bash
# transformers reads FP8 weights whose last block is smaller than 128 x 128 with the scales of other blocks, without a message.
#
# Seen with transformers 5.24.0 and torch 2.13.0 on a CPU, Linux x86-64, quant_method "fp8", weight_block_size [128, 128], FP32
# `weight_scale_inv` [ceil(N / 128), ceil(K / 128)] as DeepSeek-V3 defines them. Its dequantization divides the weight by its grid of scales
# instead of using weight_block_size: 200 rows with 2 scales become two blocks of 100. Rows 100 to 127 get the second scale, here 1 in place
# of 4. Where the grid does not divide the rows (576 and 5) loading fails. compressed-tensors 0.20.0 reads its own layout of the same rightly.
#
# Exit code 0: as described; 1: the behaviour has changed. It needs a minute, and gigabytes where pip has no build of torch for CPUs.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet "${TORCH:-torch==2.13.0}" "${TRANSFORMERS:-transformers==5.24.0}" accelerate==1.15.0 safetensors==0.8.0
cat > blocks.py <<'PROGRAM'
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(hidden_size=128, intermediate_size=200, num_hidden_layers=1, num_attention_heads=2, vocab_size=64)
tensors = {}
for name, x in LlamaForCausalLM(config).state_dict().items():
    if "_proj" not in name:
        tensors[name] = x.bfloat16()
        continue
    tensors[name] = torch.ones(x.shape).to(torch.float8_e4m3fn)
    grid = torch.ones([-(-size // 128) for size in x.shape])
    grid[0, 0] = 4  # the first block of 128 x 128
    tensors[f"{name}_scale_inv"] = grid
Path("model").mkdir()
save_file(tensors, "model/model.safetensors", {"format": "pt"})
fp8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "dequantize": True}
fp8["modules_to_not_convert"] = ["lm_head"]
about = config.to_dict() | {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", "quantization_config": fp8}
Path("model/config.json").write_text(json.dumps(about))
weight = LlamaForCausalLM.from_pretrained("model").model.layers[0].mlp.up_proj.weight
values, rows = weight[:, 0].unique_consecutive(return_counts=True)
runs = ", ".join(f"{count} x {value:g}" for value, count in zip(values.tolist(), rows.tolist()))
print("up_proj", list(weight.shape), "column 0:", runs)
PROGRAM
TRANSFORMERS_VERBOSITY=error HF_HUB_OFFLINE=1 venv/bin/python -W ignore blocks.py 2> log | tee seen || { cat log; exit 1; }
diff seen - <<'EXPECTED' || { echo "changed: 128 x 4, 72 x 1 is right; see the line above"; exit 1; }
up_proj [200, 128] column 0: 100 x 4, 100 x 1
EXPECTED
