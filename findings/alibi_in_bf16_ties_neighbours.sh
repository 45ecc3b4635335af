#!/bin/bash
# BLOOM and Falcon-RW in BF16 give neighbouring keys equal ALiBi biases: at 2,048 tokens the last five tie, where FP32 halves the weight at each.
#
# Seen with transformers 5.24.0 and torch 2.13.0 on a CPU, Linux x86-64. ALiBi's bias should fall by the head's slope with each token of distance.
# transformers takes slope times the key's own position instead, which softmax allows, and rounds it to the model's dtype: BF16 has steps of 8 from
# 1,024 on. FP16 files keep more of it, and are changed by loading them in BF16, as `dtype="auto"`, `.bfloat16()` and FP16 to BF16 exports do.
# Attention of the last query of a random model moves by up to 0.39 (total variation), at query 100 by 0.06. MPT's bias counts from the end, in
# FP32. Nothing is reported. Models that were trained with this rounding (BLOOM's largest in BF16) have learned with it; others are evaluated with
# another bias than they learned.
#
# Exit code 0: as described; 1: the behaviour has changed. It needs a minute, and gigabytes where pip has no build of torch for CPUs.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet "${TORCH:-torch==2.13.0}" "${TRANSFORMERS:-transformers==5.24.0}" numpy==2.4.6
cat > alibi.py <<'PROGRAM'
import torch
from transformers import BloomConfig, BloomModel
from transformers.models.bloom.modeling_bloom import build_alibi_tensor as bloom
from transformers.models.falcon.modeling_falcon import build_alibi_tensor as falcon

for dtype in (torch.float32, torch.float16, torch.bfloat16):
    for name, build in (("BLOOM", bloom), ("Falcon", falcon)):
        last = build(torch.ones(1, 2048), 16, dtype).float()[:, 0, -64:]
        distinct = [len(row.unique()) for row in last]
        print(f"{name}, {str(dtype)[6:]}: of the last 64 biases, {min(distinct)} to {max(distinct)} differ")
torch.manual_seed(0)
config = BloomConfig(vocab_size=128, hidden_size=64, n_layer=1, n_head=16, attn_implementation="eager")
model, tokens = BloomModel(config).eval(), torch.randint(0, 128, (1, 2048))
with torch.no_grad():
    for dtype in (torch.float32, torch.bfloat16):
        attention = model.to(dtype)(tokens, output_attentions=True).attentions[0][0, 0, -1, -5:].float()
        print(f"attention of the last token to the last five, {str(dtype)[6:]}:", [round(share, 1) for share in attention.tolist()])
PROGRAM
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 venv/bin/python -W ignore alibi.py 2> log | tee seen || { cat log; exit 1; }
diff seen - <<'EXPECTED' || { echo "changed: see the lines above"; exit 1; }
BLOOM, float32: of the last 64 biases, 64 to 64 differ
Falcon, float32: of the last 64 biases, 64 to 64 differ
BLOOM, float16: of the last 64 biases, 45 to 64 differ
Falcon, float16: of the last 64 biases, 45 to 64 differ
BLOOM, bfloat16: of the last 64 biases, 7 to 9 differ
Falcon, bfloat16: of the last 64 biases, 7 to 9 differ
attention of the last token to the last five, float32: [0.0, 0.1, 0.1, 0.3, 0.5]
attention of the last token to the last five, bfloat16: [0.2, 0.2, 0.2, 0.2, 0.2]
EXPECTED
