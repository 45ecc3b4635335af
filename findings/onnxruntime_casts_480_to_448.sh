#!/bin/bash
# onnxruntime's Cast from FP32 to FLOAT8E4M3FN with saturate=0 returns 448 for 480 to 496, but NaN for 464.01 to 479.9 and above 496.
#
# Seen with onnxruntime 1.32.0, CPUExecutionProvider, Linux x86-64. ONNX's table of Cast says that without saturation what is out of range
# becomes NaN, and 448 is the largest number of E4M3FN. onnx's own evaluator (1.20.0) and ml_dtypes 0.6.0 return NaN for everything above 464.
# A number that a model overflows by 7 to 11 % therefore comes out finite, and looks like one that fits. saturate=1 is as described.
#
# Exit code 0: as described; 1: the behaviour has changed. It needs a minute.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet "${ONNXRUNTIME:-onnxruntime==1.32.0}" onnx==1.20.0 ml_dtypes==0.6.0 numpy==2.4.6
cat > cast.py <<'PROGRAM'
import ml_dtypes
import numpy as np
import onnxruntime
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

x = np.array([448, 464, 464.25, 479.75, 480, 495.75, 496, 512, -488], np.float32)
E4M3 = TensorProto.FLOAT8E4M3FN
nodes = [helper.make_node("Cast", ["x"], ["y"], to=E4M3, saturate=0), helper.make_node("Cast", ["y"], ["z"], to=TensorProto.FLOAT)]
graph = helper.make_graph(
    nodes, "cast", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None])], [helper.make_tensor_value_info("z", TensorProto.FLOAT, [None])]
)
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
print("x", x.tolist())
print("onnxruntime", session.run(None, {"x": x})[0].tolist())
print("onnx", ReferenceEvaluator(model).run(None, {"x": x})[0].tolist())
print("ml_dtypes", x.astype(ml_dtypes.float8_e4m3fn).astype(np.float32).tolist())
PROGRAM
venv/bin/python -W ignore cast.py | tee seen
diff seen - <<'EXPECTED' || { echo "changed: see the lines above"; exit 1; }
x [448.0, 464.0, 464.25, 479.75, 480.0, 495.75, 496.0, 512.0, -488.0]
onnxruntime [448.0, 448.0, nan, nan, 448.0, 448.0, nan, nan, -448.0]
onnx [448.0, 448.0, nan, nan, nan, nan, nan, nan, nan]
ml_dtypes [448.0, 448.0, nan, nan, nan, nan, nan, nan, nan]
EXPECTED
