#!/bin/bash
# ONNX's reference evaluator adds BF16 in BF16: Softmax of 4,096 equal logits sums to 16, and LayerNormalization's output has mean 1.77.
#
# Seen with onnx 1.23.2, ml_dtypes 0.6.0 and numpy 2.4.6 on Linux x86-64. NumPy adds ml_dtypes' numbers one after another, so that sums of ones stop
# at 256: Softmax, LogSoftmax, ReduceSum, ReduceMean, GlobalAveragePool and the norms are wrong from a few hundred elements on. For
# LayerNormalization and RMSNormalization the specification says stash_type = FLOAT, the default: statistics in FP32. FP16 is right, and so are MatMul
# and all sums in FP32. Nothing is reported. The evaluator defines what backends are compared with, and onnxruntime's CPU provider has none of these
# operators in BF16 to compare it with.
#
# Exit code 0: as described; 1: the behaviour has changed. It needs half a minute.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet "${ONNX:-onnx==1.23.2}" ml_dtypes==0.6.0 numpy==2.4.6
cat > evaluated.py <<'PROGRAM'
import ml_dtypes
import numpy as np
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

rng = np.random.default_rng(0)
ones, normal = np.ones((1, 4096)), rng.normal(size=(1, 4096))


def evaluated(operator: str, inputs: list[np.ndarray], dtype: int) -> np.ndarray:
    names = [f"x{i}" for i in range(len(inputs))]
    described = [helper.make_tensor_value_info(name, dtype, x.shape) for name, x in zip(names, inputs, strict=True)]
    graph = helper.make_graph([helper.make_node(operator, names, ["y"])], "g", described, [helper.make_tensor_value_info("y", dtype, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
    return ReferenceEvaluator(model).run(None, dict(zip(names, inputs, strict=True)))[0].astype(np.float64)


for dtype, code in (
    (np.float32, TensorProto.FLOAT),
    (np.float16, TensorProto.FLOAT16),
    (ml_dtypes.bfloat16, TensorProto.BFLOAT16),
):
    x, y, weight = ones.astype(dtype), normal.astype(dtype), np.ones(4096, dtype)
    total, mean = evaluated("Softmax", [x], code).sum(), evaluated("ReduceMean", [x], code).item()
    layer, rms = evaluated("LayerNormalization", [y + dtype(3), weight], code), evaluated("RMSNormalization", [y, weight], code)
    print(f"{np.dtype(dtype).name}: Softmax sums to {total:.2f}, the mean of ones is {mean:.3f},", end=" ")
    print(f"LayerNormalization has mean {abs(layer.mean()):.2f} and RMS {(layer**2).mean() ** 0.5:.2f}, RMSNormalization has RMS {(rms**2).mean() ** 0.5:.2f}")
PROGRAM
venv/bin/python -W ignore evaluated.py 2> log | tee seen || { cat log; exit 1; }
diff seen - <<'EXPECTED' || { echo "changed: see the lines above"; exit 1; }
float32: Softmax sums to 1.00, the mean of ones is 1.000, LayerNormalization has mean 0.00 and RMS 1.00, RMSNormalization has RMS 1.00
float16: Softmax sums to 1.00, the mean of ones is 1.000, LayerNormalization has mean 0.00 and RMS 1.00, RMSNormalization has RMS 1.00
bfloat16: Softmax sums to 16.00, the mean of ones is 0.062, LayerNormalization has mean 1.75 and RMS 1.89, RMSNormalization has RMS 1.42
EXPECTED
