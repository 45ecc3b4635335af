#!/bin/bash
# model.to(torch.bfloat16), as Lightning's "bf16-true" does, casts torchmetrics' sums to BF16: a mean of 2.5 is reported as 4, an MSE of 2.25 as 0.51.
#
# Seen with torchmetrics 1.9.0, lightning 2.6.6 and torch 2.13.0 on a CPU, Linux x86-64. torchmetrics' docstring says that "dtype conversion is
# guarded and will only happen through the special set_dtype method"; the guard looks for the names of half(), bfloat16() and the like, and not for
# to(dtype). Behind it a MeanMetric counts to 256, a sum of 2.5s to 1,024, and a loss over more batches, which a trainer stops or saves by, is made of
# these. Nothing is reported. Losses that self.log is given itself are right, counts of classification are integers, and a metric's own to(dtype) is
# the same as the model's. Right: metrics outside the module, or metric.set_dtype(torch.float32) after the cast.
#
# Exit code 0: as described; 1: the behaviour has changed. It needs some minutes, and gigabytes where pip has no build of torch for CPUs.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet "${TORCH:-torch==2.13.0}" "${TORCHMETRICS:-torchmetrics==1.9.0}" "${LIGHTNING:-lightning==2.6.6}" numpy==2.4.6
cat > metrics.py <<'PROGRAM'
import logging

import lightning
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def metrics() -> nn.ModuleDict:
    kinds = {"mean": torchmetrics.MeanMetric(), "mse": torchmetrics.MeanSquaredError(), "sum": torchmetrics.SumMetric()}
    return nn.ModuleDict(kinds)


def update(modules: nn.ModuleDict) -> None:
    modules["mean"].update(2.5)
    modules["mse"].update(torch.full((1,), 1.5), torch.zeros(1))
    modules["sum"].update(1.0)


def shown(name: str, results: dict[str, torch.Tensor]) -> None:
    print(f"{name}: " + ", ".join(f"{kind} {float(results[kind]):.2f}" for kind in ("mean", "mse", "sum")))


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.metrics = nn.Linear(4, 1), metrics()

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        update(self.metrics)
        self.log_dict(dict(self.metrics))
        self.log("loss", torch.tensor(2.5))


for cast in ("stays in FP32", "bfloat16()", "to(torch.bfloat16)"):
    model = nn.ModuleDict({"layer": nn.Linear(4, 1), "metrics": metrics()})
    if cast == "bfloat16()":
        model.bfloat16()
    elif cast == "to(torch.bfloat16)":
        model.to(torch.bfloat16)
    for _ in range(2000):
        update(model["metrics"])
    shown(f"model {cast}", {kind: metric.compute() for kind, metric in model["metrics"].items()})
for precision in ("32-true", "bf16-mixed", "bf16-true"):
    silent = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(accelerator="cpu", precision=precision, **silent)
    results = trainer.validate(Model(), DataLoader(TensorDataset(torch.zeros(2000, 4))), verbose=False)[0]
    shown(f"lightning, {precision}, loss {results['loss']:.2f}", results)
PROGRAM
venv/bin/python -W ignore metrics.py 2> log | tee seen || { cat log; exit 1; }
diff seen - <<'EXPECTED' || { echo "changed: see the lines above"; exit 1; }
model stays in FP32: mean 2.50, mse 2.25, sum 2000.00
model bfloat16(): mean 2.50, mse 2.25, sum 2000.00
model to(torch.bfloat16): mean 4.00, mse 0.51, sum 256.00
lightning, 32-true, loss 2.50: mean 2.50, mse 2.25, sum 2000.00
lightning, bf16-mixed, loss 2.50: mean 2.50, mse 2.25, sum 2000.00
lightning, bf16-true, loss 2.50: mean 4.00, mse 0.51, sum 256.00
EXPECTED
