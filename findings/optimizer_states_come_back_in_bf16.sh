#!/bin/bash
# Optimizers that keep FP32 moments of BF16 weights get them back in BF16 from load_state_dict, and train on with BF16 moments.
#
# Seen with heavyball 3.2.1, came-pytorch 0.1.3 and torch 2.13.0 on a CPU, Linux x86-64. torch.optim.Optimizer.load_state_dict casts every
# floating-point state but `step` to the dtype of its parameter. The optimizers made their moments in FP32, on purpose, and after a resume compute
# what a run that was not stopped does not: moments lose 16 bits at once, and from then on their small increments (see
# adamw_in_bf16_never_forgets.sh). The file has them in FP32. Nothing is reported. Right: a load_state_dict of one's own that restores the dtypes,
# as `msamp`'s optimizers have. torch's documentation of load_state_dict does not name the cast.
#
# Exit code 0: as described; 1: the behaviour has changed. It needs a C++ compiler and minutes, and gigabytes where pip has no torch for CPUs.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet "${TORCH:-torch==2.13.0}" "${HEAVYBALL:-heavyball==3.2.1}" "${CAME:-came-pytorch==0.1.3}" numpy==2.4.6
cat > resumed.py <<'PROGRAM'
import heavyball
import torch
from came_pytorch import CAME


def dtypes(states: object) -> set[str]:
    """Of all matrices within."""
    if isinstance(states, torch.Tensor):
        return {str(states.dtype)[6:]} if states.ndim else set()
    items = states.values() if isinstance(states, dict) else states if isinstance(states, (list, tuple)) else ()
    return set().union(*map(dtypes, items))


def step(optimizer: torch.optim.Optimizer, weight: torch.Tensor, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight.grad = torch.randn(weight.shape, generator=generator).to(weight.dtype)
    torch.manual_seed(seed)
    optimizer.step()


for name, create in (("heavyball.AdamW", heavyball.AdamW), ("CAME", CAME), ("torch.optim.AdamW", torch.optim.AdamW)):
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(64, 32).bfloat16())
    optimizer = create([weight], lr=1e-2)
    for seed in range(5):
        step(optimizer, weight, seed)
    torch.save(optimizer.state_dict(), "states.pt")
    resumed = torch.nn.Parameter(weight.detach().clone())
    second = create([resumed], lr=1e-2)
    second.load_state_dict(torch.load("states.pt", weights_only=False))
    before, after = dtypes(optimizer.state_dict()["state"]), dtypes(second.state_dict()["state"])
    for seed in range(5, 25):
        step(optimizer, weight, seed)
        step(second, resumed, seed)
    equal = torch.equal(weight, resumed)
    print(f"{name}: moments {', '.join(sorted(before))}, resumed {', '.join(sorted(after))}; 20 steps on, equal weights: {equal}")
PROGRAM
TORCHINDUCTOR_CACHE_DIR="$folder/cache" OMP_NUM_THREADS=1 venv/bin/python -W ignore resumed.py 2> log | tee seen || { cat log; exit 1; }
diff seen - <<'EXPECTED' || { echo "changed: see the lines above"; exit 1; }
heavyball.AdamW: moments float32, resumed bfloat16; 20 steps on, equal weights: False
CAME: moments float32, resumed bfloat16; 20 steps on, equal weights: False
torch.optim.AdamW: moments bfloat16, resumed bfloat16; 20 steps on, equal weights: True
EXPECTED
