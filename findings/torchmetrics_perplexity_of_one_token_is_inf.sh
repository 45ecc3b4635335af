#!/bin/bash
# torchmetrics' Perplexity of FP16 logits is inf as soon as the model gives one token less than e^-17, and of FP32 logits below e^-104.
#
# Seen with torchmetrics 1.9.0 and torch 2.13.0 on a CPU, Linux x86-64. It takes log(softmax(x)) in the logits' dtype, and a probability below
# the dtype's smallest is 0: the logits here are at most 18 (FP16) and 110 (FP32), and cross_entropy of the same tensors is right in both. FP16 is
# named as accepted. Its sum of a batch is in the logits' dtype too: 16,384 tokens overflow FP16, and BF16's is off. Nothing is reported.
#
# Exit code 0: as described; 1: the behaviour has changed. It needs some minutes, and gigabytes where pip has no build of torch for CPUs.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet "${TORCH:-torch==2.13.0}" "${TORCHMETRICS:-torchmetrics==1.9.0}" numpy==2.4.6
cat > perplexities.py <<'PROGRAM'
import torch
from torch.nn.functional import cross_entropy
from torchmetrics.text import Perplexity


def said(name: str, logits: torch.Tensor, targets: torch.Tensor) -> None:
    metric = Perplexity()
    metric.update(logits[None], targets[None])
    right = cross_entropy(logits.float(), targets).exp()
    print(f"{name}, {str(logits.dtype)[6:]}: {float(metric.compute()):.3g}, by cross_entropy in FP32 {float(right):.3g}")


torch.manual_seed(0)
targets = torch.zeros(100, dtype=torch.long)
targets[5] = 7  # the one token of 100 that the model did not expect
for dtype, peak in ((torch.float16, 16), (torch.float16, 18), (torch.float32, 18), (torch.float32, 110)):
    logits = torch.zeros(100, 1024, dtype=dtype)
    logits[:, 0] = peak
    said(f"one token {peak} nats below the best", logits, targets)
logits, targets = torch.randn(16384, 1024), torch.randint(1024, (16384,))
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    said("random logits of 16,384 tokens", logits.to(dtype), targets)
PROGRAM
OMP_NUM_THREADS=1 venv/bin/python -W ignore perplexities.py 2> log | tee seen || { cat log; exit 1; }
diff seen - <<'EXPECTED' || { echo "changed: see the lines above"; exit 1; }
one token 16 nats below the best, float16: 1.17, by cross_entropy in FP32 1.17
one token 18 nats below the best, float16: inf, by cross_entropy in FP32 1.2
one token 18 nats below the best, float32: 1.2, by cross_entropy in FP32 1.2
one token 110 nats below the best, float32: inf, by cross_entropy in FP32 3
random logits of 16,384 tokens, float32: 1.69e+03, by cross_entropy in FP32 1.69e+03
random logits of 16,384 tokens, float16: inf, by cross_entropy in FP32 1.69e+03
random logits of 16,384 tokens, bfloat16: 1.7e+03, by cross_entropy in FP32 1.69e+03
EXPECTED
