#!/bin/bash
# IREE's FP8 casts on a CPU make 0 of what rounds to the smallest normal number, 2^-6 in E4M3, and -480 of a negative NaN; E8M0 scales are halved.
#
# Seen with iree-base-compiler and iree-base-runtime 3.13.0 on Linux x86-64, target llvm-cpu, generic and host: arith.truncf and extf, which IREE emulates
# since CPUs lack them. A number between the largest subnormal number and 2^-6 that should round up to 2^-6 becomes 0 in E4M3FN, E4M3FNUZ, E5M2 and
# E5M2FNUZ: the carry into the exponent is lost. Of unscaled weights of deviation 0.02 these are 3 %; of weights that were scaled to 448, few. Code 0xff
# is read as -480, which E4M3FN does not have. To E8M0 the exponent is taken as it is, so that 7.99 is 4; ml_dtypes and XLA round it to 8. MLIR's issue
# 215295 asks which of both is meant; of the others no issue was found, and pull request 23119, which brought them, says round to nearest even.
#
# Exit code 0: as described; 1: the behaviour has changed. It needs a minute.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet "${COMPILER:-iree-base-compiler==3.13.0}" "${RUNTIME:-iree-base-runtime==3.13.0}" ml_dtypes==0.6.0 numpy==2.4.6
cat > casts.py <<'PROGRAM'
import iree.compiler
import iree.runtime
import ml_dtypes
import numpy as np


def cast(values, name, source, target):
    line = "affine_map<(d0)->(d0)>"
    return f"""
    %{name}_empty = tensor.empty() : tensor<{len(values)}x{target}>
    %{name} = linalg.generic {{indexing_maps = [{line}, {line}], iterator_types = ["parallel"]}}
        ins(%{name}_in : tensor<{len(values)}x{source}>) outs(%{name}_empty : tensor<{len(values)}x{target}>) {{
      ^bb0(%a: {source}, %b: {target}):
        %c = arith.{"truncf" if source == "f32" else "extf"} %a : {source} to {target}
        linalg.yield %c : {target}
    }} -> tensor<{len(values)}x{target}>"""


def there_and_back(values, kind):
    shape = f"tensor<{len(values)}x"
    text = f"""func.func @main(%down_in: {shape}f32>) -> {shape}f32> {{{cast(values, "down", "f32", kind)}
    %up_in = util.optimization_barrier %down : {shape}{kind}>{cast(values, "up", kind, "f32")}
    return %up : {shape}f32> }}"""
    flags = ["--iree-llvmcpu-target-cpu=generic"]
    binary = iree.compiler.compile_str(text, target_backends=["llvm-cpu"], extra_args=flags)
    context = iree.runtime.SystemContext(config=iree.runtime.Config("local-task"))
    context.add_vm_module(iree.runtime.VmModule.copy_buffer(context.instance, binary))
    return context.modules.module.main(np.array(values, np.float32)).to_host()


for kind, dtype, values in (
    ("f8E4M3FN", ml_dtypes.float8_e4m3fn, [0.0146, 0.0147, 0.015, 0.0156, 0.015625, -0.015, 470.0, -470.0]),
    ("f8E5M2", ml_dtypes.float8_e5m2, [5.3e-5, 5.4e-5, 6e-5, 6.1e-5, 2.0**-14, -6e-5, 1e9, -1e9]),
    ("f8E4M3FNUZ", ml_dtypes.float8_e4m3fnuz, [0.0073, 0.00735, 0.0078, 0.0078125, -0.0075]),
    ("f8E8M0FNU", ml_dtypes.float8_e8m0fnu, [1.0, 1.51, 2.0, 3.1, 7.99, 8.0]),
):
    right = np.array(values, np.float32).astype(dtype).astype(np.float32)
    show = lambda array: [float(f"{x:.3g}") for x in array]
    print(f"{kind}: {values} are {show(there_and_back(values, kind))}, in ml_dtypes {show(right)}")
weights = (np.random.default_rng(0).normal(size=65536) * 0.02).astype(np.float32)
lost = (there_and_back(weights.tolist(), "f8E4M3FN") == 0) & (weights.astype(ml_dtypes.float8_e4m3fn) != 0)
print(f"weights of deviation 0.02 that become 0 in E4M3 for it: {100 * lost.mean():.1f} %, the largest {abs(weights[lost]).max():.4f}")
PROGRAM
venv/bin/python -W ignore casts.py 2> log | tee seen || { cat log; exit 1; }
diff seen - <<'EXPECTED' || { echo "changed: see the lines above"; exit 1; }
f8E4M3FN: [0.0146, 0.0147, 0.015, 0.0156, 0.015625, -0.015, 470.0, -470.0] are [0.0137, 0.0, 0.0, 0.0, 0.0156, -0.0, nan, -480.0], in ml_dtypes [0.0137, 0.0156, 0.0156, 0.0156, 0.0156, -0.0156, nan, nan]
f8E5M2: [5.3e-05, 5.4e-05, 6e-05, 6.1e-05, 6.103515625e-05, -6e-05, 1000000000.0, -1000000000.0] are [4.58e-05, 0.0, 0.0, 0.0, 6.1e-05, -0.0, inf, -inf], in ml_dtypes [4.58e-05, 6.1e-05, 6.1e-05, 6.1e-05, 6.1e-05, -6.1e-05, inf, -inf]
f8E4M3FNUZ: [0.0073, 0.00735, 0.0078, 0.0078125, -0.0075] are [0.00684, 0.0, 0.0, 0.00781, 0.0], in ml_dtypes [0.00684, 0.00781, 0.00781, 0.00781, -0.00781]
f8E8M0FNU: [1.0, 1.51, 2.0, 3.1, 7.99, 8.0] are [1.0, 1.0, 2.0, 2.0, 4.0, 8.0], in ml_dtypes [1.0, 2.0, 2.0, 4.0, 8.0, 8.0]
weights of deviation 0.02 that become 0 in E4M3 for it: 2.9 %, the largest 0.0156
EXPECTED
