#!/bin/bash
# llm-compressor's NVFP4 of an FP16 model gives layers whose weights are all below 0.041 no tensor scale: small weights become zeros, up to all of them.
#
# Seen with llmcompressor 0.14.0.1, compressed-tensors 0.19.0, transformers 5.17.0 and torch 2.13.0 on a CPU, Linux x86-64, schemes NVFP4 and NVFP4A16. The
# scale is 448 * 6 / maximum, computed in the weights' dtype: above 65,504 it is infinite in FP16, and nan_to_num makes 1.0 of it, which is meant for
# experts without data. Block scales are then E4M3 numbers near their smallest, 2^-9, and a block below 0.0059 is 0. BF16 and FP32 copies of the same model
# are right. An FP16 file with a deviation of 0.008, as large models have, loses 1.4 times as much as it should, and one of 0.001 everything; whether a
# layer is hit depends on its one largest weight. Nothing is reported, and the file looks as usual. No issue about it was found (595 brought the 1.0).
# Right: load the model in BF16 or FP32 first.
#
# Exit code 0: as described; 1: the behaviour has changed. It needs some minutes, and gigabytes where pip has no build of torch for CPUs.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
pinned=(transformers==5.17.0 torch==2.13.0)
venv/bin/python -m pip install --quiet "${LLM_COMPRESSOR:-llmcompressor==0.14.0.1}" "${COMPRESSED_TENSORS:-compressed-tensors==0.19.0}" "${pinned[@]}"
cat > compress.py <<'PROGRAM'
import logging

import torch
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from transformers import LlamaConfig, LlamaForCausalLM

logging.disable(logging.ERROR)
sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 128}
seen = open("seen", "w")
for deviation in (0.02, 0.008, 0.001):
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=deviation)).save_pretrained("model")
    for dtype in (torch.bfloat16, torch.float16):
        model = LlamaForCausalLM.from_pretrained("model", dtype=dtype)
        layer = model.model.layers[0].self_attn.q_proj
        weight = layer.weight.detach().float().clone()
        oneshot(model=model, recipe=QuantizationModifier(targets="Linear", scheme="NVFP4A16", ignore=["lm_head"]))
        layer = model.model.layers[0].self_attn.q_proj
        scheme = layer.quantization_scheme.weights
        back = fake_quantize(layer.weight, layer.weight_scale, layer.weight_zero_point, scheme, global_scale=layer.weight_global_scale).float()
        error, zeros = (back - weight).norm() / weight.norm(), (back == 0).float().mean()
        scale = "1" if layer.weight_global_scale == 1 else "above 10,000"
        print(f"deviation {deviation}, {dtype}: tensor scale {scale}, weights {100 * error:.0f} % off, {100 * zeros:.0f} % zeros", file=seen, flush=True)
PROGRAM
venv/bin/python -W ignore compress.py > log 2>&1 || { cat log; exit 1; }
cat seen
diff seen - <<'EXPECTED' || { echo "changed: see the lines above"; exit 1; }
deviation 0.02, torch.bfloat16: tensor scale above 10,000, weights 10 % off, 7 % zeros
deviation 0.02, torch.float16: tensor scale above 10,000, weights 10 % off, 7 % zeros
deviation 0.008, torch.bfloat16: tensor scale above 10,000, weights 10 % off, 7 % zeros
deviation 0.008, torch.float16: tensor scale 1, weights 14 % off, 7 % zeros
deviation 0.001, torch.bfloat16: tensor scale above 10,000, weights 10 % off, 7 % zeros
deviation 0.001, torch.float16: tensor scale 1, weights 100 % off, 100 % zeros
EXPECTED
