#!/bin/bash
# numcodecs.BitRound makes -0.0 of the NaN that NVIDIA's GPUs produce, and infinity of others; NumPy's own NaN survives.
#
# Seen with numcodecs 0.16.6 on Linux x86-64, FP32 and FP16, keepbits below the full number. BitRound(7) before a compressor is the usual way to
# keep BF16's precision in zarr and HDF5. It adds to the bits as if they were a number: 0x7fffffff, the canonical NaN of CUDA, runs over into the
# sign and becomes -0.0, and a NaN of a small payload, 0x7f800001, is rounded to infinity. Tests with numpy.nan (0x7fc00000) see nothing. A recorded
# gradient or activation that was NaN on the card is a zero in the file, without a message. FP32's largest number becomes infinite, too.
#
# Exit code 0: as described; 1: the behaviour has changed. It needs half a minute.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet "${NUMCODECS:-numcodecs==0.16.6}" numpy==2.4.6
cat > rounded.py <<'PROGRAM'
import numcodecs
import numpy as np

kinds = {
    "float32": [("NumPy's NaN", 0x7FC00000), ("CUDA's NaN", 0x7FFFFFFF), ("small payload", 0x7F800001), ("largest", 0x7F7FFFFF)],
    "float16": [("NumPy's NaN", 0x7E00), ("CUDA's NaN", 0x7FFF), ("small payload", 0x7C01), ("largest", 0x7BFF)],
}
for dtype, codes in kinds.items():
    x = np.array([code for _, code in codes], f"uint{8 * np.dtype(dtype).itemsize}").view(dtype)
    y = np.asarray(numcodecs.BitRound(7).encode(x.copy())).view(dtype)
    print(f"{dtype}:", ", ".join(f"{name} {before} -> {after}" for (name, _), before, after in zip(codes, x, y, strict=True)))
PROGRAM
venv/bin/python -W ignore rounded.py 2> log | tee seen || { cat log; exit 1; }
diff seen - <<'EXPECTED' || { echo "changed: see the lines above"; exit 1; }
float32: NumPy's NaN nan -> nan, CUDA's NaN nan -> -0.0, small payload nan -> inf, largest 3.4028234663852886e+38 -> inf
float16: NumPy's NaN nan -> nan, CUDA's NaN nan -> -0.0, small payload nan -> inf, largest 65504.0 -> inf
EXPECTED
