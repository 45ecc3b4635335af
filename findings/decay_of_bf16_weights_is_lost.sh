#!/bin/bash
# Weight decay does nothing to BF16 weights as long as lr * weight_decay is below 1 / 512; optimizers with Kahan summation lose it as well.
#
# Seen with torch 2.13.0, torch-optimi 0.3.3, pytorch-optimizer 4.1.0 and lion-pytorch 0.2.5 on a CPU, Linux x86-64. All of them multiply the weight
# by 1 - lr * weight_decay in BF16, which returns the weight itself: half a unit of its last place is 0.2 to 0.4 %. Updates are lost where they are
# small; decay is lost for every weight and at every step. In FP32 the weights below lose 18 %. optimi, whose README says that its Kahan summation
# matches mixed precision, and pytorch-optimizer's StableAdamW sum updates in that way but multiply by the decay before. Nothing is reported, and
# torch's pages of AdamW, SGD and Muon do not mention it. Optimizers that round stochastically (torchao's, heavyball's) decay as they should; so do
# `msamp`'s O1 to O3, whose masters have more bits.
#
# Exit code 0: as described; 1: the behaviour has changed. It needs a C++ compiler and minutes, and gigabytes where pip has no torch for CPUs.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet "${TORCH:-torch==2.13.0}" "${OPTIMI:-torch-optimi==0.3.3}" "${PYTORCH_OPTIMIZER:-pytorch-optimizer==4.1.0}" \
    "${LION:-lion-pytorch==0.2.5}" "${TORCHAO:-torchao==0.18.0}" numpy==2.4.6 packaging==25.0
cat > decay.py <<'PROGRAM'
import lion_pytorch
import optimi
import pytorch_optimizer
import torch
import torchao.optim

LR, DECAY, STEPS = 1e-3, 0.1, 2000


def kept(create, dtype: torch.dtype) -> float:
    """The norm that is left of weights without a gradient."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(64, 64).to(dtype))
    before = weight.detach().float().norm()
    optimizer = create([weight], lr=LR, weight_decay=DECAY)
    for _ in range(STEPS):
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
    return float(weight.detach().float().norm() / before)


def optimi_kahan(weights, **options):
    return optimi.AdamW(weights, kahan_sum=True, **options)


def stable_kahan(weights, **options):
    return pytorch_optimizer.StableAdamW(weights, kahan_sum=True, **options)


def stochastic(weights, **options):
    return torchao.optim._AdamW(weights, bf16_stochastic_round=True, **options)


print(f"(1 - {LR} * {DECAY})^{STEPS} = {(1 - LR * DECAY) ** STEPS:.2f}")
for name, create in {
    "torch.optim.AdamW": torch.optim.AdamW,
    "torch.optim.SGD": torch.optim.SGD,
    "torch.optim.Muon": torch.optim.Muon,
    "lion_pytorch.Lion": lion_pytorch.Lion,
    "optimi.AdamW, kahan_sum=True": optimi_kahan,
    "pytorch_optimizer.StableAdamW, kahan_sum=True": stable_kahan,
    "torchao.optim._AdamW, bf16_stochastic_round=True": stochastic,
}.items():
    print(f"{name}: FP32 {kept(create, torch.float32):.2f}, BF16 {kept(create, torch.bfloat16):.2f}")
PROGRAM
TORCHINDUCTOR_CACHE_DIR="$folder/cache" OMP_NUM_THREADS=1 venv/bin/python -W ignore decay.py 2> log | tee seen || { cat log; exit 1; }
diff seen - <<'EXPECTED' || { echo "changed: see the lines above"; exit 1; }
(1 - 0.001 * 0.1)^2000 = 0.82
torch.optim.AdamW: FP32 0.82, BF16 1.00
torch.optim.SGD: FP32 0.82, BF16 1.00
torch.optim.Muon: FP32 0.82, BF16 1.00
lion_pytorch.Lion: FP32 0.82, BF16 1.00
optimi.AdamW, kahan_sum=True: FP32 0.82, BF16 1.00
pytorch_optimizer.StableAdamW, kahan_sum=True: FP32 0.82, BF16 1.00
torchao.optim._AdamW, bf16_stochastic_round=True: FP32 0.82, BF16 0.82
EXPECTED
