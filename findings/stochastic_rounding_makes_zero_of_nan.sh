#!/bin/bash
# Stochastic rounding to BF16 in torchao, heavyball, pytorch-optimizer and adv_optm makes -0.0 of the NaN that NVIDIA's GPUs produce.
#
# Seen with torchao 0.18.0, heavyball 3.2.1, pytorch-optimizer 4.1.0, adv-optm 2.5.16 and torch 2.13.0 on a CPU, Linux x86-64. All carry from the
# lower 16 bits of FP32 into the upper by chance. 0x7fffffff, which FP32 arithmetic on NVIDIA's GPUs returns for every NaN, runs over into the sign
# and becomes -0.0 (65,535 times in 65,536). Once a gradient or a moment is NaN there, a step leaves BF16 weights of zero: outputs are finite, the
# loss is that of guessing, no check for NaN in weights, activations or loss sees it, and the zeros are saved. A CPU's NaN is 0x7fc00000 or 0xffc00000
# and survives, so that tests there pass; here moments get a GPU's bits, nothing ran on one. Nothing is reported. Right: NaN where the value is not
# finite, as in `msamp`'s stochastic rounding, or a check of the gradients before the step.
#
# Exit code 0: as described; 1: the behaviour has changed. It needs a C++ compiler and minutes, and gigabytes where pip has no torch for CPUs.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet "${TORCH:-torch==2.13.0}" "${TORCHAO:-torchao==0.18.0}" "${HEAVYBALL:-heavyball==3.2.1}" \
    "${PYTORCH_OPTIMIZER:-pytorch-optimizer==4.1.0}" "${ADV_OPTM:-adv-optm==2.5.16}" numpy==2.4.6 packaging==25.0
cat > rounded.py <<'PROGRAM'
import heavyball
import heavyball.utils
import torch
from adv_optm.util import param_update
from pytorch_optimizer.optimizer.utils.precision import copy_stochastic
from torchao.optim.quant_utils import _fp32_to_bf16_sr


def copied(copy, x: torch.Tensor) -> torch.Tensor:
    """What `copy(target, source)` leaves in a BF16 tensor."""
    target = torch.ones(x.shape, dtype=torch.bfloat16)
    copy(target, x)
    return target


functions = {
    "torchao, bf16_stochastic_round=True": _fp32_to_bf16_sr,
    "heavyball, BF16 weights": lambda x: heavyball.utils.stochastic_round_(torch.ones(x.shape, dtype=torch.bfloat16), x),
    "pytorch-optimizer, copy_stochastic": lambda x: copied(copy_stochastic, x),
    "adv_optm, BF16 weights": lambda x: copied(param_update.copy_stochastic_, x),
}
for name, bits in (("a GPU's NaN", 0x7FFFFFFF), ("the same with a sign", -1), ("a CPU's NaN", 0x7FC00000)):
    x = torch.full((65536,), bits, dtype=torch.int32).view(torch.float32)
    for library, function in functions.items():
        torch.manual_seed(0)
        rounded = function(x)
        zeros, signs = float((rounded == 0).float().mean()), float(rounded[rounded == 0].signbit().float().mean())
        kind = "-0.0" if signs == 1 else "0.0"
        print(f"{name}, {library}: {f'{kind} in {zeros:.1%}' if zeros else f'NaN in {float(rounded.isnan().float().mean()):.1%}'}")

torch.manual_seed(0)
weight = torch.nn.Parameter(torch.randn(64, 64).bfloat16())
optimizer = heavyball.AdamW([weight], lr=1e-3)
for _ in range(2):
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    print(f"heavyball.AdamW, a step: {int((weight == 0).sum())} weights of 4,096 are 0, {int(weight.isnan().sum())} are NaN")
    for state in optimizer.state.values():
        moments = [x for group in state.values() for x in group.values() if isinstance(x, torch.Tensor) and x.shape == weight.shape]
        for moment in moments:
            moment.view(torch.int32).fill_(0x7FFFFFFF)  # as a GPU writes it after a NaN gradient
PROGRAM
TORCHINDUCTOR_CACHE_DIR="$folder/cache" OMP_NUM_THREADS=1 venv/bin/python -W ignore rounded.py 2> log | tee seen || { cat log; exit 1; }
diff seen - <<'EXPECTED' || { echo "changed: see the lines above"; exit 1; }
a GPU's NaN, torchao, bf16_stochastic_round=True: -0.0 in 100.0%
a GPU's NaN, heavyball, BF16 weights: -0.0 in 100.0%
a GPU's NaN, pytorch-optimizer, copy_stochastic: -0.0 in 100.0%
a GPU's NaN, adv_optm, BF16 weights: -0.0 in 100.0%
the same with a sign, torchao, bf16_stochastic_round=True: 0.0 in 100.0%
the same with a sign, heavyball, BF16 weights: 0.0 in 100.0%
the same with a sign, pytorch-optimizer, copy_stochastic: 0.0 in 100.0%
the same with a sign, adv_optm, BF16 weights: 0.0 in 100.0%
a CPU's NaN, torchao, bf16_stochastic_round=True: NaN in 100.0%
a CPU's NaN, heavyball, BF16 weights: NaN in 100.0%
a CPU's NaN, pytorch-optimizer, copy_stochastic: NaN in 100.0%
a CPU's NaN, adv_optm, BF16 weights: NaN in 100.0%
heavyball.AdamW, a step: 0 weights of 4,096 are 0, 0 are NaN
heavyball.AdamW, a step: 4096 weights of 4,096 are 0, 0 are NaN
EXPECTED
