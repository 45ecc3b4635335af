#!/bin/bash
# In mixed precision, the gradient of an FP32 weight that is used many times in one torch.autocast block is summed in BF16: 1,000 uses give half of it.
#
# Seen with torch 2.13.0 on a CPU, Linux x86-64. autocast casts a weight once per block and gives all its uses that one BF16 copy, so that autograd
# adds their gradients in BF16 and casts the sum to FP32 last; the sum stops where it is 256 times what it adds, and what backward reaches last is
# lost. That is a cell unrolled by hand, a layer in a loop, a head that reads one frame at a time: an LSTMCell over 2,048 steps gets a fifth of its
# bias' gradient. Nothing is reported, .grad is FP32, and the loss is right. torch's page has one line on cache_enabled, which does not mention sums, and
# no issue was found. FP16 sums to 2,048 times what it adds. Right: cache_enabled=False, or a torch.autocast around each use, which costs a cast each;
# torch.nn.LSTM takes its weights once.
#
# Exit code 0: as described; 1: the behaviour has changed. It needs a minute, and gigabytes where pip has no build of torch for CPUs.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet "${TORCH:-torch==2.13.0}" numpy==2.4.6
cat > reused.py <<'PROGRAM'
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor


def block(how: str) -> torch.autocast | nullcontext:
    dtype = torch.float16 if "FP16" in how else torch.bfloat16
    return nullcontext() if how == "FP32" else torch.autocast("cpu", dtype=dtype, cache_enabled="no cache" not in how)


def linear(uses: int, how: str) -> Tensor:
    torch.manual_seed(0)
    layer, inputs = torch.nn.Linear(32, 32), torch.rand(uses, 4, 32)
    with nullcontext() if "each" in how else block(how):
        loss = torch.zeros(())
        for x in inputs:
            with block(how) if "each" in how else nullcontext():
                loss = loss + layer(x).float().sum()
    loss.backward()
    return layer.weight.grad


def lstm(uses: int, how: str) -> Tensor:
    torch.manual_seed(0)
    cell, inputs = torch.nn.LSTMCell(32, 32), torch.rand(uses, 4, 32)
    state, loss = None, torch.zeros(())
    with block(how):
        for x in inputs:
            state = cell(x, state)
            loss = loss + state[0].float().sum()
    loss.backward()
    return cell.bias_ih.grad


def show(name: str, gradient: Callable[[int, str], Tensor], cases: list[tuple[str, int]]) -> None:
    for how, uses in cases:
        right, seen = gradient(uses, "FP32").double(), gradient(uses, how)
        share = float((seen.double() * right).sum() / right.square().sum())
        print(f"{name}, {how}, {uses} uses: {share:.1f} of the gradient, {str(seen.dtype)[6:]}", flush=True)


ways = ["autocast", "autocast no cache", "autocast each use", "autocast FP16"]
show("Linear", linear, [(how, uses) for how in ways for uses in (100, 1000, 4000)])
show("LSTMCell", lstm, [(how, uses) for how in (ways[0], ways[1]) for uses in (16, 256, 2048)])
PROGRAM
OMP_NUM_THREADS=1 venv/bin/python -W ignore reused.py | tee seen
diff seen - <<'EXPECTED' || { echo "changed: see the lines above"; exit 1; }
Linear, autocast, 100 uses: 1.0 of the gradient, float32
Linear, autocast, 1000 uses: 0.5 of the gradient, float32
Linear, autocast, 4000 uses: 0.1 of the gradient, float32
Linear, autocast no cache, 100 uses: 1.0 of the gradient, float32
Linear, autocast no cache, 1000 uses: 1.0 of the gradient, float32
Linear, autocast no cache, 4000 uses: 1.0 of the gradient, float32
Linear, autocast each use, 100 uses: 1.0 of the gradient, float32
Linear, autocast each use, 1000 uses: 1.0 of the gradient, float32
Linear, autocast each use, 4000 uses: 1.0 of the gradient, float32
Linear, autocast FP16, 100 uses: 1.0 of the gradient, float32
Linear, autocast FP16, 1000 uses: 1.0 of the gradient, float32
Linear, autocast FP16, 4000 uses: 1.0 of the gradient, float32
LSTMCell, autocast, 16 uses: 1.0 of the gradient, float32
LSTMCell, autocast, 256 uses: 1.0 of the gradient, float32
LSTMCell, autocast, 2048 uses: 0.2 of the gradient, float32
LSTMCell, autocast no cache, 16 uses: 1.0 of the gradient, float32
LSTMCell, autocast no cache, 256 uses: 1.0 of the gradient, float32
LSTMCell, autocast no cache, 2048 uses: 1.0 of the gradient, float32
EXPECTED
