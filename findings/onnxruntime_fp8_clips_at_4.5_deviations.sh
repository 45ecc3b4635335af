#!/bin/bash
# onnxruntime's FP8 quantization clips weights and activations at 4.5 standard deviations: an outlier of 0.4 among weights of 0.02 comes back as 0.09.
#
# Seen with onnxruntime 1.32.0 and onnx 1.20.0 on a CPU, Linux x86-64: quantize_static with QuantType.QFLOAT8E4M3FN and CalibrationMethod.Distribution,
# which is the only one allowed for FP8. A careful engineer expects a scale of maximum / 448, as in torchao and as onnxruntime's own INT8 does it. The
# scale is the deviation of the tensor over the deviation of all E4M3 codes, 100.06, whatever the maximum; QuantizeLinear saturates, and what is above 448
# scales is lost. FP8 has room for outliers, unlike INT8, which is a reason to take it for transformers with their outliers of 20 deviations and more; here
# INT8 keeps them and FP8 does not. Nothing is reported. A docstring in the source says that both are taken for Gaussian. Pull request 29350 corrected the
# deviation of the codes (in 1.32.0), not the rule; no issue about clipping was found.
#
# Exit code 0: as described; 1: the behaviour has changed. It needs a minute.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet "${ONNXRUNTIME:-onnxruntime==1.32.0}" onnx==1.20.0 ml_dtypes==0.6.0 numpy==2.4.6
cat > quantize.py <<'PROGRAM'
import ml_dtypes
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, QuantFormat, QuantType, quantize_static

drawn = np.random.default_rng(0)
weight = (drawn.normal(size=(256, 256)) * 0.02).astype(np.float32)
weight[3, 5] = 0.4
x = drawn.normal(size=(256, 256)).astype(np.float32)
x[:, 7] *= 20


class Data(CalibrationDataReader):
    def __init__(self):
        self.batches = iter([{"x": x}])

    def get_next(self):
        return next(self.batches, None)


infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, 256]) for name in ("x", "y")]
graph = helper.make_graph([helper.make_node("MatMul", ["x", "weight"], ["y"])], "layer", infos[:1], infos[1:], [numpy_helper.from_array(weight, "weight")])
onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), "layer.onnx")
seen = open("seen", "w")
for kind, method in ((QuantType.QFLOAT8E4M3FN, CalibrationMethod.Distribution), (QuantType.QInt8, CalibrationMethod.MinMax)):
    options = {"quant_format": QuantFormat.QDQ, "weight_type": kind, "activation_type": kind, "calibrate_method": method}
    quantize_static("layer.onnx", "quantized.onnx", Data(), **options)
    tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load("quantized.onnx").graph.initializer}
    back = tensors["weight_quantized"].astype(np.float32) * tensors["weight_scale"]
    top = 448 if kind == QuantType.QFLOAT8E4M3FN else 127
    y = onnxruntime.InferenceSession("quantized.onnx", providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
    error = np.linalg.norm(y - x @ weight) / np.linalg.norm(x @ weight)
    largest = f"the largest x, {abs(x).max():.0f}, is at most {top * tensors['x_scale']:.1f}"
    print(f"{kind}: weight 0.4 is {back[3, 5]:.3f}; {largest}; y is {100 * error:.0f} % off", file=seen)


def fp8(array, scale):
    return (array / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale


y = fp8(x, abs(x).max() / 448) @ fp8(weight, 0.4 / 448)
print(f"FP8 with scales of maximum / 448: y is {100 * np.linalg.norm(y - x @ weight) / np.linalg.norm(x @ weight):.0f} % off", file=seen)
PROGRAM
venv/bin/python -W ignore quantize.py > log 2>&1 || { cat log; exit 1; }
cat seen
diff seen - <<'EXPECTED' || { echo "changed: see the lines above"; exit 1; }
QFLOAT8E4M3FN: weight 0.4 is 0.090; the largest x, 75, is at most 7.2; y is 59 % off
QInt8: weight 0.4 is 0.400; the largest x, 75, is at most 72.6; y is 11 % off
FP8 with scales of maximum / 448: y is 4 % off
EXPECTED
