#!/bin/bash
# In one torch.autocast block, a model goes on with the weights that it had at its first call: a loop inside the block does not learn.
#
# Seen with torch 2.13.0 on a CPU, Linux x86-64. autocast keeps its BF16 copy of an FP32 weight until the outermost block ends, and does not look
# whether the weight has changed since: optimizer.step, load_state_dict and swapping in an EMA's weights go unseen, also under no_grad. Weights
# and gradients move, so that only the loss tells: 20 steps leave it where it was, to the digit, and checkpoints that are evaluated within
# one block get the score of the first. An outermost block with enabled=False has the same effect on blocks within. torch's page says that
# autocast should wrap the forward pass only, not that this happens otherwise. Right: a block per forward pass with none around it,
# cache_enabled=False, or torch.clear_autocast_cache() after each change, which `msamp`'s optimizers do in `step`.
#
# Exit code 0: as described; 1: the behaviour has changed. It needs a minute, and gigabytes where pip has no build of torch for CPUs.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet "${TORCH:-torch==2.13.0}" numpy==2.4.6
cat > blocks.py <<'PROGRAM'
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn


def autocast(**options: bool) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, **options)


def losses(around: AbstractContextManager, cache: bool = True) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
    optimizer, x = torch.optim.AdamW(model.parameters(), lr=1e-2), torch.randn(256, 16)
    y, seen = x.sum(1, keepdim=True), []
    before = model[0].weight.detach().clone()
    with around:
        for _ in range(21):
            with autocast(cache_enabled=cache):
                loss = (model(x) - y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
    fell, moved = ("fell by half" if seen[-1] < seen[0] / 2 else "stayed the same"), not torch.equal(before, model[0].weight)
    if fell != "fell by half":
        assert len(set(seen)) == 1, seen
    return f"loss {fell}, weights moved: {moved}"


print("a block per step:", losses(nullcontext()))
print("a block around the loop:", losses(autocast()))
print("a block with enabled=False around the loop:", losses(autocast(enabled=False)))
print("a block around the loop, cache_enabled=False:", losses(autocast(cache_enabled=False), cache=False))

model, x = nn.Linear(16, 4), torch.ones(1, 16)
checkpoints = [{"weight": torch.full((4, 16), value), "bias": torch.zeros(4)} for value in (1.0, 2.0, 3.0)]
for around in (nullcontext, autocast):
    scores = []
    with torch.no_grad(), around():
        for checkpoint in checkpoints:
            model.load_state_dict(checkpoint)
            with autocast():
                scores.append(model(x)[0, 0].item())
    print("three checkpoints under no_grad,", "one block:" if around is autocast else "a block each:", scores)
PROGRAM
OMP_NUM_THREADS=1 venv/bin/python -W ignore blocks.py | tee seen
diff seen - <<'EXPECTED' || { echo "changed: see the lines above"; exit 1; }
a block per step: loss fell by half, weights moved: True
a block around the loop: loss stayed the same, weights moved: True
a block with enabled=False around the loop: loss stayed the same, weights moved: True
a block around the loop, cache_enabled=False: loss fell by half, weights moved: True
three checkpoints under no_grad, a block each: [16.0, 32.0, 48.0]
three checkpoints under no_grad, one block: [16.0, 16.0, 16.0]
EXPECTED
