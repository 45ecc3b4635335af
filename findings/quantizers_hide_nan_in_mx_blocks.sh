#!/bin/bash
# A NaN among the weights of a block disappears in gguf's MXFP4 and in mlx's mxfp4, mxfp8 and nvfp4: the block becomes zeros, or all +-896.
#
# Seen with gguf 0.19.0 and mlx 0.32.4 (CPU) on Linux x86-64. A careful engineer expects NaN back, as OCP's MX has for a block whose scale is NaN,
# and as torchao 0.18.0's MXTensor, gguf's own Q8_0 and Q4_0, and bitsandbytes' NF4 return. Here one NaN, or one infinity, makes 16 or 32 weights
# zeros, and mxfp8 makes +-896 of them, whatever their size; mlx.core.to_fp8 of a NaN is 448. Nothing is reported: a model that has diverged, or a
# file that is damaged, is exported as one that computes. Check `isfinite` before.
#
# Exit code 0: as described; 1: the behaviour has changed. It needs a minute.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet "${GGUF:-gguf==0.19.0}" "${MLX:-mlx[cpu]==0.32.4}" numpy==2.4.6
cat > blocks.py <<'PROGRAM'
import gguf
import mlx.core as mx
import numpy as np
from gguf import quants

mx.set_default_device(mx.cpu)


def with_gguf(w: np.ndarray, kind: str) -> np.ndarray:
    kind = gguf.GGMLQuantizationType[kind]
    return quants.dequantize(quants.quantize(w, kind), kind)


def with_mlx(w: np.ndarray, mode: str) -> np.ndarray:
    options = {"group_size": 16 if mode == "nvfp4" else 32, "bits": 8 if mode == "mxfp8" else 4, "mode": mode}
    return np.array(mx.dequantize(*mx.quantize(mx.array(w), **options), **options).astype(mx.float32))


weights = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
for name, quantize, kind in (
    ("gguf", with_gguf, "Q8_0"),
    ("gguf", with_gguf, "MXFP4"),
    ("mlx", with_mlx, "mxfp4"),
    ("mlx", with_mlx, "mxfp8"),
    ("mlx", with_mlx, "nvfp4"),
):
    for bad in (np.nan, np.inf):
        w = weights.copy()
        w[0, 5] = bad
        block = quantize(w, kind)[0, :16]
        finite, sizes = bool(np.isfinite(block).all()), sorted(set(np.abs(block[np.isfinite(block)]).tolist()))
        made = f", made of {sizes}" if len(sizes) == 1 else ""
        print(f"{name} {kind}, one {bad} among numbers of size 1: block finite: {finite}{made}")
print("mlx.core.to_fp8 of nan, inf, -inf:", np.array(mx.from_fp8(mx.to_fp8(mx.array([np.nan, np.inf, -np.inf])), mx.float32)).tolist())
PROGRAM
OMP_NUM_THREADS=1 venv/bin/python -W ignore blocks.py 2> log | tee seen || { cat log; exit 1; }
diff seen - <<'EXPECTED' || { echo "changed: see the lines above"; exit 1; }
gguf Q8_0, one nan among numbers of size 1: block finite: False
gguf Q8_0, one inf among numbers of size 1: block finite: False
gguf MXFP4, one nan among numbers of size 1: block finite: True, made of [0.0]
gguf MXFP4, one inf among numbers of size 1: block finite: True, made of [0.0]
mlx mxfp4, one nan among numbers of size 1: block finite: True, made of [0.0]
mlx mxfp4, one inf among numbers of size 1: block finite: True, made of [0.0]
mlx mxfp8, one nan among numbers of size 1: block finite: True, made of [896.0]
mlx mxfp8, one inf among numbers of size 1: block finite: True, made of [896.0]
mlx nvfp4, one nan among numbers of size 1: block finite: True, made of [0.0]
mlx nvfp4, one inf among numbers of size 1: block finite: True, made of [0.0]
mlx.core.to_fp8 of nan, inf, -inf: [448.0, 448.0, -448.0]
EXPECTED
