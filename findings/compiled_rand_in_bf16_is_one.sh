#!/bin/bash
# Compiled, torch.rand in BF16 or FP16 returns 1.0, once in 512 or 4,096 numbers; its documentation says [0, 1), and eager mode keeps that.
#
# Seen with torch 2.13.0, backend inductor, on a CPU, Linux x86-64. The number is made in FP32 and rounded to nearest, which makes 1 of everything
# above 1 - 2^-9. So `index[(u * n).long()]` of a stored u is one past the end, a time or a noise level drawn from [0, 1) reaches its end, and
# -log(1 - u) is infinite, 2,000 times in a million. Within one fused kernel the unrounded number is used, so that it shows only where u is written
# to memory, here because it is returned or saved for backward. Nothing is reported. Right: draw in FP32.
#
# Exit code 0: as described; 1: the behaviour has changed. It needs a C++ compiler and a minute, and gigabytes where pip has no torch for CPUs.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet "${TORCH:-torch==2.13.0}" numpy==2.4.6
cat > uniform.py <<'PROGRAM'
import torch


def drawn(x: torch.Tensor) -> torch.Tensor:
    return torch.rand_like(x)


def exponential(x: torch.Tensor) -> torch.Tensor:
    u = torch.rand_like(x)
    torch._dynamo.graph_break()
    return -torch.log1p(-u)


for dtype in (torch.bfloat16, torch.float16):
    x = torch.zeros(4_000_000, dtype=dtype)
    for how in ("eager", "compiled"):
        torch.manual_seed(0)
        torch.compiler.reset()
        draw, log = (drawn, exponential) if how == "eager" else (torch.compile(drawn), torch.compile(exponential))
        u = draw(x)
        ones, infinite = int((u == 1).sum()), int(log(x).isinf().sum())
        share = f"about one in {2 ** round(torch.tensor(x.numel() / ones).log2().item()):,}" if ones else "none"
        print(f"{str(dtype)[6:]}, {how}: numbers equal to 1: {share}; (u * 10).long() reaches {(u.float() * 10).long().max()}; inf: {infinite > 0}")
PROGRAM
TORCHINDUCTOR_CACHE_DIR="$folder/cache" OMP_NUM_THREADS=1 venv/bin/python -W ignore uniform.py 2> log | tee seen || { cat log; exit 1; }
diff seen - <<'EXPECTED' || { echo "changed: see the lines above"; exit 1; }
bfloat16, eager: numbers equal to 1: none; (u * 10).long() reaches 9; inf: False
bfloat16, compiled: numbers equal to 1: about one in 512; (u * 10).long() reaches 10; inf: True
float16, eager: numbers equal to 1: none; (u * 10).long() reaches 9; inf: False
float16, compiled: numbers equal to 1: about one in 4,096; (u * 10).long() reaches 10; inf: True
EXPECTED
