#!/bin/bash
# torch's get_optimizer_state_dict and get_state_dict, called before training, count a step: every update of the run that follows is another.
#
# Seen with torch 2.13.0 on a CPU, Linux x86-64. Of an optimizer without state they call step() with gradients of zero and a learning rate of 0, and
# leave what that did: AdamW starts at step 2 with moments of zero, its first update a quarter too small; RAdam's is half, and Rprop keeps the 0 as
# its step size and stays at 1e-6. So a run that writes a checkpoint before its first step, or logs its state's size, is not the run that does not,
# bit for bit and seed for seed. Loading a checkpoint next undoes it. A comment in the source names loading; the docstrings name no effect on the
# optimizer. `msamp.initialize`'s optimizers have their state from the start, and are left alone.
#
# Exit code 0: as described; 1: the behaviour has changed. It needs a minute, and gigabytes where pip has no build of torch for CPUs.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet "${TORCH:-torch==2.13.0}" numpy==2.4.6
cat > getters.py <<'PROGRAM'
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict


def updates(kind: str, getter=None) -> tuple[list[float], float]:
    """Largest change of a weight in each of the first three steps, in learning rates, and the step that the state counts."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=1e-2)
    if getter is not None:
        getter(model, optimizer)
    changes = []
    for _ in range(3):
        before = model.weight.detach().clone()
        model(torch.ones(2, 8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        changes.append(round(float((model.weight - before).abs().max()) / 1e-2, 2))
    return changes, float(optimizer.state[model.weight].get("step", 3))


for kind in ("SGD", "AdamW", "NAdam", "RAdam", "Rprop"):
    for name, getter in (("alone", None), ("after get_optimizer_state_dict", get_optimizer_state_dict), ("after get_state_dict", get_state_dict)):
        changes, step = updates(kind, getter)
        print(f"{kind} {name}: updates {changes} learning rates, {step:.0f} steps counted of 3")
PROGRAM
venv/bin/python -W ignore getters.py 2> log | tee seen || { cat log; exit 1; }
diff seen - <<'EXPECTED' || { echo "changed: see the lines above"; exit 1; }
SGD alone: updates [3.45, 2.21, 1.41] learning rates, 3 steps counted of 3
SGD after get_optimizer_state_dict: updates [3.45, 2.21, 1.41] learning rates, 3 steps counted of 3
SGD after get_state_dict: updates [3.45, 2.21, 1.41] learning rates, 3 steps counted of 3
AdamW alone: updates [1.0, 1.0, 0.99] learning rates, 3 steps counted of 3
AdamW after get_optimizer_state_dict: updates [0.75, 0.86, 0.9] learning rates, 4 steps counted of 3
AdamW after get_state_dict: updates [0.75, 0.86, 0.9] learning rates, 4 steps counted of 3
NAdam alone: updates [1.06, 0.74, 0.67] learning rates, 3 steps counted of 3
NAdam after get_optimizer_state_dict: updates [1.04, 0.81, 0.73] learning rates, 4 steps counted of 3
NAdam after get_state_dict: updates [1.04, 0.81, 0.73] learning rates, 4 steps counted of 3
RAdam alone: updates [3.45, 2.8, 2.21] learning rates, 3 steps counted of 3
RAdam after get_optimizer_state_dict: updates [1.82, 2.18, 2.13] learning rates, 4 steps counted of 3
RAdam after get_state_dict: updates [1.82, 2.18, 2.13] learning rates, 4 steps counted of 3
Rprop alone: updates [1.0, 1.2, 1.44] learning rates, 3 steps counted of 3
Rprop after get_optimizer_state_dict: updates [0.0, 0.0, 0.0] learning rates, 4 steps counted of 3
Rprop after get_state_dict: updates [0.0, 0.0, 0.0] learning rates, 4 steps counted of 3
EXPECTED
