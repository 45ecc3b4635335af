#!/bin/bash
# An exponential average of BF16 weights (torch's AveragedModel, torch-ema, ema-pytorch) stays where it started, or where its warm-up ended.
#
# Seen with torch 2.13.0, torch-ema 0.3 and ema-pytorch 0.8.3 on a CPU, Linux x86-64. Each copies the model in its own dtype and adds (1 - decay) (w -
# average) in it. Half a unit of BF16's last place is 0.2 to 0.4 % of a weight, so that at 0.999 a weight must differ from its average by two to four
# times itself before anything moves. Here weights drift from 1 to 1.5; what is evaluated and shipped under the name of an average is the
# initialization, or for ema-pytorch, whose decay starts small, the weights of its first steps. The average of equal weights (decay None) stops, too.
# Nothing is reported, and their pages do not name a dtype. Right: averages of a copy in FP32, such as `msamp.float_copy(model)`.
#
# Exit code 0: as described; 1: the behaviour has changed. It needs some minutes, and gigabytes where pip has no build of torch for CPUs.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet "${TORCH:-torch==2.13.0}" "${TORCH_EMA:-torch-ema==0.3}" "${EMA_PYTORCH:-ema-pytorch==0.8.3}" numpy==2.4.6
cat > averages.py <<'PROGRAM'
import torch
from ema_pytorch import EMA
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch_ema import ExponentialMovingAverage

STEPS = 10_000


class TorchEMA:
    """torch_ema with the interface of AveragedModel."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.average = model, ExponentialMovingAverage(model.parameters(), decay=0.999)

    def update_parameters(self, model: nn.Module) -> None:
        self.average.update()

    def parameters(self):
        return iter(self.average.shadow_params)


class PyTorchEMA(EMA):
    """ema_pytorch with the same interface."""

    def update_parameters(self, model: nn.Module) -> None:
        self.update()

    def parameters(self):
        return self.ema_model.parameters()


def averaged(create, dtype: torch.dtype) -> float:
    """The average of weights that drift from 1 to 1.5."""
    model = nn.Linear(8, 8, bias=False).to(dtype)
    nn.init.ones_(model.weight)
    average = create(model)
    for step in range(STEPS):
        nn.init.constant_(model.weight, 1 + 0.5 * step / STEPS)
        average.update_parameters(model)
    return float(next(iter(average.parameters()))[0, 0])


for name, create in {
    "torch AveragedModel, decay 0.999": lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999)),
    "torch AveragedModel, equal weights": AveragedModel,
    "torch_ema, decay 0.999": TorchEMA,
    "ema_pytorch at its defaults": PyTorchEMA,
    "ema_pytorch, decay 0.999": lambda model: PyTorchEMA(model, beta=0.999, update_every=1),
}.items():
    print(f"{name}: FP32 {averaged(create, torch.float32):.3f}, BF16 {averaged(create, torch.bfloat16):.3f}")
PROGRAM
OMP_NUM_THREADS=1 venv/bin/python -W ignore averages.py 2> log | tee seen || { cat log; exit 1; }
diff seen - <<'EXPECTED' || { echo "changed: see the lines above"; exit 1; }
torch AveragedModel, decay 0.999: FP32 1.450, BF16 1.000
torch AveragedModel, equal weights: FP32 1.250, BF16 1.000
torch_ema, decay 0.999: FP32 1.452, BF16 1.000
ema_pytorch at its defaults: FP32 1.330, BF16 1.008
ema_pytorch, decay 0.999: FP32 1.478, BF16 1.008
EXPECTED
