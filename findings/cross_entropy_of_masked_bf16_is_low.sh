#!/bin/bash
# On a CPU, torch's cross_entropy of BF16 or FP16 logits returns part of the loss where labels are masked: 0.61 in place of 2.49.
#
# Seen with torch 2.13.0 on a CPU, Linux x86-64. The loss adds the tokens in the logits' dtype, in runs of 16 that it merges where a token's index is
# a multiple of 16, 256 and so on; at a token with ignore_index it skips the merge. So a masked prompt, or masked image tokens in front of each group,
# leave everything in one BF16 number, which stops at 256 times what it adds (2,048 in FP16). The gradient is right: training goes on as it should,
# and a loss curve, an evaluation or a stop by the loss uses numbers that shrink as batches grow. Nothing is reported. Without masked tokens it is
# right to 0.7 %. reduction="sum" is the same, and nll_loss. autocast is right, because it casts to FP32; so are transformers' own losses and
# `msamp`'s. Right: `logits.float()`.
#
# Exit code 0: as described; 1: the behaviour has changed. It needs a minute, and gigabytes where pip has no build of torch for CPUs.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet "${TORCH:-torch==2.13.0}" numpy==2.4.6
cat > masked.py <<'PROGRAM'
import torch
from torch.nn.functional import cross_entropy

TOKENS, LENGTH = 65536, 512
place = torch.arange(TOKENS)
masks = {
    "no token": place < 0,
    "a random 85 %": torch.rand(TOKENS, generator=torch.Generator().manual_seed(0)) < 0.85,
    "the first 300 of each 512": place % LENGTH < 300,
    "the first 4 of each 16": place % 16 < 4,
    "every second": place % 2 == 0,
}
torch.manual_seed(0)
for dtype in (torch.bfloat16, torch.float16):
    logits = torch.randn(TOKENS, 8).to(dtype)
    for name, mask in masks.items():
        if dtype == torch.float16 and name == "no token":
            continue  # a sum of 65,536 tokens overflows
        labels = torch.randint(0, 8, (TOKENS,)).masked_fill(mask, -100)
        low, wide = logits.clone().requires_grad_(), logits.float().requires_grad_()
        loss, want = cross_entropy(low, labels), cross_entropy(wide, labels)
        loss.backward()
        want.backward()
        gradient = float(low.grad.float().norm() / wide.grad.norm())
        print(f"{str(dtype)[6:]}, masked {name}: loss {loss:.2f}, of FP32 logits {want:.2f}; gradient's norm {gradient:.2f} of FP32's")
PROGRAM
OMP_NUM_THREADS=1 venv/bin/python -W ignore masked.py 2> log | tee seen || { cat log; exit 1; }
diff seen - <<'EXPECTED' || { echo "changed: see the lines above"; exit 1; }
bfloat16, masked no token: loss 2.50, of FP32 logits 2.49; gradient's norm 1.00 of FP32's
bfloat16, masked a random 85 %: loss 2.50, of FP32 logits 2.49; gradient's norm 1.00 of FP32's
bfloat16, masked the first 300 of each 512: loss 0.61, of FP32 logits 2.49; gradient's norm 1.00 of FP32's
bfloat16, masked the first 4 of each 16: loss 0.04, of FP32 logits 2.49; gradient's norm 1.00 of FP32's
bfloat16, masked every second: loss 0.06, of FP32 logits 2.49; gradient's norm 1.00 of FP32's
float16, masked a random 85 %: loss 2.52, of FP32 logits 2.52; gradient's norm 1.00 of FP32's
float16, masked the first 300 of each 512: loss 2.27, of FP32 logits 2.48; gradient's norm 1.00 of FP32's
float16, masked the first 4 of each 16: loss 0.33, of FP32 logits 2.50; gradient's norm 1.00 of FP32's
float16, masked every second: loss 0.50, of FP32 logits 2.49; gradient's norm 1.00 of FP32's
EXPECTED
