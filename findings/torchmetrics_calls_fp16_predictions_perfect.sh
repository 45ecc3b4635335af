#!/bin/bash
# torchmetrics' R2Score and ExplainedVariance of FP16 tensors are 1.0, perfect, where -8.3 is right; SSIM of BF16 images is 0.8 where 0.5 is right.
#
# Seen with torchmetrics 1.9.0 and torch 2.13.0 on a CPU, Linux x86-64. Variances are differences of a mean square and a squared mean, which are
# taken in the dtype of the input, batch by batch; the FP32 sums that a metric keeps come after. In FP16 the sum of 1,024 squares of numbers about 10
# is infinite, and of 256 about 30; an error over infinity is 0. So R2Score and ExplainedVariance report 1.0 and RelativeSquaredError 0.0 whatever the
# model predicts, and the best checkpoint is chosen by that; r2_score is NaN. In BF16, R2Score is 1.0 and r2_score 0 at a mean of 100. FP32 targets
# save R2, not SSIM: of images with little contrast it is off by 0.3, and MS-SSIM is above 1 (identical images have 1). Nothing is reported.
# That R2 of FP32 fails so at means of 3e5 is Lightning-AI/torchmetrics#3077, open. Right: .float() before the metric.
#
# Exit code 0: as described; 1: the behaviour has changed. It needs a minute, and gigabytes where pip has no build of torch for CPUs.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet "${TORCH:-torch==2.13.0}" "${TORCHMETRICS:-torchmetrics==1.9.0}" numpy==2.4.6
cat > metrics.py <<'PROGRAM'
import torch
from torch import Tensor
from torchmetrics import ExplainedVariance, Metric, R2Score, RelativeSquaredError
from torchmetrics.functional import r2_score, structural_similarity_index_measure
from torchmetrics.image import MultiScaleStructuralSimilarityIndexMeasure, StructuralSimilarityIndexMeasure

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def over_batches(metric: Metric, predictions: Tensor, target: Tensor, size: int) -> float:
    for batch in zip(predictions.split(size), target.split(size), strict=True):
        metric.update(*batch)
    return float(metric.compute())


for mean, size, skill in ((10, 1024, 0.3), (10, 1024, 3.0), (30, 256, 0.3), (100, 256, 0.3)):
    torch.manual_seed(0)
    target = (mean + torch.randn(4096)).bfloat16()  # exact in every dtype here
    predictions = (target.float() + skill * torch.randn(4096)).bfloat16()
    for dtype in DTYPES:
        pair = predictions.to(dtype), target.to(dtype)
        metrics = (R2Score(), ExplainedVariance(), RelativeSquaredError())
        values = [f"{type(metric).__name__} {min(99.0, over_batches(metric, *pair, size)):.1f}" for metric in metrics]
        mixed = over_batches(R2Score(), pair[0], target.float(), size)
        values += [f"r2_score {float(r2_score(*pair)):.1f}", f"R2Score with FP32 targets {mixed:.1f}"]
        print(f"mean {mean}, batches of {size}, error {skill}, {str(dtype)[6:]}: {', '.join(values)}")

torch.manual_seed(0)
images = (0.7 + 0.1 * torch.rand(2, 3, 192, 192)).bfloat16()
noisy = (images.float() + 0.05 * torch.randn(images.shape)).bfloat16()
for dtype in DTYPES:
    pair = noisy.to(dtype), images.to(dtype)
    ssim = structural_similarity_index_measure(*pair, data_range=1.0)
    kept = over_batches(StructuralSimilarityIndexMeasure(data_range=1.0), *pair, 1)
    scales = over_batches(MultiScaleStructuralSimilarityIndexMeasure(data_range=1.0), *pair, 1)
    print(f"images, {str(dtype)[6:]}: SSIM {float(ssim):.1f}, its class {kept:.1f}, MS-SSIM {scales:.1f}")
PROGRAM
OMP_NUM_THREADS=1 venv/bin/python -W ignore metrics.py 2> log | tee seen || { cat log; exit 1; }
diff seen - <<'EXPECTED' || { echo "changed: see the lines above"; exit 1; }
mean 10, batches of 1024, error 0.3, float32: R2Score 0.9, ExplainedVariance 0.9, RelativeSquaredError 0.1, r2_score 0.9, R2Score with FP32 targets 0.9
mean 10, batches of 1024, error 0.3, bfloat16: R2Score 0.9, ExplainedVariance 0.9, RelativeSquaredError 0.1, r2_score 0.9, R2Score with FP32 targets 0.9
mean 10, batches of 1024, error 0.3, float16: R2Score 1.0, ExplainedVariance 1.0, RelativeSquaredError 0.0, r2_score nan, R2Score with FP32 targets 0.9
mean 10, batches of 1024, error 3.0, float32: R2Score -8.3, ExplainedVariance -8.3, RelativeSquaredError 9.3, r2_score -8.3, R2Score with FP32 targets -8.3
mean 10, batches of 1024, error 3.0, bfloat16: R2Score -6.7, ExplainedVariance -6.7, RelativeSquaredError 7.7, r2_score -8.2, R2Score with FP32 targets -8.3
mean 10, batches of 1024, error 3.0, float16: R2Score 1.0, ExplainedVariance 1.0, RelativeSquaredError 0.0, r2_score nan, R2Score with FP32 targets -8.3
mean 30, batches of 256, error 0.3, float32: R2Score 0.9, ExplainedVariance 0.9, RelativeSquaredError 0.1, r2_score 0.9, R2Score with FP32 targets 0.9
mean 30, batches of 256, error 0.3, bfloat16: R2Score 0.9, ExplainedVariance 0.9, RelativeSquaredError 0.1, r2_score 0.0, R2Score with FP32 targets 0.9
mean 30, batches of 256, error 0.3, float16: R2Score 1.0, ExplainedVariance 1.0, RelativeSquaredError 0.0, r2_score nan, R2Score with FP32 targets 0.9
mean 100, batches of 256, error 0.3, float32: R2Score 0.9, ExplainedVariance 0.9, RelativeSquaredError 0.1, r2_score 0.9, R2Score with FP32 targets 0.9
mean 100, batches of 256, error 0.3, bfloat16: R2Score 1.0, ExplainedVariance 1.0, RelativeSquaredError 99.0, r2_score 0.0, R2Score with FP32 targets 0.9
mean 100, batches of 256, error 0.3, float16: R2Score 1.0, ExplainedVariance 1.0, RelativeSquaredError 0.0, r2_score nan, R2Score with FP32 targets 0.9
images, float32: SSIM 0.5, its class 0.5, MS-SSIM 0.8
images, bfloat16: SSIM 0.8, its class 0.8, MS-SSIM 1.3
images, float16: SSIM 0.5, its class 0.5, MS-SSIM 0.9
EXPECTED
