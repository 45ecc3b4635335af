#!/bin/bash
# torch.rand in BF16 is exactly 0 once in 512 numbers, FP16's once in 4,096: what rounds to 1 is made 0, the largest numbers become the smallest.
#
# Seen with torch 2.13.0 on a CPU, Linux x86-64, eager mode; torch.compile gives 1 instead (compiled_rand_in_bf16_is_one.sh). To keep the documented
# [0, 1), numbers that round to the upper end are set to the lower one, in uniform_ of any bounds as well. So `torch.rand_like(x) < 0.001` is true
# three times as often as it says, -log(u) is infinite twice in a thousand, and Gumbel noise, -log(-log(u)), is -inf where it should be largest:
# sampling 4,096 tokens with it takes the 400 likeliest in 95 % of draws, where 63 % is right. nn.Linear with dtype=torch.bfloat16, or built under
# that default dtype, has 0.2 % of its weights at the lower bound, which shifts their mean. pytorch/pytorch#96947 is about the 1s that CUDA
# returned; no issue was found about the zeros. Nothing is reported. torch.randn, exponential_ and multinomial are right. Right: draw in FP32, cast.
#
# Exit code 0: as described; 1: the behaviour has changed. It needs a minute, and gigabytes where pip has no build of torch for CPUs.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet "${TORCH:-torch==2.13.0}" numpy==2.4.6
cat > rand.py <<'PROGRAM'
import torch

for dtype in (torch.float32, torch.bfloat16, torch.float16):
    torch.manual_seed(0)
    u = torch.rand(1 << 24, dtype=dtype)
    zeros, rare = 1e4 * float((u == 0).double().mean()), 1e4 * float((u < 0.001).double().mean())
    print(f"{str(dtype)[6:]}: rand is 0 in {zeros:.0f} of 10,000, below 0.001 in {rare:.0f}, 1 in {int((u == 1).sum())}, mean {u.double().mean():.3f}")
    lower = 1e4 * float((torch.empty(1 << 24, dtype=dtype).uniform_(-1, 3) == -1).double().mean())
    print(f"{str(dtype)[6:]}: uniform_(-1, 3) is -1 in {lower:.0f} of 10,000")
    weight = torch.nn.Linear(4096, 4096, bias=False, dtype=dtype).weight.detach().double()
    bound = 4096**-0.5
    least = 100 * float((weight <= -0.9999 * bound).double().mean())
    print(f"{str(dtype)[6:]}: Linear has mean {abs(weight.mean()) / bound:.3f} of its bound, {least:.1f} % at its lower bound")
    p = torch.softmax(-torch.arange(4096, dtype=torch.float64) / 400, 0)  # p from 2.5e-3 down to 9e-8
    noise = -torch.log(-torch.log(torch.rand(20_000, 4096, dtype=dtype).float()))
    drawn = (p.log().float() + noise).argmax(1)
    least = 1e4 * float((noise == -torch.inf).double().mean())
    print(f"{str(dtype)[6:]}: Gumbel noise is -inf in {least:.0f} of 10,000, and draws")
    for first, last in ((0, 400), (400, 1200), (1200, 4096)):
        seen = float(((drawn >= first) & (drawn < last)).double().mean())
        print(f"    tokens {first} to {last}: {100 * seen:.0f} % of samples, {100 * float(p[first:last].sum()):.0f} % right")
PROGRAM
OMP_NUM_THREADS=1 venv/bin/python -W ignore rand.py 2> log | tee seen || { cat log; exit 1; }
diff seen - <<'EXPECTED' || { echo "changed: see the lines above"; exit 1; }
float32: rand is 0 in 0 of 10,000, below 0.001 in 10, 1 in 0, mean 0.500
float32: uniform_(-1, 3) is -1 in 0 of 10,000
float32: Linear has mean 0.000 of its bound, 0.0 % at its lower bound
float32: Gumbel noise is -inf in 0 of 10,000, and draws
    tokens 0 to 400: 63 % of samples, 63 % right
    tokens 400 to 1200: 32 % of samples, 32 % right
    tokens 1200 to 4096: 5 % of samples, 5 % right
bfloat16: rand is 0 in 20 of 10,000, below 0.001 in 29, 1 in 0, mean 0.498
bfloat16: uniform_(-1, 3) is -1 in 24 of 10,000
bfloat16: Linear has mean 0.002 of its bound, 0.2 % at its lower bound
bfloat16: Gumbel noise is -inf in 20 of 10,000, and draws
    tokens 0 to 400: 95 % of samples, 63 % right
    tokens 400 to 1200: 5 % of samples, 32 % right
    tokens 1200 to 4096: 0 % of samples, 5 % right
float16: rand is 0 in 2 of 10,000, below 0.001 in 12, 1 in 0, mean 0.500
float16: uniform_(-1, 3) is -1 in 3 of 10,000
float16: Linear has mean 0.000 of its bound, 0.0 % at its lower bound
float16: Gumbel noise is -inf in 2 of 10,000, and draws
    tokens 0 to 400: 74 % of samples, 63 % right
    tokens 400 to 1200: 25 % of samples, 32 % right
    tokens 1200 to 4096: 0 % of samples, 5 % right
EXPECTED
