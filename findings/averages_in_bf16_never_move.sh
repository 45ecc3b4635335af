#!/bin/bash
# Moving averages of BF16 weights never move: with a decay of 0.999, five libraries' averages are the first weights, to the bit, after 3,000 steps.
#
# Seen with torch 2.13.0 (AveragedModel with get_ema_multi_avg_fn), ema-pytorch 0.8.3, diffusers 0.42.1 (EMAModel), pytorch-ignite 0.5.5 (EMAHandler),
# optax 0.2.8 (incremental_update) and jax 0.10.2 on a CPU, Linux x86-64. Each keeps the average in the dtype of the weights, and a step adds 0.001 of
# the difference, which is less than half a unit of a BF16 number's last place (0.2 to 0.4 %): weights that went from 1 to 2 leave the average at 1,
# where 1.95 is right. What is evaluated and saved as the better model is the one before training, and nothing is reported. FP16 stops at 1.46 to
# 1.51. Right: averages of an FP32 copy of the model, as `msamp.float_copy` makes.
#
# Exit code 0: as described; 1: the behaviour has changed. It needs some minutes, and gigabytes where pip has no build of torch for CPUs.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet "${TORCH:-torch==2.13.0}" "${EMA_PYTORCH:-ema-pytorch==0.8.3}" "${DIFFUSERS:-diffusers==0.42.1}" \
    "${IGNITE:-pytorch-ignite==0.5.5}" "${OPTAX:-optax==0.2.8}" jax==0.10.2 numpy==2.4.6
cat > averages.py <<'PROGRAM'
import jax
import optax
import torch
from diffusers.training_utils import EMAModel
from ema_pytorch import EMA
from ignite.engine import Engine
from ignite.handlers import EMAHandler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

DECAY, STEPS = 0.999, 3000


@torch.no_grad()
def averages(dtype: torch.dtype) -> dict[str, float]:
    """Return the averages of a weight that is 1 when the average begins, and 2 for STEPS steps."""
    model = torch.nn.Linear(8, 8, bias=False, dtype=dtype)
    model.weight.fill_(1.0)
    swa = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    swa.update_parameters(model)  # copies
    ema = EMA(model, beta=DECAY, update_after_step=-1_000_000, update_every=1)  # without a warm-up
    ema.update()  # copies
    diffusers = EMAModel(model.parameters(), decay=DECAY, min_decay=DECAY)
    diffusers.step(model.parameters())
    diffusers.step(model.parameters())
    handler = EMAHandler(model, momentum=1 - DECAY)
    engine = Engine(lambda engine, batch: None)
    handler.attach(engine)
    old, new = jax.numpy.full(8, 1.0, str(dtype)[6:]), jax.numpy.full(8, 2.0, str(dtype)[6:])
    model.weight.fill_(2.0)
    for _ in range(STEPS):
        swa.update_parameters(model)
        ema.update()
        diffusers.step(model.parameters())
        old = optax.incremental_update(new, old, 1 - DECAY)
    engine.run([0], max_epochs=STEPS)
    means = {"torch": swa.module.weight, "ema-pytorch": ema.ema_model.weight, "diffusers": diffusers.shadow_params[0], "ignite": handler.ema_model.weight}
    return {name: float(weight.float().mean()) for name, weight in means.items()} | {"optax": float(old.mean())}


for dtype in (torch.float32, torch.bfloat16, torch.float16):
    print(f"{str(dtype)[6:]}: " + ", ".join(f"{name} {mean:.2f}" for name, mean in averages(dtype).items()))
PROGRAM
OMP_NUM_THREADS=1 venv/bin/python -W ignore averages.py 2> log | tee seen || { cat log; exit 1; }
diff seen - <<'EXPECTED' || { echo "changed: see the lines above"; exit 1; }
float32: torch 1.95, ema-pytorch 1.95, diffusers 1.95, ignite 1.95, optax 1.95
bfloat16: torch 1.00, ema-pytorch 1.00, diffusers 1.00, ignite 1.00, optax 1.00
float16: torch 1.51, ema-pytorch 1.51, diffusers 1.51, ignite 1.46, optax 1.50
EXPECTED
