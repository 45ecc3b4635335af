#!/bin/bash
# The gradient of `x.to(torch.float8_e4m3fn).to(torch.float32)` is rounded to FP8: what is below 2^-10 becomes 0, what is above 448 becomes 448.
#
# Seen with torch 2.13.0 on a CPU, Linux x86-64, in eager mode, compiled and under torch.func. The two casts emulate FP8 in the forward pass, and
# nothing else is expected of them: their backward casts too, without a scale. Gradients of a mean over a batch are mostly below 2^-10, so that a
# layer with such a weight gets no gradient and stays as it was, without a message. E5M2 keeps more range and two bits, and BF16 casts round as well
# (not compiled, where they are removed). Right: `x + (cast - x).detach()`, or an autograd.Function, as in `msamp.numerics`; torch's documentation
# does not mention it.
#
# Exit code 0: as described; 1: the behaviour has changed. It needs a C++ compiler and a minute, and gigabytes where pip has no torch for CPUs.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet "${TORCH:-torch==2.13.0}" numpy==2.4.6
cat > gradients.py <<'PROGRAM'
import torch
from torch import Tensor, nn


def cast(x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    return x.to(dtype).to(x.dtype)


def straight(x: Tensor) -> Tensor:
    return x + (cast(x) - x).detach()


gradient = torch.tensor([1e-5, 1e-4, 1e-3, 0.7, 700.0])
for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
    x = torch.ones(5)
    found = torch.func.vjp(lambda x, dtype=dtype: cast(x, dtype), x)[1](gradient)[0]
    x.requires_grad_()
    cast(x, dtype).backward(gradient)
    assert torch.equal(x.grad, found)
    x.grad = None
    torch.compile(cast)(x, dtype).backward(gradient)
    assert torch.equal(x.grad, found)
    print(f"{str(dtype)[6:]}: gradients 1e-5, 1e-4, 1e-3, 0.7, 700 become", ", ".join(f"{g:.3g}" for g in found.tolist()))

torch.manual_seed(0)
x, labels = torch.randn(4096, 64) * 0.1, torch.randint(0, 1024, (4096,))  # 4,096 tokens, 1,024 kinds of them
for name, quantize in (("cast", cast), ("straight through", straight)):
    torch.manual_seed(1)
    head, losses = nn.Linear(64, 1024, bias=False), []
    optimizer, start = torch.optim.AdamW(head.parameters(), lr=1e-2, weight_decay=0.0), head.weight.detach().clone()
    for _ in range(50):
        losses.append(nn.functional.cross_entropy(x @ quantize(head.weight).T, labels))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    still = float((head.weight == start).float().mean())
    print(f"{name}: 50 steps move {100 * (1 - still):.0f} % of the weights; the loss falls by {(losses[0] - losses[-1]).item():.1f}")
PROGRAM
TORCHINDUCTOR_CACHE_DIR="$folder/cache" OMP_NUM_THREADS=1 venv/bin/python -W ignore gradients.py 2> log | tee seen || { cat log; exit 1; }
diff seen - <<'EXPECTED' || { echo "changed: see the lines above"; exit 1; }
float8_e4m3fn: gradients 1e-5, 1e-4, 1e-3, 0.7, 700 become 0, 0, 0.00195, 0.688, 448
float8_e5m2: gradients 1e-5, 1e-4, 1e-3, 0.7, 700 become 1.53e-05, 0.000107, 0.000977, 0.75, 640
cast: 50 steps move 0 % of the weights; the loss falls by 0.0
straight through: 50 steps move 100 % of the weights; the loss falls by 1.1
EXPECTED
